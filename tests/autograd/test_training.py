"""Whole training steps: forward, loss, backward and optimizer in one captured function, against an eager twin."""

from __future__ import annotations

import functools
import itertools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from capture import CaptureWarning, capture, recordings
from capture.native import native
from capture.runtime import dispatch
from tests.support.device import AGAIN, DEVICE, ISLANDS
from tests.support.trainers import (
    OPTIMIZERS,
    STEPS,
    Body,
    Trainer,
    batches,
    bits,
    clipped_step,
    flat_step,
    gradients_step,
    pair,
    plain_step,
    run,
    zeroing_at_the_end,
    zeroing_step,
)
from tests.support.trainers import fresh as fresh


def accumulating_step(t: Trainer, x: Tensor, y: Tensor) -> Tensor:
    t.optimizer.zero_grad()
    total = torch.zeros((), device=x.device)
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.mse_loss(t.model(part), target) / 2
        loss.backward()
        total += loss.detach()
    t.optimizer.step()
    return total


def dropping_step(t: Trainer, x: Tensor, y: Tensor) -> Tensor:
    t.optimizer.zero_grad()
    loss = F.mse_loss(F.dropout(t.model(x), 0.3), y)
    loss.backward()
    t.optimizer.step()
    return loss.detach()


def recomputing_step(t: Trainer, x: Tensor, y: Tensor) -> Tensor:
    t.optimizer.zero_grad()
    loss = F.mse_loss(checkpoint(t.model, x, use_reentrant=False, preserve_rng_state=False), y)
    loss.backward()
    t.optimizer.step()
    return loss.detach()


BODIES: list[Body] = [
    plain_step, zeroing_step, zeroing_at_the_end, clipped_step, accumulating_step, dropping_step, gradients_step,
    flat_step, recomputing_step,
]  # fmt: skip


@pytest.mark.one_in(9)
@pytest.mark.parametrize("marks", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("body", BODIES)
def test_steps_equal_eagers(body: Body, marks: bool) -> None:
    mine, step, theirs, eager = pair(body)
    run(mine, step, theirs, eager, batches(STEPS), marks=marks)
    assert recordings(step).replays >= STEPS - 5
    assert recordings(step).recordings <= 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    mine, step, theirs, eager = pair(plain_step, optimizer)
    run(mine, step, theirs, eager, batches(STEPS))
    assert recordings(step).replays >= STEPS - 5


@pytest.mark.slow
def test_two_hundred_steps() -> None:
    mine, step, theirs, eager = pair(clipped_step, "adamw fused")
    run(mine, step, theirs, eager, batches(200))
    assert recordings(step).replays >= 190


def test_a_learning_rate_that_changes_is_never_stale() -> None:
    mine, step, theirs, eager = pair(plain_step)
    for rate in (0.1, 0.1, 0.05, 0.1, 0.2):
        for one in (mine, theirs):
            one.optimizer.param_groups[0]["lr"] = rate
        run(mine, step, theirs, eager, batches(5, seed=int(rate * 100)))
    assert recordings(step).replays >= 8


def test_an_optimizer_that_nobody_can_see_is_found_by_its_step() -> None:
    mine, _, theirs, eager = pair(plain_step)
    # nothing shows which object an iterator will give
    keep = functools.partial(next, itertools.repeat(mine.optimizer))

    def body(x: Tensor, y: Tensor) -> Tensor:
        optimizer = keep()
        optimizer.zero_grad()
        loss = F.mse_loss(mine.model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = capture(body)
    for rate in (0.1, 0.05, 0.1):
        for trained in (mine, theirs):
            trained.optimizer.param_groups[0]["lr"] = rate
        run(mine, step, theirs, eager, batches(5))


def test_a_schedule_is_right_and_replayed_or_named() -> None:
    mine, step, theirs, eager = pair(plain_step)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.9) for trained in (mine, theirs)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for data in batches(20):
            run(mine, step, theirs, eager, [data])
            for schedule in schedules:
                schedule.step()
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, CaptureWarning)]
    if ISLANDS:  # the step of the optimizer runs eagerly between two segments, and finds the rate itself
        assert recordings(step).replays >= 8, (texts, [(event.kind, event.detail) for event in recordings(step).events])
    else:
        assert any("lr" in text for text in texts), texts


def test_a_learning_rate_in_a_tensor_is_no_new_recording() -> None:
    rates = [torch.tensor(0.1, device=DEVICE) for _ in range(2)]
    made = iter(rates)
    mine, step, theirs, eager = pair(plain_step, lambda p: torch.optim.Adam(p, lr=next(made), fused=True))
    for data in batches(20):
        run(mine, step, theirs, eager, [data])
        for rate in rates:
            rate.mul_(0.9)
    assert recordings(step).recordings == 1
    assert recordings(step).replays >= 15


@pytest.mark.filterwarnings("ignore:CG904.*read through a copy is written:capture.CaptureWarning")
def test_gradients_replaced_outside() -> None:
    """A gradient that is another tensor in most calls is bound or copied. On a GPU where it cannot be bound and is also
    written, the step stays eager."""
    mine, step, theirs, eager = pair(zeroing_step)
    for number in range(6):
        run(mine, step, theirs, eager, batches(3, seed=number))
        for trained in (mine, theirs):
            first = next(iter(trained.model.parameters()))
            first.grad = None if number % 2 else torch.ones_like(first)


def test_gradients_kept_by_the_caller_keep_their_values() -> None:
    mine, step, theirs, eager = pair(plain_step)
    kept: list[tuple[Any, Any]] = []
    for data in batches(STEPS):
        run(mine, step, theirs, eager, [data])
        kept += [(p.grad, q.grad) for p, q in zip(mine.model.parameters(), theirs.model.parameters(), strict=True)]
    assert [bits(one) for one, _ in kept] == [bits(other) for _, other in kept]


def _transpose(grad: Tensor) -> None:
    grad.t_()


def _require(grad: Tensor) -> None:
    grad.requires_grad_()


def _name(grad: Tensor) -> None:
    grad.mine = "a note"  # type: ignore[attr-defined]


def _shift(grad: Tensor) -> None:
    grad.data = grad.data[1:]


def _move(grad: Tensor) -> None:
    grad.data = torch.ones_like(grad)


def _write(grad: Tensor) -> None:
    grad.mul_(3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", [_transpose, _require, _name, _shift, _move, _write])
def test_what_was_done_to_a_gradient_ends_with_its_step(change: Callable[[Tensor], None]) -> None:
    """A gradient that nobody else holds may stay the same tensor object in the next step: shape, strides, flags and
    attributes are then those that eager's new gradient has."""
    mine, step, theirs, eager = pair(plain_step)
    data = batches(STEPS)
    run(mine, step, theirs, eager, data[:6])
    for batch in data[6:]:
        for trained in (mine, theirs):
            for p in trained.model.parameters():
                if p.dim() == 2 and p.grad is not None:
                    change(p.grad)
        run(mine, step, theirs, eager, [batch])
        facts = [
            [(g.shape, g.stride(), g.storage_offset(), g.requires_grad, vars(g)) for p in trained.model.parameters()
             if (g := p.grad) is not None]
            for trained in (mine, theirs)
        ]  # fmt: skip
        assert facts[0] == facts[1]
    assert recordings(step).recordings == 1 + AGAIN
    assert recordings(step).replays >= STEPS - 4


def test_gradients_stay_where_nobody_else_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay keeps gradients that nobody else holds: making and setting them took most of a step's host time."""
    mine, step, theirs, eager = pair(plain_step)
    data = batches(STEPS)
    run(mine, step, theirs, eager, data[:6])
    made: list[int] = []

    def counted(sources: Any, live: Any, positions: Any, values: Any, numbers: Any, tensors: Any) -> Any:
        made.extend(numbers)
        return native.hand_out(sources, live, positions, values, numbers, tensors)

    asked = types.SimpleNamespace(hand_out=counted, Untouched=native.Untouched)
    monkeypatch.setattr("capture.tree.outputs.native", asked)
    run(mine, step, theirs, eager, data[6:])
    assert len(made) == len(data[6:]), "one loss a step"


@pytest.mark.one_in(6)
@pytest.mark.parametrize("marks", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("rounds", [1, 4])
def test_two_that_train_in_turn(rounds: int, marks: bool) -> None:
    """Two models train in turn, as a generator and its critic. The gradients that one leaves keep their memory, so the
    other is recorded again beside them. ``rounds``: steps of one model until it is the other's turn."""
    (mine, step, theirs, eager), (mine_2, step_2, theirs_2, eager_2) = pair(plain_step), pair(plain_step)
    data = batches(6 + 4 * AGAIN)
    for number in range(6 + 4 * AGAIN):
        for _ in range(rounds):
            run(mine, step, theirs, eager, [data[number]], marks=marks)
        for _ in range(rounds):
            run(mine_2, step_2, theirs_2, eager_2, [data[number]], marks=marks)
    counts = [recordings(function) for function in (step, step_2)]
    assert all(counted.eager_calls == 0 and counted.replays >= 5 * rounds - 2 - AGAIN for counted in counts)
    assert all(counted.kept_outputs <= len(list(mine.model.parameters())) + 1 for counted in counts)


def test_gradients_that_share_memory_stay_in_the_pool() -> None:
    """Gradients that share memory stay in the pool: nothing is copied, and no second recording is made below the
    first."""
    mine, step, theirs, eager = pair(flat_step)
    run(mine, step, theirs, eager, batches(STEPS), marks=True)
    assert recordings(step).recordings == 1 + AGAIN, "for the loss, which run() holds"
    adopted = DEVICE.type == "cpu"  # the CPU hands out the recording's own tensors
    assert recordings(step).kept_outputs <= recordings(step).replays + adopted, "one loss a step, which run() holds"


def test_gradients_taken_after_an_interrupted_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call finds that nobody holds the gradients and is interrupted before its replay. Then the user takes them: they
    keep their values in the next steps."""
    mine, step, theirs, eager = pair(plain_step)
    data = batches(STEPS)
    run(mine, step, theirs, eager, data[:6])
    with monkeypatch.context() as patched:

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr(dispatch, "replay", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(*data[6])
    held = [p.grad for p in mine.model.parameters()]
    values = [bits(grad) for grad in held]
    run(mine, step, theirs, eager, data[6:])
    assert [bits(grad) for grad in held] == values
