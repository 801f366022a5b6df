"""Random training programs equal their eager twins, bit for bit, after every action.

``CAPTURE_FUZZ_EXAMPLES=100000`` runs that many programs, new ones each time; otherwise the same 1,000, or 300 on a GPU.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import strategies as st

from tests.generated import gradients
from tests.generated.gradient_bodies import EAGER, OPTIMIZERS, REGIONS, STEPS
from tests.generated.machine import Tally
from tests.generated.runner import run_programs
from tests.support.device import DEVICE, EXECUTES, REBINDS

EXAMPLES = int(os.environ.get("CAPTURE_FUZZ_EXAMPLES", "1000" if DEVICE.type == "cpu" else "300"))
PARTS = min(max(EXAMPLES // 125, 1), 8)
LEAST_SHARE = 0.05 if not REBINDS else 0.25 if EXAMPLES >= 1000 else 0.1
"""The least share of replays among calls. The first programs of a part are short and replay little, so a run with few
programs has fewer parts."""
ENOUGH = 100
"""Calls of a region after which one should have been a replay."""

steps = st.tuples(
    st.integers(0, len(gradients.DECK) - 1), st.integers(0, 4), st.integers(0, 16**3 - 1), st.integers(0, 63)
)
parts = st.tuples(
    st.integers(0, len(REGIONS) - 1),
    st.integers(0, len(STEPS) - 1),
    st.integers(0, len(OPTIMIZERS) - 1),
)
programs = st.builds(
    gradients.Program,
    cast=st.lists(parts, min_size=1, max_size=3).map(tuple),
    steps=st.lists(steps, min_size=2, max_size=5).map(tuple),
    poison=st.booleans(),
    bind=st.booleans(),
    clone=st.integers(0, 7).map(lambda n: n == 7),
    verify=st.integers(0, 7).map(lambda n: n == 7),
    rounds=st.integers(1, 3),
)


@pytest.mark.slow  # quick random programs are in ``tests/autograd``
@pytest.mark.parametrize("part", range(PARTS))
def test_random_training_programs_equal_their_eager_twins(part: int) -> None:
    tally = run_part(part)
    assert tally.share() > LEAST_SHARE, f"only {tally.share():.0%} of the calls were replays"
    kinds = set(REGIONS) - EAGER - (set() if EXECUTES else {"branching"})  # reads are followed where recording executes
    never = [name for name in kinds if tally.calls.get(name, 0) > ENOUGH and not tally.replays[name]]
    assert not never, f"never replayed: {never}"


def run_part(part: int) -> Tally:
    tally = Tally()
    run_programs(programs, lambda program: gradients.run(program, tally), part=part, count=max(EXAMPLES // PARTS, 1))
    return tally
