"""Methods whose receiver has another name than self, and functions in a class body that are no methods."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, plans, recordings, reset
from capture.api.decorator import captured_states
from tests.support.decorated import bits, check_replays, scaled
from tests.support.decorated import fresh as fresh


def through(weight: Tensor, x: Tensor) -> Tensor:
    """What all methods below compute."""
    return torch.relu(x @ weight) + 1


class Odd:
    """Receivers by other names, and functions that only look like methods."""

    factor = 3.0

    def __init__(this, weight: Tensor) -> None:
        this.weight = weight

    @capture
    def step(this, x: Tensor) -> Tensor:
        return torch.relu(x @ this.weight) + 1

    @capture(static=["this.weight"], max_recordings=2)
    def named(this, x: Tensor) -> Tensor:
        return torch.relu(x @ this.weight) + 1

    @capture
    @torch.no_grad()
    def bare(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) + 1

    @property
    @capture
    def doubled(me) -> Tensor:
        return torch.relu(me.weight) * 2

    @capture
    def __hidden(this, x: Tensor) -> Tensor:
        return torch.relu(x @ this.weight) + 1

    @classmethod
    @capture
    def of_class(kind, x: Tensor) -> Tensor:
        return torch.relu(x) * kind.factor + 1

    @capture
    @classmethod
    def of_class_outer(kind, x: Tensor) -> Tensor:
        return torch.relu(x) * kind.factor + 1

    @staticmethod
    @capture
    def alone(other: Tensor, x: Tensor) -> Tensor:
        return torch.relu(x @ other) + 1

    @staticmethod
    @capture
    def __secret(other: Tensor, x: Tensor) -> Tensor:
        return torch.relu(x @ other) + 1

    def told(self, x: Tensor) -> Tensor:
        return self.__secret(self.weight, x)


class Odder(Odd):
    factor = 5.0

    @override
    @capture
    def step(that, x: Tensor) -> Tensor:
        return super().step(x) * 2


class Nest(nn.Module):
    """A module with one inside whose class is inside its own."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @capture
        def run(module, x: Tensor) -> Tensor:
            return torch.relu(module.linear(x)) + 1

    def __init__(self) -> None:
        super().__init__()
        self.inner = Nest.Inner()

    @capture
    def run(net, x: Tensor) -> Tensor:
        return net.inner.run(x) * 2


def check_agrees(captured: Callable[..., Tensor], eager: Callable[..., Tensor]) -> None:
    for _ in range(4):
        x = torch.randn(3, 4)
        assert bits(captured(x)) == bits(eager(x))


@pytest.mark.parametrize("name", ["step", "named", "bare", "_Odd__hidden"])
def test_a_receiver_may_have_any_name(name: str) -> None:
    one, other = Odd(torch.randn(4, 4)), Odd(torch.randn(4, 4))
    for odd in (one, other):
        check_replays(getattr(odd, name), functools.partial(through, odd.weight))
        check_agrees(functools.partial(getattr(Odd, name), odd), functools.partial(through, odd.weight))
    assert recordings(getattr(one, name)).recordings == 1
    assert recordings(getattr(Odd, name)).eager_calls == 0


def test_names_of_tensors_begin_with_self_whatever_the_receiver_is_called() -> None:
    odd = Odd(torch.randn(4, 4))
    odd.named(torch.randn(3, 4))
    assert "self.weight" in [one.path for one in plans(odd.named)[0].placeholders]
    assert captured_states(odd.named)[0].annotation.static == ("self.weight",)


def test_a_property_by_another_name_replays() -> None:
    odd = Odd(torch.randn(4, 4))
    for _ in range(4):
        odd.weight.add_(1)
        assert bits(odd.doubled) == bits(torch.relu(odd.weight) * 2)
    method = types.MethodType(Odd.__dict__["doubled"].fget, odd)
    assert recordings(method).replays >= 2


def test_a_subclass_may_call_its_receiver_otherwise() -> None:
    odder = Odder(torch.randn(4, 4))
    plain = functools.partial(through, odder.weight)
    check_replays(odder.step, lambda x: plain(x) * 2)
    check_replays(odder.named, plain)
    check_agrees(functools.partial(Odd.step, odder), plain)
    assert recordings(functools.partial(Odd.step, odder).func).eager_calls == 0


@pytest.mark.parametrize("name", ["of_class", "of_class_outer"])
def test_a_class_method_may_have_any_name_for_its_class(name: str) -> None:
    check_replays(getattr(Odd, name), lambda x: scaled(x, 3.0))
    check_replays(getattr(Odder, name), lambda x: scaled(x, 5.0))
    check_agrees(getattr(Odd(torch.eye(4)), name), lambda x: scaled(x, 3.0))
    reset()


def test_a_static_method_with_two_parameters_is_no_method() -> None:
    odd = Odd(torch.randn(4, 4))
    plain = functools.partial(through, odd.weight)
    check_agrees(functools.partial(Odd.alone, odd.weight), plain)
    check_agrees(functools.partial(odd.alone, odd.weight), plain)
    check_agrees(odd.told, plain)
    counted = recordings(Odd.alone)
    assert (counted.recordings, counted.eager_calls, counted.replays) == (1, 0, 6)
    assert captured_states(Odd.alone)[0].receiver is None
    reset()


def test_modules_in_modules_may_call_themselves_anything() -> None:
    net = Nest()
    check_replays(net.inner.run, lambda x: torch.relu(net.inner.linear(x)) + 1)
    check_replays(net.run, lambda x: (torch.relu(net.inner.linear(x)) + 1) * 2)
    net.inner.linear.weight.mul_(2)
    check_agrees(net.run, lambda x: (torch.relu(net.inner.linear(x)) + 1) * 2)
    assert recordings(net.run).eager_calls == 0
