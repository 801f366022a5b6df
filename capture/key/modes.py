"""Ambient modes: process and thread state that changes what a body computes; part of the key.

Read in full (2 us) only when the fast comparison with the last reading fails (1 us).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from capture.native import native
from capture.torch_private import capabilities, parametrizations, switches


class Ambient:
    """One combination of modes. There is one object for each, so that comparing and hashing take no time."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    @override
    def __repr__(self) -> str:
        return f"Ambient{self.values!r}"


class Here:
    """One thread in one combination of modes. There is one object for each, known by its identity."""

    __slots__ = ("ambient", "modes")

    def __init__(self, ambient: Ambient) -> None:
        self.ambient = ambient
        self.modes: dict[str, tuple[object, Any]] = {}
        """By type of device: the settings under which a comparison in C holds, and that comparison
        (``modes_like_now``)."""


_known: dict[tuple[Any, ...], Ambient] = {}


def _never() -> bool:
    return False


class _Reading:
    """What the last full reading of the modes found in one thread."""

    __slots__ = ("check", "depth", "here", "mode", "same")

    def __init__(self) -> None:
        self.check: Callable[[], bool] = _never
        """Compares most of the modes."""
        self.same: Callable[[], bool] = _never
        """Compares all modes but those that are fields here, and those that ``here`` compares first."""
        self.depth = 0
        """Number of function modes; -1 where there are too many to be compared."""
        self.mode: object = None
        """The only function mode, if it is the one of torch that holds a default device."""
        self.here = Here(Ambient(()))


class _Thread:
    """What is kept for one thread."""

    __slots__ = ("inside", "known", "readings")

    def __init__(self) -> None:
        self.readings = (_Reading(), _Reading())
        """Without and with gradients: forward and backward passes take turns."""
        self.known: dict[Ambient, Here] = {}
        self.inside = 0
        """How many captured bodies run in this thread now."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


_local = _Local()
_autocast_types = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)
_is_grad = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled
_dispatch_modes = capabilities.dispatch_mode_depth
_anomaly = torch.is_anomaly_enabled
_function_modes = capabilities.function_mode_depth
_function_mode = capabilities.function_mode
_transforms = capabilities.functorch_interpreter
_dual_level = capabilities.dual_level
_tracer = capabilities.is_tracing
_saved_hooks = capabilities.saved_hooks


def here() -> Here | None:
    """This thread and the modes in force now.

    None where a captured function is to run inline: inside the body of another one, or under somebody else's dispatch
    or function mode, functorch transform, tracer, level of forward-mode differentiation, hooks on saved tensors (a
    checkpoint's above all), detection of anomalies, or in a block that keeps parametrized weights.
    """
    thread = _local.thread
    if thread.inside or _dispatch_modes() or _transforms() is not None or _tracer() is not None or _dual_level() >= 0:
        return None
    grad = _is_grad()
    if (grad and (_saved_hooks(True) is not None or _anomaly())) or parametrizations.are_kept():
        return None
    depth = _function_modes()
    last = thread.readings[grad]
    if depth == last.depth and (not depth or _function_mode(0) is last.mode) and last.same():
        return last.here
    if depth and not capabilities.only_default_device_modes():
        return None
    return _read(thread, last)


def modes_like_now(device: str, more: Sequence[switches.Term]) -> Any:
    """A function in C that tells whether ``more`` and what ``here`` looks at in this thread are as they are now.

    Left out is what turns dispatch keys on or off (transforms, tracers, autocast): the comparison of a call's tensors,
    of which one has to be on this kind of ``device``, sees that; it may be empty. It does not see inference mode where
    all are inference tensors, which are alike in both. It sees dispatch modes too, but for those that Dynamo ignores,
    as a watch is one. None where the modes are not compared by these alone."""
    thread, grad, depth = _local.thread, _is_grad(), _function_modes()
    last = thread.readings[grad]
    if last.check is _never or depth != last.depth or depth > 1:
        return None
    terms: list[switches.Term] = [("inside", (thread,), 0), (_dispatch_modes, (), 0)]
    terms.append((_is_inference, (), _is_inference()))
    if hasattr(*capabilities.DUAL_LEVEL):
        holder, name = capabilities.DUAL_LEVEL
        terms.append((name, (holder,), -1))
    terms += [(_saved_hooks, (True,), None), (_anomaly, (), False)] if grad else []
    terms += [(_function_modes, (), depth)]
    terms += [(_function_mode, (0,), last.mode)] if depth else []
    return switches.modes_like_now([*more, *terms, *switches.thread_terms(last.check, device)])


def foreign() -> str | None:
    """A mode or transform of somebody else that has to see every operator, so that the call runs inline; None where
    there is none, or where no recording would be made in any case."""
    if _local.thread.inside or _dispatch_modes() or _tracer() is not None:
        return None
    if _transforms() is not None:
        return "a transform of torch.func"
    if _dual_level() >= 0:
        return "a level of forward-mode differentiation"
    if parametrizations.are_kept():  # a fast path has it among its guards, where the body reads such weights
        return "torch.nn.utils.parametrize.cached()"
    if _is_grad() and _anomaly():
        return "torch.autograd.detect_anomaly()"
    hooked = _is_grad() and _saved_hooks(True) is not None
    return "hooks on saved tensors, as a checkpoint sets them" if hooked else None


def inlined(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of the function, with the captured functions that it calls run inline."""
    thread = _local.thread
    return native.within(thread, "inside", thread.inside + 1, function, arguments)


NAMES = (
    "grad mode", "inference mode", "autocast", "deterministic algorithms", "deterministic warn-only", "default dtype",
    "default device", "number of threads", "backend switches",
)  # fmt: skip
"""What the values of an ``Ambient`` are, in order."""


def ambient() -> Ambient:
    """The modes in force now, free of addresses and the same in every process."""
    switches.settle()
    autocast: tuple[tuple[str, object], ...] = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in _autocast_types if torch.is_autocast_enabled(kind)
    )
    if autocast and not torch.is_autocast_cache_enabled():  # the gradients of several uses are added up in float32
        autocast = (*autocast, ("cache", False))
    values = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        tuple(
            ["ieee" if flag == "none" else flag for flag in switches.switch_values()]
        ),  # what a precision means that was never set
    )
    return _known.setdefault(values, Ambient(values))


def _read(thread: _Thread, last: _Reading) -> Here:
    now = ambient()
    last.here = thread.known.setdefault(now, Here(now))
    depth = _function_modes()
    last.depth, last.mode = (depth, _function_mode(0) if depth else None) if depth < 2 else (-1, None)
    if capabilities.CAPABILITIES.global_state_guard:
        last.check = capabilities.GlobalStateGuard().check
        last.same = _comparison(last.check)
    return last.here


def _comparison(check: Callable[[], bool]) -> Callable[[], bool]:
    """A function that compares what ``check`` does, inference mode, and all switches with their present values."""
    others = (check, (), True), (_is_inference, (), _is_inference())
    same: Callable[[], bool] = switches.modes_like_now(others)
    return same
