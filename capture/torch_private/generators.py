"""Generators: the ones that draws use by default."""

from __future__ import annotations

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
