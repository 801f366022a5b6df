"""Numbers of objects that a call is given and that are told by identity, such as a trainer with its count of steps: as
those of ``self`` they are inputs of the call, or answer what the body asks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, config, recordings
from capture.tree import thread_trees
from tests.support.device import EXECUTES
from tests.support.training_twins import CALLS, both, data, net

Body = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    thread_trees.forget_trees()
    with warnings.catch_warnings(), config.patch(drop_slow=False, cache=False), torch.enable_grad():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


class Inner:
    def __init__(self) -> None:
        self.count, self.rate = 0, 0.5


class Trainer:
    """What holds a module is told by identity."""

    def __init__(self) -> None:
        self.model: nn.Module = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.step, self.rate, self.loss, self.saved, self.best = 0, 0.5, 0.0, 0, math.inf
        self.h = torch.zeros(8, 4)
        self.inner = Inner()

    def state(self) -> Any:
        own = [self.step, self.rate, self.loss, self.saved, self.best, self.h, vars(self.inner)]
        return [*own, list(self.model.parameters())]


class Slots:
    __slots__ = ("model", "rate", "step")

    def __init__(self) -> None:
        self.model: nn.Module = net()
        self.step, self.rate = 0, 0.5

    def state(self) -> Any:
        return [self.step, self.rate]


def fit(s: Trainer, x: Tensor) -> Tensor:
    loss: Tensor = (s.model(x) - x.sum(1, keepdim=True)).square().mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


def used(s: Any, x: Tensor) -> Any:
    s.step += 1
    return x * s.step


def decayed(s: Any, x: Tensor) -> Any:
    s.rate *= 0.99
    return x * s.rate


def asked(s: Any, x: Tensor) -> Tensor:
    s.step += 1
    return x * 3 if s.step % 4 == 0 else x * 2


def in_an_object_of_its_own(s: Any, x: Tensor) -> Any:
    s.inner.count += 1
    s.inner.rate = 0.9 * s.inner.rate + 0.01
    return x * s.inner.rate + s.inner.count


def returned(s: Trainer, x: Tensor) -> dict[str, Any]:
    loss = fit(s, x)
    s.step += 1
    s.loss = loss.item()
    return {"loss": loss.item(), "step": s.step}


def warmed_up(s: Trainer, x: Tensor) -> Tensor:
    for group in s.optimizer.param_groups:
        group["lr"] = 0.01 * (s.step + 1) / 100
    s.step += 1
    return fit(s, x).detach()


def saved_at_times(s: Trainer, x: Tensor) -> Tensor:
    loss = fit(s, x)
    s.step += 1
    if s.step % 10 == 0:
        s.saved += 1
    return loss.detach()


def as_an_index(s: Any, x: Tensor) -> Any:
    s.step = (s.step + 1) % 4
    return x[:, s.step] * 2


def printed(s: Any, x: Tensor) -> Any:
    s.step += 1
    return x * 2, f"{s.step}"


BODIES: list[Body] = [
    used, decayed, asked, in_an_object_of_its_own, returned, warmed_up, saved_at_times, as_an_index, printed,
]  # fmt: skip
REPLAYED = (used, decayed, asked, in_an_object_of_its_own, returned, saved_at_times, as_an_index)


def of_a_new_class() -> Trainer:
    """A class is opened once some of its objects have come and gone."""
    made: Trainer = type("Trainer", (Trainer,), {})()
    return made


def program(body: Body, make: Callable[[], Any] = of_a_new_class, between: Any = None) -> Callable[[Any], Any]:
    def of(wrap: Callable[[Any], Any]) -> Any:
        trainer, function = make(), wrap(body)

        def run(number: int) -> Any:
            if between is not None:
                between(trainer, number)
            return function(trainer, data(number))

        return run, trainer.state

    return of


def counted(body: Body, *args: Any) -> Any:
    return recordings(both(program(body, *args), lambda number: (number,)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_an_object_that_is_given(body: Body) -> None:
    counters = counted(body)
    if EXECUTES and body in REPLAYED:
        assert counters.replays > CALLS // 2, counters


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", [used, decayed, asked], ids=lambda body: body.__name__)
def test_it_takes_no_weak_reference(body: Body) -> None:
    counted(body, Slots)


def _set(s: Any, number: int) -> None:
    if number in (12, 25):
        s.step, s.rate = 7, 0.125
        s.inner.count, s.inner.rate = 3, 2.0
    if number == 30:
        s.step, s.inner = 3.5, Inner()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", BODIES[:-2], ids=lambda body: body.__name__)
def test_others_set_it_between_calls(body: Body) -> None:
    counted(body, of_a_new_class, _set)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("every", [1, 12], ids=["in turn", "one after the other"])
def test_several_objects(body: Body, every: int) -> None:
    """Each has numbers of its own. One that is gone is no other's."""

    def of(wrap: Callable[[Any], Any]) -> Any:
        kind = type(of_a_new_class())
        trainers, function = [kind(), kind()], wrap(body)

        def run(number: int) -> Any:
            if number % (2 * every) == 0 and number > CALLS // 2:
                trainers[0] = kind()
                trainers[0].step, trainers[0].rate = 5, 0.75
            return function(trainers[number // every % 2], data(number))

        return run, lambda: [one.state() for one in trainers]

    both(of, lambda number: (number,))
