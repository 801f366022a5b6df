"""Steps of optimizers that read their count (``step_t.item()``) and compute with it: where an engine takes such numbers
in a recording, the step is recorded like other code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from capture import capture, recordings
from tests.support.device import DEVICE

CALLS = 24
pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam": lambda parameters: optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "maximize": lambda parameters: optim.Adam(parameters, lr=0.01, weight_decay=0.1, maximize=True),
    "Adamax": lambda parameters: optim.Adamax(parameters, lr=0.01),
    "NAdam": lambda parameters: optim.NAdam(parameters, lr=0.01, decoupled_weight_decay=True),
    "groups": lambda parameters: optim.Adam([{"params": [one], "lr": 0.1 / (3 + at)} for at, one in enumerate(parameters)]),  # noqa: E501
}  # fmt: skip
TAKES_READS = DEVICE.type == "cpu"


class Trainer:
    """A network, and its optimizer."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.net: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(DEVICE)
        self.optimizer = OPTIMIZERS[name](self.net.parameters())

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> Any:
        """All that a step changes."""
        found = [*self.net.parameters(), *[one.grad for one in self.net.parameters()]]
        return [one.clone() for one in found if one is not None], copy.deepcopy(self.optimizer.state_dict())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


CHANGES: dict[str, Callable[[Trainer], object]] = {
    "nothing": lambda trainer: None,
    "another rate": lambda trainer: trainer.optimizer.param_groups[0].update(lr=0.002),
    "another count": lambda trainer: trainer.optimizer.state[trainer.net[0].weight]["step"].fill_(1000.0),
    "another tensor": lambda trainer: trainer.optimizer.state[trainer.net[0].bias].update(step=torch.tensor(3.0)),
    "no state": lambda trainer: trainer.optimizer.state.clear(),
    "loaded": lambda trainer: trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict())),
    "infinite": lambda trainer: trainer.net[2].bias.data.fill_(float("inf")),
    "frozen": lambda trainer: trainer.net[0].bias.requires_grad_(False),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_as_eager(name: str, change: str) -> None:
    eager, ours = Trainer(name), Trainer(name)
    step = capture(ours.step)
    for number in range(CALLS):
        if number == CALLS // 2:
            before = recordings(step)
            CHANGES[change](eager)
            CHANGES[change](ours)
        x = torch.randn(3, 4, device=DEVICE)
        assert _same(eager.step(x), step(x)), number
        assert _same(eager.state(), ours.state()), number
    counters = recordings(step)
    if TAKES_READS:
        assert before.replays >= CALLS // 2 - 7, str(before)
        assert "CG208" not in [finding.code for finding in before.findings]  # no island
        if change in ("nothing", "another count", "another rate", "infinite"):
            assert counters.replays >= CALLS - 14, str(counters)


@pytest.mark.slow
@pytest.mark.skipif(not TAKES_READS, reason="optimizers are islands there")
def test_a_net_of_many_parameters() -> None:
    """So many counts are read that other numbers have to be tried for all of them at once."""
    trainers = Trainer("Adam"), Trainer("Adam")
    for trainer in trainers:
        torch.manual_seed(0)
        layers = [layer for _ in range(12) for layer in (nn.Linear(4, 4), nn.Tanh())]
        trainer.net = nn.Sequential(*layers).to(DEVICE)
        trainer.optimizer = OPTIMIZERS["Adam"](trainer.net.parameters())
    eager, ours = trainers
    step = capture(ours.step)
    for _ in range(12):
        x = torch.randn(3, 4, device=DEVICE)
        assert _same(eager.step(x), step(x))
        assert _same(eager.state(), ours.state())
    counters = recordings(step)
    assert counters.replays >= 5, str(counters)
    assert "CG208" not in [finding.code for finding in counters.findings]  # no island


@pytest.mark.parametrize("name", ["Adam", "NAdam"])
def test_a_number_beside_it(name: str) -> None:
    """What of the loss is logged follows from another read."""

    def program(trainer: Trainer, step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], float]:
        trainer.mean = 0.0  # type: ignore[attr-defined]

        def logged(x: Tensor) -> float:
            loss = step(x).item()
            trainer.mean = 0.9 * trainer.mean + 0.1 * loss  # type: ignore[attr-defined]
            return loss

        return logged

    eager, ours = Trainer(name), Trainer(name)
    theirs, step = program(eager, eager.step), capture(program(ours, ours.step))
    for number in range(CALLS):
        x = torch.randn(3, 4, device=DEVICE)
        assert theirs(x) == step(x), number
        assert eager.mean == ours.mean  # type: ignore[attr-defined]
        assert _same(eager.state(), ours.state()), number
    assert recordings(step).replays >= CALLS // 2 or not TAKES_READS
