"""Outputs that are held in every way that Python has: each program equals its eager twin, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config
from capture.tree import thread_trees
from tests.support.device import DEVICE, know_nothing_of_writes
from tests.support.held_gradients import WITH_GRADIENTS
from tests.support.held_programs import NO_GRAD, Said
from tests.support.rows import bits

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
Program = Callable[[Any, Said], None]
WAYS = ["tape", "graph, poisoned"] if DEVICE.type == "cpu" else ["plain", "poisoned"]


@pytest.fixture(autouse=True, params=WAYS)
def fresh(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if "graph" in request.param:
        know_nothing_of_writes(monkeypatch)
    thread_trees.forget_trees()
    with config.patch(cache=False, poison="poisoned" in request.param):
        yield


def said_by(program: Program, cap: Any, *, grad: bool) -> Said:
    said = Said()
    with contextlib.nullcontext() if grad else torch.no_grad():
        program(cap, said)
    return said


def equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        form = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in (mine, theirs)]
        return form[0] == form[1] and torch.equal(bits(mine.detach()), bits(theirs.detach()))
    return type(mine) is type(theirs) and bool(mine == theirs)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("program", [*NO_GRAD, *WITH_GRADIENTS], ids=lambda program: program.__name__)
def test_what_is_held_is_as_eagers(program: Program) -> None:
    grad = program in WITH_GRADIENTS
    theirs, mine = (said_by(program, cap, grad=grad) for cap in (lambda body, **_: body, capture))
    for kind in ("now", "held"):
        ours, eager = getattr(mine, kind), getattr(theirs, kind)
        assert len(ours) == len(eager)
        wrong = [at for at, (got, expected) in enumerate(zip(ours, eager, strict=True)) if not equal(got, expected)]
        assert not wrong, f"{kind}: {[(at, ours[at], eager[at]) for at in wrong[:3]]}, {len(wrong)} of {len(ours)}"
