"""A thread that ends gives back what it recorded; outputs that are still held keep their values."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, recordings
from capture.api.inspect import state_of
from capture.state import body_run
from capture.tree import thread_trees
from capture.tree.node import walk
from capture.tree.tree import Tree
from tests.support.device import DEVICE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Begin without plans on disk and the tree of another test."""
    thread_trees.forget_trees()
    with config.patch(cache=False):
        yield


def in_thread(run: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    return results[0]


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def weighted(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Weights are arguments: on a device those of a module are recorded only while there is one thread."""
    return nn.functional.linear(x, weight, bias).relu().sum()


def nodes(f: Any) -> int:
    return sum(len(entry.nodes) for entry in state_of(f).entries())


def test_pools_of_threads_that_ended_are_gone() -> None:
    f = capture(lambda x: (x * 2, x + 1), name="f")

    def request() -> None:
        with config.patch(cache=False), torch.no_grad():
            for _ in range(4):
                f(torch.ones(1000, device=DEVICE))

    for _ in range(5):
        in_thread(request)
    assert recordings(f).recordings == 5
    assert recordings(f).pool_bytes == 0
    assert recordings(f).graph_bytes == 0
    request()
    assert recordings(f).pool_bytes > 0


def test_other_threads_keep_theirs() -> None:
    f = capture(lambda x: x * 2 + 1, name="f")

    def calls() -> Any:
        with config.patch(cache=False), torch.no_grad():
            return [f(torch.ones(7, device=DEVICE)) for _ in range(4)][-1]

    mine = calls()
    for _ in range(3):
        in_thread(calls)
    assert torch.equal(mine, torch.full((7,), 3.0, device=DEVICE))
    before = recordings(f)
    again = calls()
    assert recordings(f).replays == before.replays + 4
    assert torch.equal(again, mine)


def test_outputs_live_on() -> None:
    """Outputs of a thread that ended stay valid while others record and more garbage is made."""
    f = capture(lambda x: (x * 2, x + 1), name="f")

    def calls(value: float) -> list[Any]:
        with config.patch(cache=False), torch.no_grad():
            return [f(torch.full((500,), value + number, device=DEVICE)) for number in range(5)]

    kept = {value: in_thread(functools.partial(calls, value)) for value in (10.0, 20.0, 30.0)}
    gc.collect()
    calls(99.0)
    for value, results in kept.items():
        for number, (twice, more) in enumerate(results):
            x = torch.full((500,), value + number, device=DEVICE)
            assert torch.equal(twice, x * 2)
            assert torch.equal(more, x + 1)


def test_modules_with_state_and_effects() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.h = torch.zeros(2, 4, device=DEVICE)

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.h = torch.tanh(self.linear(x) + self.h)
            return self.h * 2

    torch.manual_seed(0)
    ours, eager = Net().to(DEVICE), Net().to(DEVICE)
    eager.load_state_dict(ours.state_dict())
    model = capture(ours)
    x = torch.ones(2, 4, device=DEVICE)

    def calls() -> list[Tensor]:
        with config.patch(cache=False), torch.no_grad():
            return [model(x).clone() for _ in range(4)]

    for _ in range(3):
        results = in_thread(calls)
        with torch.no_grad():
            expected = [eager(x) for _ in range(4)]
        assert all(map(torch.equal, results, expected))
        assert torch.equal(ours.h, eager.h)


def test_training_in_threads_that_end() -> None:
    model = nn.Linear(4, 4).to(DEVICE)
    f = capture(weighted, name="f")
    x = torch.ones(2, 4, device=DEVICE)

    def step() -> None:
        with config.patch(cache=False):
            for _ in range(4):
                model.zero_grad()
                f(x, model.weight, model.bias).backward()

    model(x).relu().sum().backward()
    expected = gradients(model)
    for _ in range(3):
        in_thread(step)
        assert all(map(torch.equal, gradients(model), expected))
    gc.collect()
    assert nodes(f) == 0


def test_backward_in_another_thread_after_the_first_ended() -> None:
    model = nn.Linear(4, 4).to(DEVICE)
    f = capture(weighted, name="f")
    x = torch.ones(2, 4, device=DEVICE)

    def forward() -> Any:
        with config.patch(cache=False):
            for _ in range(4):
                loss = f(x, model.weight, model.bias)
            return loss

    model(x).relu().sum().backward()
    expected = gradients(model)
    for _ in range(3):
        model.zero_grad()
        in_thread(forward).backward()
        assert all(map(torch.equal, gradients(model), expected))


def test_what_dies_within_a_call_is_forgotten_by_the_next() -> None:
    """The collector runs at any time, in a look through the tree, too."""
    f, g = capture(lambda x: x * 2, name="f"), capture(lambda x: x + 1, name="g")
    with torch.no_grad():
        for _ in range(3):
            f(torch.ones(3, device=DEVICE))
            g(torch.ones(3, device=DEVICE))
    (node,) = [node for entry in state_of(f).entries() for node in entry.nodes]
    tree, walked = node.tree, list[Any]()
    assert isinstance(tree, Tree)

    def collected() -> None:
        through = iter(walk(tree.root))
        next(through)
        node.drop()
        walked.extend(through)

    body_run.during(body_run.BodyRun(), collected, ())
    assert node in walked
    assert tree.buried == [node]
    with torch.no_grad():
        g(torch.ones(3, device=DEVICE))
        g(torch.ones(4, device=DEVICE))
    assert (tree.buried, node.recording) == ([], None)
