"""Random programs whose results end as garbage: the collector frees memory of the pool in the middle of anything."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import evolve

from capture.runtime import record
from tests.generated import machine
from tests.generated.machine import Tally, run
from tests.generated.runner import FUZZING, quickly
from tests.generated.test_machine import EXAMPLES, drawn
from tests.generated.worlds import World
from tests.support.device import know_nothing_of_writes
from tests.support.garbage import what_is_new

PARTS = 16
OFTEN = 50  # objects made between two collections


class _Cycle:
    def __init__(self, held: Any) -> None:
        self.me, self.held = self, held


@pytest.fixture
def _collects_often() -> Iterator[None]:
    before = gc.get_threshold()
    with what_is_new():
        gc.set_threshold(OFTEN, 3, 10**6)
        try:
            yield
        finally:
            gc.set_threshold(*before)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("_collects_often")
@pytest.mark.parametrize("knows", [False, True])
@pytest.mark.parametrize("part", quickly(range(PARTS), 1))
def test_results_that_end_as_garbage_change_nothing(part: int, knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``knows``: the engine knows what its recordings write, as tapes do, and not as graphs."""
    # else small outputs would get memory of their own and not keep the pool's
    monkeypatch.setattr(record, "MOST_OWNED", 0)
    if not knows:
        know_nothing_of_writes(monkeypatch)
    rng = random.Random(random.randrange(2**32) if FUZZING else part)
    outcome = machine._outcome

    def leaves_garbage(world: World, *rest: Any) -> str | None:
        found = outcome(world, *rest)
        if rng.random() < 0.6:
            _Cycle(list(world.scratch))
        return found

    monkeypatch.setattr(machine, "_outcome", leaves_garbage)
    tally = Tally()
    for number in range(max(EXAMPLES // 4 // PARTS, 1)):
        program = drawn(rng)
        run(evolve(program, poison=True, rounds=program.rounds + 1) if number % 4 else program, tally)
        if not number % 20:
            gc.collect()
    assert tally.recordings
    assert tally.kept_outputs
