"""Calls of a chain, whose outputs are arguments of the next one, are replayed without the library's Python."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capture import capture, mark_step_begin
from capture.runtime import record
from tests.support.python_calls import python_calls


def chain_of(count: int) -> list[Callable[[Tensor], Tensor]]:
    def scaled(by: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.mul(x, by)

    return [capture(scaled(torch.full((8,), 1.0 + number))) for number in range(count)]


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
    calls = python_calls(lambda: functools.reduce(lambda y, link: link(y), chain, x))
    assert not [name for name in calls if name.startswith("Tree.")]
