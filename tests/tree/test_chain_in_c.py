"""Calls of a chain, whose outputs are arguments of the next one, are replayed without the library's Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor

import capture as library
from capture import capture, mark_step_begin
from capture.runtime import record

FOLDER = Path(library.__file__).parent


def chain_of(count: int) -> list[Callable[[Tensor], Tensor]]:
    def scaled(by: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.mul(x, by)

    return [capture(scaled(torch.full((8,), 1.0 + number))) for number in range(count)]


def python_calls(chain: list[Callable[[Tensor], Tensor]], x: Tensor) -> list[str]:
    """The library's Python functions that run in one pass, but for the wrappers that users call."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and FOLDER in Path(code.co_filename).parents and code.co_name != "wrapper":
            called.append(code.co_qualname)

    sys.setprofile(note)
    try:
        for link in chain:
            x = link(x)
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize("marked", [False, True])
def test_a_chain_takes_no_python(marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_OWNED", 0)
    chain, x = chain_of(8), torch.ones(8)
    for _ in range(8):
        if marked:
            mark_step_begin()
        y = x
        for link in chain:
            y = link(y)
        assert torch.equal(y, x * 40320)
    if marked:
        mark_step_begin()
    del y
    calls = python_calls(chain, x)
    assert not [name for name in calls if name.startswith("Tree.")]
