"""A cache of a class, which all its modules share and fill."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture


class Shared(nn.Module):
    """Keeps a tensor for each size."""

    tables: ClassVar[dict[int, Tensor]] = {}

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the table of this size, which the first module that needs it makes."""
        size = x.shape[-1]
        if size not in Shared.tables:
            Shared.tables[size] = torch.linspace(0, 1, size)
        return x * Shared.tables[size]


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_calls_end_where_a_cache_grows_and_is_emptied_between_them() -> None:
    """Guards that are made from the present state may fail at once; making them again and again must end."""
    first, second = capture(Shared()), capture(Shared())
    with torch.no_grad():
        for call in range(14):
            if call % 9 == 8:
                Shared.tables.clear()
            if call % 7 == 6:
                Shared.tables[3] = torch.ones(3)
            for captured, size in ((first, 3), (second, 3 + call % 2)):
                x = torch.full((size,), float(call))
                table = Shared.tables.get(size)
                expected = x * (torch.linspace(0, 1, size) if table is None else table)
                assert torch.equal(captured(x), expected), call
