"""What code asks for by texts that it computes, and that counters and logs beside it are no less counters and logs."""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from capture.key.asked_names import beginnings
from tests.runtime.test_decisions import CALLS, Step, Wrap, _every_body_pays, pytestmark, twins  # noqa: F401

NAMES = ["step_begins", "step_ends"]
OTHERS = ("run_begins",)
MIXED = ["step_begins", 3]
OWN = nn.Module()
PREFIX = "layer"


def by_format(x: Any, i: int) -> Any:
    return getattr(x, f"layer{i}_{i:>3}")


def by_two(x: Any, i: int) -> Any:
    return getattr(x, f"layer{i}"), hasattr(x, f"norm{i!r}") or getattr(x, "plain", None)


def by_sum(x: Any, i: int) -> Any:
    return getattr(x, "layer" + str(i))


def by_percent(x: Any, i: int) -> Any:
    return getattr(x, "layer_%d_out" % i)  # noqa: UP031


def by_method(x: Any, i: int) -> Any:
    return getattr(x, "layer_{}".format(i))  # noqa: UP032


def of_a_module(x: Any, i: str) -> Any:
    return getattr(F, i)(x) + getattr(torch.nn.functional, i)(x) + getattr(math, i)


def of_an_object(x: Any, i: str) -> Any:
    return getattr(OWN, i)(x)


def in_a_loop(x: Any) -> Any:
    return [getattr(x, name) for name in NAMES] if x is None else None


def in_a_plain_loop(x: Any) -> Any:
    for name in NAMES:
        if hasattr(x, name):
            setattr(x, name, None)


def in_two_loops(x: Any) -> Any:
    for name in NAMES:
        try:
            found = getattr(x, name)
        except AttributeError:
            setattr(x, name, None)
        else:
            found()
    for name in OTHERS:
        getattr(x, name)


def in_a_mixed_loop(x: Any) -> Any:
    for name in MIXED:
        getattr(x, name)  # type: ignore[call-overload]


def in_a_loop_that_sets_the_name(x: Any) -> Any:
    for name in NAMES:
        while x:
            getattr(x, name)
            name = x.other


def begins_with_a_value(x: Any, i: int) -> Any:
    return getattr(x, f"{i}layer")


def by_an_argument(x: Any, i: str) -> Any:
    return getattr(x, i)


def by_one_of_two(x: Any, i: int) -> Any:
    return getattr(x, "one" if i else "two")


def by_a_global(x: Any) -> Any:
    return getattr(x, PREFIX)


def kept(x: Any, i: str) -> Any:
    look = getattr
    return look(x, i)


def spread(x: Any, *names: str) -> Any:
    return getattr(x, *names)


def of_the_module(x: Any, i: str) -> Any:
    return builtins.getattr(x, i)


def beside_that_of_the_module(x: Any, i: str) -> Any:
    return getattr(x, f"layer{i}"), builtins.getattr(x, i)


def all_of_it(x: Any) -> Any:
    return vars(x)


def constants(x: Any) -> Any:
    return x.one, getattr(x, "two", None)


ANY = frozenset({""})
EXPECTED: dict[Callable[..., Any], frozenset[str]] = {
    by_format: frozenset({"layer"}),
    by_two: frozenset({"layer", "norm"}),
    by_sum: frozenset({"layer"}),
    by_percent: frozenset({"layer_"}),
    by_method: frozenset({"layer_"}),
    of_a_module: frozenset(),
    of_an_object: ANY,
    in_a_plain_loop: frozenset(NAMES),
    in_two_loops: frozenset([*NAMES, *OTHERS]),
    in_a_mixed_loop: ANY,
    in_a_loop_that_sets_the_name: ANY,
    begins_with_a_value: ANY,
    by_an_argument: ANY,
    by_one_of_two: ANY,
    by_a_global: ANY,
    kept: ANY,
    spread: ANY,
    of_the_module: ANY,
    beside_that_of_the_module: frozenset({"", "layer"}),
    all_of_it: ANY,
    constants: frozenset(),
}


@pytest.mark.parametrize("function", EXPECTED, ids=lambda function: function.__name__)
def test_what_names_begin_with(function: Any) -> None:
    found = beginnings(function.__code__, globals())
    assert found == EXPECTED[function] or (function is by_one_of_two and found <= {"", "one", "two"})


def test_what_comprehensions_ask_for() -> None:
    """Up to Python 3.11 they are code of their own, and what they go through is not known."""
    codes = [in_a_loop.__code__, *[one for one in in_a_loop.__code__.co_consts if hasattr(one, "co_code")]]
    found = frozenset(itertools.chain.from_iterable(beginnings(code, globals()) for code in codes))
    assert found in (ANY, frozenset(NAMES))


class Net(nn.Module):
    """Layers by numbers in their names, a counter and a log."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer0, self.layer1 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kind, self.steps, self.layer_calls = kind, 0, 0
        self.log: list[Any] = []

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        for i in range(2):
            x = getattr(self, f"layer{i}")(x)
            x = getattr(F, self.kind)(x)
        self.log.append(x.sum())
        return x


@pytest.mark.parametrize("kind", ["relu", "gelu"])
def test_a_counter_beside_layers_with_numbers(kind: str) -> None:
    def program(wrap: Wrap) -> Step:
        net = Net(kind)
        run = wrap(net)

        def step(n: int) -> Any:
            if n == 30:
                net.steps = 100
            if n == 40:
                net.layer1 = nn.Linear(4, 4)
            return run(torch.randn(3, 4)), net.steps, list(net.log)

        return step

    assert twins(program) > CALLS // 2


def test_a_counter_whose_name_begins_so_may_be_read() -> None:
    class Reads(Net):
        @override
        def forward(self, x: Tensor) -> Tensor:
            self.layer_calls += 1
            y: Tensor = x * getattr(self, f"layer_{self.kind}")
            return y

    def program(wrap: Wrap) -> Step:
        net = Reads("calls")
        run = wrap(net)
        return lambda n: (run(torch.randn(3, 4)), net.layer_calls)

    twins(program, 20)
