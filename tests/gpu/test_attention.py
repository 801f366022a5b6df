"""Attention with dropout is trained as a region: each backward pass uses the draws of its own forward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from capture import capture, config, recordings
from capture.api.decorator import captured_states
from capture.engines.cuda.replay import CudaRecording
from tests.gpu.support import needs_cuda

pytestmark = needs_cuda

KERNELS = {
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
    "math": (SDPBackend.MATH, torch.float32),
}


class Attention(nn.Module):
    """One layer, with dropout inside the kernel."""

    def __init__(self, kernel: SDPBackend) -> None:
        super().__init__()
        self.kernel, self.heads, self.out = kernel, nn.Linear(128, 3 * 128), nn.Linear(128, 128)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, 64)).transpose(1, 2) for one in self.heads(x).chunk(3, -1))
        with sdpa_kernel(self.kernel):
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True)
        found: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return found


@pytest.mark.parametrize("name", KERNELS)
def test_attention_is_verified(name: str) -> None:
    """Captured attention kernels give their seeds on the device, eager ones on the host: verifying must not call that a
    difference."""
    kernel, dtype = KERNELS[name]
    mine = Attention(kernel).to("cuda", dtype)
    capture(mine, verify="first")
    with torch.enable_grad(), config.patch(cache=False):
        for _ in range(4):
            mine(torch.randn(2, 32, 128, device="cuda", dtype=dtype)).float().square().mean().backward()
    assert recordings(mine).verifications >= 1
    assert recordings(mine).eager_calls == 0


@pytest.mark.parametrize("drop", [0.0, 0.25])
@pytest.mark.parametrize("name", ["efficient", "flash", "math"])
def test_only_graphs_that_draw_are_handed_seeds(name: str, drop: float) -> None:
    """Attention with and without dropout is the same operator; whether it moves the generator at its first launch
    tells."""
    kernel, dtype = KERNELS[name]

    def body(x: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(x, x, x, dropout_p=drop)

    captured, drawing = capture(body), capture(lambda x: x + torch.rand(8, device="cuda"))
    x = torch.randn(2, 2, 32, 64, device="cuda").to(dtype)
    results = []
    for function, second in ((captured, drawing), (body, lambda x: x + torch.rand(8, device="cuda"))):
        torch.manual_seed(0)
        with torch.no_grad(), config.patch(cache=False):
            results.append(
                [result for _ in range(6) for result in (function(x).clone(), second(x[0, 0, 0, :8]).clone())]
            )
    assert all(map(torch.equal, *results))
    nodes = [node for entry in captured_states(captured)[0].entries() for node in entry.nodes]
    recorded = [node.recording for node in nodes if isinstance(node.recording, CudaRecording)]
    assert [recording.draws for recording in recorded] == [drop > 0] * len(nodes)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "two pending"])
@pytest.mark.parametrize("name", KERNELS)
def test_dropout_inside_attention(name: str, late: bool) -> None:
    kernel, dtype = KERNELS[name]
    torch.manual_seed(0)
    mine = Attention(kernel).to("cuda", dtype)
    theirs = copy.deepcopy(mine)
    capture(mine)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.enable_grad(), config.patch(cache=False):
            for number in range(8):
                x = torch.randn(2, 32, 128, device="cuda", dtype=dtype)
                for module in (theirs, mine):
                    torch.manual_seed(number)
                    module.zero_grad()
                    losses = [module(x * scale).float().square().mean() for scale in ((1, 2) if late else (1,))]
                    for loss in reversed(losses):
                        loss.backward()
                for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                    assert p.grad is not None
                    assert q.grad is not None
                    assert torch.equal(p.grad, q.grad), number
    finally:
        torch.use_deterministic_algorithms(before)
    assert recordings(mine).replays >= 6
