"""Switches of torch that a body reads, some kept in C and some computed by modules: a change is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from capture import capture, recordings
from tests.support.device import DEVICE

backends: Any = torch.backends
deterministic: Any = torch.utils.deterministic
Read = Callable[[], bool]
Set = Callable[[bool], Any]


def _attribute(holder: Any, name: str) -> tuple[Read, Set]:
    return lambda: bool(getattr(holder, name)), lambda value: setattr(holder, name, value)


def _engines() -> tuple[str, str]:
    known = backends.quantized.supported_engines
    return known[-1], known[-2]


SWITCHES: dict[str, tuple[Read, Set]] = {
    "cudnn.benchmark": (lambda: backends.cudnn.benchmark, _attribute(backends.cudnn, "benchmark")[1]),
    "cudnn.enabled": (lambda: backends.cudnn.enabled, _attribute(backends.cudnn, "enabled")[1]),
    "cudnn.deterministic": (lambda: backends.cudnn.deterministic, _attribute(backends.cudnn, "deterministic")[1]),
    "by computed names": _attribute(backends.cudnn, "benchmark"),
    "mkldnn": (lambda: backends.mkldnn.enabled, lambda value: backends.mkldnn.set_flags(value)),
    "allow_tf32": (lambda: backends.cuda.matmul.allow_tf32, _attribute(backends.cuda.matmul, "allow_tf32")[1]),
    "float16 sums": (
        lambda: backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        _attribute(backends.cuda.matmul, "allow_fp16_reduced_precision_reduction")[1],
    ),
    "flash": (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
    "attention of cuDNN": (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
    "opt_einsum": (lambda: backends.opt_einsum.enabled, _attribute(backends.opt_einsum, "enabled")[1]),
    "quantized": (
        lambda: backends.quantized.engine == _engines()[0],
        lambda value: setattr(backends.quantized, "engine", _engines()[0 if value else 1]),
    ),
    "fill": (
        lambda: deterministic.fill_uninitialized_memory,
        _attribute(deterministic, "fill_uninitialized_memory")[1],
    ),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "precision": (
        lambda: torch.get_float32_matmul_precision() == "high",
        lambda value: torch.set_float32_matmul_precision("high" if value else "highest"),
    ),
    "warnings": (torch.is_warn_always_enabled, torch.set_warn_always),
    "anomalies": (torch.is_anomaly_enabled, lambda value: torch.autograd.set_detect_anomaly(value, check_nan=False)),
    "threads": (lambda: torch.get_num_threads() == 1, lambda value: torch.set_num_threads(1 if value else 2)),
    "autocast": (lambda: torch.is_autocast_enabled("cuda"), lambda value: torch.set_autocast_enabled("cuda", value)),
    "autocast's dtype": (
        lambda: torch.get_autocast_dtype("cpu") == torch.float16,
        lambda value: torch.set_autocast_dtype("cpu", torch.float16 if value else torch.bfloat16),
    ),
    "autocast's cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
}


@contextlib.contextmanager
def _kept(read: Read, put: Set) -> Iterator[bool]:
    before = read()
    try:
        yield before
    finally:
        put(before)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:.*TF32:UserWarning", "ignore:.*nomaly:UserWarning")
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_a_body_asks_for(name: str) -> None:
    read, put = SWITCHES[name]

    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if read() else x * 3

    x = torch.ones(3, device=DEVICE)
    with torch.no_grad(), _kept(read, put) as before:
        for value in (before, not before, before):
            put(value)
            replays = recordings(body).replays
            for _ in range(5):
                assert body(x)[0].item() == (2.0 if value else 3.0)
            assert recordings(body).replays > replays
