"""Modules with an optimizer that are trained eagerly and captured with ``gradients="accumulate"``, and compared."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from capture import CaptureWarning, capture, mark_step_begin, recordings
from tests.support.device import DEVICE
from tests.support.regions import bits

STEPS = 8


class World:
    """Modules, captured one by one or not, and an optimizer over all."""

    def __init__(self, modules: nn.ModuleList, *, captured: bool) -> None:
        self.modules, self.captured = modules, captured
        self.optimizer = torch.optim.SGD(modules.parameters(), lr=0.05, momentum=0.9)
        self.kept: list[Any] = []
        self.watched: list[weakref.ref[Tensor]] = []
        if captured:
            for module in modules:
                capture(module, gradients="accumulate")

    def run(self, x: Tensor) -> Tensor:
        """The input through all modules, one after the other."""
        for module in self.modules:
            x = module(x)
        return x

    def state(self) -> list[Any]:
        """Parameters, their gradients with strides, and the buffers of the optimizer."""
        found: list[Any] = []
        for one in self.modules.parameters():
            grad = one.grad
            found += [bits(one), bits(grad), None if grad is None else grad.stride()]
        found += [bits(value["momentum_buffer"]) for value in self.optimizer.state.values()]
        return found + [bits(one) if isinstance(one, Tensor) else one for one in self.kept]


Act = Callable[[World, int], object]


def data(step: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(step)
    return torch.randn(shape or (2, 3, 6), generator=generator, device="cpu").to(DEVICE)


def compare(make: Callable[[], nn.ModuleList], act: Act, steps: int = STEPS, *, marks: bool = True) -> World:
    """Do the same steps eagerly and captured, and compare; gives the captured world. ``marks``: the user marks where
    steps begin."""
    torch.manual_seed(0)
    modules = make().to(DEVICE)
    eager, ours = World(copy.deepcopy(modules), captured=False), World(modules, captured=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for step in range(steps):
            for world in (eager, ours):
                torch.manual_seed(step)
                if marks:
                    mark_step_begin()
                act(world, step)
            assert ours.state() == eager.state(), f"step {step}"
    return ours


def replays(world: World) -> int:
    return sum(recordings(module).replays for module in world.modules)
