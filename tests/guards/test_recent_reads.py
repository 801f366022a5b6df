"""What a function read before is found again where what was put back is there again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture
from capture.guards import read_guards
from capture.runtime import entry


class Adapted(nn.Module):
    """A layer with an adapter that may be swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), 2.0
        self.adapter: nn.Module = nn.Linear(3, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.adapter(x) * self.scale
        return y


def test_adapters_that_come_back_are_not_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = list[None]()

    def counted(*args: object) -> object:
        walks.append(None)
        return read_guards.read_by(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(entry, "read_by", counted)
    module = Adapted()
    mine, adapters = capture(module, max_recordings=20), [module.adapter, nn.Linear(3, 3), nn.Linear(3, 3)]
    with torch.no_grad():
        for size in range(1, 13):
            module.adapter = adapters[size % 3]
            x = torch.randn(size, 3)
            for _ in range(4):
                assert torch.equal(mine(x), Adapted.forward(module, x))
        assert len(walks) == len(adapters)
        module.scale = 3.0  # no read is what it was
        for size in range(1, 4):
            module.adapter = adapters[size % 3]
            x = torch.randn(size, 3)
            for _ in range(4):
                assert torch.equal(mine(x), Adapted.forward(module, x))
    assert len(walks) > len(adapters)
