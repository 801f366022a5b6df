"""Exceptions at any point of this library's own code, as signals, full memory and mistakes raise them.

A program is run eagerly up to each of its operators, which tells all states that a call may leave behind that is
stopped. Then the captured twin is stopped somewhere inside of the library: it has to leave one of those, and go on as
eager does from there.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

import capture
from capture import capture as captured_as
from capture.observe.capture_lock import capture_lock
from capture.tree.thread_trees import forget_trees, trees_here
from tests.support.device import DEVICE, rng_state, set_rng_state

LIBRARY = str(Path(capture.__file__).parent)


class Stopped(Exception):
    """Raised as a timeout is, by a signal's handler."""


_BELOW = (str(Path(torch.__file__).parent), contextlib.__file__)
_DEPTH = 3


def _is_below(frame: types.FrameType) -> bool:
    """Whether the library called this code of torch, or torch's code that did: a context that is entered or left."""
    code: types.FrameType | None = frame
    for _ in range(_DEPTH):
        if code is None or not code.f_code.co_filename.startswith(_BELOW):
            return False
        code = code.f_back
        if code is not None and code.f_code.co_filename.startswith(LIBRARY):
            return True
    return False


_RAISES_NOTHING = ("_see", "ObserveMode.see", "ObserveMode.run")
"""What leads from an operator to the watch, and back to it. torch makes ``NotImplemented`` of a TypeError from some
operators of Python, whoever raises it, and another operator is tried."""


class Stopping:
    """Raises at the ``at``th event inside of the library (a call, or with ``lines`` a line), or of what it calls in
    torch; with -1 it only counts events. ``by_signal``: a signal's handler raises, so that the library sees an
    interrupt; in torch it always is one. ``below``: also at lines of torch's code. Operators of a replay are among
    them, between which eager may be stopped, too."""

    def __init__(
        self, at: int, error: type[BaseException], *, lines: bool, by_signal: bool = False, below: bool = True
    ) -> None:
        self.at, self.error, self.lines, self.by_signal, self.below = at, error, lines, by_signal, below and lines
        self.count = 0
        self.where = ""
        self.rang = False
        self._handler: Any = None
        self._kept = self._called
        """CPython 3.11 may call a trace function that it has let go of meanwhile, where a frame's object is made, that
        collects garbage, and a callback of that raises."""

    def __enter__(self) -> Stopping:
        self._handler = signal.signal(signal.SIGUSR2, self._ring)
        sys.settrace(self._kept)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        signal.signal(signal.SIGUSR2, self._handler)

    def _ring(self, number: int, frame: types.FrameType | None) -> None:
        raise self.error("stopped")

    def _called(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY) and not (self.below and _is_below(frame)):
            return None
        self._count(frame)
        return self._line if self.lines else None

    def _line(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return"):
            self._count(frame)
        return self._line

    def _count(self, frame: types.FrameType) -> None:
        self.count += 1
        if self.count == self.at:
            code = frame.f_code
            if self.error is TypeError and code.co_qualname in _RAISES_NOTHING:
                return
            self.where = f"{code.co_filename.removeprefix(LIBRARY)}:{frame.f_lineno} {code.co_qualname}"
            if self.by_signal or not code.co_filename.startswith(LIBRARY):
                self.rang = True
                signal.raise_signal(signal.SIGUSR2)
            raise self.error("stopped")


def listing(functions: Collection[str], points: list[int]) -> type[Stopping]:
    """A class that notes the events that are lines of these functions, by their qualified names."""

    class Listing(Stopping):
        @override
        def _count(self, frame: types.FrameType) -> None:
            super()._count(frame)
            if frame.f_code.co_qualname in functions:
                points.append(self.count)

    return Listing


def bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1)
        gradient = bits(value.grad) if value.is_leaf and value.grad is not None else None
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist() if flat.numel() else [], gradient
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [bits(member) for member in value]
    if isinstance(value, dict):
        return {key: bits(member) for key, member in value.items()}
    return repr(value)


class World(nn.Module):
    """State that a body may change: tensors, attributes, containers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.total: Tensor
        self.register_buffer("total", torch.zeros(4))
        self.h = torch.zeros(3, 4)
        self.x = torch.ones(3, 4)
        self.cache: dict[str, Tensor] = {"a": torch.zeros(4)}
        self.number, self.counts = 0, {"n": 0}
        self.optimizer: torch.optim.Optimizer | None = None
        self.body: Any = None

    @override
    def forward(self, x: Tensor, number: float | None = None) -> Any:
        return self.body(self, x) if number is None else self.body(self, x, number)

    def state(self) -> Any:
        tensors = [bits(one) for one in (*self.parameters(), *self.buffers())]
        steps = None if self.optimizer is None else bits(list(self.optimizer.state.values()))
        changed = bits([self.h, self.x, self.cache, self.counts])
        return tensors, changed, steps, rng_state().tolist()[:64]


def plain(world: World, x: Tensor) -> Any:
    return torch.relu(world.linear(x)) * 2 + 1


def recurrent(world: World, x: Tensor) -> Any:
    y = world.linear(x).relu() + 1
    world.h = torch.tanh(y + world.h)
    return y + world.h


def writing(world: World, x: Tensor) -> Any:
    x.add_(1)
    world.total.add_(x.sum(0))
    x.mul_(2)
    return x, x[0], world.total * 2


def drawing(world: World, x: Tensor) -> Any:
    z = world.norm(x) + torch.rand(3, 4)
    world.total.copy_(z.sum(0))
    world.h = nn.functional.dropout(z, 0.5)
    return {"z": z, "h": world.h}


def keeping(world: World, x: Tensor) -> Any:
    world.cache["a"] = world.cache["a"] * 2 + x[0]
    world.h = x
    world.cache["a"].add_(1)
    return world.cache["a"] + 1, world.h + 1


def differentiating(world: World, x: Tensor) -> Any:
    with torch.enable_grad():
        loss = world.linear(x).relu().sum()
        loss.backward()
    world.h = x * 3
    return loss.detach()


def leaving_gradients(world: World, x: Tensor) -> Any:
    """An argument that needs a gradient and has one from the second call on."""
    with torch.enable_grad():
        loss = world.linear(x).tanh().square().sum()
        loss.backward()
    return loss.detach()


def counting(world: World, x: Tensor, counts: Any = None) -> Any:
    """A number in a container that the call gets is counted up, and lifted out of the recording."""
    counts["n"] += 1
    world.h = torch.tanh(world.linear(x) * (counts["n"] / 7) + world.h)
    return world.h * 2


class _UpTo(TorchDispatchMode):
    """Raises before or after the ``at``th operator."""

    def __init__(self, at: int, *, after: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at, self.after, self.count = at, after, 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at and not self.after:
            raise Stopped
        result = func(*args, **(kwargs or {}))
        if self.count == self.at:
            raise Stopped
        return result


def _twin(world: World) -> World:
    """A copy of the world in the same state."""
    made = World()
    made.body = world.body
    made.load_state_dict(copy.deepcopy(world.state_dict()))
    for twin_parameter, parameter in zip(made.parameters(), world.parameters(), strict=True):
        twin_parameter.grad = None if parameter.grad is None else parameter.grad.clone()
    made.h, made.x = world.h.clone(), world.x.detach().clone().requires_grad_(world.x.requires_grad)
    made.x.grad = None if world.x.grad is None else world.x.grad.clone()
    made.h = made.x if world.h is world.x else made.h
    made.cache = {key: value.clone() for key, value in world.cache.items()}
    made.number, made.counts = world.number, dict(world.counts)
    if world.optimizer is not None:
        prepare(made)
        assert made.optimizer is not None
        made.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))
    return made


@define
class Outcome:
    """What came of one program that was stopped: how many events there were, and what differed from eager."""

    where: str = ""
    events: int = 0
    came_out: bool = False
    wrong: list[str] = field(factory=list)


def surroundings() -> dict[str, Any]:
    """Settings of the process that have to be as before, whatever happened."""
    return {
        "grad": torch.is_grad_enabled(), "inference": torch.is_inference_mode_enabled(), "gc": gc.isenabled(),
        "modes": torch._C._len_torch_dispatch_stack(), "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "blocks of autocast": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        "stand-ins": {name: value for name, value in torch.Tensor.__dict__.items() if name != "__dict__"},
        "modules": {name: value for name, value in nn.Module.__dict__.items() if name != "__dict__"},
        "recording": any(tree.recording for tree in trees_here().values()),
        "locked": capture_lock._is_owned(),
    }  # fmt: skip


def training(world: World, x: Tensor) -> Any:
    """A body that is captured as a region, with forward and backward pass."""
    return world.linear(x).tanh().mean(1) * world.norm(x).sum(1)


def reading(world: World, x: Tensor) -> Any:
    """A body that reads a value on the host, so that it is recorded in segments."""
    world.total.add_(x.sum(0))
    if x.sum() > 0:
        world.h = torch.tanh(world.linear(x) + world.h)
    y = world.h * torch.rand(3, 4)
    return y if world.total.sum() > -1e9 else x


@capture.island
def _beside(world: World, y: Tensor) -> Tensor:
    world.total.add_(y.sum(0))
    return y * 2


def around_an_island(world: World, x: Tensor) -> Any:
    """A body with an island: recorded in segments, with a function between them that runs in every replay."""
    y = world.linear(x).relu()
    z = _beside(world, y)
    world.h = torch.tanh(z + world.h)
    return z + world.h


def training_in_segments(world: World, x: Tensor) -> Any:
    """A region whose forward pass reads values."""
    y = world.linear(x).tanh()
    z = world.norm(y) if y.sum() > -1e9 else y
    return z.sum(1) * 2


def stepping(world: World, x: Tensor) -> Any:
    """A whole step of training, whose gradients its caller keeps."""
    assert world.optimizer is not None
    with torch.enable_grad():
        loss = world.norm(world.linear(x)).square().mean()
        world.optimizer.zero_grad()
        loss.backward()
        world.optimizer.step()
    return loss.detach()


def stepping_on_the_host(world: World, x: Tensor) -> Any:
    """A whole step of training with an optimizer that counts its steps on the host, so that its step is an island."""
    return stepping(world, x)


def numbered(world: World, x: Tensor, number: float = 1.0) -> Any:
    """A number that differs in each call, which is lifted out of the recording."""
    y = world.linear(x).tanh() * number
    world.total.add_(y.sum(0))
    return y + world.total


def numbered_state(world: World, x: Tensor, number: float = 1.0) -> Any:
    """As ``numbered``, with an attribute that is another tensor in each call, so that the attempt to lift is undone."""
    world.h = torch.tanh(world.linear(x) * number + world.h)
    world.total.add_(world.h.sum(0))
    return world.h + number


def raising(world: World, x: Tensor) -> Any:
    """An operator that raises from the fourth call on, which the body catches."""
    world.total.add_(1)
    try:
        y = torch.embedding(world.linear.weight, world.total.long())
    except IndexError:
        y = world.linear.weight * 2
    world.h = torch.tanh(y.sum(0) + world.h + x)
    return world.h * 2


def branching(world: World, x: Tensor) -> Any:
    """A value that is read after a write goes another way in each third call, and is handed on."""
    world.total.add_(1)
    way = world.total[0].item()
    world.h = torch.tanh(world.linear(x) + world.h) if way % 3 else world.h * 0.5
    return world.h * 2, way


def prepare(world: World) -> None:
    """Set up state that only some bodies need."""
    if world.body is stepping:
        world.optimizer = torch.optim.SGD(world.parameters(), lr=0.1, momentum=0.9)
    elif world.body is stepping_on_the_host:
        world.optimizer = torch.optim.Adam(world.parameters(), lr=0.1)
    elif world.body is leaving_gradients:
        world.x.requires_grad_()


BODIES: dict[str, Callable[[World, Tensor], Any]] = {
    one.__name__: one
    for one in (
        plain,
        recurrent,
        writing,
        drawing,
        keeping,
        differentiating,
        leaving_gradients,
        counting,
        training,
        reading,
        around_an_island,
        training_in_segments,
        stepping,
        stepping_on_the_host,
        numbered,
        numbered_state,
        branching,
        *([raising] if DEVICE.type == "cpu" else []),  # a GPU tells of an index out of range by ending all its work
    )
}
CALLS = {"numbered": range(1, 6), "counting": range(1, 7), "numbered_state": range(1, 4), "branching": range(1, 7)}
"""Numbers of the calls that may be stopped; of other bodies the first four."""


def calls_of(body: str) -> Sequence[int]:
    """Numbers of the calls that may be stopped."""
    return CALLS.get(body, range(1, 5))


KEEPING = ("plain", "recurrent", "drawing", "numbered", "numbered_state", "stepping", "stepping_on_the_host")
"""Bodies of which the caller keeps results, which must keep their values."""


def used(body: str, captured: Any, x: Tensor) -> Any:
    """One call, and what its caller does with the result."""
    if body.startswith("numbered"):
        captured.number += 1
        return captured(x, captured.number / 7)
    if body == "counting":
        return captured(x, captured.counts)
    if not body.startswith("training"):
        return captured(x)
    with torch.enable_grad():
        loss = captured(x).sum()
        loss.backward()
    return loss.detach()


def prefixes(world: World, body: str) -> list[Any]:
    """All states in which an eager call from this state may be stopped; the last one is that of a whole call."""
    states, generator = [world.state()], rng_state()
    at, over = 1, False
    while not over:
        for after in (False, True):
            twin = _twin(world)
            set_rng_state(generator)
            try:
                with _UpTo(at, after=after):
                    used(body, twin, twin.x)
                over = True
            except Stopped:
                pass
            if not over:
                states.append(twin.state())
        at += 1
    states += _between_operators(world, body)
    twin = _twin(world)
    set_rng_state(generator)
    used(body, twin, twin.x)
    states.append(twin.state())
    set_rng_state(generator)
    return states


class _InOptimizer(Stopping):
    """Raises at a line of an optimizer that changes something by no operator: ``zero_grad`` drops one gradient after
    another, and what begins the first step puts one tensor after another into the state."""

    @override
    def _called(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_qualname in ("Optimizer.zero_grad", "Adam._init_group") else None


def _between_operators(world: World, body: str) -> list[Any]:
    """States in which some of the gradients are gone, or some of an optimizer's state is there."""
    states, over = list[Any](), False
    while world.optimizer is not None and not over:
        twin, generator = _twin(world), rng_state()
        stopping = _InOptimizer(len(states) + 1, Stopped, lines=True)
        with contextlib.suppress(Stopped), stopping:
            used(body, twin, twin.x)
        set_rng_state(generator)
        over = stopping.count <= len(states)
        states.append(twin.state())
    return states


def outcome_of(body: str, captured: Any, x: Tensor) -> Any:
    """The bits of one call's result, or the exception: after a step that was stopped while it made an optimizer's state
    eager's next step raises."""
    try:
        return bits(used(body, captured, x))
    except Exception as error:  # noqa: BLE001 - to be compared
        return repr(error)


_prefixes: dict[tuple[str, int], list[Any]] = {}
"""The states that eager can be stopped in, by program and call; all worlds begin in the same state."""


def stopped_program(
    body: str, call: int, at: int, error: type[BaseException], *, lines: bool, by_signal: bool = False,
    kind: type[Stopping] | None = None,
) -> Outcome:  # fmt: skip
    """Call a captured function, stop its ``call``th call at the ``at``th event, go on, and compare with eager."""
    forget_trees()
    outcome, world = Outcome(), World()
    world.body = BODIES[body]
    prepare(world)
    around = surroundings()
    f = captured_as(world)
    for _ in range(call - 1):
        used(body, f, world.x)
    allowed = _prefixes.get((body, call)) or prefixes(world, body)
    _prefixes[body, call] = allowed
    stopping = (kind or Stopping)(at, error, lines=lines, by_signal=by_signal)
    result = None
    try:
        with stopping, _unraised() as unraised:
            result = used(body, f, world.x)
    except error:
        outcome.came_out = True
    except BaseException as unexpected:  # noqa: BLE001 - any other exception is what this looks for
        outcome.wrong.append(f"another exception: {unexpected!r}")
    outcome.where, outcome.events = stopping.where, stopping.count
    if stopping.rang and not (outcome.came_out or unraised or error is TypeError):  # no timeout is a TypeError
        outcome.wrong.append("an interrupt that nobody saw")
    try:
        left, eager = world.state(), _twin(world)
    except RuntimeError as unreadable:
        unreadable.add_note(f"after it was stopped at {outcome.where}")
        raise
    if left not in allowed or (not outcome.came_out and left != allowed[-1]):
        outcome.wrong.append("no prefix of eager's")
    now = surroundings()
    outcome.wrong += [f"{name}: {around[name]!r:.50} -> {now[name]!r:.50}" for name in now if now[name] != around[name]]
    kept = [world.h, *world.cache.values(), *([result] if isinstance(result, Tensor) else [])]
    kept += [
        parameter.grad for parameter in world.parameters() if parameter.grad is not None and body.startswith("stepping")
    ]
    values = bits(kept)
    for number in range(3):
        generator = rng_state()
        expected = outcome_of(body, eager, eager.x)
        there = rng_state()
        set_rng_state(generator)
        after = outcome_of(body, f, world.x)
        if after != expected or world.state() != eager.state():
            outcome.wrong.append(f"call {number} later differs")
            break
        set_rng_state(there)
        if number == 0 and body in KEEPING and bits(kept) != values:
            outcome.wrong.append("a tensor that the caller keeps was changed")
    return outcome


@contextlib.contextmanager
def _unraised() -> Iterator[list[Any]]:
    """What the interpreter can raise nowhere: a signal that came in ``__del__`` or in a weak reference's callback."""
    found: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, found.append
    try:
        yield found
    finally:
        sys.unraisablehook = hook


def points(body: str, call: int, *, lines: bool) -> int:
    """How many events a call has."""
    return stopped_program(body, call, -1, Stopped, lines=lines).events


def points_in(body: str, call: int, functions: Collection[str]) -> list[int]:
    """The events of a call that are lines of these functions, by their qualified names."""
    points: list[int] = []
    stopped_program(body, call, -1, Stopped, lines=True, kind=listing(functions, points))
    return points


ERRORS: tuple[type[BaseException], ...] = (Stopped, KeyboardInterrupt, MemoryError, RuntimeError, TypeError)


def all_points(*, lines: bool) -> Iterator[tuple[str, int, int]]:
    """Program, call and event, each."""
    for body in BODIES:
        for call in calls_of(body):
            for at in range(1, points(body, call, lines=lines) + 1):
                yield body, call, at
