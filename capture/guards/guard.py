"""Guard: one condition on Python or tensor state that must hold before a replay, as data.

What a recording relies on, and what the key of a call is made of beside its arguments, are lists of these. The C module
takes such a list once and looks at it before every replay (``native/guards.c``); ``explain`` prints it. There is no
other evaluator in the library: the tests have one in Python, which says what each kind means in a line.
"""

from __future__ import annotations

import array
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from capture.core.data import define
from capture.core.interned import interned
from capture.native import seen
from capture.state.source import Source

OK, MOVED, CHANGED, OVERLAPS = 0, 1, 2, 3
"""Verdicts. ``OK``: all guards hold. ``MOVED``: a static tensor is another one, or has another address or other
metadata. ``OVERLAPS``: a copied argument shares memory with a static tensor, and one of the two is written, so that the
copy would hide the write. ``CHANGED``: anything else."""

Kind = Literal[
    "value", "object", "present", "absent", "length", "members", "empty", "address", "apart", "names", "table",
    "sequence", "functions", "bases", "classes", "definitions",
]  # fmt: skip
"""What has to be true of what the source leads to:

* ``value``: it is the expected object, or a number, text, bytes, size or device of the same type and bits.
* ``object``: it is the object that a ``Referent`` tells of, which the guard does not keep alive, or such a tensor.
* ``present``: it is there, and not None.
* ``absent``: it is not there. Of items of a dict alone.
* ``length``: a container has this many members.
* ``members``: a dict has none of some names, and some names with these values: ``(names, ((name, value), ...))``.
* ``names``: what an object, a class or a dict keeps by some names, and that it keeps nothing by the others of these:
  ``(all names, those that are there, values, classes)``. Where a class is told, anything of it may be there. An object
  is told by a weak reference, or by its ``__dict__``.
* ``table``: a dict has these members, in this order: ``(keys, values, classes)``.
* ``sequence``: a list, set or deque has these members: ``(values, classes)``. The source names Python's own class,
  which gives the order.
* ``functions``: each function in a tuple has this code and these defaults: ``(code, defaults, named ones, code, ...)``.
* ``bases``: each class in a tuple has this ``__mro__``.
* ``classes``: each object in a tuple, told by weak references where they take such, is of this class, and where one is
  told has this ``__dict__``: ``(classes, dicts)``.
* ``definitions``: each function or class in a tuple has this name, or what else the source names that C code keeps of
  it.
* ``empty``: nothing is in any of the containers in a tuple.
* ``address``: an argument begins at this address.
* ``apart``: an argument shares no memory with some pieces: ``(bytes of the argument, pieces)``, see ``pieces_of``.
"""
_SHOWN = 60  # characters of an expected value that are shown


@seen
@define(eq=False)
class Guard:
    """One condition. ``source`` tells how to reach the object; it has no parent, so that nothing above it is kept
    alive. ``verdict``: the result of the check where the condition does not hold; it is ``CHANGED`` where the source
    leads nowhere any more.

    Never changed. Not frozen, as there are thousands, and freezing doubles the cost of each.
    """

    kind: Kind
    source: Source
    expected: Any = None
    verdict: int = CHANGED


class Referent(NamedTuple):
    """An object that is expected without being kept alive, or any tensor of this class that requires gradients or not
    as it did. Tensors are not held by weak references, as torch swaps none that has one."""

    reference: weakref.ref[Any] | None
    kind: type
    requires_grad: bool | None

    @classmethod
    def of(cls, value: Any) -> Referent:
        """The object as it is now."""
        if issubclass(type(value), torch.Tensor):
            return cls(None, type(value), value.requires_grad)
        return cls(weakref.ref(value), type(value), None)


def itself(value: Any, path: str) -> Source:
    """What a guard on a container itself compares."""
    return Source("root", value, None, path)


def looked_up(
    source: Source, wanted: frozenset[Any], names: tuple[Any, ...], values: tuple[Any, ...],
    kinds: tuple[type | None, ...],
) -> Guard:  # fmt: skip
    """Of the names that code may have looked up, a namespace has these and no others, with these values, or with any of
    a kind where one is given."""
    return Guard("names", source, (interned(wanted), names, values, kinds))


def members(own: dict[Any, Any], path: str, absent: Iterable[str], there: Iterable[tuple[Any, Any]]) -> Guard:
    """A dict has none of some names, and some names with these values."""
    return Guard("members", itself(own, path), (tuple(absent), tuple(there)))


def pieces_of(begins: Sequence[int], ends: Sequence[int]) -> bytes:
    """Ranges of memory in ascending order, for guards of the kind ``apart``: 64 bits for each begin and each end."""
    return array.array("Q", itertools.chain.from_iterable(zip(begins, ends, strict=True))).tobytes()


def text_of(guard: Guard) -> str:
    """The guard in one line: path, kind, what is expected."""
    if guard.kind in _COUNTED:
        one, several, state = _COUNTED[guard.kind]
        count = len(guard.source.holder)
        return f"{guard.source.path}: {one if count == 1 else f'{count} {several}'}, {state}"
    return f"{guard.source.path}: {guard.kind}{_expected(guard)}"


_COUNTED = {
    "empty": ("1 container", "containers", "still empty"),
    "functions": ("1 function", "functions", "not changed"),
    "bases": ("1 class", "classes", "with the same bases"),
    "classes": ("1 object", "objects", "of the same class"),
    "definitions": ("1 of them", "of them", "not changed"),
}
"""Guards on several things: what one is called, what several are, and what is expected of each."""


def _expected(guard: Guard) -> str:
    match guard.kind, guard.expected:
        case (("present" | "absent"), _):
            return ""
        case "names", (names, there, values, kinds):
            pairs = zip(there, map(_member, values, kinds), strict=True)
            left = len(names) - len(there)
            others = [f"none of {left} others" if there else "none of those that are asked for"] if left else []
            return f" {', '.join([*(f'{name} = {text}' for name, text in pairs), *others])}"
        case "table", (keys, values, kinds):
            pairs = zip(map(_short, keys), map(_member, values, kinds), strict=True)
            return f" {', '.join([f'{key}: {text}' for key, text in pairs])}"
        case "sequence", (values, kinds):
            return f" {', '.join(map(_member, values, kinds))}"
        case "object", Referent(kind=kind):
            return f" this {kind.__qualname__}"
        case "members", (absent, there):
            parts = [*(f"no {name}" for name in absent), *(f"{name} = {_short(value)}" for name, value in there)]
            return f" {', '.join(parts)}"
        case "address", int(address):
            return f" {address:#x}"
        case "apart", (nbytes, bytes(pieces)):
            return f": its {nbytes} bytes from {len(pieces) // 16} pieces of memory"
    return f" {_short(guard.expected)}"


def _member(value: Any, kind: type | None) -> str:
    return _short(value) if kind is None else f"a {kind.__qualname__}"


def _short(value: Any) -> str:
    """A plain value, or the class of an object: ``repr`` of a user's class is not run."""
    if issubclass(type(value), torch.Tensor):
        return f"this {type(value).__name__} {value.dtype} {tuple(value.shape)}".replace("torch.", "")
    if value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, torch.Size, torch.device, torch.dtype)
    ):
        text = repr(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    name = getattr(value, "__qualname__", None) if issubclass(type(value), type) or callable(value) else None
    return name if isinstance(name, str) else f"this {type(value).__qualname__}"
