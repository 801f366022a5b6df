"""Names of torch for tensors that hold other tensors, each behind a probe with a stated fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from capture.native import native

try:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as _is_wrapper_type
except ImportError:  # pragma: no cover - without it such tensors are not opened, and what takes them runs eagerly

    def _is_wrapper_type(t: type) -> bool:  # type: ignore[misc]
        return False


_get_mode = getattr(torch._C, "_get_dispatch_mode", None)
_FAKE = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "FAKE", None)


try:
    from torch.nested._internal.nested_tensor import NestedTensor as _Nested
except ImportError:  # pragma: no cover - a torch whose nested tensors hold no others
    _Nested = None  # type: ignore[assignment, misc]


_disabled: Any = getattr(torch._C, "DisableTorchFunctionSubclass", None)
_is_enabled: Callable[[], bool] = getattr(torch._C, "_is_torch_function_enabled", lambda: True)
"""Without this name it counts as on: what a program switches off is on again where a signal ends a call of ours."""
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


def unseen(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """What the function asks of tensors runs no ``__torch_function__`` of a subclass, which may note or print what it
    sees. Without this name of torch's it does."""
    if _disabled is None:
        return function

    @functools.wraps(function)
    def quiet(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not _is_enabled():
            return function(*args, **kwargs)
        context = _disabled()
        leave = functools.partial(context.__exit__, None, None)  # it may run twice, and where nothing was entered
        result: _Result = native.guarded(_called_in, (context, function, args, kwargs), leave)
        return result

    return quiet


def _called_in(context: Any, function: Callable[..., _Result], args: Any, kwargs: Any) -> _Result:
    with context:
        return function(*args, **kwargs)


def is_wrapper(kind: type) -> bool:
    """Whether it is a tensor subclass that ``__tensor_flatten__`` opens and ``__tensor_unflatten__`` closes again."""
    return issubclass(kind, torch.Tensor) and _is_wrapper(kind)


@functools.cache  # of kinds of tensors alone: a class that one module has for itself would keep that alive
def _is_wrapper(kind: type) -> bool:
    if _Nested is not None and issubclass(kind, _Nested):
        return False  # the shape of a nested tensor is that of its values
    return bool(_is_wrapper_type(kind))


def open_wrapper(value: Any) -> tuple[dict[str, Any], Any]:
    """Attributes that hold its tensors (and, from torch 2.13 on, other objects), and the rest. Waits for the collective
    that makes the tensor, where it is one that is waited for at its first use."""
    names, context = value.__tensor_flatten__()
    wait = getattr(value, "trigger_wait", None)
    if wait is not None:
        wait()
    return {name: getattr(value, name) for name in names}, context


def only_shapes() -> bool:
    """Whether operators are run on tensors without values now, as ``DTensor`` does to learn shapes. Without these names
    in torch they count as the body's own, and what uses them runs eagerly."""
    return _get_mode is not None and _FAKE is not None and _get_mode(_FAKE) is not None
