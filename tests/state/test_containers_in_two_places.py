"""A container or object that the body leaves in two places is one: what a caller changes in the one shows in the
other, after a replay, too."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings

CALLS, REPLAYED = 14, 8
"""How many calls are made, and how many of them are replays: on a GPU the first two recordings may be made anew."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


@dataclasses.dataclass
class Fields:
    total: Tensor


class Plain:
    def __init__(self, total: Tensor) -> None:
        self.total = total


class Pair(NamedTuple):
    total: Tensor
    number: int


MAKE: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda total: [total, 1],
    "dict": lambda total: {"total": total},
    "tuple": lambda total: (total, []),
    "named tuple": lambda total: Pair(total, 2),
    "ordered dict": lambda total: collections.OrderedDict(total=total),
    "deque": lambda total: collections.deque([total], maxlen=4),
    "dataclass": Fields,
    "object": Plain,
    "nested": lambda total: {"inner": [{"total": total}]},
}

Place = Callable[[Any, Any], Any]


def kept_and_returned(state: Any, made: Any) -> Any:
    state.last = made
    return made


def kept_inside(state: Any, made: Any) -> Any:
    state.last = [made]
    return {"made": made}


def kept_twice(state: Any, made: Any) -> Any:
    state.last, state.best = made, (made,)
    return None


def returned_twice(state: Any, made: Any) -> Any:
    return made, [made]


def grown(state: Any, made: Any) -> Any:
    state.all.append(made)
    state.last = made
    return None


PLACES = (kept_and_returned, kept_inside, kept_twice, returned_twice, grown)


def contained(value: Any, into: list[Any]) -> list[Any]:
    """All containers and objects in a structure, in order."""
    if isinstance(value, dict):
        members = list(value.values())
    elif isinstance(value, (list, tuple, collections.deque)):
        members = list(value)
    elif isinstance(value, (Fields, Plain, types.SimpleNamespace)):
        members = list(vars(value).values())
    else:
        return into
    into.append(value)
    for member in members:
        contained(member, into)
    return into


def pattern(value: Any) -> list[int]:
    """For each container, the first of all that is the same object."""
    ids = [id(one) for one in contained(value, [])]
    return [ids.index(one) for one in ids]


def totals(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    members = value.values() if isinstance(value, dict) else value
    if isinstance(value, (Fields, Plain, types.SimpleNamespace)):
        members = vars(value).values()
    is_one = isinstance(value, (dict, list, tuple, collections.deque, Fields, Plain, types.SimpleNamespace))
    return [total for member in members for total in totals(member)] if is_one else []


@pytest.mark.one_in(4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MAKE)
def test_it_is_one_object(kind: str, place: Place) -> None:
    told: list[list[Any]] = []
    for keep in (_as_it_is, capture):
        state = types.SimpleNamespace(last=None, best=None, all=[])
        body = keep(_leaving(state, MAKE[kind], place))
        told.append([])
        for number in range(CALLS):
            left = body(torch.full((2,), float(number))), state
            told[-1].append((pattern(left), [total.clone() for total in totals(left)]))
    for (eager, values), (ours, others) in zip(*told, strict=True):
        assert eager == ours
        assert len(values) == len(others)
        assert all(map(torch.equal, values, others))
    assert recordings(body).replays >= REPLAYED


def _as_it_is(body: Any) -> Any:
    return body


def _leaving(state: Any, make: Callable[[Tensor], Any], place: Place) -> Callable[[Tensor], Any]:
    return lambda x: place(state, make(x.sum()))
