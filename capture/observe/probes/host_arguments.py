"""Functions of torch whose C++ code reads a tensor's values on the host, and lets no operator tell.

They take lengths or places in the form of a tensor, which has to lie on the CPU: the number of sequences at each time
of a packed sequence, or where ``tensor_split`` cuts. Which operators they run, on which sizes, follows from its values.
Looked through were the composite functions of torch 2.13 that take ``data_ptr`` of an argument.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from capture.observe.host_values import HOST_ARGUMENTS
from capture.torch_private.monkeypatch import replaced
from capture.torch_private.operators import function_holders

_tolist: Any = torch.Tensor.tolist  # another takes its place while a body is watched
_UNPACKS = "_pad_packed_sequence"


@contextmanager
def host_arguments(read: Callable[..., Any]) -> Iterator[None]:
    """Call ``read`` for the values that such a function reads, before it does, in this thread: see ``host_reads``."""
    thread = threading.get_ident()
    with ExitStack() as stack:
        for holder in function_holders():
            originals = {name: getattr(holder, name) for name in HOST_ARGUMENTS if hasattr(holder, name)}
            others = {name: _reading(name, original, read, thread) for name, original in originals.items()}
            stack.enter_context(replaced(holder, others))
        yield


def _reading(name: str, original: Callable[..., Any], read: Callable[..., Any], thread: int) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        values = args[1] if len(args) > 1 else kwargs.get(HOST_ARGUMENTS[name])
        if threading.get_ident() != thread or not isinstance(values, torch.Tensor) or values.is_floating_point():
            return original(*args, **kwargs)
        read(name, values, _tolist, (), {})
        result = original(*args, **kwargs)
        if name == _UNPACKS:  # it writes the lengths without an operator, and they follow from what was read
            padded, lengths = result
            result = padded, torch.tensor(_tolist(lengths), dtype=lengths.dtype, device="cpu")
        return result

    return function
