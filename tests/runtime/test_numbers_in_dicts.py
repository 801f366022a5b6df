"""A number that is kept in a dict, such as a temperature in a configuration, and is another one in each call shares a
recording with others where only operators get it; all else that may be in its place gives what eager gives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import capture, config, recordings
from capture.tree import thread_trees
from tests.support.device import EXECUTES, use_device
from tests.support.observed import bits

CALLS = 40
Program = tuple[Callable[..., Any], Callable[[int], None], Any]
"""A body, what is done before each call, and state that the body changes."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    use_device()
    with config.patch(cache=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def batch(number: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator(torch.empty(0).device).manual_seed(number))


def temperature() -> Program:
    settings: dict[str, Any] = {"tau": 1.0, "name": "soft"}

    def body(x: Tensor) -> Any:
        return (x / settings["tau"]).softmax(-1).cumsum(-1)

    return body, lambda number: settings.update(tau=0.9**number), settings


def through_an_argument() -> Program:
    settings: dict[str, Any] = {"tau": 1.0, "hard": False}

    def helper(x: Tensor, options: dict[str, Any]) -> Any:
        return (x / options["tau"]).softmax(-1) if not options["hard"] else x

    def body(x: Tensor) -> Any:
        return helper(x, settings)

    return body, lambda number: settings.update(tau=3.0 + number / 7), settings


def on_an_object() -> Program:
    holder = SimpleNamespace(settings={"scale": 3.0, "shift": 5.0})

    def body(x: Tensor) -> Any:
        return x * holder.settings["scale"] + holder.settings["shift"]

    def before(number: int) -> None:
        holder.settings["scale"], holder.settings["shift"] = 3.0 + number / 3, 5.0 - number / 7

    return body, before, holder


def a_training_step() -> Program:
    net = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    settings: dict[str, Any] = {"tau": 1.0}

    def body(x: Tensor) -> Any:
        loss = F.cross_entropy(net(x) / settings["tau"], x.argmax(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return body, lambda number: settings.update(tau=max(0.4, math.exp(-0.01 * number))), net


def another_dict_each_time() -> Program:
    holder: Any = SimpleNamespace(settings={"tau": 3.0})

    def body(x: Tensor) -> Any:
        return x / holder.settings["tau"]

    return body, lambda number: setattr(holder, "settings", {"tau": 3.0 + number / 9}), holder


# ----------------------------------------------------------------------------------------- what else may be there


def odd_values() -> Program:
    settings: dict[str, Any] = {"tau": 3.0}
    values = [3.5, 4.5, 5.5, 6.5, math.inf, -math.inf, math.nan, 0.0, -0.0, 1, True, 2.5, 2**63, -(2**70), 1e-320, 0.3,
              5, 7.5, None, "2", 2.25, 3.75]  # fmt: skip

    def body(x: Tensor) -> Any:
        return x * settings["tau"]

    return body, lambda number: settings.update(tau=values[number % len(values)]), settings


def a_key_that_goes() -> Program:
    settings: dict[str, Any] = {"tau": 3.0}

    def body(x: Tensor) -> Any:
        return x * settings["tau"]

    def before(number: int) -> None:
        settings["tau"] = 3.0 + number / 11
        if number % 13 == 12:
            del settings["tau"]
        if number == 20:
            settings["more"] = 1.0

    return body, before, settings


def asked_for() -> Program:
    settings: dict[str, Any] = {"tau": 3.0}

    def body(x: Tensor) -> Any:
        return x * settings["tau"] if settings["tau"] > 4 else x + settings["tau"]

    return body, lambda number: settings.update(tau=3.0 + number / 9), settings


def counted_by_the_body() -> Program:
    settings: dict[str, Any] = {"tau": 3.0}

    def body(x: Tensor) -> Any:
        settings["tau"] = settings["tau"] * 0.75
        return x * settings["tau"]

    return body, lambda number: None, settings


def returned() -> Program:
    settings: dict[str, Any] = {"tau": 3.0}

    def body(x: Tensor) -> Any:
        return x * settings["tau"], settings["tau"]

    return body, lambda number: settings.update(tau=3.0 + number / 9), settings


def written_into_a_text() -> Program:
    settings: dict[str, Any] = {"tau": 3.0}

    def body(x: Tensor) -> Any:
        return x * settings["tau"], f"{settings['tau']:.2f}"

    return body, lambda number: settings.update(tau=3.0 + number / 9), settings


def an_index() -> Program:
    settings: dict[str, Any] = {"row": 3}

    def body(x: Tensor) -> Any:
        return x[settings["row"]] * 2

    return body, lambda number: settings.update(row=number % 5), settings


class Halving(dict[str, float]):
    @override
    def __getitem__(self, key: str) -> float:
        return super().__getitem__(key) / 2


def of_its_own_class() -> Program:
    settings = Halving(tau=3.0)

    def body(x: Tensor) -> Any:
        return x * settings["tau"]

    return body, lambda number: settings.update(tau=3.0 + number / 9), settings


def ran(make: Callable[[], Program], *, captured: bool) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    body, before, state = make()
    function, seen = capture(body) if captured else body, []
    for number in range(CALLS):
        before(number)
        try:
            result = bits(function(batch(number)))
        except (KeyError, TypeError, RuntimeError, OverflowError) as error:
            result = type(error), str(error)
        left = [*state.parameters()] if isinstance(state, nn.Module) else state
        seen.append((result, bits(vars(left) if isinstance(left, SimpleNamespace) else left)))
    return seen, function


@pytest.mark.parametrize("make", [temperature, through_an_argument, on_an_object, a_training_step])
def test_numbers_of_a_dict_share_a_recording(make: Callable[[], Program]) -> None:
    expected, (observed, function) = ran(make, captured=False)[0], ran(make, captured=True)
    assert observed == expected
    counters = recordings(function)
    assert not EXECUTES or counters.replays >= 10, str(counters)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "make",
    [
        another_dict_each_time, odd_values, a_key_that_goes, asked_for, counted_by_the_body, returned,
        written_into_a_text, an_index, of_its_own_class,
    ],
)  # fmt: skip
def test_what_else_is_in_a_dict_is_as_eager(make: Callable[[], Program]) -> None:
    assert ran(make, captured=True)[0] == ran(make, captured=False)[0]
