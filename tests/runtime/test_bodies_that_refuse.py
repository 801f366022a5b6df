"""Bodies that raise after a value which they read: in some calls, which eager refuses, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from tests.support.device import EXECUTES
from tests.support.observed import bits, fresh, x_of

__all__ = ["fresh"]

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")

CALLS = 30


class Refused(Exception):
    pass


def reads_an_element(w: Tensor, x: Tensor) -> Tensor:
    w.mul_(0.9)
    if x[0, 0].item() < 0:
        raise Refused("an element")
    return x * w.sum()


def reads_before_it_writes(w: Tensor, x: Tensor) -> Tensor:
    least = x.min().item()
    if least < -1:
        raise Refused(f"{least:.3f}")
    return w.add_(1).sum() + x


def returns_what_it_reads(w: Tensor, x: Tensor) -> Any:
    w.mul_(0.9)
    total = x.sum().item()
    if total < 0:
        raise Refused("a sum")
    return x + w, total / 2


def counts(w: Tensor, x: Tensor, calls: list[int]) -> Any:
    calls[0] += 1
    w.mul_(0.9)
    if x.sum().item() * calls[0] < -20:
        raise Refused(str(calls[0]))
    return x * w


def asks_a_truth(w: Tensor, x: Tensor) -> Tensor:
    w.mul_(0.9)
    if not torch.isfinite(x).all():
        raise Refused("not finite")
    if x.sum().item() > 5:
        x = x / 2
    return x * w.sum()


def first(number: int) -> bool:
    return number < 4


def second(number: int) -> bool:
    return number == 1


def third(number: int) -> bool:
    return number == 2


def some(number: int) -> bool:
    return number % 5 in (2, 4)


def most(number: int) -> bool:
    return number % 7 != 3


def given(number: int, *, refused: bool) -> Tensor:
    x = x_of(number, 2, 3).abs()
    return torch.where(x == x.max(), float("inf"), -x - 2) if refused else x


def run(body: Callable[..., Any], refused: Callable[[int], bool], **options: Any) -> tuple[list[Any], Any]:
    weights, calls = torch.ones(3), [0]
    arguments = (weights, calls)

    def program(x: Tensor) -> Any:
        return body(weights, x, calls) if body is counts else body(arguments[0], x)

    called = capture(program, **options) if options else program
    seen = list[Any]()
    for number in range(CALLS):
        try:
            result = bits(called(given(number, refused=refused(number))))
        except Refused as error:
            result = str(error)
        seen.append((result, bits(weights), calls[0]))
    return seen, called


@pytest.mark.one_in(3)
@pytest.mark.parametrize("verify", ["off", "first", "always"])
@pytest.mark.parametrize("refused", [first, second, third, some, most])
@pytest.mark.parametrize(
    "body", [reads_an_element, reads_before_it_writes, returns_what_it_reads, counts, asks_a_truth]
)
def test_refused_calls(body: Callable[..., Any], refused: Callable[[int], bool], verify: str) -> None:
    expected, _ = run(body, refused)
    with config.patch(drop_slow=False):
        seen, called = run(body, refused, verify=verify)
    assert seen == expected
    if body is not counts and refused is not most and verify == "off" and EXECUTES:
        assert recordings(called).replays >= 12, recordings(called)
