"""What functions, classes and tensors tell of themselves that is in no ``__dict__``: C code keeps it.

One guard compares all objects that were asked for the same thing.
"""

from __future__ import annotations

import abc
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch

from capture.core.interrupts import let_through
from capture.key.packages import is_library, module_of, package_of

OF_TENSORS: dict[str, Callable[[torch.Tensor], object]] = {
    "is_leaf": operator.attrgetter("is_leaf"),
    "retains_grad": operator.attrgetter("retains_grad"),
    "output_nr": operator.attrgetter("output_nr"),
    "_backward_hooks": lambda tensor: _members(tensor._backward_hooks),
    "_post_accumulate_grad_hooks": lambda tensor: _members(getattr(tensor, "_post_accumulate_grad_hooks", None)),
    "is_shared": torch.Tensor.is_shared,
    "untyped_storage": lambda tensor: _of_storage(tensor),
    "storage": lambda tensor: _of_storage(tensor),
}
"""By the name that code has for it."""


def _members(table: Any) -> object:
    return None if table is None else tuple(table.values())


def _of_storage(tensor: torch.Tensor) -> object:
    storage = tensor.untyped_storage()
    return storage.nbytes(), storage.is_shared(), tensor.storage_offset()


def _weak_subclasses(kind: type) -> object:
    below: list[type] = type.__subclasses__(kind)
    return tuple(map(weakref.ref, below))


def same_answers(asked: Sequence[Any], name: str, *, is_class: bool | None = None) -> Callable[[], bool] | None:
    """A function that tells whether all of these answer as they do now; None where they give no answer. ``is_class``:
    they are classes, or functions; None: tensors."""
    read: Callable[[Any], object]
    if is_class is None:
        read = OF_TENSORS[name]
    elif is_class:
        if name == "__subclasses__":
            read = _weak_subclasses
        elif name in ("__name__", "__qualname__"):  # the others are in the ``__dict__``
            read = vars(type)[name].__get__
        else:
            return None
    elif name == "__subclasses__":
        return None
    else:
        read = operator.attrgetter(name)
    try:
        return SameAnswers(asked, read)
    except (RuntimeError, NotImplementedError) as error:  # a tensor without a storage
        let_through(error)
        return _never


def _never() -> bool:
    return False


def same_abstract_classes(kinds: Iterable[type], others: Set[type]) -> Callable[[], bool] | None:
    """A function that tells whether users' abstract classes remember the same as now: which of the other classes count
    as their own, and which do not. They ask again once they forget. None where there are none."""
    asked = [kind for kind in kinds if "_abc_impl" in kind.__dict__ and not is_library(package_of(module_of(kind)))]
    numbers = frozenset(map(id, others))
    return SameAnswers(asked, functools.partial(_remembered, numbers)) if asked else None


def _remembered(numbers: frozenset[int], kind: type) -> object:
    *tables, _ = vars(abc)["_get_dump"](kind)
    return [numbers & {id(reference()) for reference in table} for table in tables]


class SameAnswers:
    """A guard's function: each of these objects gives the same answer as when this was made."""

    __slots__ = ("_answers", "_asked", "_read")

    def __init__(self, asked: Sequence[Any], read: Callable[[Any], object]) -> None:
        self._asked, self._read = tuple(asked), read
        self._answers = tuple(map(read, self._asked))

    def __call__(self) -> bool:
        return tuple(map(self._read, self._asked)) == self._answers
