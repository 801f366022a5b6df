"""Rows of the behaviour table that need a device, 2a to 2c: life, liveness and memory.

Rows are numbered as in ``docs/rows.md``. Of the rows of 2a to 2c that concern a GPU, these stand elsewhere:

======================================  =============================================================================
row                                     where
======================================  =============================================================================
1 to 3, 12, 13 (instances), 22,         ``tests/*/test_rows_*.py``: they name no device, and run on CUDA as they
24 to 26, 43, 53, 58, 60 (cycle),       are; so do 41, 42, 45 to 47 for the arena of the CPU engine
62, 64
34, 37, 40, 54 to 57                    need gradients (54 also counts references to cached outputs: none are cached)
27 to 33                                ``test_rows_held.py``
59                                      ``test_streams.py``
======================================  =============================================================================
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capture import capture, config, mark_step_begin, recordings, release, reset
from tests.gpu.support import (
    DEVICE,
    ON_CUDA,
    allocated,
    counts,
    eager,
    may_fall_back,
    needs_cuda,
    needs_gpu,
    ran,
    rand,
    same,
    synchronize,
    times,
)

pytestmark = [needs_gpu, may_fall_back]  # a path that goes on under held views may reach its limit

MIB = 1 << 20
BIG = 4 * MIB  # elements: 16 MiB


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


def big(seed: int = 0) -> Tensor:
    """16 MiB with few different values."""
    return rand(1024, seed=seed).repeat(BIG // 1024)


# ------------------------------------------------------------------------------------------------------- 2a: life cycle


def test_row_009_recording_without_a_warm_up() -> None:
    """``skip_warmup``: the first call records, and its values are right."""

    @capture
    def fn(x: Tensor) -> Tensor:
        ran("fn")
        return torch.relu(x @ x) * 2

    with config.patch(skip_warmup=True):
        for i in range(4):
            x = rand(32, 32, seed=i)
            same(fn(x), eager(fn, x))
    assert times("fn") == 1
    assert counts(fn)[1:] == (1, 3, 0)


@needs_cuda
def test_row_013_memory_goes_with_the_functions() -> None:
    """Reset, release and death of the functions give all memory back, that of the pool included."""

    def use(end: Callable[[object], None] | None) -> None:
        first, second = capture(lambda x: torch.tanh(x) * 2), capture(lambda x: (x + 1).sum(0, keepdim=True) * x)
        x = rand(512, 4096)
        for _ in range(4):
            second(first(x))
        if end is not None:
            end(first)
            end(second)

    use(None)
    before, reserved = allocated(), torch.cuda.memory_reserved()
    for end in (None, reset, release):
        use(end)
        assert allocated() <= before + MIB
        assert torch.cuda.memory_reserved() <= reserved + 2 * MIB


def test_row_014_outputs_outlive_their_functions() -> None:
    """Outputs, and views of them, held when their functions and the pool go, keep their values."""

    def make(scale: float) -> list[Tensor]:
        fn, last = capture(lambda x: x * scale), capture(lambda x: x.t() + 1)
        found = []
        for i in range(5):
            y = fn(rand(64, 64, seed=i))
            found += [y[1:], last(y).t()]
        return found

    def expected(scale: float) -> list[Tensor]:
        xs = [rand(64, 64, seed=i) * scale for i in range(5)]
        return [one for x in xs for one in (x[1:], (x.t() + 1).t())]

    kept = make(2.0)
    gc.collect()
    if ON_CUDA:
        torch.cuda.empty_cache()
    made_later = make(3.0)
    noise = [torch.full((n, 64), float("nan"), device=DEVICE) for n in (1, 16, 64, 256) for _ in range(16)]
    same(kept, expected(2.0))
    same(made_later, expected(3.0))
    del noise


@pytest.mark.parametrize("body", ["view", "several views", "empty", "constant", "argument"])
def test_row_018_019_functions_without_kernels(body: str) -> None:
    """Pure views and pure allocations: right metadata, no warning about an empty graph, eager's aliasing."""

    @capture
    def fn(x: Tensor) -> object:
        if body == "view":
            return x.reshape(-1)
        if body == "several views":
            return x.t(), x[1:], x.view(-1)[3:]
        if body == "empty":
            return torch.empty_like(x).shape
        return 5 if body == "constant" else x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(5):
            x = rand(4, 4, seed=i)
            same(fn(x), eager(fn, x))
    assert not [warning for warning in caught if "empty" in str(warning.message)]


def test_row_019_memory_that_nobody_writes() -> None:
    """``empty_like`` in the body, handed out: of the right kind, writable, held while other calls follow."""

    @capture
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), x + 1

    held = []
    for i in range(6):
        x = rand(64, seed=i)
        blank, y = fn(x)
        assert (blank.shape, blank.dtype, blank.device) == (x.shape, x.dtype, x.device)
        blank.fill_(float(i))
        held.append((blank, y))
        for n, (written, result) in enumerate(held):
            same((written, result), (torch.full((64,), float(n), device=DEVICE), rand(64, seed=n) + 1))


# --------------------------------------------------------------------------------------------------- 2c: whose memory


@needs_cuda
def test_row_041_replay_takes_no_memory() -> None:
    """Replays of a chain whose outputs die before the next step ask the allocator for nothing."""
    x = rand(64, 64)
    with config.patch(poison=False):
        for _ in range(4):
            mark_step_begin()
            g(f(x))
        synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(10):
            mark_step_begin()
            g(f(x))
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@needs_cuda
def test_row_042_pool_holds_the_largest_path_not_all_of_them() -> None:
    """Many functions called one after the other share memory: the pool grows by little with their number."""

    def body(n: int) -> Callable[[Tensor], Tensor]:
        return capture(lambda x: ((x + n) * 2 - x).tanh())

    functions = [body(n) for n in range(6)]
    sizes = []
    for n, function in enumerate(functions):
        for i in range(3):
            mark_step_begin()
            x = big(i)
            same(function(x), ((x + n) * 2 - x).tanh())
        sizes.append(recordings(functions[0]).pool_bytes)
    assert sizes[-1] <= sizes[0] + 24 * MIB


@needs_cuda
def test_row_042_dead_outputs_make_room_along_a_path() -> None:
    """A chain of twelve calls, each output dropped once it was used, needs memory for a few, not for twelve."""
    functions = [capture(lambda x, n=n: torch.tanh(x) + n) for n in range(12)]
    for i in range(4):
        mark_step_begin()
        x = expected = big(i)
        for n, function in enumerate(functions):
            x = function(x)
            expected = torch.tanh(expected) + n
        same(x, expected)
        del x, expected
    pool = recordings(functions[0]).pool_bytes
    assert pool <= 8 * 16 * MIB, f"{pool / MIB:.0f} MiB"


@needs_cuda
@pytest.mark.parametrize("dead", ["none", "one", "both"])
def test_row_045_outputs_dead_at_a_branch_make_room(dead: str) -> None:
    """Outputs that died between a replay and a new recording are free memory for it, live ones are not touched."""

    @capture
    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x * 10

    @capture
    def later(x: Tensor) -> Tensor:
        return x - 2

    x = big()
    for _ in range(3):
        mark_step_begin()
        a, b = pair(x)
        del a, b
    small = recordings(pair).pool_bytes
    for i in range(4):
        mark_step_begin()
        x = big(i)
        a, b = pair(x)
        large = big(i + 9)
        if dead != "none":
            del a
        if dead == "both":
            del b
        y = later(large)
        same(y, large - 2)
        if dead == "none":
            same(a, x + 1)
        if dead != "both":
            same(b, x * 10)
    grown = recordings(later).pool_bytes - small
    assert grown <= {"none": 36, "one": 20, "both": 20}[dead] * MIB, f"{grown / MIB:.0f} MiB"


@pytest.mark.parametrize("first", ["y", "tail", "other"])
def test_row_046_047_shared_storage_at_a_checkpoint(first: str) -> None:
    """Aliased outputs dropped one by one before a new function is recorded: what is left keeps its values."""
    late = [capture(lambda x, n=n: (x + n).cumsum(0)) for n in range(6)]
    for i in range(6):
        for n in range(i + 1):
            mark_step_begin()
            x = rand(64, seed=i)
            y, tail, apart = split(x)
            left = {"y": y, "tail": tail, "other": apart}
            wanted = {"y": x + 1, "tail": (x + 1)[1:], "other": x * 10}
            del y, tail, apart, left[first]
            z = late[n](x)
            same(z, (x + n).cumsum(0))
            for name, kept in left.items():
                same(kept, wanted[name])
            left.clear()
            w = g(z)
            same((z, w), ((x + n).cumsum(0), torch.tanh((x + n).cumsum(0)) + 1))
            del kept


def test_row_052_every_replay_hands_out_new_objects() -> None:
    """The peer returns the same tensor object at each replay; here each is new, and carries nothing over."""
    seen = set()
    kept = []
    for i in range(5):
        y = f(rand(8, seed=i))
        assert not hasattr(y, "tag")
        y.tag = i  # type: ignore[attr-defined]
        seen.add(id(y))
        kept.append(y)
    assert len(seen) == 5


_hidden: list[Tensor] = []
hide = _hidden.append


def test_row_060_leaked_tensor_keeps_its_values() -> None:
    """A tensor that the body hides in a list: found, the function runs eagerly, and the hidden ones stay right."""

    @capture
    def leaky(x: Tensor) -> Tensor:
        y = x * 3
        hide(y)
        return y + 1

    try:
        for i in range(8):
            mark_step_begin()
            x = rand(32, seed=i)
            same(leaky(x), x * 3 + 1)
            same(g(f(x)), torch.tanh(x * 2 - 0.5) + 1)
        same(_hidden, [rand(32, seed=i) * 3 for i in range(8)])
    finally:
        _hidden.clear()


def test_row_060_leak_from_the_recording_alone() -> None:
    """A tensor that only the second run hides."""
    runs: list[int] = []
    count = runs.append

    def maybe(y: Tensor) -> None:
        count(1)
        if len(runs) == 2:
            hide(y)

    @capture
    def leaky(x: Tensor) -> Tensor:
        y = x * 3
        maybe(y)
        return y + 1

    try:
        for i in range(8):
            mark_step_begin()
            x = rand(32, seed=i)
            same(leaky(x), x * 3 + 1)
            same(g(f(x)), torch.tanh(x * 2 - 0.5) + 1)
        same(_hidden, [rand(32, seed=1) * 3])
    finally:
        _hidden.clear()


def test_row_065_branches_of_a_step() -> None:
    """Three branches taken in any order, outputs of the last two steps held: no recording after the first rounds."""
    branches = [capture(lambda x, n=n: (x * (n + 1)).softmax(0)) for n in range(3)]
    held: list[tuple[Tensor, Tensor]] = []
    made = []
    for i in range(40):
        mark_step_begin()
        x = rand(16, seed=i)
        y = f(x)
        n = (i * 7 // 3) % 3
        z = branches[n](y)
        held.append((z, ((x * 2 - 0.5) * (n + 1)).softmax(0)))
        del held[:-2], y
        for result, right in held:
            same(result, right)
        made.append(sum(recordings(branch).recordings for branch in branches))
    assert made[-1] == made[19] <= 3 * 5
