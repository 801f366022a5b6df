"""Random programs over captured functions, run beside an eager twin and compared bit for bit after every action.

A ``Program`` is plain integers, so that Hypothesis shrinks it well and a failure can be run again from its text:
``run(Program(...))``. Both worlds of a run are built alike; only the functions of one are captured.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import (
    BorrowedOutputError,
    CaptureError,
    _step,
    _trees,
    capture,
    config,
    explain,
    mark_step_begin,
    recordings,
    release,
    reset,
    warmup,
)  # fmt: skip
from tests.device import DEVICE, rng_state, set_rng_state

C = TypeVar("C")
KNOWN: frozenset[str] = frozenset()
"""Entries, actions and operations left out while a bug they find is open."""


class Boom(Exception):
    """What bodies raise on request."""


class Mismatch(AssertionError):
    """The captured world differs from the eager one."""


class Box:
    """An object with plain attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Pair(NamedTuple):
    """A namedtuple output."""

    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Record:
    """A dataclass output."""

    value: Tensor
    note: str
    parts: list[Tensor]


# --------------------------------------------------------------------------------------------------------------- worlds
BANK = torch.randn(4096, generator=torch.Generator(DEVICE).manual_seed(7))


def fresh(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """A new tensor whose values follow from ``seed``."""
    size = 1
    for length in shape:
        size *= length
    start = (seed * 37) % 2048
    values = BANK[start : start + size].reshape(shape)
    if dtype is torch.bool:
        return values > 0
    if not dtype.is_floating_point and not dtype.is_complex:
        return (values * 3).to(dtype)
    return values.to(dtype, copy=True)


@define(eq=False)
class World:
    """One side of the twin: everything a caller owns."""

    captured: bool
    inputs: Literal["auto", "bind"] = "auto"
    tensors: list[Tensor] = field(factory=list)
    statics: list[Tensor] = field(factory=list)
    caches: list[dict[str, Tensor]] = field(factory=list)
    generators: list[torch.Generator] = field(factory=list)
    objects: list[tuple[str, Any]] = field(factory=list)
    modules: list[nn.Module] = field(factory=list)
    knobs: list[Callable[[int], None]] = field(factory=list)
    cast: list[tuple[Entry, Callable[..., Any]]] = field(factory=list)
    decorated: list[Any] = field(factory=list)
    held: list[Any] = field(factory=list)
    scratch: list[tuple[str, Any]] = field(factory=list)
    rng: Tensor = field(factory=lambda: torch.Generator(DEVICE).manual_seed(3).get_state())
    gradients: int = 0
    """0: ``no_grad``, 1: inference mode, 2: gradients are recorded."""
    autocast: bool = False
    default: torch.dtype = torch.float32

    @overload
    def capture(self, target: C, /, **options: Any) -> C: ...
    @overload
    def capture(self, **options: Any) -> Callable[[C], C]: ...
    def capture(self, target: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]
        """``capture`` in the captured world, nothing in the other."""
        if target is None:
            return functools.partial(self.capture, **options)
        if not self.captured:
            return target
        self.decorated.append(capture(target, inputs=self.inputs, **options))
        return self.decorated[-1]

    def watch(self, name: str, value: Any) -> Any:
        """Compare this object's state after every action."""
        self.objects.append((name, value))
        self.modules += [value] if isinstance(value, nn.Module) else []
        return value

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """This world's generator state and modes, for one action."""
        set_rng_state(self.rng)
        torch.set_default_dtype(self.default)
        with (
            (torch.no_grad, torch.inference_mode, torch.enable_grad)[self.gradients](),
            torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=self.autocast),
        ):
            yield
        torch.set_default_dtype(torch.float32)
        self.rng = rng_state()


Build = Callable[[World], Any]
Body = tuple[tuple[int, int, int], ...]
"""A generated body: (operation, register, register) each."""


@frozen
class Entry:
    """One function of the catalogue. ``spec``: a letter an argument, as ``Arguments`` reads them."""

    name: str
    spec: str
    build: Build
    borrow: bool = False
    eager: bool = False
    """Never replays, by its nature."""


CATALOGUE: dict[str, Entry] = {}


def entry(spec: str, *, borrow: bool = False, eager: bool = False) -> Callable[[Build], Build]:
    """Add a function to the catalogue."""

    def add(build: Build) -> Build:
        CATALOGUE[build.__name__] = Entry(build.__name__, spec, build, borrow, eager)
        return build

    return add


def reglobal(function: Any, scope: dict[str, Any]) -> Any:
    """The function with globals of its own."""
    scope.update({**function.__globals__, **scope})
    return types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)


# ------------------------------------------------------------------------------------------------------------ catalogue
@entry("a")
def elementwise(w: World) -> Any:
    return w.capture(lambda x: (x * 2 + 1).abs() if x.dtype is not torch.bool else ~x)


@entry("r")
def chain(w: World) -> Any:
    weight = fresh((4, 4), seed=1)

    @w.capture
    def body(x: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x @ weight, (4,))).softmax(-1)

    return body


@entry("mm")
def two_products(w: World) -> Any:
    @w.capture
    def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x @ y + x, torch.addmm(y, x, y).tanh()

    return body


@entry("mf")
def by_number(w: World) -> Any:
    return w.capture(lambda x, scale: x * scale + scale)


@entry("mk")
def powers(w: World) -> Any:
    @w.capture(max_recordings=3)
    def body(x: Tensor, n: int) -> Tensor:
        for _ in range(n + 1):
            x = x @ x * 0.1
        return x

    return body


@entry("m")
def aliasing_outputs(w: World) -> Any:
    @w.capture
    def body(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y[1:], y.t(), y, x + 1

    return body


@entry("m")
def views_of_input(w: World) -> Any:
    return w.capture(lambda x: (x[1:], x.t(), x, x.view(-1)[::2] if x.is_contiguous() else x))


@entry("mk")
def same_or_new(w: World) -> Any:
    return w.capture(lambda x, n: x if n == 1 else x - n)


@entry("m")
def mapping_output(w: World) -> Any:
    return w.capture(lambda x: {"b": x.exp(), "a": [x.shape[0], "text", None, (x.sum(), 2.5)], "z": {}})


@entry("m")
def record_output(w: World) -> Any:
    return w.capture(lambda x: (Record(x.sin(), "note", [x.cos(), x]), Pair(x * 3, x.mean(0))))


@entry("a")
def reductions(w: World) -> Any:
    @w.capture
    def body(x: Tensor) -> tuple[Tensor, ...]:
        x = x.real if x.is_complex() else x
        return x.sum(), x.to(torch.float64).cumsum(-1) if x.dim() else x.double(), x.to(torch.bool), (x != 0).long()

    return body


@entry("r")
def sorting(w: World) -> Any:
    return w.capture(lambda x: (x.sort(-1), x.max(-1), x.topk(2, -1)[1], torch.cat(x.split(2, -1)), x.unbind(-1)))


@entry("m")
def complex_views(w: World) -> Any:
    @w.capture
    def body(x: Tensor) -> tuple[Tensor, ...]:
        z = torch.complex(x, x + 1)
        return z.conj(), z.imag, torch.view_as_real(z * 2), (z * z.conj()).real

    return body


@entry("ri")
def indexing(w: World) -> Any:
    table = fresh((4, 4), seed=2)

    @w.capture
    def body(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[..., ids] = 0.5
        return F.embedding(ids, table), y, x.index_select(-1, ids), torch.where(x > 0, x, y.sum())

    return body


@entry("a")
def in_place(w: World) -> Any:
    @w.capture
    def body(x: Tensor) -> Tensor:
        if x.dtype is torch.bool:
            return x.logical_not_()
        x.add_(1).mul_(2)
        return x.sum()

    return body


@entry("m")
def in_place_views(w: World) -> Any:
    @w.capture
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        x[0].mul_(2)
        x[:, 1] = 0.25
        return x, x.t()[2]

    return body


@entry("mm")
def two_writes(w: World) -> Any:
    @w.capture
    def body(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        y.mul_(0.5)
        return x - y

    return body


@entry("rr")
def write_one(w: World) -> Any:
    @w.capture
    def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y[..., :2] = x[..., 2:]
        return y, x * 1

    return body


@entry("sm")
def static_accumulator(w: World) -> Any:
    @w.capture(static=["total"])
    def body(total: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        total.mul_(0.5).add_(x)
        return total[1:], total * 2

    return body


@entry("ssm")
def static_many(w: World) -> Any:
    @w.capture(static=["a", "b"])
    def body(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a.add_(b)
        c.sub_(a)
        return a + b + c

    return body


@entry("cpm")
def kv_cache(w: World) -> Any:
    @w.capture(static=["cache"])
    def body(cache: dict[str, Tensor], pos: Tensor, x: Tensor) -> Tensor:
        cache["k"].index_copy_(0, pos, x[:1])
        cache["v"].index_copy_(0, pos, x[1:2])
        return F.scaled_dot_product_attention(x[None], cache["k"][None], cache["v"][None])[0]

    return body


@entry("cmk")
def kv_slices(w: World) -> Any:
    @w.capture
    def body(cache: dict[str, Tensor], x: Tensor, at: int) -> tuple[Tensor, dict[str, Tensor]]:
        cache["k"][at : at + 1] = x[:1]
        return cache["k"] @ cache["v"], dict(cache) if "containers" in KNOWN else cache

    return body


@entry("mm")
def out_argument(w: World) -> Any:
    return w.capture(lambda x, y: (torch.add(x, 1, out=y), torch.mm(x, x)))


@entry("r")
def batch_norm(w: World) -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    return w.capture(w.watch("batch_norm", net))


@entry("r")
def dropout(w: World) -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    return w.capture(w.watch("dropout", net))


@entry("m")
def module_state(w: World) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(fresh((4, 4), seed=3))
            self.register_buffer("mean", torch.zeros(4))
            self.scale = 2.0

        @override
        @w.capture
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.weight.mul_(0.9)
            mean: Tensor = self.get_buffer("mean")
            mean.add_(x.mean(0))
            return x @ self.weight * self.scale, self.weight[1]

    net = w.watch("module_state", Net())
    w.knobs.append(lambda n: setattr(net, "scale", 1.0 + n % 3))
    return net


@entry("m")
def buffer_replaced(w: World) -> Any:
    class Net(nn.Module):
        state: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.ones(4, 4))

        @override
        @w.capture
        def forward(self, x: Tensor) -> Tensor:
            self.state = (self.state + x) * 0.5
            return self.state

    return w.watch("buffer_replaced", Net())


class Owner:
    """A plain object whose methods are captured."""


@entry("m")
def recurrent(w: World) -> Any:
    class Cell(Owner):
        def __init__(self) -> None:
            self.h = torch.zeros(4, 4)
            self.gain = 0.5

        @w.capture
        def step(self, x: Tensor) -> Tensor:
            self.h = torch.tanh(self.h @ x * self.gain + x)
            return self.h * 2

    cell = w.watch("recurrent", Cell())
    w.knobs.append(lambda n: setattr(cell, "gain", 0.5 + n % 2))
    w.knobs.append(lambda n: setattr(cell, "h", fresh((4, 4), seed=n)))
    return cell.step


@entry("m")
def last_kept(w: World) -> Any:
    class Keeper(Owner):
        def __init__(self) -> None:
            self.last: Any = None

        @w.capture
        def step(self, x: Tensor) -> Tensor:
            y = x + 1
            self.last = {"y": y, "x": x, "row": y[0]}
            return y

    return w.watch("last_kept", Keeper()).step


@entry("m")
def swapped(w: World) -> Any:
    class Swap(Owner):
        def __init__(self) -> None:
            self.a, self.b = torch.ones(4, 4), torch.zeros(4, 4)

        @w.capture
        def step(self, x: Tensor) -> Tensor:
            self.a, self.b = self.b, self.a + x
            return self.a

    return w.watch("swapped", Swap()).step


@entry("mk")
def two_methods(w: World) -> Any:
    class Both(Owner):
        def __init__(self) -> None:
            self.state = torch.ones(4, 4)

        @w.capture
        def write(self, x: Tensor) -> Tensor:
            self.state.add_(x)
            return self.state

        @w.capture
        def read(self, x: Tensor) -> Tensor:
            return self.state @ x

    both = w.watch("two_methods", Both())
    return lambda x, n: both.read(x) if n else both.write(x)


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
    """Some names of a scope."""

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


# ------------------------------------------------------------------------------------------------------------ arguments
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
ROWS = (4, 1, 2, 0, 3)
SHAPES = ((4, 4), (4,), (), (0, 4), (2, 3, 2), (1,))


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves of a result with their paths."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield f"{path}:type", type(value)
        for index, member in enumerate(value):
            yield from leaves(member, f"{path}.{index}")
    elif dataclasses.is_dataclass(value) or isinstance(value, (Box, Owner)):
        yield from leaves(vars(value), path)
    else:
        yield path, value


def tensors_of(value: Any) -> list[Tensor]:
    """Tensors among the leaves of a result."""
    return [leaf for _, leaf in leaves(value, "") if isinstance(leaf, Tensor)]


class Arguments:
    """Picks the arguments of a call. ``form`` chooses what kind of tensors, ``seed`` the values of new ones."""

    def __init__(self, world: World, form: int, seed: int, first: Tensor | None = None) -> None:
        self._world, self._form, self._seed, self._first = world, form, seed, first
        self._tensors: list[Tensor] = []

    def pick(self, spec: str) -> tuple[Any, ...]:
        """One argument a letter of ``spec``."""
        return tuple([self._one(letter) for letter in spec])

    def _digit(self, base: int = 16) -> int:
        self._form, digit = divmod(self._form, base)
        return digit

    def _one(self, letter: str) -> Any:
        world = self._world
        self._seed += 1
        if letter in "mra":
            tensor = self._tensor(letter)
            self._tensors.append(tensor)
            return tensor
        if letter == "l":
            return [self._one("m"), self._one("m")]
        if letter == "i":
            return fresh((3,), torch.int64, self._seed) % 4
        if letter == "p":
            return torch.tensor([self._seed % 4])
        if letter == "k":
            return self._digit(4) % 3
        if letter == "f":
            return (0.5, 2.0, -0.0, float("nan"))[self._digit(4)]
        if letter == "b":
            return self._seed % 4 == 3
        if letter == "g":
            return world.generators[self._digit(4) == 3]
        if letter == "c":
            return world.caches[self._digit(4) == 3]
        digit = self._digit(8)
        usual = len(self._tensors) % 2
        tensor = (
            world.statics[(usual, usual, usual, usual, usual, 1 - usual, 2)[digit]] if digit < 7 else world.tensors[0]
        )
        self._tensors.append(tensor)
        return tensor

    def _tensor(self, letter: str) -> Tensor:
        if self._first is not None and not self._tensors:
            return self._first
        world, seed, form = self._world, self._seed, self._digit()
        previous = self._tensors[-1] if self._tensors else None
        plain = fresh((4, 4), seed=seed)
        fitting = (lambda t: True) if letter == "a" else (lambda t: t.dtype is torch.float32 and t.shape == (4, 4))
        if form == 6:
            return world.tensors[seed % 2]
        if form == 7:
            return world.tensors[0]
        if form in (8, 9):
            kept = [tensor for tensor in tensors_of(world.held) if fitting(tensor)]
            return kept[-1 - seed % len(kept) if form == 9 else -1] if kept else plain
        if form == 10 and previous is not None and fitting(previous) and "same_twice" not in KNOWN:
            return previous
        if form == 11 and previous is not None and fitting(previous) and previous.dim() == 2:
            return previous.t()
        if letter == "m":
            return self._odd_matrix(form, plain)
        if form in (12, 13):
            return fresh((ROWS[self._digit(8) % 5], 4), seed=seed)
        if form == 14 and letter == "a":
            return fresh(SHAPES[self._digit(8) % 6], DTYPES[self._digit(8) % 6], seed)
        if form == 15:
            return fresh((6, 4), seed=seed)[self._digit(2) :: 2]
        return plain

    def _odd_matrix(self, form: int, plain: Tensor) -> Tensor:
        if form == 12:
            return plain.t()
        if form == 13 and "misaligned" not in KNOWN:
            return fresh((17,), seed=self._seed)[1:].reshape(4, 4)
        if form == 14:
            return plain[:1].expand(4, 4)
        if form == 15:
            base = self._world.tensors[2]
            return base[1:].view(-1)[:16].view(4, 4) if self._digit(2) else base[:4]
        return plain


# ------------------------------------------------------------------------------------------------------------ comparing
def bits(tensor: Tensor) -> Tensor:
    """The values' bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def metadata(tensor: Tensor) -> tuple[Any, ...]:
    """Everything but values and place."""
    return (
        type(tensor), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad,
        tensor.is_inference(), tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def state_of(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers, flags and plain attributes of a module and its children."""
    for prefix, member in module.named_modules():
        at = f"{path}.{prefix}"
        for table in (member._parameters, member._buffers):
            for name, tensor in table.items():
                yield f"{at}.{name}", tensor
        for name, value in vars(member).items():
            if not name.startswith("_") and name != "forward":
                yield from leaves(value, f"{at}.{name}")


def everything(world: World) -> list[tuple[str, Any]]:
    """All that a caller of this world can see, in the same order in both worlds."""
    found: list[tuple[str, Any]] = []
    owned = (("tensors", world.tensors), ("statics", world.statics), ("caches", world.caches), ("held", world.held))
    for name, values in (*owned, *world.objects, *world.scratch, ("generators", world.generators)):
        found.extend(state_of(values, name) if isinstance(values, nn.Module) else leaves(values, name))
    return found


def sharing(tensors: list[tuple[str, Tensor]]) -> dict[str, tuple[int, int, int]]:
    """Per tensor: which earlier one is the same object, which shares its storage, and the distance in bytes."""
    objects: dict[int, int] = {}
    storages: dict[int, tuple[int, int]] = {}
    found = {}
    for index, (name, tensor) in enumerate(tensors):
        same = -1 if "identity" in KNOWN else objects.setdefault(id(tensor), index)
        if not tensor.numel():
            found[name] = (same, -1, 0)
            continue
        address = tensor.data_ptr()
        first, begin = storages.setdefault(tensor.untyped_storage().data_ptr(), (index, address))
        found[name] = (same, first, address - begin)
    return found


def plain(value: Any) -> Any:
    """A value that compares by what it says."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return (type(value), repr(value)) if isinstance(value, (int, float, complex, str, bytes)) else value


class Comparison:
    """Compares both worlds; remembers version counters from one time to the next. ``look``: all that is compared."""

    def __init__(self, look: Callable[[Any], list[tuple[str, Any]]] = everything) -> None:
        self._look = look
        self._versions: dict[str, tuple[weakref.ref[Tensor], int, weakref.ref[Tensor], int]] = {}

    def check(self, eager: Any, ours: Any) -> None:
        """Raise ``Mismatch`` at the first difference."""
        one, other = self._look(eager), self._look(ours)
        if [name for name, _ in one] != [name for name, _ in other]:
            raise Mismatch(f"structure: {[n for n, _ in one]} != {[n for n, _ in other]}")
        pairs: list[tuple[str, Tensor, Tensor]] = []
        for (name, a), (_, b) in zip(one, other, strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                pairs.append((name, a, b))
                self._tensors(name, a, b)
            elif not (a is b or plain(a) == plain(b)):
                raise Mismatch(f"{name}: {a!r} eagerly, {b!r} captured")
        mine, theirs = sharing([(n, b) for n, _, b in pairs]), sharing([(n, a) for n, a, _ in pairs])
        names = [name for name, _, _ in pairs]
        for name in names:
            if mine[name] != theirs[name]:
                said = [
                    f"(is {names[s]}, on {names[f] if f >= 0 else None} + {d})"
                    for s, f, d in (theirs[name], mine[name])
                ]
                raise Mismatch(f"memory of {name}: {said[0]} eagerly, {said[1]} captured")
        if not torch.equal(eager.rng, ours.rng):
            raise Mismatch("state of the default generator")
        self._count(pairs)

    def _tensors(self, name: str, a: Tensor, b: Tensor) -> None:
        if metadata(a) != metadata(b):
            raise Mismatch(f"metadata of {name}: {metadata(a)} eagerly, {metadata(b)} captured")
        if not torch.equal(bits(a), bits(b)):
            raise Mismatch(f"values of {name}: {a!r} eagerly, {b!r} captured")

    def _count(self, pairs: list[tuple[str, Tensor, Tensor]]) -> None:
        before, self._versions = self._versions, {}
        for name, a, b in pairs:
            if "versions" in KNOWN or a.is_inference() or b.is_inference() or name.startswith("result"):
                continue
            self._versions[name] = (weakref.ref(a), a._version, weakref.ref(b), b._version)
            then = before.get(name)
            same = then is not None and then[0]() is a and then[2]() is b
            if then is not None and same and then[1] != a._version and then[3] == b._version:
                raise Mismatch(f"{name} was written, but its version counter says nothing")


# -------------------------------------------------------------------------------------------------------------- actions
@frozen
class Program:
    """Integers that mean a program. ``cast``: entries of the catalogue, then ``bodies``; a step is (action, target,
    form, seed)."""

    cast: tuple[int, ...]
    steps: tuple[tuple[int, int, int, int], ...]
    bodies: tuple[Body, ...] = ()
    poison: bool = False
    marks: bool = False
    verify: bool = False
    rounds: int = 1
    """How often the steps are carried out, with other values and other results held."""
    bind: bool = False
    """Captured with ``inputs="bind"``."""


Act = Callable[[World, int, int, int], Any]
HELD_LIMIT = 6


def call(w: World, target: int, form: int, seed: int) -> Any:
    """Call a function; hold its result, a view of it, or nothing."""
    one, function = w.cast[target % len(w.cast)]
    arguments = Arguments(w, form, seed).pick(one.spec)
    return _called(w, one, function, arguments, seed)


def _called(w: World, one: Entry, function: Callable[..., Any], arguments: tuple[Any, ...], seed: int) -> Any:
    w.scratch.append(("arguments", list(arguments)))
    result = function(*arguments)
    if not one.borrow and seed % 8 in (5, 6, 7):
        tensors = tensors_of(result)
        w.held.append(tensors[0][..., :1] if seed % 8 == 7 and tensors and tensors[0].dim() else result)
        del w.held[:-HELD_LIMIT]
    return result


def chained(w: World, target: int, form: int, seed: int) -> Any:
    """A function of another one's output, dropped or held."""
    one, function = w.cast[target % len(w.cast)]
    then, consumer = w.cast[(target + form) % len(w.cast)]
    if one.borrow or then.spec[0] not in "mra":
        return call(w, target, form, seed)
    result = function(*Arguments(w, form, seed).pick(one.spec))
    fitting = [t for t in tensors_of(result) if t.dtype is torch.float32 and t.shape == (4, 4)]
    if not fitting:
        return result
    if form % 3 == 0:
        w.scratch.append(("middle", result))
    torch.clear_autocast_cache()
    arguments = Arguments(w, form // 8, seed + 1, first=fitting[seed % len(fitting)]).pick(then.spec)
    del result, fitting
    return _called(w, then, consumer, arguments, seed)


def looped(w: World, target: int, form: int, seed: int) -> Any:
    """``h = f(h)`` a few times."""
    one, function = w.cast[target % len(w.cast)]
    if one.borrow or one.spec[0] not in "mra":
        return call(w, target, form, seed)
    h = fresh((4, 4), seed=seed)
    for turn in range(2 + seed % 3):
        torch.clear_autocast_cache()
        result = function(*Arguments(w, form, seed + turn, first=h).pick(one.spec))
        fitting = [t for t in tensors_of(result) if t.dtype is torch.float32 and t.shape == (4, 4)]
        del result
        if not fitting:
            break
        h = fitting[0]
        del fitting
    return h


def drop(w: World, target: int, form: int, seed: int) -> None:
    """Forget something held."""
    if w.held:
        del w.held[target % len(w.held)]


def view(w: World, target: int, form: int, seed: int) -> None:
    """Hold a view of something held, in its place or beside it."""
    tensors = [tensor for tensor in tensors_of(w.held) if tensor.dim()]
    if tensors:
        tensor = tensors[target % len(tensors)]
        w.held.append((tensor[:1], tensor.transpose(0, -1), tensor.detach())[form % 3])
        del w.held[:-HELD_LIMIT]


def write(w: World, target: int, form: int, seed: int) -> None:
    """Write in place into anything the caller can reach."""
    modules = [p for m in w.modules for p in (*m.parameters(), *m.buffers())]
    caches = [tensor for cache in w.caches for tensor in cache.values()]
    reachable = [*tensors_of(w.held), *w.tensors, *w.statics, *caches, *modules]
    tensor = reachable[(target + 8 * form) % len(reachable)]
    if tensor.dtype is torch.bool:
        tensor.logical_not_()
    elif form % 2 and tensor.dim():
        tensor[:1] = seed
    else:
        tensor.mul_(2).add_(seed % 5)


def replace_tensor(w: World, target: int, form: int, seed: int) -> None:
    """Other tensors under the caller's names."""
    (w.tensors if form % 2 else w.statics)[target % 2] = fresh((4, 4), seed=seed)
    if form % 8 == 0:
        w.caches[target % 2]["k"] = fresh((4, 4), seed=seed)


def replace_parameter(w: World, target: int, form: int, seed: int) -> None:
    """Replace a module's parameter or buffer in one of the ways there are."""
    if not w.modules:
        return replace_tensor(w, target, form, seed)
    net = w.modules[target % len(w.modules)]
    member = [m for m in net.modules() if m._parameters or m._buffers][seed % 2 :: 2] or [net]
    table = member[0]._parameters or member[0]._buffers
    name, old = next(iter(table.items()), (None, None))
    if name is None or old is None:
        return None
    new = fresh(tuple(old.shape), old.dtype, seed)
    way = form % 8
    if way == 0:
        setattr(member[0], name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
    elif way == 1:
        old.data = new
    elif way in (2, 3):
        copied = {
            key: value.clone() * 0.5 if value.is_floating_point() else value.clone()
            for key, value in net.state_dict().items()
        }
        net.load_state_dict(copied, assign=way == 2)
    elif way == 4:
        net.to(torch.float64)
    elif way in (5, 6):
        net.to(torch.float32)
    elif isinstance(old, nn.Parameter):
        old.requires_grad_(not old.requires_grad)
    return None


def train(w: World, target: int, form: int, seed: int) -> None:
    """Switch a module, or a part of it, between training and evaluation."""
    if w.modules:
        parts = list(w.modules[target % len(w.modules)].modules())
        parts[form % len(parts)].train(bool(seed % 2))


def turn_knob(w: World, target: int, form: int, seed: int) -> None:
    """Change a Python value or a tensor that some body names."""
    if w.knobs:
        w.knobs[target % len(w.knobs)](seed)


def modes(w: World, target: int, form: int, seed: int) -> None:
    """Switch autocast, the default dtype, or how gradients are handled."""
    if target % 4 == 0:
        w.autocast = not w.autocast
    elif target % 4 == 1:
        w.default = torch.float64 if w.default is torch.float32 else torch.float32
    else:
        w.gradients = form % 3


def reseed(w: World, target: int, form: int, seed: int) -> None:
    """Seed a generator."""
    if target % 2:
        torch.manual_seed(seed)
    else:
        w.generators[form % 2].manual_seed(seed)


def disabled(w: World, target: int, form: int, seed: int) -> Any:
    """A call while capturing is switched off."""
    with config.patch(enabled=False):
        return call(w, target, form, seed)


def collect(w: World, target: int, form: int, seed: int) -> None:
    """Collect garbage."""
    if w.captured:
        gc.collect()


def mark(w: World, target: int, form: int, seed: int) -> None:
    """A new step."""
    if w.captured:
        mark_step_begin()


def forget(w: World, target: int, form: int, seed: int) -> None:
    """``reset`` or ``release`` one function or all."""
    if w.captured and w.decorated:
        one = w.decorated[target % len(w.decorated)] if form % 4 else None
        (reset if seed % 2 else release)(one)


def without_trace(w: World, target: int, form: int, seed: int) -> None:
    """``explain`` or ``warmup``: neither changes anything, whatever the body does."""
    one, function = w.cast[target % len(w.cast)]
    arguments = Arguments(w, form, seed).pick(one.spec)
    w.scratch.append(("arguments", list(arguments)))
    if w.captured and any(function is one for one in w.decorated):
        try:
            (explain if seed % 2 else warmup)(function)(*arguments)
        except CaptureError:
            raise
        except (Boom, RuntimeError, ValueError):
            pass


ACTIONS: dict[str, tuple[int, Act]] = {
    "call": (12, call),
    "burst": (12, call),
    "chained": (6, chained),
    "looped": (3, looped),
    "drop": (3, drop),
    "view": (2, view),
    "write": (4, write),
    "replace_tensor": (2, replace_tensor),
    "replace_parameter": (3, replace_parameter),
    "train": (2, train),
    "turn_knob": (3, turn_knob),
    "modes": (2, modes),
    "reseed": (1, reseed),
    "collect": (1, collect),
    "mark": (4, mark),
    "forget": (1, forget),
    "without_trace": (2, without_trace),
    "borrow": (1, call),
    "disabled": (1, disabled),
}
DECK: tuple[str, ...] = tuple(name for name, (weight, _) in ACTIONS.items() for _ in range(weight))
NAMES: tuple[str, ...] = tuple(CATALOGUE)


# -------------------------------------------------------------------------------------------------------------- running
@define
class Tally:
    """What captured functions did, over many programs."""

    calls: dict[str, int] = field(factory=dict)
    replays: dict[str, int] = field(factory=dict)
    recordings: int = 0
    rebinds: int = 0
    evacuations: int = 0

    def add(self, name: str, calls: int, replays: int) -> None:
        """Count one function's calls."""
        self.calls[name] = self.calls.get(name, 0) + calls
        self.replays[name] = self.replays.get(name, 0) + replays

    def share(self) -> float:
        """Replays of all calls."""
        return sum(self.replays.values()) / max(sum(self.calls.values()), 1)


def build(captured: bool, cast: tuple[int, ...], bodies: tuple[Body, ...] = (), *, bind: bool = False) -> World:
    """A world as it stands before the first action."""
    world = World(captured, "bind" if bind else "auto")
    torch.manual_seed(11)
    world.tensors = [fresh((4, 4), seed=1), fresh((4, 4), seed=2), fresh((6, 4), seed=3)]
    world.statics = [fresh((4, 4), seed=4), fresh((4, 4), seed=5)]
    world.statics.append(world.statics[0].t())
    world.caches = [{"k": fresh((4, 4), seed=i), "v": fresh((4, 4), seed=i + 9)} for i in (6, 7)]
    world.generators = [torch.Generator(DEVICE).manual_seed(i) for i in (1, 2)]
    for index in cast:
        one = CATALOGUE[NAMES[index % len(NAMES)]]
        if one.name not in KNOWN:
            world.cast.append((one, one.build(world)))
    for body in bodies:
        kept = tuple(one for one in body if OPERATIONS[one[0] % len(OPERATIONS)] not in KNOWN)
        world.cast.append((Entry("generated", "mm", chain), generated(world, kept)))
    if not world.cast:
        world.cast.append((CATALOGUE["chain"], chain(world)))
    return world


def micro(program: Program) -> Iterator[tuple[str, int, int, int]]:
    """The program's actions one by one: a burst is several calls of one form with other values."""
    rounds = [
        (action, target, form, seed + 5 * turn)
        for turn in range(program.rounds)
        for action, target, form, seed in program.steps
    ]
    for action, target, form, seed in rounds:
        name = DECK[action % len(DECK)]
        if name in KNOWN or (name == "mark" and not program.marks):
            continue
        if name != "burst":
            yield name, target, form, seed
            continue
        for turn in range(3 + seed % 3):
            yield "call", target, form, seed + turn * 3


class Runner:
    """Runs one program in both worlds."""

    def __init__(self, program: Program, tally: Tally | None = None) -> None:
        self._program, self._tally = program, tally
        self._log: list[str] = []

    def run(self) -> None:
        """Raise ``Mismatch`` where the worlds part, with the actions up to there."""
        _trees.forget_trees()
        _step.marks().begun = 0
        program = self._program
        state = rng_state()
        try:
            with (
                warnings.catch_warnings(),
                config.patch(
                    cache=False,
                    poison=program.poison,
                    verify="first" if program.verify and "verify" not in KNOWN else "off",
                ),
            ):
                warnings.simplefilter("ignore")
                self._run()
        except Mismatch as error:
            raise Mismatch(f"{error}\n{program!r}\n  " + "\n  ".join(self._log)) from error
        finally:
            set_rng_state(state)

    def _run(self) -> None:
        program = self._program
        eager, ours = (build(ours, program.cast, program.bodies, bind=program.bind) for ours in (False, True))
        comparison = Comparison()
        for name, target, form, seed in micro(program):
            said = eager.cast[target % len(eager.cast)][0].name
            self._log.append(f"{name} {said} target={target} form={form} seed={seed}")
            self._act(eager, ours, name, target, form, seed)
            comparison.check(eager, ours)
            for world in (eager, ours):
                world.scratch.clear()
            if name == "borrow":
                self._borrow(ours, target, seed)
                comparison.check(eager, ours)
        self._count(ours)
        if program.poison and program.cast[0] % 2:
            reset()

    def _act(self, eager: World, ours: World, name: str, target: int, form: int, seed: int) -> None:
        act = ACTIONS[name][1]
        outcomes = [_outcome(world, act, target, form, seed) for world in (eager, ours)]
        if outcomes[0] != outcomes[1]:
            raise Mismatch(f"{outcomes[0]} eagerly, {outcomes[1]} captured")

    def _borrow(self, ours: World, target: int, seed: int) -> None:
        """An output borrowed from a recording raises once its step is over; nothing else is disturbed."""
        function = capture(_borrowing, outputs="borrow")
        with ours.modes():
            for turn in range(3):
                kept = function(fresh((4, 4), seed=seed + turn))
                counted = recordings(function)
                if self._program.marks:
                    mark_step_begin()
                again = function(fresh((4, 4), seed=seed))
                if counted.recordings + counted.replays:
                    try:
                        kept.add(1)
                    except BorrowedOutputError:
                        pass
                    else:
                        raise Mismatch("a borrowed output can be used after its step")
                del kept, again

    def _count(self, ours: World) -> None:
        if self._tally is None:
            return
        for one, function in ours.cast:
            try:
                counted = recordings(function)
            except CaptureError:
                continue
            calls = counted.body_runs + counted.replays
            self._tally.add(one.name, calls, counted.replays)
            self._tally.recordings += counted.recordings
            self._tally.rebinds += counted.rebinds
            self._tally.evacuations += counted.evacuations


def _borrowing(x: Tensor) -> Tensor:
    return x * 2 + 1


def _outcome(world: World, act: Act, target: int, form: int, seed: int) -> str | None:
    """What an action raised, as text; the result goes to the world's scratch."""
    raised = None
    with world.modes():
        try:
            result = act(world, target, form, seed)
            world.scratch.append(("result", result))
        except Exception as error:
            if isinstance(error, CaptureError) or not isinstance(error, (Boom, RuntimeError, IndexError, ValueError)):
                raise
            raised = f"{type(error).__name__}: {error}"
    return raised


def run(program: Program, tally: Tally | None = None) -> None:
    """Run one program in both worlds."""
    Runner(program, tally).run()
