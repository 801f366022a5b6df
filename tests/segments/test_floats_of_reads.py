"""``float(x)`` and ``float(x.item())``: Python gets a number of what it reads, as it does by ``item()``, and replays do
what they do for that one. A body that tells floats otherwise gets what eager gives."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, config, recordings
from capture.tree import thread_trees
from tests.support.device import EXECUTES
from tests.support.training_twins import CALLS, both, data, net

Body = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    thread_trees.forget_trees()
    with warnings.catch_warnings(), config.patch(drop_slow=False, cache=False), torch.enable_grad():
        warnings.simplefilter("ignore", CaptureWarning)
        warnings.filterwarnings("ignore", "Converting a tensor")
        yield


class Trainer:
    """Its attributes are the state."""

    def __init__(self) -> None:
        self.model: nn.Module = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.total, self.hits, self.count, self.best = 0.0, 0, 0, math.inf
        self.history: list[Any] = []

    def fit(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self) -> Any:
        return [list(self.model.parameters()), self.total, self.hits, self.count, self.best, self.history]


def returned(s: Trainer, x: Tensor) -> float:
    return float(s.fit(x).item())


def in_a_dict(s: Trainer, x: Tensor) -> dict[str, Any]:
    loss = s.fit(x)
    return {"loss": float(loss.item()), "twice": float(loss.item()) * 2, "most": bool(x.max().item() > 2)}


def gathered(s: Trainer, x: Tensor) -> float:
    loss = s.fit(x)
    s.total += float(loss.item()) * len(x)
    s.history.append(float(loss))
    s.hits += int((x > 0).sum().item())
    return float((x > 1).sum().item())


def an_average(s: Trainer, x: Tensor) -> float:
    value = float(s.fit(x))
    s.total = 0.9 * s.total + 0.1 * value
    return s.total


def the_best(s: Trainer, x: Tensor) -> float:
    value = float(s.fit(x).detach())
    s.best = min(s.best, value)
    return value


def if_finite(s: Trainer, x: Tensor) -> float:
    loss = (s.model(x) - x).square().mean()
    if not math.isfinite(float(loss)):
        raise ZeroDivisionError("not finite")
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return float(loss)


def if_the_tensor_is_finite(s: Trainer, x: Tensor) -> float:
    loss = (s.model(x) - x).square().mean()
    if math.isnan(loss) or math.isinf(loss):
        s.count += 1
        return 0.0
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return math.exp(-loss)


def of_whole_numbers(s: Trainer, x: Tensor) -> float:
    share = float((x > 0).sum()) / len(x)
    s.total += share if share > 1.5 else 0.0
    return share


REPLAYED: list[Body] = [
    returned, in_a_dict, gathered, an_average, the_best, if_finite, if_the_tensor_is_finite, of_whole_numbers
]  # fmt: skip


def by_its_class(s: Trainer, x: Tensor) -> Any:
    value = float(s.fit(x))
    s.total = {float: 1, int: 2}[type(value)] + (value if type(value) is float else 0)
    return s.total * 2 if s.total > 3 else s.total


def asked_for_its_class(s: Trainer, x: Any) -> Any:
    value: Any = float(s.fit(x))
    s.total = value * 2 if isinstance(value, float) and not isinstance(x, float) else value
    return s.total if s.total > 3 else issubclass(type(value), float)


def handed_on(s: Trainer, x: Tensor) -> Any:
    s.history[:] = map(float, x[0, :2])
    return sum(s.history) if s.history[0] > 0 else float.fromhex(s.history[1].hex())


def as_a_dtype(s: Trainer, x: Any) -> Any:
    value = float(x.mean())
    return x.to(float) * value if value > 0 else value


def of_a_text(s: Trainer, x: Tensor) -> Any:
    return x * float(f"{float(x.mean()):.1f}") + float("0.5")


def of_many(s: Trainer, x: Tensor) -> Any:
    s.count += 1
    try:
        return float(x) if s.count % 2 else float(x[0, 0]) + s.best
    except (RuntimeError, ValueError, TypeError):
        return x.sum()


LOOKED_AT: list[Body] = [by_its_class, asked_for_its_class, handed_on, as_a_dtype, of_a_text, of_many]


def program(body: Body) -> Callable[[Any], Any]:
    def make(wrap: Callable[[Any], Any]) -> Any:
        trainer = Trainer()
        return wrap(lambda x: body(trainer, x)), trainer.state

    return make


def odd(number: int) -> tuple[Tensor]:
    """Among them infinite ones, and ones of another size."""
    x = data(number)[: 5 if number % 7 == 6 else 8]
    return (x * {17: math.inf, 18: math.nan}.get(number, 1.0),)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arguments", [lambda number: (data(number),), odd], ids=["plain", "odd"])
@pytest.mark.parametrize("body", [*REPLAYED, *LOOKED_AT], ids=lambda body: body.__name__)
def test_what_is_made_of_them(body: Body, arguments: Callable[[int], tuple[Any, ...]]) -> None:
    mine = both(program(body), arguments)
    if EXECUTES and body in REPLAYED and arguments is not odd:
        assert recordings(mine).replays > CALLS // 2


OWN_FLOAT = """
def float(x):
    return x.item() + 1


def body(s, x):
    s.total += float(s.fit(x))
    return float(x[0, 0])
"""


def test_a_users_own_float() -> None:
    """A module that has its own keeps it."""
    own = types.ModuleType("tests.segments.own_float")
    exec(OWN_FLOAT, vars(own))  # noqa: S102 - code of a user
    both(program(vars(own)["body"]), lambda number: (data(number),))


def test_no_module_keeps_the_other_float() -> None:
    both(program(an_average), lambda number: (data(number),))
    assert "float" not in globals()
    assert "float" not in vars(math)


ANOTHER_NAME = """
plain = {"of": float}


def body(s, x):
    mean = plain["of"](x.mean())
    return x * 2, (mean if mean > 0 else 0) // 0.5
"""


def test_pythons_own_float_by_another_name() -> None:
    """Nobody sees what becomes of what it gives, so no formula has it: most means here are below a half."""
    own = types.ModuleType("tests.segments.own_name")
    exec(ANOTHER_NAME, vars(own))  # noqa: S102 - code of a user
    scales = [0.1, -0.1, 0.2, 0.1, -0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.7, 1.3]

    def arguments(number: int) -> tuple[Tensor]:
        return (torch.full((4,), scales[number % len(scales)] + number / 1000),)

    both(program(vars(own)["body"]), arguments)
