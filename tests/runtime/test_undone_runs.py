"""Runs that are undone leave nothing behind, whatever goes wrong in them, and what was replayed is not run again."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capture import CaptureError, capture, config, explain, recordings, warmup
from capture.api import inspect
from capture.observe.dispatch_mode import ObserveMode
from capture.runtime import lifted_call, planning
from tests.support.decorated import bits
from tests.support.decorated import fresh as fresh
from tests.support.device import LIFTS, rng_state

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


class World:
    """The state that a body changes: memory, an attribute, a list, a generator."""

    def __init__(self) -> None:
        self.total, self.last, self.log = torch.zeros(4), torch.zeros(4), [0]

    def body(self, x: Tensor, number: float) -> Tensor:
        self.total.add_(x, alpha=number)
        self.last = self.total * number
        self.log.append(len(self.log))
        return self.total.mul_(2) + torch.rand(4)

    def state(self) -> Any:
        return bits(self.total), bits(self.last), self.log, rng_state().tolist()[:64]


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception, *, after: bool) -> list[int]:
    """The function raises, once it is called for the first time; before it does its work, or after it."""
    plain, calls = getattr(owner, name), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > 1:
            return plain(*args, **kwargs)
        if after:
            plain(*args, **kwargs)
        raise error

    monkeypatch.setattr(owner, name, failing)
    return calls


FAULTS = {
    "describing": (planning, "describe", True),
    "an input": (ObserveMode, "_see_input", False),
    "a write": (ObserveMode, "_see_writes", True),
    "an output": (ObserveMode, "_see_output", False),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("error", [RuntimeError("ours"), KeyboardInterrupt()], ids=["ours", "interrupt"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_warmup_that_goes_wrong_changes_nothing(name: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    world, x = World(), torch.ones(4)
    f, before = capture(world.body), world.state()
    owner, function, after = FAULTS[name]
    calls = fails_once(monkeypatch, owner, function, error, after=after)
    with pytest.raises(type(error)):
        warmup(f)(x, 2.0)
    assert calls[0]
    assert world.state() == before


@pytest.mark.parametrize("name", FAULTS)
def test_an_explanation_that_goes_wrong_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, x = World(), torch.ones(4)
    before = world.state()
    owner, function, after = FAULTS[name]
    calls = fails_once(
        monkeypatch, inspect if owner is planning else owner, function, RuntimeError("ours"), after=after
    )
    with contextlib.suppress(RuntimeError):
        explain(world.body)(x, 2.0)
    assert calls[0]
    assert world.state() == before


def added(total: Tensor) -> Callable[[Tensor, float], Tensor]:
    def body(x: Tensor, number: float) -> Tensor:
        total.add_(torch.relu(x), alpha=number)
        return total * number

    return body


@pytest.mark.parametrize("name", FAULTS)
def test_a_trial_with_another_number_that_goes_wrong_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call tries whether one recording may serve both numbers: what that run did is undone."""
    total, expected, x = torch.zeros(4), torch.zeros(4), torch.arange(4.0)
    f, eager = capture(added(total)), added(expected)
    owner, function, after = FAULTS[name]
    with config.patch(strict=False):
        for number in (0.3, 0.7, 1.1, 1.7):
            with monkeypatch.context() as patch:
                calls = [1] if number == 0.3 else fails_once(patch, owner, function, TypeError("ours"), after=after)
                assert bits(f(x, number)) == bits(eager(x, number)), number
            assert bits(total) == bits(expected), (number, calls)


def test_a_replay_with_its_number_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``TypeError`` says that a value cannot be in a key only where the key is made."""
    total, expected, x = torch.zeros(4), torch.zeros(4), torch.arange(4.0)
    f, eager = capture(added(total)), added(expected)
    for number in (0.3, 0.7, 1.1):
        assert bits(f(x, number)) == bits(eager(x, number))
    assert bool(recordings(f).replays) == LIFTS
    with config.patch(strict=False):
        for name in ("_compare_numbers", "replay_whole"):
            with monkeypatch.context() as patch:
                fails_once(patch, lifted_call, name, TypeError("ours"), after=True)
                for number in (1.3, 1.9, 2.3):
                    f(x, number)
                    eager(x, number)
                    assert bits(total) == bits(expected), (name, number)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: np.random.randint(9)])
def test_what_was_drawn_from_the_hosts_generators_is_not_drawn(draw: Callable[[], float]) -> None:
    def body(x: Tensor) -> Tensor:
        return x * draw()

    def drawn() -> tuple[float, float]:
        state = random.getstate(), np.random.get_state()
        numbers = random.random(), float(np.random.rand())
        random.setstate(state[0])
        np.random.set_state(state[1])
        return numbers

    before = drawn()
    with pytest.raises(CaptureError, match="CG202"):
        capture(body, fallback="error")(torch.ones(2))
    assert drawn() == before


def test_a_way_chosen_by_a_draw() -> None:
    """Of a policy: each number is tried in runs that are undone."""
    net = nn.Linear(4, 3)

    def act(observed: Any, share: float) -> int:
        if np.random.rand() < share:
            return int(np.random.randint(3))
        return int(net(torch.as_tensor(observed, dtype=torch.float32).unsqueeze(0)).argmax().item())

    def rounds(run: Any) -> list[float]:
        made = list[float]()
        for number in range(40):
            np.random.seed(number)
            made += [run(np.random.randn(4), max(0.1, 1 - number / 50)) for _ in range(2)]
            made.append(float(np.random.rand()))
        return made

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert rounds(capture(act)) == rounds(act)
