"""The device that tests which name none run on: ``CAPTURE_TEST_DEVICE``, the CPU without it; what its engine can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch

from capture.engines.base import OwnedOutput
from capture.engines.copy_out import OutputCopies
from capture.engines.cpu.engine import CpuBackend
from capture.engines.cpu.tape import Tape
from capture.engines.cuda import kernel_params

DEVICE = torch.device(os.environ.get("CAPTURE_TEST_DEVICE", "cpu"))
if DEVICE.type == "cuda":
    DEVICE = torch.device("cuda", torch.cuda.current_device())

REBINDS = DEVICE.type == "cpu" or kernel_params.missing() is None
"""A recording is bound to the new address of a static or implicit tensor. Without it the call is recorded again."""

EXECUTES = DEVICE.type == "cpu"
"""The recording run is the call. Without it only the body's Python runs while recording: where that comes to nothing it
is undone, and the body runs once more, eagerly."""

default_generator = torch.default_generator if DEVICE.type == "cpu" else torch.cuda.default_generators[DEVICE.index]


def know_nothing_of_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU engine as one of graphs, which write where they were recorded, and nobody knows where else."""

    def own(self: Tape, outputs: Sequence[OwnedOutput]) -> Callable[[], None]:
        return OutputCopies(self.arena, outputs)

    monkeypatch.setattr(CpuBackend, "owns_in_place", False)
    monkeypatch.setattr(Tape, "own", own)
    monkeypatch.setattr(Tape, "avoid", lambda *_: False)


def rng_state() -> torch.Tensor:
    """State of the generator that draws use by default."""
    return default_generator.get_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Put it back."""
    default_generator.set_state(state)


def use_device() -> None:
    """Make tensors on the suite's device in this thread; threads do not share a default device. Where it is the
    CPU, ``CAPTURE_TEST_DEFAULT`` sets one, too: that is a mode of torch functions, which no test sees else."""
    if DEVICE.type != "cpu" or os.environ.get("CAPTURE_TEST_DEFAULT"):
        torch.set_default_device(DEVICE)
