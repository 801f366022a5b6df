"""Switches of torch that choose kernels or change what they compute: which there are, and how each is read.

Modes of a thread and switches of the process are part of a call's key. Most are read by builtins without arguments,
which the C module calls directly, 5 ns each; ``setter_calls`` sees to it that the others need not be read. A getter
that a torch lacks is left out: such a torch has no such switch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from capture.core.data import frozen
from capture.core.interrupts import let_through, suppress
from capture.native import native
from capture.torch_private.setter_calls import SETTER_CALLS, notices_setters


@frozen(kw_only=True)
class Switch:
    """One switch that every call compares."""

    name: str
    read: Callable[..., object]
    arguments: tuple[Any, ...] = ()
    nanoseconds: int = 5

    def value(self) -> object:
        """Its value now, free of addresses, so that it can be part of a key in this process or another: a list or an
        enumeration as text."""
        found = self.read(*self.arguments)
        return found if isinstance(found, (bool, int, str)) else str(found)


_NAMES: tuple[tuple[str, str, int], ...] = (
    ("_get_flash_sdp_enabled", "", 5),
    ("_get_math_sdp_enabled", "", 5),
    ("_get_overrideable_sdp_enabled", "", 5),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "", 5),
    ("_get_sdp_priority_order", "", 30),
    ("_get_mkldnn_enabled", "cpu", 5),
    ("_get_mkldnn_deterministic", "cpu", 5),
    ("_get_cpu_allow_fp16_reduced_precision_reduction", "cpu", 5),
    ("_get_mem_efficient_sdp_enabled", "cuda", 5),
    ("_get_cudnn_sdp_enabled", "cuda", 5),
    ("_get_cudnn_enabled", "cuda", 5),
    ("_get_cudnn_deterministic", "cuda", 5),
    ("_get_cudnn_benchmark", "cuda", 5),
    ("_get_cudnn_depthwise_kernel", "cuda", 30),
    ("_get_fa3_sdp_enabled", "cuda", 5),
    ("_get_cublas_allow_fp16_reduced_precision_reduction", "cuda", 50),
    ("_get_cublas_allow_bf16_reduced_precision_reduction", "cuda", 50),
    ("_get_cublas_allow_fp16_accumulation", "cuda", 5),
    ("_get_blas_preferred_backend", "cuda", 110),
    ("_get_linalg_preferred_backend", "cuda", 110),
)
"""Getters in ``torch._C``, kind of device, price."""
_PRECISIONS = [(backend, op) for backend in ("mkldnn", "cuda") for op in ("matmul", "conv", "rnn")]
_LEGACY = ("_get_float32_matmul_precision", "_get_cublas_allow_tf32", "_get_cudnn_allow_tf32")


def settle() -> None:
    """Have torch make what it makes at the first use of a device, before it is part of a key."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        _settle_attention()


@functools.cache
def _settle_attention() -> None:
    """On some devices (H100, H200) torch 2.11 puts cuDNN first among the kernels for attention whenever it chooses one,
    whatever the order was: have it choose once, before the order is part of a key. Without the operator a function
    with attention is watched once more."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is not None:
        with torch.no_grad(), suppress(RuntimeError):
            query = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
            choose(query, query, query)


def _legacy_precision() -> str:
    """Without precisions by backend. The getters raise where a program mixes the old settings and the new ones."""
    found: list[object] = []
    for name in _LEGACY:
        with suppress(RuntimeError, AttributeError):
            found.append(getattr(torch._C, name)())
    return str(found)


def _switches() -> tuple[Switch, ...]:
    built = torch.backends.cuda.is_built()
    switches = [
        Switch(name=name.removeprefix("_get_"), read=getattr(torch._C, name), nanoseconds=price)
        for name, device, price in _NAMES
        if hasattr(torch._C, name) and (built or device != "cuda")
    ]  # fmt: skip
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is None:
        return (*switches, Switch(name="float32 precision", read=_legacy_precision, nanoseconds=500))
    switches += [
        Switch(name=f"float32 precision of {backend} {op}", read=precision, arguments=(backend, op),
               nanoseconds=70)
        for backend, op in _PRECISIONS
        if built or backend == "mkldnn"
    ]  # fmt: skip
    return tuple(switches)


SWITCHES = _switches()


def switch_values() -> tuple[object, ...]:
    """The present values of all switches."""
    return tuple([switch.value() for switch in SWITCHES])


_THREAD = ("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only", "_is_torch_function_enabled")
Read = Callable[..., object] | str
Term = tuple[Read, tuple[Any, ...], object] | tuple[Read, tuple[Any, ...], object, str]
"""A function, its arguments, what it gives now, and the attribute of that which counts, if it is one; or the name of an
attribute, the object that has it, and its value."""
SLOW = 30
"""Nanoseconds from which on a switch is not read while nobody set one (``setter_calls``)."""


def modes_like_now(terms: Sequence[Term]) -> Any:
    """A function in C that tells whether these terms hold and all switches are as they are now: those of other kinds of
    device, too, as the body's Python may read them. The slow ones are compared once after each time that somebody set
    one."""
    quick = [_term(switch) for switch in SWITCHES if switch.nanoseconds < SLOW]
    count = SETTER_CALLS.count  # before they are read, so that a change meanwhile is noticed
    slow = _slow_terms([switch for switch in SWITCHES if switch.nanoseconds >= SLOW])
    if notices_setters():
        return native.Modes((*terms, *quick), (native.Modes(tuple(slow)), SETTER_CALLS, "count", count))
    return native.Modes((*terms, *quick, *slow))


def _slow_terms(slow: Sequence[Switch]) -> list[Term]:
    convolutions = [one for one in slow if one.arguments in (("cuda", "conv"), ("cuda", "rnn"))]
    both = _both_precisions() if len(convolutions) == 2 else None
    if both is None:
        return [_term(one) for one in slow]
    return [*[_term(one) for one in slow if one not in convolutions], both]


def thread_terms(check: Callable[[], bool], device: str) -> list[Term]:
    """What ``GlobalStateGuard`` compares (``check``), read one by one, which takes half the time: it looks up
    precisions by name, which are among the switches, and asks each kind of device for autocast.

    ``device``: the kind that some tensor of the call is on: where none has autocast on now, the comparison of the
    call's tensors tells, as autocast turns a dispatch key on. Empty if there is no such tensor."""
    autocast = getattr(torch._C, "_is_any_autocast_enabled", None)
    getters: list[Any] = [getattr(torch._C, name, None) for name in _THREAD]
    if not device or autocast is None or autocast() or None in getters:
        return [(check, (), True)]
    read: list[Callable[[], object]] = [torch.is_grad_enabled, torch.get_default_dtype, torch.get_num_threads, *getters]
    return [(getter, (), getter()) for getter in read]


def _term(switch: Switch) -> Term:
    found = switch.read(*switch.arguments)
    if hasattr(type(found), "__members__"):  # torch's enumerations: their equality takes as long as all other switches
        return switch.read, switch.arguments, found.value, "value"  # type: ignore[attr-defined]
    return switch.read, switch.arguments, found


def _both_precisions() -> Term | None:
    """One getter for what cuDNN does in convolutions and recurrent layers, at half the price. It raises where the two
    are not the same, which the comparison takes for a change; None where they are not the same now."""
    try:
        read = torch._C._get_cudnn_allow_tf32
        return read, (), read()
    except (AttributeError, RuntimeError) as error:
        let_through(error)
        return None
