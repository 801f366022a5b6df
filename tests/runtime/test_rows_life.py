"""Rows of ``docs/rows.md``: the life cycle of a captured function."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from capture import capture, mark_step_begin, recordings, reset
from capture.runtime import record
from tests.support.device import EXECUTES
from tests.support.rows import counts, descendants, eager, kids, ran, rand, roots, same, taken, times, total, tree
from tests.support.rows import fresh as fresh


def test_row_001_warm_up_record_replay() -> None:
    """Call 1 warms up, call 2 records, later calls replay: the body runs exactly twice."""

    @capture
    def f(x: Tensor) -> Tensor:
        ran("f")
        return torch.relu(x * 2 - 0.25)

    for i in range(5):
        x = rand(4, 4, seed=i)
        same(f(x), eager(f, x))
        assert times("f") == min(i + 1, 2)
    assert counts(f) == (1, 1, 3, 0)


def test_row_002_first_call_returns_its_own_run() -> None:
    """The warm-up's result is the call's result; no run is thrown away."""

    @capture
    def f(x: Tensor) -> Tensor:
        ran("f")
        return x.sin()

    x = rand(8)
    same(f(x), eager(f, x))
    assert times("f") == 1
    assert total() == 0


def test_row_003_recording_call_returns_right_values() -> None:
    """The call that records returns its own values, not those of the warm-up."""

    @capture
    def f(x: Tensor) -> Tensor:
        ran("f")
        return x.cos() + x

    f(rand(8, seed=1))
    x = rand(8, seed=2)
    same(f(x), eager(f, x))
    assert (times("f"), total()) == (2, 1)


def test_row_004_independent_functions_and_shapes_are_roots() -> None:
    """Two functions, and two shapes of one function, called independently make roots without children."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x + 1

    @capture
    def g(x: Tensor) -> Tensor:
        return x * 3

    for i in range(3):
        for function, x in ((f, rand(4, seed=i)), (g, rand(4, seed=i)), (f, rand(2, 3, seed=i))):
            same(function(x), eager(function, x))
    assert descendants() == [0, 0, 0]


def test_row_005_output_of_a_function_into_itself_makes_a_child() -> None:
    """``z = f(f(x))`` with the first output alive is a child node, not a second root."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 1.5 - 1

    for i in range(4):
        mark_step_begin()
        x = rand(4, seed=i)
        y = f(x)
        z = f(y)
        same((y, z), (eager(f, x), eager(f, eager(f, x))))
        del y, z
    assert descendants() == [1]


def test_row_006_dead_path_starts_a_new_root() -> None:
    """When all outputs of the path are dead, the next function starts a root, within one marked step too."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2

    @capture
    def g(x: Tensor) -> Tensor:
        return x - 3

    for i in range(4):
        mark_step_begin()
        x = rand(4, seed=i)
        y = f(x)
        z = f(y)
        same(z, x * 2 * 2)
        del y, z
        same(g(x), x - 3)
    assert descendants() == [1, 0]


def test_row_007_warm_up_is_contagious() -> None:
    """A function that could replay runs eagerly while the current path warms up, and nothing is recorded."""

    @capture
    def cold(x: Tensor) -> Tensor:
        return x + 1

    @capture
    def warm(x: Tensor) -> Tensor:
        ran("warm")
        return x * 5

    for i in range(3):
        warm(rand(4, seed=i))
    assert times("warm") == 2
    x = rand(4, seed=9)
    a = cold(x)
    b = warm(a)
    same((a, b), (x + 1, (x + 1) * 5))
    assert times("warm") == 3
    assert total() == 1


def test_row_008_recording_is_contagious(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a function that records, one that has a recording elsewhere records again, as its child."""
    monkeypatch.setattr(record, "MOST_OWNED", 0)  # else ``f``, which was never seen in front of ``g``, gives copies

    @capture
    def g(x: Tensor) -> Tensor:
        ran("g")
        return x * 5

    @capture
    def f(x: Tensor) -> Tensor:
        return x + 1

    for i in range(2):
        g(rand(4, seed=i))
        f(rand(4, seed=i)) if i == 0 else None
    assert descendants() == [0]
    x = rand(4, seed=9)
    a = f(x)
    b = g(a)
    same((a, b), (x + 1, (x + 1) * 5))
    assert times("g") == 3
    assert descendants() == [0, 1]


def test_row_012_new_input_addresses_record_nothing() -> None:
    """A new tensor at every call is copied in; nothing is recorded anew."""

    @capture
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    kept = []
    for i in range(8):
        x, y = rand(3, 3, seed=i), rand(3, 3, seed=-i)
        kept.append((x, y))
        same(f(x, y), x @ y)
    assert len({x.data_ptr() for x, _ in kept}) == 8
    assert counts(f) == (1, 1, 6, 0)


def test_row_013_pool_goes_with_the_last_function() -> None:
    """When the last captured function dies, or is reset, its recordings and the pool go."""

    def make() -> object:
        @capture
        def f(x: Tensor) -> Tensor:
            return x.exp() * 2

        for i in range(3):
            f(rand(64, seed=i))
        return f

    f = make()
    assert total() == 1
    assert tree().pool.reserved_bytes() > 0
    reset(f)
    assert (total(), taken(), tree().pool.reserved_bytes()) == (0, set(), 0)
    del f
    g = make()
    assert total() == 1
    del g
    gc.collect()
    assert (total(), taken(), tree().pool.reserved_bytes()) == (0, set(), 0)


def test_row_013_recordings_of_an_instance_go_with_it() -> None:
    """A module's recordings die with the module, not with its class."""

    class Net(torch.nn.Module):
        b: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", rand(4))

        @capture
        @override
        def forward(self, x: Tensor) -> Tensor:
            return x * self.b

    first, second = Net(), Net()
    for i in range(3):
        for net in (first, second):
            x = rand(4, seed=i)
            same(net(x), x * net.b)
    assert total() == 2
    del first, net
    gc.collect()
    assert total() == 1
    del second
    gc.collect()
    assert (total(), tree().pool.reserved_bytes()) == (0, 0)


def test_row_014_outputs_outlive_their_function() -> None:
    """Outputs still held when the function and its pool go keep their values."""

    def make(scale: float) -> list[Tensor]:
        @capture
        def f(x: Tensor) -> Tensor:
            return x * scale

        return [f(rand(1024, seed=i)) for i in range(4)]

    kept = make(2.0)
    gc.collect()
    assert total() == 0
    later = make(3.0)
    noise = [torch.full((1024,), float("nan")) for _ in range(8)]
    same(kept, [rand(1024, seed=i) * 2.0 for i in range(4)])
    same(later, [rand(1024, seed=i) * 3.0 for i in range(4)])
    assert len(noise) == 8


def test_row_008_children_of_a_recording_node_start_empty() -> None:
    """A node just recorded has exactly the child that followed it."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x + 1

    for _ in range(2):
        mark_step_begin()
        x = rand(4)
        y = f(f(x))
        same(y, x + 1 + 1)
        del y
    assert [len(kids(root)) for root in roots()] == [1]
    assert recordings(f).recordings == 2


def test_a_module_dies_while_a_body_runs() -> None:
    """Outputs of the module that are kept leave the pool then, which is no part of that body."""

    class Doubling(torch.nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    dying = [Doubling()]
    capture(dying[0])
    kept = [dying[0](rand(4, seed=i)) for i in range(3)]
    state = {"x": rand(4)}

    @capture
    def f(x: Tensor) -> Tensor:
        y = x + state["x"]
        dying.clear()
        gc.collect()
        return y.sin()

    for i in range(6):
        x = rand(4, seed=10 + i)
        same(f(x), torch.sin(x + state["x"]))
        for seed, output in enumerate(kept):
            same(output, rand(4, seed=seed) * 2)
    assert recordings(f).replays >= 2
    assert recordings(f).eager_calls == (0 if EXECUTES else 1), "the first recording is not like the run before it"
