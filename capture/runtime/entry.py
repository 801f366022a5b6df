"""Entry: what is known about a captured function for one key, and how far it has come."""

from __future__ import annotations

import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from attrs import evolve, field

from capture.core.data import define, frozen
from capture.core.facts import Facts, GradientObstacle, GradientUse, diff_facts
from capture.core.plan import CapturePlan
from capture.engines.base import Backend, Refusal
from capture.guards.read import Places, Read, RecentReads
from capture.guards.read_guards import add_unnoted, begins_with, path_read, read_by
from capture.guards.recording_guard import asking_who, own_tensors, places_of
from capture.key.signature import Key, names_the_dead
from capture.native import seen
from capture.observe.described import DescribedRun
from capture.observe.expectation import Expectation
from capture.observe.host_values import is_whole
from capture.observe.returned_value import RETURNED, go_one_way
from capture.observe.run import ObservedRun
from capture.runtime.payoff import Payoff
from capture.state.call import Call
from capture.state.code_run import CodeRun
from capture.torch_private.subclasses import unseen
from capture.tree.node import Node, NodeParts

Phase = Literal["cold", "warm", "ready", "eager"]
_numbers = itertools.count(1)
MOVES = 2  # times that a static tensor moves until an engine that cannot bind it anew copies it in every call
MOST_BRANCHES = 8  # of one entry
MOST_STOPS = 2 * MOST_BRANCHES  # as each branch is watched once and recorded once
FLOATS = MOST_STOPS // 2
WORTH = 3  # replays by which a recording shows that others of its entry will be replayed, too
LEAST_REPLAYS = 4  # for each stop
RETRIES = 2  # runs that differ from the one before until a function counts as one that always differs


class TrainingRegion(Protocol):
    """Belongs to an entry whose results need gradients: its forward pass is recorded by the entry, and everything else
    is here."""

    def make_call(self, **parts: Any) -> Call:
        """A call whose body is the forward pass."""

    obstacle: GradientObstacle | None
    """Why forward and backward cannot be recorded apart, once that was seen."""
    uses: Sequence[GradientUse]
    """Who asks for gradients."""
    waits: CapturePlan | None
    """The finding of calls that had to wait."""

    def has_to_wait(self) -> bool:
        """Whether no run may be watched or recorded now, as another thread would see what is lent to it."""

    def attach(self, result: Any, leaves: list[Any], node: Node) -> Any:
        """Make what C replayed of the forward pass a part of the caller's graph."""

    def time_backward(self, result: Any, leaves: list[Any], *, is_replay: bool) -> None:
        """Find out how long the backward pass of this call will take, and how long that of the last one took."""

    def stop_timing(self) -> None:
        """Stop measuring: it is known whether replays pay."""

    def entries(self) -> list[Entry]:
        """The entries of all backward passes."""

    def retire(self) -> None:
        """The forward pass was forgotten."""


def _no_family() -> None:
    return None


@frozen(eq=False)
class Branch:
    """Plan and facts of runs in which the host read the same values."""

    plan: CapturePlan | None
    facts: Facts


@seen
@define(eq=False)
class Steadiness:
    """Whether values that the host reads come again in later calls."""

    stops: int = 0
    """Calls that came to a value without a recording; ``FLOATS`` each where it is new and has a fraction."""
    replays: int = 0
    parted: int = 0
    """Recordings that were dropped as they began otherwise than later ones."""

    def note_stop(self, text: str, *, is_new: bool) -> None:
        """A call came to a value without a recording."""
        whole = text.startswith(RETURNED) or is_whole(text)
        self.stops += FLOATS if is_new and not whole else 1

    @property
    def is_lost(self) -> bool:
        """Whether the values do not come again often enough."""
        return self.stops >= MOST_STOPS and self.stops * LEAST_REPLAYS > self.replays


def _without_tensors(part: Any) -> Any:
    if type(part) is not tuple:
        return part
    if part and (type(part[0]) is torch.dtype or part[0] == "answers"):
        return None
    return tuple(map(_without_tensors, part))


@seen
@define(eq=False)
class Entry:
    """Everything that is known for one key (and one pattern of shared memory among the arguments)."""

    key: Key
    number: int = field(factory=lambda: next(_numbers))
    phase: Phase = "cold"
    """Written by ``advance`` alone."""
    plan: CapturePlan | None = None
    facts: Facts | None = None
    expected: Expectation | None = None
    """What recordings have to do again, if a watched run showed all of it."""
    branches: dict[tuple[str, ...], Branch] = field(factory=dict)
    """Where the host reads values in the body: plan and facts by what it read. Those above are of the last run."""
    steadiness: Steadiness = field(factory=Steadiness)
    times_read: Counter[tuple[str, ...]] = field(factory=Counter)
    """How many watched runs read these values."""
    asks_no_more: bool = False
    """It was shown that of the numbers that its key leaves out only answers count (``decisions``)."""
    shares_no_proof: bool = False
    """A run asked something else than what was shown by the numbers of another size."""
    has_tried_formulas: bool = False
    """It was looked whether formulas take what its body reads on the host (``decisions.begins_with_reads``)."""
    array_reads: set[tuple[str, ...]] = field(factory=set)
    """What runs read that replays compare, of which it was shown that only tensors come of arrays whose content the key
    leaves out (``arrays``)."""
    array_branches: set[tuple[str, ...]] = field(factory=set)
    """After which values that was looked for before a recording was made."""
    array_proofs: int = 0
    proven_branches: set[tuple[str, ...]] = field(factory=set)
    """Where the body asks something of what it reads: the reads of branches of which it was looked what they leave."""
    branch_proofs: int = 0
    """How often that was looked for, and how often a proof showed nothing, as the body raised an error."""
    given_tries: int = 0
    """Recordings that do not tell where they have numbers that the host reads (``given_numbers``)."""
    is_alone: bool = False
    """Recordings of other sizes do not tell it, as formulas are others there, or operators."""
    warmups_left: int = 0
    differing_runs: int = 0
    settling: int = 0
    """Runs that did what a process does once, such as compiling."""
    faults: int = 0
    """Calls in which something went wrong inside this library."""
    plan_is_new: bool = False
    """The plan differs from the one kept on disk."""
    may_change: bool = True
    """The plan says eager, but another run may show that the reasons are gone."""
    said_eager: CapturePlan | None = None
    """A plan of another process that says eager, until a run of this process was watched."""
    trusts_store: bool = True
    """False once a plan from disk did not hold."""
    shares_memory: bool = False
    """Two arguments lie on the same memory."""
    moves: dict[str, int] = field(factory=dict)
    """How often static tensors, by path, made the engine record again at another address."""
    moves_in_vain: dict[str, int] = field(factory=dict)
    """Of these, how often a recording was dropped that was to copy the tensor in every call, or that no copy helps."""
    ran: CodeRun = field(factory=CodeRun)
    """The Python code that its runs ran."""
    asks_who: frozenset[types.CodeType] = frozenset()
    """Of the code that the last watched run ran, where there are branches all of them: what asks for numbers of
    objects."""
    places: Places = field(factory=Places)
    """Places that this code can have read, as they were after the last run."""
    read: Read | None = None
    """The guards on these places, until a recording takes them."""
    unbindable: dict[str, Refusal] = field(factory=dict)
    """Static tensors, by path, to whose address no recording can be bound anew, and why."""
    nodes: list[Node] = field(factory=list)
    parts: set[NodeParts] = field(factory=set)
    """Those of its nodes in trees."""
    made: int = 0
    """Number of recordings made for it so far."""
    payoff: Payoff = field(factory=Payoff)
    needs: int = 0
    """Bytes of memory that one run has at once beside its inputs, as far as it is known."""
    asked: int = 0
    """Calls since ``asked_since`` for which there was no place for a recording."""
    asked_since: int = 0
    """The process's count of replays when ``asked`` began to count."""
    overlapping: Entry | None = None
    """For calls with an argument that shares memory with Python state, where either is written."""
    backend: Backend | None = None
    partners: frozenset[int] = frozenset()
    """Ranks that took part when this rank told the others of a run for this key."""
    _family: Callable[[], Family | None] = field(default=_no_family, repr=False)
    """Weak: what is dropped goes at once, and not with a garbage collection, which may be far off."""
    form: tuple[Any, ...] = ()
    """The form (``Family``) of the call that it was made for."""
    region: TrainingRegion | None = None
    """If the results need gradients: what is recorded is the forward pass then."""
    forward: Entry | None = None
    """The entry with a region that calls of this one go to once their results were seen to need gradients. It is
    another entry, so that none changes its kind while a call in another thread is under way."""
    plain: Entry | None = None
    """The entry that this is the ``forward`` one of."""

    @property
    def constants(self) -> Any:
        """All of its key but the metadata of tensors, and answers that stand for numbers. With equal ones, equal
        constants in Python state are compared with numbers."""
        return _without_tensors(self.key[:-1])

    @property
    def family(self) -> Family | None:
        """The family that leads calls to it; None where none does."""
        return self._family()

    def join(self, family: Family, form: tuple[Any, ...]) -> None:
        """Become one of the entries of a family."""
        self._family, self.form = weakref.ref(family), form

    @property
    def may_differ_again(self) -> bool:
        """Whether another run may show that the reasons against recording are gone."""
        return self.differing_runs < RETRIES

    def in_use(self) -> Entry:
        """The entry for calls from now on."""
        return self.forward or self

    def with_region(self, region: TrainingRegion) -> None:
        """Have calls from now on recorded as forward and backward apart."""
        if self.forward is None:
            self.forward = evolve(
                self, number=next(_numbers), phase="cold", plan=None, facts=None, expected=None, differing_runs=0,
                nodes=[], parts=set(), made=0, overlapping=None, region=region, plain=self, branches={},
                steadiness=Steadiness(),
            )  # fmt: skip

    def without_region(self) -> None:
        """What was recorded so is forgotten, and a watched run tells whether gradients are needed."""
        assert self.plain is not None
        self.plain.forward, self.plain.trusts_store = None, self.trusts_store

    def turn_to(self, reads: tuple[str, ...]) -> bool:
        """Take plan and facts of runs that read this from now on. False: there was no such run, though there were
        others."""
        current = self.facts
        if current is not None and current.reads == reads == ():  # most bodies: there are no branches to turn to
            return True
        if current is not None:
            self.branches[current.reads] = Branch(self.plan, current)
            if current.reads == reads:
                return True
        if not self.branches:
            return True
        branch = self.branches.get(reads)
        self.plan, self.facts = (None, None) if branch is None else (branch.plan, branch.facts)
        self.expected = None
        return branch is not None

    @property
    def has_read_again(self) -> bool:
        """Whether two watched runs read the same, or one read nothing, as those after a first one that sets up what it
        needs."""
        return () in self.times_read or max(self.times_read.values(), default=2) > 1

    def known_branches(self) -> list[tuple[tuple[str, ...], Branch]]:
        """All that runs took so far, with what the host read."""
        current = self.facts
        found = dict(self.branches)
        if current is not None:
            found[current.reads] = Branch(self.plan, current)
        return list(found.items())

    def known_facts(self) -> list[Facts]:
        """The facts of all branches that runs took so far."""
        known = self.known_branches()
        return [branch.facts for _, branch in known]

    @property
    def has_reads(self) -> bool:
        """Whether the host reads values in the body."""
        return any(self.branches) or (self.facts is not None and bool(self.facts.reads))

    @property
    def walks(self) -> bool:
        """Whether a recording of it goes segment by segment in each replay."""
        plans = [node.outputs for node in self.nodes if node.reads]
        return any(outputs is None or outputs.in_line is None for outputs in plans)

    @property
    def goes_one_way(self) -> bool:
        """Whether nothing follows from what the host reads in the body."""
        return all(go_one_way(reads) for reads, _ in self.known_branches())

    def plans(self) -> list[CapturePlan]:
        """The plans of all branches."""
        own = [self.plan] if self.plan is not None else []
        current = self.facts.reads if self.facts is not None else None
        others = [one.plan for reads, one in self.branches.items() if reads != current and one.plan is not None]
        return own + others

    def forget_arrays(self) -> None:
        """What comes of arrays has to be shown again."""
        self.array_reads.clear()
        self.array_branches.clear()

    def advance(self, phase: Phase) -> None:
        """Set the phase. Called by ``phases.enter`` alone."""
        self.phase = phase

    def compared(self, facts: Facts, lines: Sequence[Any]) -> Facts:
        """Facts of a run with the differences to the run before."""
        if self.facts is None:
            return facts
        drifts, change = diff_facts(self.facts, facts, lines)
        return evolve(facts, drifts=drifts, sequence_change=change, runs=self.facts.runs + 1)

    def note_reads(
        self, watched: ObservedRun, described: DescribedRun, recent: RecentReads
    ) -> tuple[tuple[str, str] | None, str | None]:
        """Note the code that a watched run ran, and the Python state that it read. Gives what of this state cannot be
        guarded, with its path, and the path of state that the run may have read and that an island changed. ``recent``:
        what watched runs of the function read, with other keys; mostly this run read the same."""
        if watched.watch.notes_code:
            self.ran.update(watched.ran)
            # this run did not go other branches
            others = self.asks_who if described.facts.reads else frozenset()
            self.asks_who = asking_who(watched.ran) | others
        call, rebuilt = watched.call, watched.rebuilt()
        is_plain, tensors = not (watched.changed or rebuilt), own_tensors(described, call.leaves)
        places = places_of(tensors, watched.before, call.leaves)
        add_unnoted(self.ran, call)
        found = recent.find(lambda: begins_with(self.ran, call), tensors, places) if is_plain else None
        if found is None:
            found = read_by(self.ran, call, watched.changed, rebuilt, tensors, watched.before)
            found.own_places = places
        self.places, self.read = found.places, found if is_plain else None
        return found.obstacle, path_read(found, watched.by_islands)

    @property
    def is_proven(self) -> bool:
        """Whether recordings of it are replayed, and were not made in vain, as those of threads that end: one more, in
        another thread or place, will be, too. One that is replayed much makes up for those of threads that have just
        come."""
        runs = [node.runs for node in list(self.nodes)]
        worth = sum(number > WORTH for number in runs)
        return worth > 0 and (self.made <= 2 * worth + 2 or sum(runs) > 2 * WORTH * self.made)

    def often_moved(self) -> frozenset[str]:
        """Static tensors, by path, that an engine which cannot bind them anew copies in."""
        often = frozenset(path for path, times in self.moves.items() if times >= MOVES)
        return often - self.looked_beside() if often else often

    def looked_beside(self) -> frozenset[str]:
        """Tensors, by path, whose storage the body looks at by numbers: another one may begin elsewhere in its own."""
        found = self.facts.unkeyed if self.facts is not None else ()
        return frozenset(path for one in found if one.kind != "answer" for path in one.paths)

    @property
    def was_watched(self) -> bool:
        """Whether a watched run told something about it."""
        return self.facts is not None or self.region is not None or self.forward is not None

    def is_used(self) -> bool:
        """Whether it has recordings, or its backward pass has some."""
        one = self.in_use()
        return bool(one.nodes) or (one.region is not None and any(below.nodes for below in one.region.entries()))

    def release(self) -> None:
        """Drop the recordings."""
        for node in list(self.nodes):
            node.drop()
        self.nodes.clear()

    def retire(self) -> None:
        """No call comes to this entry any more."""
        self.release()
        if self.region is not None:
            self.region.retire()
        if self.forward is not None:
            self.forward.retire()


@define(eq=False)
class Family:
    """Entries of one key, by the pattern of shared memory among the leaves and by their form.

    The form of a leaf is where it begins, modulo 64, and strides that tell no element's place
    (``tensor_meta.leading_ones``). It tells entries apart, as kernels sum in another order on another alignment, until
    a watched run shows that nothing follows from it. The staged copy of an argument keeps the form of the first one.
    """

    spans: tuple[int, ...]
    """Bytes that each tensor leaf covers."""
    placed: tuple[int, ...]
    """Positions of the leaves whose alignment counts: a single element is read alone, wherever it lies."""
    loose: tuple[int, ...]
    """Positions of the leaves that have such strides."""
    on_host: frozenset[int] = frozenset()
    """Positions of those in host memory."""
    whole: frozenset[int] = frozenset()
    """Positions of those that hold whole numbers, whose sums are the same in any order."""
    has_subclasses: bool = False
    """Some leaves are of a class of the user's."""
    entries: dict[tuple[Any, ...], Entry] = field(factory=dict)
    reads_form: bool | None = None
    """What watched runs showed; None before the first."""
    reads_on_host: bool | None = None
    """Whether kernels read host memory, as watched runs showed. Else it is only copied, wherever it begins."""
    reads_whole: bool | None = None
    """Whether results may follow from where whole numbers begin, as watched runs showed."""

    @property
    def takes_any_form(self) -> bool:
        """Whether calls that differ in form alone are the same."""
        return self.reads_form is False

    def form(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The form of a call: alignments and strides of its leaves that may choose a kernel."""
        return _form_unseen(self, leaves) if self.has_subclasses else _form(self, leaves)

    def counted(self, form: tuple[Any, ...]) -> tuple[Any, ...]:
        """What of a form tells entries apart."""
        if self.takes_any_form:
            return ()
        left_out = self._left_out
        if not left_out:
            return form
        begins = zip(self.placed, form, strict=False)
        return (*[at for position, at in begins if position not in left_out], *form[len(self.placed) :])

    def may_begin_anywhere(self, position: int) -> bool:
        """Whether the alignment of the leaf at this position counts for nothing."""
        return self.takes_any_form or position not in self.placed or position in self._left_out

    @property
    def _left_out(self) -> frozenset[int]:
        """Positions of the leaves whose alignment tells no entries apart."""
        on_host = self.on_host if self.reads_on_host is False else frozenset[int]()
        return on_host | self.whole if self.reads_whole is False else on_host

    def find(self, pattern: tuple[Any, ...], leaves: Sequence[Any]) -> Entry | None:
        """The entry of a call."""
        return self.entries.get((pattern, () if self.takes_any_form else self.counted(self.form(leaves))))

    def add(self, entry: Entry, pattern: tuple[Any, ...], leaves: Sequence[Any]) -> Entry:
        """Keep a new entry for calls like this one."""
        entry.join(self, self.form(leaves))
        self.entries[pattern, self.counted(entry.form)] = entry
        return entry

    def regroup(self, *, reads_form: bool, reads_on_host: bool, reads_whole: bool) -> bool:
        """Note whether the body reads the form, that of host memory, and that of whole numbers, as a watched run
        showed. True if calls come to other entries from now on."""
        before = self.takes_any_form, self._left_out
        self.reads_form = bool(self.reads_form) or reads_form
        self.reads_on_host = bool(self.reads_on_host) or reads_on_host
        self.reads_whole = bool(self.reads_whole) or reads_whole
        if before == (self.takes_any_form, self._left_out):
            return False
        entries_before, self.entries = self.entries, {}
        for (pattern, _), entry in entries_before.items():
            if self.entries.setdefault((pattern, self.counted(entry.form)), entry) is not entry:
                entry.retire()
        return True


def _form(family: Family, leaves: Sequence[Any]) -> tuple[Any, ...]:
    begins = [leaves[position].data_ptr() & 63 for position in family.placed]
    return (*begins, *[leaves[position].stride() for position in family.loose])


_form_unseen = unseen(_form)


def drop_unused(families: dict[tuple[Any, ...], Family], *, most: int) -> None:
    """Keep at most ``most`` keys, besides those that have recordings. The oldest are dropped."""
    if len(families) < most:
        return
    idle = [key for key, family in list(families.items()) if not any(map(Entry.is_used, list(family.entries.values())))]
    for key in idle[: len(families) - most + 1]:
        gone = families.pop(key, None)  # another thread may have dropped it
        for entry in list(gone.entries.values()) if gone is not None else ():
            entry.retire()


def drop_dead(families: dict[tuple[Any, ...], Family]) -> int:
    """Drop what is kept for objects that are gone: it holds memory, and a place among ``max_recordings``. Gives how
    many of those keys never had a recording."""
    unused = 0
    for key in [key for key in list(families) if names_the_dead(key)]:
        gone = families.pop(key, None)
        entries = list(gone.entries.values()) if gone is not None else []
        unused += gone is not None and not any(map(Entry.is_used, entries))
        for entry in entries:
            entry.retire()
    return unused
