"""Explain: what would be recorded and why, or which line of yours is in the way. One eager run, nothing changes."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from capture import CaptureWarning, capture, explain, recordings, report


@capture
def clipped(x: Tensor, limit: float) -> Tensor:
    # Reads a tensor on the host; a recording would freeze the answer.
    if x.abs().max() > limit:
        x = x.clamp(-limit, limit)
    return x * 2


@capture
def clipped_on_device(x: Tensor, limit: float) -> Tensor:
    # The same numbers, and nothing for the host to decide.
    return x.clamp(-limit, limit) * 2


with torch.no_grad():
    x = torch.linspace(-2, 2, 9)
    before = explain(clipped)(x, 1.0)
    after = explain(clipped_on_device)(x, 1.0)
    print("before:", before.outcome, [finding.code for finding in before.findings_at_least("eager")])
    print("after: ", after.outcome, [finding.code for finding in after.findings_at_least("eager")])
    print(before)  # the table, the finding, your line, and what to do about it
    print(after)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # the same finding, said once when the call falls back
        same = [torch.equal(clipped(x, 1.0), clipped_on_device(x, 1.0)) for _ in range(4)]
    print("same numbers either way:", all(same))
    print("eager calls:", recordings(clipped).eager_calls, "against", recordings(clipped_on_device).eager_calls)
    print(report())
