"""Warm up: bring captured functions to replay, and leave the caller's state as it was.

``warm_up`` does so for one call: it watches and records the body and undoes both runs. ``warm_up_all`` does so for many
cases, the largest first: it grows the pool, and all the others find room in what it leaves.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from typing_extensions import override

from capture.api.progress import progress
from capture.core import config
from capture.core.data import define, frozen
from capture.core.errors import CaptureBug, CaptureWarning, UncapturableError
from capture.core.interrupts import let_through
from capture.core.sizes import bytes_text
from capture.engines.base import Recording
from capture.key import pytree, tensor_meta
from capture.key.objects import TooDeep
from capture.key.pytree import PLAIN_TYPES
from capture.key.signature import Leaf, Leaves, Unkeyable, key_of
from capture.native import native
from capture.observe import source_location
from capture.observe.capture_lock import locked_in_turn
from capture.reporting.tables import Table, Tabular
from capture.rules.compile_plan import compile_plan
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.limits import limit_plan
from capture.runtime.matching import engine_of, entry_of
from capture.runtime.undone_runs import because, bring_to_replay, run_undone, stays_eager
from capture.runtime.verdict import Outcome
from capture.state.call import Call
from capture.tree.node import Node
from capture.tree.thread_trees import tree_for, trees_of
from capture.tree.tree import Tree

Case = tuple[Any, ...] | Mapping[str, Any]
"""One call: a tuple of positional arguments, a mapping of keyword arguments, or ``(args, kwargs)``."""
Bind = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]
Status = Literal["recorded", "known", "skipped"]
_TEXT = 120  # characters of a case in messages and tables


# ------------------------------------------------------------------------------------------------------- one call


def leaves_of(values: tuple[Any, ...]) -> list[Leaf]:
    """Dynamic leaves of bound values, in the order of the key."""
    leaves = Leaves()
    for value in values:
        try:
            key_of(value, leaves)
        except (Unkeyable, TypeError):
            leaves.visit.depth = 0
    return leaves


def warm_up(captured: Captured, values: tuple[Any, ...], *, say_limit: bool = True) -> Outcome:
    """Observe and record one call at the root of the tree, undoing both runs.

    Says why nothing is recorded as a call would: a warning once a reason, or ``UncapturableError``. An exception of
    the body comes out. ``say_limit=False``: the limit was said already. Waits while another thread watches or records.
    """
    return locked_in_turn(_warm_up, captured, values, say_limit)


def _warm_up(captured: Captured, values: tuple[Any, ...], say_limit: bool) -> Outcome:
    if not config.current().enabled:
        return Outcome("skipped", "captured functions are switched off (CAPTURE_ENABLED=0)")
    captured.budget.start_anew()
    try:
        entry, leaves = entry_of(captured, values)
    except (Unkeyable, TypeError) as error:
        return _unkeyable(captured, values, str(error))
    call = captured.call(values, leaves)
    backend = engine_of(captured, entry, leaves)
    if backend is None or entry.phase == "eager":
        return stays_eager(captured, entry)
    tree = tree_for(backend, captured.pool.number)
    runs = captured.log.counters.body_runs
    outcome = _advance(captured, entry, call, tree, say_limit=say_limit)
    if captured.log.counters.body_runs == runs and any(
        ready_entry.plan and ready_entry.plan.collectives for ready_entry in captured.entries()
    ):
        run_undone(captured, call)  # as often as the other ranks do, which wait in its collectives
    return outcome


def _advance(captured: Captured, entry: Entry, call: Call, tree: Tree, *, say_limit: bool) -> Outcome:
    if _is_recorded(entry, tree):
        return Outcome("known")
    tree.end_path("warm-up")
    if tree.root.counts.get(captured.number, 0) >= captured.annotation.max_recordings:
        return _limit_reached(captured, entry, call, tree, say=say_limit)
    outcome = bring_to_replay(captured, entry, call, tree, lambda: _is_recorded(entry.in_use(), tree))
    tree.end_path("warm-up")
    return outcome


def _is_recorded(entry: Entry, tree: Tree) -> bool:
    """Whether a recording exists that a first call of a step can use; one that follows another function's does not
    count."""
    return any(number == entry.number and set(pattern) <= {None} for number, pattern in tree.root.children)


def _limit_reached(captured: Captured, entry: Entry, call: Call, tree: Tree, *, say: bool) -> Outcome:
    """No place for another recording. Nothing runs, and the entry of a new key is dropped, as many of them would count
    as keys that never repeat."""
    _, plan = limit_plan(captured, entry, call, tree)
    family = captured.families.get(entry.key[:-1])
    if (
        entry.plan is None
        and family is not None
        and [entry_of_family.in_use() for entry_of_family in family.entries.values()] == [entry]
    ):
        del captured.families[entry.key[:-1]]
    if say:
        captured.report(plan)
    return because(plan)


def _unkeyable(captured: Captured, values: tuple[Any, ...], reason: str) -> Outcome:
    leaf = captured.call(values, []).unkeyable(reason)
    plan = compile_plan(captured.annotation, captured.bare_facts(opaque=(leaf,)))
    captured.report(plan)
    return because(plan)


# ----------------------------------------------------------------------------------------------------- many cases


@frozen(kw_only=True)
class WarmedCase:
    """The outcome of one case."""

    case: str
    """The arguments: tensors as dtype, shape and device, plain values as they are."""
    status: Status
    """``"recorded"`` just now, ``"known"`` from before (or from a larger case with the same key), or ``"skipped"``."""
    code: str | None
    """The rule that forbids a recording of it; None where it was recorded, or skipped for another reason."""
    reason: str
    """Why it was skipped; empty where it was not."""
    ms: float
    """Milliseconds it took, watched run and recording together."""
    argument_bytes: int
    """Size of its tensor arguments; the largest case goes first."""
    pool_bytes: int
    """Bytes by which the pool grew; 0 for a case that found room in what larger ones left."""


@frozen(kw_only=True)
class WarmupReport(Tabular):
    """What ``warmup(fn).cases(...)`` did. ``print`` it; a notebook shows it as a table."""

    function: str
    cases: tuple[WarmedCase, ...]
    """One a case, in the order they were given in."""
    seconds: float
    pool_bytes: int
    """High-water mark of the pools the function records into, shared with all functions of the same thread."""
    graph_bytes: int
    """Memory of the function's recorded graphs themselves; 0 on the CPU engine, whose graphs are Python code."""

    @property
    def recorded(self) -> int:
        """Number of cases that were recorded now."""
        return sum(case.status == "recorded" for case in self.cases)

    @property
    def known(self) -> int:
        """Number of cases that had a recording before."""
        return sum(case.status == "known" for case in self.cases)

    @property
    def skipped(self) -> tuple[WarmedCase, ...]:
        """Cases that have no recording, each with its reason: calls like these run eagerly."""
        return tuple(case for case in self.cases if case.status == "skipped")

    @override
    def tables(self) -> Sequence[Table]:
        """One table, with a row for each case."""
        title = (
            f"{self.function}: {self.recorded} recorded, {self.known} known, {len(self.skipped)} skipped; "
            f"{self.seconds:.1f} s, pool {bytes_text(self.pool_bytes)}, graphs {bytes_text(self.graph_bytes)}"
        )
        rows = []
        for case in self.cases:
            sizes = (f"{case.ms:.1f}", bytes_text(case.argument_bytes), f"+{bytes_text(case.pool_bytes)}")
            rows.append((case.case, case.status, *sizes, f"{case.code or ''} {case.reason}".strip()))
        head = ("case", "status", "ms", "arguments", "pool", "reason")
        return [Table(title=title, head=head, rows=tuple(rows))]

    @override
    def __str__(self) -> str:
        return "".join(f"{table.text(indent=2)}\n" for table in self.tables())


@frozen(kw_only=True)
class RecordingSize:
    """What one recording takes, in bytes."""

    arguments: str
    """The arguments that it was recorded for, as ``x: float32[8, 4] cpu``."""
    num_ops: int
    output_bytes: int
    """Bytes of the pool for results and for tensors that it leaves in Python state; 0 where each call has fresh memory
    for them."""
    working_bytes: int
    """Bytes of the pool while it runs, outputs included; all recordings use the same memory. 0 if no watched run showed
    it."""
    graph_bytes: int
    """Bytes of the recorded graph, which are its own; 0 on the CPU engine."""
    unused_for: int
    """Replays in this process since it ran last. The recording with the largest number is dropped first."""
    order: str = ""
    """With ``schedule="auto"``, on a GPU: how its kernels are ordered, and what that gains."""

    @override
    def __str__(self) -> str:
        taken = f"{bytes_text(self.output_bytes)} of outputs, {bytes_text(self.working_bytes)} while it runs"
        graph = f", {bytes_text(self.graph_bytes)} of graph" if self.graph_bytes else ""
        order = f"; {self.order}" if self.order else ""
        ago = "a replay" if self.unused_for == 1 else f"{self.unused_for} replays"
        used = f"last used {ago} ago" if self.unused_for else "used last"
        operators = "1 operator" if self.num_ops == 1 else f"{self.num_ops} operators"
        return f"({self.arguments}): {operators}, {taken}{graph}, {used}{order}"


def sizes_of(states: Iterable[Captured]) -> list[RecordingSize]:
    """The sizes of all recordings of captured functions."""
    pairs = [(entry, node) for captured in states for entry in captured.entries() for node in tuple(entry.nodes)]
    alive = [(entry, node, node.recording) for entry, node in pairs]  # read once: another thread may drop a recording
    return [size_of(entry, node, recording) for entry, node, recording in alive if recording is not None]


def size_of(entry: Entry, node: Node, recording: Recording) -> RecordingSize:
    """The size of one recording."""
    groups = list(enumerate(node.outputs.groups)) if node.outputs is not None else []
    owned = node.outputs.owned if node.outputs is not None else ()
    placeholders = entry.plan.placeholders if entry.plan is not None else ()
    return RecordingSize(
        arguments=", ".join(
            f"{placeholder.path}: {placeholder.tensor}"
            for placeholder in placeholders
            if placeholder.kind == "argument"
        ),
        num_ops=recording.num_ops,
        output_bytes=sum(group.block.nbytes for number, group in groups if number not in owned),
        working_bytes=entry.needs,
        graph_bytes=recording.graph_bytes,
        unused_for=native.runs() - node.last_used,
        order=recording.order,
    )


def memory_of(states: Iterable[Captured]) -> tuple[int, int]:
    """Bytes of the pools that captured functions record into, and of their graphs."""
    states = list(states)
    trees = {id(tree): tree for captured in states for tree in trees_of(captured)}
    nodes = [node for captured in states for entry in captured.entries() for node in entry.nodes]
    graphs = sum(node.recording.graph_bytes for node in nodes if node.recording is not None)
    return sum(tree.pool.reserved_bytes() for tree in trees.values()), graphs


def bound(function: str, cases: Iterable[Case], bind: Bind) -> list[tuple[Any, ...]]:
    """For each case the values of all parameters. Raises ``TypeError`` for a case of another form, or whose arguments
    the function does not take: such a mistake is not skipped.
    """
    values = []
    for number, case in enumerate(cases):
        args, kwargs = split_case(number, case)
        try:
            values.append(bind(args, kwargs))
        except TypeError as error:
            text = str(error).removeprefix("_values() ")
            hint = "; for a tuple and a dict as its two arguments write ((args), {})" if args and kwargs else ""
            raise TypeError(f"case {number} does not fit {function}: {text}{hint}") from None
    return values


def split_case(number: int, case: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments of a case. Raises ``TypeError`` for another form."""
    args: Any = case
    kwargs: Any = {}
    if isinstance(case, Mapping):
        args, kwargs = (), case
    elif type(case) is tuple and len(case) == 2 and type(case[0]) is tuple and isinstance(case[1], Mapping):
        args, kwargs = case
    elif type(case) is not tuple:
        raise TypeError(
            f"case {number} is a {type(case).__name__}; write a tuple of positional arguments as in (x,), a dict of "
            "keyword arguments, or (args, kwargs)"
        )
    for name in kwargs:
        if not isinstance(name, str):
            raise TypeError(f"case {number} has the key {name!r}; keyword arguments have names")
    return args, dict(kwargs)


def warm_up_all(captured: Captured, cases: Sequence[tuple[Any, ...]], shown: bool | None) -> WarmupReport:
    """Warm up bound calls, the largest first. A call that cannot be recorded is skipped, and reported once."""
    function = captured.annotation.function
    begin = time.perf_counter()
    sizes = [_size(values) for values in cases]
    order = sorted(range(len(cases)), key=lambda number: -sizes[number])  # sorting keeps the order of equal sizes
    rows: dict[int, WarmedCase] = {}
    swallowed: list[WarmedCase] = []
    state = _Run(captured)
    with progress(f"warm-up of {function}", len(cases), shown) as update:
        for done, number in enumerate(order, 1):
            rows[number], silent = state.warm_case(cases[number], sizes[number])
            if silent:
                swallowed.append(rows[number])
            update(done, state.nbytes)
    pool, graphs = memory_of([captured])
    result = WarmupReport(
        function=function, cases=tuple(rows[number] for number in range(len(cases))),
        seconds=time.perf_counter() - begin, pool_bytes=pool, graph_bytes=graphs,
    )  # fmt: skip
    if swallowed:
        first = swallowed[0]
        text = f"{function}: {len(swallowed)} of {len(cases)} cases were not warmed up; the first, {first.case}: "
        reason = f"{first.code} {first.reason}" if first.code else first.reason
        warnings.warn(text + reason, CaptureWarning, stacklevel=source_location.stack_level())
    return result


@define
class _Run:
    """One pass over the cases."""

    captured: Captured
    nbytes: int = 0
    """Pool and graphs after the last case."""
    limit_said: bool = False

    def warm_case(self, values: tuple[Any, ...], size: int) -> tuple[WarmedCase, bool]:
        """Warm up one case. True with it if its reason was not said: an exception was held back."""
        before, _ = memory_of([self.captured])
        begin = time.perf_counter()
        silent = False
        try:
            outcome = warm_up(self.captured, values, say_limit=not self.limit_said)
        except CaptureBug:
            raise
        except UncapturableError as error:  # what fallback="error" makes of a finding
            findings, silent = error.findings, True
            outcome = (
                Outcome("skipped", findings[0].what, findings[0].code) if findings else Outcome("skipped", str(error))
            )
        except Exception as error:  # noqa: BLE001 - the body's own; the other cases go on, and it is said at the end
            let_through(error)
            outcome, silent = Outcome("skipped", f"{type(error).__name__}: {error}"), True
        ms = (time.perf_counter() - begin) * 1e3
        self.limit_said = self.limit_said or (outcome.code == "CG901" and not silent)
        pool, graphs = memory_of([self.captured])
        self.nbytes = pool + graphs
        row = WarmedCase(
            case=_text(self.captured, values), status=outcome.status, code=outcome.code, reason=outcome.reason, ms=ms,
            argument_bytes=size, pool_bytes=max(pool - before, 0) if outcome.status == "recorded" else 0,
        )  # fmt: skip
        return row, silent


def _size(values: tuple[Any, ...]) -> int:
    tensors = [leaf for leaf in leaves_of(values) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _named(value: Any, name: str) -> list[tuple[str, Any]]:
    try:
        return list(pytree.leaves(value, name))
    except TooDeep:
        return [(name, value)]


def _text(captured: Captured, values: tuple[Any, ...]) -> str:
    parts = []
    for name, value in captured.call(values, []).named_values().items():
        for path, leaf in _named(value, name):
            if isinstance(leaf, torch.Tensor):
                parts.append(f"{path}={tensor_meta.tensor_info(leaf)}")
            else:
                parts.append(f"{path}={leaf!r}" if type(leaf) in PLAIN_TYPES else f"{path}={type(leaf).__name__}")
    text = ", ".join(parts)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."
