"""Inference tensors are arguments under inference mode and outside of it, where eager gives other results or raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from capture import capture, config
from tests.support.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("grad", [True, False])
def test_inference_mode_on_and_off(grad: bool, order: tuple[int, ...]) -> None:
    def run(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(DEVICE)
        f, out = wrap(net), list[Any]()
        for n in range(30):
            kind = order[n % 3]
            x = torch.randn(2, 4, device=DEVICE)
            with torch.inference_mode(kind == 1), torch.set_grad_enabled(kind != 2 and grad):
                y = f(x)
                out.append((f(y).requires_grad, y.is_inference()))
            with torch.set_grad_enabled(grad):
                try:
                    z = f(y)
                    out.append((z.requires_grad, z.is_inference(), z.detach().clone().tolist()))
                except RuntimeError as error:
                    out.append(str(error)[:60])
        return out

    with config.patch(cache=False, drop_slow=False):
        assert run(capture) == run(lambda target: target)
