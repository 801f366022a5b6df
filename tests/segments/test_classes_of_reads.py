"""Code that asks for the class of a number that the host reads, and makes numbers of it, or copies it."""

from __future__ import annotations

import copy
import fractions
import pickle
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from tests.runtime.test_decisions import _every_body_pays  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
BODIES: dict[str, Callable[[Any], Any]] = {
    "mean": lambda a: statistics.mean([a, 1.0]),
    "median": lambda a: statistics.median([a, 1.0, 2.0]),
    "stdev": lambda a: statistics.stdev([a, 1.0, 2.5]),
    "type": lambda a: type(a)(3),
    "class": lambda a: a.__class__(2),
    "of no number": lambda a: type(a)(),
    "deepcopy": copy.deepcopy,
    "in a list": lambda a: copy.deepcopy([a]),
    "copy": copy.copy,
    "pickle": lambda a: pickle.loads(pickle.dumps(a)),  # noqa: S301
    "fraction": fractions.Fraction,
    "sum": lambda a: sum([a, 1]),
}


@pytest.mark.parametrize("kind", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", BODIES)
def test_a_class_is_asked_for(name: str, kind: torch.dtype) -> None:
    def body(x: Tensor, v: Tensor) -> Any:
        return x * 2, BODIES[name](v.item())

    captured = capture(body)
    for n in range(14):
        x, v = torch.ones(2), torch.tensor(n + 1.5).to(kind)
        assert repr(captured(x, v)) == repr(body(x, v))
    assert "CG905" not in [finding.code for finding in recordings(captured).findings]
