"""Regions over time: exceptions, warm-up, plans, verification, threads, whole steps around them."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from capture import (
    CaptureWarning,
    capture,
    config,
    explain,
    mark_step_begin,
    plans,
    recordings,
    release,
    reset,
    warmup,
)
from capture.tree import step as _step
from capture.tree import thread_trees
from tests.support.regions import (
    STEPS,
    Block,
    bits,
    both,
    captured_twins,
    forward_and_back,
    inputs,
    replayed,
)
from tests.support.regions import fresh as fresh


def test_exceptions_in_the_body() -> None:
    class Net(Block):
        fails = False

        @override
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.fails:
                raise ValueError("on purpose")
            return y

    mine, theirs = captured_twins(Net)

    def step(model: Any, number: int) -> list[Tensor]:
        model.zero_grad()
        model.m[0].fails = number % 3 == 1
        try:
            y = model.m[0](inputs(number))
        except ValueError:
            return []
        y.sum().backward()
        return [y]

    both(step, mine, theirs, 16)
    replayed(mine)


def test_an_exception_in_the_recording_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = captured_twins(Block)
    from capture.runtime import record as _record

    original = _record._run

    def run(captured: Any, entry: Any, call: Any, tree: Any, staged: Any, expected: Any, *, undo: bool) -> Any:
        recorded = original(captured, entry, call, tree, staged, expected, undo=undo)
        if "gradient_0" in captured.annotation.parameters:
            from attrs import evolve

            assert recorded.recording is not None
            recorded.recording.release()
            return evolve(recorded, recording=None, failure="on purpose")
        return recorded

    monkeypatch.setattr(_record, "_run", run)

    with pytest.warns(CaptureWarning, match="CG904"):
        both(forward_and_back, mine, theirs)
    replayed(mine)


def test_reset_and_release_with_a_backward_to_come() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        y: Tensor = model.m[0](inputs(number))
        if model is mine and number in (5, 6):
            (release if number == 5 else reset)(model.m[0])
        y.square().mean().backward()
        return y

    both(step, mine, theirs, 16)
    replayed(mine)


def test_what_is_said_about_a_region() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        y: Tensor = model.m[0](inputs(number))
        y.square().mean().backward()
        return y

    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        both(step, mine, theirs)
    counts = recordings(mine.m[0])
    assert counts.recordings == 2
    assert counts.eager_calls == 0
    assert counts.replays >= 2 * (STEPS - 4)
    assert any(finding.code == "CG501" for finding in counts.findings)
    assert [plan.outcome for plan in plans(mine.m[0])] == ["record", "record"]
    assert explain(mine.m[0])(inputs(0)).outcome == "record"
    reset(mine.m[0])
    assert recordings(mine.m[0]).recordings == 0
    both(step, mine, theirs)
    assert recordings(mine.m[0]).recordings == 2


def test_warmup_of_a_region() -> None:
    mine, theirs = captured_twins(lambda: Block(drop=0.2))
    state = [bits(p) for p in mine.parameters()]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    warmup(mine.m[0])(inputs(0))
    assert torch.equal(before, torch.get_rng_state())
    assert [bits(p) for p in mine.parameters()] == state
    assert recordings(mine.m[0]).recordings == 1

    both(forward_and_back, mine, theirs)
    assert recordings(mine.m[0]).replays >= STEPS + 3


def test_plans_on_disk(tmp_path: Any) -> None:
    with config.patch(cache=True, cache_dir=tmp_path):
        for _ in range(2):
            mine, theirs = captured_twins(Block)

            def step(model: Any, number: int) -> Tensor:
                model.zero_grad()
                y: Tensor = model.m[0](inputs(number).requires_grad_(number % 2 == 0))
                y.square().mean().backward()
                return y

            both(step, mine, theirs, 12)
            replayed(mine)
    assert recordings(mine.m[0]).plans_loaded >= 1


def test_recording_without_a_watched_run() -> None:
    with config.patch(skip_warmup=True):
        mine, theirs = captured_twins(Block)

        def step(model: Any, number: int) -> Any:
            model.zero_grad()
            x = inputs(number).requires_grad_(number % 2 == 0)
            model.m[0](x).square().mean().backward()
            return [x.grad]

        both(step, mine, theirs, 12)
        replayed(mine)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("verify", ["first", "always"])
def test_verified_regions(verify: str) -> None:
    mine, theirs = captured_twins(lambda: Block(drop=0.2), verify=verify)

    def step(model: Any, number: int) -> Any:
        model.zero_grad()
        y = model.m[0](inputs(number))
        y.square().mean().backward()
        return y

    both(step, mine, theirs, 10)
    assert recordings(mine.m[0]).verifications >= 2


@pytest.mark.parametrize("outputs", ["borrow", "clone"])
def test_other_policies_for_outputs(outputs: str) -> None:
    mine, theirs = captured_twins(Block, outputs=outputs)

    def step(model: Any, number: int) -> Any:
        mark_step_begin()
        model.zero_grad()
        y = model.m[0](inputs(number))
        loss = y.square().mean()
        mark_step_begin()
        model.m[0](inputs(number + 1))
        loss.backward()
        return [loss]

    both(step, mine, theirs, 10)
    replayed(mine)


def test_poisoned_memory() -> None:
    with config.patch(poison=True):
        mine, theirs = captured_twins(lambda: Block(drop=0.2), Block)

        def step(model: Any, number: int) -> Any:
            model.zero_grad()
            losses = [model.m[1](model.m[0](inputs(number + i))).square().mean() for i in range(2)]
            losses[1].backward()
            losses[0].backward()
            return losses

        both(step, mine, theirs, 10)
        replayed(mine)


def test_a_backward_in_another_thread() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        y: Tensor = model.m[0](inputs(number))
        loss = y.square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return y

    both(step, mine, theirs)
    replayed(mine)


@pytest.mark.parametrize("marks", [False, True], ids=["unmarked", "marked"])
def test_a_backward_in_a_thread_of_autograd_itself(monkeypatch: pytest.MonkeyPatch, marks: bool) -> None:
    """On a GPU autograd runs nodes in a thread of its own, while the thread of the forward pass waits: the waiting
    thread's tree and marks are used."""
    monkeypatch.setattr(thread_trees, "_runs_for", lambda _: True)
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        if marks:
            mark_step_begin()
        model.zero_grad()
        y: Tensor = model.m[0](inputs(number))
        loss = y.square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return y

    both(step, mine, theirs)
    replayed(mine, 2 * (STEPS - 4))
    counts = recordings(mine.m[0])
    assert (counts.recordings, counts.kept_outputs) == (2, 0)


def test_settings_hold_in_a_thread_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_trees, "_runs_for", lambda _: True)
    settings: list[tuple[bool, int]] = []

    def run() -> None:
        before = (config.current().poison, _step.steps_begun())
        with thread_trees.acting_for(there):
            mark_step_begin()
            settings.append((config.current().poison, _step.steps_begun()))
        assert (config.current().poison, _step.steps_begun()) == before

    with config.patch(poison=True):
        mark_step_begin()
        there = thread_trees.thread_state()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert settings == [(True, 2)]
    assert _step.steps_begun() == 2


def test_a_region_inside_a_captured_step() -> None:
    mine, theirs = captured_twins(Block)
    steps: dict[int, Any] = {}

    def step(model: Any, number: int) -> Any:
        def body(x: Tensor) -> Tensor:
            model.zero_grad()
            loss: Tensor = model.m[0](x).square().mean()
            loss.backward()
            return loss.detach()

        run = steps.setdefault(id(model), capture(body))
        if number % 4 == 0:
            model.zero_grad()
            model.m[0](inputs(number)).sum().backward()
        return run(inputs(number))

    both(step, mine, theirs, 12)
    assert recordings(steps[id(mine)]).replays
