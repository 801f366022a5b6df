"""How much of the library's Python a step of training runs for a captured block, once its recordings are found."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Literal

import pytest
import torch
from torch import nn

import capture as library
from capture import capture, config, mark_step_begin, recordings

FOLDERS = frozenset(str(Path(library.__file__).parent / name) for name in ("autograd", "runtime", "tree"))
"""Of what is the same for each engine."""
MOST = {"autograd": 27, "accumulate": 37}
"""Functions for a forward and a backward pass."""


def python_functions(model: nn.Sequential, x: torch.Tensor) -> list[str]:
    """The library's Python functions that run in a step."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and str(Path(code.co_filename).parent) in FOLDERS and not code.co_name.startswith("<"):
            called.append(code.co_qualname)

    mark_step_begin()
    sys.setprofile(note)
    try:
        for block in model:
            x = block(x)
        x.sum().backward()
    finally:
        sys.setprofile(None)
    model.zero_grad()
    return called


@pytest.mark.parametrize("gradients", ["autograd", "accumulate"])
def test_a_block_takes_few_functions(gradients: Literal["autograd", "accumulate"]) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4)])
    x = torch.randn(4, 8, requires_grad=True)
    for block in model:
        capture(block, gradients=gradients)
    with config.patch(drop_slow=False):  # else calls may be timed, on a loaded machine
        for _ in range(20):  # orders of accumulated gradients are looked at in the first steps
            python_functions(model, x)
        calls = min((python_functions(model, x) for _ in range(5)), key=len)
    assert len(calls) / len(model) <= MOST[gradients], calls
    assert all(recordings(block).eager_calls == 0 for block in model)
