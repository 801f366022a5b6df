"""State that can be reached only through callbacks that a library holds, or through objects that are gone."""

from __future__ import annotations

import copy
import copyreg
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typing_extensions import override

from capture import capture, recordings

Made = tuple[Callable[[torch.Tensor], torch.Tensor], list[Any]]


def handler_with_a_closure() -> Made:
    logger, told = logging.Logger("own", logging.INFO), list[Any]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)

    def body(x: torch.Tensor) -> torch.Tensor:
        logger.info("shape %s", tuple(x.shape))
        return x * 2 + 1

    return body, told


class ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def handler_of_a_class() -> Made:
    logger, handler = logging.Logger("own", logging.INFO), ListHandler()
    logger.addHandler(handler)

    def body(x: torch.Tensor) -> torch.Tensor:
        logger.info("shape %s", tuple(x.shape))
        return x * 2 + 1

    return body, handler.told


def method_del() -> Made:
    told = list[Any]()

    class Scope:
        def __del__(self) -> None:
            told.append("gone")

    def body(x: torch.Tensor) -> torch.Tensor:
        scope = Scope()
        y = x * 2
        del scope
        return y + 1

    return body, told


def property_with_a_closure() -> Made:
    told = list[Any]()

    class Scale(torch.nn.Module):
        @property
        def scale(self) -> float:
            told.append("asked")
            return 2.0

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + 1

    return Scale(), told


def call_of_a_metaclass() -> Made:
    told = list[Any]()

    class Counting(type):
        @override
        def __call__(cls, *args: Any) -> Any:
            told.append(cls.__name__)
            return super().__call__(*args)

    class Holder(metaclass=Counting):
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    return lambda x: Holder(x).value * 2 + 1, told


def registered_for_copies() -> Made:
    told = list[Any]()

    class Thing:
        pass

    def reduce(_: Thing) -> Any:
        told.append("copied")
        return Thing, ()

    copyreg.pickle(Thing, reduce)
    original = Thing()

    def body(x: torch.Tensor) -> torch.Tensor:
        copy.copy(original)
        return x * 2 + 1

    return body, told


def registered_divergence() -> Made:
    told = list[Any]()

    class Mine(torch.distributions.Normal):
        pass

    @torch.distributions.kl.register_kl(Mine, Mine)  # type: ignore[untyped-decorator]
    def _divergence(p: Mine, q: Mine) -> torch.Tensor:
        told.append("asked")
        return (p.loc - q.loc).abs()

    def body(x: torch.Tensor) -> torch.Tensor:
        p, q = (Mine(loc, torch.ones_like(x), validate_args=False) for loc in (x, x * 2))
        return torch.distributions.kl_divergence(p, q)

    return body, told


def item_of_a_class_of_dicts() -> Made:
    told = list[Any]()

    class Noting(dict[str, Any]):
        @override
        def __setitem__(self, name: str, value: Any) -> None:
            told.append(name)
            super().__setitem__(name, value)

    values = Noting()

    def body(x: torch.Tensor) -> torch.Tensor:
        values["latest"] = torch.mul(x, 2)
        return torch.add(values["latest"], 1)

    return body, told


KINDS = [
    item_of_a_class_of_dicts,
    handler_with_a_closure, handler_of_a_class, method_del, property_with_a_closure, call_of_a_metaclass,
    registered_for_copies, registered_divergence,
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", KINDS)
def test_what_it_leaves_is_left_in_each_call(make: Callable[[], Made]) -> None:
    inputs = [torch.full((3,), float(number)) for number in range(8)]
    (eager, told_eagerly), (body, told) = make(), make()
    captured = capture(body)
    with torch.no_grad():
        expected = [(eager(x), list(told_eagerly)) for x in inputs]
        for x, (result, left) in zip(inputs, expected, strict=True):
            assert torch.equal(captured(x), result)
            assert told == left
    assert recordings(captured).replays >= 3


def test_a_handler_that_is_added_and_a_level_that_is_set_later() -> None:
    def runs(wrap: Callable[..., Any]) -> list[int]:
        logger, handlers = logging.Logger("own", logging.INFO), [ListHandler(), ListHandler()]
        logger.addHandler(handlers[0])

        @wrap
        def body(x: torch.Tensor) -> torch.Tensor:
            logger.info("shape %s", tuple(x.shape))
            return x * 2 + 1

        counts = []
        for number in range(16):
            if number == 6:
                logger.addHandler(handlers[1])
            if number in (10, 13):
                logger.setLevel(logging.ERROR if number == 10 else logging.INFO)
            body(torch.ones(3))
            counts += [len(handler.told) for handler in handlers]
        return counts

    with torch.no_grad():
        assert runs(capture) == runs(lambda body: body)


def test_an_operator_that_is_written_in_python_leaves_it_once() -> None:
    told = list[Any]()

    @torch.library.custom_op("capture_tests::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        told.append("ran")
        return x * 2

    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.add(noted(x), 1)

    with torch.no_grad():
        for number in range(6):
            body(torch.ones(3))
            assert len(told) == number + 1
