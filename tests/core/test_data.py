"""Classes of data print as attrs' own do, though nothing is compiled for it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from typing_extensions import override

from capture.core import data


def _classes(frozen: Any, define: Any) -> tuple[Any, Any, Any, Any]:
    @frozen
    class Point:
        x: int
        y: int = attrs.field(default=2, repr=False)

    @define(eq=False)
    class Line:
        begin: Point
        end: Any = attrs.Factory(list)

    @frozen(repr=False)
    class Silent:
        x: int = 1

    @frozen
    class Named(Point):
        @override
        def __repr__(self) -> str:
            return "named"

    return Point, Line, Silent, Named


def test_they_print_as_those_of_attrs() -> None:
    ours, theirs = _classes(data.frozen, data.define), _classes(attrs.frozen, attrs.define)
    for point, line, _, named in (ours, theirs):
        assert repr(point(1)) == "Point(x=1)"
        assert repr(line(point(3))) == "Line(begin=Point(x=3), end=[])"
        assert repr(named(1)) == "named"
    assert ours[0].__repr__ is ours[1].__repr__
    assert [kind[2].__repr__ is object.__repr__ for kind in (ours, theirs)] == [True, True]


def test_options_are_those_of_attrs() -> None:
    point, line, *_ = _classes(data.frozen, data.define)
    assert point(1) == point(1)
    assert hash(point(1)) == hash(point(1))
    assert line(1) != line(1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        point(1).x = 2
    assert not hasattr(point(1), "__dict__")
