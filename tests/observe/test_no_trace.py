"""``explain`` and ``warmup`` leave no trace."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import (
    CaptureWarning,
    capture,
    explain,
    plans,
    recordings,
    warmup,
)
from tests.support.device import AGAIN, DEVICE, default_generator
from tests.support.observed import bits, codes, reads_item, x_of
from tests.support.observed import fresh as fresh


class Messy(nn.Module):
    """Writes everything a body can write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.h = torch.zeros(3, 4)
        self.table: dict[str, Any] = {"a": torch.zeros(4)}
        self.items: list[Any] = [1, 2]
        self.count = 0
        self.generator = torch.Generator(DEVICE).manual_seed(3)

    @override
    def forward(self, x: Tensor, own: torch.Generator) -> Tensor:
        self.count += 1
        self.items.append(self.count)
        self.table["b"] = self.count
        self.fresh = torch.tanh(x)
        x.add_(1)
        self.h = self.drop(self.norm(x)) + self.h
        self.table["a"].add_(x.sum(0))
        noise = torch.rand(3, 4, generator=own) + torch.rand(3, 4, generator=self.generator) + torch.rand(3, 4)
        return self.h + noise


class Tidy(Messy):
    """The module without Python state, so that it is recorded."""

    @override
    def forward(self, x: Tensor, own: torch.Generator) -> Tensor:
        x.add_(1)
        self.h = self.drop(self.norm(x)) + self.h
        self.table["a"].add_(x.sum(0))
        noise = torch.rand(3, 4, generator=own) + torch.rand(3, 4, generator=self.generator) + torch.rand(3, 4)
        return self.h + noise


def everything(net: Messy, x: Tensor, own: torch.Generator) -> Any:
    generators = [bits(generator.get_state()) for generator in (own, net.generator, default_generator)]
    members = {name: bits(value) for name, value in vars(net).items() if isinstance(value, Tensor)}
    weights = [bits(value) for value in net.state_dict().values()]
    table = {name: bits(value) for name, value in net.table.items()}
    return generators, members, weights, table, bits(net.items), net.count, sorted(vars(net)), bits(x)


def test_explain_changes_nothing() -> None:
    net, x, own = Messy(), x_of(1), torch.Generator(DEVICE).manual_seed(7)
    held = (net.h, net.table, net.items, net.table["a"])
    before = everything(net, x, own)
    explanation = explain(net)(x, own)
    assert everything(net, x, own) == before
    assert all(was is now for was, now in zip(held, (net.h, net.table, net.items, net.table["a"]), strict=True))
    assert explanation.outcome == "record"
    assert "CG402" in codes(explanation)


def test_explain_records_nothing() -> None:
    captured = capture(lambda x: torch.relu(x) + 1)
    explain(captured)(x_of(1))
    seen = recordings(captured)
    assert (seen.recordings, seen.replays, seen.observations) == (0, 0, 0)
    for seed in range(4):
        captured(x_of(seed))
    explain(captured)(x_of(1))
    assert recordings(captured).replays == 2


def test_explain_changes_nothing_when_the_body_raises() -> None:
    class Failing(Messy):
        @override
        def forward(self, x: Tensor, own: torch.Generator) -> Tensor:
            super().forward(x, own)
            raise LookupError("after everything")

    net, x, own = Failing(), x_of(1), torch.Generator(DEVICE).manual_seed(7)
    before = everything(net, x, own)
    with pytest.raises(LookupError, match="after everything"):
        explain(net)(x, own)
    assert everything(net, x, own) == before


def test_explain_prints_outcome_inputs_and_reasons() -> None:
    text = str(explain(Tidy())(x_of(1), torch.Generator(DEVICE)))
    assert "record" in text.splitlines()[0]
    for word in ("inputs", "outputs", "effects", "copy-back", "static", "self.norm.weight", "x", "CG102", "self.h"):
        assert word in text
    assert "eager" in str(explain(reads_item)(x_of(1))).splitlines()[0]


def test_warmup_changes_nothing_and_brings_to_replay() -> None:
    net, x, own = Tidy(), x_of(1), torch.Generator(DEVICE).manual_seed(7)
    twin, twin_own = copy.deepcopy(net), torch.Generator(DEVICE).manual_seed(7)
    twin.generator.set_state(net.generator.get_state())
    capture(net)
    torch.manual_seed(11)
    before = everything(net, x, own)
    warmup(net.forward)(x, own)
    assert everything(net, x, own) == before
    for seed in range(5):
        mine, theirs = x_of(seed), x_of(seed)
        torch.manual_seed(seed)
        got, after = bits(net(mine, own)), everything(net, mine, own)
        torch.manual_seed(seed)
        assert got == bits(twin(theirs, twin_own))
        assert after[:6] == everything(twin, theirs, twin_own)[:6]
        assert bits(mine) == bits(theirs)
    assert recordings(net.forward).replays == 5 - AGAIN, "the module holds its state"
    assert recordings(net.forward).body_runs == 2 + AGAIN


def test_warmup_twice_records_once() -> None:
    captured = capture(lambda x: torch.relu(x) + 1)
    for _ in range(3):
        warmup(captured)(x_of(1))
    assert recordings(captured).recordings == 1
    assert recordings(captured).body_runs == 2


def test_warmup_of_a_call_that_cannot_be_recorded_says_so() -> None:
    captured = capture(reads_item)
    with pytest.warns(CaptureWarning, match="CG201"):
        warmup(captured)(x_of(1))
    assert bits(captured(x_of(1))) == bits(reads_item(x_of(1)))


def test_plans_name_the_function_and_the_outcome() -> None:
    captured = capture(lambda x: torch.relu(x) + 1, name="small")
    for _ in range(3):
        captured(x_of(1))
    (plan,) = plans(captured)
    assert (plan.function, plan.outcome, plan.num_ops) == ("small", "record", 2)


@pytest.mark.parametrize("rng_used", ["default", "own"])
def test_draws_advance_like_eagers(rng_used: str) -> None:
    def body(x: Tensor, generator: torch.Generator | None) -> Tensor:
        y = torch.rand(3, 4, generator=generator) + x
        return y + torch.randn(3, 4, generator=generator) + torch.randint(0, 5, (3, 4), generator=generator)

    captured = capture(body)
    for seed in range(6):
        mine = torch.Generator(DEVICE).manual_seed(seed) if rng_used == "own" else None
        theirs = torch.Generator(DEVICE).manual_seed(seed) if rng_used == "own" else None
        torch.manual_seed(seed)
        got = [bits(captured(x_of(seed), mine)) for _ in range(2)]
        after = bits((mine or default_generator).get_state())
        torch.manual_seed(seed)
        assert got == [bits(body(x_of(seed), theirs)) for _ in range(2)]
        assert after == bits((theirs or default_generator).get_state())
    assert recordings(captured).recordings == 1


@pytest.mark.parametrize(
    "body",
    [
        lambda x: torch.where(x > 0)[0],
        lambda x: x * x.sum().item(),
        lambda x: x.to(torch.float64) + x.reshape(-1)[0],
        lambda x: torch.nn.functional.dropout(torch.nn.functional.linear(x, x), 0.5),
    ],
    ids=["where", "item", "to", "linear"],
)
def test_inference_mode_shows_the_operators_that_others_are_made_of(body: Callable[[Tensor], Tensor]) -> None:
    shown = []
    for mode in (torch.no_grad, torch.inference_mode):
        captured = capture(body, name=f"in {mode.__name__}")
        with mode():
            x = torch.randn(4, 4)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CaptureWarning)
                for _ in range(3):
                    captured(x)
        (plan,) = plans(captured)
        shown.append((plan.sequence_digest, {finding.code for finding in plan.findings}))
    assert shown[0] == shown[1]


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_an_operator_whose_results_share_memory_against_its_schema() -> None:
    library = torch.library.Library("capture_observe", "DEF")
    library.define("twice_and_rest(Tensor x) -> (Tensor, Tensor)")

    def twice_and_rest(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[1:]

    library.impl("twice_and_rest", twice_and_rest, "CompositeExplicitAutograd")

    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        whole, rest = torch.ops.capture_observe.twice_and_rest(x)
        rest.add_(1)
        return whole, rest

    captured = capture(body)
    for number in range(5):
        x = torch.full((3,), float(number), device=DEVICE)
        result, expected = captured(x), body(x)
        assert [tensor.tolist() for tensor in result] == [tensor.tolist() for tensor in expected]
        result[1].zero_()
        assert not result[0][1:].any()
