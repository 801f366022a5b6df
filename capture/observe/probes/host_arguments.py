"""Functions of torch whose C++ code reads a tensor's values on the host, and lets no operator tell.

They take lengths or places in the form of a tensor, which has to lie on the CPU: the number of sequences at each time
of a packed sequence, or where ``tensor_split`` cuts. Which operators they run, on which sizes, follows from its values.
Looked through were the composite functions of torch 2.13 that take ``data_ptr`` of an argument.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from capture.observe.host_values import HOST_ARGUMENTS
from capture.torch_private.monkeypatch import Listening, made_once
from capture.torch_private.operators import function_holders

_tolist: Any = torch.Tensor.tolist  # another takes its place while a body is watched
_UNPACKS = "_pad_packed_sequence"


_listening = Listening()
"""To the function that is called for values."""


def host_arguments(read: Callable[..., Any]) -> tuple[AbstractContextManager[None], list[tuple[Any, dict[str, Any]]]]:
    """A block in which ``read`` is called for the values that such a function reads, before it does, in this thread
    (see ``host_reads``), while these stand-ins are in their places."""
    return _listening.by(read), [(holder, _stand_ins(holder, names)) for holder, names in _functions()]


@functools.cache
def _functions() -> tuple[tuple[Any, tuple[str, ...]], ...]:
    """Where they are, and their names there."""
    return tuple([
        (holder, tuple([name for name in HOST_ARGUMENTS if hasattr(holder, name)])) for holder in function_holders()
    ])  # fmt: skip


def _reading(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        values = args[1] if len(args) > 1 else kwargs.get(HOST_ARGUMENTS[name])
        is_watched = threading.get_ident() == _listening.thread
        if not is_watched or not isinstance(values, torch.Tensor) or values.is_floating_point():
            return original(*args, **kwargs)
        _listening.to(name, values, _tolist, (), {})
        result = original(*args, **kwargs)
        if name == _UNPACKS:  # it writes the lengths without an operator, and they follow from what was read
            padded, lengths = result
            result = padded, torch.tensor(_tolist(lengths), dtype=lengths.dtype, device="cpu")
        return result

    return function


_stand_ins = made_once(_reading)
