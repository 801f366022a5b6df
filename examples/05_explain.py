"""Explain: what would be recorded and why, or which line of yours is in the way. One eager run, nothing changes."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from capture import CaptureWarning, capture, explain, recordings, report


@capture
def scaled(x: Tensor) -> Tensor:
    # An array over the tensor's memory by DLPack: what is read there nobody sees, so a recording would freeze it.
    largest = float(np.from_dlpack(x.abs().cpu()).max())
    return x / largest


@capture
def scaled_on_device(x: Tensor) -> Tensor:
    # The same numbers, and nothing for the host to read.
    return x / x.abs().max()


with torch.no_grad():
    x = torch.linspace(-2, 2, 9)
    before = explain(scaled)(x)
    after = explain(scaled_on_device)(x)
    print("before:", before.outcome, [finding.code for finding in before.findings_at_least("eager")])
    print("after: ", after.outcome, [finding.code for finding in after.findings_at_least("eager")])
    print(before)  # the table, the finding, your line, and what to do about it
    print(after)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # the same finding, said once when the call falls back
        same = [torch.equal(scaled(x), scaled_on_device(x)) for _ in range(4)]
    print("same numbers either way:", all(same))
    print("eager calls:", recordings(scaled).eager_calls, "against", recordings(scaled_on_device).eager_calls)
    print(report())
    print("gained: calls that were eager are replays; why: `max()` of a tensor stays on the device, an array does not")
