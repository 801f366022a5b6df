"""Kernels that no dispatcher sees: Triton, CuPy, Numba, and compiled functions, launched by a captured body.

Each body reads a weight of its module. The weight is changed in place, and replaced by another tensor, between calls.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from tests.gpu.support import DEVICE, healthy, needs_cuda, needs_gpu, rand, same

pytestmark = [needs_gpu, pytest.mark.filterwarnings("ignore")]  # compilers warn about small grids and more

SIZE = 1000
BLOCK_SIZE = 256

triton: Any = None
tl: Any = None
if importlib.util.find_spec("triton") is not None:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")


def _scale_source(x, w, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) * 2 + tl.load(w + at, mask=mask), mask=mask)


_scale: Any = triton.jit(_scale_source) if triton is not None else None

CUDA_SOURCE = r"""
extern "C" __global__ void scale(const float* x, const float* w, float* out, int n) {
    int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i < n) out[i] = x[i] * 2 + w[i];
}
"""


def works(package: str) -> None:
    """Skip where a package is missing, or does not work with the installed NumPy."""
    pytest.importorskip(package)
    if package == "numba" and not numba_works():
        pytest.skip("the installed numba does not get on with the installed NumPy")


@functools.cache
def numba_works() -> bool:
    """Whether Numba works, tried in another process, as a failed import leaves half of the package behind."""
    code = (
        "import numba.cuda, torch; x = numba.cuda.as_cuda_array(torch.zeros(1, device='cuda')); "
        "numba.cuda.jit(lambda a: None)[1, 1](x)"
    )
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


class Cell:
    """Holds a value that no name in the body leads to."""

    value: Any = None


_numba_kernel = Cell()
_cupy_kernel = Cell()


def blocks() -> int:
    """Blocks of threads for all elements."""
    return (SIZE + BLOCK_SIZE - 1) // BLOCK_SIZE


def by_triton(x: Tensor, w: Tensor, out: Tensor) -> None:
    """The kernel in Triton."""
    _scale[(blocks(),)](x, w, out, SIZE, BLOCK=BLOCK_SIZE)


def cupy_arrays(*tensors: Tensor, dlpack: bool) -> list[Any]:
    """Tensors as arrays of CuPy on the same memory."""
    cupy = importlib.import_module("cupy")
    if dlpack:
        return [cupy.from_dlpack(tensor.detach()) for tensor in tensors]
    return [cupy.asarray(tensor.detach()) for tensor in tensors]


def torchs_stream(cupy: Any) -> Any:
    """Torch's current stream, for CuPy."""
    handle = torch.cuda.current_stream().cuda_stream
    return cupy.cuda.ExternalStream(handle) if handle else cupy.cuda.Stream.null


def by_cupy(x: Tensor, w: Tensor, out: Tensor, *, dlpack: bool = False, follow: bool = True) -> None:
    """The kernel in CUDA C through CuPy, on torch's current stream or on CuPy's own."""
    cupy = importlib.import_module("cupy")
    if _cupy_kernel.value is None:
        _cupy_kernel.value = cupy.RawKernel(CUDA_SOURCE, "scale")
    with torchs_stream(cupy) if follow else cupy.cuda.Stream.null:
        arrays = cupy_arrays(x, w, out, dlpack=dlpack)
        _cupy_kernel.value((blocks(),), (BLOCK_SIZE,), (*arrays, cupy.int32(SIZE)))


def by_cupy_elementwise(x: Tensor, w: Tensor, out: Tensor) -> None:
    """CuPy's own operators on torch's memory, with memory of CuPy's in between."""
    cupy = importlib.import_module("cupy")
    with torchs_stream(cupy):
        a, b, c = cupy_arrays(x, w, out, dlpack=False)
        c[...] = a * 2 + b


def by_numba(x: Tensor, w: Tensor, out: Tensor, *, follow: bool = True) -> None:
    """The kernel in Numba, on torch's current stream or on Numba's own."""
    cuda = importlib.import_module("numba.cuda")
    if _numba_kernel.value is None:

        def scale(x, w, out):  # type: ignore[no-untyped-def]
            i = cuda.grid(1)
            if i < out.shape[0]:
                out[i] = x[i] * 2 + w[i]

        _numba_kernel.value = cuda.jit(scale)
    handle = torch.cuda.current_stream().cuda_stream
    stream = cuda.external_stream(handle) if follow and handle else 0
    arrays = [cuda.as_cuda_array(tensor.detach()) for tensor in (x, w, out)]
    _numba_kernel.value[blocks(), BLOCK_SIZE, stream](*arrays)


KERNELS: dict[str, tuple[str, Callable[..., None]]] = {
    "triton": ("triton", by_triton),
    "cupy raw kernel": ("cupy", by_cupy),
    "cupy over dlpack": ("cupy", lambda x, w, out: by_cupy(x, w, out, dlpack=True)),
    "cupy on its own stream": ("cupy", lambda x, w, out: by_cupy(x, w, out, follow=False)),
    "cupy elementwise": ("cupy", by_cupy_elementwise),
    "numba": ("numba", by_numba),
    "numba on its own stream": ("numba", lambda x, w, out: by_numba(x, w, out, follow=False)),
}


class Scaled(nn.Module):
    """``x * 2 + weight`` by a foreign kernel, between operators of torch."""

    def __init__(self, kernel: Callable[..., None], allocate: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.allocate = allocate
        self.weight = nn.Parameter(rand(SIZE, seed=1))
        self.buffer: Tensor
        self.register_buffer("buffer", torch.zeros(SIZE, device=DEVICE))

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        out = self.buffer if self.allocate == "buffer" else torch.empty_like(y)
        self.kernel(y, self.weight, out)
        return out * 3


def expected(x: Tensor, weight: Tensor) -> Tensor:
    """The expected result, bit for bit: the product is exact, so that a fused operation rounds once, too."""
    return ((x + 1) * 2 + weight) * 3


def changing(net: Any, weight_of: Callable[[], nn.Parameter], calls: int = 14) -> None:
    """Make calls with new values, with the weight changed in place and replaced in between, and with results held."""
    held = []
    for i in range(calls):
        if i in (4, 5, 11):
            weight_of().mul_(-1.25)
        if i in (7, 9):
            net.weight = nn.Parameter(rand(SIZE, seed=40 + i))
        mark_step_begin()
        x = rand(SIZE, seed=i)
        held.append((net(x), expected(x, weight_of())))
        same([result for result, _ in held], [right for _, right in held])


@needs_cuda
@pytest.mark.parametrize("allocate", ["fresh", "buffer"])
@pytest.mark.parametrize("name", KERNELS)
def test_foreign_kernels(name: str, allocate: str) -> None:
    """The kernel computes with this call's input and the present weight."""
    package, kernel = KERNELS[name]
    works(package)
    net = capture(Scaled(kernel, allocate))
    changing(net, lambda: net.weight)
    healthy()


@needs_cuda
@pytest.mark.parametrize("name", KERNELS)
def test_foreign_kernels_on_an_argument(name: str) -> None:
    """The kernel writes an argument of the captured function: the caller's tensor has eager's values."""
    package, kernel = KERNELS[name]
    works(package)
    weight = rand(SIZE, seed=1)

    @capture
    def f(x: Tensor, out: Tensor) -> Tensor:
        kernel(x + 1, weight, out)
        return out + 1

    for i in range(7):
        x, out = rand(SIZE, seed=i), torch.zeros(SIZE, device=DEVICE)
        y = f(x, out)
        wanted = (x + 1) * 2 + weight
        same((y, out), (wanted + 1, wanted))
        if i == 4:
            weight.mul_(-2)
    healthy()


@needs_cuda
@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize("verify", ["off", "first", "always"])
def test_sums_that_kernels_write_happen_once(verify: Any) -> None:
    """A replay that is compared with eager (asked for, or after a weight moved) is undone first, also in arguments and
    state that only foreign kernels write."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.total = rand(SIZE, seed=1), torch.zeros(SIZE, device=DEVICE)

        @override
        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            y = x * self.weight
            by_triton(y, self.total, self.total)
            by_triton(y, given, given)
            return y + 1

    net, eager = Net(), Net()
    run = capture(net, verify=verify)
    given, wanted = torch.zeros(SIZE, device=DEVICE), torch.zeros(SIZE, device=DEVICE)
    with torch.no_grad():
        for i in range(12):
            x = rand(SIZE, seed=i)
            if i in (5, 8):
                net.weight, eager.weight = (module.weight.clone() + i for module in (net, eager))
            same((run(x, given), given, net.total), (eager(x, wanted), wanted, eager.total))
    assert recordings(run).replays >= 8
    healthy()


@needs_cuda
def test_foreign_kernel_first_compiled_while_recording() -> None:
    """A Triton kernel of another signature is compiled in the middle of the second run."""
    pytest.importorskip("triton")
    runs: list[int] = []
    count = runs.append

    def choose(x: Tensor) -> Tensor:
        count(1)
        return x.double() if len(runs) == 2 else x

    @capture
    def f(x: Tensor) -> Tensor:
        y = choose(x)
        out = torch.empty_like(y)
        _scale[(blocks(),)](y, y, out, SIZE, BLOCK=BLOCK_SIZE)
        return out.float()

    for i in range(5):
        x = rand(SIZE, seed=i)
        same(f(x), x * 3)  # one rounding in both
    healthy()


@needs_cuda
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_state_that_is_another_tensor_in_every_call() -> None:
    """The kernel might read the state; its parameters tell that it does not."""
    kept = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.last = nn.Parameter(rand(SIZE, seed=1)), rand(SIZE)

        @override
        def forward(self, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            by_triton(x, self.weight, out)
            return out + 1

    net = Net()
    run = capture(net, max_recordings=3)

    def go_on() -> None:
        for i in range(14):
            x = rand(SIZE, seed=i)
            got = run(x)
            same(got, x * 2 + net.weight + 1)
            net.last = got + 1
            kept.append(net.last)

    with torch.no_grad():
        go_on()
    counted = recordings(run)
    assert counted.recordings <= 3
    assert counted.replays >= 8
    assert "CG901" not in [finding.code for finding in counted.findings]
    healthy()


@needs_cuda
def test_compiled_function_in_the_body() -> None:
    """A function compiled in the default mode is called by a captured body, weights changed and replaced."""
    inner = torch.compile(lambda y, w: torch.relu(y * 2 + w) - 0.5, dynamic=False)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(rand(SIZE, seed=1))

        @override
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = inner(x + 1, self.weight)
            return y * 3

    inner(rand(SIZE), nn.Parameter(rand(SIZE)))
    net = capture(Net())
    for i in range(12):
        if i in (4, 8):
            net.weight.mul_(-1.25)
        if i == 6:
            net.weight = nn.Parameter(rand(SIZE, seed=46))
        x = rand(SIZE, seed=i)
        same(net(x), inner(x + 1, net.weight) * 3)  # compiled code may fuse a product and a sum
    healthy()


@needs_cuda
def test_function_first_compiled_in_the_body() -> None:
    """Nothing was compiled before the first captured call."""
    inner = torch.compile(lambda y: torch.relu(y * 4 + 1), dynamic=False)

    @capture
    def f(x: Tensor) -> Tensor:
        y: Tensor = inner(x)
        return y * 3

    for i in range(5):
        x = rand(SIZE, seed=i)
        same(f(x), torch.relu(x * 4 + 1) * 3)
    healthy()


@needs_cuda
@pytest.mark.parametrize("compiled_before", [True, False])
def test_captured_function_in_a_compiled_one(compiled_before: bool) -> None:
    """A compiled function that calls a captured one: eager's values, at the captured function's own calls too."""

    @capture
    def f(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    outer = torch.compile(lambda x: f(x + 1) - 0.5, dynamic=False)
    if not compiled_before:
        for i in range(3):
            f(rand(SIZE, seed=i))
    for i in range(4):
        x = rand(SIZE, seed=i)
        same(outer(x), torch.relu(x + 1) * 2 - 0.5)
        same(f(x), torch.relu(x) * 2)
    healthy()


def test_operators_written_in_python() -> None:
    """A custom operator in Python that allocates and writes, which runs on any device."""

    @torch.library.custom_op("gpu_tests::scale", mutates_args=())
    def scale(x: Tensor, w: Tensor) -> Tensor:
        return x * 2 + w

    @torch.library.custom_op("gpu_tests::scale_out", mutates_args={"out"})
    def scale_out(x: Tensor, w: Tensor, out: Tensor) -> None:
        torch.add(x * 2, w, out=out)

    def add_and_write(y: Tensor, weight: Tensor, out: Tensor) -> None:
        scale_out(y, weight, out)
        out.add_(scale(y, weight)).sub_(scale(y, weight))

    def plain(y: Tensor, weight: Tensor, out: Tensor) -> None:
        torch.add(y * 2, weight, out=out)
        out.add_(y * 2 + weight).sub_(y * 2 + weight)

    for allocate in ("fresh", "buffer"):
        net, twin = capture(Scaled(add_and_write, allocate)), Scaled(plain, allocate)
        for i in range(12):
            if i in (4, 8):
                net.weight.mul_(-1.25)
            if i == 6:
                net.weight = nn.Parameter(rand(SIZE, seed=46))
            twin.weight = net.weight
            x = rand(SIZE, seed=i)
            same(net(x), twin(x))
