"""The device that tests which name none run on: ``CAPTURE_TEST_DEVICE``, the CPU without it; what its engine can do.

``CAPTURE_TEST_NO_SWAP=1`` tests as on a torch that cannot exchange the memory of two storages (before 2.13).
"""

from __future__ import annotations

import os

import attrs
import torch

from capture.engines.cuda import kernel_params
from capture.torch_private import capabilities

DEVICE = torch.device(os.environ.get("CAPTURE_TEST_DEVICE", "cpu"))
if DEVICE.type == "cuda":
    DEVICE = torch.device("cuda", torch.cuda.current_device())

if os.environ.get("CAPTURE_TEST_NO_SWAP"):
    capabilities.CAPABILITIES = attrs.evolve(capabilities.CAPABILITIES, swap_data_ptr=False)

MOVES_HELD = capabilities.CAPABILITIES.swap_data_ptr
"""A held output leaves the pool with all its views. Without it the path goes on under one that has views or several
holders: more is recorded, less replayed, never another value."""

REBINDS = DEVICE.type == "cpu" or kernel_params.missing() is None
"""A recording is bound to the new address of a static or implicit tensor. Without it the call is recorded again."""

EXECUTES = DEVICE.type == "cpu"
"""The recording run is the call. Without it only the body's Python runs while recording: where that comes to nothing it
is undone, and the body runs once more, eagerly."""

default_generator = torch.default_generator if DEVICE.type == "cpu" else torch.cuda.default_generators[DEVICE.index]


def rng_state() -> torch.Tensor:
    """State of the generator that draws use by default."""
    return default_generator.get_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Put it back."""
    default_generator.set_state(state)


def use_device() -> None:
    """Make tensors on the suite's device in this thread; threads do not share a default device."""
    if DEVICE.type != "cpu":
        torch.set_default_device(DEVICE)
