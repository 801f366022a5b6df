"""Objects that answer nothing, near what a body reads: a dead weak proxy, a ``__class__`` that raises. No code of
theirs runs, and calls replay."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from capture import capture, config, recordings
from tests.support.device import DEVICE

LOG: list[str] = []


def _refuse(name: str) -> Any:
    def asked(*_: object) -> Any:
        LOG.append(name)
        raise ArithmeticError(name)

    return asked


def _of_class(**namespace: Any) -> Callable[[], Any]:
    kind = type("Strange", (), namespace)
    return kind


class Refusing:
    """As a proxy of a request that is not there raises whatever it is asked."""

    __class__ = property(_refuse("__class__"))
    __dict__ = property(_refuse("__dict__"))
    __getattribute__ = _refuse("__getattribute__")
    __getattr__ = _refuse("__getattr__")
    __eq__ = _refuse("__eq__")
    __hash__ = _refuse("__hash__")
    __bool__ = _refuse("__bool__")
    __len__ = _refuse("__len__")
    __iter__ = _refuse("__iter__")
    __repr__ = _refuse("__repr__")


class Module(types.ModuleType):
    __getattribute__ = _refuse("a module's __getattribute__")


def _module_without_a_name() -> Any:
    made = types.ModuleType("unnamed")
    del made.__name__
    return made


class Target:
    def method(self) -> None: ...

    def __call__(self) -> None: ...


MADE: dict[str, Callable[[], Any]] = {
    "dead proxy": lambda: weakref.proxy(nn.Identity()),
    "dead proxy of a function": lambda: weakref.proxy(Target()),
    "dead reference": lambda: weakref.ref(Target()),
    "dead method": lambda: weakref.WeakMethod(Target().method),
    "__class__": _of_class(__class__=property(_refuse("__class__"))),
    "__dict__": _of_class(__dict__=property(_refuse("__dict__"))),
    "__getattribute__": _of_class(__getattribute__=_refuse("__getattribute__")),
    "__module__": _of_class(__module__=property(_refuse("__module__"))),
    "no module": _of_class(__module__=None),
    "all": Refusing,
    "module": lambda: Module("strange"),
    "module without a name": _module_without_a_name,
}


def _places(strange: Any) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0
            self.__dict__["strange"] = strange

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale * box.scale

    class Box:
        held, scale = strange, 3.0

    box, table, members = Box(), {"held": strange, "scale": 2.0}, [strange, 3.0]

    def named(x: torch.Tensor) -> torch.Tensor:
        return x if strange is None else x * box.scale

    return {
        "module": Holds(),
        "class": lambda x: x * box.scale * Box.scale,
        "containers": lambda x: x * table["scale"] * members[1] * box.scale,
        "name": named,
    }


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MADE)
def test_calls_replay_beside_them(name: str) -> None:
    strange = MADE[name]()
    LOG.clear()
    with torch.no_grad(), config.patch(strict=True):
        for place, body in _places(strange).items():
            captured, x = capture(body), torch.ones(3, device=DEVICE)
            for _ in range(5):
                assert torch.equal(captured(x), body(x)), place
            assert recordings(captured).replays, place
    assert LOG == []


@pytest.mark.parametrize("name", ["__class__", "__getattribute__"])
def test_as_an_argument(name: str) -> None:
    strange = MADE[name]()
    LOG.clear()
    captured, x = capture(lambda x, _: x * 2), torch.ones(3, device=DEVICE)
    with torch.no_grad(), config.patch(strict=True):
        for _ in range(5):
            assert captured(x, strange)[0].item() == 2.0
    assert recordings(captured).replays
    assert LOG == []
