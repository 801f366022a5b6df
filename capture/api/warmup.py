"""Cases: warm up many calls of one captured function in one go.

The largest goes first: it grows the pool, and all the others find room in what it leaves.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, frozen
from typing_extensions import override

from capture import _containers, _report, _tensors, _warm, _where
from capture._containers import PLAIN_TYPES
from capture._errors import CaptureBug, CaptureWarning, UncapturableError
from capture._progress import bytes_text, progress
from capture._runtime import Captured
from capture._trees import trees_of
from capture._warm import Outcome, Status

Case = tuple[Any, ...] | Mapping[str, Any]
"""One call: a tuple of positional arguments, a mapping of keyword arguments, or ``(args, kwargs)``."""
Bind = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]
_TEXT = 120  # characters of a case in messages and tables


@frozen(kw_only=True)
class WarmedCase:
    """What became of one case."""

    case: str
    """Its arguments: tensors as dtype, shape and device, plain values as they are."""
    status: Status
    """``"recorded"`` just now, ``"known"`` from before (or from a larger case with the same key), or ``"skipped"``."""
    code: str | None
    """The rule for which it was skipped; None where it was not, or for another reason than a rule."""
    reason: str
    """Why it was skipped; empty where it was not."""
    ms: float
    """Milliseconds it took, watched run and recording together."""
    argument_bytes: int
    """Size of its tensor arguments; the largest case goes first."""
    pool_bytes: int
    """Bytes by which the pool grew; 0 for a case that found room in what larger ones left."""


@frozen(kw_only=True)
class WarmupReport:
    """What ``warmup(fn).cases(...)`` did. ``print`` it."""

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
        """Cases that were recorded just now."""
        return sum(one.status == "recorded" for one in self.cases)

    @property
    def known(self) -> int:
        """Cases that had a recording already."""
        return sum(one.status == "known" for one in self.cases)

    @property
    def skipped(self) -> tuple[WarmedCase, ...]:
        """Cases that have no recording, each with its reason: calls like these run eagerly."""
        return tuple(one for one in self.cases if one.status == "skipped")

    @override
    def __str__(self) -> str:
        head = (
            f"{self.function}: {self.recorded} recorded, {self.known} known, {len(self.skipped)} skipped; "
            f"{self.seconds:.1f} s, pool {bytes_text(self.pool_bytes)}, graphs {bytes_text(self.graph_bytes)}"
        )
        rows = [("case", "status", "ms", "arguments", "pool", "reason")]
        for one in self.cases:
            sizes = (f"{one.ms:.1f}", bytes_text(one.argument_bytes), f"+{bytes_text(one.pool_bytes)}")
            rows.append((one.case, one.status, *sizes, f"{one.code or ''} {one.reason}".strip()))
        return f"{head}\n{_report.format_table(rows, indent=2)}\n"


def memory_of(states: Iterable[Captured]) -> tuple[int, int]:
    """Bytes of the pools that captured functions record into, and of their graphs."""
    states = list(states)
    trees = {id(tree): tree for captured in states for tree in trees_of(captured)}
    nodes = [node for captured in states for entry in captured.entries() for node in entry.nodes]
    graphs = sum(node.recording.graph_bytes for node in nodes if node.recording is not None)
    return sum(tree.pool.reserved_bytes() for tree in trees.values()), graphs


def bound(function: str, cases: Iterable[Case], bind: Bind) -> list[tuple[Any, ...]]:
    """The values of all parameters, a case each.

    Raises ``TypeError`` for a case of another form, or one whose arguments the function does not take: such a
    mistake is no reason to skip anything.
    """
    found = []
    for number, case in enumerate(cases):
        args, kwargs = _split(number, case)
        try:
            found.append(bind(args, kwargs))
        except TypeError as error:
            text = str(error).removeprefix("_values() ")
            hint = "; for a tuple and a dict as its two arguments write ((args), {})" if args and kwargs else ""
            raise TypeError(f"case {number} does not fit {function}: {text}{hint}") from None
    return found


def _split(number: int, case: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
    """Warm up bound calls, the largest first. What cannot be recorded is skipped, and said once."""
    function = captured.annotation.function
    begin = time.perf_counter()
    sizes = [_size(values) for values in cases]
    order = sorted(range(len(cases)), key=lambda number: -sizes[number])  # sorting keeps the order of equals
    rows: dict[int, WarmedCase] = {}
    swallowed: list[WarmedCase] = []
    state = _Run(captured)
    with progress(f"warm-up of {function}", len(cases), shown) as update:
        for done, number in enumerate(order, 1):
            rows[number], silent = state.one(cases[number], sizes[number])
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
        warnings.warn(text + reason, CaptureWarning, stacklevel=_where.stack_level())
    return result


@define
class _Run:
    """One pass over the cases."""

    captured: Captured
    nbytes: int = 0
    """Pool and graphs after the last case."""
    limit_said: bool = False

    def one(self, values: tuple[Any, ...], size: int) -> tuple[WarmedCase, bool]:
        """Warm up one case. True with it if its reason was not said: an exception was held back."""
        before, _ = memory_of([self.captured])
        begin = time.perf_counter()
        silent = False
        try:
            outcome = _warm.warm_up(self.captured, values, say_limit=not self.limit_said)
        except CaptureBug:
            raise
        except UncapturableError as error:  # what fallback="error" makes of a finding
            found, silent = error.findings, True
            outcome = Outcome("skipped", found[0].what, found[0].code) if found else Outcome("skipped", str(error))
        except Exception as error:  # noqa: BLE001 - the body's own; the other cases go on, and it is said at the end
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
    tensors = [leaf for leaf in _warm.leaves_of(values) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _text(captured: Captured, values: tuple[Any, ...]) -> str:
    parts = []
    for name, value in captured.call(values, []).named_values().items():
        for path, leaf in _containers.leaves(value, name):
            if isinstance(leaf, torch.Tensor):
                parts.append(f"{path}={_tensors.tensor_info(leaf)}")
            else:
                parts.append(f"{path}={leaf!r}" if type(leaf) in PLAIN_TYPES else f"{path}={type(leaf).__name__}")
    text = ", ".join(parts)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."
