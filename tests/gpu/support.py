"""Helpers for the tests on a device. Public names of ``capture`` only."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, mark_step_begin, recordings
from tests.support.unseen import Notes

DEVICE = torch.device(os.environ.get("CAPTURE_TEST_DEVICE", "cuda"))
ON_CUDA = DEVICE.type == "cuda"

KEPT = int(ON_CUDA)
"""Recordings made again as the caller keeps an output: a graph writes where it was captured, and that memory is
the caller's now. The CPU engine's tape writes elsewhere from then on."""

needs_gpu = pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason="needs a GPU")
"""The mark of every file here."""
needs_cuda = pytest.mark.skipif(not (ON_CUDA and torch.cuda.is_available()), reason="needs CUDA itself")
"""For tests that call ``torch.cuda``."""
may_fall_back = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
"""For tests whose bodies may be refused with a warning."""

_ran = Notes()
ran = _ran.add
"""Called by bodies to be counted."""


def times(name: str) -> int:
    """How often bodies called ``ran(name)``."""
    return _ran.all().count(name)


def forget_runs() -> None:
    """Set all counts to zero."""
    _ran.clear()


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that follow from the seed, on the device; no draw from a default generator."""
    return host(*shape, seed=seed, dtype=dtype).to(DEVICE)


def host(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values as those of ``rand``, in ordinary memory of the host."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-100, 100, shape, generator=generator).to(dtype)
    real = torch.rand(shape, generator=generator) - 0.5
    return torch.complex(real, real.flip(0) * 3).to(dtype) if dtype.is_complex else real.to(dtype)


def pinned(*shape: int, seed: int = 0) -> Tensor:
    """Random values in pinned memory of the host."""
    values = host(*shape, seed=seed)
    return values.pin_memory() if ON_CUDA else values


def eager(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of the body itself; the call is not counted."""
    count = len(_ran.all())
    result = function.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
    _ran.keep(count)
    return result


def bits(tensor: Tensor) -> Tensor:
    """The values as bytes, in the order of the indices."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same(actual: Any, expected: Any) -> None:
    """Equal structure, metadata, device and bits."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor)
        assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert actual.device == expected.device
        assert torch.equal(bits(actual), bits(expected)), f"{actual}\n!= {expected}"
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        same(list(actual.values()), list(expected.values()))
    elif isinstance(expected, (tuple, list)):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for member, expected_member in zip(actual, expected, strict=True):
            same(member, expected_member)
    else:
        assert type(actual) is type(expected)
        assert actual == expected


def check(function: Any, arguments: Callable[[int], Sequence[Any]], calls: int = 6) -> None:
    """``calls`` calls with ``arguments(i)`` give eager's results and leave the arguments as eager does.

    ``arguments`` is called twice per call and must give equal values both times.
    """
    for i in range(calls):
        ours, theirs = arguments(i), arguments(i)
        expected = eager(function, *theirs)
        same(function(*ours), expected)
        same(list(ours), list(theirs))


def counts(function: Any) -> tuple[int, int, int, int]:
    """Observations, recordings, replays, eager calls."""
    now = recordings(function)
    return now.observations, now.recordings, now.replays, now.eager_calls


def synchronize() -> None:
    """Wait for all streams of the device."""
    if ON_CUDA:
        torch.cuda.synchronize()


def generator(seed: int) -> torch.Generator:
    """A generator of the device's own."""
    return torch.Generator(DEVICE).manual_seed(seed)


def rng_state() -> Tensor:
    """State of the device's default generator."""
    return torch.cuda.get_rng_state(DEVICE) if ON_CUDA else torch.get_rng_state()


def capturing() -> bool:
    """Whether the current stream is being captured, which is so only in a recording."""
    # in bodies ``torch.cuda.is_current_stream_capturing`` answers False
    return torch.cuda.graphs.is_current_stream_capturing()


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def allocated() -> int:
    """The bytes that live tensors take, after a collection."""
    gc.collect()
    if not ON_CUDA:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def healthy() -> None:
    """Check that draws, generator states and new recordings work. It marks a step, so only marks end steps
    afterwards."""
    torch.rand(2, device=DEVICE)
    rng_state()

    @capture
    def probe(x: Tensor) -> Tensor:
        return torch.tanh(x * 2) + torch.rand_like(x)

    torch.manual_seed(11)
    ours = []
    for i in range(4):
        mark_step_begin()
        ours.append(probe(rand(4, 4, seed=i)))
    torch.manual_seed(11)
    same(ours, [eager(probe, rand(4, 4, seed=i)) for i in range(4)])
    assert counts(probe)[1:] == (1 + KEPT, 2 - KEPT, 0)
    synchronize()
