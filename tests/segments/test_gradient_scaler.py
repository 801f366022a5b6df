"""A whole step with a gradient scaler: an object of torch that holds tensors, and a dict that it fills and drops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, capture, recordings, warmup
from tests.segments.bodies import draw
from tests.support.device import DEVICE
from tests.support.observed import bits

CALLS = 14


def scaled(*, captured: bool, clips: bool) -> tuple[list[Any], Any]:
    """Losses, weights and the scaler's state after each step. The fifth, tenth and eleventh overflow."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=4)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = net(x).float().square().mean()
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    function, results = capture(step) if captured else step, []
    with torch.enable_grad():
        for number in range(CALLS):
            x = draw(number) * (1e30 if number in (4, 9, 10) else 1.0)
            loss = function(x)
            results.append(
                bits([loss, *[parameter.detach().clone() for parameter in net.parameters()], scaler.state_dict()])
            )
    return results, function


@pytest.mark.one_in(2)
@pytest.mark.parametrize("clips", [False, True])
def test_a_scaled_step(clips: bool) -> None:
    expected, found = scaled(captured=False, clips=clips), scaled(captured=True, clips=clips)
    assert found[0] == expected[0]
    assert recordings(found[1]).replays >= CALLS // 3, str(recordings(found[1]))


class Filled:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}


def filled(*, captured: bool, holds: bool) -> tuple[list[Any], Any]:
    """A dict that the body fills and drops. ``holds``: the caller has it, too."""
    owner = Filled()

    def body(x: Tensor) -> Any:
        owner.found["twice"] = x * 2
        y = owner.found["twice"] + 1
        owner.found = {}
        return y

    function, results, old = capture(body) if captured else body, [], []
    for number in range(CALLS):
        if holds:
            old.append(owner.found)
        results.append(function(draw(number)).clone())
    return [bits(results), bits(old)], function


def test_a_container_that_is_dropped() -> None:
    expected, found = filled(captured=False, holds=False), filled(captured=True, holds=False)
    assert found[0] == expected[0]
    assert recordings(found[1]).replays >= CALLS // 2, str(recordings(found[1]))


def test_a_container_that_is_dropped_and_has_a_local_name() -> None:
    def run(*, captured: bool) -> list[Any]:
        owner, results = Filled(), []

        def body(x: Tensor) -> Any:
            owner.found["twice"] = x * 2
            y = owner.found["twice"] + 1
            owner.found = {}
            return y

        function = capture(body) if captured else body
        first, x = owner.found, draw(0)
        for number in range(CALLS):
            held = owner.found
            results.append((function(draw(number)).clone(), function(x).clone(), held["twice"]))
        return [bits(results), bits(first)]

    expected = run(captured=False)
    with pytest.warns(CaptureWarning, match="CG401|CG904|CG906"):  # half of the calls drop one that nobody has
        assert run(captured=True) == expected


@pytest.mark.filterwarnings("ignore:CG")
@pytest.mark.parametrize("plain", [True, False])
def test_a_dropped_container_comes_back_with_its_members(plain: bool) -> None:
    """A warm-up's run is undone: the owner has its own dict again, with the members that it had."""
    owner, own = Filled(), {"once": 1}
    owner.found = own

    def body(x: Tensor) -> Any:
        owner.found["twice"] = 3 if plain else x * 2
        owner.found = {"once": 1}
        return x + 1

    warmup(capture(body))(draw(0))
    assert (owner.found is own, own) == (True, {"once": 1})


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:CG")
@pytest.mark.parametrize("plain", [True, False])
def test_a_dropped_container_that_somebody_takes_later(plain: bool) -> None:
    def run(*, captured: bool) -> tuple[list[Any], Any]:
        owner, seen = Filled(), list[Any]()

        def body(x: Tensor) -> Any:
            owner.found["twice"] = 3 if plain else x * 2
            owner.found = {}
            return x + 1

        function = capture(body) if captured else body
        for number in range(CALLS):
            held = owner.found if number in (6, 7) else {}
            function(draw(number))
            seen.append(bits(held))
        return seen, function

    expected, observed = run(captured=False), run(captured=True)
    assert observed[0] == expected[0]
    assert recordings(observed[1]).replays >= 3, str(recordings(observed[1]))


def test_a_container_that_is_dropped_and_held_by_the_caller() -> None:
    expected = filled(captured=False, holds=True)
    with pytest.warns(CaptureWarning, match="CG401"):
        observed = filled(captured=True, holds=True)
    assert observed[0] == expected[0]
