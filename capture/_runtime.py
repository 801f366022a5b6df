"""Runtime: what a captured function does when it is called.

Per key an ``Entry`` goes from ``cold`` (watch one eager run, make a plan) over ``warm`` to ``ready`` (record once
per place in the tree, then replay), or to ``eager``. The plan decides; a check that fails makes new facts and a new
plan, never an edited one.
"""

from __future__ import annotations

import itertools
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from attrs import define, evolve, field

from capture import _config, _observe, _record, _report, _store, _verify, _where
from capture._ambient import ambient
from capture._annotate import Annotation
from capture._bind import Binder, Key, Leaf, Unkeyable, arguments_key, forget_module_structure, module_key
from capture._call import Call
from capture._compile import compile_plan
from capture._describe import compare, describe
from capture._errors import CaptureWarning, UncapturableError
from capture._events import Log
from capture._facts import Facts, Inlined, OpaqueLeaf, Where
from capture._findings import Finding, Severity
from capture._named import NamedKey
from capture._plan import CapturePlan
from capture._torch_private import foreign_context
from capture._tree import Node, Tree, tree_for
from capture.backends import Backend, backend_for

Phase = Literal["cold", "warm", "ready", "eager"]
_numbers = itertools.count(1)
RETRIES = 2  # runs that differ from the one before until a function counts as one that always differs
capture_lock = threading.RLock()
"""Held while a body is watched or recorded, process-wide."""


class _Busy(threading.local):
    inside: int = 0


_busy = _Busy()


@define(eq=False)
class Entry:
    """All that is known for one key (and one pattern of shared memory among the arguments)."""

    key: Key
    number: int = field(factory=lambda: next(_numbers))
    phase: Phase = "cold"
    plan: CapturePlan | None = None
    facts: Facts | None = None
    warmups_left: int = 0
    differing_runs: int = 0
    nodes: list[Node] = field(factory=list)
    backend: Backend | None = None


@define(eq=False)
class Family:
    """Entries of one key; ``spans`` are the bytes each tensor leaf covers."""

    spans: tuple[int, ...]
    entries: dict[tuple[Any, ...], Entry] = field(factory=dict)


class Captured:
    """One captured function, or one method of one instance."""

    def __init__(
        self, annotation: Annotation, function: Callable[..., Any], binder: Binder, named: NamedKey, receiver: Any
    ) -> None:
        self.annotation = annotation
        self.function = function
        self.binder = binder
        self.number = next(_numbers)
        self.log = Log(annotation.function)
        self.families: dict[Key, Family] = {}
        self.findings: dict[tuple[str, str | None], Finding] = {}
        self._named = named
        self._receiver = (lambda: None) if receiver is None else _weak(receiver)
        self._is_module = isinstance(receiver, torch.nn.Module)

    @property
    def receiver(self) -> Any:
        """The instance a method belongs to."""
        return self._receiver()

    def body(self) -> Callable[..., Any]:
        """The user's function, bound to its receiver."""
        receiver = self._receiver()
        return self.function if receiver is None else types.MethodType(self.function, receiver)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call. The steps are in the order of their cost."""
        if foreign_context() or _busy.inside or not _config.current().enabled:
            return self._inline(args, kwargs)
        try:
            values = self.binder.values(*args, **kwargs)
        except TypeError:
            return self.body()(*args, **kwargs)  # raises its own, better worded error
        return self.dispatch(values)

    def dispatch(self, values: tuple[Any, ...]) -> Any:
        """A call with its arguments bound: find the entry for its key."""
        leaves: list[Leaf] = []
        try:
            key = self.key(values, leaves)
            family = self.families.get(key)
        except (Unkeyable, TypeError) as error:
            return self._unkeyable(values, leaves, str(error))
        if family is None:
            family = self.families[key] = Family(tuple(_record.span_of(leaf) for leaf in leaves))
        pattern = _record.alias_pattern(leaves, family.spans) if len(leaves) > 1 else ()
        entry = family.entries.get(pattern)
        if entry is None:
            entry = family.entries[pattern] = Entry(key)
        if entry.phase == "ready":
            return self._ready(entry, values, leaves)
        return self._unready(entry, values, leaves)

    def key(self, values: tuple[Any, ...], leaves: list[Leaf]) -> Key:
        """Everything that must be equal for a plan to apply. Fills ``leaves``."""
        receiver = self._receiver()
        return (
            ambient(),
            arguments_key(values, leaves),
            self._named(receiver),
            module_key(receiver, leaves) if self._is_module else None,
            tuple([guard() for guard in self.annotation.guards]),
        )

    def call(self, values: tuple[Any, ...], leaves: list[Leaf]) -> Call:
        """The bound call, for everything but replays."""
        return Call(
            annotation=self.annotation, function=self.function, receiver=self.receiver, binder=self.binder,
            values=values, leaves=leaves,
        )  # fmt: skip

    def entries(self) -> list[Entry]:
        """All entries, oldest first."""
        return [entry for family in self.families.values() for entry in family.entries.values()]

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = _observe.active_watch()
        if watch is not None:
            watch.notes.inlined.append(Inlined(function=self.annotation.function, where=_where.here()))
        return self.body()(*args, **kwargs)

    def _unkeyable(self, values: tuple[Any, ...], leaves: list[Leaf], reason: str) -> Any:
        call = self.call(values, leaves)
        opaque = call.opaque_leaves() or [OpaqueLeaf(path=reason, type=reason, role="argument", num_tensors=0)]
        worst = evolve(opaque[0], num_tensors=max(opaque[0].num_tensors, 1))
        self.report(compile_plan(self.annotation, self.bare_facts(opaque=(worst,))))
        return self.run_eagerly(call, "an argument has neither a value nor an identity to compare")

    def bare_facts(self, **facts: Any) -> Facts:
        """Facts that need no watched run."""
        return Facts(function=self.annotation.function, defined_at=self.annotation.defined_at, **facts)

    def run_eagerly(self, call: Call, reason: str) -> Any:
        """The body itself, on the caller's own tensors."""
        self.log.counters.eager_calls += 1
        self.log.counters.body_runs += 1
        self.log.add("eager", reason)
        return call.run()

    def report(self, plan: CapturePlan, *, least: Severity = Severity.EAGER) -> None:
        """Warn about a plan's findings, once for each code and path; raise where the annotation asks for it."""
        findings = plan.findings_at_least(least)
        new = [finding for finding in findings if (finding.code, finding.path) not in self.findings]
        for finding in plan.findings:
            self.findings.setdefault((finding.code, finding.path), finding)
        raising = self.annotation.fallback == "error" or any(f.severity is Severity.ERROR for f in findings)
        if findings and raising:
            text = "\n".join(_report.format_finding(one, function=self.annotation.function) for one in findings)
            raise UncapturableError(text, findings)
        for finding in new:
            text = _report.format_finding(finding, function=self.annotation.function, now="runs eagerly")
            self.log.add("fallback", finding.code + " " + finding.what)
            warnings.warn(text, CaptureWarning, stacklevel=_where.stack_level())

    def output_line(self, group: int) -> Where | None:
        """Where an output was made, for messages."""
        return self.annotation.defined_at

    def _unready(self, entry: Entry, values: tuple[Any, ...], leaves: list[Leaf]) -> Any:
        call = self.call(values, leaves)
        if entry.phase == "eager":
            if entry.plan is not None and self.annotation.fallback == "error":
                self.report(entry.plan)
            return self.run_eagerly(call, "this key cannot be recorded")
        backend = entry.backend or self._choose_backend(entry, leaves)
        if backend is None:
            return self._unready(entry, values, leaves)
        tree = tree_for(backend)
        tree.begin_call(self, self.annotation.max_recordings)
        if entry.phase == "cold":
            self._load(entry)
        if entry.phase == "cold":
            if self._at_limit(tree):
                return self._limit_reached(entry, call, tree)
            return self._observe(entry, call, tree)
        if entry.phase == "eager":
            return self._unready(entry, values, leaves)
        if entry.warmups_left > 0 or tree.warm:
            entry.warmups_left = max(entry.warmups_left - 1, 0)
            return self._warm_up(call, tree)
        entry.phase = "ready"
        return self._ready(entry, values, leaves)

    def _choose_backend(self, entry: Entry, leaves: Sequence[Leaf]) -> Backend | None:
        kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)} - {"cpu", "meta"} or {"cpu"}
        receiver = self.receiver
        if self._is_module:
            kinds |= {tensor.device.type for tensor in receiver.parameters()} - {"cpu", "meta"}
        kinds = kinds - {"cpu"} or {"cpu"}
        kind = sorted(kinds)[0]
        entry.backend = backend_for(kind)
        if entry.backend is None:
            entry.phase = "eager"
            entry.plan = compile_plan(self.annotation, self.bare_facts(backend_missing=kind))
            self.report(entry.plan)
        return entry.backend

    def _load(self, entry: Entry) -> None:
        """Take the plan another process made, if there is one; it is checked by the recording."""
        if _config.current().skip_warmup:
            entry.phase = "ready"
            return
        plan = _store.load(self.annotation, self.function, entry.key, self.log)
        if plan is None:
            return
        entry.plan = plan
        self.log.counters.plans_loaded += 1
        if plan.outcome == "eager":
            entry.phase = "eager"
            self.report(plan)
        else:
            entry.phase = "ready"

    def _observe(self, entry: Entry, call: Call, tree: Tree) -> Any:
        """Watch one eager run and make a plan of what it showed."""
        undoable = self.annotation.fallback == "error" or self.annotation.rng == "forbid"
        watch = _observe.Watch(undo=undoable)
        self.log.counters.observations += 1
        self.log.counters.body_runs += 1
        with capture_lock, self.log.timed("observe"):
            watched = _observe.run_watched(call, watch)
            if watched.error is not None:
                raise watched.error
            described = describe(watched)
        facts = self._compared(entry, described.facts, watch.notes.lines)
        plan = entry.plan = compile_plan(self.annotation, facts)
        entry.facts = facts
        if plan.outcome == "record":
            entry.phase, entry.warmups_left = "warm", self.annotation.warmup - 1
            tree.note_warm(self, [leaf.value for leaf in described.outputs if leaf.kind == "fresh"])
            self.save(entry)
            self.report(plan, least=Severity.ERROR)
            return watched.result
        if may_settle(plan) and entry.differing_runs < RETRIES:
            entry.differing_runs += 1  # what a first call sets up once is no reason; watch another one
            return watched.result
        entry.phase = "eager"
        self.save(entry)
        try:
            self.report(plan)
        except UncapturableError:
            _observe.undo(watched)
            raise
        self.log.counters.eager_calls += 1
        return watched.result

    def _compared(self, entry: Entry, facts: Facts, lines: Sequence[Any]) -> Facts:
        """Facts with the differences to the run before."""
        if entry.facts is None:
            return facts
        drifts, change = compare(entry.facts, facts, lines)
        return evolve(facts, drifts=drifts, sequence_change=change, runs=entry.facts.runs + 1)

    def save(self, entry: Entry) -> None:
        if entry.plan is not None:
            entry.plan = _store.save(self.annotation, self.function, entry.key, entry.plan, self.log)

    def _warm_up(self, call: Call, tree: Tree) -> Any:
        """A plain eager run: asked for by ``warmup=``, or because a step that warms up is still open."""
        self.log.counters.body_runs += 1
        _busy.inside += 1
        try:
            with self.log.timed("warm-up"):
                result = call.run()
        finally:
            _busy.inside -= 1
        tensors = [leaf for _, leaf in _observe.result_leaves(result) if isinstance(leaf, torch.Tensor)]
        tree.note_warm(self, [tensor for tensor in tensors if all(tensor is not leaf for leaf in call.leaves)])
        return result

    def _ready(self, entry: Entry, values: tuple[Any, ...], leaves: list[Leaf]) -> Any:
        """Match and replay, or record."""
        assert entry.backend is not None
        tree = tree_for(entry.backend)
        if tree.path or tree.warm:
            tree.begin_call(self, self.annotation.max_recordings)
            if tree.warm:
                return self._warm_up(self.call(values, leaves), tree)
        else:
            tree.begin_call(self, self.annotation.max_recordings)
        pattern = tree.pattern(leaves)
        node = tree.match((entry.number, pattern))
        if node is None:
            return self._miss(entry, self.call(values, leaves), tree, pattern)
        if node.check(leaves):
            return self._state_moved(entry, node, values, leaves, tree)
        if _config.current().poison:
            tree.pool.poison([block for block, _ in tree.live_blocks()])
        if self.annotation.verify != "off" or _config.current().verify != "off":
            return _verify.verified(self, entry, node, tree, self.call(values, leaves))
        return self.replay(node, tree, values, leaves)

    def replay(self, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf]) -> Any:
        """Run a recording that was found to fit."""
        assert node.recording is not None and node.outputs is not None
        node.recording.replay(leaves)
        result = node.outputs.build(
            tree.pool, leaves, node.statics.__getitem__, lambda: self._named_values(values, leaves)
        )
        tree.stand_on(node)
        self.log.counters.replays += 1
        return result

    def _named_values(self, values: tuple[Any, ...], leaves: list[Leaf]) -> dict[str, Any]:
        return {**self.call(values, leaves).named_values(), "self": self.receiver}

    def _state_moved(
        self, entry: Entry, node: Node, values: tuple[Any, ...], leaves: list[Leaf], tree: Tree
    ) -> Any:
        """A static tensor moved: bind it anew. Anything else changed: forget what was recorded and look again."""
        moved = _record.rebind(node, leaves)
        if moved is not None:
            self.log.counters.rebinds += 1
            plan = compile_plan(self.annotation, self.bare_facts(moved=moved))
            for finding in plan.findings:
                self.findings.setdefault((finding.code, finding.path), finding)
            self.log.add("rebind", ", ".join(f"{m.path} {m.before_addr:#x} -> {m.after_addr:#x}" for m in moved))
            return self._ready(entry, values, leaves)
        self.log.add("drop", "modules or attributes the recording relies on were replaced")
        self.forget(entry, tree)
        if self._is_module:
            forget_module_structure(self.receiver)
        for leaf in values:
            if isinstance(leaf, torch.nn.Module):
                forget_module_structure(leaf)
        return self.dispatch(values)

    def forget(self, entry: Entry, tree: Tree) -> None:
        """Drop all recordings of an entry and start it over."""
        for node in entry.nodes:
            tree.forget(node)
        entry.nodes.clear()
        entry.phase, entry.plan, entry.facts = "cold", None, None

    def _at_limit(self, tree: Tree) -> bool:
        return tree.current.counts.get(self.number, 0) >= self.annotation.max_recordings

    def _limit_reached(self, entry: Entry, call: Call, tree: Tree, pattern: Any = None) -> Any:
        limit = _record.difference(self, entry, call, tree, pattern)
        self.report(compile_plan(self.annotation, self.bare_facts(limit=limit)))
        return self.run_eagerly(call, f"{limit.num_recordings} recordings exist: {limit.difference}")

    def _miss(self, entry: Entry, call: Call, tree: Tree, pattern: Any) -> Any:
        """No recording fits: make one, within the limit."""
        if self._at_limit(tree):
            return self._limit_reached(entry, call, tree, pattern)
        if entry.nodes:
            self.log.counters.misses += 1
            self.log.add("miss", _record.difference(self, entry, call, tree, pattern).difference)
        return _record.record(self, entry, call, tree, pattern)


def may_settle(plan: CapturePlan) -> bool:
    """Only reasons that a second run may clear: state that a first call sets up."""
    settling = {"CG204", "CG205", "CG206", "CG401"}
    return all(finding.code in settling for finding in plan.findings_at_least(Severity.EAGER))


def _weak(receiver: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(receiver)
    except TypeError:
        return lambda: receiver
