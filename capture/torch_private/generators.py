"""Where draws come from when code names no generator: torch's default generators, Python's ``random``, NumPy's.

A run that only captured must leave those of the host as they were, as it leaves torch's: what the body draws with them
decides what it does (layers that are left out, augmentation).
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that draws on a device use by default."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index: int | None = device.index  # None for "cuda" alone, whatever the stub says
    index = torch.cuda.current_device() if index is None else index
    return torch.cuda.default_generators[index]


def default_generators() -> list[torch.Generator]:
    """Default generators of all devices in use."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *devices]


def host_random_state() -> tuple[Any, Any]:
    """Of ``random``, and of ``numpy.random`` where that is in use."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), numpy.get_state() if numpy is not None else None


def restore_host_random(state: tuple[Any, Any]) -> None:
    """``random`` and ``numpy.random`` draw from there on."""
    own, numpys = state
    if random.getstate() != own:
        random.setstate(own)
    if numpys is not None:
        sys.modules["numpy.random"].set_state(numpys)
