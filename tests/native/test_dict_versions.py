"""Guards know by a dict's version that nobody wrote to it: each way to write has to give it another one."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from capture.guards.guard import CHANGED, OK, Guard, itself
from capture.native import DICT_WATCHERS, dict_watchers, native
from capture.state.source import Source


class Holder:
    """Keeps a few attributes."""

    def __init__(self, count: int = 1) -> None:
        self.a: Any = 0
        for number in range(count):
            setattr(self, f"b{number}", number)


def store(holder: Any, value: Any) -> None:
    holder.a = value


def names_of(own: Any, holder: Any = None) -> Any:
    """A guard on ``a`` and on an absent name."""
    there = ("a",) if "a" in own else ()
    expected = (frozenset({"a", "absent"}), there, tuple(own[name] for name in there), (None,) * len(there))
    return native.Guards((Guard("names", itself(own if holder is None else holder, "own"), expected),))


def changes(holder: Any, own: dict[str, Any]) -> list[Callable[[], object]]:
    return [
        functools.partial(store, holder, 1),
        functools.partial(object.__setattr__, holder, "a", 2),
        functools.partial(setattr, holder, "absent", 3),
        functools.partial(delattr, holder, "a"),
        functools.partial(own.__setitem__, "a", 4),
        functools.partial(own.update, a=5),
        functools.partial(own.pop, "a"),
        functools.partial(own.clear),
        functools.partial(own.__ior__, {"a": 6}),
        functools.partial(own.setdefault, "absent", 7),
    ]


@pytest.mark.parametrize("at", range(10))
@pytest.mark.parametrize("count", [1, 20, 60], ids=["alone", "several", "many"])
def test_each_change_of_an_object_is_noticed(count: int, at: int) -> None:
    holder = Holder(count)
    own, before = vars(holder), dict(vars(holder))
    guards = names_of(own)
    for _ in range(3):
        assert guards(()) == OK
        changes(holder, own)[at]()
        assert guards(()) == CHANGED
        own.clear()
        own.update(before)
    assert guards(()) == OK


@pytest.mark.parametrize("count", [1, 60], ids=["alone", "many"])
def test_a_store_that_the_interpreter_has_a_fast_way_for_is_noticed(count: int) -> None:
    holder = Holder(count)
    guards = names_of(vars(holder))
    for number in range(1, 200):
        assert guards(()) == OK
        store(holder, number)
        assert guards(()) == CHANGED
        store(holder, 0)


def test_changes_of_a_class_are_noticed() -> None:
    kind: Any = type("Kind", (), {"a": 0})
    guards = names_of(vars(kind), kind)
    for number in range(1, 100):
        assert guards(()) == OK
        store(kind, number)
        assert guards(()) == CHANGED
        kind.a = 0
    kind.absent = 1
    assert guards(()) == CHANGED
    del kind.absent
    assert guards(()) == OK
    del kind.a
    assert guards(()) == CHANGED


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_tables_and_lengths_are_noticed(kind: type[dict[str, int]]) -> None:
    table = kind(a=1, b=2)
    guards = native.Guards((
        Guard("table", itself(table, "table"), (("a", "b"), (1, 2), (None, None))),
        Guard("length", itself(table, "table"), 2),
    ))  # fmt: skip
    assert guards(()) == OK
    table["c"] = 3
    assert guards(()) == CHANGED
    del table["c"]
    assert guards(()) == OK
    table["a"] = 2
    assert guards(()) == CHANGED


def test_guards_that_share_a_dict_go_one_by_one() -> None:
    own = {"a": 1}
    several = [names_of(own) for _ in range(5)]
    several[1] = several[0].beside((), None)
    while several:
        assert [guards(()) for guards in several] == [OK] * len(several)
        own["a"] = 2
        assert [guards(()) for guards in several] == [CHANGED] * len(several)
        own["a"] = 1
        several.pop()


def test_other_dicts_at_the_places_of_dead_ones() -> None:
    kept = []
    for number in range(2000):
        own = {"a": number}
        guards = names_of(own)
        assert guards(()) == OK
        own["a"] = -1
        assert guards(()) == CHANGED
        if number % 7 == 0:
            own["a"] = number
            kept.append(guards)
        del own, guards
    gc.collect()
    assert all(held(()) == OK for held in kept)


def test_what_is_tried_at_import_is_told_again() -> None:
    """Up to Python 3.11 dicts have versions of their own, and nothing is tried."""
    if sys.version_info >= (3, 12):
        assert dict_watchers.trust(native) == DICT_WATCHERS
    else:
        assert DICT_WATCHERS == (False, False)
        assert not hasattr(native, "trust_dict_watchers")


class _Deaf:
    """A C module in a Python that does not tell of some changes."""

    def __init__(self, missed: Callable[[Any], bool], *, splits: bool = True) -> None:
        self.missed, self.splits = missed, splits
        self.trusted: tuple[bool, bool] | None = None

    def dict_change_is_told(self, holder: Any, change: Callable[[], object]) -> bool:
        change()
        return not self.missed(holder)

    def is_split_dict(self, own: dict[str, Any]) -> bool:
        return self.splits

    def trust_dict_watchers(self, plain: bool, split: bool) -> None:
        self.trusted = plain, split


@pytest.mark.parametrize(
    ("missed", "trusted"),
    [
        (lambda _: False, (True, True)),
        (lambda holder: isinstance(holder, dict) and len(holder) < 9, (False, False)),
        (lambda holder: isinstance(holder, type), (False, False)),
        (lambda _: True, (False, False)),
    ],
    ids=["nothing", "small dicts", "classes", "all"],
)
def test_what_is_not_told_is_not_trusted(missed: Callable[[Any], bool], trusted: tuple[bool, bool]) -> None:
    for splits in (True, False):
        deaf = _Deaf(missed, splits=splits)
        expected = (trusted[0], trusted[1] and splits)
        assert dict_watchers.trust(deaf) == expected
        assert deaf.trusted == expected


def are_empty(*containers: Any) -> Any:
    """A guard on several containers."""
    return native.Guards((Guard("empty", itself(containers, "containers")),))


@pytest.mark.parametrize("kind", [dict, OrderedDict, defaultdict])
def test_what_comes_into_any_of_many_is_noticed(kind: type[dict[str, int]]) -> None:
    many = [kind() for _ in range(300)]
    guards = are_empty(*many)
    for number in (0, 7, 299):
        for change in (
            functools.partial(many[number].__setitem__, "a", 1),
            functools.partial(many[number].setdefault, "a", 1),
            functools.partial(many[number].update, a=1),
            functools.partial(dict.update, many[number], {"a": 1, "b": 2}),
        ):
            assert guards(()) == OK
            change()
            assert guards(()) == CHANGED
            assert guards(()) == CHANGED
            many[number].clear()
    assert guards(()) == OK


def test_groups_that_share_dicts_go_one_by_one() -> None:
    many: list[dict[str, int]] = [{} for _ in range(20)]
    places = [(*many[at:], many[-1]) for at in range(10)]
    several = [(are_empty(*place), place) for place in places]
    several.append((several[0][0].beside((), None), places[0]))
    while several:
        for table in (many[-1], many[0], many[5]):
            assert [guards(()) for guards, _ in several] == [OK] * len(several)
            table["a"] = 1
            for guards, place in several:
                assert guards(()) == (CHANGED if any(member is table for member in place) else OK)
            table.clear()
        several.pop()
        del guards
    assert are_empty(*many)(()) == OK


def test_one_container_that_is_no_dict_is_looked_at_itself() -> None:
    table: dict[str, int] = {}
    members: set[int] = set()
    guards = are_empty(table, members)
    for change in (lambda: members.add(1), lambda: table.setdefault("a", 1)):
        assert guards(()) == OK
        change()
        assert guards(()) == CHANGED
        members.clear()
        table.clear()
    assert guards(()) == OK


def test_a_look_that_writes_to_another_dict_is_noticed() -> None:
    """A guard that is no table's calls Python, which changes what another guard is about."""
    own, second = {"a": 1}, {"b": 2}

    def read() -> int:
        own["a"] += added[0]
        return 0

    added = [0]
    called = Guard("value", Source("call", read, None, "a call"), 0)
    tables = [Guard("table", itself(table, "table"), ((key,), (table[key],), (None,))) for key, table in
              (("a", own), ("b", second))]  # fmt: skip
    first, last = native.Guards((called, *tables)), native.Guards((*tables, called))
    assert [guards(()) for guards in (first, last) for _ in range(3)] == [OK] * 6
    added[0] = 1
    assert first(()) == CHANGED
    assert last(()) == CHANGED


@pytest.mark.parametrize("number", range(4))
def test_any_of_several_tables_may_change(number: int) -> None:
    """In one, in two or in all, in any order; back as they were, all hold again."""
    several: list[dict[str, int]] = [{"a": at} for at in range(4)]
    there = [Guard("table", itself(table, "table"), (("a",), (table["a"],), (None,))) for table in several]
    guards = native.Guards((*there, Guard("length", itself(several[0], "length"), 1)))
    for count in range(1, 5):
        changed = [several[(number + at) % 4] for at in range(count)]
        before = [table["a"] for table in changed]
        assert guards(()) == OK
        for table in changed:
            table["a"] += 10
        for table, value in zip(changed, before, strict=True):
            assert guards(()) == CHANGED
            table["a"] = value
        assert guards(()) == OK


@pytest.mark.parametrize("at", range(10))
def test_each_change_of_an_object_that_is_held_weakly_is_noticed(at: int) -> None:
    holder = Holder(20)
    before = dict(vars(holder))
    guards = names_of(vars(holder), weakref.ref(holder))
    for _ in range(3):
        assert [guards(()) for _ in range(3)] == [OK] * 3
        changes(holder, vars(holder))[at]()
        assert guards(()) == CHANGED
        vars(holder).clear()
        vars(holder).update(before)
    holder.__dict__ = {**before, "a": 8}
    assert guards(()) == CHANGED
    holder.__dict__ = before
    assert guards(()) == OK
    del holder
    assert guards(()) == CHANGED
