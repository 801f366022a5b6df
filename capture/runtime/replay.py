"""Replay: run a recording that was found to fit, and build the call's result of what it left.

Once a recording ran, the call has happened for the most part: what its operators wrote stays written. So all that
belongs to the call follows, effects above all, and what comes in between, as a signal's exception, is put off until
then (``native.committed``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from capture.core import config
from capture.core.interrupts import is_interrupt
from capture.key.signature import Leaf
from capture.native import native
from capture.observe.capture_lock import locked_or
from capture.observe.run import ObservedRun, run_watched
from capture.runtime import fault
from capture.runtime.captured import Captured
from capture.state.body_run import BodyRun
from capture.state.call import Call
from capture.tree.node import Node
from capture.tree.tree import Tree


class Commit:
    """A replay and what follows it. It may be interrupted at any point, and begun again."""

    __slots__ = (
        "begin_state",
        "begun",
        "captured",
        "has_counted",
        "has_result",
        "has_stopped",
        "in_place",
        "leaves",
        "node",
        "put_off",
        "ran",
        "read_values",
        "result",
        "resumes",
        "roots_by_name",
        "tree",
        "values",
        "whole",
    )

    def __init__(self, captured: Captured, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf]) -> None:
        self.captured, self.node, self.tree, self.values, self.leaves = captured, node, tree, values, leaves
        self.in_place = bool(tree.lingering) and node is tree.awaited and tree.in_place
        self.ran = self.has_counted = self.has_result = self.has_stopped = False
        self.resumes = True
        self.whole: list[Any] | None = None
        self.begun: list[Any] = []
        self.result: Any = None
        self.roots_by_name: dict[str, Any] | None = None
        self.put_off: BaseException | None = None
        self.read_values: Mapping[int, Any] = {}  # numbers that the host read and the body hands on
        program = node.program
        follows = program is not None and program.again.follows_draws
        self.begin_state = torch.default_generator.get_state() if follows else None

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], run: BodyRun | None) -> Any:
        """Have the recording run, and finish. ``run``: the call's ``BodyRun``, if it has one, which notes the replay in
        place of the body."""
        if run is not None:
            run.replayed = True
        try:
            with self.captured.log.range("replay"):
                result = native.committed(function, arguments, self.finish, self.tell)
        except BaseException as error:
            if run is not None and self.has_result:
                run.replay(self.result)
            elif self.was_stopped():
                return self._go_on(error, run)
            elif run is not None and not self.ran:
                run.replayed = False
            if self.put_off is not None and not is_interrupt(error):
                raise self.put_off from error
            raise
        if run is not None and self.has_result:
            run.replay(self.result)
        elif run is not None:
            run.replayed = False
        return result

    def _go_on(self, error: BaseException, run: BodyRun | None) -> Any:
        try:
            return self.resumed(error, run)
        finally:
            if self.put_off is not None:  # as the signal would have come out of the body
                raise self.put_off

    def resumed(self, error: BaseException, run: BodyRun | None) -> Any:
        """An operator raised. Gives the result, if the body goes on."""
        assert self.node.recording is not None
        watch = self.node.recording.answers(error, self.leaves) if self.resumes else None

        def ended() -> Any:
            self.give_up()
            if run is not None:
                run.error = error  # as when the body itself raises
            raise error

        if watch is None:
            return ended()
        call = self.captured.call(self.values, self.leaves)
        return locked_or(ended, _resumed, self.captured, call, [watch, watch.again()], error, run)

    def give_up(self) -> None:
        """End the call here: what its operators did so far stays."""

    def was_stopped(self) -> bool:
        """Whether one of the body's operators raised."""
        if not self.ran and self.node.recording is not None and self.node.recording.was_stopped():
            self.has_stopped = True
        return self.has_stopped

    def tell(self, errors: list[BaseException]) -> None:
        """Report exceptions that came while the call was completed. Where the replay raised, an interrupt waits until
        that was dealt with."""
        if self.ran:
            tell(self.captured, errors)
        else:
            self.put_off = next(filter(is_interrupt, errors), None)

    def finish(self, ended: bool) -> Any:
        """``ended``: the recording ran."""
        node, tree = self.node, self.tree
        if not ended:
            return None
        self.ran = True
        if tree.lingering:
            tree.let_go(node)
        if node.written and not self.has_counted:
            count_writes(node.written, self.leaves)
            self.has_counted = True
        if not self.has_result:
            self.result = self._built()
            self.has_result = True
        if tree.current is not node:
            tree.stand_on(node)
            self.captured.log.counters.replays += 1
        return self.result

    def roots(self) -> dict[str, Any]:
        """See ``Captured.named_roots``."""
        if self.roots_by_name is None:
            self.roots_by_name = self.captured.named_roots(self.values)
        return self.roots_by_name

    def _built(self) -> Any:
        outputs, node = self.node.outputs, self.node
        assert outputs is not None
        if outputs.single is not None:
            return outputs.build_single()
        if outputs.in_line is not None and outputs.reads and not self.read_values:
            self.read_values = outputs.in_line.taken()
        again = self.whole is not None
        if self.whole is None:
            self.whole = [None] * outputs.count
        result = outputs.build(
            self.tree.pool, self.leaves, node.statics.__getitem__, self.roots, in_place=self.in_place,
            values=self.whole, again=again, begun=self.begun, read=self.read_values,
        )  # fmt: skip
        if node.program is not None:
            result.program, result.is_replay, result.begin_state = node.program, True, self.begin_state
        return result


def replay(
    captured: Captured, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf], run: BodyRun | None, *,
    resumes: bool = True,
) -> Any:  # fmt: skip
    """Run the recording of a node, and have the path end in that node. ``run``: the call's ``BodyRun``, if it has one,
    which notes the replay in place of the body. ``resumes``: if an operator raises, the body goes on from there with
    these values."""
    recording = node.recording
    assert recording is not None
    commit = Commit(captured, node, tree, values, leaves)
    commit.resumes = resumes
    if node.computed is not None and (node.outputs is None or node.outputs.in_line is None):
        commit.read_values = computed_by(node, values)
    return commit.run(recording.replay, (leaves,), run)


def computed_by(node: Node, values: tuple[Any, ...]) -> Mapping[Any, Any]:
    """What a recording without reads leaves of the numbers of a call, by formula, before anything is left. That Python
    can compute it was found out when its numbers were taken."""
    assert node.outputs is not None
    numbers = node.computed.numbers(values, {})
    return {formula: formula.value(numbers) for _, formula in node.outputs.reads if hasattr(formula, "value")}


def _resumed(
    captured: Captured, call: Call, watches: list[Any], error: BaseException, run: BodyRun | None
) -> Any:  # fmt: skip
    """The body does in Python what it did up to the operator that raised, and what it does then: mostly raise, too.

    ``watches``: one after another is tried where something goes wrong here before the body begins. It must not run
    without one: what the replay did would be done twice."""
    watched: ObservedRun | None = None
    while watched is None:
        before = 0 if run is None else run.runs
        try:
            if run is not None:
                run.replayed = False  # it is the body's run from here on
            watched = run_watched(call, watches.pop(0))
        except Exception as own:
            if is_interrupt(own) or config.current().strict or run is None or run.runs > before:
                raise
            fault.tell(captured, own)
            run.replayed = True
        if watched is None and not watches:
            assert run is not None
            run.error = error
            raise error
    call.forget_run()
    captured.log.counters.eager_calls += 1
    captured.log.add("fallback", f"an operator raised {type(error).__name__} in a replay: the body went on from there")
    put_off = watched.watch.fault  # in a note beside the body, which went on
    if put_off is not None and is_interrupt(put_off):
        raise put_off
    if watched.error is not None:
        if run is not None:
            run.error = watched.error
        raise watched.error
    return watched.result


def tell(captured: Captured, errors: Sequence[BaseException]) -> None:
    """A replay came to its end. What was put off comes out now if it is an interrupt, and else is a finding."""
    for error in errors:
        if is_interrupt(error) or config.current().strict:
            raise error
    fault.tell(captured, errors[0])


def count_writes(positions: Sequence[int], leaves: Sequence[Any]) -> None:
    """Managed inputs are written through tensors of the recording's own, as in the recording run are inputs on whose
    memory Python state lies, too; autograd must see it on the caller's."""
    for position in positions:
        if not leaves[position].is_inference():
            torch.autograd.graph.increment_version(leaves[position])
