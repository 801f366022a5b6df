"""What training loops do in every n-th call: they put something into a log and set a sum back. The calls between go on
with what was recorded, and a log on which something depends is still looked at."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from capture import capture, config, recordings
from tests.support.device import EXECUTES
from tests.support.training_twins import CALLS, bits, both, data, net

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
LOG: list[Any] = []
Body = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    LOG.clear()
    with config.patch(cache=False):
        yield


class Trainer:
    def __init__(self) -> None:
        self.n, self.running, self.best = 0, 0.0, math.inf
        self.log: list[Any] = []
        self.alias: list[Any] = self.log
        self.recent: deque[Any] = deque(maxlen=3)
        self.history: dict[str, Any] = {"loss": [], "updates": 0}
        self.forward = 0
        self.meter = Meter()
        self.mode: Any = "none"
        self.model = net()

    def loss(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x).square().mean()
        return found


def appended(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.log.append("five")
    return own.loss(x)


def logged_value(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    loss = own.loss(x)
    if own.n % 5 == 0:
        own.log.append(loss.item())
    return loss


def in_a_deque(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.recent.append(1)
    return own.loss(x)


def in_a_dict(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.history["loss"].append(1)
    return own.loss(x)


def in_a_global(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        LOG.append(own.n // 5 > 0)
    return own.loss(x)


def running_loss(own: Trainer, x: Tensor) -> Any:
    loss = own.loss(x)
    own.n += 1
    own.running += loss.item()
    if own.n % 5 == 0:
        own.log.append(own.running / 5)
        own.running = 0.0
    return loss


def counted_in_the_branch(own: Trainer, x: Tensor) -> Any:
    """Where the name is that of a method that is called, too."""
    own.n += 1
    if own.n % 5 == 0:
        own.forward += 1
        own.history["updates"] += 1
    return own.model.forward(x)


def differentiated(own: Trainer, x: Tensor) -> Any:
    """What torch compares there are shapes, with functions of ``operator``."""
    own.n += 1
    if own.n % 5 == 0:
        own.log.append(1)
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        result = own.model(given)
        found: Tensor = torch.autograd.grad(result, given, torch.ones_like(result))[0]
    return found


class Meter:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val = self.avg = self.sum = self.count = 0.0

    def update(self, value: float, n: int) -> None:
        self.val = value
        self.sum += value * n
        self.count += n
        self.avg = self.sum / self.count


class WholeMeter(Meter):
    """Numbers of another type are there after it was set back."""

    @override
    def reset(self) -> None:
        self.val = self.avg = self.sum = self.count = 0


def metered(own: Trainer, x: Tensor) -> Any:
    loss = own.loss(x)
    own.n += 1
    own.meter.update(loss.item(), len(x))
    if own.n % 10 == 0:
        own.log.append(own.meter.avg)
        own.meter.reset()
    return loss


def set_back_to_a_whole_number(own: Trainer, x: Tensor) -> Any:
    loss = own.loss(x)
    own.n += 1
    own.running += loss.item()
    if own.n % 5 == 0:
        own.log.append(own.running)
        own.running = 0
    return loss


def made(body: Body) -> Any:
    """A trainer that has the body as its method."""
    return type("Own", (Trainer,), {"step": body})()


def taken(body: Body, calls: int = CALLS) -> int:
    """Take all steps beside an eager twin. Gives the calls after the first ten, between those that log something, that
    were no replays."""
    own, other, others = made(body), made(body), 0
    own.step = step = capture(own.step)
    for number in range(calls):
        before, seen = recordings(step).replays, list[Any]()
        for trainer in (other, own):
            LOG.clear()
            result = trainer.step(data(number))
            state = (
                trainer.n,
                trainer.running,
                trainer.log,
                trainer.history,
                trainer.forward,
                vars(trainer.meter),
                trainer.mode,
                [*trainer.recent],
                LOG,
            )
            seen.append((bits(result), bits(state)))
        assert seen[0] == seen[1], number
        others += number >= 10 and number % 5 != 4 and recordings(step).replays == before
    return others


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "body",
    [
        appended, logged_value, in_a_deque, in_a_dict, in_a_global, running_loss, counted_in_the_branch, differentiated,
    ],
)  # fmt: skip
def test_calls_between_go_on_with_what_was_recorded(body: Body) -> None:
    with torch.no_grad(), config.patch(drop_slow=False):
        others = taken(body)
    assert others <= (1 if EXECUTES else 3)


def test_a_sum_that_changes_its_type() -> None:
    with torch.no_grad(), config.patch(drop_slow=False):
        taken(set_back_to_a_whole_number)


@pytest.mark.parametrize("kind", [Meter, WholeMeter])
def test_a_meter_that_is_set_back(kind: type[Meter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Meter", kind)
    with torch.no_grad(), config.patch(drop_slow=False):
        others = taken(metered, 60)
    # a number of another type is another key
    assert others <= (7 if kind is WholeMeter else 2) + (0 if EXECUTES else 3)


def sets_a_mode(own: Trainer, x: Tensor) -> Any:
    """Nothing looks the name up, so it does not matter what others put there."""
    own.mode = "train"
    return own.loss(x)


def sets_a_mode_and_asks(own: Trainer, x: Tensor) -> Any:
    was = own.mode
    own.mode = "train"
    return own.loss(x) * (2 if was == "eval" else 1)


def sets_a_mode_and_asks_for_all(own: Trainer, x: Tensor) -> Any:
    was = "eval" in [one for one in vars(own).values() if type(one) is str]
    own.mode = "train"
    return own.loss(x) * (2 if was else 1)


@pytest.mark.parametrize("body", [sets_a_mode, sets_a_mode_and_asks, sets_a_mode_and_asks_for_all])
def test_a_name_that_is_set_and_that_others_set(body: Body) -> None:
    own, other = made(body), made(body)
    own.step = step = capture(own.step)
    with torch.no_grad(), config.patch(drop_slow=False):
        for number in range(CALLS):
            for trainer in (own, other):
                if number % 3 == 1:
                    trainer.mode = ["eval", "train", number][number % 9 // 3]
            assert bits(own.step(data(number))) == bits(other.step(data(number))), number
            assert own.mode == other.mode == "train"
    assert recordings(step).replays >= (CALLS // 2 if body is sets_a_mode else 0)


def asks_for_its_length(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.log.append(1)
    return own.loss(x) * len(own.log)


def asks_for_its_alias(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.log.append(1)
    return own.loss(x) + (1 if own.alias else 0)


def asks_for_its_last(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.history["loss"].append(own.n)
    return own.loss(x) * sum(own.history["loss"][-1:])


def asks_by_another_way(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.log.append(1)
    return own.loss(x) * sum(len(one) for one in vars(own).values() if type(one) is list)


def gives_it(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.log.append(1)
    return own.loss(x), own.log


def asks_for_a_count_of_the_branch(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.forward += 1
    return own.loss(x) * (2 if own.forward > 3 else 1)


def asks_for_a_count_in_a_dict(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.history["updates"] += 1
    return own.loss(x) * own.history["updates"]


def asks_for_all_in_a_dict(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.history["updates"] += 1
    return own.loss(x) * sum(one for one in own.history.values() if type(one) is int)


def fills_a_short_deque(own: Trainer, x: Tensor) -> Any:
    own.n += 1
    if own.n % 5 == 0:
        own.recent.append(own.n)
    return own.loss(x) * len(own.recent)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "body",
    [
        asks_for_its_length, asks_for_its_alias, asks_for_its_last, asks_by_another_way, gives_it, fills_a_short_deque,
        asks_for_a_count_of_the_branch, asks_for_a_count_in_a_dict, asks_for_all_in_a_dict,
    ],
)  # fmt: skip
def test_a_log_that_is_asked_for_is_still_looked_at(body: Body) -> None:
    with torch.no_grad(), config.patch(drop_slow=False):
        taken(body)


def test_a_log_that_others_replace_and_fill() -> None:
    own, other = made(appended), made(appended)
    own.step = capture(own.step)
    with torch.no_grad(), config.patch(drop_slow=False):
        for number in range(CALLS):
            for trainer in (own, other):
                if number % 7 == 3:
                    trainer.log.append("from outside")
                if number % 11 == 6:
                    trainer.log = trainer.alias = ["another"]
            assert bits(own.step(data(number))) == bits(other.step(data(number)))
            assert own.log == other.log
            assert own.log is own.alias


def test_a_counter_beside_adam_is_tried_once_its_step_is_an_island() -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        own = Trainer()

        def step(x: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), x[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            own.n += 1
            if own.n % 2 == 0:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.999)
            return loss.detach()

        return wrap(step), lambda: [list(model.parameters()), optimizer.state_dict(), own.n]

    with config.patch(drop_slow=True):  # so that the budget counts times
        step = both(program, lambda number: (data(number),))
    assert recordings(step).replays >= 5
