"""The decorator: every form gives a real function that computes what the plain one does."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings, reset
from tests.support.decorated import CapturedNet, Net, bits, check_replays, scaled
from tests.support.decorated import fresh as fresh


class Plain:
    """No module; its methods read an attribute."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def eager(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) + 1

    @capture
    def step(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) + 1

    def __call__(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) + 1


class Family:
    """Static methods and class methods, with the decorators in either order."""

    factor = 3.0

    @staticmethod
    @capture
    def static_inner(x: Tensor) -> Tensor:
        return torch.relu(x) * 2 + 1

    @capture
    @staticmethod
    def static_outer(x: Tensor) -> Tensor:
        return torch.relu(x) * 2 + 1

    @classmethod
    @capture
    def class_inner(cls, x: Tensor) -> Tensor:
        return torch.relu(x) * cls.factor + 1

    @capture
    @classmethod
    def class_outer(cls, x: Tensor) -> Tensor:
        return torch.relu(x) * cls.factor + 1


class Derived(Family):
    factor = 5.0


@pytest.mark.parametrize(
    "decorate",
    [
        capture,
        capture(),
        capture(max_recordings=2, rng="graphsafe"),
        lambda fn: capture(fn, static=["x"], name="named"),
        lambda fn: capture(fn, outputs="clone"),
    ],
    ids=["bare", "empty", "options", "call", "call-clone"],
)
def test_functions_in_every_form(decorate: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
    captured = decorate(lambda x, scale=2.0: torch.relu(x) * scale + 1)
    x = torch.randn(3, 4)
    for _ in range(4):
        x.add_(1)
        assert bits(captured(x)) == bits(scaled(x))
    assert isinstance(captured, types.FunctionType)
    assert recordings(captured).recordings == 1


def test_a_function_replays() -> None:
    check_replays(capture(scaled), scaled)


def test_a_lambda_replays() -> None:
    captured: Callable[[Tensor], Tensor] = capture(lambda x: torch.relu(x) * 2 + 1)
    check_replays(captured, scaled)


def test_forward_replays() -> None:
    net = CapturedNet()
    twin = Net()
    twin.load_state_dict(net.state_dict())
    check_replays(net, twin)
    assert recordings(net.forward).recordings == 1
    assert recordings(net.step).recordings == 0


def test_a_module_method_replays() -> None:
    net = CapturedNet()
    check_replays(net.step, lambda x: torch.tanh(net.linear(x)) * net.scale)


def test_a_method_of_a_plain_class_replays() -> None:
    plain = Plain(torch.randn(4, 4))
    check_replays(plain.step, plain.eager)


def test_a_bound_method_replays() -> None:
    plain = Plain(torch.randn(4, 4))
    check_replays(capture(plain.eager), plain.eager)


def test_a_bound_method_keeps_its_object() -> None:
    captured = capture(Plain(torch.eye(4)).eager)
    gc.collect()
    check_replays(captured, Plain(torch.eye(4)).eager)


def test_a_callable_object_replays() -> None:
    plain = Plain(torch.randn(4, 4))
    captured = capture(plain, name="plain")
    assert isinstance(captured, types.FunctionType)
    assert recordings(captured).function == "plain"
    check_replays(captured, plain)


def test_a_callable_object_is_kept_alive() -> None:
    captured = capture(Plain(torch.eye(4)), name="plain")
    gc.collect()
    check_replays(captured, Plain(torch.eye(4)))


def test_a_partial_replays() -> None:
    partial = functools.partial(scaled, scale=3.0)
    check_replays(capture(partial, name="partial"), partial)


def test_a_partial_without_a_name_replays() -> None:
    check_replays(capture(functools.partial(scaled, scale=3.0)), functools.partial(scaled, scale=3.0))


@pytest.mark.parametrize("builtin", [torch.relu, torch.sigmoid, operator.neg], ids=["relu", "sigmoid", "neg"])
def test_a_builtin_replays(builtin: Callable[[Tensor], Tensor]) -> None:
    check_replays(capture(builtin), builtin)


def test_a_builtin_takes_keywords() -> None:
    add = capture(torch.add)
    x, y = torch.randn(3), torch.randn(3)
    for alpha in (1, 2, 2, 2, 1):
        assert bits(add(x, y, alpha=alpha)) == bits(torch.add(x, y, alpha=alpha))


@pytest.mark.parametrize("name", ["static_inner", "static_outer"])
def test_static_methods_replay(name: str) -> None:
    check_replays(getattr(Family, name), scaled)
    x = torch.randn(3, 4)
    assert bits(getattr(Family(), name)(x)) == bits(scaled(x))
    reset(getattr(Family, name))


@pytest.mark.parametrize("name", ["class_inner", "class_outer"])
def test_class_methods_replay_per_class(name: str) -> None:
    check_replays(getattr(Family, name), lambda x: scaled(x, 3.0))
    check_replays(getattr(Derived, name), lambda x: scaled(x, 5.0))
    x = torch.randn(3, 4)
    assert bits(getattr(Derived(), name)(x)) == bits(scaled(x, 5.0))
    assert bits(getattr(Family(), name)(x)) == bits(scaled(x, 3.0))
    reset()


def test_a_module_instance_is_captured_in_place() -> None:
    net = Net()
    twin = copy.deepcopy(net)
    assert capture(net, max_recordings=3) is net
    assert type(net) is Net
    assert isinstance(net.forward, types.MethodType)
    assert net.forward.__self__ is net
    check_replays(net, twin)
    assert "forward" not in Net().__dict__


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
def test_torchs_own_modules_are_captured(make: Callable[[], nn.Module]) -> None:
    net = make()
    check_replays(capture(net), copy.deepcopy(net))


def test_a_receiver_of_another_name_is_seen() -> None:
    class Odd(nn.Module):
        def __init__(this) -> None:
            super().__init__()
            this.scale = 2.0

        @override
        @capture
        def forward(this, x: Tensor) -> Tensor:
            return torch.relu(x) * this.scale + 1

    net = Odd()
    x = torch.randn(3, 4)
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        net.scale = scale
        assert bits(net(x)) == bits(scaled(x, scale))


def test_a_receiver_of_another_name_is_no_argument() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        @override
        @capture
        def forward(this, x: Tensor) -> Tensor:
            return this.layer(x)  # type: ignore[no-any-return]

    nets = [Odd() for _ in range(9)]
    x = torch.randn(3, 4)
    for _ in range(4):
        for net in nets:
            assert bits(net(x)) == bits(net.layer(x))
    assert all(recordings(net).recordings == 1 for net in nets)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_grad_decorators_on_either_side(mode: Callable[[], Any]) -> None:
    """A body wrapped by torch's own decorators is still read for the names it mentions."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale = 2.0

        def plain(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x) * self.scale
            return y

        inner = capture(mode()(plain))
        outer = mode()(capture(plain))

    net = Both()
    x = torch.randn(3, 4)
    with torch.enable_grad():
        for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0, 2.0):
            net.scale = scale
            with mode():
                expected = net.linear(x) * scale
            for method in (net.inner, net.outer):
                got = method(x)
                assert bits(got) == bits(expected)
                assert got.requires_grad == expected.requires_grad
    assert recordings(net.inner).replays > 0


def test_the_function_looks_like_the_plain_one() -> None:
    captured = capture(scaled)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(captured, name) == getattr(scaled, name)
    assert inspect.signature(captured) == inspect.signature(scaled)
    assert captured.__wrapped__ is scaled  # type: ignore[attr-defined]
    assert inspect.getsource(captured) == inspect.getsource(scaled)


def test_the_method_looks_like_the_plain_one() -> None:
    net = CapturedNet()
    assert isinstance(net.forward, types.MethodType)
    assert net.forward.__self__ is net
    assert inspect.signature(net.forward) == inspect.signature(Net().forward)
    assert inspect.signature(CapturedNet.forward) == inspect.signature(Net.forward)
    assert net.forward.__doc__ == Net.forward.__doc__
    assert isinstance(inspect.getattr_static(CapturedNet, "forward"), types.FunctionType)


def test_a_callable_object_without_a_name_gets_one() -> None:
    captured = capture(Plain(torch.eye(4)))
    assert "Plain" in recordings(captured).function
    assert captured.__name__


@pytest.mark.parametrize("arguments", [((), {}), ((1, 2, 3), {}), ((torch.ones(1),), {"skale": 1.0})])
def test_wrong_arguments_raise_the_functions_own_error(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    args, kwargs = arguments
    with pytest.raises(TypeError) as eager:
        scaled(*args, **kwargs)
    with pytest.raises(TypeError) as captured:
        capture(scaled)(*args, **kwargs)
    assert str(captured.value) == str(eager.value)


def test_hooks_and_call_work_around_a_captured_forward() -> None:
    net = CapturedNet()
    seen: list[tuple[object, ...]] = []
    net.register_forward_hook(lambda module, args, output: seen.append(bits(output)))
    x = torch.randn(3, 4)
    results = [bits(net(x)) for _ in range(4)]
    assert seen == results


def test_a_module_that_counts_and_refuses_attributes() -> None:
    """Its class's own way of setting attributes is for code of users."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.names = nn.Linear(2, 2), list[str]()
            self.done = True

        @override
        def __setattr__(self, name: str, value: Any) -> None:
            if self.__dict__.get("done"):
                raise AttributeError(name)
            super().__setattr__(name, value)

        @override
        def forward(self, x: Tensor) -> Any:
            return self.layer(x)

    module = Frozen()
    captured = capture(module)
    x = torch.ones(3, 2)
    for _ in range(4):
        assert torch.equal(captured(x), module.layer(x))
