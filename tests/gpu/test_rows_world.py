"""Rows of the behaviour table that need a device, 2h to 2j: devices, libraries, operators, errors.

Rows are numbered as in ``docs/rows.md``. Of these rows, those stand elsewhere:

======================================  =============================================================================
row                                     where
======================================  =============================================================================
142, 143, 148, 151, 152                 ``test_rng.py``, ``test_generators.py``; ``tests/runtime/test_rows_rng.py`` too
144 to 147, 150                         need gradients
153                                     ``tests/runtime/test_rows_devices.py`` on CUDA as it is
157, 171, 181, 182                      ``test_failures.py``, ``test_libraries.py``
164                                     ``test_threads.py``
165, 166                                ``test_streams.py``
185, 186                                ``test_nesting.py``
167, 187                                ``test_environment.py``
======================================  =============================================================================
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from capture import BorrowedOutputError, capture, mark_step_begin, recordings, release
from tests.gpu.support import (
    DEVICE,
    KEPT,
    allocated,
    counts,
    eager,
    healthy,
    may_fall_back,
    needs_cuda,
    needs_gpu,
    rand,
    same,
)

pytestmark = needs_gpu

MIB = 1 << 20

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_cuda
@two_devices
@may_fall_back
def test_row_149_body_on_two_devices() -> None:
    """A body that works on two devices: eager's values and draws, however it is run."""

    @capture
    def f(x: Tensor) -> Tensor:
        y = (x + torch.rand_like(x)).to("cuda:1")
        return (y * 2 + torch.rand_like(y)).to(x.device)

    def run(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(2)
        return [function(rand(8, seed=i)) for i in range(5)]

    same(run(f), run(lambda x: eager(f, x)))


@needs_cuda
@two_devices
def test_row_161_each_device_has_its_own_recordings() -> None:
    """One function called with tensors of two devices in turns, whatever the current device is."""

    @capture
    def f(x: Tensor) -> Tensor:
        return torch.tanh(x @ x) * 2

    held = []
    for i in range(10):
        x = rand(16, 16, seed=i).to(f"cuda:{i % 2}")
        with torch.cuda.device(i // 2 % 2):
            y = f(x)
        held.append((x, y))
        for x, y in held:
            same(y, eager(f, x))
    assert recordings(f).recordings == 2 * (1 + KEPT)


def fillers() -> list[Tensor]:
    """Tensors that get memory that was just freed."""
    return [torch.full((1 << 20,), 3.0, device=DEVICE) for _ in range(64)]


@needs_cuda
def test_a_graph_captured_by_hand_keeps_its_workspace() -> None:
    """A product split over its inner dimension writes to cuBLAS's workspace, by an address that the graph keeps."""
    a, b = rand(64, 16384), rand(16384, 64, seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.mm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = torch.mm(a, b)
    f = capture(lambda x: torch.mm(x, b))
    for i in range(4):
        x = rand(64, 16384, seed=i)
        same(f(x), torch.mm(x, b))
    full = fillers()
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((tensor == 3).all()) for tensor in full)
    same(out, torch.mm(a, b))


@needs_cuda
@pytest.mark.parametrize("kind", ["regions", "whole step"])
def test_training_beside_a_graph_captured_by_hand(kind: str) -> None:
    """Backward passes run in a thread of autograd, which has workspaces of its own for the same streams."""
    stream, width = torch.cuda.Stream(), 8192
    weight = torch.nn.Parameter(rand(64, width) / 64)

    def gradient(x: Tensor, weight: Tensor) -> Tensor:
        (grad_by_hand,) = torch.autograd.grad((x @ weight).square().mean(), weight)
        return grad_by_hand

    def step(x: Tensor) -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
                p.grad = None
        return loss.detach()

    with torch.enable_grad():
        x = rand(64, 64)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            expected = gradient(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            grad_by_hand = gradient(x, weight)
        net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Linear(width, 64)).to(DEVICE)
        twin = copy.deepcopy(net)
        run = capture(step) if kind == "whole step" else step
        if kind == "regions":
            for layer in net:
                capture(layer)
        ours = [run(rand(64, 64, seed=i)) for i in range(6)]
        replays = counts(run)[2] if kind == "whole step" else counts(net[0])[2]
        net = twin
        theirs = [step(rand(64, 64, seed=i)) for i in range(6)]
    with torch.cuda.stream(stream):
        full = fillers()
        graph.replay()
    torch.cuda.synchronize()
    assert all(bool((tensor == 3).all()) for tensor in full)
    same(grad_by_hand, expected)
    same(ours, theirs)
    assert replays >= 3 - KEPT


@needs_cuda
def test_workspaces_that_somebody_has_cublas_forget() -> None:
    """cuBLAS's workspaces are freed between calls, as CUDAGraph Trees do around each of their recordings."""
    b = rand(16384, 64)
    f, g = capture(lambda x: torch.mm(x, b)), capture(lambda x: torch.mm(x, b) + 1)
    for i in range(3):
        x = rand(64, 16384, seed=i)
        same(f(x), torch.mm(x, b))
    forget = torch.compile(lambda x: torch.mm(x, b) * 2, mode="reduce-overhead")
    for i in range(4):
        x = rand(64, 16384, seed=i)
        forget(x)
        full = fillers()
        same(f(x), torch.mm(x, b))
        same(g(x), torch.mm(x, b) + 1)
        torch.cuda.synchronize()
        assert all(bool((tensor == 3).all()) for tensor in full)
    assert counts(f)[1:] == (1, 5, 0)


@needs_cuda
def test_row_168_workspaces_of_libraries_stay_out_of_the_pool() -> None:
    """Matrix products of several kinds: nothing is found to leak, and releasing gives all memory back."""
    weight = rand(256, 256)

    def make() -> Callable[[Tensor], Tensor]:
        @capture
        def f(x: Tensor) -> Tensor:
            y = torch.nn.functional.linear(x, weight, weight[0])
            z = torch.bmm(y.expand(4, -1, -1), weight.expand(4, -1, -1)).sum(0)
            return (z.half() @ weight.half()).float() + torch.addmm(y, x, weight)

        return f

    def use() -> None:
        f = make()
        for i in range(4):
            x = rand(128, 256, seed=i)
            same(f(x), eager(f, x))
        assert counts(f) == (1, 1, 2, 0)
        release(f)

    use()
    before = allocated()
    for _ in range(5):
        use()
    assert allocated() <= before + 8 * MIB


@needs_cuda
def test_row_168_first_product_of_a_stream_is_in_the_recording() -> None:
    """The function is recorded on a stream of the caller on which no matrix product has run yet."""
    weight = rand(256, 256)

    @capture
    def f(x: Tensor) -> Tensor:
        return torch.relu(x @ weight) @ weight

    inputs = [rand(64, 256, seed=i) for i in range(5)]
    expected = [eager(f, x) for x in inputs]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        results = [f(x) for x in inputs]
        torch.cuda.current_stream().synchronize()
    same(results, expected)
    assert counts(f) == (1, 1 + KEPT, 3 - KEPT, 0)


Index = Callable[[Tensor, Tensor, Tensor], object]

INDEXING: dict[str, Index] = {
    "index_select": lambda x, i, m: x.index_select(0, i),
    "index": lambda x, i, m: x[i, i.flip(0)],
    "index with slices": lambda x, i, m: x[i][:, 1:3] + x[:, i][1:3].t(),
    "gather": lambda x, i, m: x.gather(0, i.expand(8, 8)),
    "take": lambda x, i, m: x.take(i * 3),
    "take_along_dim": lambda x, i, m: x.take_along_dim(x.argsort(0), 0),
    "index_add": lambda x, i, m: torch.zeros_like(x).index_add_(0, i, x),
    "index_add twice": lambda x, i, m: torch.zeros_like(x).index_add_(0, i // 8 * i, torch.ones_like(x)),
    "index_copy": lambda x, i, m: torch.zeros_like(x).index_copy_(0, i, x),
    "index_fill": lambda x, i, m: x.index_fill(0, i[:3], 2.0),
    "index_put": lambda x, i, m: torch.zeros_like(x).index_put_((i, i), x[0]),
    "index_put accumulate": lambda x, i, m: torch.zeros_like(x).index_put_((i,), torch.ones_like(x), accumulate=True),
    "index_reduce": lambda x, i, m: x.clone().index_reduce_(0, i, x, "amax"),
    "scatter": lambda x, i, m: torch.zeros_like(x).scatter_(0, i.expand(8, 8).t(), x),
    "scatter value": lambda x, i, m: x.scatter(1, i[:, None], 5.0),
    "scatter_add": lambda x, i, m: torch.zeros_like(x).scatter_add_(0, i.expand(8, 8).t(), torch.ones_like(x)),
    "scatter_reduce": lambda x, i, m: x.scatter_reduce(0, i.expand(8, 8).t(), x, "amax"),
    "masked_fill": lambda x, i, m: x.masked_fill(m, 1.0),
    "masked_scatter": lambda x, i, m: x.masked_scatter(m, x.flip(0).contiguous()),
    "where": lambda x, i, m: torch.where(m, x, -x),
    "select_scatter": lambda x, i, m: x.select_scatter(x[1], 0, 2),
    "slice assignment": lambda x, i, m: x.clone().t()[1:3].copy_(x[:2]),
    "roll and flip": lambda x, i, m: x.roll(3, 0).flip(1),
    "tril": lambda x, i, m: x.tril() + x.triu(1),
    "unfold": lambda x, i, m: x.unfold(0, 3, 2),
    "embedding_bag": lambda x, i, m: torch.nn.functional.embedding_bag(i.view(2, 4), x, mode="sum"),
    "bucketize": lambda x, i, m: torch.bucketize(x, torch.linspace(-1, 1, 5, device=x.device)),
    "cummax": lambda x, i, m: x.cummax(0),
    "put": lambda x, i, m: x.clone().put_(i, x[0]),
}


@may_fall_back
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about beta operators
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("name", INDEXING)
def test_row_170_indexing(name: str, deterministic: bool) -> None:
    """Indexing and scatter operators, over changing indices, with and without deterministic algorithms."""
    body = INDEXING[name]

    @capture
    def f(x: Tensor, index: Tensor, mask: Tensor) -> object:
        return body(x, index, mask)

    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        for n in range(5):
            index = torch.randperm(8, generator=torch.Generator().manual_seed(n)).to(DEVICE)
            x, mask = rand(8, 8, seed=n), rand(8, 8, seed=n + 9) > 0
            same(f(x, index, mask), eager(f, x, index, mask))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
def test_row_170_layers(dtype: torch.dtype) -> None:
    """A transformer layer over several lengths: equal bits, each length recorded once."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, device=DEVICE, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(rand(*parameter.shape, seed=parameter.numel(), dtype=dtype) / 4)

    @capture
    def f(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        z: Tensor = layer(y)
        return y + z

    for i in range(12):
        x = rand(2, (5, 16, 33)[i % 3], 64, seed=i, dtype=dtype)
        same(f(x), eager(f, x))
    assert counts(f) == (3, 3, 6, 0)


@pytest.mark.parametrize("calls", [2, 3, 5])
def test_row_180_use_of_a_borrowed_output_raises(calls: int) -> None:
    """``outputs="borrow"``: an error that names the line, not other values; the memory is usable afterwards."""

    @capture(outputs="borrow")
    def lend(x: Tensor) -> Tensor:
        return x * 3 + 1

    for i in range(calls):
        mark_step_begin()
        x = rand(4, seed=i)
        out = lend(x)
        same(out, x * 3 + 1)
    mark_step_begin()
    new = lend(rand(4, seed=99))
    for use in (lambda: out + 1, lambda: out.tolist(), lambda: out.cpu(), lambda: out.add_(1), lambda: repr(out)):
        with pytest.raises(BorrowedOutputError) as caught:
            use()
        for part in ("lend", Path(__file__).name, ".clone()"):
            assert part in str(caught.value)
    same(new, rand(4, seed=99) * 3 + 1)
    healthy()
