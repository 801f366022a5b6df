"""Numbers that the host reads in the body and that only operators get: one recording serves all values."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, capture, recordings, warmup
from capture.tree import thread_trees
from tests.support.device import DEVICE, EXECUTES
from tests.support.training_twins import CALLS, bits, both, data, net

given = pytest.mark.skipif(not EXECUTES, reason="segments that are captured are not compared with others")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "Adam with decay": lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.1, betas=(0.8, 0.95)),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True, maximize=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
    "two groups": lambda p: torch.optim.Adam([{"params": [one], "lr": 1e-3 * (at + 1)} for at, one in enumerate(p)]),
    "foreach": lambda p: torch.optim.Adam(p, 1e-3, foreach=True),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


def training(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], Any]:
    def program(wrap: Callable[[Any], Any]) -> Any:
        model = net()
        optimizer = make(model.parameters())

        def step(x: Tensor) -> Tensor:
            found: Tensor = model(x).square().mean()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            return found.detach()

        return wrap(step), lambda: [list(model.parameters()), optimizer.state_dict()]

    return program


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_optimizers(name: str) -> None:
    mine = both(training(OPTIMIZERS[name]), lambda number: (data(number),))
    assert recordings(mine).replays > CALLS // 2


READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a factor": lambda x, w: x * w.exp().sum().item(),
    "computed": lambda x, w: x / (1 + w.abs().sum().item()) - (w.mean().item() ** 2) * 0.3,
    "a keyword": lambda x, w: torch.add(x, x, alpha=w.norm().item()),
    "a fill": lambda x, w: torch.full_like(x, w.sum().item()) + x,
    "two reads": lambda x, w: (x * w[0].item() + w[1].item()).tanh() * x.max().item(),
    "one of another": lambda x, w: (x * w[0].item()).sum().item() * w + x.mean(),
    "by math": lambda x, w: x * math.sqrt(w.abs().sum().item()) + math.exp(-w.abs().max().item()),
    "whole numbers": lambda x, w: x * (w * 100).long().abs().sum().item() + 1,
    "written and read": lambda x, w: w.mul_(0.9).sub_(x.mean().item() * 0.1) * x.sum(),
    "returned, too": lambda x, w: (x * w.sum().item(), w.sum().item()),
    "drawn between": lambda x, w: torch.rand_like(x) * w.sum().item() + torch.rand_like(x),
    "through a text": lambda x, w: x * float(str(w.sum().item())) + float(f"{w[0].item()}"),
    "a clamp": lambda x, w: x.clamp(max=w.abs().max().item()),
    "an exponent": lambda x, w: x.abs().pow(w.abs().sum().item()),
}
LOOKED_AT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "compared": lambda x, w: x * w.sum().item() if w.sum().item() > 0.2 else x.abs(),
    "an index": lambda x, w: x[int(abs(w.sum().item()) * 3) % 4],
    "a size": lambda x, w: x.repeat(1 + int(abs(w.sum().item())) % 3, 1),
    "a whole number left of a float": lambda x, w: (
        x * 2,
        max(min((x[0, :2] > 0.5).sum().item(), w[0].item() % 2), 0.25),
    ),
    "a float left of a whole number": lambda x, w: x * 2 if 0.25 > (x[0, :2] > 0.5).sum().item() else x * 3,  # noqa: SIM300 - the order is what counts
    "a number of a text": lambda x, w: x * float(f"{w.sum().item():.2f}") + int(str(w[0].item())[-1]),
    "a text": lambda x, w: (x * 2, f"{w.sum().item():.1f}"),
    "a class": lambda x, w: x * (2 if type(w.sum().item()) is float else 3),
    "numbers in a tensor": lambda x, w: x.sum() * torch.tensor([w.sum().item(), 2.0]),
    "numpy": lambda x, w: x * float(w.detach().cpu().numpy().sum()),
    "a loop": lambda x, w: sum((x * w.sum().item() for _ in range(1 + int(w.abs().sum().item()) % 3)), x),
}


def reading(body: Callable[[Tensor, Tensor], Any], *, changes: bool = True) -> Callable[[Any], Any]:
    def program(wrap: Callable[[Any], Any]) -> Any:
        w = torch.tensor([0.3, -0.7, 1.1, 0.2])

        def function(x: Tensor) -> Any:
            return body(x, w)

        captured = wrap(function)

        def run(x: Tensor, number: int) -> Any:
            if changes:
                w.add_(0.01 * number)
            return captured(x)

        return run, lambda: w

    return program


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", READS)
def test_what_operators_get(name: str) -> None:
    mine = both(reading(READS[name]), lambda number: (data(number), number))
    if EXECUTES:
        assert recordings(mine).replays > CALLS // 2, recordings(mine)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", LOOKED_AT)
def test_what_the_body_looks_at(name: str) -> None:
    both(reading(LOOKED_AT[name]), lambda number: (data(number), number))


@pytest.mark.parametrize("body", [lambda x, w: x * w[0].item(), lambda x, w: x.abs().pow(w[0].item()).sqrt() + x])
def test_values_that_have_kernels_of_their_own(body: Callable[[Tensor, Tensor], Any]) -> None:
    values = [0.3, 0.7, 1.3, 0.4, 0.0, 1.0, 0.6, -1.0, 0.5, 2.0, 3.0, float("inf"), 0.8, float("nan"), 0.9, -0.0, -0.4]

    def program(wrap: Callable[[Any], Any]) -> Any:
        w = torch.tensor([0.3, -0.7])
        captured = wrap(lambda x: body(x, w))

        def run(x: Tensor, number: int) -> Any:
            w[0] = values[number % len(values)]
            return captured(x)

        return run, lambda: w

    both(program, lambda number: (data(number), number))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("body", [
    lambda x, w: x * w[0].item(),
    lambda x, w: x * round(w[0].item() / 4) + w[1].item(),
    lambda x, w: x + (w[0].item() - 3.0) * (w[1].item() * 0.0 + 0.25),
    lambda x, w: x.clamp(min=-abs(w[0].item())) * (w[0].item() // 5),
], ids=["a factor", "rounded", "a difference", "a quotient"])  # fmt: skip
@pytest.mark.parametrize("begin", [0.0, 1.0, 3.0, 3.25])
def test_values_that_stay_and_then_change(body: Callable[[Tensor, Tensor], Any], begin: float) -> None:
    """What is equal in both recordings may be another number later."""

    def program(wrap: Callable[[Any], Any]) -> Any:
        w = torch.tensor([begin, 0.7])
        captured = wrap(lambda x: body(x, w))

        def run(x: Tensor, number: int) -> Any:
            w[0] = begin if number < 13 or number == 21 else begin + number / 7
            return captured(x)

        return run, lambda: w

    both(program, lambda number: (data(number), number))


def test_values_of_which_python_cannot_compute() -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        w = torch.tensor([0.3, -0.7])
        captured = wrap(lambda x: x * (1 / w[0].item()) + w[1].item())

        def run(x: Tensor, number: int) -> Any:
            w[0] = 0.0 if number % 7 == 6 else number + 0.3
            return captured(x)

        return run, lambda: w

    both(program, lambda number: (data(number), number))


def test_state_that_comes_from_elsewhere() -> None:
    """Loaded states, another rate, parameters without a gradient, eager steps between."""

    def program(wrap: Callable[[Any], Any]) -> Any:
        model, head = net(), nn.Linear(4, 1)
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 1e-3)
        saved = copy.deepcopy(optimizer.state_dict())

        def step(x: Tensor, both: bool) -> Tensor:
            found: Tensor = model(x).square().mean() + (head(x).square().mean() if both else 0.0)
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            return found.detach()

        captured = wrap(step)

        def run(x: Tensor, number: int) -> Tensor:
            if number % 11 == 10:
                optimizer.load_state_dict(copy.deepcopy(saved))
            if number % 13 == 12:
                optimizer.param_groups[0]["lr"] *= 0.9
            if number % 9 == 8:
                model(x).mean().backward()
                optimizer.step()
            found: Tensor = captured(x, number % 5 != 4)
            return found

        return run, lambda: [list(model.parameters()), list(head.parameters()), optimizer.state_dict()]

    both(program, lambda number: (data(number), number))


def test_two_shapes_and_a_schedule() -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)

        def step(x: Tensor) -> Tensor:
            found: Tensor = model(x).square().mean()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            schedule.step()
            return found.detach()

        return wrap(step), lambda: [list(model.parameters()), optimizer.state_dict(), schedule.state_dict()]

    both(program, lambda number: (data(number)[: 4 + number % 2],))


class Tuned:
    """A program that keeps a number which it reads, and takes it in the next call."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight, self.total = torch.randn(4, 4, device=DEVICE), torch.zeros(1, device=DEVICE)
        self.alpha, self.beta, self.log = 1.3, 0.3, list[float]()

    def set(self) -> None:
        self.alpha = self.total.item()


def in_the_next_call(own: Tuned, x: Tensor) -> Tensor:
    y = x @ own.weight * own.alpha
    own.total += y.mean() * 0.1
    own.set()
    return y


def in_both_calls(own: Tuned, x: Tensor) -> Tensor:
    y = in_the_next_call(own, x)
    own.log.append(own.alpha)
    return y + own.alpha


def two_of_them(own: Tuned, x: Tensor) -> Tensor:
    y = in_the_next_call(own, x) + own.beta
    own.beta = own.beta * 0.9 + 0.1 * own.alpha
    return y * own.beta


def one_in_two_places(own: Tuned, x: Tensor) -> Tensor:
    y = in_the_next_call(own, x) * own.beta
    own.beta = own.alpha
    return y


def by_its_sign(own: Tuned, x: Tensor) -> Tensor:
    y = in_the_next_call(own, x)
    return torch.relu(y) if own.alpha > 0.1 else y


def as_an_exponent(own: Tuned, x: Tensor) -> Tensor:
    return in_the_next_call(own, x).abs() ** own.beta


KEPT = [in_the_next_call, in_both_calls, two_of_them, one_in_two_places, by_its_sign, as_an_exponent]


@given
@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("body", KEPT)
def test_numbers_that_were_read_in_the_call_before(body: Callable[[Tuned, Tensor], Tensor], is_set: bool) -> None:
    """``is_set``: now and then to numbers for which there are kernels of their own, or to another type."""

    def program(wrap: Callable[[Any], Any]) -> Any:
        own = Tuned()
        step = wrap(lambda x: body(own, x))

        def arguments(number: int) -> Tensor:
            odd = {20: 1.0, 24: 0.0, 28: -1.0, 32: 2, 36: math.nan}
            own.alpha = odd.get(number, own.alpha) if is_set else own.alpha
            if number == 38:
                own.total.fill_(0.5)
            return data(number)

        return lambda number: step(arguments(number)), lambda: [own.alpha, own.beta, own.total, own.log]

    step = both(program, lambda number: (number,))
    assert is_set or recordings(step).replays > CALLS // 2


@given
def test_numbers_of_the_call_beside_those_that_are_read() -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        total = torch.zeros(1, device=DEVICE)

        def scaled(x: Tensor, beta: float) -> Tensor:
            y = x * total.exp().item() * beta
            total.add_(y.mean() * 0.1)
            return y

        return wrap(scaled), lambda: [total]

    step = both(program, lambda number: (data(number), [0.1, 0.5, 1.0, 2.5, 0.3][number % 5] + number * 0.01))
    assert recordings(step).replays > CALLS // 2


@given
def test_a_step_beside_a_number_that_is_asked() -> None:
    """The loop of a training script gives the number of the batch, to log now and then: what the optimizer reads and
    what the body asks of that number are found out together."""

    def program(wrap: Callable[[Any], Any]) -> Any:
        model, seen = net(), list[Tensor]()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)

        @wrap
        def step(x: Tensor, batch: int) -> Tensor:
            found: Tensor = model(x).square().mean()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            if batch % 15 == 0:
                seen.append(found.detach())
            return found.detach()

        return step, lambda: [list(model.parameters()), optimizer.state_dict(), seen]

    step = both(program, lambda number: (data(number), number))
    assert recordings(step).replays > CALLS // 2


def test_functions_that_follow_one_another() -> None:
    """The second one's recording does not begin the step."""

    def program(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        first, second = nn.Linear(4, 16), nn.Linear(16, 4)
        optimizer = torch.optim.Adam(second.parameters(), 1e-3)
        before = capture(lambda x: first(x).detach())

        def step(x: Tensor) -> Tensor:
            found: Tensor = second(x).square().mean()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            return found.detach()

        captured = wrap(step)
        return lambda x: captured(before(x)), lambda: [list(second.parameters()), optimizer.state_dict()]

    both(program, lambda number: (data(number),))


@given
def test_a_recording_made_by_warmup() -> None:
    results = []
    for is_captured in (False, True):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            found: Tensor = model(x).square().mean()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            return found.detach()

        function = capture(step) if is_captured else step
        for number in range(3):
            function(data(number))
        if is_captured:
            warmup(function)(data(0))
        results.append([bits([function(data(number)), list(model.parameters()), optimizer.state_dict()])
                        for number in range(3, 20)])  # fmt: skip
    assert results[0] == results[1]


@given
def test_operators_that_raise_between() -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        w = torch.tensor([0.3, -0.7, 1.1, 0.2])

        def function(x: Tensor, at: Tensor) -> Tensor:
            w.mul_(x.mean().abs().item() * 0.1 + 0.9)
            found: Tensor = x.index_select(0, at) * w.sum().item()
            return found

        captured = wrap(function)

        def run(x: Tensor, at: Tensor) -> Any:
            try:
                return captured(x, at)
            except (IndexError, RuntimeError) as error:
                return type(error).__name__

        return run, lambda: w

    both(program, lambda number: (data(number), torch.tensor([99 if number % 7 == 6 else number % 8])))


def test_the_other_recording_is_not_counted() -> None:
    """Of the two that are made to find the numbers one goes again: it takes none of the places that there are."""
    thread_trees.forget_trees()
    count, total = torch.zeros(()), torch.zeros(3)

    def body(x: Tensor) -> Tensor:
        count.add_(1)
        total.add_(x, alpha=1 / (count.item() + 2))
        return total * 1

    kept = [capture(body) for _ in range(2)]
    for step in kept:
        for number in range(12):
            step(torch.ones(3) * number)
        assert recordings(step).replays > 2 or DEVICE.type != "cpu"
    trees = [tree for tree in thread_trees.trees_here().values() if tree.root.counts]
    assert trees or DEVICE.type != "cpu"
    for tree in trees:
        found = [node for nodes in tree.root.children.values() for node in nodes]
        assert sum(tree.root.counts.values()) == len(found)


@pytest.mark.slow
def test_reads_that_come_before_others_later() -> None:
    """A hook that logs is registered between calls: what it reads moves the numbers of the reads that operators get."""

    def program(wrap: Callable[[Any], Any]) -> Any:
        model, seen = net(), list[float]()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

        def step(x: Tensor) -> Tensor:
            found: Tensor = model(x).square().mean()
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            return found.detach()

        captured = wrap(step)

        def run(x: Tensor, number: int) -> Any:
            if number == 6:
                model.register_forward_hook(lambda _, __, output: seen.append(float(output.detach().sum())))
            return captured(x)

        return run, lambda: [list(model.parameters()), optimizer.state_dict(), seen]

    assert recordings(both(program, lambda number: (data(number), number))).replays
