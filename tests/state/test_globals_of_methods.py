"""Objects in globals that only methods name: a replay does again what the methods do with them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE

SOURCE = """
import contextvars, itertools, random, torch

LOG, TABLE, COUNTER, RANDOM, VARIABLE = [], {"n": []}, itertools.count(), random.Random(0), contextvars.ContextVar("v")
TOTAL = torch.zeros(2)

def note():
    LOG.append(1)

class Meta(type):
    def __call__(cls, *args):
        LOG.append(1)
        return super().__call__(*args)

class Helper:
    def add(self): LOG.append(1)
    def inner(self):
        def inside(): LOG.append(1)
        inside()
    @property
    def one(self):
        LOG.append(1)
        return 1
    @classmethod
    def of_class(cls): LOG.append(1)
    @staticmethod
    def alone(): LOG.append(1)
    def deep(self): TABLE["n"].append(1)
    def by_function(self): note()
    def __getitem__(self, at):
        LOG.append(1)
        return 1
    def tensor(self): return TOTAL.add_(1)
    def count(self): return next(COUNTER)
    def draw(self): return RANDOM.random()
    def variable(self): VARIABLE.set(VARIABLE.get(0) + 1)

class Below(Helper): pass
class Made:
    def __init__(self): LOG.append(1)
class OfMeta(metaclass=Meta): pass
"""


def module() -> Any:
    made: Any = types.ModuleType("methods_of_a_test")
    sys.modules[made.__name__] = made
    exec(SOURCE, made.__dict__)  # noqa: S102 - the source above
    made.TOTAL = made.TOTAL.to(DEVICE)
    return made


class Net(nn.Module):
    def __init__(self, helper: Any) -> None:
        super().__init__()
        self.helper = helper

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.helper.add()
        return x * 2


def and_twice(act: Callable[[], object]) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        act()
        return x * 2

    return body


def times(number: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * number()


PROGRAMS: dict[str, Callable[[Any, Any], Callable[[Tensor], Tensor]]] = {
    "a method": lambda _, helper: and_twice(lambda: helper.add()),
    "a bound method": lambda _, helper: and_twice(helper.add),
    "a function in a method": lambda _, helper: and_twice(lambda: helper.inner()),
    "a property": lambda _, helper: times(lambda: helper.one),
    "a class method": lambda made, _: and_twice(made.Helper.of_class),
    "a static method": lambda made, _: and_twice(made.Helper.alone),
    "a list in a dict": lambda _, helper: and_twice(lambda: helper.deep()),
    "by a function": lambda _, helper: and_twice(lambda: helper.by_function()),
    "an index": lambda _, helper: times(lambda: helper[0]),
    "a tensor": lambda _, helper: times(lambda: helper.tensor()),
    "an iterator": lambda _, helper: times(lambda: helper.count()),
    "a generator": lambda _, helper: times(lambda: helper.draw()),
    "a context variable": lambda _, helper: and_twice(lambda: helper.variable()),
    "an inherited method": lambda made, _: and_twice(made.Below().add),
    "of an object that is made": lambda made, _: and_twice(lambda: made.Helper().add()),
    "making an object": lambda made, _: and_twice(lambda: made.Made()),
    "a metaclass": lambda made, _: and_twice(lambda: made.OfMeta()),
    "a part of a module": lambda _, helper: Net(helper),
}
EAGER = {"an iterator", "a generator", "a context variable"}  # other values follow in each call


@pytest.mark.filterwarnings("ignore:CG202")
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_method_does_with_globals(name: str) -> None:
    outcomes, replays = [], 0
    for is_ours in (True, False):
        made = module()
        function: Any = PROGRAMS[name](made, made.Helper())
        function = capture(function) if is_ours else function
        with torch.no_grad():
            results = [function(torch.ones(2, device=DEVICE)).tolist() for _ in range(8)]
        outcomes.append((results, len(made.LOG), len(made.TABLE["n"]), made.TOTAL.tolist(), made.VARIABLE.get(0)))
        replays = recordings(function).replays if is_ours else replays
    assert outcomes[0] == outcomes[1]
    assert (replays >= 4) != (name in EAGER)
