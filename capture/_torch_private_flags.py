"""The part of ``_torch_private`` that reads backend switches which change what operators compute.

The same rule holds: each name is looked up behind a probe, with a stated fallback.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_FLAGS = dict.fromkeys(
    ("_get_mkldnn_enabled", "_get_mkldnn_deterministic", "_get_cpu_allow_fp16_reduced_precision_reduction"), "cpu",
) | dict.fromkeys(
    ("_get_flash_sdp_enabled", "_get_math_sdp_enabled", "_get_overrideable_sdp_enabled",
     "_get_math_sdp_allow_fp16_bf16_reduction", "_get_sdp_priority_order"),
    "",
)  # fmt: skip
_CUDA_FLAGS = dict.fromkeys(
    ("_get_mem_efficient_sdp_enabled", "_get_cudnn_sdp_enabled", "_get_cudnn_enabled", "_get_cudnn_deterministic",
     "_get_cudnn_benchmark", "_get_cudnn_depthwise_kernel", "_get_fa3_sdp_enabled",
     "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction",
     "_get_cublas_allow_fp16_accumulation", "_get_blas_preferred_backend", "_get_linalg_preferred_backend"),
    "cuda",
)  # fmt: skip
"""Getters, and the kind of device whose operators they are about; empty for all."""
_PRECISIONS = [(backend, op) for backend in ("mkldnn", "cuda") for op in ("matmul", "conv", "rnn")]


@functools.cache
def settle() -> None:
    """On some devices (H100, H200) torch 2.11 puts cuDNN first among the kernels for attention whenever it chooses one,
    whatever the order was: have it choose once, before the order is part of a key. Without the operator a function
    with attention is watched once more."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is not None:
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            query = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
            choose(query, query, query)


def _legacy_precision() -> tuple[object, ...]:
    """Without precisions by backend. The getters raise where a program mixes the old settings and the new ones."""
    found: list[object] = []
    for name in ("_get_float32_matmul_precision", "_get_cublas_allow_tf32", "_get_cudnn_allow_tf32"):
        with contextlib.suppress(RuntimeError, AttributeError):
            found.append(getattr(torch._C, name)())
    return tuple(found)


def _comparable(getter: Callable[[], object]) -> Callable[[], object]:
    """A list or a torch enumeration as text, which can be part of a key, in this process or another."""
    return getter if isinstance(getter(), (bool, int, str)) else lambda: str(getter())


FlagCall = tuple[str, Callable[..., object], tuple[Any, ...]]
"""The kind of device, a function, and its arguments."""


def _flag_calls() -> list[FlagCall]:
    built = torch.backends.cuda.is_built()
    names = _FLAGS | (_CUDA_FLAGS if built else {})
    calls: list[FlagCall] = [
        (kind, _comparable(getattr(torch._C, name)), ()) for name, kind in names.items() if hasattr(torch._C, name)
    ]
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is None:
        return [*calls, ("", _legacy_precision, ())]
    kinds = {"mkldnn": "cpu", "cuda": "cuda"}
    return calls + [(kinds[one[0]], precision, one) for one in _PRECISIONS if built or "mkldnn" in one]


FLAG_CALLS = _flag_calls()
"""What gives a backend switch each."""


def flag_calls(device: str) -> list[tuple[Callable[..., object], tuple[Any, ...]]]:
    """Switches for operators on one kind of device, but for TF32 in cuBLAS, which ``GlobalStateGuard`` compares."""
    return [
        (function, arguments)
        for kind, function, arguments in FLAG_CALLS
        if kind in ("", device) and arguments != ("cuda", "matmul")
    ]


def _flag_reader() -> Callable[[], tuple[Any, ...]]:
    scope = {f"f{index}": function for index, (_, function, _) in enumerate(FLAG_CALLS)}
    terms = [f"f{index}({', '.join(map(repr, arguments))})" for index, (_, _, arguments) in enumerate(FLAG_CALLS)]
    reader: Callable[[], tuple[Any, ...]] = eval(f"lambda: ({', '.join(terms)},)", scope)  # noqa: S307 - made above
    return reader


# Backend switches, whether ``GlobalStateGuard`` compares them or not (0.05 us each, precisions and texts 0.2 to 0.5).
# One that torch lacks is left out.
unguarded_flags: Callable[[], tuple[Any, ...]] = _flag_reader()
