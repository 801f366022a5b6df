"""Numbers that are others in each call, in steps of training whose optimizer runs as an island: one recording serves
all of them, and what the island reads itself stays its own business."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from capture import CaptureWarning, recordings
from tests.support.device import EXECUTES
from tests.support.training_twins import CALLS, both, data, net

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-3),
}
lifts = pytest.mark.skipif(not EXECUTES, reason="segments that are captured are not compared with others")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


def stepping(
    loss: Callable[..., Tensor], make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["Adam"]
) -> Callable[[Any], Any]:
    def program(wrap: Callable[[Any], Any]) -> Any:
        model = net()
        optimizer = make(model.parameters())

        def step(x: Tensor, number: Any) -> Tensor:
            found = loss(model, x, number)
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            return found.detach()

        return wrap(step), lambda: [list(model.parameters()), optimizer.state_dict()]

    return program


@pytest.mark.one_in(4)
@lifts
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_of_torch(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    mine = both(
        stepping(lambda model, x, beta: (beta * model(x)).square().mean() + beta, make),
        lambda number: (data(number), 1 / (1.01 + number * 0.013)),
    )
    assert recordings(mine).replays > CALLS // 2


LOSSES: dict[str, Callable[..., Tensor]] = {
    "a factor": lambda model, x, beta: (beta * model(x)).square().mean(),
    "added": lambda model, x, beta: (model(x) + beta).square().mean(),
    "computed": lambda model, x, beta: (model(x) * (1 - beta) / (beta + 3)).square().mean(),
    "a keyword": lambda model, x, beta: torch.add(model(x), x[:, :1], alpha=beta).square().mean(),
    "without gradients": lambda model, x, beta: F.mse_loss(model(x), beta * x.detach().sum(1, keepdim=True)),
    "drawn beside": lambda model, x, beta: (F.dropout(model(x), 0.5) * beta).square().mean(),
}


@pytest.mark.one_in(4)
@lifts
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_what_operators_get(loss: Callable[..., Tensor]) -> None:
    mine = both(stepping(loss), lambda number: (data(number), 1 / (1.01 + number * 0.013)))
    assert recordings(mine).replays > CALLS // 2


def test_numbers_that_have_kernels_of_their_own() -> None:
    values = [0.31, 0.72, 0.0, 1.0, 0.44, -1.0, 0.5, 2.0, 0.61, float("inf"), 0.13, float("nan"), 0.2, -0.0]
    both(stepping(LOSSES["a factor"]), lambda number: (data(number), values[number % len(values)]))


def test_numbers_that_decide() -> None:
    """After the recording was made for all numbers of a kind, others go another way."""
    both(
        stepping(lambda model, x, beta: (model(x) * beta).square().mean() if beta < 1.2 else model(x).abs().mean()),
        lambda number: (data(number), 0.31 + number * 0.04),
    )


def test_a_learning_rate_that_the_body_hands_to_the_optimizer() -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)

        def step(x: Tensor, rate: float) -> Tensor:
            for group in optimizer.param_groups:
                group["lr"] = rate
            found: Tensor = model(x).square().mean()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            return found.detach()

        return wrap(step), lambda: [list(model.parameters()), optimizer.state_dict()]

    both(program, lambda number: (data(number), 1e-3 * (1.01 + number * 0.37)))


def test_a_number_that_lies_where_the_optimizer_reads_it_for_a_while() -> None:
    """It is there before the step and gone after the call."""

    class Reads(torch.optim.Adam):
        scale = 1.0

        @override
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(self.scale)
            return super().step()

    def program(wrap: Callable[[Any], Any]) -> Any:
        model = net()
        optimizer = Reads(model.parameters(), 1e-3)

        def step(x: Tensor, scale: float) -> Tensor:
            found: Tensor = (model(x) * scale).square().mean()
            optimizer.zero_grad()
            found.backward()
            optimizer.scale = scale
            optimizer.step()
            optimizer.scale = 1.0
            return found.detach()

        return wrap(step), lambda: [list(model.parameters()), optimizer.state_dict(), optimizer.scale]

    both(program, lambda number: (data(number), 0.31 + number * 0.013))


@lifts
def test_a_number_in_python_state() -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        class Trainer:
            def __init__(self) -> None:
                self.model, self.beta = net(), 0.31
                self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)

            def step(self, x: Tensor) -> Tensor:
                found: Tensor = (self.model(x) * self.beta).square().mean()
                self.optimizer.zero_grad()
                found.backward()
                self.optimizer.step()
                return found.detach()

        trainer = Trainer()
        step = wrap(trainer.step)

        def run(x: Tensor) -> Tensor:
            trainer.beta *= 1.013
            found: Tensor = step(x)
            return found

        return run, lambda: [list(trainer.model.parameters()), trainer.optimizer.state_dict(), trainer.beta]

    mine = both(program, lambda number: (data(number),))
    assert recordings(mine).replays > CALLS // 2


@lifts
def test_a_value_that_is_returned_beside() -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)

        def step(x: Tensor, beta: float) -> float:
            found: Tensor = (model(x) * beta).square().mean()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            value: float = found.item()
            return value

        return wrap(step), lambda: [list(model.parameters()), optimizer.state_dict()]

    mine = both(program, lambda number: (data(number), 0.31 + number * 0.013))
    assert recordings(mine).replays > CALLS // 2


def test_two_optimizers_and_a_schedule() -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        actor, critic = net(), net()
        first, second = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.RAdam(critic.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(first, 3, 0.9)

        def step(x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
            loss = (critic(x) - alpha * x.sum(1, keepdim=True)).square().mean()
            second.zero_grad()
            loss.backward()
            second.step()
            other = (alpha * actor(x) - critic(x)).mean()
            first.zero_grad()
            other.backward()
            first.step()
            schedule.step()
            return loss.detach(), other.detach()

        states = [actor, critic]
        return wrap(step), lambda: [
            [list(one.parameters()) for one in states], first.state_dict(), second.state_dict(), schedule.state_dict()
        ]  # fmt: skip

    both(program, lambda number: (data(number), 0.31 + number * 0.013))


class Raising(torch.optim.Adam):
    """Its 17th step raises half way; every third one from the 20th on gives something else."""

    calls = 0

    @override
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 17:
            self.param_groups[0]["params"][0].data.add_(1.0)
            raise ArithmeticError("half way")
        super().step()
        return "odd" if self.calls > 20 and self.calls % 3 == 0 else None


def test_steps_that_raise_or_give_something() -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        model = net()
        optimizer = Raising(model.parameters(), 1e-3)

        def step(x: Tensor, beta: float) -> Any:
            found: Tensor = (model(x) * beta).square().mean()
            optimizer.zero_grad()
            found.backward()
            return optimizer.step(), found.detach()

        return wrap(step), lambda: [list(model.parameters()), optimizer.state_dict(), optimizer.calls]

    both(program, lambda number: (data(number), 0.31 + number * 0.013))


def test_steps_of_a_loop_between_others() -> None:
    """The recording begins the step; eager calls, loaded weights and new settings come between."""

    def program(wrap: Callable[[Any], Any]) -> Any:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        saved = copy.deepcopy(model.state_dict())

        def step(x: Tensor, beta: float) -> Tensor:
            found: Tensor = (model(x) * beta).square().mean()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            return found.detach()

        captured = wrap(step)

        def run(x: Tensor, beta: float, number: int) -> Tensor:
            if number % 11 == 10:
                model.load_state_dict(saved)
            if number % 13 == 12:
                optimizer.param_groups[0]["lr"] *= 0.9
            found: Tensor = captured(x, beta)
            return found

        return run, lambda: [list(model.parameters()), optimizer.state_dict()]

    both(program, lambda number: (data(number), 0.31 + number * 0.013, number))
