"""Steps with numbers that the host reads, called with one size after another: what was shown for one size holds for
others where the same code does the same, and for no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, capture, recordings
from capture.runtime import decisions, given_numbers
from tests.support.bucketed import assert_same
from tests.support.device import DEVICE, EXECUTES
from tests.support.no_plans import no_plans as no_plans
from tests.support.training_twins import bits, net

pytestmark = pytest.mark.skipif(not EXECUTES, reason="segments that are captured are not compared with others")
EACH, SIZES = 6, (3, 4, 5, 6)
SOME, MORE = 3.5, 20.5
Program = Callable[[Callable[[Any], Any]], tuple[Callable[[Tensor, int], Any], Callable[[], Any], Any]]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


class Counted:
    """How often the numbers of a call were proven, in full and by one run, and recordings made with other numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = self.short = self.others = 0
        proof, again, other = decisions._proof, decisions._shown_again, given_numbers._other

        def count_full(*args: Any) -> Any:
            self.full += 1
            return proof(*args)

        def count_short(*args: Any) -> Any:
            found = again(*args)
            self.short += found is not None
            return found

        def count_other(*args: Any) -> Any:
            self.others += 1
            return other(*args)

        monkeypatch.setattr(decisions, "_proof", count_full)
        monkeypatch.setattr(decisions, "_shown_again", count_short)
        monkeypatch.setattr(given_numbers, "_other", count_other)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def both(program: Program, sizes: Any = SIZES, each: int = EACH) -> Any:
    """The program eagerly and captured: results and what is left are equal after each call."""
    torch.manual_seed(0)
    (eager, theirs, _), (ours_run, ours, captured) = program(lambda f: f), program(capture)
    generator, number = torch.Generator().manual_seed(1), 0
    for size in sizes:
        for _ in range(each):
            x = torch.randn(size, 4, generator=generator).to(DEVICE)
            expected, result = eager(x.clone(), number), ours_run(x.clone(), number)
            assert_same(bits(result), bits(expected))
            assert_same(bits(ours()), bits(theirs()))
            number += 1
    return captured


def training(
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, 1e-2),
    before: Callable[[Any, nn.Module, int], None] = lambda optimizer, model, number: None,
    loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean(),
) -> Program:
    def program(wrap: Callable[[Any], Any]) -> Any:
        model = net()
        optimizers = [make(model.parameters())]

        class Trainer:
            optimizer = optimizers[0]

            def step(self, x: Tensor) -> Any:
                self.optimizer.zero_grad()
                found = loss(model(x))
                found.backward()
                self.optimizer.step()
                return found.item()

        trainer = Trainer()
        captured = wrap(trainer.step)

        def run(x: Tensor, number: int) -> Any:
            before(trainer, model, number)
            return captured(x)

        return run, lambda: [list(model.parameters()), trainer.optimizer.state_dict()], captured

    return program


def test_a_new_size_takes_one_run_and_one_recording(counted: Counted) -> None:
    captured = both(training())
    full, short, others = counted.full, counted.short, counted.others
    assert short >= len(SIZES) - 1
    assert recordings(captured).replays >= len(SIZES) * 2
    captured = both(training(), sizes=(*SIZES, 7, 8))
    assert (counted.full, counted.others) == (2 * full, 2 * others)  # none for further sizes
    assert counted.short > 2 * short
    assert recordings(captured).replays >= (len(SIZES) + 2) * 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", [
    lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True), lambda p: torch.optim.NAdam(p, 1e-2),
    lambda p: torch.optim.RAdam(p, 1e-2), lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.01),
    lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9), lambda p: torch.optim.Adamax(p, 1e-2),
])  # fmt: skip
def test_other_optimizers(make: Any) -> None:
    both(training(make))


def change_the_rate(trainer: Any, model: nn.Module, number: int) -> None:
    if number % EACH == 0 and number:
        trainer.optimizer.param_groups[0]["lr"] *= 0.5


def change_a_setting(trainer: Any, model: nn.Module, number: int) -> None:
    if number % EACH == 0 and number:
        trainer.optimizer.param_groups[0]["betas"] = (0.8 + 0.01 * number / EACH, 0.99)


def add_a_group(trainer: Any, model: nn.Module, number: int) -> None:
    if number == 2 * EACH:
        torch.manual_seed(3)
        more = nn.Parameter(torch.randn(4, device=DEVICE))
        more.grad = torch.randn(4, device=DEVICE)
        trainer.optimizer.add_param_group({"params": [more], "lr": 0.1})


def take_another(trainer: Any, model: nn.Module, number: int) -> None:
    if number == 2 * EACH:
        trainer.optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if number == 3 * EACH:
        trainer.optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.85, 0.99))


def scale_the_rate(trainer: Any, model: nn.Module, number: int) -> None:
    trainer.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + number // EACH)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "before", [change_the_rate, change_a_setting, add_a_group, take_another, scale_the_rate],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_an_optimizer_that_is_another_with_a_new_size(before: Any) -> None:
    both(training(before=before))


def test_a_size_with_another_branch() -> None:
    both(training(loss=lambda y: y.square().mean() if y.shape[0] % 2 else y.abs().sum() * 0.5))


class Levels:
    """A number that is read, which stays what it is for some calls."""

    def __init__(self, begin: float = 3.0) -> None:
        self.level = torch.tensor(begin, device=DEVICE)
        self.total = torch.zeros(4, device=DEVICE)
        self.t = 3


def as_size_tells(x: Tensor, n: float) -> float:
    return n if x.shape[0] > 4 else 3.0


def as_size_tells_not(x: Tensor, n: float) -> float:
    return 3.0 if x.shape[0] > 4 else n


def scaled(x: Tensor, n: float) -> float:
    return n / x.shape[0]


def compared_unnoticed(x: Tensor, n: float) -> float:
    return (n if x.shape[0] <= 4 or SOME > n else 2 * n) * 1.5  # noqa: SIM300 - the float asks


def by_a_power(x: Tensor, n: float) -> float:
    return n**2.5 if x.shape[0] > 4 else n * 1.25


def of_both(x: Tensor, n: float) -> float:
    return n * 1.5 if x.shape[0] % 2 else n + 1.5  # equal where n is 3


NUMBERS = [as_size_tells, as_size_tells_not, scaled, compared_unnoticed, by_a_power, of_both]
USES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "a factor": lambda x, n: x * n,
    "a tensor": lambda x, n: x * torch.tensor(n),
    "two factors": lambda x, n: x * n * 3.0,
    "added": lambda x, n: torch.add(x, x, alpha=n),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("number_of", NUMBERS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("stays", [1, 4, 9])
def test_formulas_that_differ_by_size(number_of: Any, use: str, stays: int) -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        state = Levels()

        def step(x: Tensor) -> Tensor:
            found = USES[use](x, number_of(x, state.level.item()) * 1.0625)
            state.total += found.sum(0)
            return found

        captured = wrap(step)

        def run(x: Tensor, number: int) -> Any:
            if number % stays == stays - 1:
                state.level += 0.375 if number % 2 else 1.0
            return captured(x)

        return run, lambda: [state.total, state.level], captured

    both(program, each=9)


def asked_by_a_float(x: Tensor, t: int) -> Tensor:
    return x * (1.5 if MORE > t else 2.5) if x.shape[0] > 4 else x * t  # noqa: SIM300 - the float asks


@pytest.mark.one_in(2)
@pytest.mark.parametrize("use", [
    lambda x, t: x * t, lambda x, t: x * (0.1 * t), lambda x, t: x * (t if x.shape[0] > 4 else 20),
    lambda x, t: x[: t % 3 + 1] if x.shape[0] > 5 else x * t, lambda x, t: x * sum(range(t if x.shape[0] > 4 else 3)),
    asked_by_a_float, lambda x, t: x * (t * x.shape[0]),
    lambda x, t: x * (0.9**t if x.shape[0] > 4 else 0.5),
])  # fmt: skip
@pytest.mark.parametrize("every", [1, 4])
def test_plain_numbers_over_sizes(use: Any, every: int) -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        state = Levels()

        def step(x: Tensor) -> Tensor:
            found: Tensor = use(x, state.t)
            state.t += 1
            state.total += found.sum(0)
            return found

        captured = wrap(step)

        def run(x: Tensor, number: int) -> Any:
            if number % every:
                state.t -= 1
            return captured(x)

        return run, lambda: [state.total, state.t], captured

    both(program, each=9)
