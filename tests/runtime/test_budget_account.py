"""The account of one captured function: what efforts cost, what replays pay, and what is allowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from capture import capture, config
from capture.api.decorator import captured_state
from capture.runtime import budget as budget_module


def scaled(x: Tensor, scale: float) -> Tensor:
    return torch.relu(x - 3) * max(scale + 1, 0)  # Python compares it, so each value is a key of its own


@pytest.fixture
def account() -> budget_module.Budget:
    return captured_state(capture(scaled)).budget


def test_half_of_it_is_spent_where_it_takes_long(account: budget_module.Budget) -> None:
    for _ in range(8):
        assert account.allows(1)
        account.spend("observations", 1500.0, key=1)
    assert account.allows(1)
    account.spend("observations", 1500.0, key=1)
    assert account.gave_up


def test_replays_pay_by_the_time_they_save(account: budget_module.Budget) -> None:
    """A body of 10 ms and one of 10 us, each watched in 20 ms: the first one's replays pay a thousand times as fast."""
    left = []
    for eager in (10.0, 0.01):
        account.start_anew()
        account.spend("observations", 20.0, key=1)
        account.note_operators(int(eager / 0.003))
        account.counters.replays += 4
        account.spend("recordings", 0.0, key=1)
        left.append(account.debt)
    assert left[0] < 0.3
    assert left[1] > 1.05


def test_efforts_have_a_share_of_the_time_of_the_calls(account: budget_module.Budget) -> None:
    """Two keys are watched and recorded whatever that takes; the next ones once the calls took four times as long."""
    with config.patch(drop_slow=True):
        for key in (1, 2):
            assert account.allows(key)
            account.spend("observations", 10.0, key=key)
            assert account.allows(key, begun=True)
        assert not account.allows(3)
        account.debt = budget_module.AT_ONCE[1]
        for _ in range(79):
            account.counters.body_runs += 1
            account.ran_eagerly(1.0)
        assert not account.allows(1)
        account.counters.body_runs += 1
        assert account.allows(1)


def test_a_key_that_comes_often_is_tried(account: budget_module.Budget) -> None:
    with config.patch(drop_slow=True):
        for key in (1, 2):
            account.spend("observations", 10.0, key=key)
        account.debt = budget_module.AT_ONCE[1]
        assert [account.allows(3) for _ in range(budget_module.OFTEN + 1)] == [False] * budget_module.OFTEN + [True]
        account.spend("observations", 10.0, key=3)
        account.debt = budget_module.AT_ONCE[1]
        assert not account.allows(3)


@pytest.mark.parametrize("between", [2, 12])
def test_what_was_watched_is_recorded_where_few_keys_come_in_turn(between: int, account: budget_module.Budget) -> None:
    with config.patch(drop_slow=True):
        for key in (1, 2):
            account.spend("observations", 10.0, key=key)
        account.debt = budget_module.AT_ONCE[1]
        for number in range(between):
            account.debt = budget_module.AT_ONCE[1]
            assert not account.allows(number + 3)
        account.debt = budget_module.AT_ONCE[1]
        assert account.allows(2, begun=True) is (between < budget_module.IN_TURN)


@pytest.mark.parametrize(("effort", "waits"), [(5.0, [3, 6, 12]), (50.0, [])], ids=["cheap", "dear"])
def test_one_key_alone_is_tried_again_as_it_may_settle(
    account: budget_module.Budget, effort: float, waits: list[int]
) -> None:
    """A single key may settle (buckets are arranged once, a recording fails once), unlike a value that is new in every
    call: it is tried again after waits that double, counted in calls."""
    account.most = 1000.0
    with config.patch(drop_slow=True):
        for _ in range(4):
            assert account.allows(1)
            account.spend("observations", effort, key=1)
        gaps, waited = [], 0
        for _ in range(sum(waits) + 10):
            if account.allows(1):
                account.spend("observations", effort, key=1)
                gaps.append(waited)
                waited = 0
                continue
            waited += 1
            account.ran_eagerly(1.0)
    assert gaps == waits


@pytest.mark.parametrize(("replays", "again"), [(40, True), (3, False)])
def test_one_that_paid_is_made_again_at_once(account: budget_module.Budget, replays: int, again: bool) -> None:
    """Watched runs that compiled something took seconds, which no replay pays back. That says nothing of a recording
    which is dropped after many replays: the next one takes milliseconds."""
    with config.patch(drop_slow=True):
        for _ in range(4):
            account.spend("observations", 2000.0, key=1)
        account.ran_eagerly(9.0)
        account.spend("recordings", 40.0, key=1)
        account.counters.replays += replays
        account.spend("drops", 0.0, key=1)
        allowed = [account.allows(1)]
        account.spend("observations", 100.0, key=1)
        account.spend("recordings", 40.0, key=1)
        account.spend("drops", 0.0, key=1)
        allowed.append(account.allows(1))
    assert allowed == [again, False]


def test_keys_that_come_in_turn_are_not_waited_for(account: budget_module.Budget) -> None:
    account.most = 1000.0
    with config.patch(drop_slow=True):
        for key in (1, 2, 1, 2):
            account.spend("observations", 5.0, key=key)
        for number in range(40):
            assert not account.allows(1 + number % 2)
            account.ran_eagerly(1.0)
