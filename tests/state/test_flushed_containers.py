"""A body that hands back a container and puts a new one into its place gives the former one, in the call that records,
too."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from tests.support.device import AGAIN, DEVICE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


def list_of_an_object(state: Any, x: Tensor) -> Any:
    out, state.now = state.now, [x.sum()]
    return out


def nested_in_a_dict(state: Any, x: Tensor) -> Any:
    state.table["old"] = state.table["now"]
    state.table["now"] = {"total": x.sum()}
    return {"old": state.table["old"]}


def kept_and_returned(state: Any, x: Tensor) -> Any:
    state.before = state.now
    state.now = [x.sum()]
    return x * 2, state.before


def swapped(state: Any, x: Tensor) -> Any:
    state.now, state.other = state.other, state.now
    return state.now, x + 1


def of_an_argument(state: Any, x: Tensor, given: Any) -> Any:
    out, given["now"] = given["now"], [x.sum()]
    return out


def texts_of_an_argument(state: Any, x: Tensor, given: Any) -> Any:
    out, given["words"] = given["words"], ["new"]
    return out, x * 2


BODIES = (list_of_an_object, nested_in_a_dict, kept_and_returned, swapped, of_an_argument, texts_of_an_argument)


def _text(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _text(member) for name, member in value.items()}
    return [_text(member) for member in value] if isinstance(value, (list, tuple)) else value


def _as_it_is(body: Any) -> Any:
    return body


def _with(state: Any, body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *rest: body(state, x, *rest)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("body", BODIES)
def test_the_former_one_is_given(body: Callable[..., Any]) -> None:
    told = []
    for keep in (_as_it_is, capture):
        state = types.SimpleNamespace(now=[1.0], other=[1.0], before=None, table={"now": {"total": 3.0}, "old": None})
        run: Any = keep(_with(state, body))
        results = []
        for number in range(7):
            given = {"now": [torch.ones(1, device=DEVICE)], "words": ["a", "b"]}
            owners = [state.now, state.other, state.table["now"], given["now"], given["words"]]
            rest = (given,) if "argument" in body.__name__ else ()
            result = run(torch.full((2,), float(number), device=DEVICE), *rest)
            handed = [result, *(result.values() if isinstance(result, dict) else result)]
            same = [any(one is owner for one in handed) for owner in owners]
            results.append((same, _text(result), _text(vars(state)), _text(given)))
        told.append(results)
    assert told[0] == told[1]
    assert recordings(run).replays >= 2 * AGAIN
