"""Bodies that read and write tensors of a module, one for each kind of kernel, and a check that moves those tensors."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from capture import capture, recordings
from tests.gpu.support import DEVICE, rand, same

Tensors = dict[str, Any]
Body = Callable[[Any, Tensor], Any]
BF16 = torch.bfloat16

triton: Any = None
tl: Any = None
if importlib.util.find_spec("triton") is not None:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")


def _axpy_source(x, w, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) * 3 + tl.load(w + at, mask=mask), mask=mask)


_axpy: Any = triton.jit(_axpy_source) if triton is not None else None


class Holder(nn.Module):
    """A module whose tensors are plain attributes, lists of tensors among them."""

    def __init__(self, body: Body, tensors: Tensors) -> None:
        super().__init__()
        self.body = body
        for name, value in tensors.items():
            setattr(self, name, value)

    @override
    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


@frozen
class Kernel:
    """One kind of kernel: its body, its tensors by seed, and its input by seed. ``cuda``: it runs on a GPU only."""

    body: Body
    tensors: Callable[[int], Tensors]
    arguments: Callable[[int], Tensor] = lambda seed: rand(64, 64, seed=seed)
    cuda: bool = False


def indices(seed: int, size: int, limit: int) -> Tensor:
    """Numbers below ``limit``."""
    return torch.randint(limit, (size,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def permutation(seed: int, size: int) -> Tensor:
    """A random permutation of the numbers below ``limit``."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[int], Tensors]:
    def tensors(seed: int) -> Tensors:
        return {f"w{i}": rand(*shape, seed=10 * seed + i, dtype=dtype) for i, shape in enumerate(shapes)}

    return tensors


def _many(count: int, *shape: int) -> Callable[[int], Tensors]:
    return lambda seed: {"many": [rand(*shape, seed=100 * seed + i) for i in range(count)]}


def _heads(dtype: torch.dtype) -> Callable[[int], Tensors]:
    return lambda seed: {
        "k": rand(2, 4, 128, 64, seed=seed, dtype=dtype), "v": rand(2, 4, 128, 64, seed=seed + 1, dtype=dtype),
    }  # fmt: skip


def _query(dtype: torch.dtype) -> Callable[[int], Tensor]:
    return lambda seed: rand(2, 4, 128, 64, seed=seed, dtype=dtype)


def _of_bf16(seed: int) -> Tensor:
    return rand(64, 64, seed=seed, dtype=BF16)


def _optimizer(seed: int) -> Tensors:
    count = 6
    return {
        "params": [rand(33, 7, seed=100 * seed + i) for i in range(count)],
        "grads": [rand(33, 7, seed=100 * seed + 10 + i) for i in range(count)],
        "first": [rand(33, 7, seed=100 * seed + 20 + i) for i in range(count)],
        "second": [rand(33, 7, seed=100 * seed + 30 + i).abs() for i in range(count)],
        "steps": [torch.full((), 3.0, device=DEVICE) for _ in range(count)],
    }


def _fused(self: Any, x: Tensor) -> Tensor:
    torch._fused_adamw_(
        self.params, self.grads, self.first, self.second, [], self.steps, lr=0.01, beta1=0.9, beta2=0.99,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return x + 1


def _foreach_step(self: Any, x: Tensor) -> Tensor:
    torch._foreach_lerp_(self.first, self.grads, 0.1)
    torch._foreach_mul_(self.second, 0.9)
    torch._foreach_addcmul_(self.second, self.grads, self.grads, 0.1)
    torch._foreach_addcdiv_(self.params, self.first, torch._foreach_sqrt(self.second), -0.01)
    return x + 1


def _scatter(self: Any, x: Tensor) -> Tensor:
    self.table.scatter_(0, self.index[:, None].expand(-1, 64), x)
    self.table.index_add_(0, self.index, x)
    doubled: Tensor = self.table * 2
    return doubled


def _by_triton(self: Any, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _axpy[(x.numel() // 256,)](x, self.w0, out, x.numel(), BLOCK=256)
    return out


def _fill(self: Any, x: Tensor) -> Tensor:
    self.w0.zero_()
    self.w1.copy_(x)
    both: Tensor = self.w0 + self.w1
    return both


KERNELS: dict[str, Kernel] = {
    "gemm fp32": Kernel(lambda self, x: x @ self.w0 + self.w1, _weights((64, 64), (64,))),
    "gemm bf16": Kernel(lambda self, x: (x @ self.w0) @ self.w1, _weights((64, 64), (64, 256), dtype=BF16), _of_bf16),
    "large gemm bf16": Kernel(
        lambda self, x: functional.linear(x, self.w0, self.w1), _weights((2048, 2048), (2048,), dtype=BF16),
        lambda seed: rand(256, 2048, seed=seed, dtype=BF16), cuda=True,
    ),
    "addmm gelu": Kernel(
        lambda self, x: functional.gelu(functional.linear(x, self.w0, self.w1), approximate="tanh"),
        _weights((128, 64), (128,)),
    ),
    "addmm epilogue": Kernel(
        lambda self, x: torch._addmm_activation(self.w1, x, self.w0.t(), use_gelu=True),
        _weights((128, 64), (128,), dtype=BF16), _of_bf16, cuda=True,
    ),
    "bmm": Kernel(lambda self, x: torch.bmm(self.w0, x.expand(6, 64, 64)), _weights((6, 32, 64))),
    "flash attention": Kernel(
        lambda self, x: torch.ops.aten._scaled_dot_product_flash_attention(x, self.k, self.v)[0],
        _heads(BF16), _query(BF16), cuda=True,
    ),
    "efficient attention": Kernel(
        lambda self, x: torch.ops.aten._scaled_dot_product_efficient_attention(x, self.k, self.v, None, False)[0],
        _heads(torch.float32), _query(torch.float32), cuda=True,
    ),
    "cudnn attention": Kernel(
        lambda self, x: torch.ops.aten._scaled_dot_product_cudnn_attention(x, self.k, self.v, None, False)[0],
        _heads(BF16), _query(BF16), cuda=True,
    ),
    "convolution": Kernel(
        lambda self, x: functional.conv2d(x, self.w0, self.w1, padding=1), _weights((8, 3, 3, 3), (8,)),
        lambda seed: rand(2, 3, 32, 32, seed=seed),
    ),
    "convolution bf16": Kernel(
        lambda self, x: functional.conv2d(x, self.w0, padding=1), _weights((16, 8, 3, 3), dtype=BF16),
        lambda seed: rand(2, 8, 32, 32, seed=seed, dtype=BF16), cuda=True,
    ),
    "batch norm": Kernel(
        lambda self, x: functional.batch_norm(x, self.w0, self.w1, self.w2, self.w3, training=True),
        _weights((64,), (64,), (64,), (64,)),
    ),
    "layer norm": Kernel(
        lambda self, x: functional.layer_norm(x, (64,), self.w0, self.w1), _weights((64,), (64,))
    ),
    "foreach optimizer": Kernel(_foreach_step, _optimizer),
    "fused optimizer": Kernel(_fused, _optimizer),
    "cat of many": Kernel(lambda self, x: torch.cat([x, *self.many]), _many(200, 3, 64)),
    "stack and sum": Kernel(lambda self, x: torch.stack(self.many).sum(0) + x, _many(5, 64, 64)),
    "index": Kernel(
        lambda self, x: self.table[self.index] * x,
        lambda seed: {"table": rand(32, 64, seed=seed), "index": indices(seed, 64, 32)},
    ),
    "scatter": Kernel(_scatter, lambda seed: {"table": rand(64, 64, seed=seed), "index": permutation(seed, 64)}),
    "embedding": Kernel(
        lambda self, x: functional.embedding(self.index, self.table) + x,
        lambda seed: {"table": rand(32, 64, seed=seed), "index": indices(seed, 64, 32)},
    ),
    "sort": Kernel(lambda self, x: torch.sort(self.w0 + x, dim=-1)[0].cumsum(-1), _weights((64, 64))),
    "reduce": Kernel(lambda self, x: self.w0.sum() + x.sum(), _weights((512, 1024))),
    "inverse": Kernel(
        lambda self, x: torch.linalg.solve_ex(self.w0 + 5 * torch.eye(8, device=x.device), x)[0], _weights((16, 8, 8)),
        lambda seed: rand(16, 8, 8, seed=seed),
    ),
    "cholesky": Kernel(
        lambda self, x: torch.linalg.cholesky_ex(self.w0 @ self.w0.mT + torch.eye(8, device=x.device))[0] @ x,
        _weights((16, 8, 8)), lambda seed: rand(16, 8, 8, seed=seed),
    ),
    "fft": Kernel(lambda self, x: torch.fft.rfft(self.w0 * x).abs(), _weights((64, 64))),
    "copy and fill": Kernel(_fill, _weights((64, 64), (64, 64))),
    "dropout": Kernel(lambda self, x: functional.dropout(x @ self.w0, 0.3), _weights((64, 64))),
    "gru": Kernel(
        lambda self, x: torch.gru_cell(x, self.w4, self.w0, self.w1, self.w2, self.w3),
        _weights((192, 64), (192, 64), (192,), (192,), (64, 64)),
    ),
    "triton": Kernel(_by_triton, _weights((64, 64)), cuda=True),
}  # fmt: skip


def flat(tensors: Tensors) -> list[tuple[str, int | None, Tensor]]:
    """All tensors of a holder, as attribute, position in its list, and tensor."""
    places: list[tuple[str, int | None, Tensor]] = []
    for name, value in tensors.items():
        if isinstance(value, list):
            places += [(name, position, tensor) for position, tensor in enumerate(value)]
        else:
            places.append((name, None, value))
    return places


def state(holder: Holder, names: Tensors) -> list[Tensor]:
    """The tensors now held."""
    return [tensor for _, _, tensor in flat({name: getattr(holder, name) for name in names})]


def put(holder: Holder, name: str, position: int | None, tensor: Tensor) -> Tensor:
    """Put another tensor in this place; gives the one before."""
    if position is None:
        before: Tensor = getattr(holder, name)
        setattr(holder, name, tensor)
    else:
        before = getattr(holder, name)[position]
        getattr(holder, name)[position] = tensor
    return before


def spoil(tensor: Tensor) -> None:
    """Overwrite this memory, so that a kernel that still reads it gives another result."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def move(holder: Holder, fresh: Tensors, *, every: int = 1, kept: list[Tensor]) -> None:
    """Put other tensors in the place of every ``every``-th one, and overwrite the memory of the old ones."""
    for number, (name, position, tensor) in enumerate(flat(fresh)):
        if number % every == 0:
            kept.append(torch.empty(1 + len(kept) % 7 * 512, device=tensor.device))  # so that addresses differ
            spoil(put(holder, name, position, tensor.clone()))


def check_moves(kernel: Kernel, moves: int = 9) -> Any:
    """Outputs and state are eager's after every move; gives the captured module's ``recordings``."""
    ours, theirs = Holder(kernel.body, kernel.tensors(0)), Holder(kernel.body, kernel.tensors(0))
    names = kernel.tensors(0)
    captured = capture(ours)
    kept: list[Tensor] = []
    torch.manual_seed(3)
    draws = [torch.get_rng_state(), torch.cuda.get_rng_state() if DEVICE.type == "cuda" else None]
    for call in range(moves + 4):
        if call >= 4:
            every = (1, 1, 2, 3)[call % 4]
            fresh = kernel.tensors(call)
            move(ours, fresh, every=every, kept=kept)
            for number, (name, position, tensor) in enumerate(flat(fresh)):
                if number % every == 0:
                    put(theirs, name, position, tensor.clone())
        draws = _both(captured, theirs, kernel.arguments(call + 50), draws)
        same(state(ours, names), state(theirs, names))
    return recordings(captured)


def check_bound(kernel: Kernel, calls: int = 10) -> Any:
    """Outputs and state are eager's with an argument elsewhere in every call, whose memory is spoilt after it."""
    ours, theirs = Holder(kernel.body, kernel.tensors(0)), Holder(kernel.body, kernel.tensors(0))
    captured, kept = capture(ours, inputs="bind", max_recordings=12), []
    for call in range(calls):
        kept += [torch.empty(1 + call % 7 * 512, device=DEVICE), kernel.arguments(call + 50).clone()]
        draws = [torch.get_rng_state(), torch.cuda.get_rng_state() if DEVICE.type == "cuda" else None]
        actual = captured(kept[-1])
        _set(draws)
        same(actual, theirs(kernel.arguments(call + 50)))
        same(state(ours, kernel.tensors(0)), state(theirs, kernel.tensors(0)))
        spoil(kept[-1])
    return captured


def _both(captured: Any, theirs: Holder, x: Tensor, draws: list[Any]) -> list[Any]:
    """One call of each function, from the same generator states."""
    _set(draws)
    actual = captured(x.clone())
    _set(draws)
    expected = theirs(x.clone())
    same(actual, expected)
    return [torch.get_rng_state(), torch.cuda.get_rng_state() if DEVICE.type == "cuda" else None]


def _set(draws: list[Any]) -> None:
    torch.set_rng_state(draws[0])
    if draws[1] is not None:
        torch.cuda.set_rng_state(draws[1])
