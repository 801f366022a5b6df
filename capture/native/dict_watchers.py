"""Which changes of dicts Python reports to watchers, tried out at import.

From Python 3.12 on guards know by a watcher that a dict was not written since (``dict_versions.c``). A change that is
not reported would make a guard hold wrongly. So each way to store is tried, for each kind of dict, and often enough
that the interpreter specializes its instructions. Where a change is not reported, dicts of that kind are compared
member by member.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

_OFTEN = 64  # an instruction is specialized after some 10 runs
_MANY = 40  # attributes; from 30 on they are kept in an ordinary dict


def _store(holder: Any, value: Any) -> None:
    holder.a = value


def _store_elsewhere(holder: Any, value: Any) -> None:
    """The same instruction for another kind of dict."""
    holder.a = value


def _store_in_class(holder: Any, value: Any) -> None:
    holder.a = value


def _stores(holder: Any, own: dict[str, Any], store: Callable[[Any, Any], None]) -> Iterator[Callable[[], object]]:
    yield from (functools.partial(store, holder, number) for number in range(_OFTEN))
    yield functools.partial(object.__setattr__, holder, "a", -1)
    yield functools.partial(delattr, holder, "a")
    yield functools.partial(setattr, holder, "a", -2)
    yield from _changes(own)
    yield functools.partial(store, holder, -3)


def _changes(plain: dict[str, Any]) -> Iterator[Callable[[], object]]:
    yield functools.partial(plain.__setitem__, "a", -4)
    yield functools.partial(plain.update, a=-5)
    yield functools.partial(plain.__ior__, {"a": -6})
    yield functools.partial(plain.pop, "a")
    yield functools.partial(plain.setdefault, "a", -7)
    yield functools.partial(plain.popitem)
    yield functools.partial(plain.__setitem__, "a", -8)
    yield functools.partial(plain.__delitem__, "a")
    yield functools.partial(plain.__setitem__, "a", -9)
    yield functools.partial(plain.clear)


def _of_class(kind: type) -> Iterator[Callable[[], object]]:
    yield from (functools.partial(_store_in_class, kind, number) for number in range(_OFTEN))
    yield functools.partial(type.__setattr__, kind, "a", -1)
    yield functools.partial(delattr, kind, "a")


def trust(native: Any) -> tuple[bool, bool]:
    """Try all ways to store, and let guards rely on what is reported. Gives whether that is everything, for plain dicts
    and for dicts whose values are kept in an object."""
    is_told: Callable[[Any, Callable[[], object]], bool] = native.dict_change_is_told
    plain: dict[str, Any] = {}
    # new ones: objects of a used class are laid out differently
    kind, holders = type("Kind", (), {}), type("Holder", (), {})
    alone: Any = holders()
    alone.a = None  # another object than is stored: the same one again is no change
    with_many: Any = type("Many", (), {})()
    vars(with_many).update({f"a{number}": number for number in range(_MANY)})
    is_plain = (
        all(is_told(empty, change) for empty in (plain, OrderedDict[str, Any]()) for change in _changes(empty))
        and all(is_told(vars(with_many), store) for store in _stores(with_many, vars(with_many), _store_elsewhere))
        and all(is_told(kind, change) for change in _of_class(kind))
    )
    is_split = native.is_split_dict(vars(alone)) and is_plain
    is_split = is_split and all(is_told(vars(alone), change) for change in _stores(alone, vars(alone), _store))
    native.trust_dict_watchers(is_plain, is_split)
    return is_plain, is_split
