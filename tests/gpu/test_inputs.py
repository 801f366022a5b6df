"""Copied inputs: any layout, dtype and place, new values and addresses at every call, bit for bit eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture
from tests.gpu.support import (
    DEVICE,
    KEPT,
    check,
    counts,
    eager,
    may_fall_back,
    needs_cuda,
    needs_gpu,
    rand,
    same,
    storage_of,
    synchronize,
)

pytestmark = needs_gpu

DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64,
)  # fmt: skip

LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "expanded": lambda i: rand(16, seed=i).expand(4, 16),
    "expanded twice": lambda i: rand(1, 16, 1, seed=i).expand(4, 16, 3),
    "expanded scalar": lambda i: rand(seed=i).expand(5, 7),
    "overlapping": lambda i: rand(16, seed=i).as_strided((4, 6), (3, 1)),
    "overlapping with an offset": lambda i: rand(32, seed=i).as_strided((4, 6), (2, 2), 5),
    "misaligned": lambda i: rand(33, seed=i)[1:],
    "misaligned anew": lambda i: rand(64, seed=i)[i % 3 :][:32],
    "misaligned half": lambda i: rand(64, seed=i, dtype=torch.bfloat16)[1 + i % 3 :][:32],
    "misaligned byte": lambda i: rand(64, seed=i, dtype=torch.int8)[1 + i % 3 :][:33],
    "channels last": lambda i: rand(2, 3, 4, 5, seed=i).to(memory_format=torch.channels_last),
    "turned": lambda i: rand(6, 8, seed=i).t(),
    "strided": lambda i: rand(12, 16, seed=i)[::2, 1::3].t(),
    "permuted": lambda i: rand(3, 4, 5, seed=i).permute(2, 0, 1)[1:],
    "one element": lambda i: rand(1, 1, seed=i),
    "no dimensions": lambda i: rand(seed=i),
    "conjugated": lambda i: rand(3, 4, seed=i, dtype=torch.complex64).conj(),
    "large": lambda i: rand(512, 1024, seed=i),
}

SEVERAL_KEYS = ("misaligned anew", "misaligned half", "misaligned byte", "conjugated")
"""The offset into the storage, and the conjugate bit, may be part of the key, or a reason to run eagerly."""


@may_fall_back
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Strides, offsets and overlaps of the argument are the body's, values are this call's."""

    @capture
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + x, x.sum(0) if x.dim() else x * 3, x.reshape(-1) * 2

    check(f, lambda i: [LAYOUTS[layout](i)], calls=12)
    if layout not in SEVERAL_KEYS:
        assert counts(f) == (1, 1, 10, 0)


@pytest.mark.parametrize("layout", ["turned", "misaligned anew", "channels last", "strided"])
def test_layouts_of_written_inputs(layout: str) -> None:
    """A written argument ends up as in eager, and what surrounds it in its storage stays."""

    @capture
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2).add_(y)
        return x - 1

    for i in range(6):
        ours, theirs = LAYOUTS[layout](i), LAYOUTS[layout](i)
        y = rand(seed=i)
        expected = eager(f, theirs, y)
        same(f(ours, y), expected)
        same(ours, theirs)
        whole = [torch.empty(0, device=DEVICE).set_(tensor.untyped_storage()) for tensor in (ours, theirs)]
        same(whole[0], whole[1])
    if layout not in SEVERAL_KEYS:
        assert counts(f) == (1, 1, 4, 0)


def test_empty_inputs() -> None:
    """Arguments without elements, alone and beside others, of several shapes."""

    @capture
    def f(x: Tensor, e: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return torch.cat([x, e]), e * 2, n.sum(0), n.sum(1)

    check(f, lambda i: [rand(3, seed=i), rand(0), rand(0, 5)])
    assert counts(f) == (1, 1, 4, 0)

    @capture
    def g(e: Tensor) -> Tensor:
        return e + 1

    check(g, lambda i: [rand(0)])


def test_many_dtypes_in_one_call() -> None:
    """Eight dtypes, contiguous and not, aligned and not, beside each other in one call."""

    @capture
    def f(xs: list[Tensor], ys: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        mixed = torch.where(xs[6], xs[2], -xs[2]) + xs[0] * xs[3]
        return [x ^ True if x.dtype is torch.bool else x + x for x in xs], [y[1:].clone() for y in ys.values()], mixed

    def arguments(i: int) -> list[Any]:
        return [
            [rand(17, seed=i + 10 * n, dtype=dtype) for n, dtype in enumerate(DTYPES)],
            {str(dtype): rand(12, 9, seed=i + n, dtype=dtype).t()[1:, ::2] for n, dtype in enumerate(DTYPES)},
        ]

    for i in range(6):
        got, expected = f(*arguments(i)), eager(f, *arguments(i))
        same(got, expected)
    assert counts(f) == (1, 1 + KEPT, 4 - KEPT, 0)


def test_bits_of_special_values_survive() -> None:
    """NaNs with a payload, infinities, negative zeros and denormals are copied as they are."""

    @capture
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), torch.where(x == x, -x, x)

    patterns = [0x7FC00000, 0x7F800001, 0x7FABCDEF, -0x00012345, -0x80000000, 1, 0x7F800000, 0x00012345]
    check(f, lambda i: [(torch.tensor(patterns, dtype=torch.int32).roll(i)).view(torch.float32).to(DEVICE)])


@needs_cuda
def test_inputs_made_on_another_stream() -> None:
    """Arguments that another stream is still computing, the current stream waiting for it."""

    @capture
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    side = torch.cuda.Stream()
    weight = rand(1024, 1024) / 32
    for i in range(6):
        start = rand(1024, 1024, seed=i)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x = start
            for _ in range(20):
                x = x @ weight
        torch.cuda.current_stream().wait_stream(side)
        got = f(x, start)
        x.record_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        same(got, x * 2 + start)
    assert counts(f) == (1, 1 + KEPT, 4 - KEPT, 0)


@pytest.mark.parametrize("how", ["overwritten", "freed", "resized"])
def test_input_given_up_right_after_the_call(how: str) -> None:
    """The caller overwrites or frees its argument while the device may still be computing."""
    weight = rand(512, 512) / 16

    @capture
    def f(x: Tensor) -> Tensor:
        y = x
        for _ in range(6):
            y = y @ weight
        return y + x

    for i in range(6):
        x = rand(512, 512, seed=i)
        expected = eager(f, x)
        synchronize()
        y = f(x)
        if how == "overwritten":
            x.fill_(float("nan"))
        elif how == "resized":
            x.untyped_storage().resize_(0)
        del x
        noise = [torch.full((512, 512), float("nan"), device=DEVICE) for _ in range(3)]
        same(y, expected)
        del noise
    assert counts(f) == (1, 1 + KEPT, 4 - KEPT, 0)


@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("pattern", ["same", "inside", "overlapping", "disjoint", "separate"])
def test_aliased_arguments(pattern: str, written: bool) -> None:
    """Arguments on one memory: a write through one is seen through the other, exactly as in eager."""

    @capture
    def f(x: Tensor, y: Tensor) -> Tensor:
        if written:
            x.add_(1)
            y.mul_(2)
        return x * 3 - y

    def arguments(i: int) -> list[Tensor]:
        base = rand(32, seed=i)
        return {
            "same": lambda: [base, base],
            "inside": lambda: [base[4:20], base.view(2, 16)[1]],
            "overlapping": lambda: [base[:16], base[8:24]],
            "disjoint": lambda: [base[:16], base[16:]],
            "separate": lambda: [base[:16], rand(16, seed=i + 90)],
        }[pattern]()

    check(f, arguments, calls=7)
    assert counts(f)[3] == 0


def test_alias_patterns_that_change() -> None:
    """The pattern of sharing differs from call to call: each has its own recording, none is mistaken for another."""

    @capture
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        y.mul_(3)
        return x + y

    for i in range(12):
        ours, theirs = rand(24, seed=i), rand(24, seed=i)
        begin = (0, 4, 12)[i % 3]
        expected = eager(f, theirs[:12], theirs[begin : begin + 12])
        same(f(ours[:12], ours[begin : begin + 12]), expected)
        same(ours, theirs)


def test_written_inputs_are_copied_back() -> None:
    """A written argument: the caller's own tensor has eager's values and is the one that comes back."""

    @capture
    def f(x: Tensor, y: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total.add_(x.sum())
        x[1:].mul_(y[1:])
        return x, x.t(), total + y.sum()

    for i in range(6):
        ours = [rand(4, 4, seed=i), rand(4, 4, seed=i + 9), rand(seed=i + 20)]
        theirs = [tensor.clone() for tensor in ours]
        whole, turned, value = f(*ours)
        assert whole is ours[0]
        assert storage_of(turned) == storage_of(ours[0])
        same((whole, turned, value), eager(f, *theirs))
        same(ours, theirs)
        ours[0].fill_(3.0)
        same(turned, torch.full((4, 4), 3.0, device=DEVICE).t())
    assert counts(f) == (1, 1 + KEPT, 4 - KEPT, 0)


def test_one_tensor_written_over_and_over() -> None:
    """A loop that passes the same state tensor and lets the body update it."""

    @capture
    def step(state: Tensor, x: Tensor) -> Tensor:
        state.mul_(0.5).add_(x)
        return state * 2

    ours, theirs = rand(64), rand(64)
    for i in range(50):
        x = rand(64, seed=i)
        same(step(ours, x), eager(step, theirs, x))
        same(ours, theirs)
    assert counts(step) == (1, 1, 48, 0)
