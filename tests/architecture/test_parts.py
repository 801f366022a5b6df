"""The parts of the slow tests: together they are all of them, and no test is in two."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.support.parts import part_of

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
