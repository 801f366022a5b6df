"""Random programs over Python state equal their eager twins, bit for bit, after every action.

``CAPTURE_FUZZ_EXAMPLES=20000`` runs that many programs, new ones each time; otherwise the same 1,000.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.generated.python_machine import Program, run, unguarded
from tests.generated.runner import FUZZING, quickly

PARTS = 40
EXAMPLES = int(os.environ.get("CAPTURE_FUZZ_EXAMPLES", "1000"))


def drawn(rng: random.Random) -> Program:
    """Every number of the program is as likely as any other."""
    return Program(
        kinds=tuple([rng.randrange(10_000) for _ in range(rng.randint(1, 3))]),
        reader=rng.randrange(4),
        called=rng.randrange(3),
        steps=((0, 0, 0), *[(rng.randrange(10), rng.randrange(3), rng.randrange(8)) for _ in range(rng.randint(3, 9))]),
    )


@pytest.mark.parametrize("part", quickly(range(PARTS), 1))
def test_programs_over_python_state_equal_their_eager_twins(part: int) -> None:
    rng = random.Random(random.randrange(2**32) if FUZZING else part)
    calls = replays = 0
    for _ in range(max(EXAMPLES // PARTS, 1)):
        more = run(drawn(rng))
        calls, replays = calls + more[0], replays + more[1]
    assert replays > 0.1 * calls


FOUND = {
    "what guards expect is a weak proxy of what is gone": Program(
        kinds=(8704,), reader=1, called=2,
        steps=((0, 0, 0), (0, 1, 2), (0, 1, 0), (4, 2, 7), (6, 2, 5), (6, 1, 1), (9, 1, 1), (5, 1, 4), (4, 1, 7)),
    ),
    "a key has a weak proxy of what is gone": Program(
        kinds=(448, 7878, 2668), reader=0, called=0,
        steps=((0, 0, 0), (2, 2, 2), (7, 0, 5), (7, 1, 2), (9, 2, 0), (9, 0, 2), (2, 2, 3), (7, 2, 2)),
    ),
    "a fast path is made for a weak proxy of what is gone": Program(
        kinds=(64, 8180), reader=2, called=2, steps=((0, 0, 0), (7, 0, 5), (9, 0, 5), (2, 2, 2), (7, 1, 6), (8, 2, 1)),
    ),
    "an object is expected that is a weak proxy of what is gone": Program(
        kinds=(64, 3595), reader=0, called=0,
        steps=((0, 0, 0), (8, 0, 5), (2, 0, 3), (4, 1, 5), (2, 0, 7), (9, 0, 6), (2, 1, 3), (9, 0, 0), (7, 0, 5)),
    ),
    "an attribute comes after one was told apart": Program(
        kinds=(3103, 8584), reader=3, called=2,
        steps=((0, 0, 0), (6, 1, 2), (6, 2, 4), (9, 1, 5), (0, 1, 3), (6, 0, 7), (2, 0, 1), (6, 2, 2), (3, 1, 4)),
    ),
    "a module's flag is deleted": Program(
        kinds=(6707,), reader=3, called=1,
        steps=((0, 0, 0), (9, 0, 1), (8, 1, 2), (3, 2, 4), (9, 0, 3), (2, 1, 7), (7, 2, 0), (2, 2, 7), (4, 0, 7)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_were_wrong_once(name: str) -> None:
    run(FOUND[name])


@pytest.mark.slow  # twelve seconds for four programs; bodies of libraries are traced in each run (test_library_bodies)
@pytest.mark.parametrize("part", range(4))
def test_random_programs_over_state_have_no_read_without_a_guard(part: int) -> None:
    """What bodies of some programs read is traced, instruction by instruction."""
    rng = random.Random(part)
    for _ in range(4):
        assert not unguarded(drawn(rng))
