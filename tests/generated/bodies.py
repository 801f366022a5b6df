"""The catalogue's functions of arguments, and modules that keep state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture.tree import thread_trees as thread_trees  # fmt: skip
from tests.generated.worlds import KNOWN, Pair, Record, World, entry, fresh


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

    holder = w.watch("two_methods", Both())
    return lambda x, n: holder.read(x) if n else holder.write(x)
