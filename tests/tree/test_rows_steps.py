"""Rows of ``docs/rows.md``: where a step ends, and what becomes of outputs that are still held then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from capture import BorrowedOutputError, capture, mark_step_begin, recordings, step
from tests.support.device import AGAIN
from tests.support.rows import counts, descendants, ran, rand, roots, same, times, total, tree
from tests.support.rows import fresh as fresh


@capture
def f(x: Tensor) -> Tensor:
    return x * 2 - 0.5


@capture
def g(x: Tensor) -> Tensor:
    return torch.tanh(x) + 1


def f_of(x: Tensor) -> Tensor:
    return x * 2 - 0.5


def g_of(x: Tensor) -> Tensor:
    return torch.tanh(x) + 1


def test_row_020_chain_of_top_level_calls_is_one_path() -> None:
    """Nobody marks: ``g(f(x))`` stays on one path, so the inner output reaches ``g`` without a copy."""
    for i in range(4):
        x = rand(4, seed=i)
        y = f(x)
        z = g(y)
        same((y, z), (f_of(x), g_of(f_of(x))))
        del y, z
    assert descendants() == [1]


def test_row_020_repeated_function_starts_a_step() -> None:
    """Nobody marks: a function already on the path begins a new step, though its first output is held and used."""
    for i in range(5):
        a, b = rand(4, seed=i), rand(4, seed=i + 100)
        y1 = f(a)
        y2 = f(b)
        same((y1 + y2, y1, y2), (f_of(a) + f_of(b), f_of(a), f_of(b)))
    assert descendants() == [0]
    assert recordings(f).recordings == 1 + AGAIN


def test_row_020_dead_outputs_end_a_step() -> None:
    """Nobody marks: when all outputs are dead the next function starts a root."""
    for i in range(4):
        x = rand(4, seed=i)
        same(f(x), f_of(x))
        same(g(x), g_of(x))
    assert descendants() == [0, 0]


def test_row_021_marking_once_ends_automatic_steps() -> None:
    """After the first mark a repeated function no longer begins a step; only marks do."""
    mark_step_begin()
    for i in range(3):
        x = rand(4, seed=i)
        y = f(x)
        z = f(y)
        same((y, z), (f_of(x), f_of(f_of(x))))
        if i < 2:
            del y, z
        mark_step_begin()
    assert descendants() == [1]
    assert [node.function.annotation.function for node in tree().path] == [recordings(f).function] * 2


def test_row_022_mark_begins_a_root_under_held_outputs() -> None:
    """A mark ends the path though outputs are held (here for the whole test): one root, no value lost."""
    held = []
    for i in range(6):
        mark_step_begin()
        held.append(f(rand(4, seed=i)))
        same(held, [f_of(rand(4, seed=j)) for j in range(i + 1)])
    assert descendants() == [0]
    assert counts(f) == (1, 1 + AGAIN, 4 - AGAIN, 0)


def test_row_023_one_step_is_one_path() -> None:
    """Within one marked step many calls stay on one path: ``f, g, f`` is a path of depth three."""
    for i in range(4):
        mark_step_begin()
        x = rand(4, seed=i)
        a = f(x)
        b = g(a)
        c = f(b)
        same((a, b, c), (f_of(x), g_of(f_of(x)), f_of(g_of(f_of(x)))))
        if i < 3:
            del a, b, c
    assert len(tree().path) == 3
    assert descendants() == [2]


def test_row_023_step_blocks_are_steps() -> None:
    """``with step():`` ends the path at its end as well."""
    for i in range(4):
        with step():
            x = rand(4, seed=i)
            a = f(x)
            b = g(a)
        c = f(b)
        same((a, b, c), (f_of(x), g_of(f_of(x)), f_of(g_of(f_of(x)))))
    assert total() == 2


@pytest.mark.parametrize("calls", [2, 3, 4])
def test_row_024_stale_borrowed_output_raises(calls: int) -> None:
    """``outputs="borrow"``: valid within the step, an error after it that names the line and the remedies."""

    @capture(outputs="borrow")
    def lend(x: Tensor) -> Tensor:
        return x * 3 + 1

    for i in range(calls):
        mark_step_begin()
        x = rand(4, seed=i)
        out = lend(x)
        same(out, x * 3 + 1)
    mark_step_begin()
    new = lend(rand(4, seed=99))
    same(new, rand(4, seed=99) * 3 + 1)
    with pytest.raises(BorrowedOutputError) as caught:
        out + 1
    for part in ("lend", Path(__file__).name, ".clone()", 'outputs="preserve"'):
        assert part in str(caught.value)
    for use in (lambda: out.tolist(), lambda: torch.relu(out), lambda: out[0], lambda: out.add_(1), lambda: repr(out)):
        with pytest.raises(BorrowedOutputError):
            use()


def test_row_024_output_of_an_eager_run_stays_valid() -> None:
    """A warm-up's output is an ordinary tensor, so it is never stale, borrowed or not."""

    @capture(outputs="borrow")
    def lend(x: Tensor) -> Tensor:
        return x * 3 + 1

    first = lend(rand(4))
    for i in range(4):
        mark_step_begin()
        lend(rand(4, seed=i + 1))
    same(first, rand(4) * 3 + 1)


def test_row_024_held_outputs_keep_their_values_by_default() -> None:
    """``outputs="preserve"``: no error and no other value, for as long as an output is held."""
    held = [(rand(4, seed=i), f(rand(4, seed=i))) for i in range(10)]
    for x, y in held:
        same(y, f_of(x))
    assert total() == 1


def test_row_025_aliases_of_stale_outputs_never_show_other_values() -> None:
    """A view or ``detach()`` of an output keeps the values it had, with ``preserve`` and with ``borrow``."""

    @capture(outputs="borrow")
    def lend(x: Tensor) -> Tensor:
        return x * 3 + 1

    for function, expected in ((f, f_of), (lend, lambda x: x * 3 + 1)):
        held = []
        for i in range(6):
            mark_step_begin()
            x = rand(6, seed=i)
            y = function(x)
            held.append((expected(x), y.detach(), y[1:], y.view(2, 3).t()))
            del y
            for value, whole, part, turned in held:
                same((whole, part, turned), (value, value[1:], value.view(2, 3).t()))


def test_row_026_held_output_never_shows_new_data() -> None:
    """In steady replay an output, and a view of it, held for ten steps keep their values; nothing is recorded."""
    for i in range(3):
        f(rand(4, seed=i))
    before = recordings(f).recordings
    x = rand(4, seed=50)
    out = f(x)
    view = out[1:3]
    for i in range(10):
        mark_step_begin()
        y = rand(4, seed=i + 60)
        same(f(y), f_of(y))
        same((out, view), (f_of(x), f_of(x)[1:3]))
    assert out.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    assert before == 1
    assert recordings(f).recordings <= 2
    assert recordings(f).recordings + recordings(f).replays == 13


def test_row_026_clones_are_always_copies() -> None:
    """``outputs="clone"``: every replay returns memory of its own, also within one step."""

    @capture(outputs="clone")
    def h(x: Tensor) -> Tensor:
        ran("h")
        return x * 7

    held = []
    for i in range(6):
        mark_step_begin()
        held.append(h(rand(4, seed=i)))
    same(held, [rand(4, seed=i) * 7 for i in range(6)])
    assert len({y.data_ptr() for y in held}) == 6
    assert times("h") == 2
    assert len(roots()) == 1


def test_kept_outputs_ask_for_no_recording_behind_each_other() -> None:
    """Functions in any order, the last results held: a call that takes nothing of the step begins one of its own."""
    bodies = [lambda x, k=k: torch.tanh(x) * k for k in range(1, 7)]
    functions, kept = [capture(body) for body in bodies], list[Tensor]()
    order = [(7 * call * call + 3 * call) % 6 for call in range(200)]
    for call, number in enumerate(order):
        x = rand(4, seed=call)
        kept.append(functions[number](x))
        same(kept[-1], bodies[number](x))
        del kept[:-3]
    made = [recordings(function).recordings for function in functions if recordings(function).recordings]
    assert max(made) <= 5, made
    assert sum(recordings(function).eager_calls + recordings(function).warm_up_calls for function in functions) <= 12
