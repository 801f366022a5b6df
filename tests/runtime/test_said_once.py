"""What a body says of some of the numbers that it reads: eager says it once, and only of these."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from capture import CaptureWarning, capture, recordings
from tests.support.device import EXECUTES
from tests.support.observed import bits, fresh, x_of

__all__ = ["fresh"]

_log = logging.getLogger(__name__)


def prints(x: Tensor) -> Tensor:
    largest = x.max().item()
    if largest > 1.5:
        print(f"large: {largest:.3f}")
    return x * 2


def logs(x: Tensor) -> Tensor:
    largest = x.max().item()
    if largest > 1.5:
        _log.warning("large: %f", largest)
    return x * 2


def warns(x: Tensor) -> Tensor:
    largest = x.max().item()
    if largest > 1.5:
        warnings.warn("large", stacklevel=1)
    return x * 2


def warns_of_it(x: Tensor) -> Tensor:
    largest = x.max().item()
    if largest > 1.5:
        warnings.warn(f"large: {largest}", stacklevel=1)
    return x * 2


def first(number: int) -> bool:
    return number == 0


def third(number: int) -> bool:
    return number == 2


def some(number: int) -> bool:
    return number % 5 == 4


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shown", ["always", "default"])
@pytest.mark.parametrize("is_large", [first, third, some])
@pytest.mark.parametrize("body", [prints, logs, warns, warns_of_it])
def test_said_as_often_as_in_eager(
    body: Callable[[Tensor], Tensor], is_large: Callable[[int], bool], shown: Any, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def run(called: Callable[[Tensor], Tensor]) -> list[Any]:
        globals().pop("__warningregistry__", None)
        seen = list[Any]()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(shown)
            warnings.simplefilter("ignore", CaptureWarning)
            for number in range(20):
                x = x_of(number, 2, 3).clamp(-1, 1) + (number / 64 + 1 if is_large(number) else 0)
                if is_large(number):
                    x[0, 0] = 2.5 + number / 64
                result = bits(called(x))
                said = capsys.readouterr().out, list(caplog.messages), [str(one.message) for one in caught]
                seen.append((result, said))
                caplog.clear()
                caught.clear()
        return seen

    called = capture(body)
    expected = run(body)
    assert run(called) == expected
    assert any(any(said) for _, said in expected)
    if EXECUTES and is_large is third:
        assert recordings(called).replays >= 8, recordings(called)


def test_a_try_that_the_body_catches() -> None:
    """The body takes what ends a try for an error of its own."""
    said = list[str]()

    class Keeps(logging.Handler):
        @override
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    def body(x: Tensor) -> Tensor:
        largest = x.max().item()
        if largest > 1.5:
            try:
                _log.warning("large: %f", largest)
            except Exception:  # noqa: BLE001 - as others write it
                return -x
        return x * 2

    called, handler = capture(body), Keeps()
    _log.addHandler(handler)
    try:
        for number in range(16):
            x = torch.full((3,), 2.0 + number if number % 5 == 4 else 0.25 + number / 64)
            assert torch.equal(called(x), x * 2), number
    finally:
        _log.removeHandler(handler)
    assert said == [f"large: {number + 2:f}" for number in range(16) if number % 5 == 4]
