"""Bodies that write state by way of ``tensor.data``, with values that need gradients: the graph is the alias's, and
goes with it. One on the caller's own tensor stays, whatever the body wrote that memory by first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.support.writes import bits

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


class Codebook(nn.Module):
    """A layer with an average that follows it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3))
        self.shared = self.average.detach()
        self.optimizer = torch.optim.SGD(self.layer.parameters(), 0.1)

    def stepped(self, found: Tensor) -> Tensor:
        loss = (found - self.average).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def by_data(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        self.average.data.mul_(0.9).add_(found.sum(0), alpha=0.1)
        return self.stepped(found)

    def by_copy(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        self.average.data.copy_(found.mean(0))
        return self.stepped(found)

    def by_products(self, x: Tensor) -> Tensor:
        """The alias's graph saves what the body made."""
        found: Tensor = self.layer(x)
        self.average.data.mul_(0.9).add_((found.t() @ torch.sin(x)).sum(0), alpha=0.1)
        return self.stepped(found)

    def by_a_result(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        self.average.data.mul_(0.9).add_(found.sum(0), alpha=0.1)
        return found * self.average

    def through_the_alias(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        alias = self.average.data
        alias.mul_(0.9).add_(found.sum(0), alpha=0.1)
        return alias * 2

    def itself_after_data(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        self.average.data.mul_(0.9)
        self.average.add_(found.sum(0))
        return found.detach() * 2

    def itself_after_a_shared_one(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        self.shared.mul_(0.9)
        self.average.add_(found.sum(0))
        return found.detach() * 2

    def a_shared_one_after_itself(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        self.average.mul_(0.9)
        self.shared.add_(found.sum(0))
        return found.detach() * 2

    def the_alias_is_kept(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        alias = self.average.data
        alias.mul_(0.9).add_(found.sum(0), alpha=0.1)
        self.kept = alias
        return found.detach() * 2

    def state(self) -> Any:
        tensors = [self.average, self.shared, *self.parameters(), *[p.grad for p in self.parameters()]]
        return [None if one is None else (bits(one.detach()), one.requires_grad, one.is_leaf) for one in tensors]


REPLAYED = {"by_data", "by_copy", "by_products", "by_a_result", "through_the_alias"}
BODIES: list[Callable[[Codebook, Tensor], Tensor]] = [
    Codebook.by_data, Codebook.by_copy, Codebook.by_products, Codebook.by_a_result, Codebook.through_the_alias,
    Codebook.itself_after_data, Codebook.itself_after_a_shared_one, Codebook.a_shared_one_after_itself,
    Codebook.the_alias_is_kept,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=[body.__name__ for body in BODIES])
def test_state_that_is_written_by_an_alias(body: Callable[[Codebook, Tensor], Tensor]) -> None:
    eager, ours = Codebook(), Codebook()
    captured = capture(body.__get__(ours))
    for _ in range(10):
        x = torch.randn(2, 3)
        expected, found = body(eager, x), captured(x)
        assert (bits(found.detach()), found.requires_grad) == (bits(expected.detach()), expected.requires_grad)
        assert ours.state() == eager.state()
        for codebook, result in ((eager, expected), (ours, found)):
            kept = getattr(codebook, "kept", codebook.shared)
            for one in (result, codebook.average, kept):
                if one.requires_grad:
                    one.sum().backward(retain_graph=True)
        assert ours.state() == eager.state()
    assert (recordings(captured).replays >= 6) == (body.__name__ in REPLAYED)
