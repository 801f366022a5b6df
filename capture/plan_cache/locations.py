"""Locations in a plan, without the directories of this machine, and back.

On disk a file is named relative to the entry of ``sys.path`` below which it lies, and one that lies below none by its
base name. So a plan does not tell where its maker keeps things, and names the right file where it is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from capture.core.facts import CodeLocation
from capture.core.plan import CapturePlan

Rename = Callable[[str], str]
_PLAIN = frozenset([str, int, bool, float, type(None)])


def portable(plan: CapturePlan) -> CapturePlan:
    """The plan in the form for the disk."""
    roots = sorted({os.path.abspath(entry) for entry in sys.path}, key=len, reverse=True)
    renamed: CapturePlan = _renamed(plan, _remembering(lambda file: _relative(file, roots)))
    return renamed


def local(plan: CapturePlan, near: str | None) -> CapturePlan:
    """The plan in the form for this process. ``near``: the file of the function, as others may lie beside it."""
    roots = [os.path.abspath(entry) for entry in (*sys.path, *([os.path.dirname(near)] if near else []))]
    found: CapturePlan = _renamed(plan, _remembering(lambda file: _absolute(file, roots)))
    return found


def _relative(file: str, roots: Sequence[str]) -> str:
    if not os.path.isabs(file):
        return file
    for root in roots:
        if file.startswith(root.rstrip(os.sep) + os.sep) and root != os.sep:
            return Path(file).relative_to(root).as_posix()
    return os.path.basename(file)


def _absolute(file: str, roots: Sequence[str]) -> str:
    if os.path.isabs(file) or file.startswith("<"):
        return file
    return next((path for path in (os.path.join(root, file) for root in roots) if os.path.isfile(path)), file)


def _remembering(rename: Rename) -> Rename:
    by_file: dict[str, str] = {}

    def renamed(file: str) -> str:
        if file not in by_file:
            by_file[file] = rename(file)
        return by_file[file]

    return renamed


def _renamed(value: Any, rename: Rename) -> Any:
    """``value`` with file names replaced; the same object where there are none."""
    if type(value) in _PLAIN:  # most are: to look for the fields of a text takes longer than all the rest
        return value
    if isinstance(value, CodeLocation):
        file = rename(value.file)
        return value if file == value.file else attrs.evolve(value, file=file)
    if isinstance(value, tuple):
        members = [_renamed(member, rename) for member in value]
        return value if all(map(_is, members, value)) else tuple(members)
    if not attrs.has(type(value)):
        return value
    fields = {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
    others = {name: new for name, old in fields.items() if (new := _renamed(old, rename)) is not old}
    return attrs.evolve(value, **others) if others else value


def _is(one: object, other: object) -> bool:
    return one is other
