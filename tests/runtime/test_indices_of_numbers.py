"""C code takes a whole number as an index or a length, calls no method of it that a run with noted numbers would see,
and gives a plain number: ``len(range(step))``. Something may follow from that for one step in many, so that no other
number which is tried shows it."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Iterator
from operator import index
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import CaptureWarning, config, recordings
from tests.support.training_twins import CALLS, both, data

FAR, TEXT = 27, "x" * 5000


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with warnings.catch_warnings(), config.patch(drop_slow=False, cache=False), torch.no_grad():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


PLAIN: dict[str, Callable[[Any], int]] = {
    "index": index,
    "operator.index": operator.index,
    "range": lambda step: len(range(step)),
    "last of range": lambda step: range(step + 1)[-1],
    "loop": lambda step: sum(1 for _ in range(step)),
    "slice": lambda step: len(TEXT[:step]),
    "item": lambda step: range(5000)[step],
    "enumerate": lambda step: next(iter(enumerate("a", step)))[0],
    "islice": lambda step: len([*itertools.islice(TEXT, step)]),
    "repeat": lambda step: len("a" * step),
    "bytes": lambda step: len(bytes(step)),
    "format": lambda step: len(f"{'':{step}}"),
    "round": lambda step: int(round(10.0**9 + step, -0)) - 10**9,
}


def asked(x: Tensor, step: int, plain: int) -> Tensor:
    y = x + 1 if step % 4 == 0 else x
    return y * 2 if plain % 1000 == FAR else y * 3


def multiplied(x: Tensor, step: int, plain: int) -> Tensor:
    y = x * (step * 0.37)
    return y * 2 if plain % 1000 == FAR else y * 3


def multiplied_and_asked(x: Tensor, step: int, plain: int) -> Tensor:
    y = x * (step * 0.37) if step % 4 else x
    return y * 2 if plain % 1000 == FAR else y * 3


class State:
    step = 0


def of_an_argument(body: Callable[..., Any], plain: Callable[[Any], int], wrap: Any) -> Any:
    steps = itertools.count()
    run = wrap(lambda x, step: body(x, step, plain(step)))
    return lambda x: run(x, next(steps)), list


def of_a_count(body: Callable[..., Any], plain: Callable[[Any], int], wrap: Any) -> Any:
    state = State()

    def run(x: Tensor) -> Any:
        state.step += 1
        return body(x, state.step, plain(state.step))

    return wrap(run), lambda: state.step


@pytest.mark.one_in(4)
@pytest.mark.parametrize("plain", PLAIN)
@pytest.mark.parametrize("body", [asked, multiplied, multiplied_and_asked])
@pytest.mark.parametrize("kept", [of_an_argument, of_a_count])
def test_equals_eager(kept: Callable[..., Any], body: Callable[..., Any], plain: str) -> None:
    assert CALLS > FAR + 2
    both(lambda wrap: kept(body, PLAIN[plain], wrap), lambda number: (data(number),))


def test_what_an_answer_tells_may_be_an_index() -> None:
    """A remainder of two is told by itself."""
    scales = [0.3, 0.7]

    def make(wrap: Any) -> Any:
        steps = itertools.count()
        run = wrap(lambda x, step: x * scales[step % 2])
        return lambda x: run(x, next(steps)), list

    assert recordings(both(make, lambda number: (data(number),))).replays > CALLS // 2
