"""NumPy arrays among the arguments that are inputs, as tensors are: their memory is copied in or read where it is.

The binder gives a tensor on the memory of each such array in its place, and one text more, which tells where arrays
are; so keys, copies and fast paths know tensors alone. The function is called with arrays again: the caller's own, or,
where it runs on other tensors than the caller's, arrays on the memory of those. What it makes of an array is found by
the memory (``observe.dispatch_mode``).
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import evolve

from capture.core.data import frozen
from capture.key.numpy_arrays import is_array_type
from capture.key.signature import Binder
from capture.torch_private.capabilities import unseen, without_function_modes

PARAMETER = "<arrays>"
"""Name of the additional parameter."""
_DEEPEST, _MOST = 3, 64
_SPLITS = frozenset(". ")
"""Of names with these the paths would tell nothing."""
_numpy: Any = torch.Tensor.numpy  # torch's own, also while a body is watched
_KINDS = frozenset("biuf")
_own: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
"""By ``id`` of a tensor that a binder made, the array that it lies on."""


def may_be_input(value: Any) -> bool:
    """A plain array that a tensor can lie on, and that the body may write."""
    kind = type(value)
    if kind.__name__ != "ndarray" or not is_array_type(kind) or value.dtype.kind not in _KINDS:
        return False
    flags, size = value.flags, value.itemsize
    is_plain = flags.writeable and flags.aligned and value.dtype.isnative and value.size > 0
    return bool(is_plain and all(one >= 0 and one % size == 0 for one in value.strides))


def holds_arrays(values: tuple[Any, ...]) -> bool:
    """Some of these are, or hold, arrays that can be inputs."""
    return any(next(_arrays(value, ""), None) is not None for value in values)


def reaches(values: tuple[Any, ...]) -> list[tuple[int, int]]:
    """The addresses at which such arrays begin and end."""
    return [numpy().lib.array_utils.byte_bounds(one) for value in values for _, one in _arrays(value, "")]


def _arrays(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind in (tuple, list, dict):
        is_named = kind is not dict or all(type(name) is str and not _SPLITS.intersection(name) for name in value)
        if is_named and len(value) <= _MOST and path.count(".") < _DEEPEST:
            for name, member in value.items() if kind is dict else enumerate(value):
                yield from _arrays(member, f"{path}.{name}")
    elif may_be_input(value):
        yield path, value


def _replaced(value: Any, replace: Callable[[Any], Any], depth: int = 0) -> Any:
    """The same structure, anew where something in it is replaced."""
    kind = type(value)
    if kind not in (tuple, list, dict):
        return replace(value)
    if len(value) > _MOST or depth >= _DEEPEST:
        return value
    members = list(value.values()) if kind is dict else value
    made = [_replaced(one, replace, depth + 1) for one in members]
    if all(one is other for one, other in zip(made, members, strict=True)):
        return value
    return dict(zip(value, made, strict=True)) if kind is dict else kind(made)


def with_arrays(binder: Binder, make: Callable[[torch.Tensor], Any] | None = None) -> Binder:
    """Binds calls with tensors in the place of arrays. ``make``: gives the arrays that the function is called with."""
    bound = _Bound(binder, make)
    return evolve(
        binder, names=(*binder.names, PARAMETER), values=bound.values, call=bound.call, by_position=bound.by_position
    )


@frozen(eq=False)
class _Bound:
    binder: Binder
    make: Callable[[torch.Tensor], Any] | None

    def values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The values of the parameters, and where there are arrays."""
        return with_tensors(self.binder.values(*args, **kwargs))

    def call(self, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        """Call the function with arrays."""
        return self.binder.call(function, as_arrays(values[:-1], values[-1], self.make))

    def by_position(self, _: tuple[Any, ...]) -> int | None:
        """None: the positions alone would not tell arrays from tensors."""
        return None


def with_tensors(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values with tensors in the places of arrays, and where those are. Arrays that share memory stay as they
    are."""
    found = [one for at, value in enumerate(values) for one in _arrays(value, str(at))]
    if not found or _overlap([array for _, array in found]):
        return (*values, "")
    return (*[_replaced(value, _tensor_on) for value in values], " ".join([path for path, _ in found]))


def _overlap(arrays: Sequence[Any]) -> bool:
    if len(arrays) == 1:
        return False
    spans = sorted(numpy().lib.array_utils.byte_bounds(one) for one in arrays)
    return any(one[1] > other[0] for one, other in itertools.pairwise(spans))


def _tensor_on(value: Any) -> Any:
    if not may_be_input(value):
        return value
    tensor = torch.from_numpy(value)
    key = id(tensor)
    _own[key] = weakref.ref(tensor, lambda _: _own.pop(key, None)), value
    return tensor


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        if type(values) is dict:
            values = next(value for key, value in values.items() if str(key) == name)
        else:
            values = values[int(name)]
    return values


def tensors_of(values: tuple[Any, ...], paths: str) -> list[torch.Tensor]:
    """Those that stand for arrays. ``paths``: the additional value."""
    found = [_at(values, path) for path in paths.split()]
    return [one for one in found if isinstance(one, torch.Tensor)]


def as_arrays(
    values: tuple[Any, ...], paths: str, make: Callable[[torch.Tensor], Any] | None = None
) -> tuple[Any, ...]:  # fmt: skip
    """The values with arrays in the places of those tensors: the caller's own where there are some, unless ``make``
    gives others."""
    if not paths:
        return values
    make = make or array_on
    standing = {id(one): one for one in tensors_of(values, paths)}
    return tuple([_replaced(value, lambda one: make(one) if id(one) in standing else one) for value in values])


def array_on(tensor: torch.Tensor) -> Any:
    """The caller's array, or one on this memory."""
    known = _own.get(id(tensor))
    if known is not None and known[0]() is tensor:
        return known[1]
    with unseen(), without_function_modes():
        return _numpy(tensor)


def given(binder: Binder, values: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors of a call that stand for arrays."""
    mark = marked(binder.names)
    return tensors_of(values, values[mark]) if mark >= 0 else []


def marked(names: tuple[str, ...]) -> int:
    """The position of the additional value in a binder's values; -1: arrays are no inputs."""
    return names.index(PARAMETER) if PARAMETER in names else -1


def numpy() -> Any:
    """NumPy, once it is imported."""
    return sys.modules["numpy"]
