"""Rows of ``docs/rows.md``: who is alive, what memory is used again, when the pool is restored."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from capture import capture, mark_step_begin, recordings
from capture.engines.base import Block
from capture.engines.cpu.arena import Arena
from tests.support.rows import (
    any_live,
    copies_in,
    counts,
    descendants,
    kids,
    ran,
    rand,
    results,
    roots,
    same,
    taken,
    times,
    total,
    tree,
    warned,
)
from tests.support.rows import fresh as fresh
from tests.support.unseen import Hidden

_hidden = Hidden()
hide = _hidden.add


@capture
def f(x: Tensor) -> Tensor:
    ran("f")
    return x * 2 - 0.5


@capture
def g(x: Tensor) -> Tensor:
    ran("g")
    return torch.tanh(x) + 1


@capture
def h(x: Tensor) -> Tensor:
    return x.abs() / 3


@capture
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x * 10


@capture
def shared(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    return y, y[1:]


def f_of(x: Tensor) -> Tensor:
    return x * 2 - 0.5


def g_of(x: Tensor) -> Tensor:
    return torch.tanh(x) + 1


def record_independently(*functions: object) -> None:
    """Call each function twice, so that each is recorded as a root."""
    for function in functions:
        for i in range(2):
            function(rand(8, seed=i))  # type: ignore[operator]


def warm(*functions: object) -> None:
    """Call each function once, which is its watched run."""
    for function in functions:
        function(rand(8))  # type: ignore[operator]


def test_row_041_replay_takes_no_memory() -> None:
    """A replay takes no block and grows no pool, with its outputs held or not."""
    record_independently(pair)
    before, size = taken(), tree().pool.reserved_bytes()
    held = pair(rand(8, seed=5))
    (node,) = roots()
    live = {group.block for group in results(node).groups} if tree().pool.free_between_recordings else before
    assert (taken(), tree().pool.reserved_bytes()) == (live, size)
    same(held, (rand(8, seed=5) + 1, rand(8, seed=5) * 10))
    del held
    pair(rand(8, seed=6))
    assert (taken(), tree().pool.reserved_bytes()) == (before, size)


def test_row_042_recording_outputs_own_their_blocks() -> None:
    """A warm-up takes nothing from the pool; a recording's outputs take one block each until they die."""
    held = pair(rand(8))
    assert taken() == set()
    del held
    first, second = pair(rand(8, seed=1))
    (node,) = roots()
    mine = [group.block for group in results(node).groups]
    assert taken() & set(mine) == set(mine)
    del first
    assert taken() & set(mine) == {mine[1]}
    del second
    assert taken() & set(mine) == set()


def test_row_043_replay_to_record_restores_once() -> None:
    """One checkpoint for a switch from replaying to recording, none for the recordings that follow."""
    record_independently(f)
    warm(g, h)
    assert tree().checkpoints == 0
    x = rand(8, seed=7)
    a = f(x)
    b = g(a)
    assert tree().checkpoints == 1
    c = h(b)
    assert tree().checkpoints == 1
    same((a, b, c), (f_of(x), g_of(f_of(x)), g_of(f_of(x)).abs() / 3))
    assert sum(recordings(function).checkpoints for function in (f, g, h)) == 1


def test_row_044_no_checkpoint_in_steady_state() -> None:
    """Replays alone, and recordings alone, restore nothing."""
    for i in range(6):
        x = rand(8, seed=i)
        a = f(x)
        b = g(a)
        same((a, b), (f_of(x), g_of(f_of(x))))
        del a, b
    assert tree().checkpoints == 0
    assert descendants() == [1]


def restored(monkeypatch: pytest.MonkeyPatch) -> list[list[Block]]:
    """Filled with the blocks that each checkpoint from now on keeps."""
    kept: list[list[Block]] = []
    pool = tree().pool
    restore = pool.restore

    def spy(layout: object, live: Sequence[tuple[Block, torch.UntypedStorage]]) -> None:
        kept.append([block for block, _ in live])
        restore(layout, live)
        if isinstance(pool, Arena):
            assert taken() == {block for block, _ in live}
        else:
            assert pool._taken == {block.address for block, _ in live}  # type: ignore[attr-defined] # CUDA

    monkeypatch.setattr(type(pool), "restore", lambda _, layout, live: spy(layout, live))
    return kept


def test_row_045_dead_outputs_are_free_after_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that died between replay and recording is not taken in the restored pool; a live one is."""
    record_independently(pair)
    warm(g)
    kept = restored(monkeypatch)
    first, second = pair(rand(8, seed=3))
    (node,) = roots()
    del second
    out = g(first)
    same((first, out), (rand(8, seed=3) + 1, g_of(rand(8, seed=3) + 1)))
    assert kept == [[results(node).groups[0].block]]
    (child,) = kids(node)
    assert child.dead_before == ((node, 1),)


def test_row_046_aliased_dead_outputs_are_freed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two outputs on one block: restored once while one lives, free when both are dead; values stay right."""
    record_independently(shared)
    warm(g, h)
    kept = restored(monkeypatch)
    for i in range(4):
        x = rand(8, seed=i)
        y, part = shared(x)
        del part
        scaled = h(y)
        del y
        same(g(scaled), g_of((x + 1).abs() / 3))
        del scaled
    (node,) = roots()
    assert len(results(node).groups) == 1
    if tree().pool.free_between_recordings:  # each recording restores: ``g`` with nothing of ``shared`` alive
        assert len(kept.pop()) == 1
        assert recordings(g).recordings == 1
    assert kept == [[results(node).groups[0].block]]


def test_row_047_shared_storage_lives_until_both_outputs_die() -> None:
    """Two outputs on one storage: the block is taken until both are dead, across a checkpoint as well."""
    warm(shared, g)
    y, part = shared(rand(8, seed=1))
    (node,) = roots()
    block = results(node).groups[0].block
    assert block in taken()
    del y
    assert block in taken()
    same(part, (rand(8, seed=1) + 1)[1:])
    del part
    assert block not in taken()
    y, part = shared(rand(8, seed=2))
    del y
    out = g(rand(8, seed=3))
    assert tree().checkpoints == 1
    assert block in taken()
    same((part, out), ((rand(8, seed=2) + 1)[1:], g_of(rand(8, seed=3))))
    del part
    assert block not in taken()


def test_row_048_output_alive_that_was_dead_refuses_the_replay() -> None:
    """A child recorded over a dead output does not run while that output is alive: a second child is recorded."""
    record_independently(pair)
    warm(g)
    for i, keep in enumerate((False, False, True, True, False)):
        x = rand(8, seed=i)
        first, second = pair(x)
        if not keep:
            del second
        out = g(first)
        same((first, out), (x + 1, g_of(x + 1)))
        if keep:
            same(second, x * 10)
            del second
        del first, out
    assert descendants() == [2]
    assert recordings(g).recordings == 2


def test_row_049_output_that_dies_earlier_blocks_nothing() -> None:
    """A child recorded while an output was alive runs also where that output is dead."""
    record_independently(pair)
    warm(g)
    for i, keep in enumerate((True, True, False, False, True)):
        x = rand(8, seed=i)
        first, second = pair(x)
        if not keep:
            del second
        out = g(first)
        same(out, g_of(x + 1))
        if keep:
            same(second, x * 10)
            del second
        del first, out
    assert descendants() == [1]
    assert recordings(g).recordings == 1


def test_row_050_input_held_longer_than_when_recorded() -> None:
    """A managed input that died right after the recording may be held in a replay: its memory is not used again."""
    for i, keep in enumerate((False, False, False, True, True, False)):
        mark_step_begin()
        x = rand(8, seed=i)
        a = f(x)
        b = g(a)
        if not keep:
            del a
        c = h(b)
        same((b, c), (g_of(f_of(x)), g_of(f_of(x)).abs() / 3))
        if keep:
            same(a, f_of(x))
            del a
        del b, c
    assert recordings(g).recordings == 1
    assert recordings(h).recordings == 2


def test_row_053_liveness_of_outputs() -> None:
    """A node's output is alive through a reference or a view of it, and dead without."""
    record_independently(f)
    (node,) = roots()
    assert not any_live(node)
    out = f(rand(8, seed=2))
    assert any_live(node)
    view = out[2:]
    del out
    assert any_live(node)
    same(view, f_of(rand(8, seed=2))[2:])
    del view
    assert not any_live(node)
    out = f(rand(8, seed=3))
    detached = out.detach().view(2, 4)
    del out
    assert any_live(node)
    same(detached, f_of(rand(8, seed=3)).view(2, 4))


def test_row_058_one_watch_per_storage() -> None:
    """Outputs that alias are one group with one weak hold, and share one storage object."""
    record_independently(shared)
    for i in range(3):
        y, part = shared(rand(8, seed=i))
        (node,) = roots()
        assert len(results(node).groups) == len(results(node).live) == 1
        assert y.untyped_storage() is part.untyped_storage()
        y[3] = 9.0
        assert part[2] == 9.0


def test_row_060_leak_from_the_body_is_reported() -> None:
    """A tensor that the body hides where nothing sees it: eager, said with the line, and the leak keeps its values."""

    @capture
    def leak(x: Tensor) -> Tensor:
        y = x * 4
        hide(y)
        return y + 1

    _hidden.clear()
    with warned("CG401") as messages:
        for i in range(6):
            same(leak(rand(8, seed=i)), rand(8, seed=i) * 4 + 1)
    assert "y = x * 4" in messages[0]
    same(_hidden.all(), [rand(8, seed=i) * 4 for i in range(6)])
    assert total() == 0
    _hidden.clear()


def test_row_060_cycle_is_no_leak() -> None:
    """A reference cycle made by the body is collected before anything counts as leaked."""

    @capture
    def cycle(x: Tensor) -> Tensor:
        holder: list[object] = [x * 4]
        holder.append(holder)
        return x + 1

    gc.disable()
    try:
        for i in range(4):
            same(cycle(rand(8, seed=i)), rand(8, seed=i) + 1)
    finally:
        gc.enable()
    assert counts(cycle) == (1, 1, 2, 0)


def test_row_063_new_function_on_an_output_becomes_a_child() -> None:
    """An output of a replay fed to a function never seen before: it is recorded as the replayed node's child."""
    record_independently(f)
    for i in range(4):
        x = rand(8, seed=i)
        y = f(x)
        z = g(y)
        same((y, z), (f_of(x), g_of(f_of(x))))
        del y, z
    assert descendants() == [1]
    assert times("f") == 2


def test_row_064_input_from_outside_the_pool_is_another_child() -> None:
    """A child recorded on an output, then called with a tensor of its own: a second child; both are kept."""
    record_independently(f)
    for i in range(3):
        x = rand(8, seed=i)
        y = f(x)
        same(g(y), g_of(f_of(x)))
        del y
    assert descendants() == [1]
    checkpoints = tree().checkpoints
    for _ in range(3):
        y = f(rand(8))
        same(g(torch.zeros_like(y)), g_of(torch.zeros(8)))
        same(y, f_of(rand(8)))
        del y
    assert descendants() == [2]
    assert tree().checkpoints == checkpoints + 1
    bodies = times("g")
    y = f(rand(8, seed=4))
    same(g(y), g_of(f_of(rand(8, seed=4))))
    assert times("g") == bodies
    inner, outer = kids(roots()[0])
    assert (copies_in(inner), copies_in(outer)) == (0, 1)


def test_row_065_returning_to_a_branch_replays_it() -> None:
    """Alternating branches below one node replay their recordings; nothing is recorded again."""
    record_independently(f)
    warm(g, h)
    for i in range(8):
        x = rand(8, seed=i)
        y = f(x)
        if i % 2:
            same(g(y), g_of(f_of(x)))
        else:
            same(h(y), f_of(x).abs() / 3)
        del y
    assert descendants() == [2]
    assert (recordings(f).recordings, recordings(g).recordings, recordings(h).recordings) == (1, 1, 1)
