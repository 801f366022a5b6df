"""The decorator gives generator and coroutine functions back unchanged, with one finding that says so."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import AnnotationError, CaptureWarning, UncapturableError, capture, explain, recordings, report, warmup
from tests.support.decorated import bits
from tests.support.decorated import fresh as fresh

X = torch.arange(4.0)


def doubled(x: Tensor) -> Generator[Tensor, float, str]:
    """A generator that takes a factor at each step."""
    number = 1.0
    for _ in range(3):
        number = (yield x * number) or 2.0
    return "over"


async def awaited(x: Tensor, pause: float = 0.0) -> Tensor:
    await asyncio.sleep(pause)
    return x * 3


async def streamed(x: Tensor) -> AsyncIterator[Tensor]:
    for number in range(3):
        await asyncio.sleep(0)
        yield x + number


KINDS: dict[str, tuple[Callable[..., Any], str]] = {
    "generator": (doubled, "a generator"),
    "coroutine": (awaited, "a coroutine"),
    "asynchronous generator": (streamed, "an asynchronous generator"),
}


def again(function: Any) -> Any:
    """A copy of the function, which the library has not seen yet: it reports each function once."""
    return types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], str]:
    """A function that the library has not seen yet, and what its calls give, in the message's words."""
    function, gives = KINDS[request.param]
    return again(function), gives


def test_it_comes_back_as_it_is_with_one_finding(kind: tuple[Callable[..., Any], str]) -> None:
    function, gives = kind
    with pytest.warns(CaptureWarning) as said:
        same = capture(function)
    assert same is function
    (text,) = [str(warning.message) for warning in said]
    assert f"CG209 suspended-function: it is a function whose calls give {gives}" in text
    assert "capture the function that does the work between two" in text
    assert said[0].filename == __file__
    assert [finding.code for finding in recordings(same).findings] == ["CG209"]
    assert "CG209" in str(report())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a coroutine that nobody awaits
        warmup(same)(X)
        assert explain(same)(X).outcome
    assert recordings(same).recordings == 0
    with pytest.raises(AnnotationError, match="captured already"):
        capture(same)


def test_it_runs_as_before() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        steps, answer = capture(again(doubled)), capture(again(awaited), name="answer")
        stream = capture(max_recordings=2)(again(streamed))
    for _ in range(3):
        run = steps(X)
        assert [bits(next(run)), bits(run.send(4.0)), bits(next(run))] == [bits(X), bits(X * 4), bits(X * 2)]
        with pytest.raises(StopIteration) as over:
            next(run)
        assert over.value.value == "over"
        assert bits(asyncio.run(answer(X))) == bits(X * 3)

        async def gathered() -> list[Any]:
            return [bits(one) async for one in stream(X)]

        assert asyncio.run(gathered()) == [bits(X + number) for number in range(3)]
    assert inspect.isgeneratorfunction(steps)
    assert inspect.iscoroutinefunction(answer)
    assert inspect.isasyncgenfunction(stream)


def made() -> tuple[Any, Any, Any]:
    """A class with such methods, and what wraps such functions."""

    class Server:
        def __init__(self) -> None:
            self.weight = torch.ones(4)

        @capture
        async def answer(self, x: Tensor) -> Tensor:
            return x * self.weight

        @capture(static=["self.weight"])
        def stream(self, x: Tensor) -> Iterator[Tensor]:
            yield x + self.weight

        @staticmethod
        @capture
        def plain(x: Tensor) -> Iterator[Tensor]:
            yield x

    def pair(x: Tensor, y: float = 2.0) -> Iterator[Tensor]:
        yield x * y

    return Server, contextlib.contextmanager(capture(pair)), None


def test_methods_and_what_wraps_them() -> None:
    with pytest.warns(CaptureWarning, match="CG209") as said:
        kind, managed, part = made()
    assert len(said) == 4
    with pytest.warns(CaptureWarning, match="CG209"):
        part = capture(functools.partial(again(doubled)))
    server = kind()
    assert bits(asyncio.run(server.answer(X))) == bits(X)
    assert bits(next(server.stream(X))) == bits(X + 1)
    assert bits(next(kind.plain(X))) == bits(X)
    with managed(X) as value:
        assert bits(value) == bits(X * 2)
    assert bits(next(part(X))) == bits(X)
    assert recordings(server.answer).findings


def test_wrong_options_raise_and_an_error_that_is_asked_for_does() -> None:
    options: dict[str, Any] = {"max_recording": 3}
    with pytest.raises(AnnotationError, match="max_recordings"):
        capture(**options)(lambda x: (yield x))
    with pytest.raises(AnnotationError, match="nothing"):
        capture(static=["nothing"])(lambda x: (yield x))
    with pytest.raises(UncapturableError, match="CG209"):
        capture(fallback="error")(lambda x: (yield x))
