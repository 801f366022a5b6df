"""Numbers of which the body only asks something: one recording for all that give the same answers."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, config, recordings
from tests.support.bucketed import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
Wrap = Callable[[Any], Any]
Step = Callable[[int], Any]
CALLS = 60


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False, drop_slow=False):
        yield


def twins(program: Callable[[Wrap], Step], calls: int = CALLS) -> int:
    """The program takes the same steps eagerly and captured: equal bit for bit, generators too. Gives the number of
    replays."""
    made: list[Any] = []

    def captured(target: Any) -> Any:
        made.append(capture(target))
        return made[-1]

    eager, mine = program(lambda target: target), program(captured)
    for n in range(1, calls + 1):
        torch.manual_seed(n)
        expected, state = told(eager, n), torch.get_rng_state()
        torch.manual_seed(n)
        got = told(mine, n)
        assert_same(got, expected)
        assert torch.equal(torch.get_rng_state(), state)
    return sum(recordings(function).replays for function in made)


def told(step: Step, n: int) -> Any:
    """What a step gives or raises."""
    try:
        return copy.deepcopy(step(n))
    except (ValueError, IndexError) as error:
        return type(error).__name__, str(error)


def asks(question: Callable[[Any], Any]) -> Callable[[Wrap], Step]:
    """A program with state that is written where the answer is true."""

    def program(wrap: Wrap) -> Step:
        total = torch.zeros(4)

        @wrap
        def f(x: Tensor, number: Any) -> Tensor:
            if question(number):
                total.add_(torch.rand(4))
            return torch.tanh(x) * 2 + total

        return lambda n: (f(torch.randn(4), n), total)

    return program


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "remainder": lambda n: n % 4 == 0,
    "no remainder": lambda n: not n % 3,
    "is one": lambda n: n % 2,
    "begin": lambda n: n < 30,
    "between": lambda n: 10 <= n < 40,
    "chained": lambda n: n > 20 and n % 5 == 0,
    "computed": lambda n: (n + 1) % 4 == 0 or (2 * n - 7) // 50 > 0,
    "unlike": lambda n: n != 7,
    "least": lambda n: min(n, 30) == 30,
    "helper": lambda n: is_due(n, every=6),
    "float": lambda n: n * 0.5 > 12.25,
    "absolute": lambda n: abs(n - 30) < 4,
}


def is_due(n: int, every: int) -> bool:
    return n >= every and (n - every) % every == 0


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_stand_for_a_number(name: str) -> None:
    assert twins(asks(QUESTIONS[name])) > CALLS // 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["begin", "between", "float", "absolute"])
def test_answers_stand_for_a_fraction(name: str) -> None:
    def program(wrap: Wrap) -> Step:
        step: Any = asks(QUESTIONS[name])(wrap)
        return lambda n: step(n + 0.25)

    assert twins(program) > CALLS // 2


def test_two_numbers_are_asked_together() -> None:
    def program(wrap: Wrap) -> Step:
        @wrap
        def f(x: Tensor, i: int, count: int) -> Tensor:
            return torch.relu(x) + torch.rand(4) if i < count - 1 else torch.relu(x)

        return lambda n: f(torch.randn(4), n % 7, 7 + n // 30)

    assert twins(program) > CALLS // 2


def test_loop_that_ends_at_zero_draws_as_eager_does() -> None:
    def program(wrap: Wrap) -> Step:
        betas = torch.linspace(0.1, 0.9, 20)

        @wrap
        def p_sample(x: Tensor, t: Tensor, t_index: int) -> Tensor:
            mean = x * betas.gather(0, t).view(-1, 1)
            return mean if t_index == 0 else mean + torch.randn_like(x)

        def step(n: int) -> Any:
            x = torch.randn(2, 4)
            for i in reversed(range(20)):
                x = p_sample(x, torch.full((2,), i), i)
            return x

        return step

    assert twins(program, calls=4) > 50


def test_delayed_update_in_a_whole_training_step() -> None:
    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        actor, critic = nn.Linear(4, 2), nn.Linear(6, 1)
        actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2, fused=True)
        optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2, fused=True)

        @wrap
        def update(x: Tensor, a: Tensor, global_step: int) -> Any:
            loss = critic(torch.cat([x, a], 1)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if global_step % 2 == 0:
                actor_optimizer.zero_grad()
                (-critic(torch.cat([x, actor(x)], 1)).mean()).backward()
                actor_optimizer.step()
            return loss.item()

        def step(n: int) -> Any:
            with torch.enable_grad():
                loss = update(torch.randn(8, 4), torch.randn(8, 2), n)
            return (
                loss,
                [*actor.parameters(), *critic.parameters()],
                [parameter.grad for parameter in actor.parameters()],
            )

        return step

    assert twins(program) > CALLS // 2


# ----------------------------------------------------------------------------------------- where more comes of a number


def bodies() -> dict[str, Callable[[Tensor, Any], Any]]:
    table, kept, words = [torch.full((4,), float(i)) for i in range(64)], dict[int, Any](), list[Any]()

    def keep(x: Tensor, n: int) -> Tensor:
        kept[0] = n
        return x + 1

    def append(x: Tensor, n: int) -> Tensor:
        words.append(n)
        return x + len(words)

    return {
        "index": lambda x, n: x + table[n % 3] if n > 1 else x,
        "remainder of two as an index": lambda x, n: x + table[n % 2] if n > 1 else x,
        "index that an answer bounds": lambda x, n: x + table[n] if 0 < n < 64 else x,
        "operator": lambda x, n: x * n if n > 1 else x,
        "size": lambda x, n: torch.zeros(n).sum() + x if n > 1 else x,
        "repeated": lambda x, n: sum((x for _ in range(n % 3)), x) if n > 1 else x,
        "returned": lambda x, n: (x + 1, n) if n > 1 else x,
        "computed and returned": lambda x, n: (x + 1, 2 * n % 7) if n > 1 else x,
        "text": lambda x, n: (x + 1, f"{n}") if n > 1 else x,
        "logarithm": lambda x, n: x + 1 if n > 0 and math.log(n) > 2.5 else x - 1,
        "kept": lambda x, n: keep(x, n) if n > 1 else x,
        "appended": lambda x, n: append(x, n) if n % 4 == 0 else x,
        "type": lambda x, n: x + 1 if type(n) is int and n > 3 else x - 1,
        "key": lambda x, n: x + {0: 1.0, 1: 2.0, 2: 3.0}[n % 3] if n > 1 else x,
        "bits": lambda x, n: x + (n & 1) if n > 1 else x,
        "rounded": lambda x, n: x + 1 if round(n / 10) > 2 else x - 1,
        "tensor of it": lambda x, n: x + torch.tensor([n, 1, 1, 1]) if n > 1 else x,
        "other size at one number": lambda x, n: x[:2] if n == 17 else x + 1,
    }


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", bodies())
def test_number_that_counts_for_more_is_never_taken_for_another(name: str) -> None:
    def program(wrap: Wrap) -> Step:
        f = wrap(bodies()[name])
        return lambda n: f(torch.arange(4.0) + n, n)

    twins(program)


def test_exception_that_tells_the_number() -> None:
    def program(wrap: Wrap) -> Step:
        @wrap
        def f(x: Tensor, n: int) -> Tensor:
            if n % 10 == 7:
                raise ValueError(n)
            return x + 1

        return lambda n: f(torch.randn(4), n)

    assert twins(program) > 20


def test_answers_after_which_the_number_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def program(wrap: Wrap) -> Step:
        @wrap
        def f(x: Tensor, n: int) -> Tensor:
            if n % 10 == 0:
                print("step", n)
            return torch.relu(x) + 1

        return lambda n: f(torch.randn(4), n)

    assert twins(program) > 20
    printed = capsys.readouterr().out.split("\n")
    assert sorted(printed) == sorted([f"step {n}" for n in range(10, CALLS + 1, 10)] * 2 + [""])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use", ["index", "factor", "kept"])
def test_state_that_makes_more_of_the_number_later(use: str) -> None:
    def program(wrap: Wrap) -> Step:
        mode, table = {"use": "", "last": 0}, [torch.full((4,), float(i)) for i in range(100)]

        @wrap
        def f(x: Tensor, n: int) -> Tensor:
            y = x + 1 if n % 4 == 0 else x - 1
            if mode["use"] == "index":
                y = y + table[n]
            elif mode["use"] == "factor":
                y = y * n
            elif mode["use"] == "kept":
                mode["last"] = n
            return y

        def step(n: int) -> Any:
            mode["use"] = use if n > 25 else ""
            return f(torch.randn(4), n), dict(mode)

        return step

    assert twins(program) > 10


def test_other_shape_that_makes_more_of_the_number() -> None:
    def program(wrap: Wrap) -> Step:
        @wrap
        def f(x: Tensor, n: int) -> Tensor:
            y = x + 1 if n % 4 == 0 else x - 1
            return y * n if x.shape[0] > 4 else y

        return lambda n: f(torch.randn(8 if n > 30 and n % 3 == 0 else 4), n)

    assert twins(program) > 10


def test_value_of_a_tensor_that_makes_more_of_the_number() -> None:
    def program(wrap: Wrap) -> Step:
        @wrap
        def f(x: Tensor, n: int) -> Tensor:
            y = x + 1 if n % 4 == 0 else x - 1
            return y * n if x.sum() > 3 else y

        return lambda n: f(torch.full((4,), 1.0 if n % 5 == 0 else 0.0), n)

    twins(program)


def test_type_of_the_number_that_changes() -> None:
    def program(wrap: Wrap) -> Step:
        @wrap
        def f(x: Tensor, n: Any) -> Any:
            return x + 1 if n % 4 == 0 else x - 1

        kinds = (int, float, bool, lambda n: torch.tensor(n), int)
        return lambda n: f(torch.randn(4), kinds[n // 12 % 5](n))

    assert twins(program) > 10


def test_method_of_a_module_and_a_keyword() -> None:
    class Model(nn.Module):
        def __init__(self, wrap: Wrap) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.step = wrap(self.own)

        def own(self, x: Tensor, *, step: int = 0) -> Tensor:
            y: Tensor = self.linear(x)
            return y.relu() if step % 3 else y

    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        model = Model(wrap)
        return lambda n: model.step(torch.randn(2, 4), step=n)

    assert twins(program) > CALLS // 2


LOG = logging.getLogger("tests.of.decisions")


def logged(n: int) -> None:
    if n % 20 == 0:
        LOG.debug("step %d of %d", n, n % 7)


def f_string(n: int) -> None:
    if n % 20 == 0:
        LOG.debug(f"{n % 7}% done")


def documented(n: int) -> None:
    """Logs n, as in "%d"."""
    if n % 20 == 0:
        LOG.debug("done")


@pytest.mark.parametrize("log", [logged, f_string, documented])
def test_remainders_beside_texts_that_something_else_formats(log: Callable[[int], None]) -> None:
    """``%`` is taken of numbers here, and no text stands on its left."""

    def program(wrap: Wrap) -> Step:
        @wrap
        def f(x: Tensor, n: int) -> Tensor:
            log(n)
            return torch.relu(x) + (1 if n % 4 == 0 else 2)

        return lambda n: f(torch.randn(4), n)

    assert twins(program) > CALLS // 2


TEXTS: dict[str, Callable[[Any], str]] = {
    "literal": lambda n: "%.0f" % (n / 100),
    "named": lambda n: _named("%d", n // 100),
    "joined": lambda n: ("%d" + " done") % (n // 50),
    "either": lambda n: ("%d" if n > 0 else "%x") % (n // 50),
}


def _named(text: str, n: int) -> str:
    """Of a default argument, "%d", and n."""
    form = "%d" if text else "%x"
    return form % n


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_formatted_by_remainder(name: str) -> None:
    """A number that C code reads for a text stays in the key, though most such texts are alike."""

    def program(wrap: Wrap) -> Step:
        texts: list[str] = []

        @wrap
        def f(x: Tensor, n: int) -> Tensor:
            if n % 20 == 0:
                texts.append("twenty")
            texts.append(TEXTS[name](n))
            return torch.relu(x) + 1

        return lambda n: (f(torch.randn(4), n), texts)

    twins(program)


def test_undone_runs_leave_no_trace() -> None:
    """A body that counts its runs counts one for each call."""

    def program(wrap: Wrap) -> Step:
        seen, results = {"n": 0}, list[Tensor]()

        @wrap
        def f(x: Tensor, step: int) -> Tensor:
            seen["n"] += 1
            results.append(x * 2)
            return x + torch.rand(4) if step % 3 else x

        return lambda n: (f(torch.randn(4), n), seen["n"], results)

    assert twins(program) > CALLS // 2


def test_first_number_after_whose_answer_more_comes_of_it() -> None:
    """A loop from 0 logs in its first step. The numbers after it show that answers are enough."""

    def program(wrap: Wrap) -> Step:
        lines: list[str] = []

        @wrap
        def f(x: Tensor, n: int) -> Tensor:
            if n % 20 == 0:
                lines.append(f"step {n}")
            return torch.relu(x) + 1

        return lambda n: (f(torch.randn(4), n - 1), lines)

    assert twins(program) > CALLS // 2
