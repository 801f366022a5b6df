"""The columns of the table of cells (by what code, and in which kind of call, Python state is read), and one cell."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings
from tests.guards.kinds import HEAD, Kind
from tests.guards.kinds_of_code import CALLS, LOOKED_UP
from tests.guards.kinds_of_containers import CONTAINERS, MODULES
from tests.guards.kinds_of_objects import OBJECTS
from tests.support.device import DEVICE

KINDS = (*OBJECTS, *LOOKED_UP, *CALLS, *CONTAINERS, *MODULES)
READERS = ("function", "method", "module", "nested module")
CALLED = ("no grad", "region", "whole step")
Read = Callable[[Any], Tensor]


class Holder:
    """Reads by a method."""

    def __init__(self, state: Any, read: Read) -> None:
        self.state, self.read = state, read

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.read(self.state)


class Layer(nn.Module):
    """Reads in ``forward``."""

    def __init__(self, state: Any, read: Read) -> None:
        super().__init__()
        self.state: Any = state
        self.read: Any = read

    @override
    def forward(self, x: Tensor) -> Any:
        return x * self.read(self.state)


class Outer(nn.Module):
    """Reads in a child module."""

    def __init__(self, state: Any, read: Read) -> None:
        super().__init__()
        self.inner = Layer(state, read)

    @override
    def forward(self, x: Tensor) -> Any:
        return self.inner(x + 1.0)


def reader_of(reader: str, state: Any, read: Read) -> Callable[[Tensor], Tensor]:
    """The function or module to capture, which reads the state in the given way."""
    if reader == "function":
        return lambda x: x * read(state)
    made: Any = {"method": Holder, "module": Layer, "nested module": Outer}[reader](state, read)
    return made.__call__ if reader == "method" else made  # type: ignore[no-any-return]


@define(eq=False)
class Side:
    """The captured or the eager one; both read the same state."""

    run: Callable[[Tensor], Any]
    weight: Tensor

    def outcome(self, x: Tensor) -> Any:
        """What a call gives, or what it raises."""
        try:
            found = self.run(x)
        except Exception as error:  # noqa: BLE001 - compared with eager's
            return type(error), str(error)
        return [one.detach().clone() for one in (*found, self.weight)]


def side_of(called: str, reads: Callable[[Tensor], Tensor], wrap: Callable[[Any], Any]) -> Side:
    """A side that makes one kind of call: without gradients, with a backward pass outside, or a whole step. ``wrap``
    captures, or does nothing."""
    weight = torch.full((3,), 0.5, device=DEVICE, requires_grad=called != "no grad")
    if called == "no grad":
        body = wrap(reads)

        def run(x: Tensor) -> Any:
            with torch.no_grad():
                return (body(x),)

        return Side(run, weight)
    if called == "region":
        body = wrap(reads)

        def run(x: Tensor) -> Any:
            weight.grad = None
            made = body(x * weight)
            made.sum().backward()
            return made, weight.grad

        return Side(run, weight)

    def step(x: Tensor) -> Tensor:
        loss = reads(x * weight).sum()
        loss.backward()
        assert weight.grad is not None
        with torch.no_grad():
            weight.addcmul_(weight.grad, torch.tensor(-0.125, device=DEVICE))
        weight.grad = None
        return loss.detach()

    body = wrap(step)
    return Side(lambda x: (body(x),), weight)


def space_of(kind: Kind, name: str) -> dict[str, Any]:
    """A namespace, as of a module, with the state in it."""
    sys.modules[name] = made = types.ModuleType(name)
    space = made.__dict__
    space["CLEAN"] = []
    exec(compile(HEAD + kind.source, f"<{name}>", "exec"), space)  # noqa: S102 - sources of this folder
    return space


@define(eq=False)
class Cell:
    """One cell of the table, with its state."""

    kind: Kind
    reader: str
    called: str
    space: dict[str, Any] = field(init=False)
    x: Tensor = field(factory=lambda: torch.arange(1.0, 4.0, device=DEVICE))

    def __attrs_post_init__(self) -> None:
        self.space = space_of(self.kind, "cells")

    def sides(self) -> tuple[Side, Side, Any]:
        """The captured side, the eager side, and the captured function."""
        captured: list[Any] = []

        def ours(body: Any) -> Any:
            captured.append(capture(body, max_recordings=8))
            return captured[0]

        state, read = self.space["state"], self.space["reads"]
        mine = side_of(self.called, reader_of(self.reader, state, read), ours)
        return mine, side_of(self.called, reader_of(self.reader, state, read), lambda body: body), captured[0]

    def change(self, source: str) -> None:
        """Change the state."""
        exec(compile(source, "<change>", "exec"), self.space)  # noqa: S102 - sources of this folder

    def run(self, source: str, *, never: bool = False, eager: bool = False) -> None:
        """Raise where the cell is not as it has to be. ``never``: it never replays. ``eager``: it does not replay after
        the change."""
        mine, plain, captured = self.sides()
        for _ in range(6):
            self._same(mine, plain, "before")
        counted = recordings(captured)
        assert never or counted.replays, f"no replay before: {counted}"
        self.change(source)
        before, raised = counted.replays, False
        for turn in range(4):
            raised = self._same(mine, plain, f"call {turn + 1} after") or raised
        after = recordings(captured).replays
        assert raised or (after == before) == (eager or never), f"replays {before} -> {after}: {recordings(captured)}"

    def _same(self, mine: Side, plain: Side, when: str) -> bool:
        expected, found = plain.outcome(self.x), mine.outcome(self.x)
        if isinstance(expected, tuple) or isinstance(found, tuple):
            assert found == expected, when
            return True
        assert all(map(torch.equal, found, expected)), f"{when}: {found} is not {expected}"
        return False
