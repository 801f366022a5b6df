"""Submodules that come again in turn, where what a model does follows from which one is there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from capture import capture, config, recordings
from tests.support.device import DEVICE, REBINDS

CALLS = 40


def _activations() -> list[nn.Module]:
    return [nn.ReLU(), nn.Tanh(), nn.GELU(), nn.GELU("tanh")]


def _nested() -> list[nn.Module]:
    return [nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh()), nn.Sequential(nn.GELU(), nn.Tanh())]


def _of_other_widths() -> list[nn.Module]:
    return [nn.Linear(3, 3, device=DEVICE), nn.Linear(3, 5, device=DEVICE)]


def _containing_themselves() -> list[nn.Module]:
    made: list[Any] = [nn.ReLU(), nn.Tanh()]
    for one in made:
        one.itself = one
    return made


@pytest.mark.one_in(3)
@pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "at random"])
@pytest.mark.parametrize("make", [_activations, _nested, _of_other_widths, _containing_themselves])
def test_each_is_recorded_once(make: Callable[[], list[nn.Module]], in_turn: bool) -> None:
    those, model, draws = make(), nn.Sequential(nn.Identity(), nn.Identity()), random.Random(3)
    captured, x = capture(model), torch.arange(3.0, device=DEVICE)
    with torch.no_grad(), config.patch(cache=False):
        for turn in range(CALLS):
            model[1] = those[turn % len(those)] if in_turn else draws.choice(those)
            assert torch.equal(captured(x), those[[*those].index(model[1])](x)), turn
    counted = recordings(captured)
    assert counted.recordings <= len(those) + 1  # the first one, before what is there told calls apart
    assert counted.replays >= CALLS - 3 * len(those)


def test_those_that_are_alike_have_one_recording() -> None:
    those = [nn.Linear(3, 3, device=DEVICE) for _ in range(3)]
    model = nn.Sequential(nn.Identity(), nn.Identity())
    captured, x = capture(model), torch.arange(3.0, device=DEVICE)
    with torch.no_grad(), config.patch(cache=False):
        for turn in range(CALLS):
            model[1] = those[turn % 3]
            assert torch.equal(captured(x), those[turn % 3](x)), turn
    assert not REBINDS or recordings(captured).recordings == 1


def test_new_ones_in_each_call() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    captured, x = capture(model), torch.arange(3.0, device=DEVICE)
    with torch.no_grad(), config.patch(cache=False, strict=False):
        for turn in range(CALLS):
            model[1] = nn.Tanh() if turn % 2 else nn.ReLU()
            assert torch.equal(captured(x), model[1](x)), turn
    assert recordings(captured).observations < 12
