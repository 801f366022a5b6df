"""Counters in Python state of which the body asks something, as ``self.step += 1; if self.step % 4 == 0:`` does."""

from __future__ import annotations

import copy
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capture import capture, config, recordings
from tests.runtime.test_decisions import CALLS, Step, Wrap, twins
from tests.support.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False, drop_slow=False):
        yield


class Own:
    """State of a user's program: counters, and a sum that is written where the question is answered with yes."""

    def __init__(self) -> None:
        self.n, self.other, self.total = 0, 7, torch.zeros(4)
        self.stats: dict[str, Any] = {"n": 0, "seen": "no"}
        self.config = SimpleNamespace(n=0)
        self.log: list[Any] = []

    def add(self) -> None:
        self.total.add_(torch.rand(4))


def every_fourth(own: Own, x: Tensor) -> Any:
    own.n += 1
    if own.n % 4 == 0:
        own.add()
    return torch.tanh(x) + own.total


def after_it(own: Own, x: Tensor) -> Any:
    if own.n % 4 == 0:
        own.add()
    own.n += 1
    return torch.tanh(x) + own.total


def item(own: Own, x: Tensor) -> Any:
    own.stats["n"] += 1
    if own.stats["n"] > 20:
        own.add()
    return x * 2 + own.total


def deeper(own: Own, x: Tensor) -> Any:
    own.config.n = own.config.n + 2
    if own.config.n % 6 == 0:
        own.add()
    return x * 2 + own.total


def reset(own: Own, x: Tensor) -> Any:
    own.n += 1
    if own.n >= 30:
        own.add()
        own.n = 0
    return x * 2 + own.total


def downwards(own: Own, x: Tensor) -> Any:
    own.n -= 1
    if own.n < -20:
        own.add()
    return x * 2 + own.total


def two(own: Own, x: Tensor) -> Any:
    own.n += 1
    own.other += 3
    if own.n % 3 == 0 and own.other > 40:
        own.add()
    return x * 2 + own.total


def more_then(own: Own, x: Tensor) -> Any:
    """It counts by another amount after one of the answers."""
    own.n += 5 if own.n % 4 == 0 else 1
    return x * 2


COUNTERS = [every_fourth, after_it, item, deeper, reset, downwards, two, more_then]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("body", COUNTERS, ids=lambda body: body.__name__)
def test_answers_stand_for_a_counter(body: Callable[[Own, Tensor], Any]) -> None:
    def program(wrap: Wrap) -> Step:
        own = Own()
        f = wrap(lambda x: body(own, x))
        return lambda _: (f(torch.randn(4)), vars(own))

    assert twins(program) > CALLS // 3


@pytest.mark.one_in(6)
@pytest.mark.parametrize("body", COUNTERS, ids=lambda body: body.__name__)
def test_counter_that_is_set_outside(body: Callable[[Own, Tensor], Any]) -> None:
    def program(wrap: Wrap) -> Step:
        own = Own()
        f = wrap(lambda x: body(own, x))

        def step(n: int) -> Any:
            if n % 17 == 0:
                own.n, own.stats["n"], own.config.n = n, 3, -1
            if n == 40:
                own.stats = {"n": 100, "seen": "no"}
                own.config = SimpleNamespace(n=1)
            return f(torch.randn(4)), vars(own)

        return step

    twins(program)


def logged(own: Own, x: Tensor) -> Any:
    own.n += 1
    if own.n % 10 == 0:
        own.log.append(own.n)
    return x + 1


def printed(own: Own, x: Tensor) -> Any:
    own.n += 1
    return x + len(f"{own.n}")


def factor(own: Own, x: Tensor) -> Any:
    own.n += 1
    return x * own.n if own.n > 3 else x


def index(own: Own, x: Tensor) -> Any:
    own.n += 1
    return x + (10, 20, 30)[own.n % 3] if own.n > 3 else x


def returned(own: Own, x: Tensor) -> Any:
    own.n += 1
    return (x + 1, own.n) if own.n > 3 else x


def kept(own: Own, x: Tensor) -> Any:
    own.n += 1
    if own.n > 3:
        own.other = own.n
    return x + 1


def doubled(own: Own, x: Tensor) -> Any:
    own.n = 2 * own.n + 1 if own.n < 1000 else 0
    return x + 1


def by_what_is_read(own: Own, x: Tensor) -> Any:
    own.n += int(x.sum() > 0)
    return x + 1 if own.n % 4 == 0 else x - 1


def of_a_size(own: Own, x: Tensor) -> Any:
    own.n += x.shape[0]
    return x + 1 if own.n % 8 == 0 else x - 1


def to_a_fraction(own: Own, x: Tensor) -> Any:
    own.n += 1 if own.n < 40 else 0.5  # type: ignore[assignment]
    return x + 1 if own.n % 4 == 0 else x - 1


def raises(own: Own, x: Tensor) -> Any:
    own.n += 1
    if own.n % 10 == 7:
        raise ValueError(own.n)
    return x + 1


def put_elsewhere(own: Own, x: Tensor) -> Any:
    own.stats["n"] = own.n = own.n + 1
    return x + 1 if own.n % 4 == 0 else x - 1


MORE = [logged, printed, factor, index, returned, kept, doubled, by_what_is_read, of_a_size, to_a_fraction, raises,
        put_elsewhere]  # fmt: skip


@pytest.mark.one_in(18)
@pytest.mark.parametrize("body", MORE, ids=lambda body: body.__name__)
def test_counter_that_counts_for_more_is_never_taken_for_another(body: Callable[[Own, Tensor], Any]) -> None:
    def program(wrap: Wrap) -> Step:
        own = Own()
        f = wrap(lambda x: body(own, x))
        return lambda n: (f(torch.arange(4.0) - n % 7), vars(own))

    twins(program)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use", ["index", "factor", "kept"])
def test_state_that_makes_more_of_the_counter_later(use: str) -> None:
    def program(wrap: Wrap) -> Step:
        own, table = Own(), [torch.full((4,), float(i)) for i in range(100)]

        @wrap
        def f(x: Tensor) -> Tensor:
            own.n += 1
            y = x + 1 if own.n % 4 == 0 else x - 1
            if own.stats["seen"] == "index":
                y = y + table[own.n]
            elif own.stats["seen"] == "factor":
                y = y * own.n
            elif own.stats["seen"] == "kept":
                own.other = own.n
            return y

        def step(n: int) -> Any:
            own.stats["seen"] = use if n > 25 else "no"
            return f(torch.randn(4)), vars(own)

        return step

    assert twins(program) > 10


def test_two_captured_functions_share_a_counter() -> None:
    def program(wrap: Wrap) -> Step:
        own = Own()

        @wrap
        def first(x: Tensor) -> Tensor:
            own.n += 1
            return x + 1 if own.n % 4 == 0 else x - 1

        @wrap
        def second(x: Tensor) -> Tensor:
            own.n += 1
            return x * 2 if own.n % 3 == 0 else x

        return lambda n: (first(torch.randn(4)), second(torch.randn(4)) if n % 3 else None, own.n)

    assert twins(program) > CALLS // 2


def test_global_counter() -> None:
    def program(wrap: Wrap) -> Step:
        # torch asks for builtins where an operator comes under a mode for the first time, and raises an error else
        scope: dict[str, Any] = {"COUNT": 0, "torch": torch, "__builtins__": __builtins__}
        total = scope["TOTAL"] = torch.zeros(4)

        def body(x: Tensor) -> Tensor:
            global COUNT
            COUNT += 1  # type: ignore[name-defined]
            if COUNT % 5 == 0:  # type: ignore[name-defined]
                TOTAL.add_(torch.rand(4))  # type: ignore[name-defined] # noqa: F821
            return x + TOTAL  # type: ignore[name-defined,no-any-return] # noqa: F821

        f = wrap(types.FunctionType(body.__code__, scope, "body"))
        return lambda _: (f(torch.randn(4)), scope["COUNT"], total)

    assert twins(program) > CALLS // 2


def test_counter_while_another_thread_runs() -> None:
    """What depends on a counter is found out with other numbers in it, which the other thread would see."""
    with recorded_in_a_thread() as seen:

        def program(wrap: Wrap) -> Step:
            own = Own()
            seen.append(own)
            f = wrap(lambda x: every_fourth(own, x))
            return lambda _: (f(torch.randn(4)), own.n)

        twins(program, calls=20)
    numbers = seen[-1]
    assert isinstance(numbers, set)
    assert numbers
    assert all(0 <= number <= 20 for number in numbers)


class recorded_in_a_thread:
    """Reads the counters of the listed programs in another thread. At the end the list gets the set of what it saw."""

    def __init__(self) -> None:
        self.owns: list[Any] = []
        self.found: set[int] = set()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self.is_over.is_set():
            self.found.update(own.n for own in list(self.owns))

    def __enter__(self) -> list[Any]:
        self.thread.start()
        return self.owns

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.thread.join()
        self.owns.append(self.found)


# ------------------------------------------------------------------------------------------------ whole training steps


class Delayed:
    """TD3 (arXiv:1802.09477): the actor and the target are updated in every second step."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(6, 1)
        self.target = copy.deepcopy(self.critic)
        self.actor_optimizer, self.critic_optimizer = make(self.actor.parameters()), make(self.critic.parameters())
        self.total_it, self.policy_freq = 0, 2

    def train(self, state: Tensor, action: Tensor, reward: Tensor) -> None:
        self.total_it += 1
        with torch.no_grad():
            goal = reward + 0.9 * self.target(torch.cat([state, (self.actor(state)).clamp(-1, 1)], 1))
        loss = F.mse_loss(self.critic(torch.cat([state, action], 1)), goal)
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        if self.total_it % self.policy_freq == 0:
            actor_loss = -self.critic(torch.cat([state, self.actor(state)], 1)).mean()
            self.actor_optimizer.zero_grad()
            actor_loss.backward()
            self.actor_optimizer.step()
            for own, follows in zip(self.critic.parameters(), self.target.parameters(), strict=True):
                follows.data.copy_(0.1 * own.data + 0.9 * follows.data)

    def state(self) -> Any:
        modules = [self.actor, self.critic, self.target]
        tensors = [parameter for module in modules for parameter in module.parameters()]
        optimizers = [self.actor_optimizer.state_dict(), self.critic_optimizer.state_dict()]
        return tensors, [tensor.grad for tensor in tensors], optimizers, self.total_it


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MAKERS)
def test_delayed_updates_of_an_object_that_counts(name: str) -> None:
    def program(wrap: Wrap) -> Step:
        trainer = Delayed(MAKERS[name])
        train = wrap(trainer.train)

        def step(_: int) -> Any:
            with torch.enable_grad():
                train(torch.randn(8, 4), torch.randn(8, 2), torch.randn(8, 1))
            return trainer.state()

        return step

    assert twins(program) > CALLS // 2


def test_steps_with_hooks_of_users_see_the_counter() -> None:
    def program(wrap: Wrap) -> Step:
        trainer, seen = Delayed(MAKERS["adam"]), list[Any]()
        trainer.critic_optimizer.register_step_post_hook(lambda *_: seen.append(trainer.total_it))
        train = wrap(trainer.train)

        def step(_: int) -> Any:
            with torch.enable_grad():
                train(torch.randn(8, 4), torch.randn(8, 2), torch.randn(8, 1))
            return trainer.state(), list(seen)

        return step

    twins(program)


def test_accumulation_with_a_counter_in_a_dict() -> None:
    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        net, state = nn.Linear(4, 1), {"micro": 0, "loss": 0.0}
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

        @wrap
        def train(x: Tensor) -> Tensor:
            loss = net(x).pow(2).mean() / 4
            loss.backward()
            state["loss"] += loss.item()
            state["micro"] += 1
            if state["micro"] % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            return torch.clone(loss.detach())

        def step(_: int) -> Any:
            with torch.enable_grad():
                return train(torch.randn(8, 4)).clone(), dict(state), net.state_dict(), optimizer.state_dict()

        return step

    replays = twins(program)
    if DEVICE.type == "cpu":  # gradients of a recording with breaks move on a device, and it is made again each time
        assert replays > CALLS // 3


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MAKERS)
def test_accumulated_gradients_are_new_tensors_in_every_fourth_call(name: str) -> None:
    """That they are other ones adds nothing to the key."""

    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        net, own = nn.Linear(4, 1), Own()
        optimizer = MAKERS[name](net.parameters())

        @wrap
        def train(x: Tensor) -> Tensor:
            loss = net(x).pow(2).mean() / 4
            loss.backward()
            own.n += 1
            if own.n % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            return torch.clone(loss.detach())

        def step(_: int) -> Any:
            with torch.enable_grad():
                return train(torch.randn(8, 4)).clone(), own.n, net.state_dict(), optimizer.state_dict()

        return step

    replays = twins(program)
    if DEVICE.type == "cpu":
        assert replays > CALLS // 2


def test_capture_tells_that_answers_stand_for_the_counter() -> None:
    own = Own()
    f = capture(lambda x: every_fourth(own, x))
    for _ in range(20):
        f(torch.randn(4))
    assert any("answers of the body" in event.detail for event in recordings(f).events)
    assert own.n == 20


@pytest.mark.parametrize("most", [3, 6])
def test_a_full_deque_of_numbers_that_are_read(most: int) -> None:
    """It is full before it is found out what the counter is for: how far the others moved tells what was appended."""

    def program(wrap: Wrap) -> Step:
        own, recent = Own(), deque[float](maxlen=most)

        @wrap
        def f(x: Tensor) -> Tensor:
            y = torch.tanh(x)
            recent.append(y.sum().item() * 2)
            if (own.n + 1) % 2 == 0:
                own.add()
            own.n += 1
            return y

        def step(n: int) -> Any:
            if n == 30:
                recent.append(7.0)
            if n == 40:
                recent.clear()
            return f(torch.randn(4)), list(recent), own.n, own.total

        return step

    assert twins(program) > CALLS // 2
