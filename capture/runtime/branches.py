"""Branches: one function as a tree of its own, where the host reads values in the middle of its body.

``if y.sum() > 0: ...`` ends a segment. Which segment follows is known once the value was read:

    1 -> 2 -> 4        a recording of the run that read True
    1 -> 3 -> 4        a recording of the run that read False

A **branch** is what the host read, in order. Each has facts and a plan of its own, as a run goes another way after
another value, and is watched once before it is recorded. A recording begins with the body: what two of them have in
common lies in both, at the same addresses, so that a replay may begin in the one and go on in the other
(``Recording.joins``). Where a value was never read before, what the segments wrote is put back, and dispatch has the
call watched or recorded. So a call either was a replay, or has not happened.

A read that gives another value in call after call, such as a loss for the log, ends in no replay at all:
``Steadiness`` counts, and the function runs eagerly then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import CodeType
from typing import Any, Literal, cast

import torch
from attrs import evolve, field
from typing_extensions import override

from capture.core.data import frozen
from capture.core.facts import Facts
from capture.core.interrupts import is_interrupt
from capture.engines.base import Found, IslandCall, SegmentedRecording, found
from capture.engines.registry import backend_for
from capture.engines.undo import Undo
from capture.guards.names_used import uses_of
from capture.guards.recording_guard import changes_of_state
from capture.key.attributes import MISSING
from capture.key.signature import Leaf
from capture.native import native
from capture.observe.computed import Computed
from capture.observe.islands import Outcome, StateChange, answer, perform, settle
from capture.observe.operator_schema import read_text
from capture.observe.returned_value import ASKED, RETURNED, AsReturned, as_returned
from capture.runtime.captured import Captured
from capture.runtime.entry import MOST_BRANCHES, Entry
from capture.runtime.formula_program import BEFORE_READS, FormulaProgram, program_of
from capture.runtime.noted_numbers import Formula
from capture.runtime.replay import Commit
from capture.state.body_run import BodyRun
from capture.state.optimizers import set_by_schedule
from capture.state.source import Source
from capture.tree.liveness import hold
from capture.tree.node import Node
from capture.tree.tree import Tree

Reads = tuple[str, ...]


def may_follow(entry: Entry) -> bool:
    """Whether recordings for this entry may have breaks."""
    backend = entry.backend
    return backend is not None and backend.breaks_at_reads


def followed(captured: Captured, entry: Entry, facts: Facts) -> Facts:
    """The facts of a run with the branch it took; without one, where its reads are not followed."""
    is_whole = entry.region is None and not captured.is_backward
    return explained(facts, follows=may_follow(entry), is_whole=is_whole)


def explained(facts: Facts, *, follows: bool | None = None, is_whole: bool = True) -> Facts:
    """The same for a run that is only explained. ``follows``: the engine records segments. ``is_whole``: the run is not
    a forward or backward pass alone."""
    if not facts.host_syncs and not facts.islands:
        return facts
    devices = [device for device in facts.devices if not device.startswith(("cpu", "meta"))] or ["cpu"]
    backend = backend_for(torch.device(devices[0]))
    follows = backend is not None and backend.breaks_at_reads if follows is None else follows
    facts = _with_islands(facts, devices[0], is_whole=is_whole)
    compared = all(host_sync.is_compared and devices[0].startswith(host_sync.device) for host_sync in facts.host_syncs)
    if compared and follows and not facts.collectives and not (facts.gradients and facts.gradient_obstacles):
        return facts
    syncs = {
        (host_sync.where, host_sync.data_dependent_shape): evolve(host_sync, is_compared=False)
        for host_sync in facts.host_syncs[::-1]
    }
    return evolve(facts, host_syncs=tuple(syncs.values())[::-1], reads=())


def _with_islands(facts: Facts, device: str, *, is_whole: bool) -> Facts:
    """The facts, with the reasons why functions of this run cannot be islands."""
    backend = backend_for(torch.device(device)) if facts.islands else None
    obstacle = None
    if facts.gradients or not is_whole:
        obstacle = "is called where results need gradients"
    elif facts.collectives:
        obstacle = "is called in a function that communicates"
    if backend is not None and not backend.runs_islands:
        obstacle = f"is called in a function on {device}, where no recording is cut for islands yet"
    if obstacle is None:
        return facts
    fix = "gradients" if "gradients" in obstacle else ""
    explained = [island if island.obstacle else evolve(island, obstacle=obstacle, fix=fix) for island in facts.islands]
    return evolve(facts, islands=tuple(explained))


def _differing(held: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[StateChange]:
    """The names of these dicts that have others than the former values, which come after each dict."""
    return [
        StateChange(Source("item", names, name, name), before.get(name, MISSING), names.get(name, MISSING))
        for names, before in held for name in {**before, **names}
        if before.get(name, MISSING) is not names.get(name, MISSING)
    ]  # fmt: skip


@frozen(eq=False)
class Followed:
    """How far a replay came. If ``node`` is set, the call is complete: that recording gave ``result``."""

    node: Node | None = None
    result: Any = None
    reads: Reads = ()
    """What the host read, where no recording goes on. The call has not happened then."""
    moved: Node | None = None
    """The recording that would go on, if its state had not moved or changed."""
    ran: list[Outcome] = field(factory=list)
    """Islands that ran: if the body runs after all, it gets their results."""
    is_odd: bool = False
    """No recording can go on after this island."""
    is_lost: bool = False
    """The last island changed what the body may have read before it, and the former value is not known."""
    raises: bool = False
    """What Python computes of the values raises, so the body has to run."""
    interrupt: BaseException | None = None
    """An interrupt that came after an island had run. It is raised once the call is complete."""


class _Walk(Commit):
    """One replay, segment by segment."""

    __slots__ = (
        "begun_at", "beside", "expressed", "given_to", "is_last", "is_lost", "islands", "keeps", "raised_early", "read",
        "slots", "stopped", "undo", "values_of",
    )  # fmt: skip

    def __init__(self, captured: Captured, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf]) -> None:
        super().__init__(captured, node, tree, values, leaves)
        self.undo, self.is_last, self.keeps = Undo(), False, False
        self.beside: Sequence[torch.Tensor] = ()
        self.begun_at: tuple[int, Any] | None = None
        """The break that a replay in one go came to, and what it read there."""
        self.given_to: Node | None = None
        self.read: dict[int, Any] = {}
        self.values_of: dict[int, dict[Any, Any]] = {}
        """What formulas of these reads and of the numbers of the call come to, as far as that was computed: by ``id``
        of what has the formulas, which may be other ones of other numbers."""
        self.expressed: dict[Any, Any] = {}
        self.slots: list[Any] | None = None
        """Those of ``node.formulas``, as long as the reads are those that it knows."""
        if node.program is not None:  # another branch may need it
            self.begin_state = torch.default_generator.get_state()
        self.stopped: Followed | None = None
        self.islands: list[Outcome] = []
        self.is_lost, self.raised_early = False, False

    def walk(self) -> None:
        """Run segments up to the last one, or until no recording goes on. Once an island has run, the call is completed
        in any case: what an island did cannot be undone."""
        try:
            self._walk_without_grad()
        except BaseException as error:
            if self._awaits_answers() and isinstance(error, Exception) and not is_interrupt(error):
                self.stopped, self.raised_early = Followed(ran=self.islands, raises=True), True
                return
            if not self.islands or self.is_last or self.was_stopped():
                raise
            self.stopped = self._odd(error if is_interrupt(error) or not isinstance(error, Exception) else None)

    def _awaits_answers(self) -> bool:
        """Whether the body may have gone another way already: what it asks of numbers is told after the last read of
        them. What an operator raises meanwhile may not be its error."""
        computed = self.node.computed
        return computed is not None and bool(computed.asked) and max(computed.taken) not in self.read

    def _odd(self, interrupt: BaseException | None = None) -> Followed:
        return Followed(ran=self.islands, is_odd=True, is_lost=self.is_lost, interrupt=interrupt)

    def _walk_without_grad(self) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._walk()
        else:
            self._walk()

    def _walk(self) -> None:
        node, leaves = self.node, self.leaves
        if not self._give(node, BEFORE_READS):
            self.stopped = Followed(raises=True)
            return
        recording = _recording(node)
        recording.keep(self.undo, leaves, after_one_go=self.begun_at is not None)
        number, meeting = self._walk_by_program(node, recording) if self.begun_at is None else self._after_one_go(node)
        while number < len(node.reads):
            if meeting is None:
                recording.segment(number)(leaves)
                meeting = self._next(node, recording, number)
            if meeting is None:
                return
            text = self._told(number, meeting)
            if text is None:
                self.stopped = Followed(ran=self.islands, raises=True)
                return
            if text == node.reads[number]:
                text = self._left_way(node, number) or text
            if text != node.reads[number]:
                reads = (*node.reads[:number], text)
                moved, joined = _other(node, self.tree, self._is_on_way(reads), leaves)
                if joined is None:
                    self.stopped = Followed(reads=self._as_known(reads), moved=moved, ran=self.islands)
                    return
                self.node = node = joined
                self.slots = None
                recording = _recording(node)
                recording.keep(self.undo, leaves)
                if number + 1 < len(node.reads):
                    self._keep_outcomes()
            if meeting.made:
                recording.settle(number, meeting)
            if not self._give(node, number):
                self.stopped = Followed(ran=self.islands, raises=True)
                return
            number, meeting = number + 1, None
        if self.stopped is not None:
            return
        if not self._computes():
            self.stopped = Followed(ran=self.islands, raises=True)
            return
        last = recording.segment(number)
        self.is_last = True
        native.committed(last, (leaves,), bool)

    def _after_one_go(self, node: Node) -> tuple[int, Found]:
        """Go on where a replay in one go read another value."""
        assert self.begun_at is not None
        assert node.outputs is not None
        (number, value), in_line = self.begun_at, node.outputs.in_line
        values = [] if in_line is None else in_line.values
        self.read = {at: values[at] for at in range(number) if node.reads[at].startswith(RETURNED)}
        return number, found(node.reads[number], value)

    def _walk_by_program(self, node: Node, recording: SegmentedRecording) -> tuple[int, Found | None]:
        """Go on as long as all is as in the recorded run and formulas are all that comes of what is read. Gives the
        next break, and what was found there if its segment has run."""
        if node.formulas is None:
            node.formulas = program_of(node) or False
        program: FormulaProgram | Literal[False] = node.formulas
        if not program:
            return 0, None
        slots, self.given_to = program.begin(self.values), node
        for number in range(len(program.reads)):
            recording.segment(number)(self.leaves)
            meeting = self._met(recording, number)
            if meeting is None:
                self.stopped = Followed(ran=self.islands, raises=True)
                return len(node.reads), None
            self.read[number] = meeting.value
            if not program.after(number, meeting.value, slots):
                return number, meeting
        self.slots = slots
        return len(program.reads), None

    def _next(self, node: Node, recording: SegmentedRecording, number: int) -> Found | None:
        """What is found at a break, whose segment has run. None where the call stops here."""
        island = recording.island(number, self.leaves)
        if island is not None:
            meeting = self._run_island(island, node, keeps=self.keeps or number + 1 < len(node.reads))
            if meeting is None:
                self.stopped = self._odd()
            return meeting
        meeting = self._met(recording, number)
        if meeting is None:
            self.stopped = Followed(ran=self.islands, raises=True)
        return meeting

    def _met(self, recording: SegmentedRecording, number: int) -> Found | None:
        """What the operator at a break gives; None if it raises and the engine cannot tell what ran before it: then
        the body does all of it again and raises the error itself."""
        try:
            return recording.meet(number, self.leaves)
        except Exception as error:
            if is_interrupt(error) or self.was_stopped():
                raise
            return None

    def _give(self, node: Node, number: int) -> bool:
        """Put what follows from the read, or from the numbers of the call, where the recording has it. One that goes on
        from another has none of that so far."""
        if node.given is None or node.computed is None:
            return not lacks_numbers(node)
        begin = number if node is self.given_to else BEFORE_READS
        self.given_to, numbers = node, node.computed.numbers(self.values, self.read)
        return all(node.given.put(at, numbers, self._known(node.computed)) for at in range(begin, number + 1))

    def _known(self, computed: Computed) -> dict[Any, Any]:
        return self.values_of.setdefault(id(computed), {})

    def _computes(self) -> bool:
        """Compute what the body leaves of the values that were read, before anything is left. False where Python raises
        an error, or numbers in Python state are not where they were recorded."""
        computed, outputs = self.node.computed, self.node.outputs
        assert outputs is not None
        if computed is None:
            return True
        if not all(place.is_at(slot.at(self.roots).holder) for slot, place in self.node.placed):
            return False
        formulas = [which for _, which in outputs.reads if isinstance(which, Formula)]
        left = self.node.formulas.left(formulas, self.slots) if self.slots is not None else None
        if left is not None:
            self.expressed = left
            return True
        numbers = computed.numbers(self.values, self.read)
        try:
            self.expressed = {leaf: leaf.value(numbers, self._known(computed)) for leaf in formulas}
        except (ArithmeticError, ValueError, TypeError):
            return False
        return True

    def _told(self, number: int, meeting: Found) -> str | None:
        """What was read at a break, as ``Facts.reads`` has it: after the last value of which the body asks something
        with the answers. None where Python raises."""
        self.read[number] = meeting.value
        computed, recorded, text = self.node.computed, self.node.reads[number], meeting.text
        if text.startswith(RETURNED):  # only the end of that run told what comes of it
            text = recorded if recorded.startswith(RETURNED) else read_text(meeting.value)
        if computed is None or not computed.asked or number != max(computed.taken):
            return text
        numbers, decisions = computed.numbers(self.values, self.read), self.captured.decisions
        try:
            answers = computed.answers(numbers, self._known(computed))
        except (ArithmeticError, ValueError, TypeError):
            return None
        if computed.branch(answers) == computed.branch():
            return text
        known = None if decisions is None else decisions.branch_of(self.values, numbers, computed)
        is_here = known is not None and len(known) > number and known[:number] == self.node.reads[:number]
        branch: tuple[str, ...] = known if known is not None and is_here else computed.branch(answers)
        return branch[number]

    def _left_way(self, node: Node, number: int) -> str | None:
        """What is answered at a break before the last one that tells answers, where this is another way of the body
        than the recording's. What follows is not to run then: its operators may be asked for what they cannot do, which
        ends all work on a device. None while it is the same way, as far as is known."""
        computed: Computed | None = node.computed
        if computed is None or not computed.asked or number >= max(computed.taken):
            return None
        return computed.told_at(number, computed.numbers(self.values, self.read), self._known(computed))

    def _is_on_way(self, reads: Reads) -> Callable[[Node], bool]:
        """Whether a recording begins with these reads: so it says, or as far as the answers are known by now."""
        return lambda other: (
            other.reads[: len(reads)] == reads
            or (other.computed is not None and self._agrees(other.computed, other.reads, reads))
        )

    def _agrees(self, computed: Computed, recorded: Reads, reads: Reads) -> bool:
        """Whether all answers that are known by now are those of these runs, which read ``recorded``."""
        number = len(reads) - 1
        if not reads[-1].startswith(ASKED) or recorded[:number] != reads[:number] or number not in computed.taken:
            return False
        numbers = computed.numbers(self.values, self.read)
        return all(computed.told_at(at, numbers, self._known(computed)) is None for at in range(number + 1))

    def _as_known(self, reads: Reads) -> Reads:
        """The reads as a branch begins that was proven, if one agrees with what is known by now."""
        decisions = self.captured.decisions
        proven: Sequence[Computed] = () if decisions is None else decisions.candidates()
        own = self.node.computed  # other keys may have other constants
        proven = [one for one in proven if own is None or one.may_part_from(own)]
        branches = (one.branch() for one in proven if self._agrees(one, one.branch(), reads))
        return next((branch[: len(reads)] for branch in branches), reads)

    def _run_island(self, call: IslandCall, node: Node, *, keeps: bool) -> Found | None:
        """Run an island. Gives what to look for at its break; None where no recording can hold what the island did.
        Memory of the pool that the island keeps is taken out of the pool. Python state that the island changed and the
        body may have read before it is put back, until the body itself comes to the island. ``keeps``: more segments
        follow after which the call may stop."""
        tree, lent = self.tree, [(block, hold(storage)) for block, storage in call.lent]
        count, put_off = len(self.islands), list[BaseException]()
        before = tree.recording
        outcomes, changed, changes = list[Outcome](), list[bool](), list[Any]()
        held = [(names, dict(names)) for names in set_by_schedule(call.function, call.args)]

        def keep_outcome(outcome: Outcome) -> None:
            outcomes[:] = [outcome]
            self.islands[count:] = outcomes

        def run() -> None:
            tree.recording = True  # so that the garbage collector does not change the tree meanwhile
            with torch.set_grad_enabled(call.grad):
                beside = (*call.beside, *self.beside)
                given = call.args, call.kwargs, beside, call.generators, call.before
                keep_outcome(perform(call.function, *given, keep_outcome, keeps=keeps)[0])

        def settle(_: bool) -> Found | None:
            tree.recording = before
            if len(self.islands) == count:
                return None
            call.forget()
            if not changed:
                has_changed = bool(node.check(self.leaves)) or self._sets_inputs(node)
                changes[:] = changes_of_state(node.guard) if has_changed and node.guard is not None else ()
                changes.extend(_differing(held) if has_changed else ())
                changed.append(has_changed)
            outcome = outcomes[0]
            if changed[0]:
                for change in changes:
                    change.put(change.before)
                self.islands[count] = outcome = evolve(outcome, state=(*outcome.state, *changes))
                self.is_lost = bool(node.check(self.leaves))
            kept = [(block, held) for block, held in lent if held() is not None]
            if kept:
                tree.pin(kept)
            if kept or changed[0] or outcome.error is not None or outcome.unsuited is not None:
                return None
            return Found(read_text(outcome.text), outcome.made)

        result: Found | None = native.committed(run, (), settle, put_off.extend)
        outcomes.clear()  # an error in it has this frame
        if put_off:
            raise put_off[0]
        return result

    def _sets_inputs(self, node: Node) -> bool:
        """Whether an island gave a number in Python state that is an input of the call another value, and code of the
        body knows it by name: what a recording has of it is from the begin of the call."""
        places = self.captured.binder.places
        given = self.values[len(self.values) - len(places) :]
        names = [one.name for one, value in zip(places, given, strict=True) if one.read_in(self.values) is not value]
        ran: Collection[CodeType] = node.guard.ran if names and node.guard is not None else ()
        return any(name in uses_of(code).names for code in ran for name in names)

    @override
    def finish(self, ended: bool) -> Any:
        """Complete a call that came to its last segment; put everything back otherwise."""
        if ended and self.is_last:
            return Followed(node=self.node, result=super().finish(ended), ran=self.islands)
        if self.raised_early or not self.was_stopped():
            self._put_back()
        return self.stopped

    def _keep_outcomes(self) -> None:
        """Copy what islands wrote into their outcomes: other code may write that memory from now on."""
        self.islands[:] = [island.with_contents() for island in self.islands]

    def _put_back(self) -> None:
        self._keep_outcomes()
        self.undo.put_back()

    @override
    def _built(self) -> Any:
        outputs, reads = self.node.outputs, enumerate(self.node.reads)
        if outputs is not None and outputs.reads:
            returned = {
                number: as_returned(text, self.read[number]) for number, text in reads if text.startswith(RETURNED)
            }
            self.read_values = AsReturned(returned | self.expressed)
        return super()._built()

    @override
    def give_up(self) -> None:
        if not self.is_last:
            self._put_back()

    @override
    def resumed(self, error: BaseException, run: BodyRun | None) -> Any:
        answer(self, self.islands)
        if self.node.reads:
            _recording(self.node).note_returned(self.read)
        try:
            return Followed(node=self.node, result=super().resumed(error, run))
        finally:
            settle(self)


def replay(
    captured: Captured, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf], run: BodyRun | None, *,
    resumes: bool = True, kept: Sequence[torch.Tensor] | None = None, begun_at: tuple[int, Any] | None = None,
) -> Followed:  # fmt: skip
    """Begin with a recording that fits, and go on with those that were recorded after what the host reads. ``resumes``:
    as for a recording without breaks. ``kept``: islands that ran are to be answered though the call is complete, and
    these tensors will have been put back then. ``begun_at``: the arguments of ``Parted``, which a replay of this node
    raised."""
    walk = _Walk(captured, node, tree, values, leaves)
    walk.resumes, walk.keeps, walk.beside, walk.begun_at = resumes, kept is not None, kept or (), begun_at
    result: Followed = walk.run(walk.walk, (), run)
    return result


def put_back(node: Node) -> None:
    """Undo a replay in one go that read another value, if nobody went on from there."""
    if node.recording is not None:
        _recording(node).put_back()


def _put_by(node: Node) -> dict[int, str]:
    """By register of its recording, by what the numbers are computed that a replay puts there."""
    put: dict[int, str] = {}
    if node.given is not None:
        for register, formula in zip(node.given.places.registers, node.given.formulas, strict=True):
            put[register] = " ".join(filter(None, [put.get(register), formula.text()]))
    return put


def lacks_numbers(node: Node) -> bool:
    """Whether operators would get the numbers of the recorded run. It is about to go."""
    return node.computed is not None and bool(node.computed.given) and node.given is None


def _recording(node: Node) -> SegmentedRecording:
    assert node.recording is not None
    return cast(SegmentedRecording, node.recording)


def _other(
    node: Node, tree: Tree, is_on_way: Callable[[Node], bool], leaves: list[Leaf]
) -> tuple[Node | None, Node | None]:  # fmt: skip
    """The recording that goes on from here; or one that would, if its state had not moved or changed."""
    moved = None
    for sibling in tree.current.children.get(node.key, ()):
        if sibling.number not in node.joined or not is_on_way(sibling) or not fits(sibling, tree):
            continue
        if not sibling.check(leaves):
            return None, sibling
        moved = sibling
    return moved, None


def fits(node: Node, tree: Tree) -> bool:
    """Whether this recording may run as far as memory is concerned: what has to be dead is dead, and nobody uses memory
    that it writes."""
    return (not node.dead_before or node.may_run()) and node.recording is not None and tree.is_clear(node)


def begin_alike(entry: Entry, node: Node, tree: Tree) -> None:
    """Recordings of one body are to begin alike: older ones that do not are made again, the first times that this
    happens, as a pool grows while the first of them are made."""
    for sibling in _join(node):
        if entry.steadiness.parted < MOST_BRANCHES and sibling.tree is tree:
            entry.steadiness.parted += 1
            if sibling in entry.nodes:
                entry.nodes.remove(sibling)
            tree.forget(sibling)


def _join(node: Node) -> list[Node]:
    """A recording with breaks came beside others: note where one may go on from the other. Gives those with which that
    is impossible, as the pool was another one when they were made."""
    assert node.parent is not None
    apart = []
    for sibling in node.parent.children[node.key] if node.reads else ():
        if sibling is node or sibling.recording is None or node.recording is None:
            continue
        same = 0
        while same < min(len(node.reads), len(sibling.reads)) and node.reads[same] == sibling.reads[same]:
            same += 1
        parted = min(same + 1, len(node.reads), len(sibling.reads))
        if parted and _recording(node).joins(sibling.recording, parted, [_put_by(node), _put_by(sibling)]):
            node.joined.add(sibling.number)
            sibling.joined.add(node.number)
        else:
            apart.append(sibling)
    return apart
