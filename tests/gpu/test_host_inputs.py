"""Inputs in host memory: 0-dim tensors in arithmetic on the device, and tensors that the body moves there."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from capture.integrations.compile import backend, graphs
from capture.observe.probes import device_syncs
from tests.gpu.support import (
    DEVICE,
    ON_CUDA,
    check,
    counts,
    eager,
    host,
    may_fall_back,
    needs_cuda,
    needs_gpu,
    pinned,
    rand,
    same,
    synchronize,
)

pytestmark = needs_gpu


SCALARS = (2.0, 0.5, 1.001, 3.0, -1.0, 0.1, 1.0, 2.7182817, 0.0, 1e-3)
ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": operator.add,
    "add from the left": lambda x, s: s + x,
    "sub": operator.sub,
    "sub from the left": lambda x, s: s - x,
    "mul": operator.mul,
    "mul from the left": lambda x, s: s * x,
    "div": operator.truediv,
    "div from the left": lambda x, s: s / x,
    "pow": lambda x, s: x.abs() ** s,
    "pow from the left": lambda x, s: s.abs() ** x,
    "where": lambda x, s: torch.where(x > 0, x, s),
    "where from the left": lambda x, s: torch.where(x > 0, s, x),
    "maximum": torch.maximum,
    "compare": lambda x, s: (x > s).to(x.dtype) + (x == s),
    "in place": lambda x, s: x.clone().mul_(s).add_(s),
    "fill": lambda x, s: torch.empty_like(x).copy_(s),
    "moved": lambda x, s: x * s.to(x.device),
}


@may_fall_back
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_scalar_tensors_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    """A 0-dim CPU tensor in arithmetic on the device: value and rounding are those of this call."""
    body = ARITHMETIC[name]

    @capture
    def f(x: Tensor, s: Tensor) -> Tensor:
        return body(x, s)

    for i, value in enumerate(SCALARS):
        x = rand(37, seed=i, dtype=dtype)
        s = torch.tensor(value)
        expected = eager(f, x, s)
        same(f(x, s), expected)
        s.fill_(-77.0)


INDEXED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "number at indices": lambda y, ids, mask: y.index_put_((ids,), torch.tensor(0.5)),
    "number by assignment": lambda y, ids, mask: assigned(y, (..., ids), 0.5),
    "number at a list": lambda y, ids, mask: assigned(y, [0, 2], -1.5),
    "number under a mask": lambda y, ids, mask: assigned(y, mask, 7.0),
    "flag at indices": lambda y, ids, mask: assigned(y > 0, ids, value=True),
    "list": lambda y, ids, mask: y[[2, 0, 1]],
    "list in the last dimension": lambda y, ids, mask: y[:, [1, 0]],
    "list beside a tensor": lambda y, ids, mask: y[[0, 1, 2], ids],
    "added at a list": lambda y, ids, mask: assigned(y, [1, 2], y[[1, 2]] + 1),
    "accumulated": lambda y, ids, mask: y.index_put_((ids,), torch.tensor(0.5), accumulate=True),
}


def assigned(y: Tensor, at: Any, value: Any) -> Tensor:
    """``y[at] = value`` as an expression."""
    y[at] = value
    return y


@pytest.mark.parametrize("name", INDEXED)
def test_indices_and_values_made_in_the_body(name: str) -> None:
    """Python numbers and lists in brackets become CPU tensors, which an eager call copies to the device."""
    body = INDEXED[name]

    @capture
    def f(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        return body(x.clone(), ids, mask)

    for i in range(6):
        mark_step_begin()
        x, ids = rand(4, 3, seed=i), torch.tensor([i % 3, (i + 1) % 3, i % 2], device=DEVICE)
        same(f(x, ids, x > 0), eager(f, x, ids, x > 0))
    assert counts(f)[1:3] == (1, 4)


@may_fall_back
@pytest.mark.parametrize("kind", [torch.float64, torch.int64, torch.bfloat16], ids=["float64", "int64", "bfloat16"])
def test_scalar_tensors_of_other_dtypes(kind: torch.dtype) -> None:
    """Promotion with a CPU scalar of another dtype is eager's."""

    @capture
    def f(x: Tensor, s: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return x * s, x + n, n * 2, s - 1, n + s

    check(f, lambda i: [rand(9, seed=i), torch.tensor(i * 1.7 - 3).to(kind), torch.tensor(i * 3 - 5)])


@may_fall_back
@pytest.mark.parametrize("way", ["in place", "another"])
def test_scalar_tensors_from_outside(way: str) -> None:
    """A CPU scalar the body takes from a closure or an attribute is read at every call."""

    class Scale:
        def __init__(self) -> None:
            self.value = torch.tensor(1.5)

    inside, scale = torch.tensor(0.25), Scale()

    @capture
    def f(x: Tensor) -> Tensor:
        return x * scale.value + inside

    for i in range(8):
        x = rand(11, seed=i)
        expected = eager(f, x)
        same(f(x), expected)
        if way == "in place":
            inside.add_(0.3)
            scale.value.mul_(-1.1)
        else:
            inside = inside + 0.3
            scale.value = scale.value * -1.1


@may_fall_back
@pytest.mark.parametrize("non_blocking", [False, True], ids=["blocking", "non_blocking"])
@pytest.mark.parametrize("memory", [host, pinned], ids=["pageable", "pinned"])
@pytest.mark.parametrize("same_tensor", [False, True], ids=["new tensor", "same tensor"])
@pytest.mark.parametrize("size", [(), (24,), (256, 24)], ids=["scalar", "small", "large"])
def test_moved_inside_the_body(
    size: tuple[int, ...], same_tensor: bool, memory: Callable[..., Tensor], non_blocking: bool
) -> None:
    """CPU tensors moved to the device by the body, with new values at every call."""

    @capture
    def f(x: Tensor, h: Tensor) -> Tensor:
        return x * h.to(x.device, non_blocking=non_blocking) + 1

    kept = memory(*size)
    for i in range(6):
        x, values = rand(24, seed=i), host(*size, seed=i + 40)
        h = kept.copy_(values) if same_tensor else memory(*size, seed=i + 40)
        y = f(x, h)
        synchronize()
        same(y, x * values.to(DEVICE) + 1)
        h.fill_(float("nan"))


@may_fall_back
def test_moved_inside_the_body_from_outside() -> None:
    """A CPU table that the body finds by itself and moves: values of this call, also when it is replaced."""
    tables = {"t": host(24)}

    @capture
    def f(x: Tensor) -> Tensor:
        return x + tables["t"].to(x.device, non_blocking=True)

    for i in range(9):
        x = rand(24, seed=i)
        same(f(x), x + tables["t"].to(DEVICE))
        synchronize()
        if i % 3 == 2:
            tables["t"] = host(24, seed=i)
        else:
            tables["t"].add_(1)


@may_fall_back
def test_copied_into_a_buffer_by_the_body() -> None:
    """``buffer.copy_(cpu)`` in the body: the buffer holds this call's values after every call."""
    buffer = torch.zeros(24, device=DEVICE)

    @capture
    def f(x: Tensor, h: Tensor) -> Tensor:
        buffer.copy_(h, non_blocking=True)
        return x + buffer

    for i in range(6):
        x, h = rand(24, seed=i), host(24, seed=i + 40)
        y = f(x, h)
        synchronize()
        same(y, x + h.to(DEVICE))
        same(buffer, h.to(DEVICE))


aten, put, convert = torch.ops.aten, torch.ops.prims.device_put, torch.ops.prims.convert_element_type
CONSTANTS: dict[str, Callable[[Tensor], Any]] = {
    "lifted and copied": lambda x: x * aten.lift_fresh_copy(torch.tensor(0.3)),
    "converted": lambda x: x * torch.tensor(0.3, dtype=torch.float64).to(torch.float32),
    "converted by prims": lambda x: x / convert(torch.tensor(3), torch.float64),
    "moved": lambda x: x - aten.lift_fresh_copy(torch.tensor([0.3, 0.1, 7.0])).to(x.device),
    "converted, viewed and moved": lambda x: x + convert(torch.arange(6), x.dtype)[3:].flip(0).to(x.device),
    "written after it was moved": lambda x: written_later(x, torch.tensor([1.0, 2.0, 3.0])),
}


def written_later(x: Tensor, constant: Tensor) -> Tensor:
    """A body that copies a constant and writes the constant later: the copy keeps the old values."""
    there = constant.to(x.device, copy=True)
    constant.add_(1)
    return x * there + constant.to(x.device)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_body_stay_constants(name: str) -> None:
    """Conversions, copies and views of a constant are constants, too, and are on the device when recorded."""
    body = CONSTANTS[name]

    @capture
    def f(x: Tensor) -> Any:
        return body(x)

    check(f, lambda i: [rand(4, 3, seed=i)])
    assert counts(f)[1:] == (1, 4, 0)


def number(i: int) -> list[Tensor]:
    """A tensor on the device and a 0-dim tensor on the CPU."""
    return [rand(4, 3, seed=i), torch.tensor(SCALARS[i], dtype=torch.float64)]


NUMBERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "converted": lambda x, s: x * s.to(torch.float32),
    "converted by prims": lambda x, s: x + convert(s, torch.float32),
    "converted twice": lambda x, s: x + convert(convert(s, torch.float64), x.dtype),
    "rounded in between": lambda x, s: x + s.to(torch.bfloat16).to(torch.float32),
    "copied": lambda x, s: x * s.clone(),
    "converted and moved": lambda x, s: x / s.to(torch.float32).to(x.device, non_blocking=True),
    "converted, viewed and moved": lambda x, s: x - s.view(()).to(torch.float32).expand(3).to(x.device),
    "converted and copied": lambda x, s: torch.empty_like(x).copy_(s.to(torch.float32)),
    "used in two ways": lambda x, s: (x + s) * s.to(torch.float32) - s.to(torch.float32).to(x.device),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_converted_by_the_body(name: str) -> None:
    """A CPU number that the body converts before the device gets it: the value of this call."""
    body = NUMBERS[name]

    @capture
    def f(x: Tensor, s: Tensor) -> Any:
        return body(x, s)

    check(f, number, len(SCALARS))
    assert counts(f)[1:] == (1, len(SCALARS) - 2, 0)


@may_fall_back
@pytest.mark.parametrize("way", ["in place", "another"])
def test_numbers_of_python_state_converted_by_the_body(way: str) -> None:
    """The body reads the number from Python state and converts it: the value of this call."""
    scale = {"s": torch.tensor(1.7, dtype=torch.float64)}

    @capture
    def f(x: Tensor) -> Any:
        return x * convert(scale["s"], torch.float32) + scale["s"].to(torch.float32).to(x.device)

    for i in range(8):
        x = rand(4, 3, seed=i)
        same(f(x), eager(f, x))
        if way == "in place":
            scale["s"].mul_(-1.1)
        else:
            scale["s"] = scale["s"] * -1.1
    assert way == "another" or counts(f)[1:] == (1, 6, 0)


UNSURE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "to integers": lambda x, s: x * s.to(torch.int32),
    "computed": lambda x, s: x * (s * 2).to(torch.float32),
    "made a constant": lambda x, s: x * torch.tensor(s),
    "made a constant and moved": lambda x, s: x * aten.lift_fresh_copy(s.clone()).to(x.device),
    "lifted": lambda x, s: x * aten.lift_fresh(s).to(torch.float32),
    "lifted and copied": lambda x, s: x * aten.lift_fresh_copy(s).to(x.device),
    "into a constant": lambda x, s: x * torch.tensor(0.0).copy_(s).to(x.device),
    "with a constant": lambda x, s: x * torch.stack([torch.tensor(2.0), s.to(torch.float32)]).prod().to(x.device),
    "in half precision": lambda x, s: x.bfloat16() * s.to(torch.float32),
    "moved by prims": lambda x, s: x * put(s, x.device),
    "converted and moved by prims": lambda x, s: x / put(s.to(x.dtype), x.device),
    "constant moved by prims": lambda x, s: x * put(torch.tensor([0.3, 0.1, 7.0]), x.device) + s,
}


@may_fall_back
@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", UNSURE)
def test_numbers_that_may_not_be_recorded(name: str) -> None:
    """Whatever the body does with a number from outside, no call gets an earlier call's number."""
    body = UNSURE[name]

    @capture
    def f(x: Tensor, s: Tensor) -> Any:
        return body(x, s)

    check(f, number, len(SCALARS))


@needs_cuda
@may_fall_back
@pytest.mark.parametrize("make", [torch.from_numpy, torch.as_tensor, torch.tensor])
def test_arrays_are_no_constants(make: Callable[[Any], Tensor]) -> None:
    """An array that the body moves to the device may be written between calls by anyone: it is read in each call."""
    table = np.arange(3, dtype=np.float32)

    @capture
    def f(x: Tensor) -> Tensor:
        return x * make(table).to(x.device)

    for i in range(8):
        x = rand(4, 3, seed=i)
        same(f(x), eager(f, x))
        table += i // 4


@needs_cuda
@may_fall_back
@pytest.mark.parametrize("way", ["in place", "another"])
def test_constants_of_a_graph_that_the_caller_holds(way: str) -> None:
    """A traced graph's constants are attributes, which the caller may write between calls."""
    graph: Any = make_fx(lambda x: x * torch.tensor(3.0) - torch.tensor(0.25).to(x.device))(rand(4, 3))
    names = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
    assert len(names) == 2

    @capture
    def f(x: Tensor) -> Any:
        return graph(x)

    for i in range(8):
        x = rand(4, 3, seed=i)
        same(f(x), eager(f, x))
        for name in names if i > 3 else ():
            value = getattr(graph, name)
            setattr(graph, name, value.add_(1) if way == "in place" else value + 1)


class Scaled(nn.Module):
    """A module as in transformers: a constant that is moved to the device, and a Python number that differs by
    instance."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(rand(3)), 0.25

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.tensor(4096).to(x.device)
        mean = x.pow(2).mean(-1, keepdim=True) + self.eps
        return x * torch.rsqrt(mean) * self.weight + torch.tensor(0.3), window


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_constants_and_numbers_in_compiled_graphs(grad: bool) -> None:
    """Dynamo passes a Python number that has changed once as an input: a new CPU tensor in every call."""
    torch.compiler.reset()
    net, before = Scaled(), set(graphs())
    compiled = torch.compile(net, backend=backend)

    def run(model: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(grad):
            result, window = model(x)
            found = torch.autograd.grad(result.sum(), net.weight) if grad else ()
        return [result.detach(), window, *found]

    for i, eps in enumerate((0.25, 0.25, 0.7, 0.7, 0.3, 1e-3, 0.9, 0.01, 3.5)):
        mark_step_begin()
        net.eps = eps
        x = rand(4, 3, seed=i)
        same(run(compiled, x), run(net, x))
    counted = {graph.__name__: recordings(graph) for graph in graphs() if graph not in before}
    numbers = [counts for name, counts in counted.items() if "backward" not in name and counts.replays > 3]
    assert len(numbers) == 1, counted
    assert not any(counts.eager_calls for counts in counted.values()), counted
    torch.compiler.reset()


def _written(x: Tensor) -> Tensor:
    half = x.float()
    half.add_(1)
    return half.to(DEVICE)


def _written_before_it_is_moved(x: Tensor) -> Tensor:
    half = x.float()
    x.zero_()
    return half.to(DEVICE)


ON_THE_HOST: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda x: x[1].to(DEVICE) * 2,
    "transposed": lambda x: x.t().to(DEVICE) * 2,
    "every other column": lambda x: x[:, ::2].to(DEVICE) * 2,
    "another dimension": lambda x: x.unsqueeze(0).to(DEVICE) * 2,
    "converted": lambda x: x.float().to(DEVICE) * 2,
    "converted on the way": lambda x: x.to(DEVICE, torch.float32) * 2,
    "converted row": lambda x: x[1].float().to(DEVICE) * 2,
    "row of what was converted": lambda x: x.float()[1].to(DEVICE) * 2,
    "converted twice": lambda x: x.float()[1:].to(torch.float16)[:, :2].to(DEVICE) * 2,
    "converted and transposed": lambda x: x.float().t().to(DEVICE) * 2,
    "transposed and converted": lambda x: x.t().float().to(DEVICE) * 2,
    "cloned": lambda x: x.clone().to(DEVICE) * 2,
}
EAGER_ON_THE_HOST: dict[str, Callable[[Tensor], Any]] = {
    "other columns converted": lambda x: x[:, ::2].float().to(DEVICE) * 2,
    "made contiguous": lambda x: x.t().contiguous().to(DEVICE) * 2,
    "to whole numbers": lambda x: x.clamp(-9, 9).long().to(DEVICE) * 2,
    "returned": lambda x: (x.float(), x.to(DEVICE) * 2),
    "row returned": lambda x: (x[1], x.to(DEVICE) * 2),
    "written": _written,
    "written before it is moved": _written_before_it_is_moved,
    "computed": lambda x: (x * 2).to(DEVICE) * 2,
}


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("name", [*ON_THE_HOST, *EAGER_ON_THE_HOST])
def test_what_the_host_makes_of_an_argument(name: str) -> None:
    """Views and conversions are made on the device, of the copy that it has of the argument. All else is eager's."""
    body = {**ON_THE_HOST, **EAGER_ON_THE_HOST}[name]
    f = capture(body)
    for number in range(12):
        x = torch.randn(4, 6, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(number)) * 1e3
        x[0, 1:4] = torch.tensor([math.nan, math.inf, 1e300], dtype=torch.float64)
        twin = x.clone()
        same(f(x), body(twin))
        same(x, twin)
    if name in ON_THE_HOST and ON_CUDA:
        assert counts(f)[2] >= 9


OF_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "from_numpy": lambda a: torch.from_numpy(a).to(DEVICE) * 2,
    "from_numpy, converted": lambda a: torch.from_numpy(a).float().to(DEVICE) * 2,
    "from_numpy, one more dimension": lambda a: torch.from_numpy(a).unsqueeze(0).to(DEVICE) * 2,
    "as_tensor": lambda a: torch.as_tensor(a, device=DEVICE) * 2,
    "as_tensor of a dtype": lambda a: torch.as_tensor(a, dtype=torch.float32, device=DEVICE) * 2,
    "tensor": lambda a: torch.tensor(a, device=DEVICE) * 2,
    "tensor of a dtype": lambda a: torch.tensor(a, dtype=torch.float32, device=DEVICE) * 2,
    "FloatTensor": lambda a: torch.FloatTensor(a).to(DEVICE) * 2,
    "row": lambda a: torch.from_numpy(a[1]).to(DEVICE) * 2,
}


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("name", OF_ARRAYS)
def test_arrays_that_are_moved_to_the_device(name: str, kind: str) -> None:
    body = OF_ARRAYS[name]
    if name == "FloatTensor" and kind == "float64":
        kind = "float32"  # it takes nothing else
    f = capture(body)
    for number in range(30):
        a = np.random.RandomState(number).randn(3, 4).astype(kind)
        same(f(a), body(a))
    if ON_CUDA:
        assert counts(f)[2] >= 18


@needs_cuda
@may_fall_back
def test_what_waits_between_operators_says_nothing_of_the_last_one() -> None:
    """Beside other threads operators that were seen to wait count as such: one that only came before must not."""

    @capture
    def body(x: Tensor) -> Tensor:
        y = x.detach()
        return y * torch.as_tensor(np.arange(3.0), dtype=x.dtype, device=x.device).sum()

    for i in range(3):
        x = rand(8, seed=i)
        same(body(x), x * 3)
    assert not device_syncs.is_taken_to_wait("aten::detach", "detach")
    assert not any("detach" in name for name in device_syncs._seen_waiting)
