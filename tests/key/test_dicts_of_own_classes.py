"""Instances of subclasses of ``dict``: guards look at their attributes, too, and run no code of their classes."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE


class Registry(dict[Any, Any]):
    """A dict that looks values up by their key's ``__name__``, as libraries' registries of classes do."""

    scale: float

    @override
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key.__name__)

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key is not None else default


REGISTRY = Registry(int=1)
REGISTRY.scale = 2.0


def test_attributes_beside_items_tell_calls_apart() -> None:
    run = capture(lambda x: x * REGISTRY.scale)
    x = torch.ones(3, device=DEVICE)
    try:
        for scale in [2.0] * 4 + [3.0, 2.0] * 6:
            REGISTRY.scale = scale
            assert torch.equal(run(x), x * scale)
    finally:
        REGISTRY.scale = 2.0
    assert recordings(run).replays >= 6
