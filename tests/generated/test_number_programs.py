"""Random programs of numbers equal their eager twins, state included, in every call.

``CAPTURE_FUZZ_EXAMPLES=5000`` runs that many, new ones each time; otherwise the same 300, of which ``make test`` runs
20.
"""

from __future__ import annotations

import math
import os
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture import CaptureWarning, capture, config, recordings
from tests.generated.number_programs import Writer
from tests.generated.runner import FUZZING
from tests.support.device import DEVICE
from tests.support.observed import bits
from tests.support.observed import fresh as fresh

EXAMPLES = int(os.environ.get("CAPTURE_FUZZ_EXAMPLES", "300"))
PARTS, CALLS = 15, 22


def made(text: str) -> tuple[Callable[[torch.Tensor], Any], types.SimpleNamespace]:
    """A program with state of its own."""
    state = types.SimpleNamespace(a=0.0, b=1.5, n=0, log=[], d={})
    scope = {"torch": torch, "math": math, "S": state, "__name__": "program"}
    exec(text, scope)  # noqa: S102 - what this test writes itself
    body: Any = scope["body"]
    return body, state


def inputs(seed: int) -> list[torch.Tensor]:
    """For half of the programs numbers that are new in each call, for the others a few that come again."""
    makes = [torch.Generator().manual_seed(seed * 100 + number) for number in range(CALLS)]
    if seed % 2:
        drawn = [torch.randn(4, generator=make, device="cpu") for make in makes]
    else:
        drawn = [torch.randint(-2, 3, (4,), generator=make, device="cpu") / 2 for make in makes]
    return [one.to(DEVICE) for one in drawn]


def outcome(body: Callable[[torch.Tensor], Any], x: torch.Tensor, state: types.SimpleNamespace) -> Any:
    """The result or the error of a call, and the state after it."""
    try:
        result = bits(body(x.clone()))
    except (ArithmeticError, ValueError, TypeError) as error:
        result = type(error), str(error)
    return result, bits(vars(state))


def equals_eager(seed: int) -> int:
    """Check one program. Gives how many calls were replays."""
    text = Writer(seed).text()
    (plain, theirs), (body, ours) = made(text), made(text)
    captured = capture(body)
    for number, x in enumerate(inputs(seed)):
        expected = outcome(plain, x, theirs)
        assert outcome(captured, x, ours) == expected, f"seed {seed}, call {number}\n{text}"
    return recordings(captured).replays


@pytest.mark.parametrize("part", [0, *[pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS)]])
def test_programs_of_numbers_equal_eager(part: int) -> None:
    first = random.SystemRandom().randrange(2**30) if FUZZING else 0
    share = EXAMPLES // PARTS
    with warnings.catch_warnings(), config.patch(drop_slow=False):
        warnings.simplefilter("ignore", CaptureWarning)
        replays = [equals_eager(first + part * share + number) for number in range(share)]
    assert sum(map(bool, replays)) >= share / 10, "too few programs replay for this to tell anything"
