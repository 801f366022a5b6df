"""State and names that change between calls that take the fast path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture
from tests.support.device import DEVICE
from tests.support.fast_paths import Named, goes_straight
from tests.support.fast_paths import fresh as fresh
from tests.support.fast_paths import way as way


class Stack(nn.Module):
    """Linear layers, whose weights a recording reads where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def _set(holder: Any, name: str, value: Any) -> None:
    setattr(holder, name, value)


STATE: dict[str, Callable[[Any], object]] = {
    "data": lambda net: _set(net.layers[1].weight, "data", torch.ones(4, 4, device=DEVICE)),
    "data of other strides": lambda net: _set(net.layers[1].weight, "data", net.layers[1].weight.detach().t()),
    "in place": lambda net: net.layers[2].weight.data.mul_(2),
    "parameter": lambda net: _set(net.layers[0], "bias", nn.Parameter(torch.ones(4, device=DEVICE))),
    "no bias": lambda net: _set(net.layers[0], "bias", None),
    "submodule": lambda net: _set(net, "layers", Stack().to(DEVICE).layers),
    "layer": lambda net: net.layers.__setitem__(3, nn.Linear(4, 4, device=DEVICE)),
    "hook": lambda net: net.layers[4].register_forward_hook(lambda *given: given[-1] + 1),
    "forward": lambda net: _set(net.layers[4], "forward", torch.sin),
    "eval": lambda net: net.eval(),
    "eval of one": lambda net: net.layers[2].eval(),
    "gradient off": lambda net: net.layers[2].weight.requires_grad_(False),
    "dtype": lambda net: net.to(torch.float64).to(torch.float32),
}


class Holder:
    """An object that is no module."""

    def __init__(self, net: Stack) -> None:
        self.net = net

    def call(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


NET: Any = None


def _through_a_global(x: Tensor) -> Tensor:
    y: Tensor = NET(x)
    return y


def _captured_net(net: Stack, through: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """A captured function that reaches the module, and the same eagerly."""
    match through:
        case "module":
            plain = Stack.forward.__get__(net)
            return capture(net, **options), plain
        case "closure":
            return capture(lambda x: net(x), **options), net
        case "global":
            return capture(_through_a_global, **options), net
    holder = Holder(net)
    return capture(holder.call, **options), net


@pytest.mark.one_in(12)
@pytest.mark.parametrize("change", STATE)
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("through", ["module", "closure", "global", "attribute"])
def test_state_that_changes(change: str, seen: bool, through: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the change every shape gives eager's values, whether C had a look at its tensors before or not."""
    del way
    net = Stack().to(DEVICE)
    monkeypatch.setitem(globals(), "NET", net)
    mine, plain = _captured_net(net, through, {"max_recordings": 8})
    xs = [torch.randn(size, 4, device=DEVICE) for size in (1, 2)]
    with torch.no_grad():
        for x in xs:
            for _ in range(5 if seen else 2):
                assert torch.equal(mine(x), plain(x))
    STATE[change](net)
    with torch.no_grad():
        for _ in range(4):
            for x in xs:
                assert torch.equal(mine(x), plain(x))


def _named(kind: str) -> tuple[Callable[[Tensor], Tensor], Callable[[str, Any], None], Callable[[str], Any]]:
    """A function, and what sets and reads its three names."""
    own = Named()
    if kind == "attribute":
        return own.call, functools.partial(setattr, own), functools.partial(getattr, own)
    if kind == "chain":
        return (
            (lambda x: own.net(x * own.scale) + own.weight),
            functools.partial(setattr, own),
            functools.partial(getattr, own),
        )
    names = dict(own.__dict__)
    if kind == "global":
        scope: dict[str, Any] = {"__builtins__": __builtins__, "__name__": "named", **names}
        exec("def body(x): return net(x * scale) + weight", scope)  # noqa: S102 - the text above
        return scope["body"], scope.__setitem__, scope.__getitem__
    scale, weight, net = names["scale"], names["weight"], names["net"]

    def body(x: Tensor) -> Tensor:
        y: Tensor = net(x * scale) + weight
        return y

    cells = dict(zip(body.__code__.co_freevars, body.__closure__ or (), strict=True))
    return body, lambda name, value: _set(cells[name], "cell_contents", value), lambda name: cells[name].cell_contents


class Doubled(nn.Linear):
    """Another class for the same instance."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


RENAMED: dict[str, Callable[[Callable[[str, Any], None], Callable[[str], Any]], object]] = {
    "value": lambda put, get: put("scale", 5.0),
    "equal value": lambda put, get: put("scale", float("2")),
    "value of another type": lambda put, get: put("scale", 3),
    "tensor": lambda put, get: put("weight", torch.ones(4, device=DEVICE)),
    "tensor in place": lambda put, get: get("weight").add_(1),
    "a gradient": lambda put, get: get("weight").requires_grad_(),
    "a tensor for the value": lambda put, get: put("scale", torch.ones(4, device=DEVICE)),
    "module": lambda put, get: put("net", nn.Linear(4, 4, device=DEVICE)),
    "class of the module": lambda put, get: _set(get("net"), "__class__", Doubled),
    "training": lambda put, get: get("net").eval(),
    "a function for the module": lambda put, get: put("net", torch.sin),
    "hook": lambda put, get: get("net").register_forward_hook(lambda *given: given[-1] + 1),
}  # fmt: skip


@pytest.mark.one_in(9)
@pytest.mark.parametrize("change", RENAMED)
@pytest.mark.parametrize("kind", ["closure", "global", "attribute", "chain"])
def test_a_name_that_changes(kind: str, change: str, way: str) -> None:
    body, put, get = _named(kind)
    before, x = get("net"), torch.randn(2, 4, device=DEVICE)
    mine = capture(body, max_recordings=8)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(mine(x), body(x))
        assert way == "general way" or goes_straight(mine, x)
        RENAMED[change](put, get)
        for _ in range(5):
            assert torch.equal(mine(x), body(x))
        put("net", before)
        for _ in range(4):
            assert torch.equal(mine(x), body(x))


class Apart(nn.Module):
    """Its training flag is no entry of ``__dict__``."""

    training: Any = property(
        lambda self: self.__dict__["flags"]["training"],
        lambda self, value: self.__dict__.setdefault("flags", {}).update(training=value),
    )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x * 3


def test_a_training_flag_that_is_kept_elsewhere(way: str) -> None:
    del way
    net, inner = Apart(), Apart()
    plain, outer = Apart.forward.__get__(net), capture(nn.Sequential(inner))
    capture(net)
    x = torch.randn(4, device=DEVICE)
    for _ in range(3):
        for training in (True, False):
            net.train(training)
            inner.train(training)
            for _ in range(5):
                assert torch.equal(net(x), plain(x))
                assert torch.equal(outer(x), plain(x))
