"""Results of one region that are differentiated one after another: gradients, and errors, are eager's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.support.device import DEVICE, EXECUTES
from tests.support.no_plans import no_plans as no_plans
from tests.support.observed import bits

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


class Nets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.actor, self.critic = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.zeros(4))
        self.to(DEVICE)


BODIES: dict[str, Callable[[Nets, Tensor], tuple[Tensor, ...]]] = {
    "nothing is shared": lambda m, x: (m.actor(x).sin().sum(), m.critic(x).cos().sum()),
    "parameters are shared": lambda m, x: (m.actor(x).sin().sum(), m.actor(x * 2).cos().sum()),
    "what saves nothing is shared": lambda m, x: (lambda h: (h.sin().sum(), h.cos().sum()))(x + m.shift),
    "a trunk is shared": lambda m, x: (lambda h: (m.actor(h).sum(), m.critic(h).sum()))(m.trunk(x).tanh()),
    "one after the other": lambda m, x: (lambda h: (h.sum(), m.actor(h).sum()))(m.trunk(x).tanh()),
    "the middle one shares": lambda m, x: (
        m.actor(x).sin().sum(), (m.actor(x).sin() + m.critic(x)).sum(), m.critic(x).tanh().sum()
    ),
    "a chain of three": lambda m, x: (
        lambda h, k: (h.sum(), (h * k).sum(), k.sum())
    )(m.actor(x).sin(), m.critic(x).sin()),
    "a result is saved": lambda m, x: (m.actor(x).tanh(), m.critic(x).tanh()),
}  # fmt: skip
Pass = tuple[tuple[int, ...], bool, str]
"""Which results a backward pass begins at, whether it keeps the graph, and what follows it."""


def run(make: Callable[[Any], Any], body: str, steps: list[list[Pass]]) -> tuple[list[Any], Any]:
    nets, seen = Nets(), list[Any]()
    function = make(lambda x: BODIES[body](nets, x))
    optimizers = {
        "actor": torch.optim.SGD(nets.actor.parameters(), lr=0.1),
        "critic": torch.optim.SGD(nets.critic.parameters(), lr=0.1),
    }
    for number, passes in enumerate(steps):
        nets.zero_grad()
        x = torch.linspace(-1, 1, 12, device=DEVICE).reshape(3, 4) + 0.1 * number
        results = function(x)
        seen.append([one.detach().clone() for one in results])
        for begins, keeps, after in passes:
            begins = tuple(at for at in begins if at < len(results))
            try:
                torch.autograd.backward([results[at].sum() for at in begins], retain_graph=keeps)
            except RuntimeError as error:
                seen.append(str(error).partition("[")[0])
                break  # eager may have added some gradients by then
            if after in optimizers:
                optimizers[after].step()
            seen.append([None if one.grad is None else one.grad.clone() for one in nets.parameters()])
        del results
    return seen, function


def assert_as_eager(body: str, steps: list[list[Pass]]) -> Any:
    expected, _ = run(lambda function: function, body, steps)
    found, captured = run(capture, body, steps)
    assert len(found) == len(expected)
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert bits(one) == bits(other), (at, one, other)
    return captured


IN_TURN: dict[str, list[Pass]] = {
    "in turn": [((0,), False, ""), ((1,), False, "")],
    "with steps between": [((0,), False, "actor"), ((1,), False, "critic")],
    "the last one first": [((2, 1), False, ""), ((0,), False, "")],
    "once too often": [((0,), False, ""), ((1,), False, ""), ((0,), False, "")],
    "kept once": [((0,), True, ""), ((0,), False, ""), ((1,), True, ""), ((1,), False, "")],
    "all, then one": [((0, 1, 2), False, ""), ((1,), False, "")],
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("passes", IN_TURN)
@pytest.mark.parametrize("body", BODIES)
def test_results_are_differentiated_one_after_another(body: str, passes: str, no_plans: None) -> None:
    assert_as_eager(body, [IN_TURN[passes]] * 6)


def test_two_losses_in_turn_are_replayed(no_plans: None) -> None:
    captured = assert_as_eager("nothing is shared", [IN_TURN["with steps between"]] * 8)
    assert recordings(captured).replays >= (14 if EXECUTES else 10)  # of 8 calls and 16 backward passes
    assert not recordings(captured).eager_calls


@pytest.mark.one_in(6)
@pytest.mark.parametrize("part", range(12))
def test_any_order(part: int, no_plans: None) -> None:
    drawn = random.Random(part)
    for _ in range(6):
        body = drawn.choice(list(BODIES))
        kinds = [
            [
                (
                    tuple(drawn.sample(range(3), drawn.randint(1, 3))),
                    drawn.random() < 0.4,
                    drawn.choice(["", "", "actor", "critic"]),
                )
                for _ in range(drawn.randint(1, 4))
            ]
            for _ in range(drawn.randint(1, 2))
        ]
        steps = [kinds[number % len(kinds)] for number in range(8)]
        if all(any(at < 2 for at in begins) for passes in steps for begins, _, _ in passes):
            assert_as_eager(body, steps)
