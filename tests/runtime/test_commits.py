"""A replay is all or nothing: an exception from a signal handler comes out once the call is complete, and the next call
works.

Where an operator raises in a replay, the state is what eager leaves when it raises there.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, recordings
from capture.key import modes
from capture.native import native
from capture.state import body_run
from capture.tree import thread_trees
from tests.support.injection import Stopped, Stopping, bits


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference on the CPU, no plans on disk, no tree of another test."""
    thread_trees.forget_trees()
    with torch.no_grad(), torch.device("cpu"), config.patch(cache=False, strict=False):
        yield


class World(nn.Module):
    """The state that a body may change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 4)
        self.total: Tensor
        self.register_buffer("total", torch.zeros(4))
        self.h, self.seen = torch.zeros(3, 4), {"last": torch.zeros(4)}
        self.body: Callable[[World, Tensor], Any] = both

    @override
    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)

    def state(self, x: Tensor) -> Any:
        return [bits(tensor) for tensor in (self.total, self.h, self.seen, x)], torch.get_rng_state().tolist()


def both(world: World, x: Tensor) -> Any:
    x.add_(1)
    world.h = torch.tanh(world.linear(x) + world.h)
    world.total.add_(world.h.sum(0))
    world.seen["last"] = torch.rand(4) + world.total
    x.mul_(0.5)
    return world.h + 1, x


def recurrent(world: World, x: Tensor) -> Any:
    world.h = torch.tanh(world.linear(x) + world.h)
    return world.h


def writing(world: World, x: Tensor) -> Any:
    world.total.add_(x.sum(0))
    x.mul_(0.5)
    return x * 2


def several(world: World, x: Tensor) -> Any:
    y = world.linear(x)
    return {"y": y, "halves": (y[:, :2], y[:, 2:]), "z": torch.rand(3, 4)}


def reading(world: World, x: Tensor) -> Any:
    """In segments: what comes before a value that the host reads is undone where the call is stopped there."""
    world.total.add_(x.sum(0))
    if x.sum() > 0:
        world.h = torch.tanh(world.linear(x) + world.h)
    y = world.h * torch.rand(3, 4)
    x.mul_(0.5)
    return y if world.total.sum() > -1e9 else x


BODIES = (both, recurrent, writing, several, reading)


def _pair(body: Callable[[World, Tensor], Any]) -> tuple[World, World, Any]:
    eager, ours = World(), World()
    eager.body = ours.body = body
    return eager, ours, capture(ours)


def _step(eager: World, ours: World, f: Any, x: Tensor, y: Tensor, stopping: Stopping | None) -> tuple[Any, Any, bool]:
    """Eager's result, ours from the same state of the generator (None where the call was stopped), and whether it
    was."""
    generator = torch.get_rng_state()
    before = eager.state(x)
    expected = eager(x)
    after = eager.state(x)
    torch.set_rng_state(generator)
    result, stopped = None, False
    try:
        if stopping is None:
            result = f(y)
        else:
            with stopping:
                result = f(y)
    except Stopped:
        stopped = True
    left = ours.state(y)
    assert left in ((before, after) if stopped else (after,)), stopping and stopping.where
    if left == before and left != after:  # nothing happened: do it again
        generator = torch.get_rng_state()
        f(y)
        assert ours.state(y) == after
    return expected, result, stopped


@pytest.mark.one_in(18)
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # an exception in a weak reference's callback goes no further
@pytest.mark.parametrize("kept", [False, True], ids=["died", "kept"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_signals_in_replays(body: Callable[[World, Tensor], Any], kept: bool) -> None:
    """The signals come at lines and calls inside of the library, in calls that replay."""
    drawn, came_out = random.Random(3), 0
    for number in range(4):
        eager, ours, f = _pair(body)
        x, y = torch.ones(3, 4), torch.ones(3, 4)
        results: list[Any] = []
        for _ in range(4):
            expected, result, _ = _step(eager, ours, f, x, y, None)
            results += [(expected, result)] if kept else []
        counting = Stopping(-1, Stopped, lines=number % 2 == 0, below=False)
        _step(eager, ours, f, x, y, counting)
        for _ in range(12):
            at = drawn.randint(1, max(counting.count, 1))
            stopping = Stopping(at, Stopped, lines=number % 2 == 0, by_signal=True, below=False)
            expected, result, stopped = _step(eager, ours, f, x, y, stopping)
            came_out += stopped
            assert body_run.current() is None
            assert modes.here() is not None
            expected, result, _ = _step(eager, ours, f, x, y, None)
            assert bits(expected) == bits(result)
            results += [(expected, result)] if kept and body not in (both, writing) else []
            assert all(bits(theirs) == bits(mine) for theirs, mine in results if body not in (both, writing))
        assert recordings(f).replays > 3
    assert came_out > 5


class Within(Stopping):
    """Counts lines of one function alone."""

    @override
    def _count(self, frame: FrameType) -> None:
        if frame.f_code.co_qualname == "OutputPlan.build_left":
            super()._count(frame)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", [reading, several], ids=lambda body: body.__name__)
def test_signals_while_outputs_are_handed_out(body: Callable[[World, Tensor], Any]) -> None:
    """At each line: what was handed out by then is not handed out again in the next call."""
    eager, ours, f = _pair(body)
    x, y = torch.ones(3, 4), torch.ones(3, 4)
    kept = [_step(eager, ours, f, x, y, None) for _ in range(6)]
    counting = Within(-1, Stopped, lines=True)
    _step(eager, ours, f, x, y, counting)
    for at in range(1, counting.count + 1):
        _step(eager, ours, f, x, y, Within(at, Stopped, lines=True, by_signal=True))
        kept += [_step(eager, ours, f, x, y, None)]
        assert all(bits(expected) == bits(result) for expected, result, _ in kept)


class Lookup(nn.Module):
    """Writes between operators that raise where an index is not in the table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Parameter(torch.randn(5, 4))
        self.total: Tensor
        self.register_buffer("total", torch.zeros(4))

    @override
    def forward(self, x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        y = nn.functional.embedding(first, self.table)
        x.add_(y)
        self.total.add_(nn.functional.embedding(second, self.table).sum(0))
        x.mul_(torch.rand(3, 4))
        return nn.functional.embedding(third, self.table) * self.total + x

    def state(self, x: Tensor) -> Any:
        return bits(self.total), bits(x), torch.get_rng_state().tolist()


def test_an_operator_that_raises_in_a_replay() -> None:
    """Eager's error, eager's state, no finding, and the recording stays."""
    eager, ours = Lookup(), Lookup()
    f, x, y = capture(ours), torch.ones(3, 4), torch.ones(3, 4)

    def call(module: Any, argument: Tensor, *ids: Tensor) -> Any:
        torch.manual_seed(len(replays))
        try:
            return bits(module(argument, *ids))
        except IndexError as error:
            return str(error)

    good, bad, replays = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 7]), [0]
    for _ in range(5):
        assert call(eager, x, good, good, good) == call(f, y, good, good, good)
        replays.append(recordings(f).replays)
    made = recordings(f).recordings
    for where in (0, 1, 2, 1, 0):
        ids = [bad if where == number else good for number in range(3)]
        expected = call(eager, x, *ids)
        after = eager.state(x)
        assert "index out of range" in expected
        assert call(f, y, *ids) == expected
        assert ours.state(y) == after, where
        expected = call(eager, x, good, good, good)
        after = eager.state(x)
        assert call(f, y, good, good, good) == expected
        assert ours.state(y) == after
        replays.append(recordings(f).replays)
    assert replays[2:] == sorted(set(replays))
    assert recordings(f).recordings == made
    assert [finding.code for finding in recordings(f).findings if finding.code == "CG905"] == []


def test_a_fault_after_a_replay_is_put_right_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the library between a replay and the end of the call: the result is eager's, and a finding tells."""
    eager, ours, f = _pair(both)
    x, y = torch.ones(3, 4), torch.ones(3, 4)
    for _ in range(4):
        _step(eager, ours, f, x, y, None)
    node = next(iter(recordings_nodes(f)))
    build, calls = type(node.outputs).build, []

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = build(self, *args, **kwargs)
        calls.append(result)
        if len(calls) == 1:
            raise ValueError("a mistake")
        return result

    monkeypatch.setattr(type(node.outputs), "build", fails)
    with pytest.warns(match="CG905"):
        expected, result, _ = _step(eager, ours, f, x, y, None)
    assert bits(expected) == bits(result)
    assert len(calls) == 2


def recordings_nodes(f: Any) -> Iterator[Any]:
    for tree in thread_trees.trees_here().values():
        yield from (node for nodes in tree.root.children.values() for node in nodes)


class _Holder:
    value = "before"


def test_an_attribute_within_a_call() -> None:
    holder = _Holder()
    assert native.within(holder, "value", "meanwhile", lambda: holder.value, ()) == "meanwhile"
    assert holder.value == "before"

    def fails(error: BaseException, *, also: Any) -> None:
        assert holder.value == also
        raise error

    with pytest.raises(KeyboardInterrupt):
        native.within(holder, "value", 3, fails, (KeyboardInterrupt(),), {"also": 3})
    assert holder.value == "before"
    wrong: list[Any] = [(), (holder, "value", 1, bool), (holder, "value", 1, bool, [])]
    for arguments in wrong:
        with pytest.raises(TypeError):
            native.within(*arguments)
    with pytest.raises(AttributeError):
        native.within(holder, "nothing", 1, bool, ())


def test_what_follows_is_done_first_and_told_then() -> None:
    tries: list[bool] = []
    told: list[Any] = []

    def finish(ended: bool) -> str:
        tries.append(ended)
        if len(tries) < 4:
            raise KeyboardInterrupt(len(tries))
        return "done"

    assert native.committed(len, ("ab",), finish, told.append) == "done"
    assert tries == [True] * 4
    assert [error.args for error in told[0]] == [(1,), (2,), (3,)]
    tries.clear()
    with pytest.raises(KeyboardInterrupt, match="1"):
        native.committed(len, ("ab",), finish)
    tries.clear()
    with pytest.raises(TypeError):
        native.committed(len, (), finish, told.append)
    assert tries == [False] * 4
    assert [error.args for error in told[1]] == [(1,), (2,), (3,)]  # an interrupt has to come out somewhere

    def tell(errors: list[BaseException]) -> None:
        raise errors[0]

    tries.clear()
    with pytest.raises(KeyboardInterrupt, match="1"):
        native.committed(len, (), finish, tell)
    wrong: list[Any] = [(), (len, [], bool), (len, (), bool, None, None)]
    for arguments in wrong:
        with pytest.raises(TypeError):
            native.committed(*arguments)


def test_parts_of_a_commit() -> None:
    """Interrupts that a part put off are told at the end of the whole commit. It counts as run if a part of it ran."""
    order: list[str] = []

    def interrupted(name: str) -> Callable[[bool], str]:
        def finish(ended: bool) -> str:
            order.append(f"{name} {ended}")
            if order.count(f"{name} {ended}") == 1:
                raise KeyboardInterrupt(name)
            return name

        return finish

    def run() -> None:
        native.committed(order.append, ("part",), interrupted("inner"))
        order.append("between")
        raise KeyboardInterrupt("after the part")

    told: list[Any] = []
    assert native.committed(run, (), interrupted("outer"), told.append) == "outer"
    assert order == ["part", "inner True", "inner True", "between", "outer True", "outer True"]
    assert [error.args[0] for error in told[0]] == ["inner", "after the part", "outer"]

    def alone() -> None:
        native.committed(order.append, ("whole",), interrupted("own"), told.append)
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):  # a commit of its own is no part
        native.committed(alone, (), bool, told.append)


def test_a_tape_that_acts_is_not_left_in_the_middle() -> None:
    """A signal between its operators waits for its end where it acts, and comes out at once before it acts."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Stopped

    log: list[str] = []

    def step(name: str) -> None:
        log.append(name)
        if name == "rings":
            signal.raise_signal(signal.SIGUSR1)

    steps = [(log.append, (("constant", name),), (), (), True) for name in ("a", "b", "c")]
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        for acts, expected in ((3, ["rings"]), (0, ["rings"])):
            log.clear()
            tape = native.Tape(
                [], ((step, (("constant", "rings"),), (), (), True), *steps), None, (), acts=acts, back=1
            )
            with pytest.raises(Stopped):
                tape(())
            assert tape.stopped == 0
            assert log == (expected if acts else [*expected, "c"])
    finally:
        signal.signal(signal.SIGUSR1, before)
    for arguments in ({"acts": -1}, {"back": 5}, {"back": -1}):
        with pytest.raises(ValueError, match="no such step"):
            native.Tape([], tuple(steps), None, (), **arguments)
