"""Constructors of tensor subclasses (``MyTensor([1.0])``) in a body whose operators are seen.

torch makes the values by an operator, whose result Python sees there, and then refuses to give that result another
class (2.11 to 2.14). In the block the tensor is made as a plain one first, and then given its class as ``as_subclass``
does. Without subclasses of users nothing is replaced: Python would call the constructor in another way from then on,
which takes 0.3 us more for each ``torch.Tensor(...)``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from capture.torch_private.capabilities import dispatch_mode_depth
from capture.torch_private.monkeypatch import replaced
from capture.torch_private.operator_watch import is_on

_new: Any = torch.Tensor.__new__


def _seen(cls: type[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    if cls is torch.Tensor or not (is_on() or dispatch_mode_depth()):
        return _new(cls, *args, **kwargs)
    return _new(torch.Tensor, *args, **kwargs).as_subclass(cls)


def subclass_constructors() -> contextlib.AbstractContextManager[Any]:
    """In the block subclasses of tensors can be made of values, too."""
    own = (one.__module__.partition(".")[0] != "torch" for one in torch.Tensor.__subclasses__())
    return replaced(torch.Tensor, {"__new__": staticmethod(_seen)}) if any(own) else contextlib.nullcontext()
