"""Attributes of torch's classes and modules that are replaced while a body is watched.

They are replaced for all threads. Guards that another thread checks meanwhile see through the replacement: the C module
knows what it stands for (``native.stand_ins``).
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from capture.core import forks
from capture.core.data import define
from capture.native import native

_INHERITED = object()
_put: list[tuple[Any, str, Any, Any]] = []
"""Holder, name, former and present value of all replaced attributes. One thread at a time replaces any."""
_lock = forks.lock()
"""Held while attributes are restored: a thread that compiles may set them aside at any moment. C takes it and gives it
back: ``with`` may be interrupted between the two, and other threads would wait for ever."""
_aside = 0
"""How many of the first ones have their former values for now."""
_asked = 0
"""How often ``set_aside`` was called without its ``put_again``: a compiler imports modules, and threads overlap."""
_TRUSTED = ("capture", "torch", "triton")
"""Packages whose code may read a replaced attribute unseen: they look at what they made themselves, or compare with the
next call."""


class Replaced:
    """In the block each holder has others, by name. An attribute that it inherited before is inherited again
    afterwards. No generator, as each run enters many: that takes twice as long."""

    __slots__ = ("_before", "_tables")

    def __init__(self, *tables: tuple[Any, Mapping[str, Any]]) -> None:
        self._tables, self._before = tables, 0

    def __enter__(self) -> None:
        self._before, stand_ins = len(_put), native.stand_ins
        try:
            for holder, others in self._tables:
                own = holder.__dict__
                for name, replacement in others.items():
                    before_it = own.get(name, _INHERITED)
                    _put.append((holder, name, before_it, replacement))  # noted first, as this may be interrupted
                    stand_ins[id(replacement)] = () if before_it is _INHERITED else (before_it,)
                native.put_attributes(holder, others, _INHERITED)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        native.locked(_lock, _put_back, (self._before,), forks.wait_on)


def replaced(holder: Any, others: dict[str, Any]) -> Replaced:
    """In the block ``holder`` has ``others``."""
    return Replaced((holder, others))


@forks.in_child
def put_back(count: int = 0) -> None:
    """Restore all attributes but the first ``count``. Calling it again changes nothing more."""
    native.locked(_lock, _put_back, (count,), forks.wait_on)


def _put_back(count: int) -> None:
    global _aside, _asked
    while len(_put) > count:
        holder, first = _put[-1][0], len(_put) - 1
        while first > count and _put[first - 1][0] is holder:
            first -= 1
        several = _put[first:]
        # of one that was replaced twice the first value is the former one
        former = {name: original for _, name, original, _ in reversed(several)}
        native.put_attributes(holder, former, _INHERITED)
        for _, _, _, replacement in several:
            native.stand_ins.pop(id(replacement), None)
        del _put[first:]
    if not _put:  # one who was interrupted may not have asked to end it
        _aside = _asked = 0


def set_aside() -> None:
    """All attributes have their former values until ``put_again``, or until they are restored. For compilers: they keep
    tables of torch's functions for the process, and would keep what stands in for them. It may be asked for again
    meanwhile."""
    native.locked(_lock, _set_aside, (), forks.wait_on)


def _set_aside() -> None:
    global _aside, _asked
    _asked, _aside = _asked + 1, len(_put)
    for holder, name, original, _ in reversed(_put):
        native.put_attributes(holder, {name: original}, _INHERITED)


def put_again() -> None:
    """End what ``set_aside`` began, once all who asked for it have. What was restored meanwhile stays so."""
    native.locked(_lock, _put_again, (), forks.wait_on)


def _put_again() -> None:
    global _aside, _asked
    _asked = max(_asked - 1, 0)
    if _asked:
        return
    again, _aside = _put[:_aside], 0
    for holder, name, _, replacement in again:
        native.put_attributes(holder, {name: replacement}, _INHERITED)


@define(eq=False)
class Listening:
    """Whom stand-ins tell what is done: the callbacks of the run that is watched now, and its thread."""

    thread: int = 0
    to: Any = None

    def by(self, to: Any) -> _Heard:
        """In the block stand-ins tell ``to`` what this thread does."""
        return _Heard(self, to)


class _Heard:
    __slots__ = ("_before", "_listening", "_to")

    def __init__(self, listening: Listening, to: Any) -> None:
        self._listening, self._to, self._before = listening, to, (listening.thread, listening.to)

    def __enter__(self) -> None:
        listening = self._listening
        self._before = listening.thread, listening.to
        listening.to, listening.thread = self._to, threading.get_ident()  # another thread may call one between the two

    def __exit__(self, *_: object) -> None:
        self._listening.thread, self._listening.to = self._before


def made_once(make: Callable[[str, Any], Any]) -> Callable[[Any, Iterable[str]], dict[str, Any]]:
    """Gives, by name, what stands in for attributes of a module or class: ``make(name, original)``. It is made anew
    only where there is another original by now: to wrap a hundred functions for each run takes half a millisecond."""
    made: dict[tuple[int, str], tuple[Any, Any]] = {}

    def stand_ins(holder: Any, names: Iterable[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in names:
            original = getattr(holder, name)
            known = made.get((id(holder), name))
            if known is None or (known[0] is not original and not _is_same(known[0], original)):
                known = made[id(holder), name] = original, make(name, original)
            found[name] = known[1]
        return found

    return stand_ins


def _is_same(one: Any, other: Any) -> bool:
    """Whether two objects are one attribute: some modules of torch make another one of a function in C for each
    look."""
    return type(one) is type(other) is types.BuiltinFunctionType and bool(one == other)


def num_replaced() -> int:
    """How many attributes are replaced now."""
    return len(_put)


def is_asked_by_users() -> bool:
    """Whether a user's code called the replacement: the first frame outside of the calling module is a user's."""
    frame: Any = sys._getframe(1)
    stand_in = frame.f_globals
    while frame.f_globals is stand_in:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _TRUSTED
