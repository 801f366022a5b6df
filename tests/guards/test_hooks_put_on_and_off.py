"""Bodies that put hooks on modules, as for features of hidden layers, and take them away again, while other code does
so, too: torch numbers all hooks of the process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from capture import capture, config, recordings
from capture.tree import thread_trees
from tests.support.device import DEVICE, use_device
from tests.support.observed import bits

CALLS = 16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    use_device()
    with config.patch(cache=False, drop_slow=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)


class Features:
    """Collects what the modules of a network give."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen, self.handles = model, list[Tensor](), list[RemovableHandle]()

    def __enter__(self) -> Self:
        self.handles = [one.register_forward_hook(self.keep) for one in self.model.children()]
        return self

    def keep(self, _module: nn.Module, _args: Any, result: Tensor) -> None:
        self.seen.append(result)

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def collected(model: nn.Module) -> Callable[[Tensor], Any]:
    def body(x: Tensor) -> Any:
        with Features(model) as features:
            y = model(x)
        return y, features.seen

    return body


def scaled(model: nn.Module) -> Callable[[Tensor], Any]:
    def body(x: Tensor) -> Any:
        handle = model.register_forward_hook(lambda _module, _args, result: result * 2)
        try:
            return model(x)
        finally:
            handle.remove()

    return body


@pytest.mark.parametrize("make", [collected, scaled])
def test_hooks_elsewhere_do_not_count(make: Callable[[nn.Module], Callable[[Tensor], Any]]) -> None:
    mine, theirs, other = net(), net(), net()
    body, expected = capture(make(mine)), make(theirs)
    with torch.no_grad():
        for number in range(CALLS):
            x = torch.randn(5, 4)
            other.register_forward_hook(lambda *_: None)
            assert bits(body(x)) == bits(expected(x)), f"call {number}"
    assert recordings(body).replays >= CALLS - 4


def test_hooks_that_stay_count() -> None:
    mine, theirs = net(), net()
    body, expected = capture(collected(mine)), collected(theirs)
    with torch.no_grad():
        for number in range(CALLS):
            x = torch.randn(5, 4)
            if number == CALLS // 2:
                for model in (mine, theirs):
                    model[0].register_forward_hook(lambda _module, _args, result: result + 1)
            assert bits(body(x)) == bits(expected(x)), f"call {number}"


def test_a_body_that_asks_for_the_number_gets_it() -> None:
    def body(x: Tensor) -> Tensor:
        return x * 2 if RemovableHandle.next_id % 2 else x * 3

    ours, model = capture(body), net()
    for number in range(CALLS):
        x = torch.randn(3)
        if number % 3 == 0:
            model.register_forward_hook(lambda *_: None)
        before = RemovableHandle.next_id
        found = bits(ours(x))
        numbers = range(before, RemovableHandle.next_id + 1)  # a watch may put hooks somewhere, too; a replay does not
        assert found in [bits(x * 2 if one % 2 else x * 3) for one in numbers], f"call {number}"
