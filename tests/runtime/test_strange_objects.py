"""Objects whose special methods raise or that lead back to themselves, as arguments, in modules, in closures and as
results: each call gives what eager gives."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from typing_extensions import override

from capture import capture, config, recordings
from tests.support.device import DEVICE


@pytest.fixture(autouse=True)
def _forgiving() -> Iterator[None]:
    with config.patch(strict=False):
        yield


class Irreps(tuple):  # type: ignore[type-arg]  # noqa: SLOT001 - as in e3nn
    @override
    def __len__(self) -> int:
        raise NotImplementedError


class Strange(list[Any]):
    @override
    def __iter__(self) -> Any:
        raise ArithmeticError

    @override
    def __getitem__(self, at: Any) -> Any:
        raise ArithmeticError


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    @override
    def __eq__(self, other: object) -> bool:
        raise ArithmeticError


class Closed:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Answers:
    """Raises ``ArithmeticError``, where others raise ``AttributeError``."""

    def __getattr__(self, name: str) -> Any:
        raise ArithmeticError(name)


def _loop() -> Any:
    found: list[Any] = []
    found.append(found)
    return found


def _ring() -> Any:
    found: dict[str, Any] = {}
    found["ring"] = [found]
    return found


class Pair(NamedTuple):
    first: Any


class Meta(type):
    pass


class Made(metaclass=Meta):
    pass


_ODD: list[Callable[[], Any]] = [
    lambda: Irreps((1, 2)), lambda: Strange([1]), Unhashable, lambda: Closed(torch.ones(2)), Answers, _loop, _ring,
    lambda: Pair(_loop()), lambda: [Irreps((1,))], lambda: {"a": Strange([1])}, Made,
]  # fmt: skip


def _kinds_of_use(odd: Any) -> list[Callable[[Any], Any]]:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = odd

        @override
        def forward(self, x: torch.Tensor) -> Any:
            return x * 2 + (self.odd is None)

    def names(x: torch.Tensor) -> Any:
        return x * 2 + (odd is None)

    def gives(x: torch.Tensor) -> Any:
        return x * 2, odd

    def keeps(x: torch.Tensor) -> Any:
        kept["odd"] = odd
        return x * 2

    kept: dict[str, Any] = {}
    return [lambda wrap: wrap(Holds()), lambda wrap: wrap(names), lambda wrap: wrap(gives), lambda wrap: wrap(keeps)]


@pytest.mark.one_in(18)
@pytest.mark.parametrize(
    "with_gradients", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "gradients"]
)
@pytest.mark.parametrize("make", _ODD, ids=range(len(_ODD)))
def test_objects_of_strange_classes(make: Callable[[], Any], with_gradients: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for build in _kinds_of_use(make()):
            eager, captured = build(lambda target: target), build(capture)
            for number in range(5):
                x = torch.full((2,), float(number), requires_grad=with_gradients)
                result, expected = captured(x), eager(x)
                if isinstance(expected, tuple):
                    assert result[1] is expected[1]
                    result, expected = result[0], expected[0]
                assert torch.equal(result, expected)
        takes, odd = capture(lambda x, odd: x * 2, name="takes"), make()
        for number in range(5):
            x = torch.full((2,), float(number), requires_grad=with_gradients)
            assert torch.equal(takes(x, odd), x * 2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", [_loop, _ring, lambda: Pair(_loop())])
@pytest.mark.parametrize("use", [1, 2, 3, "argument"])
def test_what_contains_itself_does_not_use_up_the_stack(make: Callable[[], Any], use: Any) -> None:
    """A finalizer that the collector runs at the end of the stack fails, and what it had to do is lost."""
    odd = make()
    takes = capture(lambda x, odd: x * 2, name="takes")
    captured = (lambda x: takes(x, odd)) if use == "argument" else _kinds_of_use(odd)[use](capture)
    depth, deepest = 0, 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal depth, deepest
        depth += {"call": 1, "return": -1}.get(event, 0)
        deepest = max(deepest, depth)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.setprofile(count)
        try:
            for number in range(4):
                captured(torch.full((2,), float(number)))
        finally:
            sys.setprofile(None)
    assert 5 < deepest < 600


def _list() -> tuple[Any, Callable[[Any], float], Callable[[Any], None]]:
    made: list[Any] = [2.0]
    made.append(made)
    return made, lambda kept: float(kept[1][1][0]), lambda kept: kept.__setitem__(0, 5.0)


def _dict() -> tuple[Any, Callable[[Any], float], Callable[[Any], None]]:
    made: dict[str, Any] = {"factor": 2.0}
    made["below"] = {"above": made}
    return made, lambda kept: float(kept["below"]["above"]["factor"]), lambda kept: kept.update(factor=5.0)


def _tuple() -> tuple[Any, Callable[[Any], float], Callable[[Any], None]]:
    inner = list[Any]()
    made = (inner, 2.0)
    inner.append(made)
    return made, lambda kept: float(len(kept[0][0][0])), lambda kept: kept[0].append(1)


@pytest.mark.parametrize("make", [_list, _dict, _tuple])
def test_state_that_contains_itself_is_followed(make: Callable[[], Any]) -> None:
    kept, read, change = make()
    captured = capture(lambda x: x * read(kept))
    for number in range(10):
        if number == 5:
            assert recordings(captured).replays > 0
            change(kept)
        x = torch.full((3,), float(number), device=DEVICE)
        assert torch.equal(captured(x), x * read(kept)), number
    assert recordings(captured).replays > 4
