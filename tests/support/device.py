"""The device of tests that name none (``CAPTURE_TEST_DEVICE``, or else the CPU), and what its engine can do.

``CAPTURE_TEST_ENGINE=graphs`` has the CPU engine declare what an engine of graphs does, as far as a tape can: the
counts that a GPU shows can be tried without one. So does ``CAPTURE_TEST_DEFAULT=1`` for the mode of a default device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from capture.engines.base import OwnedOutput
from capture.engines.copy_out import OutputCopies
from capture.engines.cpu.engine import CpuBackend
from capture.engines.cpu.tape import Tape
from capture.engines.cuda import kernel_params
from capture.engines.cuda.engine import CudaBackend
from capture.torch_private.autograd import TAKES_STALE_STREAMS

DEVICE = torch.device(os.environ.get("CAPTURE_TEST_DEVICE", "cpu"))
if DEVICE.type == "cuda":
    DEVICE = torch.device("cuda", torch.cuda.current_device())

REBINDS = DEVICE.type == "cpu" or kernel_params.missing() is None
"""A recording is bound to the new address of a static or implicit tensor. Without it the call is recorded again."""

HAS_DEFAULT = DEVICE.type != "cpu" or bool(os.environ.get("CAPTURE_TEST_DEFAULT"))
"""Tests run with a default device, which is a function mode."""

EXECUTES = DEVICE.type == "cpu"
"""The recording run is the call. Without it only the body's Python runs while recording: where that comes to nothing it
is undone, and the body runs once more, eagerly."""

TAKES_KEPT_NODES = DEVICE.type == "cpu" or TAKES_STALE_STREAMS
"""What is captured may run autograd's node of a leaf that was made on another stream and is kept there by an earlier
graph. Without it (before torch 2.13) the recording is refused (CG904), and the call runs eagerly."""

refuses_kept_nodes = pytest.mark.filterwarnings("ignore:CG904.*legacy stream:capture.CaptureWarning")
"""For tests whose bodies meet such nodes: a refusal for that reason is expected, any other warning fails."""

default_generator = torch.default_generator if DEVICE.type == "cpu" else torch.cuda.default_generators[DEVICE.index]


def know_nothing_of_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU engine behave as one of graphs: recordings write where they were recorded, and nobody knows where
    else."""
    _write_where_recorded(monkeypatch.setattr)


def _write_where_recorded(change: Callable[[Any, str, Any], None]) -> None:
    def make_owned(self: Tape, outputs: Sequence[OwnedOutput]) -> Callable[[], None]:
        return OutputCopies(self.arena, outputs)

    change(CpuBackend, "owns_in_place", False)
    change(Tape, "make_owned", make_owned)
    change(Tape, "avoid", lambda *_: False)


if os.environ.get("CAPTURE_TEST_ENGINE") == "graphs":
    _write_where_recorded(setattr)
    CpuBackend.lifts_numbers = CudaBackend.lifts_numbers

_ENGINE = CpuBackend if DEVICE.type == "cpu" else CudaBackend

ISLANDS = _ENGINE.runs_islands
"""Recordings are cut for functions that run eagerly in every replay. Without it bodies that call them are eager."""

OWN_MEMORY = _ENGINE.has_own_memory
"""The host reads a tensor by a copy. Memory comes from torch's allocator: 2 MiB at least."""

LIFTS = _ENGINE.lifts_numbers
"""Calls that differ in a number alone share a recording. Without it each number has one of its own."""

AGAIN = 0 if _ENGINE.owns_in_place else 1
"""Recordings that are made because the caller holds an output while the next call needs its block: a tape is told to
write elsewhere, a graph is recorded again beside it. That call is no replay; later ones copy the output."""


def rng_state() -> torch.Tensor:
    """State of the generator that draws use by default."""
    return default_generator.get_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Set the state of that generator."""
    default_generator.set_state(state)


@contextlib.contextmanager
def without_default_device() -> Iterator[None]:
    """Make tensors on the CPU in the block, without torch's function mode for default devices."""
    torch.set_default_device(None)
    try:
        yield
    finally:
        use_device()


def use_device() -> None:
    """Make tensors on the suite's device in this thread; threads do not share a default device. Where it is the CPU,
    ``CAPTURE_TEST_DEFAULT`` sets one, too: that is a function mode, which tests on the CPU would not meet otherwise."""
    if HAS_DEFAULT:
        torch.set_default_device(DEVICE)
