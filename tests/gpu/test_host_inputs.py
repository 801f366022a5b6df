"""Inputs in the memory of the host: 0-dim tensors in arithmetic on the device, tensors moved by the body."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, mark_step_begin
from tests.gpu.support import (
    DEVICE,
    check,
    counts,
    eager,
    host,
    may_fall_back,
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
    """A 0-dim CPU tensor mixed into arithmetic on the device: the value and the rounding of this call."""
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
