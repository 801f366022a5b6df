"""A function, a module, a region and a whole step called from several threads at once give eager's values and raise
nothing.

Threads come in pools that end, as in servers and data loaders.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from capture import capture, config, recordings
from capture.tree import thread_trees
from tests.support.device import DEVICE, use_device

THREADS, POOLS, TURNS = 4, 2, 8


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Begin without plans on disk and without the tree of another test."""
    thread_trees.forget_trees()
    with config.patch(cache=False):
        yield


def randn(*shape: int) -> Tensor:
    """Normal numbers drawn on the CPU: no thread may draw from a GPU's generator while another records
    (``docs/limits.md``)."""
    return torch.randn(*shape, device="cpu").to(DEVICE)


class Net(nn.Module):
    """Uses a weight twice. Its weights are drawn on the CPU, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, device="cpu"), nn.Linear(8, 8, device="cpu")
        self.to(DEVICE)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.relu(self.a(x))) @ self.a.weight)


def bits(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [None if one is None else one.detach().tolist() for one in tensors]


class Shared:
    """The functions that all threads call, and the state of each thread."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.eager, self.ours = Net(), capture(Net())
        self.ours.load_state_dict(self.eager.state_dict())
        self.function = capture(lambda x: (self.eager(x) * 2).sum(1), name="function")
        self.local = threading.local()

    def own(self, name: str, make: Callable[[], Any]) -> Any:
        if not hasattr(self.local, name):
            setattr(self.local, name, make())
        return getattr(self.local, name)

    def both(self, use: Callable[[Any], Sequence[Tensor | None]]) -> bool:
        return bits(use(self.ours)) == bits(use(self.eager))

    def region(self) -> bool:
        x = randn(int(torch.randint(1, 4, (1,), device="cpu")), 8)
        return self.both(lambda net: torch.autograd.grad(net(x).square().sum(), [*net.parameters()]))

    def inference(self) -> bool:
        with torch.no_grad():
            x = randn(3, 8)
            return bits([self.function(x)]) == bits([(self.eager(x) * 2).sum(1)])

    def retained(self) -> bool:
        x = randn(2, 8)

        def use(net: Any) -> list[Tensor]:
            loss, parameters = net(x).sum(), [*net.parameters()]
            first = torch.autograd.grad(loss, parameters, retain_graph=True)
            return [*first, *torch.autograd.grad(loss, parameters)]

        return self.both(use)

    def recomputed(self) -> bool:
        x = randn(2, 8).requires_grad_()
        return self.both(
            lambda net: torch.autograd.grad(checkpoint(net, x, use_reentrant=False).sum(), [x, *net.parameters()])
        )

    def functional(self) -> bool:
        """``functional_call`` exchanges a module's parameters while it runs, so each thread has its own pair of
        modules."""

        def make() -> tuple[Any, Net]:
            pair = Net(), Net()
            for net in pair:
                net.load_state_dict(self.eager.state_dict())
            return capture(pair[0]), pair[1]

        x, (ours, eager) = randn(2, 8), self.own("pair", make)
        doubled = {name: parameter.detach() * 2 for name, parameter in self.eager.named_parameters()}
        with torch.no_grad():
            return bits([functional_call(ours, doubled, (x,))]) == bits([functional_call(eager, doubled, (x,))])

    def step(self) -> bool:
        def make(*, captured: bool) -> tuple[Net, Callable[[Tensor], Tensor]]:
            net = Net()
            net.load_state_dict(self.eager.state_dict())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

            def step(x: Tensor) -> Tensor:
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                found: Tensor = loss.detach()
                return found

            return net, capture(step, name="step") if captured else step

        pairs = self.own("steps", lambda: (make(captured=True), make(captured=False)))
        x = randn(4, 8)
        ours, eager = ([step(x), *net.parameters()] for net, step in pairs)
        return bits(ours) == bits(eager)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # under a checkpoint calls run inline
def test_all_at_once() -> None:
    shared = Shared()
    uses = [shared.region, shared.inference, shared.retained, shared.recomputed, shared.functional, shared.step]
    wrong: list[str] = []

    def work(seed: int) -> None:
        use_device()
        drawn = random.Random(seed)
        for turn in range(TURNS):
            use = uses[turn % len(uses)] if turn < len(uses) else drawn.choice(uses)
            if not use():
                wrong.append(use.__name__)

    for number in range(POOLS):
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(number * THREADS, (number + 1) * THREADS)))
    for _ in range(4):  # threads that run beside each other may have come to no replay: regions wait till one is alone
        wrong += [use.__name__ for use in (shared.inference, shared.region) if not use()]
    assert wrong == []
    assert recordings(shared.function).replays > 0
