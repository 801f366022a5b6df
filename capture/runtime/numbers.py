"""Numbers: arguments of a captured function that are plain numbers, another one in each call, as a learning rate is.

A number is a part of the key, so each value is a recording of its own. Where it only ever reaches operators as it is,
one recording serves all values: before a replay the number is put where the tape has it. That is found out, not
declared, when a second value comes:

* the body runs with a number that notes what Python code does with it (``Noted``): arithmetic, a comparison, a text of
  it and all else that reads it keep it in the key, as do functions in C that would read it unnoticed (``math``);
* recordings of both values differ in this number alone (``engines.cpu.lifting``);
* a replay with the number put there equals the body, bit for bit: in the first such call, and in the fourth, sixteenth
  ... one.

Values for which there are kernels of their own, or for which code above operators takes another way, stay in the key.
"""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field
from typing_extensions import override

from capture.engines.base import LiftedNumbers
from capture.key import pytree
from capture.key.modes import Here
from capture.key.packages import package_of
from capture.native import MISS
from capture.observe import run
from capture.runtime import planning
from capture.runtime.buckets import Count, Values
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.fast_path import GoesOn, Shortcuts
from capture.runtime.payoff import clock
from capture.runtime.replay import replay
from capture.runtime.verify import NO_MEMORY, Comparison, NoMemoryError, Verified
from capture.state.call import Call
from capture.state.code_run import CodeRun
from capture.tree.node import Node
from capture.tree.tree import Tree

_MOST_FAMILIES = 32  # keys that are searched for a similar call
_KEPT = frozenset({0.0, 1.0, -1.0, 0.5, -0.5, 2.0})
_READ_IN_C = frozenset({"math", "cmath", "numpy", "decimal", "fractions", "struct", "random", "statistics", "operator",
                        "scipy", "json", "pickle", "marshal", "array", "ctypes"})  # fmt: skip
"""Modules whose functions in C read a number without calling a method of it."""


def may_vary(value: float) -> bool:
    """All kernels do the same with this number as with others."""
    return math.isfinite(value) and value not in _KEPT


class Noted(float):
    """A number that notes when Python code reads it. Operators take its value without that."""

    is_read: bool = False


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def method(self: Any, *args: Any) -> Any:
        result = plain(self, *args)
        if result is not NotImplemented:  # else Python asks the other operand, such as a tensor
            self.is_read = True
        return result

    return method


_LEFT = frozenset({"__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__",
                   "__setattr__", "__delattr__", "__dir__", "__doc__", "__getstate__", "__getnewargs__",
                   "__getformat__", "__setformat__"})  # fmt: skip
for _name in dir(float):
    if _name not in _LEFT and callable(getattr(float, _name)):
        setattr(Noted, _name, _noting(_name))


def reads_in_c(ran: CodeRun) -> bool:
    """Code that ran names something that may read a number unnoticed."""
    return any(
        _reads(name, scope.get(name))
        for code, scopes in ran.codes.items() for name in _names(code) for scope in scopes
    )  # fmt: skip


def _names(code: types.CodeType) -> Sequence[str]:
    return (*code.co_names, *code.co_freevars)


def _reads(name: str, value: object) -> bool:
    package = package_of(getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", None))
    return name in _READ_IN_C or package in _READ_IN_C


def with_numbers(values: Values, positions: Sequence[int], numbers: Sequence[float]) -> Values:
    """The values of a call with other numbers."""
    made = list(values)
    for at, number in zip(positions, numbers, strict=True):
        made[at] = number
    return tuple(made)


def noted_run(captured: Captured, call: Call, positions: Sequence[int]) -> tuple[str, ...] | None:
    """Watch the body with numbers that note who reads them, and undo it. The operators it ran; None where Python code
    reads a number, or may do so unnoticed, or where there is nothing to record."""
    noted = [Noted(call.values[at]) for at in positions]
    values = with_numbers(call.values, positions, noted)
    noting = captured.call(values, call.leaves)
    watched, described = planning.watch(captured, noting, undo=True, trial=True, counts=False)
    run.undo(watched)
    facts, results = described.facts, [leaf for _, leaf in pytree.result_leaves(watched.result)]
    if any(one.is_read for one in noted) or facts.gradients or facts.host_syncs or facts.islands:
        return None
    if reads_in_c(watched.ran):
        return None
    if any(one is leaf for one in noted for leaf in results) or watched.changed:
        return None  # a replay would give or leave the number that was recorded
    return facts.sequence


def twin_of(
    entry: Entry, entries: Sequence[Entry], lifted: Sequence[Lifted], values: Values
) -> tuple[Entry, tuple[int, ...]] | None:
    """An entry that is, or can be, recorded, whose key has other numbers than this one's, and the positions of their
    parameters. Where that is one of ``lifted`` numbers, those are to be others, too."""
    if len(entries) > _MOST_FAMILIES:
        return None
    lifted_of = {id(one.entry): one for one in lifted}
    for candidate in entries:
        if (
            candidate is entry
            or candidate.phase not in ("warm", "ready")
            or candidate.region is not None
            or candidate.has_reads
        ):
            continue
        at, less = _differing(entry.key, candidate.key), lifted_of.get(id(candidate))
        if not at or (less is not None and (not less.is_there() or not set(less.positions) <= set(at))):
            continue
        if all(type(values[position]) is float for position in at):
            return candidate, at
    return None


def _differing(key: Any, other: Any) -> tuple[int, ...]:
    """Positions at which arguments are other numbers, where nothing else differs; else none."""
    if len(key) != len(other) or key[0] != other[0] or key[2:] != other[2:] or len(key[1]) != len(other[1]):
        return ()
    found = [at for at, (one, two) in enumerate(zip(key[1], other[1], strict=True)) if one != two]
    pairs = [(key[1][at], other[1][at]) for at in found]
    return tuple(found) if all(_is_number(one) and _is_number(two) for one, two in pairs) else ()


def _is_number(part: Any) -> bool:
    """As the key has a plain float."""
    is_float = type(part) is tuple and len(part) == 2 and part[0] is float
    return is_float and may_vary(float.fromhex(part[1]))


def number_of(part: Any) -> float:
    """The number of such a part."""
    return float.fromhex(part[1])


@define(eq=False)
class Lifted:
    """One recording for all values of some numbers."""

    entry: Entry
    """It is in no family: only this object leads calls to it."""
    key: Any
    node: Node
    tree: Tree
    numbers: LiftedNumbers
    positions: tuple[int, ...]
    values: Values
    """The values of the call that was recorded, from which the recording's key is made."""
    paths: Shortcuts
    count: Count = field(factory=Count)
    is_busy: bool = False
    is_broken: bool = False
    """Numbers were to be set, and it may have any of them since."""
    under_way: Values | None = None
    """The caller's values in the call by the fast way."""

    def is_there(self) -> bool:
        """Its recording begins a step of this thread."""
        here = self.tree.thread == threading.get_ident() and self.node.parent is self.tree.root
        return here and self.node in self.entry.nodes

    def taken(self, values: Values) -> list[float] | None:
        """The numbers of a call; None if they are not to be lifted, or not here."""
        if (
            self.is_busy
            or self.is_broken
            or self.tree.thread != threading.get_ident()
            or len(values) != len(self.values)
        ):
            return None
        call_numbers = [values[at] for at in self.positions]
        for number, value in enumerate(call_numbers):
            if type(value) is not float or not may_vary(value):
                return None
            if number in self.numbers.powers and value.is_integer():
                return None
        return call_numbers if self.numbers.takes(call_numbers) else None

    def standing(self, values: Values) -> Values:
        """The call that was recorded, with these values but for the numbers."""
        made = list(values)
        for at in self.positions:
            made[at] = self.values[at]
        return tuple(made)

    def add_path(self, captured: Captured, values: Values, leaves: list[Any], now: Here, goes_on: GoesOn) -> None:
        """The next call like this one may take the fast way."""
        self.paths.add(captured, values, leaves, self.entry, now, goes_on)

    def run(self, given: Sequence[float], function: Callable[[], Any]) -> Any:
        """With these numbers in the recording; ``MISS`` if they cannot be set. Nobody else runs it meanwhile: a call in
        a signal's handler does not."""
        self.is_busy = True
        try:
            self.is_broken = True
            self.is_broken = not self.numbers.put(given)
            return MISS if self.is_broken else function()
        finally:
            self.is_busy, self.under_way = False, None

    def replayed(self, values: Values) -> Any:
        """The result of a call by the fast way; ``MISS`` if there is none."""
        payoff = self.entry.payoff
        given = None if self.count.is_due or payoff.wants_body else self.taken(values)
        if given is None:
            return MISS
        begin = clock()
        standing, self.under_way = self.standing(values), values
        result = self.run(given, lambda: self.paths.call(standing))
        if result is not MISS:
            self.count.calls += 1
            payoff.note_replay(clock() - begin)
        return result

    def values_now(self) -> Values | None:
        """See ``under_way``."""
        return self.under_way


@define(eq=False)
class NumberComparison(Comparison):
    """A replay with other numbers beside the body."""

    lifted: Lifted = field(kw_only=True)
    numbers: Sequence[float] = field(kw_only=True)
    leaves: list[Any] = field(kw_only=True)

    @override
    def _replayed(self) -> Any:
        where = self.captured, self.node, self.tree, self.call.values, self.leaves, None
        result = self.lifted.run(self.numbers, lambda: replay(*where))
        if result is MISS:
            raise NoMemoryError("the numbers of a recording cannot be set")
        return result


def compared(captured: Captured, lifted: Lifted, call: Call, numbers: Sequence[float], leaves: list[Any]) -> Verified:
    """Compare a replay with the body. ``leaves``: of the call that was recorded."""
    captured.log.counters.verifications += 1
    comparison = NumberComparison(
        captured, lifted.entry, lifted.node, lifted.tree, call, lifted=lifted, numbers=numbers, leaves=leaves
    )
    try:
        return comparison.run()
    except NoMemoryError:
        captured.log.add("verify", NO_MEMORY)
        return Verified(comparison.eager, has_result=comparison.has_run, undecided=NO_MEMORY)
