"""Random programs over Python state: what bodies read is replaced, changed, deleted and added between calls.

Each function reads some kinds of state from the table of cells, by one reader, in one kind of call. A ``Program``
is plain integers; ``run(Program(...))`` runs one alone. Both worlds are built alike, with state of their own.
"""

from __future__ import annotations

import contextvars
import re
import warnings
from typing import Any

import torch
from attrs import define, field, frozen

from capture import capture, config, recordings
from capture.tree import thread_trees
from tests.generated.worlds import Mismatch
from tests.guards.cells import CALLED, KINDS, READERS, reader_of, side_of, space_of
from tests.guards.kinds import Kind
from tests.support.device import DEVICE
from tests.support.read_tracer import trace

_ADDRESS = re.compile(r"0x[0-9a-f]+")


@frozen
class Program:
    """A program as integers. A step is (action, kind, change)."""

    kinds: tuple[int, ...]
    reader: int
    called: int
    steps: tuple[tuple[int, int, int], ...]


class Several:
    """State of several kinds, each with the function that reads it."""

    def __init__(self) -> None:
        self.parts: list[tuple[Any, Any]] = []


def read_all(states: Several) -> Any:
    total = 0.5
    for read, state in states.parts:
        total = total + read(state)
    return total


@define(eq=False)
class World:
    """One of the two sides that are compared: its namespaces, and the function that reads them."""

    kinds: list[Kind]
    states: Several = field(factory=Several)
    spaces: list[dict[str, Any]] = field(factory=list)
    side: Any = None
    captured: Any = None

    def build(self, program: Program, name: str) -> World:
        """The namespaces as they are before the first action."""
        for at, kind in enumerate(self.kinds):
            self.spaces.append(space_of(kind, f"{name}_{at}"))
            self.states.parts.append((self.spaces[at]["reads"], self.spaces[at]["state"]))

        def wrap(body: Any) -> Any:
            self.captured = capture(body, max_recordings=8) if name == "ours" else body
            return self.captured

        reads = reader_of(READERS[program.reader % len(READERS)], self.states, read_all)
        self.side = side_of(CALLED[program.called % len(CALLED)], reads, wrap)
        return self

    def act(self, action: int, kind: int, change: int) -> Any:
        """Do one action; gives its result, or what it raised."""
        x = torch.arange(1.0, 4.0, device=DEVICE) + float(change % 2)
        if action < 6:
            return self.side.outcome(x)
        at = kind % len(self.kinds)
        space = self.spaces[at]
        sources = list(self.kinds[at].changes.values())
        source = self.kinds[at].source if action > 8 else sources[change % len(sources)]
        try:
            exec(compile(source, "<change>", "exec"), space)  # noqa: S102 - sources of these tests
        except Exception as error:  # noqa: BLE001 - as when something is deleted twice
            return type(error), str(error)
        self.states.parts[at] = (space["reads"], space["state"])
        return None

    def clean(self) -> None:
        """Undo changes to state of the whole process."""
        for space in self.spaces:
            for one in reversed(space["CLEAN"]):
                one()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return all(map(torch.equal, one, other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0] is other[0] and _ADDRESS.sub("", one[1]) == _ADDRESS.sub("", other[1])
    return one is other


def _run(program: Program) -> tuple[int, int]:
    kinds = [KINDS[number % len(KINDS)] for number in program.kinds]
    worlds = [World(kinds), World(kinds)]
    log: list[str] = []
    try:
        eager, ours = (world.build(program, name) for world, name in zip(worlds, ("eager", "ours"), strict=True))
        for step in program.steps:
            log.append(str(step))
            for _ in range(4 if step[0] < 3 else 1):
                expected, result = eager.act(*step), ours.act(*step)
                if not _same(expected, result):
                    names = [kind.name for kind in kinds]
                    raise Mismatch(f"{result} is not {expected}\n{program!r}\n{names}\n" + "\n".join(log))
        counted = recordings(ours.captured)
        return counted.body_runs + counted.replays, counted.replays
    finally:
        for world in worlds:
            world.clean()


def run(program: Program) -> tuple[int, int]:
    """Run one program in both worlds; gives calls and replays."""
    thread_trees.forget_trees()
    with torch.enable_grad(), warnings.catch_warnings(), config.patch(cache=False):
        warnings.simplefilter("ignore")
        return contextvars.copy_context().run(_run, program)


def unguarded(program: Program) -> list[str]:
    """Reads of the program's function, before anything happened to its state, that no guard tells of."""
    thread_trees.forget_trees()
    kinds = [KINDS[number % len(KINDS)] for number in program.kinds]
    world = World(kinds).build(program, "ours")

    def traced() -> list[str]:
        for _ in range(7):
            world.act(0, 0, 0)
        if not recordings(world.captured).recordings:
            return []
        x = torch.arange(1.0, 4.0, device=DEVICE)
        with torch.set_grad_enabled(CALLED[program.called % len(CALLED)] != "no grad"):
            return list(dict.fromkeys(trace(world.captured, x).unguarded))

    with torch.enable_grad(), warnings.catch_warnings(), config.patch(cache=False):
        warnings.simplefilter("ignore")
        try:
            return contextvars.copy_context().run(traced)
        finally:
            world.clean()
