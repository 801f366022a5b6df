"""What cannot be recorded, what raises, and what raises only while recording: the call is eager's, nothing is broken.

Each body first writes its argument and a state tensor, so that a run too many or too few shows in the values.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, mark_step_begin, reset
from tests.gpu.support import (
    ON_CUDA,
    capturing,
    counts,
    eager,
    healthy,
    host,
    may_fall_back,
    needs_cuda,
    needs_gpu,
    ran,
    rand,
    rng_state,
    same,
    times,
)
from tests.gpu.trouble import Body, Trouble, as_eager, make, only_then, raise_trouble, swallow, use

pytestmark = [needs_gpu, may_fall_back]


def printed(x: Tensor) -> Tensor:
    print(x)
    return x * 2


def with_event(x: Tensor) -> Tensor:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return x * 2


def with_timing(x: Tensor) -> Tensor:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    y = x * 2
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 0
    return y


READS: dict[str, Body] = {
    "item": lambda x: x * x.max().item(),
    "float": lambda x: x * float(x[0, 0]),
    "bool": lambda x: x * 2 if x.sum() > 0 else x * 3,
    "tolist": lambda x: x * sum(x[0].tolist()),
    "print": printed,
    "format": lambda x: x * len(f"{x[0, 0]}"),
    "numpy": lambda x: x * float(x.cpu().numpy()[0, 0]),
    "equal": lambda x: x * (2 if torch.equal(x, x.t()) else 3),
    "nonzero": lambda x: (x > 0).nonzero(),
    "boolean index": lambda x: x[x > 0] * 2,
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: torch.unique((x * 4).round()),
    "repeat_interleave": lambda x: torch.repeat_interleave(x[0], (x[1] > 0).long() + 1),
    "bincount": lambda x: torch.bincount((x.abs() * 5).long().flatten()),
    "slice": lambda x: x[: int((x > 0).sum())],
    "index by a tensor": lambda x: x[(x[0, 0] > 0).long()],
    "split": lambda x: x.flatten().split([int(x[0, 0].abs()) + 1, 15 - int(x[0, 0].abs())])[0],
    "cpu": lambda x: x + x.cpu().sum().to(x.device),
    "cpu result": lambda x: x.cpu(),
    "cpu in the middle": lambda x: (x.cpu() + 1).to(x.device) * 2,
    "tensor from a list": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "tensor from a number": lambda x: x + torch.tensor(2.5, device=x.device),
    "tensor from data": lambda x: x + torch.tensor(x[0].tolist(), device=x.device),
    "as_tensor": lambda x: x + torch.as_tensor([[1.0]], device=x.device),
    "copied from the host": lambda x: x + torch.arange(4.0).to(x.device, non_blocking=True),
    "mask assignment": lambda x: x.clone().masked_fill_(x > 0, 2.0).index_put_((x > 0.2,), x.new_tensor(9.0)),
    "pinned and copied": lambda x: x + torch.ones(4, pin_memory=ON_CUDA).to(x.device, non_blocking=True),
}


@pytest.mark.parametrize("name", READS)
def test_reads_of_values(name: str) -> None:
    """A body that needs values on the host, or brings values from it."""
    as_eager(READS[name], calls=4)


@pytest.mark.parametrize("name", ["item", "tolist"])
def test_refused_bodies_run_once_a_call(name: str) -> None:
    """A body refused after its first call has its Python side effects once per call."""

    @capture
    def f(x: Tensor) -> Any:
        ran("f")
        return READS[name](x)

    for i in range(5):
        x = rand(4, 4, seed=i)
        same(f(x), eager(f, x))
        assert times("f") == i + 1
    assert counts(f)[1:3] == (0, 0)


@pytest.mark.parametrize("name", ["bool", "nonzero", "boolean index"])
def test_bodies_whose_reads_are_followed_run_once_more_at_most(name: str) -> None:
    """Such bodies are recorded after two watched runs that read the same values. A capture executes nothing: if it
    meets another value the body runs once more in that call, and effects that the library cannot see (here in memory of
    C code) happen twice. It does not try that again."""

    @capture
    def f(x: Tensor) -> Any:
        ran("f")
        return READS[name](x)

    for i in range(12):
        x, before = rand(4, 4, seed=i), times("f")
        same(f(x), eager(f, x))
        assert times("f") - before <= 2
    assert times("f") <= 12 + 4


WAITS: dict[str, Body] = {
    "torch.cuda.synchronize": use(lambda: torch.cuda.synchronize()),
    "current_stream().synchronize": use(lambda: torch.cuda.current_stream().synchronize()),
    "default_stream().synchronize": use(lambda: torch.cuda.default_stream().synchronize()),
    "stream.query": use(lambda: torch.cuda.current_stream().query()),
    "event.synchronize": with_event,
    "event.query": use(lambda: torch.cuda.Event().query()),
    "event.elapsed_time": with_timing,
    "empty_cache": use(lambda: torch.cuda.empty_cache()),
    "memory_allocated": use(lambda: torch.cuda.memory_allocated()),
}


@needs_cuda
@pytest.mark.parametrize("name", WAITS)
def test_waits_for_the_device(name: str) -> None:
    """A body that waits for the device or asks it."""
    as_eager(WAITS[name], calls=4)


def interrupted(x: Tensor) -> None:
    raise KeyboardInterrupt


ONLY_WHILE_CAPTURING: dict[str, Callable[[Tensor], Any]] = {
    "exception": raise_trouble,
    "item": lambda x: x.sum().item(),
    "item swallowed": lambda x: swallow(x.sum().item),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "synchronize swallowed": lambda x: swallow(torch.cuda.synchronize),
    "stream synchronize": lambda x: torch.cuda.current_stream().synchronize(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "out of memory": lambda x: torch.empty(1 << 45, device=x.device),
    "out of memory swallowed": lambda x: swallow(lambda: torch.empty(1 << 45, device=x.device)),
    "new seed": lambda x: torch.manual_seed(5),
    "state read": lambda x: rng_state(),
    "collection": lambda x: gc.collect(),
    "empty_cache": lambda x: torch.cuda.empty_cache(),
    "more operators": lambda x: x + 1 + 2,
    "a write": lambda x: x.add_(100),
    "more draws": lambda x: torch.rand_like(x),
    "svd": lambda x: torch.linalg.svd(x),
}


@needs_cuda
@pytest.mark.parametrize("name", ONLY_WHILE_CAPTURING)
def test_only_while_capturing(name: str) -> None:
    """Trouble that appears only while recording: the call gives eager's result, and writes happen once.

    A body that computes something else while captured ("a write") is refused, or its branch is the one of eager code
    under a capture; values are those of a call outside of any capture.
    """
    as_eager(only_then(ONLY_WHILE_CAPTURING[name]), calls=5)


@needs_cuda
@pytest.mark.parametrize("name", ["exception", "item", "synchronize", "out of memory"])
def test_failed_recording_among_recordings(name: str) -> None:
    """A recording fails in the middle of a step: outputs held from before, and the recordings around it, stay right."""
    trouble = only_then(ONLY_WHILE_CAPTURING[name])

    @capture
    def f(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    @capture
    def bad(x: Tensor) -> Tensor:
        found: Tensor = trouble(x + 1)
        return found

    @capture
    def g(x: Tensor) -> Tensor:
        return x - 3

    held = []
    for i in range(8):
        mark_step_begin()
        x = rand(4, 4, seed=i)
        y = f(x)
        z = bad(y)
        w = g(z)
        held.append((x, y, z, w))
        for x, y, z, w in held:
            same((y, z, w), (torch.tanh(x) * 2, (torch.tanh(x) * 2 + 1) * 3, (torch.tanh(x) * 2 + 1) * 3 - 3))
    healthy()


@needs_cuda
@pytest.mark.parametrize("name", ["exception", "item", "synchronize", "out of memory"])
def test_failed_recording_of_a_body_that_calls_a_captured_function(name: str) -> None:
    """After the failure a call records the inner function in the same pool, in which nothing of the failure may be
    left."""
    trouble = only_then(ONLY_WHILE_CAPTURING[name])

    @capture
    def f(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    @capture
    def inner(x: Tensor) -> Tensor:
        return x * 3 + 1

    @capture
    def outer(x: Tensor) -> Tensor:
        y = x * 2
        found: Tensor = trouble(y.exp())
        return found + inner(y)

    same(inner(rand(4, 4)), rand(4, 4) * 3 + 1)
    held = []
    for i in range(8):
        mark_step_begin()
        x = rand(4, 4, seed=i)
        y = f(x)
        z = outer(y)
        held.append((x, y, z))
        for x, y, z in held:
            same(y, torch.tanh(x) * 2)
            same(z, (y * 2).exp() * 3 + ((y * 2) * 3 + 1))
    assert counts(inner)[1] > 0
    healthy()


_raising: list[int] = []


def gate() -> None:
    """Raises during the calls a test names. What decides is hidden from the key."""
    if _raising:
        raise Trouble("on purpose")


@pytest.mark.parametrize("calls", [(0,), (1,), (0, 1), (1, 2), (0, 1, 2), (0, 1, 2, 3, 4, 5)])
def test_exceptions_of_the_body(calls: tuple[int, ...]) -> None:
    """The user's exception at the first, second, third call comes out, with the writes before it done once."""

    def trouble(x: Tensor) -> Tensor:
        y = x * 2
        gate()
        return y

    def before(i: int) -> None:
        _raising[:] = [1] if i in calls else []

    try:
        as_eager(trouble, calls=7, before=before)
    finally:
        _raising.clear()


@needs_cuda
def test_interrupt_while_capturing() -> None:
    """Ctrl-C while recording comes out; the device and the function work afterwards."""
    body, state = make(only_then(interrupted))
    twin, theirs = make(only_then(interrupted))
    f = capture(body)
    for i in range(6):
        x = rand(4, 4, seed=i)
        torch.manual_seed(i)
        try:
            result: Any = f(x)
        except KeyboardInterrupt:
            result = None
        assert not capturing()
        if result is not None:
            torch.manual_seed(i)
            twin_input = rand(4, 4, seed=i)
            same(result, twin(twin_input))
            same((x, state), (twin_input, theirs))
        state.copy_(theirs)
    healthy()


def forget_everything(x: Tensor) -> Tensor:
    y = x + 1
    reset()
    return y * 2


LIMITS: dict[str, Body] = {
    "out of memory": lambda x: torch.empty(1 << 45, device=x.device),
    "device and host mixed": lambda x: x + host(4),
    "wrong shapes": lambda x: x @ torch.ones(3, 3, device=x.device),
    "index": lambda x: x[:, 9],
    "python": lambda x: int("not a number"),
    "singular": lambda x: torch.linalg.inv(torch.zeros_like(x)),
    "reset in the body": forget_everything,
}


@pytest.mark.parametrize("name", [name for name in LIMITS if ON_CUDA or "mixed" not in name])
def test_bodies_that_raise_at_every_call(name: str) -> None:
    """The same exception as eager's at every call, the writes before it done once."""
    as_eager(LIMITS[name], calls=4)
