"""A captured function that its own body refers to (a trainer keeps its step) is collected with the whole cycle."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config
from capture.tree import thread_trees


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference, no plans on disk, no tree of another test."""
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False):
        yield


class Trainer:
    """Keeps the function whose body leads back to it."""

    step: Callable[[Tensor], Tensor]

    def draw(self, x: Tensor) -> Tensor:
        return x * random.random()


def by_closure(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        return trainer.draw(x)

    return capture(body)


def by_default(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor, trainer: Trainer = trainer) -> Tensor:
        return trainer.draw(x)

    return capture(body)


def by_receiver(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    return capture(trainer.draw)


def by_class(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    class Other:
        @capture
        def draw(self, x: Tensor) -> Tensor:
            return trainer.draw(x)

    return Other().draw


def by_module(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    class Net(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return trainer.draw(x)

    net: Any = capture(Net())
    made: Callable[[Tensor], Tensor] = net
    return made


MAKES = [by_closure, by_default, by_receiver, by_class, by_module]


class Plain(Trainer):
    """Its body can be recorded."""

    scale = 2.0

    @override
    def draw(self, x: Tensor) -> Tensor:
        return x * self.scale


def made(
    kind: type[Trainer], make: Callable[[Trainer], Callable[[Tensor], Tensor]], calls: int
) -> tuple[weakref.ref[Trainer], Tensor | None]:
    """A weak reference to a trainer that nobody holds any more, and its last result."""
    trainer, last = kind(), None
    trainer.step = make(trainer)
    for number in range(calls):
        last = trainer.step(torch.full((3,), float(number)))
    return weakref.ref(trainer), last


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("calls", [0, 1, 4])
@pytest.mark.parametrize("make", MAKES)
def test_a_function_that_is_not_recorded_goes_with_its_cycle(
    make: Callable[[Trainer], Callable[[Tensor], Tensor]], calls: int
) -> None:
    """What is to run at its end does not keep it alive."""
    gone, _ = made(Trainer, make, calls)
    gc.collect()
    assert gone() is None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("calls", [1, 2, 3, 6])
@pytest.mark.parametrize("make", [by_closure, by_receiver, by_class, by_module])
def test_a_recorded_function_goes_with_its_cycle(
    make: Callable[[Trainer], Callable[[Tensor], Tensor]], calls: int
) -> None:
    """The tree, which had its recording, holds nothing that the function refers to. Results keep their values."""
    gone, last = made(Plain, make, calls)
    gc.collect()
    assert gone() is None
    [tree] = thread_trees.in_use().trees.values()
    assert not tree.recordings()
    shifted = capture(lambda x: x + 1)
    for _ in range(4):
        assert torch.equal(shifted(torch.ones(3)), torch.full((3,), 2.0))
    assert last is not None
    assert last.tolist() == [2.0 * (calls - 1)] * 3


class Loop:
    """A trainer that keeps its own captured methods."""

    def __init__(self) -> None:
        self.net = nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.run = capture(self.whole)
        self.forward = capture(self.part)

    def part(self, x: Tensor) -> Tensor:
        total: Tensor = self.net(x).sum()
        return total

    def whole(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.net(x).sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("kind", ["run", "forward"])
def test_a_trainer_goes_with_its_step(kind: str) -> None:
    def run() -> list[weakref.ref[Any]]:
        loop = Loop()
        for _ in range(5):
            result = getattr(loop, kind)(torch.ones(1, 3))
            if kind == "forward":
                result.backward()
        return [weakref.ref(loop), weakref.ref(loop.net), weakref.ref(loop.net.weight)]

    with torch.enable_grad():
        references = run()
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_what_one_function_gave_another_one_goes_with_both() -> None:
    """Both are dropped in one collection, one recording below the other."""

    def run() -> tuple[weakref.ref[Any], Tensor]:
        first, second = Plain(), Plain()
        first.step, second.step = by_closure(first), by_receiver(second)
        for _ in range(5):
            between = first.step(torch.ones(3))
            last = second.step(between)
        return weakref.ref(second), last

    gone, last = run()
    kept = capture(lambda x: x * 3)
    below = [kept(last) for _ in range(5)]
    gc.collect()
    assert gone() is None
    assert [result.tolist() for result in below] == [[12.0] * 3] * 5
    assert last.tolist() == [4.0] * 3
