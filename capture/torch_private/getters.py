"""C functions by which torch tells Python its settings and those of the thread, and properties of its tensors.

What a body asks such a function for is no attribute of an object, so no guard on attributes covers it. There is no list
of them: a function counts as a getter by its name, and by returning a plain value when it is called without arguments
or with a kind of device. A getter with another name is not seen.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator

import torch

from capture.core.interrupts import let_through
from capture.torch_private.switches import SWITCHES

_NAME = re.compile(r"_?(get|is|are|has)_\w+")
_KEYED = frozenset({
    "is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "get_num_threads",
    "_is_torch_function_enabled", "_get_tracing_state", "_are_functorch_transforms_active",
})  # fmt: skip
"""Getters whose values are part of every key already, as those of ``switches`` are."""
PROPERTIES_OF_TENSORS = tuple(
    name for name, one in vars(torch._C.TensorBase).items() if isinstance(one, types.GetSetDescriptorType)
)
"""All that C code answers of a tensor as an attribute; what later versions of torch add, too."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
Getter = Callable[..., object]


@functools.cache
def _keyed() -> frozenset[str]:
    return frozenset(getattr(one.read, "__name__", "") for one in SWITCHES) | _KEYED


@functools.cache
def _getter(name: str) -> Getter | None:
    """The getter of this name, if there is one. To sort all of torch's names takes longer than a small body's run."""
    if not _NAME.fullmatch(name) or name in _keyed():
        return None
    for module in (torch, torch._C):
        if isinstance(value := vars(module).get(name), types.BuiltinFunctionType):
            return value
    return None


def asked_of_torch(names: Iterable[str]) -> Iterator[tuple[str, Callable[[], object], object]]:
    """Each of these names that is a getter's: what it reads, how, and what that gives now."""
    for name in sorted(set(names)):
        getter = _getter(name)
        if getter is None:
            continue
        for arguments in ((), ("cpu",), ("cuda",)):
            read = functools.partial(getter, *arguments) if arguments else getter
            try:
                value = read()
            except Exception as error:  # noqa: BLE001 - it takes other arguments, so it is no getter
                let_through(error)
                continue
            if all(isinstance(member, _PLAIN) for member in (value if isinstance(value, tuple) else (value,))):
                yield f"torch.{name}({', '.join(map(repr, arguments))})", read, value
