"""Record failure: what happens where a recording run is no recording.

A run that executed stands: what lies in the pool is moved out of it. Of a run that only captured nothing has happened
but the body's Python, which is undone; then dispatch has the body run as a plain call, once the recording is put away:
the body may call other captured functions, which record in the same pool.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, field

from capture.autograd.saved_graph import ForwardOutputs
from capture.core.data import define
from capture.core.facts import Facts
from capture.core.interrupts import is_interrupt, suppress
from capture.core.plan import CapturePlan
from capture.engines.base import Recorded
from capture.key.tensor_meta import storage_of
from capture.observe import islands
from capture.observe import run as _run
from capture.observe.capture_lock import locked
from capture.observe.run import ObservedRun
from capture.observe.trace import Reshaped
from capture.rules.compile_plan import compile_plan
from capture.runtime.captured import Captured
from capture.runtime.entry import RETRIES, Entry
from capture.runtime.gradient_offload import OffloadedGradients
from capture.runtime.record_outputs import own_values, plan_recorded
from capture.runtime.verdict import Refuted, Reply, Verdict
from capture.state import body_run, diff, effects
from capture.state.call import Call
from capture.state.stand_ins import settle, with_callers
from capture.torch_private.surroundings import Surroundings
from capture.tree.tree import Tree


@define(eq=False)
class Attempt:
    """One recording, from the first change that it makes until it is in the tree, or nothing of it is left."""

    captured: Captured
    call: Call
    tree: Tree
    undo: bool
    communicates: bool
    """Other ranks run the collectives of this call, and wait for it in them."""
    parked: OffloadedGradients = field(factory=OffloadedGradients)
    around: Surroundings = field(factory=Surroundings)
    has_ended: bool = False
    is_undone: bool = False
    """The body's Python has run, and that was undone; nothing else has happened."""

    @property
    def is_to_be_completed(self) -> bool:
        """Whether nothing of the run stands, but there is no way back: islands have run, or other ranks have come to
        the collectives that this one has only captured, and would have those of its next call for them."""
        run = body_run.current()
        if run is None or self.undo:
            return False
        return islands.has_answers(run) or (self.is_undone and self.communicates)

    def end(self, reply: Reply) -> None:
        """Everything that the attempt changed is restored or kept, apart from what is beside it."""
        is_done = reply.verdict is Verdict.DONE
        self.tree.recording = False
        self.call.forget_run()  # its snapshot has the parked gradients: what nobody else has need not come back
        if reply.interrupt is None:  # else its frames hold what the body made, and the next recording looks
            self.tree.put_away(self.captured.log, "a failed recording")
        if not is_done:  # before the parked gradients come back: the two together would be the most ever used
            locked(self.tree.give_back_empty, self.captured.log)
        self.parked.settle()
        self.has_ended = True

    def mend(self, errors: list[BaseException]) -> None:
        """Something ended it. What the body did stays, where its operators ran, and the pool is given up with all
        that lies in it: whoever keeps a tensor there keeps its memory, too. Where they were only captured, all other
        recordings stay, and the next one looks at the pool. May be called again."""
        run = body_run.current()
        if run is not None and run.error is errors[0]:  # which put back what was ours, and left what was the body's
            self.around.note_grad_mode()
        self.around.put_back(errors[0])
        watched, executes = self.call.watched, self.tree.backend.executes_recording_runs
        self.tree.recording = False
        if watched is not None and not watched.is_settled and not self.has_ended:
            self.communicates = self.communicates or bool(watched.watch.trace.collectives)
            self.is_undone = watched.has_begun and not executes
            self._settle(watched, stands=executes and not self.undo)
            if executes:
                self.tree.retire()
        self.parked.settle()

    def _settle(self, watched: ObservedRun, *, stands: bool) -> None:
        recorded = Recorded(watched, None, None)
        if not stands and not self.tree.backend.executes_recording_runs:
            watched.changed = effects.classified(watched.before, _run.changes_of_body(watched), watched.ran)
            _undo_captured(watched)
            return
        watched.changed = effects.classified(watched.before, diff.changes(watched.before), watched.ran)
        if not stands:
            _run.undo(watched)
            return
        if self.call.put_out is not None:
            self.call.put_out()
        _settle_shapes(self.call, recorded)
        _settle_effects(self.call, watched)


def refused(
    captured: Captured, entry: Entry, call: Call, tree: Tree, recorded: Recorded, facts: Facts, plan: CapturePlan, *,
    undo: bool, is_branch: bool = False,
) -> Reply:  # fmt: skip
    """The run is no recording, or not the one that was planned. ``is_branch``: see ``Refuted``."""
    reason = "the host read what it did in no run before" if is_branch else "the recording run differs from the plan"
    reason = facts.refused or recorded.failure or reason
    if not recorded.executed:
        return _nothing_ran(captured, entry, recorded, Refuted(facts, plan, reason, is_branch))
    assert recorded.described is not None
    outputs = plan_recorded(captured, entry, recorded, tree.pool)
    values = outputs.adopt(own_values(outputs, call, recorded.described), copied=True)
    _settle_shapes(call, recorded)
    done = outputs.done_by([effect.change for effect in recorded.described.effects], call.named_roots)
    result = call.whole(outputs.finish(values, call.named_roots, begun=done))
    tree.keep_used()
    if undo:
        undo_run(recorded)
    return Reply(Verdict.DONE, result, refuted=Refuted(facts, plan, reason, is_branch))


def without_facts(captured: Captured, entry: Entry, call: Call, tree: Tree, recorded: Recorded, *, undo: bool) -> Reply:
    """As `refused`, where the body raised or was stopped, so that there are no facts."""
    watched = recorded.watched
    error = watched.error if watched is not None else None
    if recorded.executed or (error is not None and is_interrupt(error) and not recorded.stopped):
        assert watched is not None
        assert error is not None
        if recorded.executed:
            _settle_shapes(call, recorded)
            tree.keep_used()
            _settle_effects(call, watched)
        if undo or not recorded.executed:
            undo_run(recorded)
        watched.is_settled, watched.error = True, None
        if not (recorded.executed or undo):  # the body may raise it by itself, once all before it has happened
            watched.forget()
            return Reply(Verdict.EAGER, reason="it was stopped while it was captured", interrupt=error)
        try:
            raise error
        finally:
            del error  # which has this frame
    facts = entry.facts or captured.bare_facts()
    syncs = () if watched is None else tuple(watched.watch.trace.syncs.values())
    if any(not sync.is_compared for sync in syncs):
        facts = evolve(facts, host_syncs=syncs)
    else:
        facts = evolve(facts, refused=recorded.failure)
    plan = compile_plan(captured.annotation, facts)
    reason = recorded.failure or "the capture failed"
    return _nothing_ran(captured, entry, recorded, Refuted(facts, plan, reason))


def _nothing_ran(captured: Captured, entry: Entry, recorded: Recorded, refuted: Refuted) -> Reply:
    """Only the body's Python has run: undo that. The body is to run as a plain call."""
    if recorded.recording is not None:
        recorded.recording.release()
    raised = recorded.watched is not None and recorded.watched.error is not None and not recorded.stopped
    undo_run(recorded)
    if recorded.watched is not None:
        recorded.watched.forget()
    if recorded.transient and entry.differing_runs < RETRIES:
        captured.log.add("drop", refuted.reason)
        entry.differing_runs += 1
        return Reply(Verdict.EAGER, reason=refuted.reason)
    if refuted.is_branch:  # a captured run does not show everything
        captured.log.add("drop", refuted.reason)
        return Reply(Verdict.OBSERVE, refuted=refuted)
    if entry.facts is None:  # recorded at once, without a watched run
        captured.log.add("drop", refuted.reason)
        return Reply(Verdict.OBSERVE)
    return Reply(Verdict.EAGER, reason=refuted.reason, refuted=refuted, body_first=raised)


def undo_run(recorded: Recorded) -> None:
    """Put back what the run changed: all of it if it executed, else what the body's Python did."""
    watched = recorded.watched
    if watched is not None and recorded.executed:
        _run.undo(watched)
    elif watched is not None:
        _undo_captured(watched)


def _undo_captured(watched: ObservedRun) -> None:
    """Of a run that only captured nothing has happened then, but for its islands: where the body runs in this call
    after all, they are answered. Outside of calls nobody goes on from what they left."""
    run = body_run.current()
    if run is None and watched.watch.islands_ran:
        watched.changed, watched.is_compared = diff.changes(watched.before), True
    _run.undo_python(watched)
    if run is not None and watched.watch.islands_ran:
        islands.answer(run, list(watched.watch.islands_ran))
        watched.watch.islands_ran.clear()


def after_fault(watched: ObservedRun, tree: Tree, ran: body_run.BodyRun) -> tuple[bool, Any]:
    """Something went wrong here beside a run that was watched, or to be recorded. One that only captured is undone. The
    result of one that executed stands, as its effects do, on memory that the pool is given up for. Gives whether it has
    one."""
    if not watched.watch.executes:
        _undo_captured(watched)
        return False, None
    if watched.values is not watched.call.values:
        tree.retire()
        with suppress(Exception):  # what went wrong may be the comparison
            if not watched.is_compared:
                watched.changed = effects.classified(watched.before, diff.changes(watched.before), watched.ran)
        _settle_effects(watched.call, watched)
    if not ran.has_ended:
        return False, None
    theirs = _theirs(watched.call, watched)
    # an error that the run met behind the body is none of the body's
    result = watched.result if watched.is_over else ran.outcome(watched.call.leaves)
    if type(result) is not ForwardOutputs:
        return True, with_callers(theirs, result)
    pair = result._replace(result=with_callers(theirs, result.result))
    pair.program = result.program
    return True, pair


def _theirs(call: Call, watched: ObservedRun) -> dict[int, Any]:
    """The caller's leaves, by ``id`` of those that the body was given in their place."""
    return {id(leaf): call.leaves[position] for position, (_, leaf) in enumerate(watched.arguments)}


def _settle_effects(call: Call, watched: ObservedRun) -> None:
    """The body may have kept staged inputs on attributes: put the caller's tensors there. And it may have changed
    objects that stand for the caller's, as those hold tensors: change these."""
    settle(watched.changed, call.named_roots(), _theirs(call, watched))


def _settle_shapes(call: Call, recorded: Recorded) -> None:
    """The body may have given a staged input another shape, or other memory: the caller's tensor gets it, too."""
    assert recorded.watched is not None
    watch, before = recorded.watched.watch, dict[int, Reshaped]()
    for reshaped in watch.trace.reshaped:
        before.setdefault(id(reshaped[0]), reshaped)
    for (_, staged), theirs in zip(recorded.watched.arguments, call.leaves, strict=True):
        if not isinstance(staged, torch.Tensor) or staged is theirs or staged.layout is not torch.strided:
            continue
        if id(storage_of(staged)) not in watch.arguments:
            theirs.data = staged.data
        elif id(staged) in before:
            begin = theirs.storage_offset() + staged.storage_offset() - before[id(staged)][2]
            with torch.no_grad():
                theirs.set_(theirs.untyped_storage(), begin, staged.shape, staged.stride())
