"""The device that tests which name none run on: ``CAPTURE_TEST_DEVICE``, the CPU without it."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("CAPTURE_TEST_DEVICE", "cpu"))
if DEVICE.type == "cuda":
    DEVICE = torch.device("cuda", torch.cuda.current_device())

default_generator = torch.default_generator if DEVICE.type == "cpu" else torch.cuda.default_generators[DEVICE.index]


def rng_state() -> torch.Tensor:
    """State of the generator that draws use by default."""
    return default_generator.get_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Put it back."""
    default_generator.set_state(state)
