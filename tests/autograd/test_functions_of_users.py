"""Users' ``autograd.Function`` classes that also keep attributes on ``ctx`` and change Python state."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, recordings
from tests.support.device import DEVICE
from tests.support.regions import bits, both, captured_twins, forward_and_back, replayed
from tests.support.regions import fresh as fresh

Keep = Callable[[Any, Tensor], None]
Get = Callable[[Any], Tensor]


def _squaring(keep: Keep, get: Get) -> Any:
    """An ``autograd.Function`` that squares, and keeps its input by the given way."""

    class Square(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor) -> Tensor:
            keep(ctx, x)
            return x * x

        @staticmethod
        @override
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * get(ctx) * grad

    return Square


def _set(name: str, make: Callable[[Tensor], Any]) -> Keep:
    return lambda ctx, x: setattr(ctx, name, make(x))


WAYS: dict[str, tuple[Keep, Get]] = {
    "a tensor": (_set("x", lambda x: x), lambda ctx: ctx.x),
    "a tensor without its graph": (_set("x", lambda x: x.detach()), lambda ctx: ctx.x),
    "a copy": (_set("x", lambda x: x.clone()), lambda ctx: ctx.x),
    "a tuple": (_set("kept", lambda x: (1, [x])), lambda ctx: ctx.kept[1][0]),
    "a dict": (_set("kept", lambda x: {"x": x}), lambda ctx: ctx.kept["x"]),
    "an object": (_set("kept", lambda x: SimpleNamespace(x=x)), lambda ctx: ctx.kept.x),
    "a closure": (_set("get", lambda x: lambda: x), lambda ctx: ctx.get()),
    "a default": (_set("get", lambda x: lambda y=x: y), lambda ctx: ctx.get()),
    "arguments of a function": (_set("get", lambda x: functools.partial(torch.clone, x)), lambda ctx: ctx.get()),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
def test_tensors_in_attributes_of_ctx_are_those_of_the_call(way: str) -> None:
    function = _squaring(*WAYS[way])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        @override
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = function.apply(self.inner(x))
            return y

    mine, theirs = captured_twins(Net)
    with pytest.warns(CaptureWarning, match="CG501.*keeps tensors in attributes of its ctx"):
        both(forward_and_back, mine, theirs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["a tensor", "an object", "a closure"])
def test_they_are_recorded_in_a_whole_step(way: str) -> None:
    function = _squaring(*WAYS[way])
    torch.manual_seed(0)
    start = torch.randn(6, 6, device=DEVICE)

    def twin(wrap: Callable[[Any], Any]) -> tuple[Any, Tensor]:
        weight = start.clone().requires_grad_()

        def step(x: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(function.apply(x @ weight).sum(), weight)
            with torch.no_grad():
                weight.sub_(gradient, alpha=0.01)
            return gradient

        return wrap(step), weight

    (step, mine), (eager, theirs) = twin(capture), twin(lambda plain: plain)
    for _ in range(8):
        x = torch.randn(3, 6, device=DEVICE)
        assert bits(step(x)) == bits(eager(x))
        assert bits(mine) == bits(theirs)
    assert recordings(step).replays >= 4, recordings(step)


def test_attributes_of_ctx_with_the_names_of_a_node_s_own() -> None:
    class Named(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name, ctx.variable, ctx.register_hook, ctx.register_prehook, ctx.frame = name, 1, 2, 3, 4
            return x * 2

        @staticmethod
        @override
        def backward(ctx: Any, grad: Any) -> Any:
            return (grad * (2 if ctx.name == "double" else 3)), None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        @override
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Named.apply(self.inner(x), "double")  # type: ignore[no-untyped-call]
            y = y + Named.apply(x, "other") + Named.apply(x, "other")  # type: ignore[no-untyped-call]
            return y

    mine, theirs = captured_twins(Net)
    both(forward_and_back, mine, theirs)
    replayed(mine)


seen: list[int] = []
counted = 0


class State(torch.autograd.Function):
    number = 0

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Any) -> Any:
        global counted
        if ctx.kind == "class":
            State.number += 1
        elif ctx.kind == "global":
            counted += 1
        else:
            seen.append(7)
        return grad, None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["class", "global", "list"])
def test_a_backward_pass_of_a_region_leaves_python_state_as_eager_does(kind: str) -> None:
    global counted
    State.number, counted = 0, 0
    seen.clear()
    weight = torch.randn(6, 6, device=DEVICE, requires_grad=True)

    @capture
    def body(x: Tensor) -> Tensor:
        y: Tensor = State.apply(x @ weight, kind)  # type: ignore[no-untyped-call]
        return y

    for number in range(1, 9):
        body(torch.randn(3, 6, device=DEVICE)).sum().backward()
        assert {"class": State.number, "global": counted, "list": len(seen)}[kind] == number


def test_a_backward_pass_of_a_region_that_counts_in_a_cell() -> None:
    calls = 0

    class Counting(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @override
        def backward(ctx: Any, grad: Any) -> Any:
            nonlocal calls
            calls += 1
            return grad

    weight = torch.randn(6, 6, device=DEVICE, requires_grad=True)

    @capture
    def body(x: Tensor) -> Tensor:
        y: Tensor = Counting.apply(x @ weight)  # type: ignore[no-untyped-call]
        return y

    for number in range(1, 9):
        body(torch.randn(3, 6, device=DEVICE)).sum().backward()
        assert calls == number


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["in place", "data", "attribute", "number", "counts"])
def test_a_backward_pass_of_a_region_that_reads_a_module_by_its_ctx(how: str) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor, net: Any) -> Tensor:
            ctx.net = net
            scaled: Tensor = x * net.scale
            return scaled

        @staticmethod
        @override
        def backward(ctx: Any, grad: Any) -> Any:
            ctx.net.calls += how == "counts"
            return grad * ctx.net.scale * ctx.net.factor, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.factor, self.calls = nn.Linear(6, 6), 1.0, 0
            self.register_buffer("scale", torch.ones(6))

        @override
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Scaled.apply(self.inner(x), self)  # type: ignore[no-untyped-call]
            return y

    mine, theirs = captured_twins(Net)
    warnings.simplefilter("ignore", CaptureWarning)  # CG105: the backward pass reads a buffer that is no argument of it
    for number in range(3):
        both(forward_and_back, mine, theirs)
        for module in (mine.m[0], theirs.m[0]):
            if how == "in place":
                module.scale.mul_(1.5)
            elif how == "data":
                module.scale.data = module.scale.data.clone() * 1.5
            elif how == "attribute":
                module.scale = module.scale * 1.5
            elif how == "number":
                module.factor = number + 2.0
        assert mine.m[0].calls == theirs.m[0].calls


def test_a_conjugate_that_the_backward_pass_needs_is_recorded() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        @override
        def forward(self, x: Tensor) -> Tensor:
            z = torch.complex(self.inner(x), x)
            return (z * z.conj()).real + (z.mH @ z).abs().sum()

    mine, theirs = captured_twins(Net)
    both(forward_and_back, mine, theirs)
    replayed(mine)


class _Ranked(torch.autograd.Function):
    """Keeps a table on ``ctx`` that exists before the call, as a DTensor keeps its device mesh."""

    TABLE = torch.arange(4, device=DEVICE)

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.table = SimpleNamespace(ranks=_Ranked.TABLE)
        return x * 2

    @staticmethod
    @override
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * (1 + ctx.table.ranks.numel())


def test_a_table_that_was_there_before_is_no_tensor_of_the_run() -> None:
    apply: Any = _Ranked.apply
    weight, twin = (torch.ones(3, device=DEVICE, requires_grad=True) for _ in range(2))
    f = capture(lambda x: apply(x * weight))
    for number in range(8):
        x = torch.full((3,), float(number), device=DEVICE)
        f(x).sum().backward()
        apply(x * twin).sum().backward()
        assert bits(weight.grad) == bits(twin.grad)
    assert recordings(f).replays >= 3, str(recordings(f))
