"""One recording serves all values of a number also where the host reads values that the body only returns or keeps."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from capture import capture, config, recordings
from capture.tree import thread_trees
from tests.support.device import DEVICE, EXECUTES, use_device
from tests.support.observed import bits

CALLS = 40


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Begin without the tree of another test."""
    thread_trees.forget_trees()
    use_device()
    with config.patch(cache=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@frozen(eq=False)
class Program:
    """``before``: called with the number of each call. ``state``: compared after each call."""

    body: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    state: Callable[[], Any]
    before: Callable[[int], object] = lambda _: None


def draw(number: int, *shape: int) -> Tensor:
    return torch.randn(shape or (4, 6), generator=torch.Generator(DEVICE).manual_seed(number))


def rate(number: int) -> float:
    return 0.1 / (number + 1.5)


def deep(x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x * 1.25) + 0.1
    return x


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_returned() -> Program:
    w = torch.ones(6)

    def body(x: Tensor, lr: float) -> Any:
        y = deep(x) * w
        w.sub_(y.mean(0) * lr)
        return y.sum().item(), y

    return Program(body, lambda number: (draw(number), rate(number)), lambda: w)


def loss_kept() -> Program:
    w, log = torch.ones(6), list[float]()

    def body(x: Tensor, lr: float) -> Any:
        y = deep(x) * w
        log.append(y.mean().item())
        w.sub_(y.mean(0) * lr)
        return y.max().item() * len(x)

    return Program(body, lambda number: (draw(number), rate(number)), lambda: (w, log))


def rate_on_an_attribute() -> Program:
    w, trainer = torch.ones(6), SimpleNamespace(lr=0.1, loss=0.0)

    def body(x: Tensor) -> Tensor:
        y = deep(x) * w
        trainer.loss = y.mean().item()
        w.sub_(y.mean(0) * (1 - trainer.lr))
        return y

    def before(number: int) -> None:
        trainer.lr = rate(number)

    return Program(body, lambda number: (draw(number),), lambda: (w, trainer.loss), before)


def schedule_of_an_optimizer() -> Program:
    model, log = net(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)

    def body(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        log.append(loss.item())
        return loss.detach()

    def before(number: int) -> None:
        optimizer.param_groups[0]["lr"] = rate(number)

    return Program(body, lambda number: (draw(number),), lambda: (list(model.parameters()), log), before)


def temperature() -> Program:
    critic, actor, log_alpha = net(), net(), torch.zeros(1, requires_grad=True)
    of_critic = torch.optim.SGD(critic.parameters(), 0.05)
    of_alpha = torch.optim.SGD([log_alpha], 0.05)
    alpha = SimpleNamespace(value=0.2)

    def body(x: Tensor, value: float) -> Any:
        with torch.no_grad():
            target = critic(x) - value * actor(x)
        loss = F.mse_loss(critic(x), target * 0.9)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        loss_of_alpha = (-log_alpha.exp() * (actor(x).detach() + 0.1)).mean()
        of_alpha.zero_grad()
        loss_of_alpha.backward()
        of_alpha.step()
        return log_alpha.exp().item(), loss.item()

    def before(number: int) -> None:
        alpha.value = float(log_alpha.detach().exp()) if number else 0.2

    return Program(
        body, lambda number: (draw(number), alpha.value), lambda: (log_alpha, list(critic.parameters())), before
    )


REPLAYED: list[Callable[[], Program]] = [
    loss_returned, loss_kept, rate_on_an_attribute, schedule_of_an_optimizer, temperature,
]  # fmt: skip


def read_reaches_operators() -> Program:
    def body(x: Tensor, lr: float) -> Any:
        y = deep(x)
        return y * y.mean().item() * lr

    return Program(body, lambda number: (draw(number), rate(number)), lambda: None)


def computed_of_read_and_number() -> Program:
    def body(x: Tensor, lr: float) -> Any:
        y = deep(x) * lr
        return y, y.sum().item() * lr

    return Program(body, lambda number: (draw(number), rate(number)), lambda: None)


def decision_of_the_read() -> Program:
    def body(x: Tensor, lr: float) -> Any:
        y = deep(x) * lr
        return y if y.sum() > 0 else -y

    return Program(body, lambda number: (draw(number), rate(number)), lambda: None)


def decision_of_the_number() -> Program:
    def body(x: Tensor, lr: float) -> Any:
        y = deep(x) * lr
        return y if lr > 0.01 else -y, y.sum().item()

    return Program(body, lambda number: (draw(number), rate(number)), lambda: None)


def operator_raises() -> Program:
    log = list[float]()

    def body(x: Tensor, at: Tensor, lr: float) -> Any:
        y = deep(x) * lr
        log.append(y.sum().item())
        return y[at], y.mean().item()

    rows = [torch.tensor([row]).to(DEVICE) for row in (0, 1, 2)]
    rows += [torch.tensor([9])] if DEVICE.type == "cpu" else rows[:1]  # kernels of a GPU do not raise in the call
    return Program(body, lambda number: (draw(number), rows[number % 7 % 4], rate(number)), lambda: log)


OTHERS: list[Callable[[], Program]] = [
    read_reaches_operators, computed_of_read_and_number, decision_of_the_read, decision_of_the_number, operator_raises,
]  # fmt: skip


def outcome(body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return bits(body(*args))
    except IndexError as error:
        return str(error)


def run(make: Callable[[], Program], *, captured: bool) -> tuple[list[Any], Any]:
    torch.manual_seed(5)
    program = make()
    body, found = capture(program.body) if captured else program.body, []
    for number in range(CALLS):
        program.before(number)
        found.append((outcome(body, program.arguments(number)), bits(program.state())))
    return found, body


def compared(make: Callable[[], Program]) -> Any:
    expected, _ = run(make, captured=False)
    found, body = run(make, captured=True)
    for number, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        assert theirs == ours, f"call {number}"
    return body


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", REPLAYED)
def test_numbers_are_lifted_beside_reads(make: Callable[[], Program]) -> None:
    counters = recordings(compared(make))
    if EXECUTES:  # segments that were captured are not compared with others
        assert counters.replays >= CALLS * 3 // 4, str(counters)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", REPLAYED)
def test_lifted_numbers_beside_reads_are_verified(make: Callable[[], Program]) -> None:
    with config.patch(verify="always"):
        compared(make)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", OTHERS)
def test_what_follows_from_reads_is_as_eager(make: Callable[[], Program]) -> None:
    compared(make)


def test_threads_have_numbers_of_their_own() -> None:
    def body(x: Tensor, lr: float) -> Any:
        y = deep(x) * lr
        return y.sum().item(), y

    captured, wrong = capture(body), list[int]()

    def work(first: int) -> None:
        use_device()
        for number in range(first, first + 25):
            x, lr = draw(number), rate(number)
            if bits(captured(x, lr)) != bits(body(x, lr)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
