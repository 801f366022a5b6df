"""Captured: all that belongs to one captured function, or to one method of one instance.

Data, and what can be told from it alone: parts of the key, the bound call, findings. Dispatch decides what a call does.
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from attrs import Factory, evolve, field

from capture.core import config
from capture.core.data import define
from capture.core.errors import CaptureWarning, UncapturableError
from capture.core.events import Log
from capture.core.facts import Facts
from capture.core.findings import SETTLING, Finding, Severity, by_cause
from capture.core.options import Annotation
from capture.core.plan import CapturePlan
from capture.guards.read import RecentReads
from capture.key.argument_numbers import left_out
from capture.key.array_inputs import as_arrays, with_arrays, with_tensors
from capture.key.code_names import NamedKey, part_of
from capture.key.input_places import GradientPlace, InputPlace, with_places
from capture.key.modes import Here
from capture.key.signature import (
    Binder,
    Key,
    Leaf,
    Leaves,
    LeftOut,
    key_of,
    make_binder,
    module_key,
    sees_form,
    signature_of,
)
from capture.native import seen
from capture.observe import source_location
from capture.observe.computed import Computed, KnownOf
from capture.runtime.buckets import Sizes
from capture.runtime.budget import Budget, most_efforts
from capture.runtime.entry import Entry, Family
from capture.runtime.lives import Lives
from capture.runtime.payoff import Trial
from capture.runtime.replacements import Replacements
from capture.state.amounts import amounts_of, either
from capture.state.call import Call, named_roots
from capture.state.optimizers import Optimizers
from capture.state.unreached import Unreached
from capture.tree.tree import PoolChoice

_numbers = itertools.count(1)
MOST_LIFTS = 3  # of one function: each records twice
MOST_PROOFS = 2  # that answers stand for numbers, until there is one: each runs the body several times
MOST_WARNINGS = 3  # warnings given for one function; the report has the rest


class FastPaths(Protocol):
    """Fast paths: shortcuts for calls that repeat earlier ones."""

    straight: Callable[..., Any]
    """Takes the positional arguments of a call; ``MISS`` if no path fits."""

    @property
    def are_there(self) -> bool:
        """Whether there are recordings."""

    def call(self, values: tuple[Any, ...]) -> Any:
        """The result of a call whose arguments are bound; ``MISS`` as above."""

    def add(
        self, captured: Any, values: Sequence[Any], leaves: Sequence[Leaf], entry: Entry, here: Here, goes_on: Any, *,
        on_trial: bool = False,
    ) -> None:  # fmt: skip
        """Make a path for calls like this one. ``on_trial``: for the time until it is known whether replays pay."""

    def pause(self) -> None:
        """Take no call until ``resume``."""

    def resume(self) -> None:
        """Take calls again."""

    def times(self) -> list[tuple[int, int]]:
        """Begin and length, in nanoseconds, of the replays that were timed last."""

    def forget(self, entry: int) -> None:
        """Drop the paths of the entry with this number, which has no recording any more."""

    def clear(self) -> None:
        """Drop all paths."""


def _nobody() -> None:
    """The receiver of a plain function: none."""


def weakly(receiver: Any) -> Callable[[], Any]:
    """A function that gives the receiver while it is alive. A receiver without weak references is kept alive."""
    if receiver is None:
        return _nobody
    try:
        return weakref.ref(receiver)
    except TypeError:
        return lambda: receiver


Dispatch = Callable[["Captured", tuple[Any, ...], dict[str, Any]], Any]
"""Calls a captured function, as ``dispatch.call`` does: autograd comes to it when it is time for a backward pass."""


@seen
@define(eq=False, repr=False)
class Captured:
    """One captured function, or one method of one instance."""

    annotation: Annotation
    function: Callable[..., Any]
    """The user's; a method's receiver is bound when it runs."""
    binder: Binder
    fast_paths: FastPaths
    dispatch: Dispatch
    """How its backward pass is called, which is a captured function of its own."""
    named: NamedKey = field(factory=NamedKey)
    receiver_of: Callable[[], Any] = _nobody
    """Gives the instance that a method belongs to."""
    keeps_plans: bool = True
    """Its plans may be useful to other processes."""
    is_backward: bool = False
    """It is the backward pass of another one."""
    deposits: Callable[[Sequence[int]], Sequence[torch.Tensor]] | None = None
    """Gives the tensors whose ``grad`` the caller sets from the leaves at these positions: ``OutputPlan.deposits``."""
    make_call: Callable[..., Call] = Call
    pool: PoolChoice = field(factory=PoolChoice)
    """Which of a thread's pools its recordings lie in. A forward pass and its backward pass share it."""
    lives: Lives = field(factory=Lives)
    """What earlier states with the same code cost: see ``Lives``."""
    number: int = field(factory=lambda: next(_numbers), init=False)
    log: Log = field(default=Factory(lambda self: Log(self.annotation.function), takes_self=True))
    findings: dict[tuple[str, str | None], Finding] = field(factory=dict)
    changed: dict[int, Any] = field(factory=dict)
    """By ``id``, the containers and objects in Python state that the body changed in watched runs."""
    """Findings by code and path; a warning is given once for each."""
    families: dict[Key, Family] = field(factory=dict, init=False)
    unsettled: dict[tuple[str, str | None], tuple[int, int]] = field(factory=dict, init=False)
    """By code and path of a finding: how many runs in a row it kept eager, and the count of replays then."""
    kept_outputs: dict[tuple[str, ...], set[int]] = field(factory=dict, init=False)
    """Outputs, by the paths of what shares their memory, that were used for longer than a step: numbers of entries."""
    hopeless: CapturePlan | None = field(default=None, init=False)
    """Set once every call changes what its own key is made of: calls with new keys then run eagerly at once."""
    foreign: dict[str, CapturePlan] = field(factory=dict, init=False)
    """By the mode or transform of somebody else around a call: what is said of such calls."""
    faults: int = field(default=0, init=False)
    """Calls in a row in which something went wrong inside this library before their entry was known."""
    budget: Budget = field(init=False)
    limited: int = field(default=0, init=False)
    """Calls that ran eagerly as there were as many recordings as there may be."""
    warnings: int = field(default=0, init=False)
    """Warnings given, at most ``MOST_WARNINGS``."""
    is_told: bool = field(default=False, init=False)
    """A warning was given that says why calls are eager."""
    replacements: Replacements = field(factory=Replacements, init=False)
    recent_reads: RecentReads = field(factory=RecentReads, init=False)
    """What the last watched runs read of Python state."""
    optimizers: Optimizers = field(factory=Optimizers, init=False)
    unreached: Unreached = field(factory=Unreached, init=False)
    sizes: Sizes | None = field(default=None, init=False)
    """The sizes of its calls, if the annotation has buckets."""
    by_mode: bool = field(default=False, init=False)
    """See ``Call.by_mode``."""
    shares_casts: bool = field(default=False, init=False)
    """In a block of autocast other calls use weights that this function's calls use."""
    lifted: list[Any] = field(factory=list, init=False)
    """``Lifted`` recordings, which serve all values of some numbers."""
    read_numbers: set[str] = field(factory=set, init=False)
    """Paths of numbers in Python state that the body reads."""
    added: list[tuple[InputPlace, int]] = field(factory=list, init=False)
    """Numbers in Python state that are inputs, and what the body adds to them in each call."""
    computed: list[Computed] = field(factory=list, init=False)
    """Formulas of what the body leaves of numbers that recordings take in each call."""
    lifts_left: int = field(default=MOST_LIFTS, init=False)
    """How many more attempts may be made at such a recording."""
    decisions: Any = field(default=None, init=False)
    """``Decisions``: numbers among the arguments of which the body only asks something."""
    under_way: dict[int, tuple[Any, ...]] = field(factory=dict, init=False)
    """By thread, the caller's own values in a call by a fast path that has other numbers."""
    decisions_left: int = field(default=MOST_PROOFS, init=False)
    """How many more attempts may be made to find out."""
    reads_wait: bool = field(default=False, init=False)
    """Steps of optimizers read numbers, and it is looked first whether recordings take what follows from them."""
    reads_stay: bool = field(default=False, init=False)
    """Steps of optimizers that read numbers are not tried as a part of recordings any more."""
    plain_binder: Binder | None = field(default=None, init=False)
    """Where arrays are inputs, the binder of calls with arrays."""
    arrays_left: int = field(default=MOST_PROOFS, init=False)
    """How many more attempts may be made to find out whether they can be."""
    deaths_seen: int = field(default=0, init=False)
    """How many objects in keys had died when families were last searched for them."""
    trial: Trial | None = field(default=None, init=False)
    """Set while calls like the last one run the body, so that it is timed."""
    is_chained: bool = field(default=False, init=False)
    """Other captured functions take its results as inputs in the pool."""
    range_name: str = field(init=False)
    """The name of its replays in a profiler's trace."""
    straight: Callable[..., Any] = field(init=False)
    """As in ``FastPaths``."""
    _defaults: Any = field(init=False)
    _is_function: bool = field(init=False)
    _is_alone: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.budget = self._new_budget()
        self.lives.begin(self.budget)
        self.is_told = self.lives.is_told
        self.range_name = self.log.range_name("replay")
        if self.annotation.buckets is not None and not self.is_backward:
            self.sizes = Sizes.of(self.annotation.buckets, self.binder)
        self.straight = self.fast_paths.straight
        if self.sizes is not None:
            self.straight = self.sizes.straight(len(self.binder.names), self.fast_paths.straight)
        self._defaults = _defaults_of(self.function)
        self._is_function = isinstance(self.function, types.FunctionType)
        self._is_alone = self.receiver is None and not self.annotation.guards

    # ------------------------------------------------------------------------------------------ the function, the key

    @property
    def receiver(self) -> Any:
        """The instance a method belongs to."""
        return self.receiver_of()

    def body(self) -> Callable[..., Any]:
        """The user's function, bound to its receiver."""
        receiver = self.receiver_of()
        return self.function if receiver is None else types.MethodType(self.function, receiver)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The values of all parameters. Raises ``TypeError``, worded less well than the function's own."""
        if self._is_function and self._defaults_changed():
            self._defaults = _defaults_of(self.function)
            made = make_binder(
                signature_of(self.function, method=self.receiver is not None), formed=sees_form(self.function)
            )
            if self.plain_binder is not None:
                self.plain_binder, made = made, with_arrays(made)
            self.binder = with_places(made, self.binder.places)
        return self.binder.values(*args, **kwargs)

    def _defaults_changed(self) -> bool:
        """Whether default values were replaced after decoration, or changed in place, which is possible for
        keyword-only ones."""
        (defaults, named), now = self._defaults, self.function.__kwdefaults__
        if defaults is not self.function.__defaults__ or not (named and now):
            return defaults is not self.function.__defaults__ or bool(named) is not bool(now)
        return not (now.keys() == named.keys() and all(named[name] is one for name, one in now.items()))

    def take_inputs(self, places: Sequence[InputPlace]) -> None:
        """Read the values of these places in every call from now on, as arguments."""
        known = {one.key() for one in self.binder.places}
        for place in places:
            self.named.leave_out(place.keeper(), place.name, self.receiver)
            self.optimizers.leave_out(place.keeper(), place.name)
        places = [one for one in places if one.key() not in known]
        self.binder = with_places(self.binder, places)

    def take_numbers(self, places: Sequence[InputPlace]) -> None:
        """These numbers in containers among the arguments are inputs from now on."""
        self.binder = with_places(self.binder, places)

    def take_gradients(self, paths: Iterable[str], values: tuple[Any, ...]) -> bool:
        """The gradients of these leaves of a call are inputs from now on. False if one of them can be none."""
        places = [GradientPlace.of(path, self.binder, values) for path in paths]
        found = [one for one in places if one is not None]
        if len(found) < len(places):
            return False
        known = {one.key() for one in self.binder.places}
        self.binder = with_places(self.binder, [one for one in found if one.key() not in known])
        return True

    def take_arrays(self) -> None:
        """Arrays are inputs from now on."""
        self.plain_binder = self.binder
        self.binder = with_arrays(self.binder)

    def give_arrays_back(self) -> None:
        """They are part of the key again, and stay it."""
        assert self.plain_binder is not None
        self.binder = with_places(self.plain_binder, self.binder.places)
        self.plain_binder, self.arrays_left = None, 0

    def completed(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of a call that was bound before places were added."""
        has_arrays = self.plain_binder is not None
        count = len(self.binder.names) - len(self.binder.places) - has_arrays
        if has_arrays and len(values) == count:
            values = with_tensors(values)
        elif not has_arrays and len(values) == count + 1 + len(self.binder.places) and not self.arrays_left:
            values = (*as_arrays(values[:count], values[count]), *values[count + 1 :])
        places, missing = self.binder.places, len(self.binder.names) - len(values)
        return (*values, *[place.read_in(values) for place in places[len(places) - missing :]]) if missing else values

    def note_added(self, added: Iterable[tuple[InputPlace, int]]) -> None:
        """Have runs from now on tell that the body adds this to numbers in these places."""
        known = {place.key() for place, _ in self.added}
        self.added += [(place, amount) for place, amount in added if place.key() not in known]

    def note_computed(self, computed: Computed | None) -> None:
        """Have runs from now on tell by these formulas what they leave."""
        if computed is not None and all(one.text() != computed.text() for one in self.computed):
            self.computed.append(computed)

    def takes_last_of(self, reads: Sequence[str]) -> bool:
        """Whether formulas take the last of these values that the host read: it need not come again."""
        return self.decisions is not None and bool(self.decisions.takes(reads))

    def own_values(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The caller's, for those that a fast path was found by."""
        return self.under_way.get(threading.get_ident(), values) if self.under_way else values

    @property
    def stateless(self) -> bool:
        """Whether the key consists of modes and arguments alone."""
        return self._is_alone and self.named.is_empty() and not self.optimizers and not self.optimizers.modules()

    def arguments(
        self, values: tuple[Any, ...], leaves: Leaves, without: Sequence[LeftOut] = ()
    ) -> tuple[Any, ...]:  # fmt: skip
        """The arguments' part of the key, without some numbers in containers; their tensors and generators become
        ``leaves``."""
        leaves.changed = self.changed
        if self.binder.places or without:
            leaves.left_out = left_out(self.binder.places, values).union(without)
        static = self.annotation.static
        if not static and self.decisions is None:
            return tuple([key_of(value, leaves) for value in values])
        decided = {} if self.decisions is None else self.decisions.parts(values)
        parts = []
        for at, (name, value) in enumerate(zip(self.binder.names, values, strict=True)):
            leaves.opens = name not in static
            parts.append(decided[at] if at in decided else key_of(value, leaves))
        return tuple(parts)

    def rest(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Parts of the key besides modes and arguments."""
        receiver = self.receiver_of()
        return (
            self.named(receiver, values),
            module_key(receiver) if issubclass(type(receiver), torch.nn.Module) else None,
            tuple([part_of(guard(), limit=None) for guard in self.annotation.guards]),
            self.optimizers.part(),
        )

    def named_roots(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """The roots of a call's sources, by name, for replays: they need nothing else of a bound call."""
        return named_roots(self.binder, values, self.receiver)

    def call(self, values: tuple[Any, ...], leaves: list[Leaf], entry: Entry | None = None) -> Call:
        """The bound call, for everything but replays."""
        make = self.make_call if entry is None or entry.region is None else entry.region.make_call
        call = make(
            annotation=self.annotation, function=self.function, receiver=self.receiver, binder=self.binder,
            values=values, leaves=leaves, code=None if entry is None else entry.ran, optimizers=self.optimizers,
            unreached=self.unreached, by_mode=self.by_mode,
        )  # fmt: skip
        by_answers = self.decisions.amounts(call) if self.decisions is not None else None
        if self.decisions is not None:
            call.changes = functools.partial(self.decisions.changes, values)
        is_whole = self.decisions is not None and (entry is None or entry.region is None)
        constants = None if entry is None else entry.constants
        call.formulas = self.decisions.formulas(values, constants) if is_whole else None
        if call.formulas is None and self.computed and (entry is None or entry.region is None):
            call.formulas = KnownOf(tuple(self.computed), values)
        call.amounts = either(by_answers, amounts_of(self.added) if self.added else None)
        return call

    # ------------------------------------------------------------------------------------------------- what is recorded

    def entries(self) -> list[Entry]:
        """All entries, oldest first, those of backward passes after that of their forward pass."""
        own = [entry.in_use() for family in list(self.families.values()) for entry in list(family.entries.values())]
        own += [one.entry for one in list(self.lifted)]
        return [one for entry in own for one in (entry, *(entry.region.entries() if entry.region is not None else ()))]

    def note_form(self, entry: Entry, facts: Facts) -> None:
        """A run showed whether calls that differ in form alone are the same (``Family``)."""
        on_host = entry.backend is None or not entry.backend.has_own_memory or bool(facts.islands)
        family = entry.family
        if family is not None and family.regroup(
            reads_form=facts.reads_form, reads_on_host=on_host, reads_whole=facts.reads_whole
        ):
            self.clear_fast_paths()

    def clear_fast_paths(self) -> None:
        """Entries were dropped, or what they stand for is another now."""
        self.fast_paths.clear()
        self.trial = None
        if self.sizes is not None:
            self.sizes.clear()

    def release(self) -> None:
        """Drop all recordings; plans stay."""
        for entry in self.entries():
            entry.release()

    def retire(self) -> None:
        """Nothing can call this any more: drop what it holds."""
        for entry in self.entries():
            entry.retire()
        self.clear_fast_paths()
        self.families.clear()
        self.lifted.clear()

    def end(self) -> None:
        """Its object or function was collected: drop everything, and note what it cost in ``lives``."""
        self.lives.end(self.budget)
        self.retire()

    def try_numbers_anew(self) -> None:
        """Bodies have other segments from now on, with which numbers may do what they did not so far."""
        self.lifts_left, self.decisions_left = MOST_LIFTS, MOST_PROOFS

    def reset(self) -> None:
        """As if just decorated."""
        self.retire()
        self.findings.clear()
        self.unsettled.clear()
        self.kept_outputs.clear()
        self.foreign.clear()
        self.hopeless, self.is_chained = None, False
        self.try_numbers_anew()
        self.decisions = None
        self.read_numbers.clear()
        if self.sizes is not None:
            self.sizes.forget()
        self.optimizers, self.replacements, self.unreached = Optimizers(), Replacements(), Unreached()
        self.recent_reads = RecentReads()
        self.log = Log(self.annotation.function)
        self.budget, self.is_told, self.warnings = self._new_budget(), False, 0

    def _new_budget(self) -> Budget:
        may_rest = not self.is_backward and self.annotation.fallback != "error"
        return Budget(self.log.counters, most_efforts(self.annotation.max_recordings), may_rest=may_rest)

    def note_kept(self, entry: int, outputs: Iterable[tuple[str, ...]], *, lasting: bool = False) -> None:
        """Outputs of an entry were used for longer than a step. One that serves all values of a number stands for the
        entries of all those. ``lasting``: so they are in all entries."""
        lasting = lasting or any(one.entry.number == entry for one in self.lifted)
        entries = {entry, -1} if lasting else {entry}
        for paths in outputs:
            known = self.kept_outputs.setdefault(paths, set())
            if len(known) < 2:  # two stand for all (``is_owned``), and entries come and go
                known.update(entries)

    def is_owned(self, entry: int, paths: tuple[str, ...]) -> bool:
        """Whether an output has fresh memory in every call: it was kept before, or was in two entries."""
        known = self.kept_outputs.get(paths, ())
        return self.annotation.outputs == "clone" or entry in known or len(known) > 1

    # -------------------------------------------------------------------------------------------- what the user is told

    def bare_facts(self, **facts: Any) -> Facts:
        """Facts about a call of which no run was watched."""
        return Facts(function=self.annotation.function, defined_at=self.annotation.defined_at, runs=0, **facts)

    def note_findings(self, plan: CapturePlan) -> None:
        """Keep a plan's findings for ``recordings`` and ``report``."""
        for finding in plan.findings:
            if self._is_news(finding):
                self.findings[finding.code, finding.path] = finding

    def _is_news(self, finding: Finding) -> bool:
        """Whether no finding of that rule was known there, or none as severe."""
        known = self.findings.get((finding.code, finding.path))
        return known is None or known.severity < finding.severity

    def report(self, plan: CapturePlan, instead: str = "runs eagerly") -> None:
        """Warn about what keeps a call eager, once for each code and path; raise where the annotation asks for it.
        ``instead``: what happens to such calls.

        What only a first call may have done is left out where there are other reasons: a second one was not watched.
        """
        findings = plan.findings_at_least(Severity.EAGER)
        lasting = [finding for finding in findings if finding.code not in SETTLING] or findings
        new = [finding for finding in lasting if self._is_news(finding)]
        self.note_findings(plan)
        settings = config.current()
        raising = (
            self.annotation.fallback == "error"
            or any(finding.code in settings.refuse for finding in findings)
            or any(f.severity is Severity.ERROR for f in findings)
        )
        if findings and raising:
            function = self.annotation.function
            text = "\n".join(first.message(function=function, also=also) for first, also in by_cause(findings))
            raise UncapturableError(text, findings)
        self.is_told = self.is_told or bool(new)
        for finding in new:
            self.log.add("fallback", finding.code + " " + finding.what)
        silenced = settings.silence | self.annotation.silence
        for first, also in by_cause([finding for finding in new if finding.code not in silenced]):
            self.warnings += 1
            if self.warnings > MOST_WARNINGS:
                return
            last = self.warnings == MOST_WARNINGS
            now = instead + (f"; what else is found is in recordings({_short(self)}).findings" if last else "")
            where = first.where or source_location.user_place(self.annotation.defined_at)
            text = evolve(first, where=where).message(function=self.annotation.function, now=now, also=also)
            warnings.warn(text, CaptureWarning, stacklevel=source_location.stack_level())


def _defaults_of(function: Any) -> tuple[Any, dict[str, Any] | None]:
    """Default values by position, and by name as they are now: that dict can be changed in place."""
    named = getattr(function, "__kwdefaults__", None)
    return getattr(function, "__defaults__", None), named and dict(named)


def _short(captured: Captured) -> str:
    return captured.annotation.function.rpartition(".")[2]
