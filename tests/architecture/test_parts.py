"""The parts of the slow tests: together they are all of them, and no test is in two."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from tests.support.parts import mark_dealt, part_of

NAMES = [f"test_shard[{number}]" for number in range(10)]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 12])
def test_parts_are_disjoint_and_all(parts: int) -> None:
    dealt = [part_of(NAMES, f"{number}/{parts}") for number in range(1, parts + 1)]
    assert sorted(chain.from_iterable(dealt)) == sorted(NAMES)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_the_order_of_collection_does_not_matter() -> None:
    assert part_of(NAMES, "2/3") == part_of(reversed(NAMES), "2/3")


@pytest.mark.parametrize("part", ["", "1", "0/3", "4/3", "1/0", "a/b", "1/3 "])
def test_what_is_no_part_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="K/N is expected, such as 1/3"):
        part_of(NAMES, part)


class Case:
    """A collected test, with what ``mark_dealt`` asks of it."""

    def __init__(self, name: str, one_in: int | None, *marks: str) -> None:
        self.nodeid, self.one_in, self.marks = name, one_in, list(marks)

    def get_closest_marker(self, name: str) -> Any:
        if name == "one_in" and self.one_in is not None:
            return pytest.mark.one_in(self.one_in).mark
        return getattr(pytest.mark, name).mark if name in self.marks else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.marks.append(marker.name)


def dealt() -> list[Case]:
    cases = [Case(f"a[{number}]", 3) for number in range(20)]
    cases += [Case("b[0]", 3), *(Case(f"c[{name}]", None) for name in "12")]
    mark_dealt(cases)
    return cases


def test_of_three_cases_one_is_quick() -> None:
    """``one_in(3)`` leaves every third case of a test quick, the first always. Tests without the mark stay quick."""
    quick = [one.nodeid for one in dealt() if not one.marks]
    assert len([name for name in quick if name.startswith("a[")]) == 7
    assert quick[7:] == ["b[0]", "c[1]", "c[2]"]
    assert [one.marks for one in dealt()] == [one.marks for one in dealt()]


def test_cases_that_are_slow_already_are_not_dealt() -> None:
    """Else the case that is drawn to be quick might be one of them, and none is."""
    cases = [Case(f"a[{number}]", 6, *(["slow"] if number else [])) for number in range(6)]
    mark_dealt(cases)
    assert [one.marks for one in cases] == [[], *[["slow"]] * 5]


def test_quick_cases_have_all_values_of_a_parameter() -> None:
    """The cases that stay quick have every residue by 2 and by 3: they step through no parameter's values in its
    rhythm."""
    numbers = [number for number, one in enumerate(dealt()[:20]) if not one.marks]
    assert {number % 2 for number in numbers} == {0, 1}
    assert {number % 3 for number in numbers} == {0, 1, 2}
