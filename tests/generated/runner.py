"""Run as many random programs as asked for; shared by the state machines."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.support.garbage import what_is_new

FUZZING = "CAPTURE_FUZZ_EXAMPLES" in os.environ
P = TypeVar("P")


def quickly(parts: Iterable[int], quick: int) -> list[Any]:
    """Parts of the programs as parameters of a test: ``make test`` runs the first ones, ``make test-all`` all."""
    return [pytest.param(part, marks=pytest.mark.slow) if at >= quick else part for at, part in enumerate(parts)]


def run_programs(programs: SearchStrategy[P], run: Callable[[P], object], *, part: int, count: int) -> None:
    """Run ``count`` drawn programs: always the same ones for a ``part``, or new ones while fuzzing."""

    @seed(random.randrange(2**32) if FUZZING else part)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(programs)
    def run_each(program: P) -> None:
        run(program)

    with what_is_new():
        run_each()
