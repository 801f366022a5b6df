"""Compiled functions that a body reaches and does not call: nothing that they would read is guarded."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from tests.support.device import DEVICE

other: Any = types.ModuleType("users.other")
sys.modules |= {"users": types.ModuleType("users"), "users.other": other}  # Dynamo looks a function's module up by name
exec(  # noqa: S102 - a module of the user's
    "import torch\nSCALE = 1.0\n\ndef deep(x):\n    return x * SCALE\n\ndef work(x):\n    return deep(x) + 1\n",
    vars(other),
)


class Library:
    """A library's class with methods that are compiled, or excluded from compiling."""

    compiled = staticmethod(torch.compile(other.work, backend="eager"))

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def disabled(x: Tensor) -> Tensor:
        return other.work(x)  # type: ignore[no-any-return]


def test_a_compiled_function_that_does_not_run() -> None:
    run = capture(lambda x: x * 2 if hasattr(Library, "compiled") else x)
    x = torch.ones(3, device=DEVICE)
    for _ in range(4):
        assert torch.equal(run(x), x * 2)
    assert recordings(run).replays == 2
    before = recordings(run).replays
    other.SCALE = 3.0
    try:
        assert torch.equal(run(x), x * 2)
        assert recordings(run).replays == before + 1
    finally:
        other.SCALE = 1.0


def test_a_function_that_the_compiler_leaves_alone() -> None:
    run = capture(lambda x: Library.disabled(x) * 2)
    x = torch.ones(3, device=DEVICE)
    for _ in range(4):
        assert torch.equal(run(x), (x + 1) * 2)
    other.SCALE = 3.0
    try:
        for _ in range(3):
            assert torch.equal(run(x), (x * 3 + 1) * 2)
    finally:
        other.SCALE = 1.0
    assert recordings(run).replays >= 2


@pytest.mark.filterwarnings("ignore:CG201.*reads a tensor's value:capture.CaptureWarning")
def test_a_compiled_function_that_runs() -> None:
    """For another number torch compiles anew and passes the number as a tensor, which the compiled code reads: with a
    tensor on a GPU such calls are eager."""
    run = capture(lambda x: Library.compiled(x) * 2)
    x = torch.ones(3, device=DEVICE)
    for _ in range(5):
        assert torch.equal(run(x), (x + 1) * 2)
    replays = recordings(run).replays
    assert replays >= 2
    other.SCALE = 3.0
    try:
        for _ in range(3):
            assert torch.equal(run(x), (x * 3 + 1) * 2)
    finally:
        other.SCALE = 1.0
