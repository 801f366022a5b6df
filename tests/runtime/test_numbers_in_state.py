"""Numbers in Python state that are others in each call: attributes, globals, cells, settings of optimizers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, recordings
from tests.support.bucketed import assert_same
from tests.support.device import AGAIN, EXECUTES, LIFTS
from tests.support.no_plans import no_plans as no_plans

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # where each value is another key
MANY = [0.1, 0.12, 0.3, 0.07, 3.7, -0.2, 0.999, 2.5, -1.5, 7.0, 0.11, 0.31, 1e-3, 0.4, 0.6]
SPECIAL = [0.0, 1.0, 2.0, 0.5, math.nan, math.inf, -1.0, 3, True, -0.0, 5]


def is_lifted(f: Any) -> bool:
    """Whether one recording serves all values."""
    return any("one recording serves" in event.detail for event in recordings(f).events)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.alpha = 0.9
        self.config = SimpleNamespace(temperature=0.9, other="text")


class Attribute(Net):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.weight) * self.alpha


class Deeper(Net):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(torch.relu(x * self.weight))

    def scaled(self, x: Tensor) -> Tensor:
        temperature: float = self.config.temperature
        return x / temperature - (1 - temperature)


class Read(Net):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if self.alpha > 0.3 else torch.relu(x) * self.alpha


class Written(Net):
    @override
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.alpha
        return x * self.weight * self.alpha


class Advanced(Net):
    @override
    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight * self.alpha
        self.alpha = 0.25
        return y


def put_alpha(net: Net, value: Any) -> None:
    net.alpha = value


def put_temperature(net: Net, value: Any) -> None:
    net.config.temperature = value or 0.123


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "put", "lifts"),
    [(Attribute, put_alpha, True), (Deeper, put_temperature, True), (Read, put_alpha, True),
     (Written, put_alpha, True), (Advanced, put_alpha, False)],
)  # fmt: skip
def test_attributes(kind: type[Net], put: Callable[[Net, Any], None], *, lifts: bool) -> None:
    eager, ours = kind(), kind()
    ours.load_state_dict(eager.state_dict())
    f = capture(ours.forward, max_recordings=40)
    with torch.no_grad():
        for value in [*MANY, *SPECIAL, *MANY, *SPECIAL, *MANY]:
            put(ours, value)
            put(eager, value)
            x = torch.randn(4, 3)
            assert_same(f(x), eager(x))
            assert ours.alpha is eager.alpha
            assert vars(ours).get("last") is vars(eager).get("last")
    told = [event.detail for event in recordings(f).events if "number" in event.detail]
    assert is_lifted(f) == (lifts and LIFTS), told
    if lifts and LIFTS:
        more = 2 * (kind is Written)  # what it leaves is compared, too
        assert recordings(f).recordings <= 4 + more + len(SPECIAL)
        # a run that only captures tells no formula of what is left: it is undone, and made again for its numbers alone
        assert recordings(f).replays > (35 if EXECUTES or kind is not Written else 25)


SCALE = 0.9


def test_globals() -> None:
    global SCALE

    def body(x: Tensor) -> Tensor:
        return torch.relu(x) * SCALE

    f = capture(body, max_recordings=40)
    with torch.no_grad():
        for value in [*MANY, *SPECIAL, *MANY, *SPECIAL]:
            SCALE = value
            x = torch.randn(4, 3)
            assert_same(f(x), body(x))
    assert is_lifted(f) == LIFTS


def test_cells() -> None:
    scale = 0.9

    def body(x: Tensor) -> Tensor:
        return torch.relu(x) * scale

    f = capture(body, max_recordings=40)
    with torch.no_grad():
        for value in [*MANY, *SPECIAL, *MANY, *SPECIAL]:
            scale = value
            x = torch.randn(4, 3)
            assert_same(f(x), body(x))
    assert is_lifted(f) == LIFTS


def test_a_number_in_state_and_one_among_the_arguments() -> None:
    eager, ours = Attribute(), Attribute()
    ours.load_state_dict(eager.state_dict())
    f = capture(lambda x, s: ours(x) * s)
    with torch.no_grad():
        for call in range(40):
            ours.alpha = eager.alpha = 0.1 + 0.017 * call
            x, s = torch.randn(4, 3), 0.3 + 0.013 * (call // 2)
            assert_same(f(x, s), eager(x) * s)
    assert is_lifted(f) == LIFTS


def test_beside_another_thread_no_other_number_is_put_there() -> None:
    net, over = Attribute(), threading.Event()
    f, beside = capture(net.forward), threading.Thread(target=over.wait)

    def call(times: int) -> None:
        with torch.no_grad():
            for number in range(times):
                net.alpha = 0.1 + 0.017 * number
                x = torch.randn(4, 3)
                assert_same(f(x), torch.relu(x * net.weight) * net.alpha)

    beside.start()
    try:
        call(4)
        assert not is_lifted(f)
    finally:
        over.set()
        beside.join()
    call(12)
    assert is_lifted(f) == LIFTS


def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int, **options: Any) -> Any:
    """Whole steps under a schedule, beside eager ones; gives the captured step."""
    nets = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [make(list(net.parameters())) for net in nets]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) for optimizer in optimizers]

    def step_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    f, eager = capture(step_of(nets[0], optimizers[0]), **options), step_of(nets[1], optimizers[1])
    for _ in range(steps):
        x = torch.randn(4, 3)
        assert_same(f(x), eager(x))
        for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert_same(ours.detach(), theirs.detach())
        for schedule in schedules:
            schedule.step()
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    return f


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.3), True),
    "sgd with momentum": (lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.01, nesterov=True), True),
    "sgd of lists": (lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, foreach=True), True),
    "groups": (lambda p: torch.optim.SGD([{"params": p[:2], "lr": 0.3}, {"params": p[2:], "lr": 0.1}]), True),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), False),
}


def test_what_was_tried_before_leaves_time_to_lift() -> None:
    with config.patch(drop_slow=True):
        f = trained(OPTIMIZERS["sgd"][0], 12)
    assert is_lifted(f) == LIFTS


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_that_a_schedule_sets(name: str) -> None:
    make, lifts = OPTIMIZERS[name]
    f = trained(make, 30)
    assert is_lifted(f) == (lifts and LIFTS)
    if lifts and LIFTS:
        assert recordings(f).replays > 18
        assert recordings(f).recordings <= 5 + AGAIN
