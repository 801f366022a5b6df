"""Arguments that the key tells by identity, as a model, its optimizer or a trainer is: C compares that, too."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import capture, recordings
from tests.support.bucketed import assert_same
from tests.support.device import AGAIN, DEVICE
from tests.support.fast_paths import fresh as fresh
from tests.support.fast_paths import goes_straight

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)).to(DEVICE)


def tensor() -> Tensor:
    return torch.randn(2, 3, device=DEVICE)


class Trainer:
    """State of a user's program."""

    def __init__(self) -> None:
        self.net, self.scale = net(), 2.0
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)


def applied(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found * 2


def of_trainer(trainer: Trainer, x: Tensor) -> Tensor:
    found: Tensor = trainer.net(x) * trainer.scale
    return found


def in_a_dict(given: dict[str, Any], x: Tensor) -> Tensor:
    found: Tensor = given["net"](x)
    return found


def by_a_function(loss: Callable[..., Tensor], x: Tensor) -> Tensor:
    return loss(x, torch.zeros_like(x))


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "module": (applied, net),
    "trainer": (of_trainer, Trainer),
    "module in a dict": (in_a_dict, lambda: {"net": net(), "number": 2}),
    "function": (by_a_function, lambda: lambda x, y: F.mse_loss(x, y) * 3),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_calls_with_such_an_argument_go_straight(name: str) -> None:
    body, make = CASES[name]
    f, given, other = capture(body), make(), make()
    for one in (given, given, given, given, given, given):
        torch.manual_seed(0)
        expected = body(one, x := tensor())
        torch.manual_seed(0)
        x_again = tensor()
        assert_same(f(one, x_again), expected)
        assert torch.equal(x, x_again)
    assert goes_straight(f, given, tensor())
    assert not goes_straight(f, other, tensor())
    assert not goes_straight(f, 1, tensor())
    assert not goes_straight(f, tensor(), tensor())


@torch.no_grad()
def test_a_module_in_another_mode_is_another_call() -> None:
    f, model = capture(applied), net()
    for _ in range(6):
        f(model, tensor())
    assert goes_straight(f, model, tensor())
    model[1].eval()  # type: ignore[index]
    assert not goes_straight(f, model, tensor())
    x = tensor()
    assert_same(f(model, x), applied(model, x))


@torch.no_grad()
def test_a_number_of_such_an_object_is_looked_at() -> None:
    f, trainer = capture(of_trainer), Trainer()
    trainer.net.eval()
    for scale in [2.0] * 6 + [3.0, 4.0, 2.0, 3.0, 2.0]:
        trainer.scale = scale
        x = tensor()
        assert_same(f(trainer, x), of_trainer(trainer, x))


@torch.no_grad()
def test_another_class_is_another_object() -> None:
    class Other(Trainer):
        @override
        def __getattribute__(self, name: str) -> Any:
            return 5.0 if name == "scale" else super().__getattribute__(name)

    f, trainer = capture(of_trainer), Trainer()
    trainer.net.eval()
    for _ in range(6):
        f(trainer, tensor())
    assert goes_straight(f, trainer, tensor())
    trainer.__class__ = Other
    assert not goes_straight(f, trainer, tensor())
    x = tensor()
    assert_same(f(trainer, x), of_trainer(trainer, x))


def test_a_default_that_is_such_an_object_is_given_as_it_is() -> None:
    model = net().eval()

    def body(x: Tensor, model: Any = model) -> Tensor:
        found: Tensor = model(x)
        return found

    f = capture(body)
    with torch.no_grad():
        for _ in range(8):
            x = tensor()
            assert_same(f(x), body(x))
            assert_same(f(x, model), body(x))


def test_nothing_keeps_it_alive() -> None:
    f = capture(applied)
    model = net().eval()
    with torch.no_grad():
        for _ in range(8):
            f(model, tensor())
        died = weakref.ref(model[0])  # type: ignore[index]
        del model
        other = net().eval()
        for _ in range(8):
            x = tensor()
            assert_same(f(other, x), applied(other, x))
    gc.collect()
    assert died() is None


def test_a_step_of_training_gets_model_and_optimizer() -> None:
    def body(model: Any, opt: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    torch.manual_seed(0)
    ours = net().eval()
    theirs = net().eval()
    theirs.load_state_dict(ours.state_dict())
    opts = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (ours, theirs)]
    f = capture(body)
    for n in range(20):
        if n == 12:
            for opt in opts:
                opt.param_groups[0]["lr"] = 0.05
        x = tensor()
        assert_same(f(ours, opts[0], x), body(theirs, opts[1], x))
        assert_same([*ours.parameters()], [*theirs.parameters()])
    assert recordings(f).replays >= 12 - AGAIN
