"""A captured function that its own body leads to, as a trainer that keeps its step, goes with the rest of the cycle."""

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


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("calls", [0, 4])
@pytest.mark.parametrize("make", [by_closure, by_default, by_receiver, by_class, by_module])
def test_a_function_that_is_not_recorded_goes_with_its_cycle(
    make: Callable[[Trainer], Callable[[Tensor], Tensor]], calls: int
) -> None:
    """What ends its state, once it is gone, is no reason to stay."""
    trainer = Trainer()
    trainer.step = make(trainer)
    for _ in range(calls):
        trainer.step(torch.ones(3))
    gone = weakref.ref(trainer)
    del trainer
    other = capture(lambda x: x + 1)
    for _ in range(3):  # a tree keeps the function that was called last
        other(torch.ones(3))
    gc.collect()
    assert gone() is None
