"""Objects that replace others: one that differs in its tensors alone is replayed; with any other, values are
eager's."""

from __future__ import annotations

import copy
import functools
import gc
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, recordings
from capture.tree import thread_trees
from tests.support.device import DEVICE, REBINDS


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference, no plans on disk, no tree of another test."""
    thread_trees.forget_trees()
    torch.manual_seed(0)
    with torch.no_grad(), config.patch(cache=False):
        yield


class Schedule:
    def __init__(self, scale: float, words: dict[str, int] | None = None) -> None:
        self.scale, self.words = scale, words or {"a": 1}


class Adapter(nn.Module):
    pick: Any = operator.itemgetter(0)

    def __init__(self, width: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, width, bias=bias), nn.Linear(width, 8)
        self.factor = 0.5
        self.to(DEVICE)

    @override
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(torch.relu(self.down(x))) * self.pick((self.factor, 3.0))
        return result


class Other(Adapter):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter, self.second = nn.Linear(8, 8, device=DEVICE), Adapter(), Adapter()
        self.schedule, self.known = Schedule(2.0), 0
        self.table: dict[Any, float] = {}
        self.favourite: Any = None

    @override
    def forward(self, x: Tensor) -> Any:
        y = self.base(x) + self.adapter(x) - self.second(x) * self.schedule.scale
        if self.adapter is self.favourite:
            y = y * 3
        y = y * self.table.get(self.adapter, 1.0)
        return y * len(self.schedule.words)


class Asking(Model):
    @override
    def forward(self, x: Tensor) -> Any:
        y = self.adapter(x)
        return y * 2 if id(self.adapter) == self.known else y


class Handing(Model):
    @override
    def forward(self, x: Tensor) -> Any:
        return self.adapter(x), self.schedule, self.adapter.down.weight


def leaves(value: Any) -> list[Any]:
    found = value if isinstance(value, tuple) else (value,)
    return [one.tolist() if isinstance(one, Tensor) else id(one) for one in found]


def shared(model: Model) -> Adapter:
    """An adapter whose two layers share one weight."""
    made = Adapter(8)
    made.up.weight = made.down.weight
    return made


def kept(model: Model) -> Adapter:
    """An adapter whose weight is also that of another layer of the model."""
    made = Adapter()
    made.up.weight = model.second.up.weight
    return made


def hooked(model: Model) -> Adapter:
    made = Adapter()
    made.down.register_forward_hook(lambda module, args, result: result * 2)
    return made


def with_factor(model: Model) -> Adapter:
    made = Adapter()
    made.factor = 0.25
    return made


def with_forward(model: Model) -> Adapter:
    made = Adapter()
    made.forward = lambda x: x * 2  # type: ignore[method-assign]
    return made


def swapped(model: Model) -> Adapter:
    """Exchange the model's adapter and its second one."""
    before, model.second = model.second, model.adapter
    return before


def favourite(model: Model) -> Adapter:
    model.favourite = made = Adapter()
    return made


def in_table(model: Model) -> Adapter:
    made = Adapter()
    model.table[made] = 4.0
    return made


def with_getter(at: int) -> Adapter:
    made = Adapter()
    made.pick = operator.itemgetter(at)
    return made


def the_second(model: Model) -> Adapter:
    return model.second


ADAPTERS: dict[str, tuple[Callable[[Model], Adapter], bool]] = {
    "another one": (lambda _: Adapter(), True),
    "a copy": (lambda model: copy.deepcopy(model.adapter), True),
    "each in the other's place": (swapped, True),
    "a wider one": (lambda _: Adapter(6), False),
    "without a bias": (lambda _: Adapter(bias=False), False),
    "of another class": (lambda _: Other(), False),
    "that takes no gradients": (lambda _: Adapter().requires_grad_(False), False),
    "with one weight twice": (shared, False),
    "with a weight that is elsewhere, too": (kept, False),
    "with a hook": (hooked, False),
    "with another factor": (with_factor, False),
    "with a forward of its own": (with_forward, False),
    "the favourite": (favourite, False),
    "in the table": (in_table, False),
    "with something of C in it": (lambda _: with_getter(1), False),
    "the second one": (the_second, False),
    "being evaluated": (lambda _: Adapter().eval(), False),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", ADAPTERS)
def test_another_adapter(name: str) -> None:
    """Values are eager's with each adapter. One that differs in its tensors alone needs no new watched run or
    recording."""
    made_of, is_same = ADAPTERS[name]
    model, x = Model(), torch.randn(3, 8, device=DEVICE)
    f = capture(model)
    for _ in range(3):
        f(x)
    before, first = recordings(f), model.adapter
    for _ in range(2):
        model.adapter = made_of(model)
        for _ in range(4):
            assert leaves(f(x)) == leaves(Model.forward(model, x))
    counts = recordings(f)
    if is_same and REBINDS:
        assert (counts.observations, counts.recordings) == (before.observations, before.recordings)
        assert counts.rebinds >= 2
    model.adapter = first
    for _ in range(4):
        assert leaves(f(x)) == leaves(Model.forward(model, x))


@pytest.mark.parametrize("kind", [Asking, Handing])
def test_an_object_that_is_more_than_what_it_holds(kind: type[Model]) -> None:
    """The body asks for the adapter's ``id``, or returns it: another object is then another result."""
    model, x = kind(), torch.randn(3, 8, device=DEVICE)
    f = capture(model)
    first, second = model.adapter, Adapter()
    model.known = id(second)
    for adapter in (first, second, first, second, first):
        model.adapter, model.schedule = adapter, Schedule(2.0)
        for _ in range(3):
            assert leaves(f(x)) == leaves(kind.forward(model, x))


@pytest.mark.parametrize(("scale", "words", "is_same"), [(2.0, None, True), (3.0, None, False), (2.0, {"b": 1}, False)])
def test_another_plain_object(scale: float, words: dict[str, int] | None, is_same: bool) -> None:
    model, x = Model(), torch.randn(3, 8, device=DEVICE)
    f = capture(model)
    for _ in range(3):
        f(x)
    before = recordings(f)
    model.schedule = Schedule(scale, words)
    for _ in range(3):
        assert leaves(f(x)) == leaves(Model.forward(model, x))
    counts = recordings(f)
    assert (counts.recordings == before.recordings) == is_same


@functools.lru_cache
def factor_of(number: int) -> list[float]:
    return [number / 2]


class Cached(Model):
    @override
    def forward(self, x: Tensor) -> Any:
        return self.adapter(x) * self.schedule.scale * factor_of(3)[0]


def test_beside_results_that_are_cached() -> None:
    """What a function keeps of its results stays; and it does not stay."""
    model, x = Cached(), torch.randn(3, 8, device=DEVICE)
    f = capture(model)
    for _ in range(3):
        f(x)
    before = recordings(f)
    model.schedule, model.adapter = Schedule(2.0), Adapter()
    for _ in range(3):
        assert leaves(f(x)) == leaves(Cached.forward(model, x))
    if REBINDS:
        assert recordings(f).recordings == before.recordings
    model.schedule = Schedule(2.0)
    factor_of.cache_clear()
    factor_of(3)[0] = 7.0
    for _ in range(3):
        assert leaves(f(x)) == leaves(Cached.forward(model, x))
    factor_of.cache_clear()


def test_adapters_that_come_and_go() -> None:
    """Adapters that nobody keeps: a new one may get the memory and the ``id`` of an earlier one."""
    model, x = Model(), torch.randn(3, 8, device=DEVICE)
    f = capture(model)
    for number in range(20):
        model.adapter = Adapter(4 if number % 7 else 6)
        gc.collect()
        for _ in range(3):
            assert leaves(f(x)) == leaves(Model.forward(model, x))


def test_gradients_of_an_adapter_that_was_swapped() -> None:
    """In a region gradients go to the parameters of the adapter that is there now."""
    model, adapters, x = Model(), [Adapter() for _ in range(3)], torch.randn(3, 8, device=DEVICE)
    twin = copy.deepcopy(model)
    twins = copy.deepcopy(adapters)
    f = capture(model)
    with torch.enable_grad():
        for call in range(12):
            model.adapter, twin.adapter = adapters[call // 3 % 3], twins[call // 3 % 3]
            f(x).square().mean().backward()
            Model.forward(twin, x).square().mean().backward()
            for module, twin_module in zip((*adapters, model), (*twins, twin), strict=True):
                for ours, eager in zip(module.parameters(), twin_module.parameters(), strict=True):
                    assert (ours.grad is None) == (eager.grad is None)
                    assert ours.grad is None or torch.equal(ours.grad, eager.grad)  # type: ignore[arg-type]
    assert recordings(f).replays > 0
