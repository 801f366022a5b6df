"""The part of ``_torch_private`` that reads backend switches which change what operators compute.

The same rule holds: each name is looked up behind a probe, with a stated fallback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_FLAG_NAMES = ("_get_mkldnn_enabled", "_get_flash_sdp_enabled", "_get_math_sdp_enabled")
_CUDA_FLAG_NAMES = (
    "_get_mem_efficient_sdp_enabled", "_get_cudnn_sdp_enabled", "_get_cudnn_enabled", "_get_cudnn_deterministic",
    "_get_cudnn_benchmark",
)  # fmt: skip
_PRECISIONS = [(backend, op) for backend in ("mkldnn", "cuda") for op in ("matmul", "conv", "rnn")]


def _legacy_precision() -> tuple[object, ...]:
    """Without precisions by backend. The getters raise where a program mixes the old settings and the new ones."""
    found: list[object] = []
    for name in ("_get_float32_matmul_precision", "_get_cublas_allow_tf32", "_get_cudnn_allow_tf32"):
        with contextlib.suppress(RuntimeError, AttributeError):
            found.append(getattr(torch._C, name)())
    return tuple(found)


def _flag_reader() -> Callable[[], tuple[Any, ...]]:
    built = torch.backends.cuda.is_built()
    names = _FLAG_NAMES + (_CUDA_FLAG_NAMES if built else ())
    flags = {name: getattr(torch._C, name) for name in names if hasattr(torch._C, name)}
    terms = [f"{name}()" for name in flags]
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    flags["precision"] = _legacy_precision if precision is None else precision
    if precision is None:
        terms.append("precision()")
    else:
        terms += [f"precision{one}" for one in _PRECISIONS if built or "mkldnn" in one]
    source = f"lambda: ({', '.join(terms)},)"
    reader: Callable[[], tuple[Any, ...]] = eval(source, flags)  # noqa: S307 - the names above
    return reader


# Backend switches that ``GlobalStateGuard`` does not compare (0.05 us each, precisions 0.2). One that torch lacks is
# left out.
unguarded_flags: Callable[[], tuple[Any, ...]] = _flag_reader()
