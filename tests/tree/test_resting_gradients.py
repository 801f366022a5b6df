"""Steps of training between other captured work: their gradients stay where they are, and are made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, mark_step_begin, recordings
from tests.support.device import AGAIN, DEVICE

Batches = Callable[[], Tensor]


class Program:
    """A model with a step of its own and a function that reads it, captured or not."""

    def __init__(self, *, captured: bool, width: int = 32) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 1)).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.step: Any = capture(self._step) if captured else self._step
        self.check: Any = capture(self._check) if captured else self._check
        self.batches = torch.Generator().manual_seed(1)

    def _step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _check(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first: Any = self.net[0]
            for _ in range(4):
                x = torch.tanh(first(x)) @ first.weight
            total: Tensor = self.net(x).sum()
            return total

    def batch(self, count: int = 8) -> Tensor:
        return torch.randn(count, 16, generator=self.batches, device="cpu").to(DEVICE)

    def state(self) -> list[Any]:
        return [[None if tensor is None else tensor.tolist() for tensor in (p, p.grad)] for p in self.net.parameters()]


def played(scene: Callable[[Program, Callable[[], None]], list[Any]], mark: Callable[[], None]) -> Program:
    mine, theirs = Program(captured=True), Program(captured=False)
    assert scene(mine, mark) == scene(theirs, mark)
    return mine


def trained_and_checked(program: Program, mark: Callable[[], None]) -> list[Any]:
    seen: list[Any] = []
    for _ in range(4):
        for work in [program.step] * 5 + [program.check] * 4:
            mark()
            seen.append(work(program.batch()).tolist())
        seen.append(program.state())
    return seen


def in_turn(program: Program, mark: Callable[[], None]) -> list[Any]:
    seen: list[Any] = []
    for _ in range(12):
        for work in (program.step, program.check):
            mark()
            seen.append(work(program.batch()).tolist())
        seen.append(program.state())
    return seen


@pytest.mark.parametrize("mark", [mark_step_begin, lambda: None], ids=["marked", "unmarked"])
@pytest.mark.parametrize("scene", [trained_and_checked, in_turn])
def test_no_gradient_is_owned(scene: Any, mark: Callable[[], None]) -> None:
    mine = played(scene, mark)
    for function in (mine.step, mine.check):
        counts = recordings(function)
        assert counts.kept_outputs == 0, str(counts)
        assert counts.recordings <= 2, str(counts)
        assert counts.replays >= 8, str(counts)


def test_a_gradient_that_somebody_took_meanwhile_keeps_its_values() -> None:
    def scene(program: Program, mark: Callable[[], None]) -> list[Any]:
        kept: list[Tensor] = []
        for number in range(10):
            mark()
            program.step(program.batch())
            if number == 5:
                kept += [p.grad for p in program.net.parameters() if p.grad is not None]
            mark()
            program.check(program.batch())
            if number == 7:
                kept += [p.grad.view(-1) for p in program.net.parameters() if p.grad is not None]
        return [*program.state(), [gradient.tolist() for gradient in kept]]

    mine = played(scene, mark_step_begin)
    assert recordings(mine.step).replays >= 4


@pytest.mark.parametrize("change", ["written", "replaced", "none", "another size"])
def test_gradients_that_somebody_changed_meanwhile(change: str) -> None:
    def scene(program: Program, mark: Callable[[], None]) -> list[Any]:
        seen: list[Any] = []
        for number in range(12):
            mark()
            seen.append(program.step(program.batch(5 if change == "another size" and number % 4 == 3 else 8)).tolist())
            mark()
            seen.append(program.check(program.batch()).tolist())
            weight = program.net[0].weight
            assert isinstance(weight, Tensor)
            if change == "written":
                assert weight.grad is not None
                weight.grad.mul_(2)
            elif change == "replaced":
                weight.grad = torch.ones_like(weight)
            elif change == "none":
                weight.grad = None
            seen.append(program.state())
        return seen

    mine = played(scene, mark_step_begin)
    assert recordings(mine.step).replays >= 4
    assert recordings(mine.check).replays >= 4


def test_recordings_of_several_sizes_are_made_a_few_times() -> None:
    """Gradients of each lie elsewhere: what comes between them is not recorded again and again."""

    def scene(program: Program, mark: Callable[[], None]) -> list[Any]:
        seen: list[Any] = []
        for number in range(60):
            mark()
            seen.append(program.step(program.batch(4 + number % 3)).tolist())
            mark()
            seen.append(program.check(program.batch()).tolist())
        return [*seen, program.state()]

    mine = played(scene, mark_step_begin)
    assert recordings(mine.check).recordings <= 4 + AGAIN, str(recordings(mine.check))
    assert recordings(mine.step).recordings <= 6 + 4 * AGAIN, str(recordings(mine.step))
    assert recordings(mine.check).replays >= 45


@pytest.mark.parametrize("mark", [mark_step_begin, lambda: None], ids=["marked", "unmarked"])
@pytest.mark.parametrize("count", [2, 3])
def test_networks_that_are_trained_in_turn_keep_their_gradients(count: int, mark: Callable[[], None]) -> None:
    """Each holds its gradients while the others run: all of them keep their places, and come to rest."""

    def run(*, captured: bool) -> tuple[list[Any], list[Any]]:
        programs = [Program(captured=captured, width=32 + 8 * number) for number in range(count)]
        seen: list[Any] = []
        for number in range(24):
            for program in programs:
                for _ in range(1 + number % 2):
                    mark()
                    seen.append(program.step(program.batch()).tolist())
            seen += [program.state() for program in programs]
        return seen, [program.step for program in programs]

    mine, functions = run(captured=True)
    assert mine == run(captured=False)[0]
    for function in functions:
        counts = recordings(function)
        assert AGAIN == 0 or counts.kept_outputs == 0, str(counts)
        assert counts.replays >= 24, str(counts)


def test_parts_that_add_gradients_in_the_recording_keep_them_beside_whole_steps() -> None:
    def run(*, captured: bool) -> tuple[list[Any], list[Any]]:
        whole, other = Program(captured=captured), Program(captured=False, width=40)
        parts = [nn.Sequential(other.net[0], other.net[1]), nn.Sequential(other.net[2])]
        if captured:
            parts = [capture(part, gradients="accumulate") for part in parts]
        seen: list[Any] = []
        for _ in range(24):
            mark_step_begin()
            seen.append(whole.step(whole.batch()).tolist())
            mark_step_begin()
            other.optimizer.zero_grad()
            loss = parts[1](parts[0](other.batch())).square().mean()
            loss.backward()
            other.optimizer.step()
            seen += [loss.tolist(), whole.state(), other.state()]
        return seen, [whole.step, *parts]

    mine, functions = run(captured=True)
    assert mine == run(captured=False)[0]
    for function in functions:
        counts = recordings(function)
        assert AGAIN == 0 or counts.kept_outputs == 0, str(counts)
        assert counts.replays >= 12, str(counts)


def test_gradients_of_a_step_that_reads_are_known_to_stay_for_other_shapes() -> None:
    """A replay that goes back to Python, as AdamW's does to read its step, cannot write gradients in their place. What
    one shape showed is not found out with another recording for the next one."""

    def trained(capturing: bool) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
            result: torch.Tensor = loss.detach()
            return result

        mine = capture(step) if capturing else step
        return [mine(torch.randn(4 + number // 10, 3)).item() for number in range(30)], mine

    (ours, mine), (theirs, _) = trained(True), trained(False)
    assert ours == theirs
    dropped = [event for event in recordings(mine).events if "still used" in event.detail]
    assert recordings(mine).replays > 15
    assert len(dropped) == 1
