"""What torch does not document about operators, each name with a probe and a stated fallback."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional

from capture.core.interrupts import let_through

RULES_OF_MODES = "torch._library.simple_registry"
"""The module that torch asks for a rule of a dispatch mode, at each operator under one; it makes an entry for each. No
body runs it without a mode. Where it has another name, that code counts as the body's."""


def fast_operator(op: Any) -> Callable[..., Any]:
    """The operator's C++ entry without the Python wrapper of ``OpOverload`` (0.7 us less a call)."""
    entry = getattr(op, "_op", op)
    return entry if callable(entry) else op  # type: ignore[no-any-return]


def composite(op: Any) -> Callable[..., Any] | None:
    """The C++ kernel of an operator that is made of others, which see a dispatch mode then; None if it has none.

    Inference mode hands such operators to a mode whole, other modes open them before. Without these names they stay
    whole.
    """
    try:
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
        wrapped = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.ADInplaceOrView)
        left_out = _above_modes(views=not wrapped) if has_kernel else None
        return functools.partial(_opened, functools.partial(op._op_dk, key), left_out) if has_kernel else None
    except (AttributeError, RuntimeError, TypeError) as error:  # pragma: no cover - torch without these names
        let_through(error)
        return None


def kernel_of_others(op: Any) -> Callable[..., Any] | None:
    """The kernel of an operator that does nothing but call others, on every device; None without torch's names."""
    try:
        keys = torch._C.DispatchKey
        for key in (keys.CompositeExplicitAutogradNonFunctional, keys.CompositeExplicitAutograd):
            if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
                return functools.partial(op._op_dk, key)
        return None
    except (AttributeError, RuntimeError, TypeError) as error:  # pragma: no cover - torch without these names
        let_through(error)
        return None


def resolving_conjugates() -> contextlib.AbstractContextManager[None]:
    """In the handler of a mode: what an operator itself calls gets conjugates as eager gives them, resolved. Else
    ``pinv`` and ``lstsq`` give wrong complex numbers under any mode (2.11, 2.13), as they do without these names."""
    try:
        left_out = _above_modes(views=False)
    except AttributeError:  # pragma: no cover - torch without these names
        return contextlib.nullcontext()
    return _without(left_out)


def _without(left_out: Any) -> contextlib.AbstractContextManager[None]:
    """In the block, dispatch leaves these keys out no more."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    guard: contextlib.AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(include, exclude - left_out)
    return guard


def _opened(kernel: Callable[..., Any], left_out: Any, *args: Any, **kwargs: Any) -> Any:
    """What the kernel calls runs as if the mode were not there."""
    with _without(left_out):
        return kernel(*args, **kwargs)


@functools.cache
def _above_modes(*, views: bool) -> Any:
    """Below a mode torch leaves out what resolves conjugates, and what has ``views`` share their base's version
    counter; the latter does not apply to an operator whose results torch itself makes views of, after the mode."""
    if not (hasattr(torch._C, "_ForceDispatchKeyGuard") and hasattr(torch._C, "_dispatch_tls_local_exclude_set")):
        raise AttributeError
    names = ("Conjugate", "Negative", "ZeroTensor", *(("ADInplaceOrView",) if views else ()))
    keys = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names]
    return functools.reduce(operator.or_, keys)


def is_higher_order(op: Any) -> bool:
    """Whether it is an operator that takes an operator or a graph; it has no schema."""
    return not hasattr(op, "_schema")


def python_kernel(op: Any, device: str) -> Callable[..., Any] | None:
    """What a higher-order operator runs on a device type, as a Python function; None without such a function."""
    kernels = getattr(op, "py_kernels", {})
    names = (device.partition(":")[0].upper(), "CompositeExplicitAutograd")
    keys = [getattr(torch._C.DispatchKey, name, None) for name in names]
    return next((kernels[key] for key in keys if key is not None and key in kernels), None)


def python_binding(name: str) -> Callable[..., Any] | None:
    """The generated Python binding of an aten operator (1.5 us less a call than the overload), or None.

    Python-level functions of the same name are no bindings: they may do more than the operator.
    """
    for module in (torch, torch.nn.functional, torch._C._nn, torch.special, torch.linalg, torch.fft):
        binding = getattr(module, name, None)
        if isinstance(binding, types.BuiltinFunctionType):
            return binding
    return None


def function_holders() -> tuple[Any, ...]:
    """Where Python code finds torch's functions. Its own recurrent networks ask ``torch._VF``; where that is not there
    they can only ask what is public."""
    return tuple(one for one in (torch, torch.Tensor, getattr(torch, "_VF", None)) if one is not None)


def in_place_binding(name: str) -> Callable[..., Any] | None:
    """The Python binding of an operator that writes its first argument: a function or a method of torch's own, or
    None."""
    if not name.endswith("_") or name.endswith("__"):
        return None
    method = getattr(getattr(torch._C, "TensorBase", None), name, None)  # ``Tensor`` may have another one for a while
    return method if isinstance(method, types.MethodDescriptorType) else python_binding(name)
