"""Rows of the behaviour table that need a device, 2d: inputs.

Rows are numbered as in ``docs/rows.md``. Of these rows, those stand elsewhere:

======================================  =============================================================================
row                                     where
======================================  =============================================================================
67, 81 to 83, 87 (arguments)            ``test_inputs.py``, ``test_host_inputs.py``; ``../runtime/test_rows_inputs.py``
68                                      the caller's own frame holds its arguments: nothing to test in eager code
74, 75, 89 (no copy)                    ``tests/runtime/test_rows_inputs.py`` on CUDA as it is (89: CPU engine only)
======================================  =============================================================================
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from tests.gpu.support import (
    DEVICE,
    counts,
    eager,
    may_fall_back,
    needs_gpu,
    rand,
    same,
    synchronize,
)

pytestmark = needs_gpu


class Linear(nn.Module):
    """One weight, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(64, 64, seed=seed))
        self.scale: Tensor
        self.register_buffer("scale", rand(64, seed=seed + 1))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) * self.scale


def noise() -> list[Tensor]:
    """Allocate memory of the common sizes and fill it with NaN, so that freed memory reads as NaN."""
    gc.collect()
    found = [torch.full(shape, float("nan"), device=DEVICE) for shape in ((64, 64), (64,)) for _ in range(12)]
    synchronize()
    return found


REPLACEMENTS: dict[str, Callable[[nn.Module, int], None]] = {
    "setattr": lambda net, i: setattr(net, "weight", nn.Parameter(rand(64, 64, seed=i))),
    "data": lambda net, i: setattr(net.weight, "data", rand(64, 64, seed=i)),
    "set_": lambda net, i: void(
        net.get_parameter("weight").set_(rand(64, 64, seed=i).untyped_storage(), 0, (64, 64), (64, 1))
    ),
    "load assigned": lambda net, i: void(
        net.load_state_dict({"weight": rand(64, 64, seed=i), "scale": rand(64, seed=i + 5)}, assign=True)
    ),
    "load copied": lambda net, i: void(
        net.load_state_dict({"weight": rand(64, 64, seed=i), "scale": rand(64, seed=i + 5)})
    ),
    "there and back": lambda net, i: void(net.to("cpu").to(DEVICE)),
    "buffer": lambda net, i: setattr(net, "scale", rand(64, seed=i)),
    "registered buffer": lambda net, i: net.register_buffer("scale", rand(64, seed=i)),
    "in place": lambda net, i: void(net.get_parameter("weight").mul_(-1.5)),
    "storage resized": lambda net, i: resized(net.get_parameter("weight"), i),
    "misaligned": lambda net, i: setattr(net, "weight", nn.Parameter(rand(4097, seed=i)[1:].view(64, 64))),
    "strided": lambda net, i: setattr(net, "weight", nn.Parameter(rand(64, 128, seed=i)[:, ::2])),
    "doubles": lambda net, i: void(net.double() if i % 2 else net.float()),
}


def void(value: object) -> None:
    """Drop a result."""


def resized(weight: Tensor, seed: int) -> None:
    """Free the storage and make it anew at another address, as sharded training does."""
    size = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    kept = torch.full((64, 64), 7.0, device=DEVICE)
    weight.untyped_storage().resize_(size)
    weight.copy_(rand(64, 64, seed=seed))
    del kept


@may_fall_back
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_row_070_073_replaced_tensors_of_a_module(name: str) -> None:
    """A weight or buffer replaced in any way, the old memory spoilt: the next call reads the new one."""
    net, twin, last, last_twin = capture(Linear()), Linear(), capture(Linear(3)), Linear(3)
    taken: list[Tensor] = []
    for i in range(12):
        if i in (3, 4, 8):
            for module in (net, twin):
                REPLACEMENTS[name](module, i)
            taken = noise()
        if i == 6:
            for module in (last, last_twin):
                REPLACEMENTS[name](module, i)
            taken = noise()
        x = rand(8, 64, seed=i)
        y, z = net(x.to(net.weight.dtype)), twin(x.to(twin.weight.dtype))
        same(y, z)
        same(last(y.to(last.weight.dtype)), last_twin(z.to(last_twin.weight.dtype)))
        del y, z
    del taken


def test_row_070_old_address_returns() -> None:
    """Two static tensors in turns, both alive, then a third in the memory of the first."""

    @capture(static=["p"])
    def f(x: Tensor, p: Tensor) -> Tensor:
        return x * p + p.sum()

    first, second = rand(64, seed=1), rand(64, seed=2)
    for i in range(12):
        p = (first, second)[i // 2 % 2]
        if i == 9:
            del first
            first = rand(64, seed=3)
        x = rand(64, seed=i)
        same(f(x, p), eager(f, x, p))
    assert recordings(f).recordings <= 5


def test_row_078_values_of_statics_are_read_at_every_replay() -> None:
    """In-place changes of weights, statics and closure tensors on the caller's stream show in the next replay."""
    inside = rand(64, seed=3)
    net = Linear()

    @capture(static=["p"])
    def f(x: Tensor, p: Tensor) -> Tensor:
        y: Tensor = net(x)
        return y * p + inside

    p = rand(64, seed=1)
    for i in range(8):
        x = rand(8, 64, seed=i)
        same(f(x, p), eager(f, x, p))
        p.add_(1)
        inside.mul_(-1.5)
        net.weight.add_(0.01)
        net.scale.neg_()
    assert counts(f) == (1, 1, 6, 0)


@may_fall_back
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_row_080_misaligned_statics(dtype: torch.dtype) -> None:
    """A static at an address that is no multiple of 16, then at one that is, then at another that is not."""

    @capture(static=["p"])
    def f(x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return x * p, p + p

    base = rand(1024, dtype=dtype)
    views = [
        base[1:257],
        base[256:512],
        base[3:259],
        rand(257, seed=5, dtype=dtype)[1:],
        rand(256, seed=6, dtype=dtype),
    ]
    for i in range(20):
        p = views[i // 4]
        x = rand(256, seed=i, dtype=dtype)
        same(f(x, p), eager(f, x, p))
        p.mul_(-1)


def test_row_080_misaligned_static_is_not_copied() -> None:
    """In steady replay an in-place change of a misaligned static is seen, and writes of the body reach it."""

    @capture(static=["p"])
    def f(x: Tensor, p: Tensor) -> Tensor:
        p.add_(x)
        return p * 2

    ours, theirs = rand(65)[1:], rand(65)[1:]
    for i in range(6):
        x = rand(64, seed=i)
        same(f(x, ours), eager(f, x, theirs))
        for p in (ours, theirs):
            p.mul_(-0.5)
        same(ours, theirs)
    assert counts(f)[3] == 0


@may_fall_back
def test_row_085_meta_tensors() -> None:
    """A tensor without data beside one on the device: its shape is what the body sees."""

    @capture
    def f(x: Tensor, m: Tensor) -> Tensor:
        return x * m.shape[0] + m.dim()

    for i in range(8):
        x, m = rand(8, seed=i), torch.empty(3 + i // 4, 4, device="meta")
        same(f(x, m), eager(f, x, m))


@may_fall_back
def test_row_088_scalar_of_the_cpu_written_and_returned() -> None:
    """A CPU scalar that the body writes or returns: the caller's own tensor changes, and comes back."""

    @capture
    def f(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        y = x * s
        s.add_(1.25)
        return y, s

    @capture
    def g(x: Tensor, s: Tensor) -> Tensor:
        s.copy_(x.sum())
        return x + 1

    for i in range(6):
        x = rand(8, seed=i)
        ours, theirs = torch.tensor(i * 0.7), torch.tensor(i * 0.7)
        y, back = f(x, ours)
        assert back is ours
        same((y, back), eager(f, x, theirs))
        same(g(x, ours), eager(g, x, theirs))
        same(ours, theirs)


def test_row_089_managed_input_is_read_where_it_lies() -> None:
    """The output of one function goes into the next and is changed in between: the next one sees the change."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2

    @capture
    def g(y: Tensor) -> Tensor:
        return y.sum(0) + y

    for i in range(6):
        mark_step_begin()
        x = rand(64, 64, seed=i)
        y = f(x)
        y.add_(1)
        z = g(y)
        y[2:].fill_(5.0)
        same(z, (x * 2 + 1).sum(0) + (x * 2 + 1))
        same(g(y)[0], (y.sum(0) + y)[0])


@may_fall_back
def test_row_090_managed_input_from_changing_outputs() -> None:
    """The consumer gets another output of the producer at each call, past its limit: right values throughout."""

    @capture
    def four(x: Tensor) -> tuple[Tensor, ...]:
        return x + 1, x + 2, x + 3, x + 4

    @capture(max_recordings=2)
    def use(y: Tensor, w: Tensor) -> Tensor:
        return y * w

    w = rand(16, seed=77)
    for i in (0, 0, 0, 1, 2, 3, 1, 2, 0, 3, 3, 2, 1, 0):
        mark_step_begin()
        x = rand(16, seed=i)
        outputs = four(x)
        same(use(outputs[i], w), (x + (1 + i)) * w)
        same(outputs[(i + 1) % 4], x + (1 + (i + 1) % 4))


def test_row_090_slices_of_an_output_as_inputs() -> None:
    """Views of an output go into the next function, at other offsets in other steps."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2

    @capture
    def g(y: Tensor) -> Tensor:
        return y.cumsum(0)

    for i in range(9):
        mark_step_begin()
        x = rand(32, seed=i)
        begin = (0, 8, 3)[i // 2 % 3]
        y = f(x)
        same(g(y[begin : begin + 16]), (x * 2)[begin : begin + 16].cumsum(0))
        same(y, x * 2)
