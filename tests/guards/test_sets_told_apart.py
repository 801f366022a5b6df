"""A set becomes a part of the key once it has other members, and not because something else changed."""

from __future__ import annotations

from typing import Any

import pytest

from capture.guards.guard import Guard
from capture.guards.read import ValuePlace
from capture.key.code_names import NamedKey
from capture.state.source import Source


def place_of(members: set[Any]) -> ValuePlace:
    kept = tuple(members)
    return ValuePlace(Guard("sequence", Source("root", members, set, "names"), (kept, (None,) * len(kept))))


@pytest.mark.parametrize("members", [set[Any](), {"cache"}, {"a", "b", "c", "d"}, {1, 2.5, None, b"x"}])
def test_one_that_is_as_it_was_is_not(members: set[Any]) -> None:
    place, named = place_of(members), NamedKey()
    assert place.tell_apart(named) == []
    members.add("another")
    assert place.tell_apart(named) == ["names"]


@pytest.mark.parametrize(("before", "now"), [({1}, {True}), ({0.0}, {-0.0}), ({"a"}, {"b"}), ({"a", "b"}, {"a"})])
def test_one_with_other_members_is(before: set[Any], now: set[Any]) -> None:
    members = set(before)
    place = place_of(members)
    members.clear()
    members.update(now)
    assert place.tell_apart(NamedKey()) == ["names"]


def test_one_that_holds_objects_is_not() -> None:
    members = {object()}
    place = place_of(members)
    members.add("text")
    assert place.tell_apart(NamedKey()) == []
