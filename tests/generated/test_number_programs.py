"""Random programs of numbers equal their eager twins, state included, in every call.

``CAPTURE_FUZZ_EXAMPLES=5000`` runs that many, new ones each time; otherwise the same 300, of which ``make test`` runs
20.
"""

from __future__ import annotations

import copy
import dataclasses
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


@dataclasses.dataclass(eq=False)
class State:
    """What a program keeps, as an argument that is opened."""

    a: float = 0.0
    b: float = 1.5
    n: int = 0
    log: list[Any] = dataclasses.field(default_factory=list)
    d: dict[str, Any] = dataclasses.field(default_factory=dict)


Body = Callable[..., Any]
GLOBAL, ARGUMENT, NEW_ARGUMENT = "global", "argument", "another argument in each call"


def made(text: str, kept: str) -> tuple[Body, Any]:
    """A program, and its state."""
    state: Any = types.SimpleNamespace(**vars(State())) if kept == GLOBAL else State()
    scope = {"torch": torch, "math": math, "__name__": "program"} | ({"S": state} if kept == GLOBAL else {})
    source = text if kept == GLOBAL else text.replace("def body(x):", "def body(x, S):")
    exec(source, scope)  # noqa: S102 - what this test writes itself
    return scope["body"], state  # type: ignore[return-value]


def inputs(seed: int) -> list[torch.Tensor]:
    """For half of the programs numbers that are new in each call, for the others a few that come again."""
    makes = [torch.Generator().manual_seed(seed * 100 + number) for number in range(CALLS)]
    if seed % 2:
        drawn = [torch.randn(4, generator=make, device="cpu") for make in makes]
    else:
        drawn = [torch.randint(-2, 3, (4,), generator=make, device="cpu") / 2 for make in makes]
    return [one.to(DEVICE) for one in drawn]


def outcome(body: Body, x: torch.Tensor, state: Any) -> Any:
    """The result or the error of a call, and the state after it."""
    try:
        result = bits(body(x.clone()) if type(state) is types.SimpleNamespace else body(x.clone(), state))
    except (ArithmeticError, ValueError, TypeError) as error:
        result = type(error), str(error)
    return result, bits(vars(state))


def equals_eager(seed: int, kept: str = GLOBAL) -> int:
    """Check one program. Gives how many calls were replays."""
    text = Writer(seed).text()
    (plain, theirs), (body, ours) = made(text, kept), made(text, kept)
    captured = capture(body)
    for number, x in enumerate(inputs(seed)):
        if kept == NEW_ARGUMENT:
            theirs, ours = copy.copy(theirs), copy.copy(ours)
        expected = outcome(plain, x, theirs)
        assert outcome(captured, x, ours) == expected, f"seed {seed}, call {number}\n{text}"
    return recordings(captured).replays


@pytest.mark.parametrize("part", [0, *[pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS)]])
@pytest.mark.parametrize("kept", [GLOBAL, pytest.param(ARGUMENT, marks=pytest.mark.slow), NEW_ARGUMENT])
def test_programs_of_numbers_equal_eager(kept: str, part: int) -> None:
    first = random.SystemRandom().randrange(2**30) if FUZZING else 0
    share = EXAMPLES // PARTS
    with warnings.catch_warnings(), config.patch(drop_slow=False):
        warnings.simplefilter("ignore", CaptureWarning)
        replays = [equals_eager(first + part * share + number, kept) for number in range(share)]
    assert sum(map(bool, replays)) >= share / 10, "too few programs replay for this to tell anything"
