"""Random programs on the CPU engine equal their eager twins, bit for bit, after every action.

``CAPTURE_FUZZ_EXAMPLES=100000`` runs that many programs, new ones each time; otherwise the same 2,500, of
which ``make test`` runs some 60 that are evenly drawn, and as many in ``test_machine_garbage``.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import strategies as st

from tests.generated.actions import DECK, Program
from tests.generated.bodies_of_state import OPERATIONS
from tests.generated.machine import NAMES, Tally, run
from tests.generated.runner import FUZZING, quickly, run_programs
from tests.generated.worlds import CATALOGUE
from tests.support.device import REBINDS, know_nothing_of_writes

PARTS = 8
EXAMPLES = int(os.environ.get("CAPTURE_FUZZ_EXAMPLES", "2000"))
LEAST_SHARE = 0.25 if REBINDS else 0.05
"""The least share of replays among calls. Without rebinding a moved tensor leads to another recording."""
ENOUGH = 150 if REBINDS else 250
"""Calls of a function after which one should have been a replay."""

steps = st.tuples(st.integers(0, len(DECK) - 1), st.integers(0, 4), st.integers(0, 16**4 - 1), st.integers(0, 63))
operations = st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 7), st.integers(0, 7))
programs = st.builds(
    Program,
    cast=st.lists(st.integers(0, len(NAMES) - 1), min_size=1, max_size=3).map(tuple),
    bodies=st.lists(st.lists(operations, min_size=1, max_size=8).map(tuple), max_size=2).map(tuple),
    steps=st.lists(steps, min_size=3, max_size=10).map(tuple),
    poison=st.booleans(),
    bind=st.booleans(),
    marks=st.booleans(),
    rounds=st.integers(1, 4),
    verify=st.integers(0, 7).map(lambda n: n == 7),
)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_equal_their_eager_twins(part: int) -> None:
    tally = run_part(part)
    assert tally.share() > LEAST_SHARE, f"only {tally.share():.0%} of the calls were replays"
    never = [
        name
        for name, calls in tally.calls.items()
        if calls > ENOUGH and not tally.replays[name] and not CATALOGUE[name].eager
    ]
    assert not never, f"never replayed: {[(name, tally.calls[name]) for name in never]}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS, PARTS + 2))
def test_random_programs_where_nobody_knows_what_is_written(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an engine that records graphs, which does not know where its recordings write."""
    know_nothing_of_writes(monkeypatch)
    assert run_part(part).share() > 0.1


@pytest.mark.parametrize("part", quickly(range(PARTS * 2), 1))
def test_evenly_drawn_programs_equal_their_eager_twins(part: int) -> None:
    """Hypothesis prefers small numbers, and reaches some pairs of operations late. A failure here is not shrunk;
    ``machine.run`` runs the printed program alone."""
    rng = random.Random(random.randrange(2**32) if FUZZING else part)
    tally = Tally()
    for _ in range(max(EXAMPLES // 8 // PARTS, 1)):
        run(drawn(rng), tally)
    assert tally.recordings


def drawn(rng: random.Random) -> Program:
    """Every number of the program is as likely as any other."""

    def below(*limits: int) -> tuple[int, ...]:
        return tuple([rng.randrange(limit) for limit in limits])

    return Program(
        cast=below(*[len(NAMES)] * rng.randint(1, 2)),
        steps=tuple([below(len(DECK), 4, 256, 16) for _ in range(rng.randint(2, 8))]),  # type: ignore[misc]
        bodies=(tuple([below(len(OPERATIONS), 8, 8) for _ in range(rng.randint(2, 7))]),),  # type: ignore[misc]
        poison=rng.random() < 0.3,
        marks=rng.random() < 0.3,
        rounds=rng.randint(1, 2),
        bind=rng.random() < 0.7,
    )


def run_part(part: int) -> Tally:
    tally = Tally()
    run_programs(programs, lambda program: run(program, tally), part=part, count=max(EXAMPLES // PARTS, 1))
    return tally
