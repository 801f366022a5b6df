"""The catalogue's functions that name state, draw, fail or nest; and bodies made of random operations."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture.tree import thread_trees as thread_trees  # fmt: skip
from tests.generated.worlds import KNOWN, Body, Boom, Box, World, entry, fresh, reglobal
from tests.support.device import DEVICE


@entry("m")
def closure_state(w: World) -> Any:
    gain = 2
    total = w.watch("total", torch.zeros(4, 4))

    @w.capture
    def body(x: Tensor) -> Any:
        total.add_(x * gain)
        return total + gain

    def change(n: int) -> None:
        nonlocal gain
        gain = n % 3

    def replace(n: int) -> None:
        nonlocal total
        total = w.watch("total", fresh((4, 4), seed=n))

    w.knobs += [change, replace]
    return body


GAIN = 2
TABLE = torch.ones(4, 4)


@entry("m")
def global_state(w: World) -> Any:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        TABLE.mul_(0.5).add_(x)
        return x * GAIN, TABLE[:2]

    scope: dict[str, Any] = {"GAIN": 2, "TABLE": torch.ones(4, 4)}
    captured = w.capture(reglobal(body, scope))
    w.watch("scope", _Names(scope, ("GAIN", "TABLE")))
    w.knobs.append(lambda n: scope.update(GAIN=n % 3))
    w.knobs.append(lambda n: scope.update(TABLE=fresh((4, 4), seed=n)))
    return captured


class _Names(Mapping[str, Any]):
    """The names of a namespace whose state is compared."""

    def __init__(self, scope: dict[str, Any], names: tuple[str, ...]) -> None:
        self._scope, self._names = scope, names

    @override
    def __getitem__(self, name: str) -> Any:
        return self._scope[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @override
    def __len__(self) -> int:
        return len(self._names)


@entry("m")
def draws(w: World) -> Any:
    @w.capture
    def body(x: Tensor) -> tuple[Tensor, ...]:
        noise = torch.rand_like(x) + torch.randn(4)
        return x + noise, torch.bernoulli(torch.full((4,), 0.5)), torch.randperm(5), torch.randint(0, 9, (3,))

    return body


@entry("mg")
def explicit_draws(w: World) -> Any:
    @w.capture
    def body(x: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        x.uniform_(generator=generator)
        return torch.randn(4, generator=generator), F.dropout(x, 0.3), x

    return body


@entry("m")
def own_generator(w: World) -> Any:
    box = w.watch("own_generator", Box(generator=torch.Generator(DEVICE).manual_seed(5)))
    return w.capture(lambda x: x + torch.rand(4, 4, generator=box.generator))


@entry("r", eager=True)
def draws_eagerly(w: World) -> Any:
    return w.capture(lambda x: F.dropout(x, 0.5), rng="eager")


@entry("m", eager=True)
def syncs(w: World) -> Any:
    @w.capture
    def body(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2 if x.sum().item() > 0 else x - 1

    return body


@entry("m", eager=True)
def data_dependent(w: World) -> Any:
    return w.capture(lambda x: (x[x > 0], x.nonzero()))


@entry("mb")
def raising(w: World) -> Any:
    state = w.watch("raising", Box(total=torch.zeros(4), last=None))

    @w.capture
    def body(x: Tensor, fail: bool) -> Any:
        state.total.add_(1)
        y = x.mul_(2) + state.total
        if fail:
            state.last = y
            raise Boom(f"asked for {x.shape[0]}")
        return y

    return body


@entry("m", eager=True)
def counting(w: World) -> Any:
    box = w.watch("counting", Box(count=0))

    @w.capture
    def body(x: Tensor) -> Any:
        box.count += 1
        return x * box.count

    return body


@entry("m", eager=True)
def growing(w: World) -> Any:
    box = w.watch("growing", Box(history=[], texts=[]))

    @w.capture
    def body(x: Tensor) -> Tensor:
        y = x * 2
        box.history.append(y)
        del box.history[:-3]
        box.texts.append("seen")
        return y + 1

    return body


@entry("m")
def concatenating(w: World) -> Any:
    box = w.watch("concatenating", Box(rows=torch.zeros(1, 4)))

    @w.capture
    def body(x: Tensor) -> Any:
        box.rows = torch.cat([box.rows, x[:1]])[-3:]
        return box.rows.sum(0)

    return body


@entry("m")
def nested(w: World) -> Any:
    @w.capture
    def inner(x: Tensor) -> Tensor:
        return x.relu() + 1

    @w.capture
    def outer(x: Tensor) -> tuple[Tensor, Tensor]:
        y = inner(x)
        return inner(y.sin()), y

    return lambda x: outer(inner(x))


@entry("mm")
def variadic(w: World) -> Any:
    @w.capture
    def body(*parts: Tensor, scale: float = 2.0, **named: Tensor) -> Tensor:
        return sum(parts, named["extra"] * scale)

    return lambda x, y: body(x, y, extra=y) + body(x, extra=y, scale=3.0)


@entry("l")
def list_argument(w: World) -> Any:
    @w.capture
    def body(parts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        parts[0].add_(parts[1])
        return torch.stack(parts).sum(0), parts

    return body


@entry("m")
def constants(w: World) -> Any:
    @w.capture
    def body(x: Tensor) -> tuple[Tensor, ...]:
        c = torch.tensor([1.0, 2.0, 3.0, 4.0])
        c.add_(x[0])
        return c, torch.arange(4) * 2, torch.zeros(2, 0), torch.empty(3).fill_(2), x.new_ones(())

    return body


@entry("m")
def reshaping(w: World) -> Any:
    @w.capture
    def body(x: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y.t_().add_(1)
        return y, x.contiguous(), x.detach(), x.expand(2, 4, 4), x.reshape(2, 8), x.flatten()[1:].unsqueeze(0)

    return body


@entry("m")
def cloned(w: World) -> Any:
    @w.capture(outputs="clone")
    def body(x: Tensor) -> tuple[Tensor, ...]:
        y = x @ x
        return y, y[0], x

    return body


@entry("m", borrow=True)
def borrowed(w: World) -> Any:
    return w.capture(lambda x: x @ x + 1, outputs="borrow")


@entry("m", borrow=True)
def borrowed_parts(w: World) -> Any:
    @w.capture(outputs="borrow")
    def body(x: Tensor) -> tuple[Tensor, ...]:
        x.mul_(0.5)
        y = x - 1
        return y, y.t(), x.sum()

    return body


@entry("mg")
def verified(w: World) -> Any:
    box = w.watch("verified", Box(total=torch.zeros(4, 4), last=None))

    @w.capture(verify="always")
    def body(x: Tensor, generator: torch.Generator) -> Any:
        box.total.add_(x)
        box.last = x.sub_(1) + torch.rand(4, generator=generator) + torch.rand(())
        return box.last + box.total

    return body


@entry("m")
def warm_twice(w: World) -> Any:
    return w.capture(lambda x: x.clamp(-1, 1) * 3, warmup=2, max_recordings=2)


@entry("sa")
def static_any(w: World) -> Any:
    @w.capture(static=["table", "x"])
    def body(table: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return table + 1, x.reshape(-1)[:1], table.t()

    return body


@entry("mk")
def instances(w: World) -> Any:
    class Layer(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(fresh((4, 4), seed=seed))
            self.calls = torch.zeros((), dtype=torch.int64)

        @override
        @w.capture
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x @ self.weight + self.calls

    first = w.watch("first", Layer(1))
    layers = [first, w.watch("second", copy.deepcopy(first))]
    return lambda x, n: layers[n % 2](layers[1](x) if n else x)


@entry("m")
def module_argument(w: World) -> Any:
    nets = [w.watch(f"net{i}", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))) for i in range(2)]
    chosen = w.watch("chosen", Box(index=0))
    w.knobs.append(lambda n: setattr(chosen, "index", n % 2))

    @w.capture
    def body(net: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = net(x)
        return y

    return lambda x: body(nets[chosen.index], x)


@entry("m")
def foreach(w: World) -> Any:
    net = w.watch("foreach", nn.Linear(4, 4))

    @w.capture
    def body(x: Tensor) -> list[Tensor]:
        torch._foreach_mul_(list(net.parameters()), 0.5)
        net.weight.lerp_(x, 0.25)
        return [*torch._foreach_add([net.weight, x], 1.0), net(x)]

    return body


def generated(w: World, body: Body) -> Any:
    """A function that carries out ``body`` on registers: its arguments, two attributes, and what it makes."""
    box = w.watch("box", Box(a=torch.ones(4, 4), b=torch.zeros(4, 4)))
    inner = w.capture(lambda x: x.sin() + 1)
    number = body[0][1] if body else 0
    options: list[dict[str, Any]] = [
        {}, {}, {}, {"static": ["y"]}, {"outputs": "clone"}, {"max_recordings": 1}, {"verify": "always"}, {"warmup": 2}
    ]  # fmt: skip

    @w.capture(**options[number % 8])
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made = [x, y] if "attributes" in KNOWN else [x, y, box.a, box.b]
        for operation, i, j in body:
            _operate(OPERATIONS[operation % len(OPERATIONS)], made, i, j, box, inner)
        return tuple(made[(number + k) % len(made)] if k else made[-1] for k in range(1 + number % 4))

    return function


def _operate(operation: str, made: list[Tensor], i: int, j: int, box: Any, inner: Any) -> None:
    a, b = made[-1 - i % len(made)], made[-1 - j % len(made)]
    alike = a.shape == b.shape
    if operation == "add":
        made.append(a + b if alike else a * 2)
    elif operation == "matmul":
        made.append(a @ b if alike and a.shape == (4, 4) else a.relu())
    elif operation == "view":
        flat = a.reshape(-1) if a.is_contiguous() else a
        made.append((a[1:] if a.dim() else a, a.transpose(0, -1) if a.dim() else a, flat, a[None], a[..., ::2])[j % 5]
                    if a.dim() else a.view(1))  # fmt: skip
    elif operation == "write":
        a.mul_(0.5).add_(b if alike else 1)
    elif operation == "copy":
        a.copy_(b if alike else b.sum())
    elif operation == "draw":
        made.append(
            (a + torch.rand_like(a), a.uniform_(), F.dropout(a, 0.5), torch.normal(0.0, 1.0, (2, 2), device=DEVICE))[
                j % 4
            ]
        )
    elif operation == "keep":
        setattr(box, "ab"[j % 2], a.clone() if "attributes" in KNOWN else a)
    elif operation == "out":
        made.append(torch.mul(a, 2, out=b if alike else torch.empty_like(a)))
    elif operation == "convert":
        made.append((a.clone(), a.contiguous(), a.double().float(), a.detach(), a.expand(2, *a.shape))[j % 5])
    elif operation == "scatter":
        a.masked_fill_(b > 0 if alike else a > 0, 0.5)
    elif operation == "join":
        made.append(torch.cat([a, b])[: a.shape[0]] if alike and a.dim() else a.cumsum(0) if a.dim() else a.exp())
    elif operation == "reduce":
        made.append((a.sum(0) if a.dim() else a.abs(), a.mean(), torch.zeros_like(a), torch.full((2,), 0.5))[j % 4])
    elif operation == "turn":
        a.t_() if a.dim() == 2 else a.unsqueeze_(0)
    else:
        made.append(inner(a))


OPERATIONS = (
    "add", "matmul", "view", "write", "copy", "draw", "keep", "out", "convert", "scatter", "join", "reduce", "inner",
    "turn",
)  # fmt: skip
