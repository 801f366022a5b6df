"""Objects that hold modules or optimizers, given as arguments: a trainer or agent that outlives its calls is state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.support.device import AGAIN, DEVICE
from tests.support.regions import bits

CALLS = 12 * (1 + AGAIN)


class Trainer:
    def __init__(self) -> None:
        self.net = nn.Linear(3, 2).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.mean = torch.zeros(2, device=DEVICE)
        self.steps, self.last, self.log = 0, None, list[Any]()
        self.scale = 1.0


class Slotted:
    __slots__ = ("__weakref__", "mean", "nets", "steps")

    def __init__(self) -> None:
        self.nets, self.mean, self.steps = {"a": nn.Linear(3, 2).to(DEVICE)}, torch.zeros(2, device=DEVICE), 0


def train(t: Any, x: Tensor) -> Tensor:
    loss: Tensor = (t.net(x) * t.scale).square().mean()
    t.optimizer.zero_grad()
    loss.backward()
    t.optimizer.step()
    return loss


def counted(t: Any, x: Tensor) -> Tensor:
    t.steps += 1
    t.mean = t.mean * 0.9 + t.net(x).detach().mean(0) * 0.1
    return t.mean + x.sum()  # type: ignore[no-any-return]


def in_place(t: Any, x: Tensor) -> Tensor:
    t.mean.mul_(0.9).add_(t.net(x).detach().mean(0))
    t.last = t.mean.clone()
    return t.last * t.scale  # type: ignore[no-any-return]


def slots(t: Any, x: Tensor) -> Tensor:
    t.mean = t.nets["a"](x).detach().mean(0) + t.mean
    t.steps += 1
    return t.mean * 2  # type: ignore[no-any-return]


def beside_others(t: Any, x: Tensor) -> Any:
    return {"y": t["trainer"].net(x).detach() * t["scale"], "x": x * 2}


def shown(t: Any) -> list[Any]:
    net = t.net if hasattr(t, "net") else t.nets["a"]
    gradients = [bits(one.grad) for one in net.parameters()]
    return [*map(bits, net.parameters()), *gradients, bits(t.mean), bits(getattr(t, "last", None)), t.steps]


def replace_net(t: Any) -> None:
    if hasattr(t, "net"):
        t.net = nn.Linear(3, 2).to(DEVICE)
        t.optimizer = torch.optim.SGD(t.net.parameters(), lr=0.2)
    else:
        t.nets["a"] = nn.Linear(3, 2).to(DEVICE)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda t: None,
    "net": replace_net,
    "tensor": lambda t: setattr(t, "mean", torch.ones(2, device=DEVICE)),
    "number": lambda t: setattr(t, "steps", 7),
    "scale": lambda t: setattr(t, "scale", 2.0) if isinstance(t, Trainer) else None,
}
BODIES = [(train, Trainer), (counted, Trainer), (in_place, Trainer), (slots, Slotted)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("body", "kind"), BODIES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("change", CHANGES)
def test_state_is_read_where_it_is(body: Callable[[Any, Tensor], Tensor], kind: Any, change: str) -> None:
    told: list[list[Any]] = []
    # a new class, of which no object has died yet
    kind = type(kind.__name__, (kind,), {"__slots__": ()} if kind is Slotted else {})
    for function in (capture(body), body):
        torch.manual_seed(0)
        pair = [kind(), kind()]
        told.append([])
        for number in range(CALLS):
            torch.manual_seed(number)
            t = pair[0] if number % 4 else pair[1]  # the second object in every fourth call
            if number == CALLS // 2:
                CHANGES[change](t)
            result = function(t, torch.randn(4, 3, device=DEVICE))
            told[-1].append((bits(result), *map(shown, pair)))
        if function is not body:
            counters = recordings(function)
    assert told[0] == told[1]
    assert counters.replays >= 3, str(counters)


def test_state_in_a_container() -> None:
    trainer = Trainer()
    f = capture(beside_others)
    for number in range(CALLS):
        given = {"trainer": trainer, "scale": 2.0}
        x = torch.full((4, 3), float(number), device=DEVICE)
        assert {name: bits(tensor) for name, tensor in f(given, x).items()} == {
            name: bits(tensor) for name, tensor in beside_others(given, x).items()
        }
    assert recordings(f).replays >= CALLS - 3


class Context:
    """An object that is made for each call and leads to the model."""

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self.net, self.x, self.y = net, x, None


def fill(context: Any) -> Tensor:
    context.y = context.net(context.x).detach() * 2
    return context.y + 1  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:CG901:capture.CaptureWarning")
def test_contexts_that_come_and_go() -> None:
    net = nn.Linear(3, 2).to(DEVICE)
    f = capture(fill)
    for number in range(2 * CALLS):
        x = torch.full((4, 3), float(number), device=DEVICE)
        mine, theirs = Context(net, x), Context(net, x)
        assert bits(f(mine)) == bits(fill(theirs))
        assert bits(mine.y) == bits(theirs.y)
    assert recordings(f).replays >= 4


class Prediction:
    def __init__(self, net: nn.Module, mean: Tensor) -> None:
        self.net, self.mean = net, mean


def test_a_result_that_holds_a_module_is_a_new_one_in_each_call() -> None:
    net = nn.Linear(3, 2).to(DEVICE)
    f = capture(lambda x: Prediction(net, net(x)))
    kept = []
    with torch.no_grad():
        for number in range(6):
            x = torch.full((4, 3), float(number), device=DEVICE)
            kept.append((f(x), net(x)))
    assert all(torch.equal(result.mean, wanted) and result.net is net for result, wanted in kept)
    assert len({id(result) for result, _ in kept}) == 6
    assert recordings(f).replays >= 4 - AGAIN
