"""Python objects in a result: a replay hands out the ones that the recording run gave, so those have to last.

A value that cannot change, such as a number or a ``Path``, is told by its text. What can is made anew in each call
(containers, and objects that are opened), or copied. Any other object may be in a result only if each run gives the
very same one. One that a run makes, such as an iterator, a coroutine or a ``Counter``, is another object in the next
run, though its text may be the same: what the caller does with it would be seen by all later calls.
"""

from __future__ import annotations

import array
import itertools
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

from capture.core import forks
from capture.core.facts import Facts
from capture.key.numpy_arrays import is_array_type
from capture.key.tensor_kind import PLAIN_TYPES

_COPIED = (set, bytearray, deque, array.array)
_MARK = " (object "

_numbers = itertools.count(1)
_known: dict[int, tuple[weakref.ref[Any], int]] = {}
"""By ``id``: objects that runs gave, and their numbers."""
_lock = forks.lock()


def is_value(value: Any) -> bool:
    """Whether it is equal to others by what it holds, and can be hashed by that: such objects do not change."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        return True
    equals, hashes = getattr(kind, "__eq__", None), getattr(kind, "__hash__", None)
    by_content = equals is not object.__eq__ and hashes not in (None, object.__hash__)
    return by_content and not is_used_up(value)


def is_used_up(value: Any) -> bool:
    """Whether it can be used once, as an iterator or a coroutine."""
    return isinstance(value, (Iterator, AsyncIterator, Awaitable))


def is_copied(value: Any) -> bool:
    """Whether a replay hands out a copy of it, so that each call gets one of its own."""
    return type(value) in _COPIED or is_array_type(type(value))


def identity_text(value: Any) -> str:
    """What tells an object apart that is no value."""
    return f"{_MARK}{_number_of(value)})"


def are_of_this_process(facts: Facts) -> bool:
    """Whether the facts contain numbers of objects, which mean nothing in another process."""
    return any(output.value is not None and _MARK in output.value for output in facts.outputs)


def _number_of(value: Any) -> int:
    """The same number for the same object, as long as it lives; always another one for what takes no weak reference."""
    with _lock:
        reference, number = _known.get(id(value), (None, 0))
        if reference is not None and reference() is value:
            return number
        number = next(_numbers)
        try:
            _known[id(value)] = weakref.ref(value), number
        except TypeError:
            return number
        if len(_known) > _MOST:
            for address in [address for address, (reference, _) in _known.items() if reference() is None]:
                del _known[address]
        return number


_MOST = 256
"""Objects that are known before those that are gone are dropped."""
