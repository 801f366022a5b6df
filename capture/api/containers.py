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
    """Open objects of exactly this class by functions of your own, among arguments and results.

    Objects of plain Python classes are opened without it, by what they hold. It is for classes that keep tensors where
    Python does not show them, or that hold what need not be compared.

    Parameters
    ----------
    cls
        The class. Registered for the process, before the first call that gets such an object.
    flatten
        Gives the members, tensors and any other values, and all else that tells two objects apart, which has to be
        hashable. It runs in every call and must not change anything.
    unflatten
        Makes an object of members and what ``flatten`` gave beside them. A recorded body gets such an object in place
        of the caller's.

    Raises
    ------
    AnnotationError
        ``cls`` is no class, or one that is opened already without being asked, such as ``dict``.
    """
    kind: object = cls
    if not isinstance(kind, type) or kind in (tuple, list, dict):
        raise AnnotationError(f"register_container takes a class of your own, not {cls!r}")
    signature.register_container(cls, flatten, unflatten)
