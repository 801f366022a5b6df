"""The line of the user's code that is running, for messages."""

from __future__ import annotations

import dis
import linecache
import os
import re
import site
import sys
import sysconfig
import types
import warnings
from collections.abc import Mapping

import torch
import typing_extensions

from capture.core.data import frozen
from capture.core.facts import CodeLocation

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OWN = (
    _OURS,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.abspath(warnings.__file__),
    os.path.abspath(typing_extensions.__file__),  # it wraps functions that torch calls deprecated
)
_DEF = re.compile(r"\s*(async\s+)?def\b")
_DECORATOR_LINES = 60
"""Lines that decorators may take, at most, above the ``def`` that is looked for."""
_OF_COMPILER = "<eval_with_key>"  # code that Dynamo and torch.fx make
_cache: dict[tuple[str, int, str], CodeLocation] = {}
_places: dict[tuple[int, int], tuple[CodeLocation, types.CodeType]] = {}
"""By ``id`` of the code, which is kept, and the instruction: finding the line takes longer than all the rest."""
_MOST_PLACES = 10_000
_name_lines: dict[int, tuple[NameLines, types.CodeType]] = {}
"""By ``id`` of the code, which is kept."""
_MOST_CODES = 256
_SETTING = frozenset(
    {"STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF"}
)
_INSTALLED = tuple(
    os.path.abspath(folder) + os.sep
    for folder in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        site.getusersitepackages(),
    )
)
_users: dict[str, bool] = {}
"""By file: whether it belongs to neither torch nor this library."""
_written_by_user: dict[str, bool] = {}
"""By file: whether, beyond that, it is not installed, as Python's own modules and packages are."""
_written: dict[str, Mapping[int, tuple[str, int, str]]] = {}
"""Per file of generated code: the file, line and function of the user's that each of its lines stands for."""


def is_users(file: str) -> bool:
    """Whether it is neither torch's nor this library's, nor made by the compiler."""
    known = _users.get(file)
    if known is None:
        is_generated = file.startswith(("<capture", _OF_COMPILER)) and file not in _written
        known = _users[file] = not file.startswith(_OWN) and not is_generated
    return known


def note_generated(file: str, lines: Mapping[int, tuple[str, int, str]]) -> None:
    """Messages about lines of generated code are to name the user's: file, line and function."""
    _written[file] = lines
    _users.pop(file, None)
    _places.clear()


def forget_generated(file: str) -> None:
    """The generated code is gone."""
    _written.pop(file, None)
    _users.pop(file, None)
    _places.clear()


def _is_written_by_user(file: str) -> bool:
    known = _written_by_user.get(file)
    if known is None:
        known = _written_by_user[file] = is_users(file) and not file.startswith(_INSTALLED)
    return known


def user_location() -> CodeLocation | None:
    """The innermost line of the captured function that is the user's own.

    A line of an installed package, where the user called it in the captured function, is not: what to change is the
    user's call. It is the answer where the captured function is a package's itself.
    """
    frame = _user_frame(sys._getframe(1))
    if frame is None:
        return None
    code, at = frame.f_code, frame.f_lasti
    place = _places.get((id(code), at))
    if place is None:
        if len(_places) > _MOST_PLACES:
            _places.clear()
        place = _places[id(code), at] = _of(code, frame.f_lineno), code
    return place[0]


def _user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    users, written_by_user, installed = _users, _written_by_user, None
    while frame is not None:
        file = frame.f_code.co_filename
        is_known = users.get(file)  # without a function call for each frame, which halves the time
        if is_known or (is_known is None and is_users(file)):
            is_written = written_by_user.get(file)
            if is_written or (is_written is None and _is_written_by_user(file)):
                return frame
            installed = installed or frame
        elif installed is not None and file.startswith(_OURS):  # what called the captured function
            return installed
        frame = frame.f_back
    return installed


def called_by_user() -> str:
    """The function of torch or of an installed package that ``user_location`` calls, as ``torch.optim.adam.Adam.step``;
    empty if it calls none. Wrappers around it are left out, and methods of a tensor, which are the user's own words."""
    frame: types.FrameType | None = sys._getframe(1)
    users, called = _user_frame(frame), ""
    while frame is not None and frame is not users:
        name = frame.f_code.co_qualname
        module = frame.f_globals.get("__name__", "")
        private = "<" in name or (name.rpartition(".")[2].startswith("_") and not name.endswith(".__init__"))
        if not private and not frame.f_code.co_filename.startswith(_OURS) and not module.startswith("torch._tensor"):
            called = f"{module}.{_of_receiver(frame) or name}"
        frame = frame.f_back
    return called


def _of_receiver(frame: types.FrameType) -> str:
    """``AdamW.step`` where ``AdamW`` has its ``step`` from ``Adam``; empty where the frame is no method's."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self" or "." not in code.co_qualname:
        return ""
    receiver = frame.f_locals.get("self")
    return f"{type(receiver).__qualname__}.{code.co_name}"


def user_place(defined_at: CodeLocation | None) -> CodeLocation | None:
    """For what has no line of its own: where the captured function is defined, or called if a package defines it."""
    if defined_at is not None and _is_written_by_user(defined_at.file):
        return defined_at
    return user_location()


def of_error(error: BaseException) -> CodeLocation | None:
    """The innermost frame of the user's that an exception passed through."""
    place = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_users(code.co_filename):
            place = _of(code, trace.tb_lineno)
        trace = trace.tb_next
    return place


def stack_level() -> int:
    """Level of the user's line, for ``warnings.warn`` called by the caller of this function."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame, level = frame.f_back, level + 1
    return level


def of_function(code: types.CodeType) -> CodeLocation:
    """The line of its ``def``, which stands below its decorators; Python counts from the first of those."""
    line, last = code.co_firstlineno, code.co_firstlineno + _DECORATOR_LINES
    if linecache.getline(code.co_filename, line).lstrip().startswith("@"):
        line = next((at for at in range(line, last) if _DEF.match(linecache.getline(code.co_filename, at))), line)
    return _of(code, line)


def of_line(code: types.CodeType, line: int) -> CodeLocation:
    """One of its lines."""
    return _of(code, line)


@frozen
class NameLines:
    """By name: where code mentions it first (which of its instructions, and the line), and the line that first sets
    it."""

    mentioned: Mapping[str, tuple[int, int]]
    set: Mapping[str, int]


def lines_of_names(code: types.CodeType) -> NameLines:
    """Of the names in the code. Each place that a run changed has a line, and an optimizer changes hundreds: the
    instructions are read once."""
    known = _name_lines.get(id(code))
    if known is None:
        if len(_name_lines) >= _MOST_CODES:
            _name_lines.clear()
        known = _name_lines[id(code)] = _lines_of_names(code), code
    return known[0]


def _lines_of_names(code: types.CodeType) -> NameLines:
    mentioned, names_set, line = dict[str, tuple[int, int]](), dict[str, int](), code.co_firstlineno
    for at, instruction in enumerate(dis.get_instructions(code)):
        line = (instruction.positions.lineno if instruction.positions is not None else None) or line
        if isinstance(instruction.argval, str):
            mentioned.setdefault(instruction.argval, (at, line))
            if instruction.opname in _SETTING:
                names_set.setdefault(instruction.argval, line)
    return NameLines(mentioned, names_set)


def _of(code: types.CodeType, line: int) -> CodeLocation:
    file, name = code.co_filename, getattr(code, "co_qualname", code.co_name)
    if file in _written:
        file, line, name = _written[file].get(line, (file, line, name))
    place = _cache.get((file, line, name))
    if place is None:
        if len(_cache) > 10_000:
            _cache.clear()
        text = linecache.getline(file, line).strip()
        place = _cache[file, line, name] = CodeLocation(file=file, line=line, function=name, code=text)
    return place
