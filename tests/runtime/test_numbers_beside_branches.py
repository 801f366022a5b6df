"""Formulas and answers stand for numbers also where the body branches on other values that the host reads: a number may
be used in another way in each branch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from tests.support.device import EXECUTES, use_device
from tests.support.observed import bits

CALLS = 48
Body = Callable[..., Any]
Program = Callable[[], tuple[Body, Any]]
"""A function of ``x``, and what it changes."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    from capture.tree import thread_trees

    thread_trees.forget_trees()
    use_device()
    with config.patch(cache=False, drop_slow=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def deep(x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(x * 1.25) + 0.1
    return x


def is_large(x: Tensor) -> bool:
    return bool((x > 0).all())


def kept_under_computed_names() -> tuple[Body, Any]:
    def body(x: Tensor) -> Any:
        logs: dict[str, float] = {}
        for name in ("a", "b"):
            x = deep(x)
            if torch.isnan(x).any():
                raise ValueError("not a number")
            logs[f"{name}/mean"] = x.mean().item()
        return logs

    return body, None


def checked_by_a_distribution() -> tuple[Body, Any]:
    meter = SimpleNamespace(sum=0.0, count=0, avg=0.0)

    def body(x: Tensor) -> Any:
        entropy = torch.distributions.Categorical(logits=deep(x)).entropy().mean()
        value = entropy.item()
        meter.sum += value * len(x)
        meter.count += len(x)
        meter.avg = meter.sum / meter.count
        return entropy

    return body, meter


def counted_and_checked() -> tuple[Body, Any]:
    state = SimpleNamespace(step=0)

    def body(x: Tensor) -> Any:
        state.step += 1
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return deep(x) if state.step % 4 else -deep(x)

    return body, state


REPLAYED: list[Program] = [kept_under_computed_names, checked_by_a_distribution, counted_and_checked]


def number_reaches_an_operator() -> tuple[Body, Any]:
    state = SimpleNamespace(step=0)

    def body(x: Tensor) -> Any:
        state.step += 1
        y = deep(x)
        return y * state.step if is_large(x) else y

    return body, state


def another_question() -> tuple[Body, Any]:
    state = SimpleNamespace(step=0)

    def body(x: Tensor) -> Any:
        state.step += 1
        y = deep(x)
        if is_large(x):
            return y + 1 if state.step % 3 == 0 else y - 1
        return y if state.step % 2 else -y

    return body, state


def question_in_one_branch_alone() -> tuple[Body, Any]:
    state = SimpleNamespace(step=0)

    def body(x: Tensor) -> Any:
        state.step += 1
        y = deep(x)
        return y + 1 if is_large(x) and state.step % 3 == 0 else y

    return body, state


def another_amount() -> tuple[Body, Any]:
    state = SimpleNamespace(step=0)

    def body(x: Tensor) -> Any:
        y = deep(x)
        state.step += 5 if is_large(x) else 1
        return y if state.step % 4 else -y

    return body, state


def number_returned() -> tuple[Body, Any]:
    state = SimpleNamespace(step=0)

    def body(x: Tensor) -> Any:
        state.step += 1
        y = deep(x)
        return (y, state.step) if is_large(x) else (y, 0)

    return body, state


def another_formula() -> tuple[Body, Any]:
    state = SimpleNamespace(best=0.0, avg=0.0, count=0)

    def body(x: Tensor) -> Any:
        y = deep(x)
        value = y.mean().item()
        if is_large(x):
            state.avg = (state.avg * state.count + value) / (state.count + 1)
        else:
            state.avg = 0.9 * state.avg + 0.1 * value
        state.count += 1
        return y

    return body, state


def decides_by_value_and_branch() -> tuple[Body, Any]:
    state = SimpleNamespace(best=math.inf, rounds=0)

    def body(x: Tensor) -> Any:
        value = deep(x).mean().item()
        if is_large(x) and value < state.best:
            state.best = value
            state.rounds = 0
        else:
            state.rounds += 1
        return deep(x)

    return body, state


def branch_after_the_number() -> tuple[Body, Any]:
    state = SimpleNamespace(step=0, last=0.0)

    def body(x: Tensor) -> Any:
        state.step += 1
        y = deep(x) if state.step % 2 else -deep(x)
        state.last = y.sum().item()
        if is_large(x):
            state.step += 1
            return y * 2
        return y

    return body, state


def raises_in_a_branch() -> tuple[Body, Any]:
    state = SimpleNamespace(step=0)

    def body(x: Tensor) -> Any:
        state.step += 1
        if is_large(x):
            raise ValueError(f"step {state.step}")
        return deep(x)

    return body, state


OTHERS: list[Program] = [
    number_reaches_an_operator, another_question, question_in_one_branch_alone, another_amount, number_returned,
    another_formula, decides_by_value_and_branch, branch_after_the_number, raises_in_a_branch,
]  # fmt: skip


def steady(_: int) -> bool:
    return False


def late(number: int) -> bool:
    return number > 20 and number % 3 == 0


def mixed(number: int) -> bool:
    return (number * 7) % 5 < 2


def from_the_first(number: int) -> bool:
    return number < 5 or number % 11 == 0


def run(program: Program, large: Callable[[int], bool], *, captured: bool) -> tuple[list[Any], Any]:
    plain, state = program()
    body, found = capture(plain) if captured else plain, list[Any]()
    for number in range(CALLS):
        torch.manual_seed(number)
        x = torch.randn(4, 6)
        x = x.abs() + 0.01 if large(number) else x
        try:
            result = bits(body(x))
        except ValueError as error:
            result = str(error)
        found.append((result, repr(vars(state)) if state is not None else None))
    return found, body


def compared(program: Program, large: Callable[[int], bool]) -> Any:
    expected, _ = run(program, large, captured=False)
    found, body = run(program, large, captured=True)
    for number, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        assert theirs == ours, f"call {number}"
    return body


@pytest.mark.parametrize("program", REPLAYED)
def test_checks_of_values_do_not_stop_formulas(program: Program) -> None:
    counters = recordings(compared(program, steady))
    if EXECUTES:
        assert counters.replays >= CALLS // 2, str(counters)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("large", [steady, late, mixed, from_the_first])
@pytest.mark.parametrize("program", OTHERS)
def test_each_branch_does_what_eager_does(program: Program, large: Callable[[int], bool]) -> None:
    compared(program, large)


@pytest.mark.parametrize("program", [another_formula, decides_by_value_and_branch, another_amount])
def test_branches_are_verified(program: Program) -> None:
    with config.patch(verify="always"):
        compared(program, mixed)
