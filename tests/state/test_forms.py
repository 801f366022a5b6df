"""Bodies that give tensors other memory, sizes or strides by ``.data =``, of which no operator tells: in undone runs,
too, the caller's tensors are what eager leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.support.writes import bits

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


class Trainer:
    """A network and its target, and loose tensors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net, self.target = nn.Linear(3, 3), nn.Linear(3, 3)
        self.steps, self.square, self.numbers = 0, torch.randn(3, 3), torch.arange(6.0)
        self.complex = torch.randn(3, dtype=torch.complex64)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def state(self) -> Any:
        tensors = [*self.net.parameters(), *self.target.parameters(), self.square, self.numbers, self.complex]
        forms = [(one.stride(), one.storage_offset(), one.dtype, one.is_conj()) for one in tensors]
        return [bits(one) for one in tensors], forms, self.steps

    def every_third(self, x: Tensor, rate: float) -> Tensor:
        """A soft update that replaces ``data``, as many trainers have it."""
        self.steps += 1
        loss = (self.net(x) - self.target(x)).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.steps % 3 == 0:
            for mine, theirs in zip(self.target.parameters(), self.net.parameters(), strict=True):
                mine.data = (1 - rate) * mine.data + rate * theirs.data
        return torch.Tensor.detach(loss)

    def written_and_moved(self, x: Tensor, rate: float) -> Tensor:
        """Written before and after it lies on other memory, which is another tensor's once."""
        self.steps += 1
        with torch.no_grad():
            self.target.weight.mul_(0.9)
            if self.steps % 2 == 0:
                self.target.weight.data = self.square
                self.target.weight.add_(rate)
                self.target.weight.data = self.target.weight.data * 0.5
        return torch.Tensor.detach(self.target(x))

    def transposed(self, x: Tensor, rate: float) -> Tensor:
        found = x @ self.square
        self.square.data = self.square.data.t()
        return found * rate

    def transposed_at_times(self, x: Tensor, rate: float) -> Tensor:
        self.steps += 1
        found = x @ self.square
        if self.steps % 3 == 0:
            self.square.data = self.square.data.t()
        return found * rate

    def shortened(self, x: Tensor, rate: float) -> Tensor:
        found = x[:, :2] + self.numbers[:2] * rate
        self.numbers.data = self.numbers.data[1:] if len(self.numbers) > 2 else torch.arange(6.0)
        return found

    def conjugated(self, x: Tensor, rate: float) -> Tensor:
        self.steps += 1
        found = (self.complex * rate).imag.clone()
        if self.steps % 3 == 0:
            self.complex.data = self.complex.data.conj()
        return found + x.sum()

    def of_another_dtype(self, x: Tensor, rate: float) -> Tensor:
        self.steps += 1
        found = (x.double() @ self.square.double()) * rate
        if self.steps % 3 == 0:
            self.square.data = self.square.to(torch.float64 if self.square.dtype == torch.float32 else torch.float32)
        return found

    def if_it_is_large(self, x: Tensor, rate: float) -> Tensor:
        found = (x @ self.square).sum() * rate
        if found.item() > 0:
            self.square.data = self.square.data.t()
        return found * 2


BODIES: list[Callable[[Trainer, Tensor, float], Tensor]] = [
    Trainer.every_third, Trainer.written_and_moved, Trainer.transposed, Trainer.transposed_at_times, Trainer.shortened,
    Trainer.conjugated, Trainer.of_another_dtype, Trainer.if_it_is_large,
]  # fmt: skip


@pytest.mark.parametrize("varies", [False, True], ids=["one rate", "a rate that changes"])
@pytest.mark.parametrize("body", BODIES, ids=[body.__name__ for body in BODIES])
def test_tensors_get_another_form_as_in_eager(body: Callable[[Trainer, Tensor, float], Tensor], varies: bool) -> None:
    eager, ours = Trainer(), Trainer()
    captured = capture(body.__get__(ours))
    for i in range(14):
        x, rate = torch.randn(2, 3), 0.25 + 0.03 * i * varies
        assert bits(captured(x.clone(), rate)) == bits(body(eager, x, rate))
        assert ours.state() == eager.state()


def test_a_form_that_is_put_back_keeps_the_node_of_its_leaf() -> None:
    """Somebody may hold a hook on it."""
    eager, seen = Trainer(), list[int]()
    ours = copy.deepcopy(eager)
    for number, trainer in enumerate((eager, ours)):
        trainer.target.weight.register_post_accumulate_grad_hook(lambda _, number=number: seen.append(number))
    captured = capture(ours.every_third)
    for i in range(9):
        x = torch.randn(2, 3)
        assert bits(captured(x, 0.25 + 0.03 * i)) == bits(eager.every_third(x, 0.25 + 0.03 * i))
        for trainer in (eager, ours):
            trainer.target(x).sum().backward()
    assert seen.count(0) == seen.count(1)
    assert ours.state() == eager.state()
    assert recordings(captured).eager_calls
