"""Registration of container classes, with the functions that open and rebuild their objects."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from capture.core.errors import AnnotationError
from capture.key import signature

T = TypeVar("T")


def register_container(
    cls: type[T],
    flatten: Callable[[T], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Sequence[Any], Any], T],
) -> None:
    """Open objects of exactly this class, among arguments and results, by functions of your own.

    Objects of plain Python classes are opened without it, member by member. It is for classes that keep tensors where
    Python does not show them, or that have members which need not be compared.

    Args:
        cls: the class. Registered for the process, before the first call that gets such an object.
        flatten: gives the members (tensors and any other values) and, as a hashable value, everything else that tells
            two objects apart. It runs in every call and must not change anything.
        unflatten: makes an object from members and the hashable value. A recorded body gets such an object in place of
            the caller's.

    Raises:
        AnnotationError: ``cls`` is no class, or one that is opened without registration, such as ``dict``.
    """
    kind: object = cls
    if not isinstance(kind, type) or kind in (tuple, list, dict):
        raise AnnotationError(f"register_container takes a class of your own, not {cls!r}")
    signature.register_container(cls, flatten, unflatten)
