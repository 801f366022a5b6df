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
from capture.guards.guard import Guard
from capture.key.attributes import HEAP
from capture.key.packages import is_library, module_of, package_of
from capture.state.source import Source

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
_OF_CLASSES = ("__name__", "__qualname__")
_OF_FUNCTIONS = (*_OF_CLASSES, "__module__", "__doc__")
"""What guards of the kind ``definitions`` compare in C."""


def _members(table: Any) -> object:
    return None if table is None else tuple(table.values())


def _of_storage(tensor: torch.Tensor) -> object:
    storage = tensor.untyped_storage()
    return storage.nbytes(), storage.is_shared(), tensor.storage_offset()


def _weak_subclasses(kind: type) -> object:
    below: list[type] = type.__subclasses__(kind)
    return tuple(map(weakref.ref, below))


def same_definitions(asked: Sequence[Any], name: str, *, of_classes: bool) -> Guard | None:
    """A guard that all of these functions, or classes, tell of themselves what they do now; None where C code keeps
    nothing of the kind."""
    path = f"{name} of {'classes' if of_classes else 'functions'}"
    if name in (_OF_CLASSES if of_classes else _OF_FUNCTIONS):
        read = vars(type)[name].__get__ if of_classes else operator.attrgetter(name)
        told = [None if of_classes and not one.__flags__ & HEAP else read(one) for one in asked]
        return Guard("definitions", Source("root", tuple(asked), name, path), tuple(told))
    if of_classes != (name == "__subclasses__"):  # the others are in the ``__dict__`` of a class
        return None
    same = SameAnswers(asked, _weak_subclasses if of_classes else operator.attrgetter(name))
    return Guard("value", Source("call", same, None, path), True)


def same_of_tensors(asked: Sequence[torch.Tensor], name: str) -> Guard:
    """A guard that all of these tensors answer as they do now."""
    same: Callable[[], bool]
    try:
        same = SameAnswers(asked, OF_TENSORS[name])
    except (RuntimeError, NotImplementedError) as error:  # a tensor without a storage
        let_through(error)
        same = _never
    return Guard("value", Source("call", same, None, f"{name} of tensors"), True)


def _never() -> bool:
    return False


def same_abstract_classes(kinds: Iterable[type], others: Set[type]) -> Callable[[], bool] | None:
    """A function that tells whether users' abstract classes remember the same as now: which of the other classes count
    as their own, and which do not. They ask again once they forget. None where there are none: only a class that asks a
    ``__subclasshook__`` of users, its own or that of a class below it, may give another answer then."""
    asked = [kind for kind in kinds if _is_users(kind) and "_abc_impl" in kind.__dict__ and _asks_a_hook(kind)]
    numbers = frozenset(map(id, others))
    return SameAnswers(asked, functools.partial(_remembered, numbers)) if asked else None


def _is_users(kind: type) -> bool:
    return not is_library(package_of(module_of(kind)))


def _asks_a_hook(kind: type) -> bool:
    """Whether it, or a class below it, which it asks in turn, has such a hook."""
    todo, seen = [kind], {kind}
    while todo:
        below: list[type] = type.__subclasses__(one := todo.pop())
        if any("__subclasshook__" in base.__dict__ and _is_users(base) for base in one.__mro__):
            return True
        todo += [subclass for subclass in below if subclass not in seen]
        seen.update(below)
    return False


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
