"""Random programs on the CPU engine equal their eager twins, bit for bit, after every action.

``CAPTURE_FUZZ_EXAMPLES=100000`` runs that many programs, new ones each time; otherwise the same 2,500.
"""

from __future__ import annotations

import os
import random

import attrs
import pytest
from hypothesis import strategies as st

from capture import _torch_private
from tests import machine
from tests.device import MOVES_HELD, REBINDS
from tests.programs import FUZZING, run_programs

PARTS = 8
EXAMPLES = int(os.environ.get("CAPTURE_FUZZ_EXAMPLES", "2000"))
LEAST_SHARE = 0.25 if MOVES_HELD and REBINDS else 0.1 if REBINDS else 0.05
"""Of the calls, replays. What cannot leave the pool or be bound anew is recorded again, and compared as well."""
ENOUGH = 150 if MOVES_HELD and REBINDS else 250
"""Calls of a function after which one should have been a replay."""
NEVER = frozenset() if MOVES_HELD else frozenset({"last_kept", "concatenating"})
"""Their state holds a view of what the last call made: each recording lies under the one before."""

steps = st.tuples(
    st.integers(0, len(machine.DECK) - 1), st.integers(0, 4), st.integers(0, 16**4 - 1), st.integers(0, 63)
)
operations = st.tuples(st.integers(0, len(machine.OPERATIONS) - 1), st.integers(0, 7), st.integers(0, 7))
programs = st.builds(
    machine.Program,
    cast=st.lists(st.integers(0, len(machine.NAMES) - 1), min_size=1, max_size=3).map(tuple),
    bodies=st.lists(st.lists(operations, min_size=1, max_size=8).map(tuple), max_size=2).map(tuple),
    steps=st.lists(steps, min_size=3, max_size=10).map(tuple),
    poison=st.booleans(),
    bind=st.booleans(),
    marks=st.booleans(),
    rounds=st.integers(1, 4),
    verify=st.integers(0, 7).map(lambda n: n == 7),
)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_equal_their_eager_twins(part: int) -> None:
    tally = run_part(part)
    assert tally.share() > LEAST_SHARE, f"only {tally.share():.0%} of the calls were replays"
    never = [
        name
        for name, calls in tally.calls.items()
        if calls > ENOUGH and not tally.replays[name] and not machine.CATALOGUE[name].eager and name not in NEVER
    ]
    assert not never, f"never replayed: {[(name, tally.calls[name]) for name in never]}"


@pytest.mark.parametrize("part", range(PARTS, PARTS + 2))
def test_random_programs_where_held_outputs_cannot_leave(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on torch before 2.13, which swaps no data pointers."""
    without = attrs.evolve(_torch_private.CAPABILITIES, swap_data_ptr=False)
    monkeypatch.setattr(_torch_private, "CAPABILITIES", without)
    assert run_part(part).share() > 0.1


@pytest.mark.parametrize("part", range(PARTS))
def test_evenly_drawn_programs_equal_their_eager_twins(part: int) -> None:
    """Hypothesis tries small numbers more often, and reaches some pairs of operations late. What fails here is shown as
    it is; ``machine.run`` runs it alone."""
    rng = random.Random(random.randrange(2**32) if FUZZING else part)
    tally = machine.Tally()
    for _ in range(max(EXAMPLES // 4 // PARTS, 1)):
        machine.run(drawn(rng), tally)
    assert tally.recordings


def drawn(rng: random.Random) -> machine.Program:
    """Every number of the program is as likely as any other."""

    def below(*limits: int) -> tuple[int, ...]:
        return tuple([rng.randrange(limit) for limit in limits])

    return machine.Program(
        cast=below(*[len(machine.NAMES)] * rng.randint(1, 2)),
        steps=tuple([below(len(machine.DECK), 4, 256, 16) for _ in range(rng.randint(2, 8))]),  # type: ignore[misc]
        bodies=(tuple([below(len(machine.OPERATIONS), 8, 8) for _ in range(rng.randint(2, 7))]),),  # type: ignore[misc]
        poison=rng.random() < 0.3,
        marks=rng.random() < 0.3,
        rounds=rng.randint(1, 2),
        bind=rng.random() < 0.7,
    )


def run_part(part: int) -> machine.Tally:
    tally = machine.Tally()
    run_programs(programs, lambda program: machine.run(program, tally), part=part, count=max(EXAMPLES // PARTS, 1))
    return tally
