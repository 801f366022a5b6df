"""Rows of the behaviour table that need a device, 2e and 2f: outputs and mutation.

Rows are numbered as in ``docs/rows.md``. Of these rows, those stand elsewhere:

======================================  =============================================================================
row                                     where
======================================  =============================================================================
99 to 103, 106, 108, 110, 117, 119,     ``tests/tree/test_rows_outputs.py``, ``test_rows_mutation.py`` on CUDA as is
120, 123
111                                     needs gradients
112                                     ``test_environment.py``
======================================  =============================================================================
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from tests.gpu.support import (
    DEVICE,
    KEPT,
    ON_CUDA,
    counts,
    eager,
    host,
    may_fall_back,
    needs_cuda,
    needs_gpu,
    rand,
    same,
    storage_of,
)

pytestmark = needs_gpu


def test_row_104_geometry_of_outputs() -> None:
    """Strides, offsets, dtypes of outputs as eager's, large and small, over held results."""

    @capture
    def f(x: Tensor) -> dict[str, Tensor]:
        return {
            "channels": (x + 1).to(memory_format=torch.channels_last),
            "turned": (x[0, 0] * 2).t(),
            "sliced": (x * 3)[:, 1:, ::2],
            "half": x.to(torch.bfloat16)[1:],
            "byte": (x > 0).flatten()[3:],
            "index": x.argmax(-1),
            "expanded": (x[:, :1] * 2).expand(2, 3, 8, 8),
            "scalar": x.sum(),
            "complex": torch.complex(x, x * 2).conj(),
            "bits": (x * 2).view(torch.int32),
            "part": torch.complex(x, -x).imag,
        }

    held = []
    for i in range(6):
        x = rand(2, 3, 8, 8, seed=i)
        actual, expected = f(x), eager(f, x)
        for name, right in expected.items():
            assert actual[name].storage_offset() == right.storage_offset(), name
            assert actual[name].is_conj() == right.is_conj(), name
        held.append((actual, expected))
        for results, right_results in held:
            same(results, right_results)


@may_fall_back
def test_row_109_outputs_on_the_cpu() -> None:
    """Empty CPU tensors beside device outputs, and a CPU result that has to be computed anew at each call."""

    @capture
    def empty(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty(0, 3), x + 1

    @capture
    def full(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.cpu(), x + 1

    for i in range(5):
        x = rand(8, seed=i)
        same(empty(x), eager(empty, x))
        same(full(x), eager(full, x))


@may_fall_back
def test_row_114_sparse_outputs_and_inputs() -> None:
    """Sparse tensors go in and out, however the call is run."""

    @capture
    def f(x: Tensor) -> Tensor:
        return (x * (x > 0)).to_sparse()

    @capture
    def g(s: Tensor, x: Tensor) -> Tensor:
        y: Tensor = torch.sparse.mm(s, x)
        return y

    for i in range(5):
        x = rand(8, 8, seed=i)
        sparse = f(x)
        same(sparse.to_dense(), eager(f, x).to_dense())
        same(g(sparse, x), eager(g, sparse, x))


def test_row_118_state_is_written_once_a_call() -> None:
    """Parameters, buffers, statics, closures and normalisation statistics: written once per call in every phase."""
    inside, twin_inside = torch.zeros(16, device=DEVICE), torch.zeros(16, device=DEVICE)

    class Net(nn.Module):
        def __init__(self, inside: Tensor) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16, device=DEVICE)
            self.late = nn.BatchNorm1d(16, momentum=0.5, device=DEVICE)
            self.inside = (inside,)
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64, device=DEVICE))

        @override
        def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
            self.seen += 1
            cache.index_copy_(0, at, x.sum(0, keepdim=True))
            self.inside[0].add_(cache.sum(0))
            y: Tensor = self.late(torch.relu(self.norm(x)))
            return y + self.inside[0] * self.seen

    net, twin = capture(Net(inside), static=["cache"]), Net(twin_inside)
    ours, theirs = torch.zeros(9, 16, device=DEVICE), torch.zeros(9, 16, device=DEVICE)
    for i in range(9):
        x, at = rand(8, 16, seed=i), torch.tensor([i], device=DEVICE)
        same(net(x, ours, at), twin(x, theirs, at))
        same((ours, inside), (theirs, twin_inside))
        same(list(net.state_dict().values()), list(twin.state_dict().values()))
    assert counts(net) == (1, 1, 7, 0)


@may_fall_back
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_row_124_125_index_put(accumulate: bool, deterministic: bool) -> None:
    """``index_put_`` by integers and by changing masks, on a fresh tensor, an argument, and a bool one."""

    @capture
    def f(x: Tensor, rows: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        fresh = torch.zeros_like(x).index_put_((rows,), x[rows], accumulate=accumulate)
        flags = torch.zeros(8, dtype=torch.bool, device=x.device).index_put_((rows,), torch.ones_like(rows).bool())
        return fresh, flags, x.masked_fill(mask, 3.0)

    @capture
    def by_mask(x: Tensor, mask: Tensor) -> Tensor:
        x[mask] = 7.0
        y = x * 2
        y[mask] += 1.0
        return y

    torch.use_deterministic_algorithms(deterministic)
    try:
        for i in range(6):
            rows = torch.randperm(8, generator=torch.Generator().manual_seed(i)).to(DEVICE)
            mask = rand(8, 8, seed=i) > 0.1
            x = rand(8, 8, seed=i + 50)
            same(f(x, rows, mask), eager(f, x, rows, mask))
            ours, theirs = x.clone(), x.clone()
            same(by_mask(ours, mask), eager(by_mask, theirs, mask))
            same(ours, theirs)
    finally:
        torch.use_deterministic_algorithms(False)


def test_row_127_replaced_buffer_beside_a_written_one() -> None:
    """A bias replaced and a counter replaced beside writes of the body: nothing lost, nothing doubled."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count: Tensor
            self.bias: Tensor
            self.register_buffer("count", torch.zeros(16, device=DEVICE))
            self.register_buffer("bias", rand(16))

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(x)
            return self.count + self.bias

    net = Net()
    twin = copy.deepcopy(net)
    capture(net)
    for i in range(10):
        if i in (3, 6):
            for module in (net, twin):
                module.bias = rand(16, seed=i)
                if i == 6:
                    module.count = module.count.clone() + 1
        x = rand(16, seed=i)
        same(net(x), twin(x))
        same(net.count, twin.count)
    assert counts(net)[3] == 0


@may_fall_back
def test_row_130_preallocated_memory_between_two_recordings() -> None:
    """Two captured functions with one that must run eagerly between them, all writing into the same buffers."""
    buffer, out = torch.zeros(16, 16, device=DEVICE), torch.zeros(16, 16, device=DEVICE)

    @capture
    def first(x: Tensor) -> Tensor:
        torch.mul(x, 2, out=buffer)
        return buffer + 1

    @capture
    def unfit(y: Tensor) -> Tensor:
        torch.add(y, y.max().item(), out=buffer)
        return buffer

    @capture
    def second(y: Tensor) -> Tensor:
        torch.matmul(y, y, out=out)
        return out.t()

    for i in range(8):
        mark_step_begin()
        x = rand(16, 16, seed=i)
        a = first(x)
        b = unfit(a)
        assert b is buffer
        wanted = x * 2 + 1
        wanted = wanted + wanted.max().item()
        same((a, b), (x * 2 + 1, wanted))
        c = second(b)
        same(c, (wanted @ wanted).t())
        assert storage_of(c) == storage_of(out)


@needs_cuda
def test_row_157_function_between_two_recordings_that_reads() -> None:
    """Results of a recording read on the host between recordings, and the value fed back by the caller."""

    @capture
    def f(x: Tensor, s: Tensor) -> Tensor:
        return (x * s).sum()

    value = 1.0
    for i in range(10):
        x = rand(64, seed=i)
        s = torch.tensor(value, device=DEVICE)
        expected = (x * s).sum().item()
        result = f(x, s)
        assert result.item() == expected
        value = expected / 2 + 1
    assert counts(f) == (1, 1 + KEPT, 8 - KEPT, 0)


@may_fall_back
def test_row_161_inputs_of_the_host_only() -> None:
    """A function called with CPU tensors, then with device tensors, in turns: each on its own device."""

    @capture
    def f(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    results: list[Any] = []
    for i in range(8):
        x = rand(16, seed=i) if i % 2 else host(16, seed=i)
        results.append((f(x), x))
        for y, given in results:
            assert y.device == given.device
            same(y, torch.tanh(given) * 2)
    if ON_CUDA:
        assert recordings(f).recordings == 2 + KEPT
