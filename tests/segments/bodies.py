"""Bodies in which the host reads values: each is a small program with state of its own, made anew for every run.

A program gives the function and, for each call, its arguments. The same program runs twice, eagerly and captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.device import DEVICE, EXECUTES

Function = Callable[..., Any]
Arguments = Callable[[int], tuple[Any, ...]]
Program = tuple[Function, Arguments, Any]
"""The function, the arguments of call number n, and what it keeps, to be compared."""

PROGRAMS: dict[str, Callable[[], Program]] = {}
UNSTEADY: set[str] = set()
"""Names of those that read another value in every call."""


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


def unsteady(make: Callable[[], Program]) -> Callable[[], Program]:
    UNSTEADY.add(make.__name__)
    return program(make)


def draw(number: int, *shape: int) -> Tensor:
    return torch.randn(shape or (4, 4), generator=torch.Generator(DEVICE).manual_seed(number))


def one(number: int) -> tuple[Tensor]:
    return (draw(number),)


def two(number: int) -> tuple[Tensor, Tensor]:
    return draw(number), draw(number + 1000)


def plain(function: Function) -> Callable[[], Program]:
    """A function of one tensor without state."""

    def make() -> Program:
        return function, one, None

    make.__name__ = function.__name__
    program(make)
    return make


# ---- kinds of reads


@plain
def foo(x: Tensor) -> Tensor:
    y = x * 2
    z = y + 1 if y.sum() > 0 else y - 3
    return z * x


@plain
def item(x: Tensor) -> Tensor:
    n = int(((x > 0).sum() % 3).item())
    return x * n + 1


@plain
def whole_number(x: Tensor) -> Tensor:
    y = torch.relu(x)
    return y[: int(y.argmax() % 3) + 1] * 2


@plain
def from_bool(x: Tensor) -> Tensor:
    return x.exp() if bool((x.mean() > 0).item()) else x.sin()


@plain
def rounded_float(x: Tensor) -> Tensor:
    return x * float(x.mean().sign())


@plain
def any_and_all(x: Tensor) -> Tensor:
    y = x.clamp(-1, 1)
    if (y > 1.5).any():
        return y * 7
    return y + 1 if (y[0] > -0.5).all() else y - 1


@plain
def equal_tensors(x: Tensor) -> Tensor:
    return x + 1 if torch.equal(x[0] > 0, x[1] > 0) else x - 1


@plain
def listed(x: Tensor) -> Tensor:
    signs = x[:2, :1].sign().long().tolist()
    result: Tensor = x * signs[0][0] + signs[1][0]
    return result


@plain
def listed_flags(x: Tensor) -> Tensor:
    first, second = (x[0, ::3] > 0).tolist()
    return x + 1 if first is True and second is True else x * 2 if first else x


@plain
def close(x: Tensor) -> Tensor:
    return x * 3 if torch.allclose(x, x.clone()) else x


@plain
def two_reads(x: Tensor) -> Tensor:
    a = x + 1 if x[0, 0] > 0 else x - 1
    return a * 2 if a.sum() > 0 else a * 3


@plain
def read_again(x: Tensor) -> Tensor:
    y = x * 2
    if y[0, 0] > 0 and y[0, 0] > 0:
        y = y + 1
    return y.relu()


@plain
def loop(x: Tensor) -> Tensor:
    steps = 0
    while x.norm() > 1.0 and steps < 3:
        x = x / 4
        steps += 1
    return x + steps


@plain
def nested_reads(x: Tensor) -> Tensor:
    if x.sum() > 0:
        y = x * 2
        return y + 1 if y[0, 0] > 0 else y + 2
    return x - 5


@plain
def read_of_argument(x: Tensor) -> Tensor:
    return x + 1 if x[0, 0] > 0 else x * x


@plain
def read_first_and_last(x: Tensor) -> Tensor:
    if x[0, 0] > 0:
        x = x + 1
    y = (x @ x).relu()
    return y if y.sum() > 3 else y + 3


@plain
def complex_number(x: Tensor) -> Tensor:
    c = torch.complex(x.sign(), torch.zeros_like(x))
    return x * c[0, 0].item().real


@plain
def no_kernels_after(x: Tensor) -> Tensor:
    y = x * 2
    return y if y.sum() > 0 else x


@plain
def no_kernels_before(x: Tensor) -> Tensor:
    return x.neg() if x[0, 0] > 0 else x.abs()


@plain
def views_across(x: Tensor) -> Tensor:
    y = (x * 2).t()
    z = y[1:]
    if y[0, 0] > 0:
        z = z[:, 1:]
    return z.contiguous() + 1


@plain
def alive_across(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = x.exp(), x.sin()
    c = a + b
    if c.mean() > 1:
        return a, c * 2, b
    return b, c, a


@plain
def dead_before(x: Tensor) -> Tensor:
    a = x.exp()
    b = a * 2
    del a
    c = b + 1
    del b
    flag = bool(c.mean() > 3)
    d = c * 2
    e = d + c
    return e if flag else e + d


@plain
def used_in_one_branch(x: Tensor) -> Tensor:
    """``z`` is used in one branch only: a recording of the other branch may come first."""
    y = x * 2
    z = torch.rand_like(y)
    return y * z if y[0, 0] > 0 else y + 1


@plain
def structure_by_branch(x: Tensor) -> Any:
    y = x * 2
    if y.sum() > 0:
        return {"y": y, "n": 1}
    return [y, y + 1, "less"]


@plain
def output_is_input(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else x + 0


@plain
def number_in_result(x: Tensor) -> tuple[Tensor, int]:
    n = int((x[0] > 0).sum())
    return x * 2, n


@plain
def list_of_reads(x: Tensor) -> Tensor:
    picked = [bool(one) for one in (x[0, :2] > 0)]
    return x * (1 + sum(picked))


# ---- sizes that depend on values


@plain
def nonzero(x: Tensor) -> Tensor:
    at = (x[0] > 0).nonzero()
    return at * 2 + 1


@plain
def boolean_mask(x: Tensor) -> Tensor:
    y = x * 2
    return y[0][y[0] > 0].sum() + x


@plain
def mask_written(x: Tensor) -> Tensor:
    y = x * 2
    first = y[0, :2]
    first[first > 0] = first[first > 0] * 3
    return y + 1


@plain
def masked_select(x: Tensor) -> Tensor:
    return torch.masked_select(x[0], x[0] > 0) * 3


@plain
def unique(x: Tensor) -> tuple[Tensor, Tensor]:
    values, counts = torch.unique(x[0].sign(), return_counts=True)
    return values * 2, counts


@plain
def where_alone(x: Tensor) -> Tensor:
    (at,) = torch.where(x[0] > 0)
    return x[:, at].sum(1)


@plain
def repeats(x: Tensor) -> Tensor:
    times = (x[0] > 0).long()
    return torch.repeat_interleave(x[1], times) + 1


# ---- mutation


@program
def argument_written_before() -> Program:
    def body(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y if x.sum() > 0 else x - y

    return body, two, None


@program
def argument_written_after() -> Program:
    def body(x: Tensor, y: Tensor) -> Tensor:
        if y.sum() > 0:
            x.add_(1)
        else:
            y.mul_(3)
        return x * y

    return body, two, None


@program
def argument_written_in_one_branch() -> Program:
    def body(x: Tensor) -> Tensor:
        y = x * 2
        if y.sum() > 0:
            x.copy_(y)
        return y + 1

    return body, one, None


@program
def state_written_before() -> Program:
    kept = torch.zeros(4, 4)

    def body(x: Tensor) -> Tensor:
        kept.add_(x)
        return kept * 2 if kept.sum() > 0 else kept - 1

    return body, one, [kept]


@program
def state_written_after() -> Program:
    kept = torch.zeros(4, 4)

    def body(x: Tensor) -> Tensor:
        y = x * 2
        if y.sum() > 0:
            kept.add_(y)
        return kept + x

    return body, one, [kept]


@program
def state_written_on_both_sides() -> Program:
    first, second = torch.zeros(4, 4), torch.ones(4, 4)

    def body(x: Tensor) -> Tensor:
        first.add_(x)
        if first.mean() > 0:
            second.mul_(0.5).add_(first)
        else:
            second.sub_(x)
        first.mul_(0.9)
        return second.clone()

    return body, one, [first, second]


@program
def state_decides() -> Program:
    count = torch.zeros((), dtype=torch.long)

    def body(x: Tensor) -> Tensor:
        count.add_(1)
        return x * 2 if count % 3 == 0 else x + 1

    return body, one, [count]


@program
def batch_norm_before() -> Program:
    net = nn.BatchNorm1d(4)

    def body(x: Tensor) -> Tensor:
        y: Tensor = net(x)
        return y + 1 if y[0, 0] > 0 else y * 2

    return body, one, net


@program
def module_with_a_gate() -> Program:
    torch.manual_seed(0)
    net = nn.ModuleDict({"gate": nn.Linear(4, 1), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def body(x: Tensor) -> Tensor:
        h = torch.relu(net["a"](x))
        y: Tensor = net["b"](h) if net["gate"](h).mean() > 0 else h * 2
        return y

    return body, one, net


@program
def buffer_replaced() -> Program:
    class Holder:
        last: Tensor = torch.zeros(4, 4)

    holder = Holder()
    holder.last = torch.zeros(4, 4)

    def body(x: Tensor) -> Tensor:
        y = x + holder.last
        if y.sum() > 0:
            holder.last = y * 0.5
        return y * 2

    return body, one, holder


@program
def kept_in_one_branch() -> Program:
    kept: dict[str, Tensor] = {"best": torch.zeros(())}

    def body(x: Tensor) -> Tensor:
        score = x.sum()
        if score > kept["best"]:
            kept["best"] = score
        return x * kept["best"]

    return body, one, kept


# ---- random numbers


@plain
def dropout_before(x: Tensor) -> Tensor:
    y = F.dropout(x, 0.5, training=True)
    return y + 1 if x.sum() > 0 else y - 1


@plain
def dropout_after(x: Tensor) -> Tensor:
    y = x * 2
    if y.sum() > 0:
        return F.dropout(y, 0.5, training=True)
    return y


@plain
def draws_on_both_sides(x: Tensor) -> Tensor:
    y = x + torch.rand_like(x)
    if y[0, 0] > 0.5:
        y = y + torch.randn_like(y)
    return y * torch.rand_like(y)


@plain
def draw_decides(x: Tensor) -> Tensor:
    return x * 2 if torch.rand((), device=x.device) > 0.5 else x + 1


@program
def own_generator() -> Program:
    generator = torch.Generator(DEVICE).manual_seed(3)

    def body(x: Tensor) -> Tensor:
        y = x + torch.rand(x.shape, generator=generator, device=x.device)
        if y.sum() > 8:
            y = y * torch.rand(x.shape, generator=generator, device=x.device)
        return y

    return body, one, generator


@program
def sampling() -> Program:
    def body(logits: Tensor) -> Tensor:
        token = torch.multinomial(torch.softmax(logits[0] * 4, -1), 1)
        return logits[1] if int(token) == 0 else logits[2] * 2

    return body, one, None


# ---- exceptions


@program
def raises_in_one_branch() -> Program:
    kept = torch.zeros(4, 4)

    def body(x: Tensor) -> Tensor:
        kept.add_(1)
        if x[0, 0] > 0.9:
            raise ValueError("too large")
        return kept + x

    return body, one, [kept]


@program
def checked_values() -> Program:
    def body(x: Tensor) -> Tensor:
        normal = torch.distributions.Normal(x[0], x[1].exp(), validate_args=True)
        y: Tensor = normal.log_prob(x[2])
        return y

    return body, one, None


@program
def linear_solve() -> Program:
    def body(x: Tensor) -> Tensor:
        shift = 9 * torch.eye(4)
        y: Tensor = torch.linalg.solve(x + shift, x) if x.sum() > 0 else torch.linalg.inv(x - shift)
        return y

    return body, one, None


# ---- whole training steps


def _trained(clip: bool, momentum: float = 0.0) -> Program:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=momentum)

    def body(x: Tensor) -> Tensor:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
            elif loss > 3:
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(0.5)
            optimizer.step()
        result: Tensor = loss.detach()
        return result

    return body, one, net


@program
def step_with_clipping() -> Program:
    return _trained(clip=True)


@program
def step_that_looks_at_its_loss() -> Program:
    return _trained(clip=False)


@program
def step_with_momentum() -> Program:
    return _trained(clip=False, momentum=0.9)


# ---- what never repeats


@(program if EXECUTES else unsteady)
def scaled_by_its_norm() -> Program:
    def body(x: Tensor) -> Tensor:
        return x / float(x.norm()) + 1

    return body, one, None


@unsteady
def sizes_that_vary() -> Program:
    def body(x: Tensor, y: Tensor) -> Tensor:
        return x.reshape(-1)[: int(y.reshape(-1)[0])] * 2

    return body, lambda n: (draw(n, 64, 8), torch.full((1,), n % 128)), None
