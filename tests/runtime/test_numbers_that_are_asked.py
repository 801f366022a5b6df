"""Numbers that operators get and of which the body asks something, as ``min(0.99, (1 + t) / (10 + t))`` does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import config
from tests.runtime.test_decisions import Step, Wrap, twins
from tests.support.device import EXECUTES

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
CALLS = 60


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False, drop_slow=False):
        yield


def halves(x: Tensor, n: int) -> Tensor:
    s = n / 50 + 0.01
    return torch.relu(x) * s if s > 0.5 else torch.relu(x) + s


def least(x: Tensor, n: int) -> Tensor:
    return x * min(0.85, (1 + n) / (10 + n))


def warms_up(x: Tensor, n: int) -> Tensor:
    return x * ((n + 1) / 20 if n < 20 else 0.5 * (1 + math.cos(math.pi * (n - 20) / 100)))


def ramps(x: Tensor, n: int) -> Tensor:
    return x * math.exp(-5.0 * (1.0 - max(0.0, min(n, 30)) / 30) ** 2)


def every_third(x: Tensor, n: int) -> Tensor:
    return torch.tanh(x) * n if n % 3 == 0 else torch.sin(x) / n


def odd_dimension(x: Tensor, n: int) -> Tensor:
    return x.sum(n % 2) * n


def float_on_the_left(x: Tensor, n: int) -> Tensor:
    return x * n + 1 if 25.5 > n else x - n  # noqa: SIM300 - there the float is asked


def one_of_two_is_asked(x: Tensor, n: int, s: float = 0.3) -> Tensor:
    return x * s if n < 30 else x + s


def raises_at_last(x: Tensor, n: int) -> Tensor:
    if n > 50:
        raise ValueError(f"{n} steps")
    return x * (n * 0.1)


BODIES = [halves, least, warms_up, ramps, every_third, odd_dimension, float_on_the_left, one_of_two_is_asked,
          raises_at_last]  # fmt: skip


def of_arguments(body: Callable[..., Any]) -> Callable[[Wrap], Step]:
    def program(wrap: Wrap) -> Step:
        if body is one_of_two_is_asked:
            two = wrap(lambda x, n, s: body(x, n, s))
            return lambda n: two(torch.randn(3, 3), n + 2, 0.27 + n / 8)
        f = wrap(lambda x, n: body(x, n))
        return lambda n: f(torch.randn(3, 3), n + 2)

    return program


def of_state(body: Callable[..., Any]) -> Callable[[Wrap], Step]:
    def program(wrap: Wrap) -> Step:
        own, total = {"n": 2}, torch.zeros(3)

        @wrap
        def f(x: Tensor) -> Tensor:
            own["n"] += 1
            total.add_(x[0])
            found: Tensor = body(x, own["n"])
            return found

        return lambda n: (f(torch.randn(3, 3)), own["n"], total)

    return program


@pytest.mark.one_in(6)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("of", [of_arguments, of_state])
def test_numbers_that_operators_get_are_asked(of: Any, body: Callable[..., Any]) -> None:
    assert twins(of(body), CALLS) > CALLS * 2 // 3


def picks(x: Tensor, n: int) -> Tensor:
    return x * n + LIST[n % 4]


def repeats(x: Tensor, n: int) -> Tensor:
    return x * n + len([x] * (n // 7)) if n > 1 else x


def near(x: Tensor, n: int) -> Tensor:
    return x * n + (LIST * 20)[n] if n >= 0 else x


def slices(x: Tensor, n: int) -> Tensor:
    return x * n + x.reshape(-1)[: n % 5].sum()


def keeps_the_text(x: Tensor, n: int) -> Any:
    return x * n, f"{n}" if n > 10 else ""


LIST = [0.5, 0.5, 0.5, 0.25]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("body", [picks, repeats, near, slices, keeps_the_text])
def test_what_else_comes_of_them_is_the_same(body: Callable[..., Any]) -> None:
    def program(wrap: Wrap) -> Step:
        f = wrap(lambda x, n: body(x, n))
        return lambda n: f(torch.randn(3, 3), n)

    twins(program, 30)


def test_a_shadow_of_the_weights_that_follows_faster_at_first() -> None:
    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        shadow, own = copy.deepcopy(net), {"updates": 0}
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        @wrap
        @torch.enable_grad()
        def step(x: Tensor) -> Any:
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            own["updates"] += 1
            decay = min(0.8, (1 + own["updates"]) / (10 + own["updates"]))
            with torch.no_grad():
                for old, new in zip(shadow.parameters(), net.parameters(), strict=True):
                    old.sub_((1.0 - decay) * (old - new))
            return loss.item()

        return lambda n: (step(torch.randn(4, 3)), dict(own), [*shadow.parameters()])

    replays = twins(program, CALLS)
    assert replays > CALLS * 2 // 3 or not EXECUTES  # it reads its loss: no number is lifted then that is captured
