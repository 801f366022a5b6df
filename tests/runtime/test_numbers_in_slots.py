"""Numbers that objects keep in slots count as those in a ``__dict__``: what the body makes of them is found, made again
and guarded, whatever else of the class has the same name."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from tests.support.bucketed import assert_same
from tests.support.device import LIFTS
from tests.support.no_plans import no_plans as no_plans

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # where each value is another key
CALLS = 16
Body = Callable[[Any, Tensor], Tensor]


class Plain:
    """Slots, and no weak references."""

    __slots__ = ("best", "n", "t")

    def __init__(self) -> None:
        self.t, self.n, self.best = 0.1, 3, 1e9


@dataclass(slots=True)
class OfDataclass:
    """A dataclass."""

    t: float = 0.1
    n: int = 3
    best: float = 1e9


@attrs.define
class OfAttrs:
    """A class of attrs."""

    t: float = 0.1
    n: int = 3
    best: float = 1e9


class Above:
    """Two of three slots."""

    __slots__ = ("n", "t")


class WithDict(Above):
    """Slots, and a ``__dict__`` beside them."""

    def __init__(self) -> None:
        self.t, self.n, self.best = 0.1, 3, 1e9


class OfModule(Above, torch.nn.Module):
    """A module that has slots, too."""

    def __init__(self) -> None:
        super().__init__()
        self.t, self.n, self.best = 0.1, 3, 1e9


class Shadowed(Above):
    """A property stands before the slot."""

    __slots__ = ("best", "log")

    def __init__(self) -> None:
        self.t, self.n, self.best = 0.1, 3, 1e9

    @property
    def t(self) -> float:
        """The number in the slot."""
        return float(Above.t.__get__(self))  # type: ignore[attr-defined]

    @t.setter
    def t(self, value: float) -> None:
        Above.t.__set__(self, value)  # type: ignore[attr-defined]


class Twice(Above):
    """A slot stands before one of the base."""

    __slots__ = ("best", "t")

    def __init__(self) -> None:
        self.t, self.n, self.best = 0.1, 3, 1e9
        Above.t.__set__(self, 0.7)  # type: ignore[attr-defined]


class Hidden:
    """The name of the slot is another one in the class."""

    __slots__ = ("__n", "best", "t")

    def __init__(self) -> None:
        self.t, self.__n, self.best = 0.1, 3, 1e9

    @property
    def n(self) -> int:
        """The number in the slot."""
        return self.__n

    @n.setter
    def n(self, value: int) -> None:
        self.__n = value


class AboveDict:
    """Something else by the name is in the ``__dict__``."""

    __slots__ = ("__dict__", "t")

    def __init__(self) -> None:
        self.t, self.n, self.best = 0.1, 3, 1e9
        self.__dict__["t"] = 7.0


class Answering(Plain):
    """Answers for all that it does not have, ``__dict__`` among it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> float:
        return 0.25


class Listing(list[int]):
    """A list with slots."""

    __slots__ = ("best", "n", "t")

    def __init__(self) -> None:
        super().__init__([1, 2])
        self.t, self.n, self.best = 0.1, 3, 1e9


def count(state: Any, x: Tensor) -> Tensor:
    state.n += 1
    return x * 2


def time_step(state: Any, x: Tensor) -> Tensor:
    state.t += 0.013
    return torch.sin(x + state.t)


def mean(state: Any, x: Tensor) -> Tensor:
    state.n += 1
    state.t += (x.sum().item() - state.t) / state.n
    return x * 2


def best(state: Any, x: Tensor) -> Tensor:
    loss = x.sum().item()
    if loss < state.best:
        state.best = loss
    return x * 2


def every_third(state: Any, x: Tensor) -> Tensor:
    state.n += 1
    return x * 2 if state.n % 3 == 0 else x * 3


def deleting(state: Any, x: Tensor) -> Tensor:
    if hasattr(state, "t"):
        del state.t
        return x * 3
    state.t = 0.5
    return x * 2


def appending(state: Any, x: Tensor) -> Tensor:
    state.append(state.n)
    state.n += 1
    return x * 2


def of_the_dict(state: Any, x: Tensor) -> Tensor:
    state.__dict__["t"] += 0.5
    state.t *= 0.9
    now: float = state.__dict__["t"]
    return x * now


def of_the_base(state: Any, x: Tensor) -> Tensor:
    Above.t.__set__(state, Above.t.__get__(state) + state.t)  # type: ignore[attr-defined]
    return x * 2


FOLLOWING: list[Body] = [count, time_step, mean, best, every_third]
KINDS: list[type] = [Plain, OfDataclass, OfAttrs, WithDict, OfModule, Twice, Answering, Listing]
ODD: list[tuple[type, Body]] = [
    *[(kind, body) for kind in (Shadowed, Hidden, AboveDict) for body in (count, time_step, mean)],
    (Plain, deleting), (WithDict, deleting), (OfModule, deleting), (Listing, appending), (AboveDict, of_the_dict),
    (Twice, of_the_base),
]  # fmt: skip


def told(state: Any) -> str:
    """All that it keeps, bit for bit."""
    slots = [
        (base.__name__, name, held.__get__(state) if hasattr(state, name) else None)
        for base in type(state).__mro__
        for name, held in vars(base).items() if type(held) is types.MemberDescriptorType and base is not torch.nn.Module
    ]  # fmt: skip
    own = {} if isinstance(state, (torch.nn.Module, Answering)) else getattr(state, "__dict__", {})
    return repr((slots, own, list(state) if isinstance(state, list) else state.best))


def replays(kind: type, body: Body) -> int:
    """Compare the body with its twin in eager, call by call; now and then the caller sets a number."""
    eager, ours = kind(), kind()
    step = capture(lambda x: body(ours, x))
    for call in range(CALLS):
        for state in (eager, ours) if call == 10 else ():
            state.t, state.n = 0.75, 8
        x = torch.randn(4, 3)
        assert_same(step(x), body(eager, x))
        assert told(ours) == told(eager)
    return recordings(step).replays


@pytest.mark.one_in(6)
@pytest.mark.parametrize("body", FOLLOWING, ids=lambda body: body.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_recordings_go_on_with_numbers_in_slots(kind: type, body: Body) -> None:
    assert replays(kind, body) >= CALLS // 3 or not LIFTS


@pytest.mark.parametrize(("kind", "body"), ODD, ids=lambda one: one.__name__)
def test_slots_that_a_look_up_does_not_find(kind: type, body: Body) -> None:
    replays(kind, body)


def test_slots_of_the_receiver() -> None:
    class Stepping(Plain):
        __slots__ = ()

        @capture
        def step(self, x: Tensor) -> Tensor:
            return time_step(self, x)

    eager, ours = Plain(), Stepping()
    for _ in range(CALLS):
        x = torch.randn(4, 3)
        assert_same(ours.step(x), time_step(eager, x))
        assert ours.t.hex() == eager.t.hex()
    assert recordings(ours.step).replays > CALLS - 6 or not LIFTS
