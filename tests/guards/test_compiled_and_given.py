"""Reads in parts that ``torch.compile`` compiled, of weak proxies, and of what arguments tell beside their key."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, config, recordings


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


class Named:
    """Compares by its name alone."""

    def __init__(self, name: str, scale: float) -> None:
        self.name, self.scale = name, scale

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self.name == other.name

    @override
    def __hash__(self) -> int:
        return hash(self.name)


def test_objects_that_call_themselves_equal_are_told_apart() -> None:
    captured = capture(lambda x, named: x * named.scale)
    several = [Named("base", 2.0), Named("base", 5.0)]
    for number in range(12):
        found = captured(torch.ones(2), several[number % 2])
        assert found.tolist() == [several[number % 2].scale] * 2
    assert recordings(captured).replays >= 6


class Owner:
    """Keeps a module weakly, as trainers do."""

    module: Any


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.owner = Owner()

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.owner.module.scale)


def test_a_weak_proxy_of_a_module_is_followed() -> None:
    net, referent = Scaled(), Scaled()
    net.owner.module = weakref.proxy(referent)
    capture(net)
    for number in range(10):
        if number == 5:
            referent.scale = 7.0
        assert net(torch.ones(1)).item() == referent.scale
    assert recordings(net.forward).replays >= 4


@pytest.mark.parametrize("name", ["is_leaf", "grad"])
def test_what_an_argument_tells_beside_its_key(name: str) -> None:
    def body(x: Tensor) -> Tensor:
        return x * (2.0 if getattr(x, name) else 3.0)

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="CG110"):  # noqa: PT031 - any of these calls may warn
        for number in range(6):
            x = torch.ones(1, requires_grad=name == "is_leaf")
            if number > 3 and name == "grad":
                x.grad = torch.ones(1)
            elif number > 3:
                with torch.enable_grad():
                    x = x * 1
            assert torch.equal(captured(x), body(x))
