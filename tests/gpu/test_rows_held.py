"""Rows 27 to 33 of the behaviour table: outputs held over steps. Rows elsewhere: see ``test_rows_memory.py``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from capture import capture, mark_step_begin, recordings
from tests.gpu.support import (
    DEVICE,
    counts,
    may_fall_back,
    needs_gpu,
    rand,
    same,
    storage_of,
)

pytestmark = [needs_gpu, may_fall_back]  # a path that goes on under held views may reach its limit


@capture
def f(x: Tensor) -> Tensor:
    return x * 2 - 0.5


@capture
def g(x: Tensor) -> Tensor:
    return torch.tanh(x) + 1


@capture
def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x + 1
    return y, y[1:], x * 10


@pytest.mark.parametrize("mark", [True, False], ids=["marked", "unmarked"])
def test_row_027_all_outputs_held_over_steps(mark: bool) -> None:
    """Outputs of all phases are held: none ever changes, none shares memory with another."""
    held = []
    for i in range(12):
        if mark:
            mark_step_begin()
        x = rand(33, seed=i)
        y = f(x)
        held.append((x, y, g(y)))
        for x, y, z in held:
            same((y, z), (x * 2 - 0.5, torch.tanh(x * 2 - 0.5) + 1))
    assert len({storage_of(output) for _, y, z in held for output in (y, z)}) == 24


def test_row_028_nothing_is_moved_for_dead_outputs() -> None:
    """Outputs dropped before the next step: the same memory at every replay, nothing evacuated or recorded."""
    at = set()
    for i in range(8):
        mark_step_begin()
        y = f(rand(64, seed=i))
        if i >= 2:
            at.add(y.data_ptr())
        del y
    assert len(at) == 1
    assert recordings(f).kept_outputs == 0
    assert counts(f) == (1, 1, 6, 0)


def test_row_029_aliased_outputs_stay_aliased() -> None:
    """Two outputs on one storage, held over steps: still one storage, with their offsets; writes show in both."""
    held = []
    for i in range(7):
        mark_step_begin()
        x = rand(8, seed=i)
        y, tail, apart = split(x)
        held.append((x, y, tail, apart))
        for x, y, tail, apart in held:
            same((y, tail, apart), (x + 1, (x + 1)[1:], x * 10))
            assert storage_of(y) == storage_of(tail) != storage_of(apart)
    for _, y, tail, _ in held:
        y.fill_(3.0)
        same(tail, torch.full((7,), 3.0, device=DEVICE))


@pytest.mark.parametrize("keep", ["tail", "view of the tail", "whole"])
def test_row_030_032_only_an_alias_is_held(keep: str) -> None:
    """One alias of an output, or a view the caller made, is all that is left of it: it keeps its values."""
    held = []
    for i in range(7):
        mark_step_begin()
        x = rand(8, seed=i)
        y, tail, _ = split(x)
        kept = {"tail": tail, "view of the tail": tail[2:].view(-1, 1), "whole": y}[keep]
        wanted = {"tail": (x + 1)[1:], "view of the tail": (x + 1)[3:].view(-1, 1), "whole": x + 1}
        held.append((wanted[keep], kept))
        del y, tail, kept
        for expected, alias in held:
            same(alias, expected)


def test_row_031_alias_of_an_earlier_functions_output() -> None:
    """A view of the first function's output, returned by the second one, held over steps: right, and still aliased."""

    @capture
    def view(y: Tensor) -> tuple[Tensor, Tensor]:
        return y[1:], y * 3

    held = []
    for i in range(7):
        mark_step_begin()
        x = rand(8, seed=i)
        y = f(x)
        part, apart = view(y)
        held.append((x * 2 - 0.5, y, part, apart))
        del y, part, apart
        for expected, y, part, apart in held:
            same((y, part, apart), (expected, expected[1:], expected * 3))
            assert storage_of(part) == storage_of(y)
        del y, part, apart


@pytest.mark.parametrize("mark", [True, False], ids=["marked", "unmarked"])
def test_row_033_held_output_is_the_next_steps_input(mark: bool) -> None:
    """``h = f(h)``, alone, with a view of it, and with the last three states held."""

    @capture
    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h * 0.5 + x)

    ours = theirs = rand(32)
    last: list[tuple[Tensor, Tensor]] = []
    for i in range(30):
        if mark:
            mark_step_begin()
        x = rand(32, seed=i)
        ours, theirs = step(ours, x), torch.tanh(theirs * 0.5 + x)
        last.append((ours[3:], theirs[3:]))
        del last[:-3]
        for state, right in last:
            same(state, right)
    same(ours, theirs)


def test_row_033_recurrence_makes_one_recording() -> None:
    """``h = f(h)`` a few hundred times is one recording."""
    h = expected = rand(32)
    for _ in range(300):
        h, expected = g(h), torch.tanh(expected) + 1
    same(h, expected)
    assert recordings(g).recordings <= 2
    assert counts(g)[3] == 0
