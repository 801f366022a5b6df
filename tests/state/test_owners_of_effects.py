"""Hooks and callbacks store values in objects that they reached: a replay stores into the same objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


class _Keeper:
    def __init__(self) -> None:
        self.stored: Any = None
        self.table: dict[str, Any] = {}

    def save(self, module: Any, args: Any, output: Tensor) -> None:
        self.stored = output.detach()

    def save_in_table(self, module: Any, args: Any, output: Tensor) -> None:
        self.table["last"] = output.detach()

    def save_named(self, name: str, module: Any, args: Any, output: Tensor) -> None:
        self.table[name] = output.detach()

    def __call__(self, module: Any, args: Any, output: Tensor) -> None:
        self.stored = output * 2


class _Slotted:
    __slots__ = ("__weakref__", "stored")

    def __init__(self) -> None:
        self.stored: Any = None

    def __call__(self, module: Any, args: Any, output: Tensor) -> None:
        self.stored = output.detach()


def _recipe(model: nn.Sequential) -> Callable[[], Any]:
    activation: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            activation[name] = output.detach()

        return hook

    model[0].register_forward_hook(keep("first"))
    model[2].register_forward_hook(keep("second"))
    return lambda: [activation["first"], activation["second"]]


def _own_dicts(model: nn.Sequential) -> Callable[[], Any]:
    def keep() -> tuple[Any, dict[str, Tensor]]:
        store: dict[str, Tensor] = {}

        def hook(module: Any, args: Any, output: Tensor) -> None:
            store["it"] = output.detach()

        return hook, store

    pairs = [keep() for _ in range(3)]
    for module, (hook, _) in zip(model, pairs, strict=True):
        module.register_forward_hook(hook)
    return lambda: [store["it"] for _, store in pairs]


def _method(model: nn.Sequential) -> Callable[[], Any]:
    keeper = _Keeper()
    model[0].register_forward_hook(keeper.save)
    return lambda: [keeper.stored, "stored" in model[0].__dict__]


def _method_with_table(model: nn.Sequential) -> Callable[[], Any]:
    keeper = _Keeper()
    model[2].register_forward_hook(keeper.save_in_table)
    return lambda: [keeper.table["last"], len(keeper.table)]


def _partial(model: nn.Sequential) -> Callable[[], Any]:
    keeper = _Keeper()
    for number, module in enumerate(model):
        module.register_forward_hook(functools.partial(keeper.save_named, str(number)))
    return lambda: [keeper.table[name] for name in "012"]


def _object(model: nn.Sequential) -> Callable[[], Any]:
    keeper = _Keeper()
    model[0].register_forward_hook(keeper)
    return lambda: [keeper.stored]


def _slots(model: nn.Sequential) -> Callable[[], Any]:
    keeper = _Slotted()
    model[0].register_forward_hook(keeper)
    return lambda: [keeper.stored]


def _nonlocal(model: nn.Sequential) -> Callable[[], Any]:
    last: Any = None

    def hook(module: Any, args: Any, output: Tensor) -> None:
        nonlocal last
        last = output.detach()

    model[0].register_forward_hook(hook)
    return lambda: [last]


def _on_module(model: nn.Sequential) -> Callable[[], Any]:
    def hook(module: Any, args: Any, output: Tensor) -> None:
        module.last = output.detach()

    model[0].register_forward_hook(hook)
    model[2].register_forward_hook(hook)
    return lambda: [model[0].last, model[2].last]


def _pre_hook(model: nn.Sequential) -> Callable[[], Any]:
    seen: list[Any] = [None]

    def hook(module: Any, args: Any) -> None:
        seen[0] = args[0] * 1

    model[2].register_forward_pre_hook(hook)
    return lambda: [seen[0]]


_RECIPES = [
    _recipe, _own_dicts, _method, _method_with_table, _partial, _object, _slots, _nonlocal, _on_module, _pre_hook
]  # fmt: skip


def _told(found: list[Any]) -> list[Any]:
    return [one.tolist() if isinstance(one, Tensor) else one for one in found]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("recipe", _RECIPES)
def test_what_hooks_keep(recipe: Callable[[nn.Sequential], Callable[[], Any]]) -> None:
    eager, captured = _model(), _model()
    theirs, ours = recipe(eager), recipe(captured)
    capture(captured)
    with torch.no_grad():
        for number in range(6):
            x = torch.full((1, 2), float(number))
            assert torch.equal(captured(x), eager(x))
            assert _told(ours()) == _told(theirs())
    assert recordings(captured).replays >= 2 or recordings(captured).findings


_LAST: Any = None
_NEW: Any


def test_a_global_that_the_body_only_assigns() -> None:
    def body(x: Tensor) -> Tensor:
        global _LAST, _NEW
        y = x * 2
        _LAST = _NEW = y
        return y

    captured = capture(body)
    for number in range(6):
        result = captured(torch.full((1,), float(number)))
        assert float(_LAST) == float(_NEW) == float(result) == 2.0 * number
    assert recordings(captured).replays >= 2
