"""Random programs over captured functions, run beside an eager twin and compared bit for bit after every action.

A ``Program`` is plain integers, so that Hypothesis shrinks it well and a failure can be run again from its text:
``run(Program(...))``. Both worlds of a run are built alike; only the functions of one are captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from attrs import define, field
from torch import Tensor

from capture import (
    BorrowedOutputError,
    CaptureError,
    capture,
    config,
    mark_step_begin,
    recordings,
    reset,
)
from capture.tree import step as _step
from capture.tree import thread_trees as thread_trees  # fmt: skip
from tests.generated.actions import ACTIONS, DECK, Act, Program
from tests.generated.bodies import chain
from tests.generated.bodies_of_state import OPERATIONS, generated
from tests.generated.comparison import Comparison
from tests.generated.worlds import CATALOGUE, KNOWN, Body, Boom, Entry, Mismatch, World, fresh
from tests.support.device import DEVICE, rng_state, set_rng_state

NAMES: tuple[str, ...] = tuple(CATALOGUE)  # of both files of bodies, which are imported above, in this order


@define
class Tally:
    """Counts of what captured functions did, over many programs."""

    calls: dict[str, int] = field(factory=dict)
    replays: dict[str, int] = field(factory=dict)
    recordings: int = 0
    rebinds: int = 0
    kept_outputs: int = 0

    def add(self, name: str, calls: int, replays: int) -> None:
        """Count one function's calls."""
        self.calls[name] = self.calls.get(name, 0) + calls
        self.replays[name] = self.replays.get(name, 0) + replays

    def share(self) -> float:
        """Replays of all calls."""
        return sum(self.replays.values()) / max(sum(self.calls.values()), 1)


def build(captured: bool, cast: tuple[int, ...], bodies: tuple[Body, ...] = (), *, bind: bool = False) -> World:
    """A world as it stands before the first action."""
    world = World(captured, "bind" if bind else "auto")
    torch.manual_seed(11)
    world.tensors = [fresh((4, 4), seed=1), fresh((4, 4), seed=2), fresh((6, 4), seed=3)]
    world.statics = [fresh((4, 4), seed=4), fresh((4, 4), seed=5)]
    world.statics.append(world.statics[0].t())
    world.caches = [{"k": fresh((4, 4), seed=i), "v": fresh((4, 4), seed=i + 9)} for i in (6, 7)]
    world.generators = [torch.Generator(DEVICE).manual_seed(i) for i in (1, 2)]
    for index in cast:
        entry = CATALOGUE[NAMES[index % len(NAMES)]]
        if entry.name not in KNOWN:
            world.cast.append((entry, entry.build(world)))
    for body in bodies:
        kept = tuple(operation for operation in body if OPERATIONS[operation[0] % len(OPERATIONS)] not in KNOWN)
        world.cast.append((Entry("generated", "mm", chain), generated(world, kept)))
    if not world.cast:
        world.cast.append((CATALOGUE["chain"], chain(world)))
    return world


def micro(program: Program) -> Iterator[tuple[str, int, int, int]]:
    """The program's actions one by one: a burst is several calls of one form with other values."""
    rounds = [
        (action, target, form, seed + 5 * turn)
        for turn in range(program.rounds)
        for action, target, form, seed in program.steps
    ]
    for action, target, form, seed in rounds:
        name = DECK[action % len(DECK)]
        if name in KNOWN or (name == "mark" and not program.marks):
            continue
        if name != "burst":
            yield name, target, form, seed
            continue
        for turn in range(3 + seed % 3):
            yield "call", target, form, seed + turn * 3


class Runner:
    """Runs one program in both worlds."""

    def __init__(self, program: Program, tally: Tally | None = None) -> None:
        self._program, self._tally = program, tally
        self._log: list[str] = []

    def run(self) -> None:
        """Raise ``Mismatch`` where the worlds part, with the actions up to there."""
        thread_trees.forget_trees()
        _step.marks().begun = 0
        program = self._program
        state = rng_state()
        try:
            with (
                warnings.catch_warnings(),
                config.patch(
                    cache=False,
                    poison=program.poison,
                    verify="first" if program.verify and "verify" not in KNOWN else "off",
                ),
            ):
                warnings.simplefilter("ignore")
                self._run()
        except Mismatch as error:
            raise Mismatch(f"{error}\n{program!r}\n  " + "\n  ".join(self._log)) from error
        finally:
            set_rng_state(state)

    def _run(self) -> None:
        program = self._program
        eager, ours = (build(ours, program.cast, program.bodies, bind=program.bind) for ours in (False, True))
        comparison = Comparison()
        for name, target, form, seed in micro(program):
            said = eager.cast[target % len(eager.cast)][0].name
            self._log.append(f"{name} {said} target={target} form={form} seed={seed}")
            self._act(eager, ours, name, target, form, seed)
            comparison.check(eager, ours)
            for world in (eager, ours):
                world.scratch.clear()
            if name == "borrow":
                self._borrow(ours, target, seed)
                comparison.check(eager, ours)
        self._count(ours)
        if program.poison and program.cast[0] % 2:
            reset()

    def _act(self, eager: World, ours: World, name: str, target: int, form: int, seed: int) -> None:
        act = ACTIONS[name][1]
        outcomes = [_outcome(world, act, target, form, seed) for world in (eager, ours)]
        if outcomes[0] != outcomes[1]:
            raise Mismatch(f"{outcomes[0]} eagerly, {outcomes[1]} captured")

    def _borrow(self, ours: World, target: int, seed: int) -> None:
        """Check that an output borrowed from a recording raises once its step is over, and that nothing else
        changes."""
        function = capture(_borrowing, outputs="borrow")
        with ours.modes():
            for turn in range(3):
                kept = function(fresh((4, 4), seed=seed + turn))
                counted = recordings(function)
                if self._program.marks:
                    mark_step_begin()
                again = function(fresh((4, 4), seed=seed))
                if counted.recordings + counted.replays:
                    try:
                        kept.add(1)
                    except BorrowedOutputError:
                        pass
                    else:
                        raise Mismatch("a borrowed output can be used after its step")
                del kept, again

    def _count(self, ours: World) -> None:
        if self._tally is None:
            return
        for entry, function in ours.cast:
            try:
                counted = recordings(function)
            except CaptureError:
                continue
            calls = counted.body_runs + counted.replays
            self._tally.add(entry.name, calls, counted.replays)
            self._tally.recordings += counted.recordings
            self._tally.rebinds += counted.rebinds
            self._tally.kept_outputs += counted.kept_outputs


def _borrowing(x: Tensor) -> Tensor:
    return x * 2 + 1


def _outcome(world: World, act: Act, target: int, form: int, seed: int) -> str | None:
    """The text of what an action raised. The result goes to the world's scratch."""
    raised = None
    with world.modes():
        try:
            result = act(world, target, form, seed)
            world.scratch.append(("result", result))
        except Exception as error:
            if isinstance(error, CaptureError) or not isinstance(error, (Boom, RuntimeError, IndexError, ValueError)):
                raise
            raised = f"{type(error).__name__}: {error}"
    return raised


def run(program: Program, tally: Tally | None = None) -> None:
    """Run one program in both worlds."""
    Runner(program, tally).run()
