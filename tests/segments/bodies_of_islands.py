"""Bodies that call islands, which run eagerly in every call, in the middle of what is recorded. See ``bodies``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from capture import island
from tests.segments.bodies import Program, one, two
from tests.support.device import DEVICE

PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


class Pair(NamedTuple):
    first: Tensor
    second: Any


@program
def logged() -> Program:
    log: list[float] = []

    @island
    def note(y: Tensor) -> None:
        log.append(float(y.sum()))

    def body(x: Tensor) -> Tensor:
        y = x * 2
        note(y)
        return y + 1

    return body, one, log


@program
def logged_twice_in_order() -> Program:
    log: list[Any] = []

    @island
    def note(name: str, y: Tensor) -> None:
        log.append((name, float(y[0, 0])))

    def body(x: Tensor) -> Tensor:
        y = x * 2
        note("first", y)
        z = y.relu() + 1
        note("second", z)
        return z * y

    return body, one, log


@program
def computes() -> Program:
    @island
    def sort(y: Tensor) -> Tensor:
        rows = sorted(y.tolist())
        return torch.tensor(rows)

    def body(x: Tensor) -> Tensor:
        return sort(x * 2) + x

    return body, one, None


@program
def array_computes() -> Program:
    @island
    def median(y: Tensor) -> Tensor:
        return torch.as_tensor(float(torch.from_numpy(y.cpu().numpy() * 3).median()))

    def body(x: Tensor) -> Tensor:
        y = x.exp()
        return y * median(y).to(x.device)

    return body, one, None


@program
def gives_containers() -> Program:
    @island
    def split(y: Tensor, at: int, *, scale: float = 2.0) -> dict[str, Any]:
        return {"parts": (y[:at].clone(), y[at:] * scale), "at": at, "pair": Pair(y.mean(), "text")}

    def body(x: Tensor) -> Any:
        pieces = split(x + 1, 2, scale=3.0)
        first, second = pieces["parts"]
        return first + second, pieces["pair"].first * pieces["at"], pieces["pair"].second

    return body, one, None


@program
def gets_containers() -> Program:
    @island
    def total(given: dict[str, Any], pair: Pair) -> Tensor:
        a, b = given["a"]
        result: Tensor = a + b + pair.first * pair.second
        return result

    def body(x: Tensor) -> Tensor:
        y, z = x * 2, x + 1
        return total({"a": [y, z]}, Pair(y, 3)) * 2

    return body, one, None


@program
def gives_back_what_it_got() -> Program:
    @island
    def unchanged(y: Tensor) -> Tensor:
        return y

    def body(x: Tensor) -> Tensor:
        y = x * 2
        z = unchanged(y)
        z.add_(1)
        return y

    return body, one, None


@program
def gives_back_a_view() -> Program:
    @island
    def row(y: Tensor) -> Tensor:
        return y[1]

    def body(x: Tensor) -> Tensor:
        y = x * 2
        row(y).mul_(5)
        return y + 1

    return body, one, None


@program
def gives_back_an_argument() -> Program:
    @island
    def unchanged(y: Tensor) -> Tensor:
        return y

    def body(x: Tensor) -> Tensor:
        unchanged(x).add_(1)
        return x * 2

    return body, one, None


@program
def writes_what_it_got() -> Program:
    @island
    def double(y: Tensor) -> None:
        y.mul_(2)

    def body(x: Tensor) -> Tensor:
        y = x + 1
        double(y)
        return y * x

    return body, one, None


@program
def writes_an_argument() -> Program:
    @island
    def double(y: Tensor) -> None:
        y.mul_(2)

    def body(x: Tensor, y: Tensor) -> Tensor:
        z = x + y
        double(x)
        return z * x if z.sum() > 0 else z - x

    return body, two, None


@program
def writes_state() -> Program:
    kept = torch.zeros(4, 4)

    @island
    def decay(y: Tensor) -> None:
        kept.mul_(0.5).add_(y.mean())

    def body(x: Tensor) -> Tensor:
        y = x + kept
        decay(y)
        return y * kept if y[0, 0] > 0 else y - kept

    return body, one, [kept]


@program
def both_write_state() -> Program:
    kept = torch.zeros(4, 4)

    @island
    def decay() -> None:
        kept.mul_(0.5)

    def body(x: Tensor) -> Tensor:
        kept.add_(x)
        decay()
        kept.sub_(0.25)
        return kept * 2 if kept.sum() > 0 else kept - x

    return body, one, [kept]


@program
def plain_result_decides() -> Program:
    @island
    def kind(y: Tensor) -> str:
        return "up" if y.sum() > 0 else "down"

    def body(x: Tensor) -> Tensor:
        y = x * 2
        return y + 1 if kind(y) == "up" else y - 1

    return body, one, None


@program
def read_after_an_island() -> Program:
    log: list[int] = []

    @island
    def note(y: Tensor) -> None:
        log.append(len(log) + int(y.numel()))

    def body(x: Tensor) -> Tensor:
        y = x * 2
        note(y)
        z = y + 1 if y[0, 0] > 0 else y - 1
        note(z)
        return z * 2 if z[1, 1] > 0 else z

    return body, one, log


@program
def island_in_one_branch() -> Program:
    log: list[float] = []

    @island
    def note(y: Tensor) -> None:
        log.append(float(y[1, 1]))

    def body(x: Tensor) -> Tensor:
        y = x * 2
        if y[0, 0] > 0:
            note(y)
            y = y + 1
        return y * 3

    return body, one, log


@program
def shape_by_value() -> Program:
    @island
    def positive(y: Tensor) -> Tensor:
        return y[y > 0][:3]

    def body(x: Tensor) -> Tensor:
        return positive(x[0] * 2) + 1

    return body, one, None


@program
def draws() -> Program:
    @island
    def noise(y: Tensor) -> Tensor:
        return torch.rand_like(y)

    def body(x: Tensor) -> Tensor:
        y = x + torch.rand_like(x)
        y = y + noise(y)
        return y * torch.rand_like(y)

    return body, one, None


@program
def draws_before_a_read() -> Program:
    @island
    def noise(y: Tensor) -> Tensor:
        return torch.rand_like(y)

    def body(x: Tensor) -> Tensor:
        y = torch.rand_like(x) + noise(x)
        z = torch.rand_like(y)
        return y * z if y[0, 0] > 1 else y + torch.rand_like(y)

    return body, one, None


@program
def draws_from_its_own() -> Program:
    generator, drawn = torch.Generator(DEVICE).manual_seed(3), random.Random(5)

    @island
    def noise(y: Tensor) -> Tensor:
        return y + torch.rand(y.shape, generator=generator, device=y.device) * drawn.random()

    def body(x: Tensor) -> Tensor:
        y = noise(x * 2)
        return y if y[0, 0] > 0 else y * 2

    return body, one, generator


@program
def raises_at_times() -> Program:
    kept, log = torch.zeros(4, 4), list[float]()

    @island
    def check(y: Tensor) -> None:
        log.append(float(y[0, 0]))
        if y[0, 0] > 1:
            raise ValueError("too large")

    def body(x: Tensor) -> Tensor:
        kept.add_(x)
        y = x * 2
        check(y)
        kept.mul_(0.5)
        return y + kept

    return body, one, [kept, log]


@program
def raises_after_an_island() -> Program:
    kept, log = torch.zeros(4, 4), list[int]()

    @island
    def note() -> None:
        log.append(len(log))

    def body(x: Tensor) -> Tensor:
        kept.add_(x)
        note()
        if x[0, 0] > 1:
            raise ValueError("too large")
        return kept + x

    return body, one, [kept, log]


@program
def method_of_a_module() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)
            self.seen: list[float] = []

        @island
        def note(self, y: Tensor) -> Tensor:
            self.seen.append(float(y.sum()))
            return y.mean()

    net = Net()

    def body(x: Tensor) -> Tensor:
        y: Tensor = torch.relu(net.linear(x))
        return y + net.note(y)

    return body, one, net


@program
def step_that_logs() -> Program:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    log: list[float] = []
    net.losses_so_far = log  # type: ignore[assignment]

    @island
    def note(loss: Tensor) -> None:
        log.append(float(loss))

    def body(x: Tensor) -> Tensor:
        with torch.enable_grad():
            optimizer.zero_grad(set_to_none=False)
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        result: Tensor = loss.detach()
        note(result)
        return result

    return body, one, net


@program
def grad_mode_inside() -> Program:
    modes: list[bool] = []

    @island
    def note(y: Tensor) -> Tensor:
        modes.append(torch.is_grad_enabled())
        with torch.enable_grad():
            leaf = y.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(leaf.square().sum(), leaf)
        return gradient

    def body(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = note(x * 2)
        return y + note(y)

    return body, one, modes


@program
def memory_is_used_again() -> Program:
    log: list[float] = []

    @island
    def note(y: Tensor) -> Tensor:
        log.append(float(y.sum()))
        return y * 2

    def body(x: Tensor) -> Tensor:
        for _ in range(3):
            x = note(x.exp().clamp(max=2)) - 1
        return x

    return body, one, log


@program
def printed() -> Program:
    def body(x: Tensor) -> Tensor:
        y = x * 2
        print("mean", y.mean(), end=";\n")
        return y + 1

    return body, one, None


@program
def plain_text_printed() -> Program:
    def body(x: Tensor) -> Tensor:
        print("a step")
        y = x * 2
        return y + 1 if y[0, 0] > 0 else y

    return body, one, None


@program
def state_nobody_reads() -> Program:
    class Counter:
        count = 0

    counter = Counter()

    @island
    def tick() -> None:
        counter.count += 1

    def body(x: Tensor) -> Tensor:
        tick()
        return x * 2

    return body, one, counter


@program
def state_changed_before() -> Program:
    class Holder:
        last: Tensor | None = None

    holder, log = Holder(), list[float]()

    @island
    def note() -> None:
        assert holder.last is not None
        log.append(float(holder.last.sum()))

    def body(x: Tensor) -> Tensor:
        holder.last = x * 2
        note()
        return x + 1

    return body, one, log
