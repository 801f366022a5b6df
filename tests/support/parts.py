"""Which of the slow tests belong to a part, such as ``2/3``, and which cases of a test that has many are slow.

``@pytest.mark.one_in(3)``: of the cases of this test a third are quick. The others, which look at the same in other
values, are slow: ``make test-all`` runs them all, and each run of the CI a third of them.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from typing import Protocol

import pytest


def part_of(names: Iterable[str], part: str) -> set[str]:
    """The names in one part. They are dealt in turn, so that shards of one test, which take equally long, are in
    different parts.

    Raises ``ValueError`` for what is no part.
    """
    parsed = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if parsed is None or int(parsed[1]) > int(parsed[2]):
        raise ValueError(f"--part {part}: K/N is expected, such as 1/3")
    return set(sorted(names)[int(parsed[1]) - 1 :: int(parsed[2])])


class Markable(Protocol):
    """A collected test."""

    @property
    def nodeid(self) -> str: ...
    def get_closest_marker(self, name: str) -> pytest.Mark | None: ...
    def add_marker(self, marker: pytest.MarkDecorator) -> None: ...


def mark_dealt(items: Iterable[Markable]) -> None:
    """Mark as slow what ``one_in`` leaves out of the cases that are not slow by another mark.

    At least one case of each test is quick. The choice is random and the same in all processes: taking every n-th case
    would take the same value of a parameter with n values each time.
    """
    cases: dict[str, list[Markable]] = {}
    share: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None and item.get_closest_marker("slow") is None:
            test = item.nodeid.partition("[")[0]
            cases.setdefault(test, []).append(item)
            share[test] = mark.args[0]
    for test, of_test in cases.items():
        count = len(of_test)
        for number in random.Random(test).sample(range(count), count - math.ceil(count / share[test])):
            of_test[number].add_marker(pytest.mark.slow)
