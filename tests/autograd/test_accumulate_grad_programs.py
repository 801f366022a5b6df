"""``gradients="accumulate"``: random programs against an eager twin."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import Tensor, nn

from capture import AnnotationError, capture, config, mark_step_begin
from tests.generated.runner import quickly
from tests.support.accumulating import World, compare, data, replays
from tests.support.regions import Block
from tests.support.regions import fresh as fresh


class Player:
    """Does random actions. Each pass uses a module once, as the sum of several gradients has no fixed order."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random = world, random.Random(seed)
        self.pending: list[tuple[Tensor, Tensor]] = []

    def forward(self, number: int) -> None:
        x = data(number).requires_grad_(self.random.random() < 0.5)
        y = x * 1 if self.random.random() < 0.3 else x
        for module in self.random.sample(list(self.world.modules), self.random.randint(1, 3)):
            y = module(y)
        self.pending.append((y.square().mean(), x))

    def backward(self, number: int) -> None:
        if not self.pending:
            return
        index, retain = self.random.randrange(len(self.pending)), self.random.random() < 0.3
        loss, x = self.pending[index] if retain else self.pending.pop(index)
        loss.backward(retain_graph=retain)
        self.world.kept.append(loss.detach().clone())
        self.world.kept += [] if x.grad is None else [x.grad.clone()]

    def zero(self, number: int) -> None:
        self.world.modules.zero_grad(set_to_none=self.random.random() < 0.6)

    def step(self, number: int) -> None:
        self.pending.clear()  # eager's passes would stop half way, at another place
        self.world.optimizer.step()

    def keep(self, number: int) -> None:
        found = [one.grad for one in self.world.modules.parameters() if one.grad is not None]
        if found:
            self.world.kept.append(self.random.choice(found))
            self.world.modules.zero_grad()

    def replace(self, number: int) -> None:
        found = [one for one in self.world.modules.parameters() if one.grad is not None]
        if found:
            one = self.random.choice(found)
            one.grad = None if one.grad is None or self.random.random() < 0.5 else one.grad * 2

    def hook(self, number: int) -> None:
        one = self.random.choice(list(self.world.modules.parameters()))
        handle = one.register_hook(lambda grad: grad * 0.5)
        self.forward(number)
        self.backward(number)
        handle.remove()

    def evaluate(self, number: int) -> None:
        with torch.no_grad():
            self.world.kept.append(self.random.choice(list(self.world.modules))(data(number)))


LONG = 50
ACTIONS = ("forward", "forward", "backward", "backward", "zero", "step", "keep", "replace", "hook", "evaluate")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("poison", [False, True], ids=["plain", "poisoned"])
@pytest.mark.parametrize("seed", quickly((25, *range(25), *range(26, 30)), 1))
def test_random_programs(seed: int, poison: bool) -> None:
    players: dict[int, Player] = {}
    chooser = random.Random(seed)
    script = [("forward", True), ("backward", False), ("zero", False)] * 8  # so that something is recorded
    script += [(chooser.choice(ACTIONS), chooser.random() < 0.2) for _ in range(LONG)]

    def act(world: World, step: int) -> None:
        player = players.setdefault(id(world), Player(world, seed))
        name, marks = script[step]
        if marks:
            mark_step_begin()
        getattr(player, name)(step)

    with config.patch(poison=poison):
        ours = compare(lambda: nn.ModuleList([Block(), Block(drop=0.1), Block()]), act, steps=len(script), marks=False)
    assert replays(ours)
    del ours, act
    players.clear()
    gc.collect()  # recordings that end as garbage raise nothing


def test_unknown_choice() -> None:
    with pytest.raises(AnnotationError, match="'autograd', 'accumulate'"):
        capture(nn.Linear(2, 2), gradients="accumulated")  # type: ignore[call-overload]
