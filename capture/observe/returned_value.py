"""A number that the host reads and the body only returns or keeps, such as a loss for the log.

Nothing follows from such a value, so replays need not compare it: each reads it anew, and puts it where the recorded
run has it in its result. The code proves that: ``x.item()``, ``float(x)``, ``int(x)`` or ``bool(x)`` is called, and
from there on, through every way that the code can take to its ``return``, the value is only moved between the stack,
local names, and new tuples, lists and dicts. So it is in the functions that called this one, up to the body, where each
is known to call the next one, not to have it called by code in C. Calls and operations on other values may come in
between, such as the next metric. The value may be kept on the way: appended to a list, or put on an attribute or into a
dict that the code names (``kept_value`` looks whether something depends on what is there), or added to a number there.
Python may compute another number of it first, with numbers that are the same in each call (``loss.item() * len(x)``),
or by ``float(loss.item())``: the result of each replay is computed, too. What else takes the value itself,
another name that others see, or a call that may look at local names ends the search, and the value is compared.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import operator
import os
import sys
import types
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import evolve, field

from capture.core.data import define, frozen
from capture.key.tensor_kind import ArraySteps
from capture.observe.islands import GIVES_NOTHING
from capture.torch_private.capabilities import FUNCTION_MODES

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_BETWEEN = (
    _HERE,
    *[_TORCH + name for name in ("_compile.py", "_dynamo", "_ops.py", "utils/_python_dispatch.py")],
    *[_TORCH + name.removeprefix("torch.").replace(".", os.sep) + ".py" for name in FUNCTION_MODES],
)
"""What runs between a body and an operator: a watch, and modes such as a default device."""
_CALL_BODIES = ("state/call.py", "key/signature.py", "key/input_places.py", "key/array_inputs.py")
_BODY_RUNS_IN = tuple([_HERE + name for name in _CALL_BODIES])
RETURNED = "returned as "
"""``Facts.reads`` has such a value with this prefix."""
TAKEN = f"{RETURNED}kept"
"""So where formulas tell what comes of it (``observe.computed``)."""
ASKED = f"{TAKEN} if "
"""So the last of these, if the body asks something of them: with the answers."""
_KINDS: dict[str, Any] = {"float": float, "int": int, "bool": bool}
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "float": lambda value, _: float(value), "int": lambda value, _: int(value), "bool": lambda value, _: bool(value),
}  # fmt: skip
_WHOLE = "int "
_ITEM = "at"
_SOMEWHERE = "?"
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>")
_IS = "="
_MOST_STEPS = 4
_AND = "; "
_KEPT = "kept"
_NO_KEY = frozenset(".;=")
_MOST_FRAMES = 12
_MOST_CALLS = 4
_DICTS = (dict, defaultdict, OrderedDict)
_UPDATE = ("attribute", "update")
_MOST_STATES = 2_000
_GET_ITEM = "__getitem__"
_OF_ARRAYS = frozenset(
    {"astype", "copy", "flatten", "item", "ravel", "reshape", "squeeze", "swapaxes", "transpose", "view"}
)
"""Methods that give other arrays, or a number, and change nothing."""


@frozen
class _Read:
    """The value that was read."""


@frozen
class _OfArray(_Read):
    """The array that was made, or what its own methods make of it."""

    steps: ArraySteps = field(default=(), eq=repr)


@frozen
class _Method:
    """A method of such an array, which is about to be called."""

    array: _OfArray
    name: str


@frozen
class _Constant:
    value: Any = field(eq=repr)


@frozen
class _Name:
    """A value that the code reads by name."""

    kind: str
    name: str
    steps: tuple[tuple[str, Any], ...] = field(default=(), eq=repr)
    """Attributes and items from there."""


@frozen
class _Made:
    """A container that the code made of the value and others."""

    members: tuple[tuple[Any, Any], ...]


@frozen
class _Computed:
    """A number that follows from the value. ``steps``: an operation, its other operand, and whether that is the left
    one."""

    steps: tuple[tuple[str, _Constant | _Name, bool], ...]
    """Of ``float(value)`` the operand is the name of what is called."""


@frozen
class _Sum:
    """What was in a ``place``, and such a number."""

    place: _Name
    added: _Read | _Computed


@frozen
class _Other:
    """What the same instruction reads when it is come to once more, which is looked at then."""


@frozen
class _Arguments:
    """What a function is called with: by position, and by name."""

    positional: tuple[Value, ...]
    named: tuple[tuple[str, Value], ...]


@frozen(eq=False)
class _Begun:
    """What a function of users' has as it begins, as far as that is known of a call to come."""

    f_code: types.CodeType
    f_locals: dict[str, Any]
    f_globals: dict[str, Any]
    f_builtins: dict[str, Any]


@frozen
class _Stored:
    """The value was put where others can see it: ``append`` to what the code names, or on an ``attribute`` or as an
    ``item`` of it; or a function was called with it, and ``name`` has its arguments."""

    kind: str
    holder: _Name
    name: Any = field(eq=repr)
    count: int
    value: _Read | _Computed = field(factory=_Read)
    adds: bool = False
    """It was added to what was there."""
    at: int = -1
    """The instruction."""


@frozen(eq=False)
class Kept:
    """As ``_Stored``, with the object itself. ``count``: how many places of what was put there hold the value;
    ``formula``: see ``computed``."""

    kind: str
    holder: Any
    name: Any
    count: int
    formula: str = ""
    adds: bool = False
    by: tuple[types.CodeType, int] | None = None
    """The instruction that puts it there."""
    via: tuple[tuple[tuple[str, bool], types.CodeType, int], ...] = ()
    """The calls by which it comes there, each with the name of what is called, and whether that is an attribute."""


class _Refused(Exception):
    """The value may be used for something, so it has to be compared."""


Value = _Read | _Method | _Constant | _Name | _Made | _Computed | _Sum | _Other | None
"""None: another value, of which nothing is known."""
_LOADS = (
    "LOAD_FAST",
    "LOAD_FAST_BORROW",
    "LOAD_FAST_LOAD_FAST",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
    "LOAD_FAST_CHECK",
)
_STORES = ("STORE_FAST", "STORE_FAST_STORE_FAST")
_NAMED = {"LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_DEREF": "local"}
_TAKES = {
    "LOAD_GLOBAL": 0, "LOAD_NAME": 0, "LOAD_DEREF": 0, "LOAD_SMALL_INT": 0, "LOAD_CONST": 0, "PUSH_NULL": 0,
    "KW_NAMES": 0, "LOAD_METHOD": 1, "LOAD_ATTR": 1, "POP_TOP": 1, "UNARY_NEGATIVE": 1, "UNARY_NOT": 1,
    "UNARY_INVERT": 1, "BINARY_OP": 2, "BINARY_SUBSCR": 2, "COMPARE_OP": 2, "CONTAINS_OP": 2, "IS_OP": 2,
    "STORE_ATTR": 2, "STORE_SUBSCR": 3, "STORE_GLOBAL": 1, "STORE_DEREF": 1, "TO_BOOL": 1,
    "FORMAT_SIMPLE": 1, "GET_ITER": 1, "RESUME": 0, "DELETE_FAST": 0, "LOAD_CLOSURE": 0, "POP_ITER": 1,
    "LOAD_FAST_AND_CLEAR": 0, "NOT_TAKEN": 0,
    "END_FOR": 2 if sys.version_info < (3, 13) else 1,
}  # fmt: skip
"""How many values other instructions take from the stack."""
_TAKES_MORE = {"CALL": 2, "CALL_KW": 3}
"""Beside as many as their argument says. They give one."""
_GIVE_ONE = ("BUILD_", "FORMAT_VALUE", "CALL_FUNCTION_EX", "CALL_INTRINSIC_")
_ENDS_OF_STATEMENTS = ("STORE_", "POP_TOP", "RETURN_", "RESUME", "DELETE_")
_ENDS = ("RAISE_VARARGS", "RERAISE", "RETURN_CONST")
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_LOOKS_AROUND = frozenset(["locals", "vars", "dir", "eval", "exec", "breakpoint", "sys", "inspect"])
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def place_of_read(value: Any) -> tuple[str, list[Kept]] | None:
    """Where the result has the ``value`` that an operator reads for ``item()`` now: ``output.1``, or several such
    places; and what else keeps it. None if that is not known, or not all that comes of it."""
    frames = _frames()
    kind = _kind_of_read(frames[0], value) if frames else None
    left_and_kept = None if kind is None else _what_comes(frames)
    if kind is None or left_and_kept is None:
        return None
    left, kept = left_and_kept
    places = [*_places(left, "output"), *[_KEPT] * len(kept)]
    formulas = [*[place.partition(_IS)[2] for place in places], *[one.formula.removeprefix(_IS) for one in kept]]
    if not isinstance(value, int) and any(formula.startswith(_WHOLE) for formula in formulas):
        return None  # that of a fraction may raise
    return (kind + _AND.join(places), kept) if places and all(map(_is_known, places)) else None


def _is_known(place: str) -> bool:
    return _SOMEWHERE not in place.split(".")


def place_of_list() -> str | None:
    """The same for the list that ``x.tolist()`` makes now, which the body only returns."""
    frames = _frames()
    left_and_kept = _what_comes(frames) if frames and _is_call_of(frames[0], "tolist") else None
    if left_and_kept is None or left_and_kept[1]:
        return None
    places = [*_places(left_and_kept[0], "output")]
    is_moved = all(_is_known(place) and _IS not in place for place in places)
    return _AND.join(places) if places and is_moved else None


def uses_of_array() -> tuple[list[Kept], dict[str, ArraySteps]] | None:
    """What keeps the array that ``x.numpy()`` or ``np.asarray(x)`` makes now, and where the result has what its methods
    make of it (``.numpy()[0]``), if the body only returns it or keeps it, so that nothing follows from its values; None
    if that is not known."""
    frames = _frames()
    left_and_kept = _what_comes(frames, _OfArray()) if frames and _makes_array(frames[0]) else None
    if left_and_kept is None:
        return None
    left, kept = left_and_kept
    places = dict(_placed_steps(left, "output"))
    is_moved = all(steps is not None for steps in places.values()) and not any(one.formula or one.adds for one in kept)
    computed_steps = {path: steps for path, steps in places.items() if steps}
    return (kept, computed_steps) if is_moved and all(map(_is_known, computed_steps)) else None


def _placed_steps(made: Value, path: str) -> Iterator[tuple[str, ArraySteps | None]]:
    """As ``_places``, of an array. None: it is something else that follows from it."""
    if isinstance(made, (_Read, _Computed, _Method)):
        yield path, made.steps if isinstance(made, _OfArray) else None
    for name, member in made.members if isinstance(made, _Made) else ():
        yield from _placed_steps(member, f"{path}.{_SOMEWHERE if name is None else name}")


def _what_comes(
    frames: Sequence[types.FrameType], left: Value = _Read()  # noqa: B008 - it is frozen
) -> tuple[Value, list[Kept]] | None:  # fmt: skip
    """What the body returns of the value that is read now, ``left``, and what else keeps it; None if more comes of it,
    or that is not known."""
    kept = list[Kept]()
    for inner, frame in zip([None, *frames], frames, strict=False):
        at = _step_at(frame.f_code, frame.f_lasti)
        if inner is not None and not _calls(frame, at, inner.f_code):
            return None
        value_and_kept = _left_by(frame.f_code, at, left)
        more = None if value_and_kept is None else _all_kept(frame, value_and_kept[1])
        if value_and_kept is None or more is None:
            return None
        try:
            left = _with_numbers(frame, value_and_kept[0])
        except _Refused:
            return None
        kept += more
        if not _holds_read(left):
            break
    return left, kept


def _frames() -> list[types.FrameType]:
    """The one that reads, and those that called it, up to the body; empty if the body is none of them."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    frames: list[types.FrameType] = []
    while frame is not None and len(frames) < _MOST_FRAMES and not frame.f_code.co_filename.startswith(_HERE):
        frames.append(frame)
        frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(_BODY_RUNS_IN):
            return frames
    return []


def _kind_of_read(frame: types.FrameType, value: Any) -> str | None:
    """How the code makes the value of what was read: nothing for ``item()``, ``"float of "`` for ``float(x)``."""
    steps, at = _steps(frame.f_code), _step_at(frame.f_code, frame.f_lasti)
    call = steps[at]
    if call.opname != "CALL" or not at:
        return None
    asked = steps[at - 1]
    if call.arg == 0:
        return "" if asked.argval == "item" and asked.opname in ("LOAD_METHOD", "LOAD_ATTR") else None
    callees = [_resolved(frame, callee) for callee in _callees(frame.f_code, at)] if call.arg == 1 else []
    for name, kind in _KINDS.items():
        if any(_is_kind(callee, kind) for callee in callees):
            return f"{name} of " if name != "int" or isinstance(value, int) else None  # that of a fraction may raise
    return None


def _is_kind(callee: Any, kind: type) -> bool:
    """Whether it is this class, or stands for it in a run with noted numbers."""
    return callee is kind or (isinstance(callee, type) and vars(callee).get("stands_for") is kind)


def _makes_array(frame: types.FrameType) -> bool:
    """Whether the code calls ``x.numpy()`` or ``np.asarray(x)`` now, and gets the array itself."""
    steps, at = _steps(frame.f_code), _step_at(frame.f_code, frame.f_lasti)
    call = steps[at]
    if call.opname != "CALL" or not call.arg:
        return _is_call_of(frame, "numpy")
    asarray = getattr(sys.modules.get("numpy"), "asarray", None)
    callees = _callees(frame.f_code, at) if call.arg == 1 else ()
    return asarray is not None and any(_resolved(frame, callee) is asarray for callee in callees)


def _is_call_of(frame: types.FrameType, method: str) -> bool:
    """Whether the code calls a method of this name now, without arguments."""
    steps, at = _steps(frame.f_code), _step_at(frame.f_code, frame.f_lasti)
    asked = steps[at - 1] if at and steps[at].opname == "CALL" and steps[at].arg == 0 else None
    return asked is not None and asked.argval == method and asked.opname in ("LOAD_METHOD", "LOAD_ATTR")


@functools.lru_cache(maxsize=256)
def _steps(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL", "NOP")]
    return tuple([  # Python 3.11 does not look up the names of arguments
        one._replace(argval=code.co_consts[one.arg or 0]) if one.opname == "KW_NAMES" else one for one in steps
    ])  # fmt: skip


def _step_at(code: types.CodeType, offset: int) -> int:
    """The number of the instruction that is under way. While it calls another function, the interpreter may stand on
    what it keeps behind the instruction."""
    return max(bisect_right(_steps(code), offset, key=_offset) - 1, 0)


def _offset(step: dis.Instruction) -> int:
    return step.offset


# ------------------------------------------------------------------------------------------------ who calls whom


def _calls(frame: types.FrameType, at: int, code: types.CodeType) -> bool:
    """Whether this frame's present instruction itself calls the function with this code: code in C does not stand
    between."""
    if code.co_name in _COMPREHENSIONS and code in frame.f_code.co_consts:
        return True  # nobody else can have its function
    return any(_code_of(_resolved(frame, callee)) is code for callee in _callees(frame.f_code, at))


@functools.lru_cache(maxsize=256)
def _callees(code: types.CodeType, at: int) -> tuple[Value, ...]:
    """The two places of a call in one of which is what it calls."""
    step = _steps(code)[at]
    takes = _taken_by(step)
    if not step.opname.startswith("CALL") or takes is None:
        return ()
    return tuple(_stack(_steps(code)[:at])[-takes:][:2])


_Frame = types.FrameType | _Begun


def _resolved(frame: _Frame, name: Value) -> Any:
    """What this frame names, without running code of users; None if that is not known."""
    value: Any = None
    if not isinstance(name, _Name):
        return None
    if name.kind == "local":
        value = frame.f_locals.get(name.name)
    else:
        value = frame.f_globals.get(name.name, frame.f_builtins.get(name.name))
    for kind, step in name.steps:
        if kind == "item":
            holds = type(value) is list and type(step) is int and -len(value) <= step < len(value)
            holds = holds or (type(value) in (dict, defaultdict) and type(step) in (str, int) and step in value)
            value = value[step] if holds else None
        else:
            submodules = value._modules if isinstance(value, torch.nn.Module) else {}
            value = submodules.get(step, inspect.getattr_static(value, step, None))
    return value


def _with_numbers(frame: _Frame, value: Value) -> Value:
    """The same with the numbers that this frame computes with in the place of their names."""
    if isinstance(value, _Made):
        return _Made(tuple([(name, _with_numbers(frame, member)) for name, member in value.members]))
    if not isinstance(value, _Computed):
        return value
    steps = []
    for operation, operand, is_left in value.steps:
        number = operand.value if isinstance(operand, _Constant) else _number(frame, operand)
        if operation in _KINDS and isinstance(operand, _Name):
            number = 0 if _is_kind(_resolved(frame, operand), _KINDS[operation]) else None
        if type(number) not in (int, float):
            raise _Refused
        steps.append((operation, _Constant(number), is_left))
    return _Computed(tuple(steps))


def _number(frame: _Frame, name: _Name) -> Any:
    """A number that this frame has now, by a name or as the size of a tensor or container."""
    value, steps = _resolved(frame, _Name(name.kind, name.name)), list(name.steps)
    for kind, step in steps[:1]:
        if kind == "len" and type(value) in (list, tuple, dict):
            return len(value)
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return None
        sizes = tuple(value.shape)
        if kind == "len":
            return sizes[0] if sizes else None
        at = step if kind == "size" else steps[1][1] if (kind, step) == ("attribute", "shape") and steps[1:] else None
        return sizes[at] if type(at) is int and -len(sizes) <= at < len(sizes) else None
    return value


def _kept(frame: _Frame, stored: _Stored) -> Kept | None:
    """None where code of users may run, or what it is put on is not known."""
    holder = _resolved(frame, stored.holder)
    try:
        formula = _formula(_with_numbers(frame, stored.value))
    except _Refused:
        return None
    if stored.kind == "append":
        plain = type(holder) in (list, deque)
    elif stored.kind == "item":
        plain = type(holder) in _DICTS and type(stored.name) is str
    else:
        kind = type(holder)
        own = inspect.getattr_static(kind, "__setattr__", None)  # in C, as that of object, or a module's
        is_known = own is torch.nn.Module.__setattr__ or type(own) is types.WrapperDescriptorType
        plain = is_known and not hasattr(type(inspect.getattr_static(kind, stored.name, None)), "__set__")
        plain = plain and holder is not None and not isinstance(holder, (type, types.ModuleType, torch.Tensor))
    by = frame.f_code, stored.at
    return Kept(stored.kind, holder, stored.name, stored.count, formula, stored.adds, by) if plain else None


def _all_kept(frame: _Frame, stored: Iterable[_Stored], depth: int = 0) -> list[Kept] | None:
    """What keeps the value, also in functions that are called with it. None if that is not known, or not all."""
    kept = list[Kept]()
    for one in stored:
        places = _kept_by_call(frame, one, depth) if one.kind == "call" else [_kept(frame, one)]
        if places is None or None in places:
            return None
        kept += [place for place in places if place is not None]
    return kept


def _kept_by_call(frame: _Frame, stored: _Stored, depth: int) -> list[Kept] | None:
    """What a function of users' keeps of the value, with which it is called later on."""
    called = _resolved(frame, stored.holder)
    if called is isinstance:
        return []  # whatever is read, its type is the same
    if stored.holder.steps[-1:] == (_UPDATE,):
        holder = evolve(stored.holder, steps=stored.holder.steps[:-1])
        if type(_resolved(frame, holder)) in _DICTS:
            items = _updated(holder, stored)
            return None if items is None else _all_kept(frame, items)
    function, owner = _function_and_owner(frame, stored.holder, called)
    begun = None if function is None or depth > _MOST_CALLS else _begun(frame, function, owner, stored.name)
    if function is None or begun is None:
        return None
    frame_of_call, names = begun
    left_and_stored = _left_from_begin(function.__code__, frozenset(names.items()))
    if left_and_stored is None or _holds_read(left_and_stored[0]):
        return None
    kept = _all_kept(frame_of_call, left_and_stored[1], depth + 1)
    name = stored.holder.steps[-1][1] if stored.holder.steps else stored.holder.name
    via = (name, bool(stored.holder.steps)), frame.f_code, stored.at
    if kept is None or name != function.__code__.co_name:  # what else calls it is found by its name
        return None
    return [evolve(place, via=(*place.via, via)) for place in kept]


def _function_and_owner(
    frame: _Frame, callee: _Name, called: Any
) -> tuple[types.FunctionType | None, tuple[Any, ...]]:  # fmt: skip
    """The Python function that a call runs, and the object that it gets first, if it is a method's."""
    if type(called) is types.MethodType:
        return (called.__func__, (called.__self__,)) if type(called.__func__) is types.FunctionType else (None, ())
    if type(called) is not types.FunctionType:
        return None, ()
    if not callee.steps:
        return called, ()
    holder = _resolved(frame, evolve(callee, steps=callee.steps[:-1]))
    kind, step = type(holder), callee.steps[-1]
    if isinstance(holder, types.ModuleType) or step[0] != "attribute":
        return called, ()
    if isinstance(holder, type) or inspect.getattr_static(kind, "__getattribute__") is not object.__getattribute__:
        return None, ()
    return called, () if step[1] in getattr(holder, "__dict__", ()) else (holder,)


def _begun(
    frame: _Frame, function: types.FunctionType, owner: tuple[Any, ...], arguments: _Arguments
) -> tuple[_Begun, dict[str, Value]] | None:  # fmt: skip
    """What the function has as it begins; and by name what is no object yet, or a constant."""
    code = function.__code__
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return None
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = dict[str, Value](zip(parameters[len(owner) : code.co_argcount], arguments.positional, strict=False))
    if len(given) < len(arguments.positional) or not given.keys().isdisjoint(name for name, _ in arguments.named):
        return None
    given |= dict(arguments.named)
    own = dict[str, Any](zip(parameters, owner, strict=False))
    defaults = function.__defaults__ or ()
    own |= dict(zip(parameters[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
    own |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        own |= {name: cell.cell_contents} if cell != types.CellType() else {}
    names = dict[str, Value]()
    for name, value in given.items():
        own.pop(name, None)
        if _holds_read(value):
            try:
                names[name] = _with_numbers(frame, value)
            except _Refused:
                return None
        elif isinstance(value, _Constant):
            own[name], names[name] = value.value, value
        elif isinstance(value, _Name):
            held = _number(frame, value) if value.steps and _is_size(value) else _resolved(frame, value)
            if not value.steps or _is_size(value) or type(held) not in (int, float):
                own[name] = held  # a number that is kept elsewhere may be another one by then
    return _Begun(code, own, function.__globals__, vars(builtins)), names


def _code_of(value: Any) -> types.CodeType | None:
    """The code of the Python function that runs if this value is called; None for anything else."""
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        value = value.__func__
    if not isinstance(value, types.FunctionType) and not isinstance(value, type):
        value = inspect.getattr_static(type(value), "__call__", None)
    return value.__code__ if isinstance(value, types.FunctionType) else None


# ------------------------------------------------------------------------------------------------ what comes of it


@functools.lru_cache(maxsize=256)
def _left_by(code: types.CodeType, at: int, value: Value) -> tuple[Value, tuple[_Stored, ...]] | None:
    """What the code returns and puts elsewhere, as far as the ``value`` that this call gives is in it; None if more
    comes of it."""
    if code.co_flags & _SUSPENDS:
        return None
    steps = _steps(code)
    takes = _taken_by(steps[at])
    if takes is None:
        return None
    below = _stack(steps[:at])[: -takes or None]
    try:
        ends = _Ways(steps).ends(at + 1, (*below, value))
    except _Refused:
        return None
    return ends[0] if len(set(ends)) == 1 else None


@functools.lru_cache(maxsize=256)
def _left_from_begin(
    code: types.CodeType, names: frozenset[tuple[str, Value]]
) -> tuple[Value, tuple[_Stored, ...]] | None:  # fmt: skip
    """The same for a function that begins with these local names."""
    if code.co_flags & _SUSPENDS or any(name in code.co_cellvars and _holds_read(value) for name, value in names):
        return None
    try:
        ends = _Ways(_steps(code)).ends(0, (), names)
    except _Refused:
        return None
    return ends[0] if len(set(ends)) == 1 else None


@functools.lru_cache(maxsize=1024)
def times_named(code: types.CodeType, name: str, *, is_attribute: bool) -> int:
    """How often the code names something that it may call."""
    of_names = () if is_attribute else (*_LOADS, *_NAMED)
    named = [step for step in _steps(code) if step.opname in (*of_names, "LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST")]
    return sum(name in _names(step) for step in named)


def _stack(steps: Sequence[dis.Instruction]) -> list[Value]:
    """What these instructions leave on the stack, as far as it belongs to the last statement. From Python 3.12 on a
    comprehension is a loop within a statement."""
    stack: list[Value] = []
    inlined = _Inlined()
    for step in steps:
        within = inlined.is_within(step)
        if not within and (step.opname.startswith(_ENDS_OF_STATEMENTS) or step.opcode in _JUMPS):
            stack = []
        elif step.opname in _LOADS:
            stack += [_Name("local", name) for name in _names(step)]
        elif step.opname == "COPY":
            stack.append(stack[-(step.arg or 1)] if (step.arg or 1) <= len(stack) else None)
        elif step.opname == "SWAP" and (step.arg or 0) <= len(stack):
            stack[-(step.arg or 0)], stack[-1] = stack[-1], stack[-(step.arg or 0)]
        elif step.opname == "END_FOR":
            stack[max(len(stack) + 1 - _TAKES["END_FOR"], 0) :] = []  # it is come to with one value more
        else:
            takes = _taken_by(step)
            takes = max(-dis.stack_effect(step.opcode, step.arg, jump=False), 0) if takes is None else takes
            taken = [stack.pop() if stack else None for _ in range(takes)][::-1]
            stack += _given(step, taken)
    return stack


@define
class _Inlined:
    """Whether instructions, one after the other, are within a comprehension that is a loop of the code itself."""

    variables: int = 0
    loops: int = 0

    def is_within(self, step: dis.Instruction) -> bool:
        """Of the next instruction. The names of the loop get back what they had once the outermost loop is over."""
        was_within = self.variables > 0
        if step.opname == "LOAD_FAST_AND_CLEAR":
            self.variables += 1
        elif was_within and step.opname in ("FOR_ITER", "END_FOR"):
            self.loops += 1 if step.opname == "FOR_ITER" else -1
        elif was_within and not self.loops and step.opname == "STORE_FAST":
            self.variables -= 1
        return was_within or self.variables > 0


def _names(step: dis.Instruction) -> tuple[str, ...]:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _taken_by(step: dis.Instruction) -> int | None:
    """How many values the instruction takes from the stack; None if that is not known."""
    if step.opname in _TAKES_MORE:
        return _TAKES_MORE[step.opname] + (step.arg or 0)
    if step.opname == "MAKE_FUNCTION":
        return 1 + (step.arg or 0).bit_count()  # its code, and what else it has
    if step.opname.startswith(_GIVE_ONE):
        return 1 - dis.stack_effect(step.opcode, step.arg)
    return _TAKES.get(step.opname)


def _takes_item(step: dis.Instruction) -> bool:
    """Whether it is ``x[key]``: an operation of its own up to Python 3.13."""
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _given(step: dis.Instruction, taken: Sequence[Value]) -> list[Value]:
    """What the instruction puts on the stack for these."""
    name, first = step.opname, taken[0] if taken else None
    if name in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return [_Constant(step.argval)]
    if name in _TAKES_MORE:
        return [None]
    effect = dis.stack_effect(step.opcode, step.arg)
    given: list[Value] = [None] * max(effect + len(taken), 0)
    if name in _NAMED and step.argval is not None:
        value: Value = _Name(_NAMED[name], step.argval)
    elif name in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(first, _Name):
        value = _Name(first.kind, first.name, (*first.steps, ("attribute", step.argval)))
    elif _takes_item(step) and isinstance(first, _Name) and isinstance(taken[1], _Constant):
        value = _Name(first.kind, first.name, (*first.steps, ("item", taken[1].value)))
    else:
        return given
    return [*given[:-1], value] if name != "LOAD_METHOD" and len(given) < 2 else [value] * len(given)


_State = tuple[int, tuple[Value, ...], frozenset[tuple[str, Value]], tuple[_Stored, ...]]
"""The next instruction, the stack, local names that were set since the read, and what was put elsewhere by then."""


class _Ways:
    """Every way that code can take to its end."""

    def __init__(self, steps: Sequence[dis.Instruction]) -> None:
        self._steps = steps

    def ends(
        self, number: int, stack: tuple[Value, ...], names: frozenset[tuple[str, Value]] = frozenset()
    ) -> list[tuple[Value, tuple[_Stored, ...]]]:  # fmt: skip
        """What the code returns, and has put elsewhere, at the ends of all ways from here."""
        begun: list[_State] = [(number, stack, names, ())]
        reads = number - 1
        seen, ends = set[_State](), list[tuple[Value, tuple[_Stored, ...]]]()
        while begun:
            number, stack, names, stored = state = begun.pop()
            if state in seen:
                continue
            seen.add(state)
            step = self._steps[number]
            if len(seen) > _MOST_STATES:
                raise _Refused
            if step.opname == "RETURN_VALUE":
                ends.append((_only_read(stack[-1] if stack else None), stored))
            elif step.opname in _ENDS:
                ends += [(None, stored)] if step.opname == "RETURN_CONST" else []
            elif step.opcode in _JUMPS:
                begun += [(at, after, names, stored) for at, after in self._jumps(number, stack)]
            elif (converted := _converted(step, stack, self._keywords(number))) is not None:
                begun.append((number + 1, converted, names, stored))
            elif (put := _put_elsewhere(step, stack, self._keywords(number))) is not None:
                put_there = [evolve(one, at=step.offset) for one in put[1]]
                begun.append((number + 1, put[0], names, (*stored, *put_there)))
            elif _may_set(step, stack, stored):
                raise _Refused  # another value is put where the read may be
            else:
                after, names = _done(step, list(stack), dict(names))
                again = (*after[:-1], _Other()) if number == reads else after
                begun.append((number + 1, again, names, stored))
        return ends

    def _keywords(self, number: int) -> tuple[str, ...]:
        """The names of arguments of a call, up to Python 3.12."""
        before = self._steps[number - 1] if number and self._steps[number].opname == "CALL" else None
        return before.argval if before is not None and before.opname == "KW_NAMES" else ()

    def _jumps(self, number: int, stack: tuple[Value, ...]) -> Iterator[tuple[int, tuple[Value, ...]]]:
        step = self._steps[number]
        if stack and _holds_read(stack[-1]) and not step.opname.startswith("JUMP_FORWARD"):
            raise _Refused
        goes_on = not step.opname.startswith("JUMP_") or "_IF_" in step.opname
        for jumps in (False, True) if goes_on else (True,):
            effect = dis.stack_effect(step.opcode, step.arg, jump=jumps)
            after = stack[: len(stack) + effect] if effect < 0 else (*stack, *[None] * effect)
            yield (bisect_left(self._steps, step.argval, key=_offset) if jumps else number + 1), after


def _converted(
    step: dis.Instruction, stack: tuple[Value, ...], keywords: tuple[str, ...]
) -> tuple[Value, ...] | None:  # fmt: skip
    """The stack after ``float(value)`` and the like of the read, or of what was computed of it."""
    if step.opname != "CALL" or step.arg != 1 or keywords or type(stack[-1]) not in (_Read, _Computed):
        return None
    *callees, value = stack[-3:]
    callee = next((one for one in callees if isinstance(one, _Name)), None)
    if callee is None or callee.kind != "global" or callee.steps or callee.name not in _KINDS:
        return None
    before = value.steps if isinstance(value, _Computed) else ()
    if len(before) >= _MOST_STEPS or (before and callee.name == "int"):
        raise _Refused
    return (*stack[:-3], _Computed((*before, (callee.name, callee, False))))


def _put_elsewhere(
    step: dis.Instruction, stack: Sequence[Value], keywords: tuple[str, ...]
) -> tuple[tuple[Value, ...], tuple[_Stored, ...]] | None:  # fmt: skip
    """The stack after an instruction that keeps the read where others see it, and where. ``keywords``: names of
    arguments, as ``_Ways._keywords`` knows them."""
    takes = _taken_by(step)
    if takes is None or len(stack) < takes:
        return None
    below, taken = tuple(stack[:-takes]), stack[-takes:]
    if step.opname in _TAKES_MORE:
        put = _put_by_call(step, taken, keywords) if any(map(_holds_read, taken)) else None
        return None if put is None else ((*below, None), put)
    if step.opname == "BINARY_OP" and isinstance(taken[0], _Name) and isinstance(taken[1], _Made):
        is_list = not any(isinstance(key, str) for key, _ in taken[1].members)
        if step.argrepr == "+=" and is_list:
            return (*below, taken[0]), (_Stored("append", taken[0], None, _count(taken[1]), _one_of(taken[1])),)
        return ((*below, taken[0]), _items(taken[0], taken[1])) if step.argrepr == "|=" and not is_list else None
    if len(taken) < 2 or not isinstance(taken[0], (_Read, _Computed, _Sum)) or not isinstance(taken[1], _Name):
        return None
    if step.opname == "STORE_ATTR":
        return below, (_put("attribute", taken[1], step.argval, taken[0]),)
    if step.opname == "STORE_SUBSCR" and isinstance(taken[2], _Constant):
        return below, (_put("item", taken[1], taken[2].value, taken[0]),)
    return None


def _may_set(step: dis.Instruction, stack: Sequence[Value], stored: Sequence[_Stored]) -> bool:
    """Whether the instruction gives a value to what has the name of a place that holds the read, or to a function that
    got the read."""
    takes, name = _taken_by(step), step.argval
    taken = stack[-takes:] if takes and takes <= len(stack) else ()
    if step.opname in _TAKES_MORE:
        again = any(one.kind == "call" and one.at == step.offset for one in stored)
        return again and not any(isinstance(one, _Other) for one in taken)
    if step.opname == "STORE_SUBSCR" and taken and isinstance(taken[-1], _Constant):
        name = taken[-1].value
    elif step.opname != "STORE_ATTR":
        return False
    known = bool(taken) and isinstance(taken[0], _Other)
    places = [one.name for one in stored if one.kind in ("attribute", "item")]
    return not known and any(type(place) is type(name) and place == name for place in places)


def _put_by_call(
    step: dis.Instruction, taken: Sequence[Value], keywords: tuple[str, ...]
) -> tuple[_Stored, ...] | None:  # fmt: skip
    """Where ``append``, ``update`` or another function, called with these values, puts the read."""
    callee, given = next((one for one in taken[:2] if isinstance(one, _Name)), None), [*taken[2:]]
    if step.opname == "CALL_KW":
        names = given.pop()
        keywords = names.value if isinstance(names, _Constant) else ()
    if callee is None or _holds_read(taken[0]) or len(given) < len(keywords):
        return None
    positional, named = given[: len(given) - len(keywords)], given[len(given) - len(keywords) :]
    holder, method = evolve(callee, steps=callee.steps[:-1]), callee.steps[-1] if callee.steps else None
    if method == ("attribute", "append") and not keywords and len(given) == 1:
        return (_Stored("append", holder, None, _count(given[0]), _one_of(given[0])),)
    if any(isinstance(one, _Sum) for one in given):
        return None
    arguments = _Arguments(tuple(positional), tuple(zip(keywords, named, strict=True)))
    return (_Stored("call", callee, arguments, 0),)


def _updated(holder: _Name, stored: _Stored) -> tuple[_Stored, ...] | None:
    """What ``update`` of a dict puts where, by its arguments."""
    positional, named = stored.name.positional, stored.name.named
    try:
        members = _dict([_Constant(key) for key, _ in named], [value for _, value in named])
        made = [one for one in (*positional, members) if _holds_read(one)]
        items = [item for one in made for item in _items(holder, one)]
    except _Refused:
        return None
    return tuple([evolve(one, at=stored.at) for one in items]) if len(positional) < 2 else None


def _items(holder: _Name, made: Value) -> tuple[_Stored, ...]:
    """The members of a new dict are put into another one."""
    if not isinstance(made, _Made) or not all(type(key) is str for key, _ in made.members):
        raise _Refused
    held = [(key, member) for key, member in made.members if member is not None]
    return tuple([_Stored("item", holder, key, _count(member), _one_of(member)) for key, member in held])


def _put(kind: str, holder: _Name, name: Any, value: _Read | _Computed | _Sum) -> _Stored:
    """The value is put there. A sum is put where its first number was."""
    if not isinstance(value, _Sum):
        return _Stored(kind, holder, name, 1, value)
    if value.place != evolve(holder, steps=(*holder.steps, (kind, name))):
        raise _Refused
    return _Stored(kind, holder, name, 1, value.added, adds=True)


def _one_of(value: Value) -> _Read | _Computed:
    """The read, or what was computed of it, that these members are."""
    if isinstance(value, (_Read, _Computed)):
        return value
    if not isinstance(value, _Made):
        raise _Refused
    members = {_one_of(member) for _, member in value.members if member is not None}
    if len(members) > 1:
        raise _Refused
    return members.pop()


def _done(
    step: dis.Instruction, stack: list[Value], names: dict[str, Value]
) -> tuple[tuple[Value, ...], frozenset[tuple[str, Value]]]:
    """Stack and local names after any other instruction."""

    def taken(count: int) -> list[Value]:
        return [stack.pop() if stack else None for _ in range(count)][::-1]  # below lies what came before the read

    name, count = step.opname, step.arg or 0
    if name in _LOADS:
        stack += [names.get(local, _Name("local", local)) for local in _names(step)]
    elif name in _STORES:
        for stored_name in _names(step):
            names[stored_name] = _only_read(taken(1)[0])
    elif name == "STORE_FAST_LOAD_FAST":
        first, second = _names(step)
        names[first] = _only_read(taken(1)[0])
        stack.append(names.get(second, _Name("local", second)))
    elif name == "SWAP":
        stack[:0] = [None] * (count - len(stack))
        stack[-count], stack[-1] = stack[-1], stack[-count]
    elif name == "COPY":
        stack.append(stack[-count] if count <= len(stack) else None)
    elif name in ("BUILD_TUPLE", "BUILD_LIST"):
        stack.append(_made(list(enumerate(taken(count)))))
    elif name in ("LIST_APPEND", "MAP_ADD"):
        _gather(taken(1 + (name == "MAP_ADD")), stack, count)
    elif name == "BUILD_CONST_KEY_MAP":
        keys = taken(1)[0]
        assert isinstance(keys, _Constant)
        stack.append(_dict([*map(_Constant, keys.value)], taken(count)))
    elif name == "BUILD_MAP":
        values = taken(2 * count)
        stack.append(_dict(values[::2], values[1::2]))
    elif name == "UNPACK_SEQUENCE":
        stack += _members(taken(1)[0], range(count))[::-1]
    elif _takes_item(step) and len(stack) > 1 and isinstance(stack[-2], _OfArray):
        array, key = taken(2)
        stack.append(_of_array(array, _GET_ITEM, [key]))
    elif _takes_item(step) and len(stack) > 1 and _holds_read(stack[-2]):
        container, key = taken(2)
        stack += _members(container, [key.value if isinstance(key, _Constant) else _Read()])
    elif name == "BINARY_OP" and len(stack) > 1 and any(map(_holds_read, stack[-2:])):
        stack.append(_arithmetic(step.argrepr, *taken(2)))
    elif name in ("LOAD_METHOD", "LOAD_ATTR") and stack and isinstance(stack[-1], _OfArray):
        stack += _method(step, taken(1)[0])
    elif name == "CALL" and len(stack) > count + 1 and isinstance(stack[-2 - count], _Method):
        method, _, *arguments = taken(count + 2)
        stack.append(_of_array(method, None, arguments))
    elif name == "CALL" and count == 1 and (size := _size(stack[-3:])) is not None:
        taken(3)
        stack.append(size)
    else:
        _do_more(step, stack, names, taken)
    return tuple(stack), frozenset(names.items())


def _method(step: dis.Instruction, array: Value) -> list[Value]:
    """A method of an array, and a place for the array itself."""
    assert isinstance(array, _OfArray)
    if step.argval not in _OF_ARRAYS or dis.stack_effect(step.opcode, step.arg) != 1:
        raise _Refused
    return [_Method(array, step.argval), None]


def _of_array(value: Value, name: str | None, arguments: Sequence[Value]) -> _OfArray:
    """What a method makes of an array. ``value``: the array, with the name of the method, or the method."""
    array, called = (value.array, value.name) if isinstance(value, _Method) else (value, name)
    if not isinstance(array, _OfArray) or called is None or len(array.steps) >= _MOST_STEPS:
        raise _Refused
    given = tuple([one.value for one in arguments if isinstance(one, _Constant)])
    if len(given) < len(arguments):
        raise _Refused
    return _OfArray((*array.steps, (called, given)))


def _gather(put: Sequence[Value], stack: list[Value], depth: int) -> None:
    """A comprehension puts one more member into what it makes, it is not known where."""
    *keys, value = put
    if any(map(_holds_read, keys)):
        raise _Refused
    stack[:0] = [None] * (depth - len(stack))
    if not isinstance(_only_read(value), _Other | None):  # what it reads in the next round is looked at then
        made = stack[-depth]
        stack[-depth] = _Made((*(made.members if isinstance(made, _Made) else ()), (None, value)))


def _do_more(
    step: dis.Instruction, stack: list[Value], names: dict[str, Value], taken: Callable[[int], list[Value]]
) -> None:
    """Any other instruction. It must not take the read."""
    takes = _taken_by(step)
    looks = step.opname in _NAMED and step.argval in _LOOKS_AROUND
    looks = looks or (step.opname == "KW_NAMES" and any(isinstance(one, _Method) for one in stack))
    if looks or any(map(_holds_read, stack if takes is None else stack[len(stack) - takes :] if takes else ())):
        raise _Refused
    effect = dis.stack_effect(step.opcode, step.arg)
    if takes is None:
        taken(max(-effect, 0))
        stack += [None] * max(effect, 0)
        return
    stack += _given(step, taken(takes))
    if step.opname in ("STORE_DEREF", "STORE_GLOBAL"):
        names[step.argval] = None
    elif step.opname in _NAMED and step.argval in names:
        stack[-1] = None


def _arithmetic(written: str, left: Value, right: Value) -> Value:
    """What Python computes of the read and another number, or of what is in a place and the read."""
    operation, added = written.removesuffix("="), (_Read, _Computed)
    if isinstance(left, _Name) and left.steps and operation == "+" and isinstance(right, added) and not _is_size(left):
        return _Sum(left, right)
    read, operand = (right, left) if isinstance(right, added) else (left, right)
    if (
        (operation == "/" and read is right)
        or operation not in _OPERATIONS
        or not isinstance(read, added)
        or not isinstance(operand, (_Constant, _Name))
    ):
        raise _Refused
    if isinstance(operand, _Name) and operand.steps and not _is_size(operand):
        raise _Refused  # what is there may be another one by now
    steps = (*(read.steps if isinstance(read, _Computed) else ()), (operation, operand, read is right))
    if len(steps) > _MOST_STEPS:
        raise _Refused
    return _Computed(steps)


def _is_size(name: _Name) -> bool:
    return name.steps[0][0] in ("len", "size") or name.steps[0] == ("attribute", "shape")


def _size(called: Sequence[Value]) -> _Name | None:
    """``len(x)`` or ``x.size(0)``, by what is on the stack."""
    if len(called) < 3 or any(map(_holds_read, called)):
        return None
    *callees, given = called
    for callee in callees:
        if callee == _Name("global", "len") and isinstance(given, _Name) and given.kind == "local" and not given.steps:
            return evolve(given, steps=(("len", None),))
        if isinstance(callee, _Name) and callee.kind == "local" and callee.steps == (("attribute", "size"),):
            return evolve(callee, steps=(("size", given.value),)) if isinstance(given, _Constant) else None
    return None


def _only_read(value: Value) -> Value:
    if isinstance(value, _Sum):
        raise _Refused  # it is part of what was in a place
    return value if _holds_read(value) or isinstance(value, _Other) else None


def _count(value: Value) -> int:
    return sum(_count(one) for _, one in value.members) if isinstance(value, _Made) else int(_holds_read(value))


def _made(members: Sequence[tuple[Any, Value]]) -> Value:
    read = [(name, _only_read(one)) for name, one in members]
    return _Made(tuple(read)) if any(one is not None for _, one in read) else None


def _dict(keys: Sequence[Value], values: Sequence[Value]) -> Value:
    """Keys are plain names: their texts tell them apart."""
    if not any(map(_holds_read, (*keys, *values))):
        return None
    if not all(isinstance(key, _Constant) and type(key.value) is str and _NO_KEY.isdisjoint(key.value) for key in keys):
        raise _Refused
    return _made([*{one.value: value for one, value in zip(keys, values, strict=True)}.items()])  # type: ignore[union-attr]


def _members(container: Value, keys: Sequence[Any]) -> list[Value]:
    if not _holds_read(container):
        return [None] * len(keys)
    members = dict(container.members) if isinstance(container, _Made) else {}
    if not all(type(key) in (int, str) and key in members for key in keys):
        raise _Refused
    return [members[key] for key in keys]


def _holds_read(value: Value) -> bool:
    return isinstance(value, (_Read, _Method, _Made, _Computed, _Sum))


def _places(made: Value, path: str) -> Iterator[str]:
    if isinstance(made, (_Read, _Computed)):
        yield f"{path}{_formula(made)}"
    for name, member in made.members if isinstance(made, _Made) else ():
        yield from _places(member, f"{path}.{_SOMEWHERE if name is None else name}")


# ------------------------------------------------------------------------------------------------ in a replay


def _formula(value: Value) -> str:
    """How a number follows from the read, as text; empty for the read itself."""
    if isinstance(value, _OfArray) and value.steps:
        raise _Refused
    steps = value.steps if isinstance(value, _Computed) else ()
    texts = []
    for operation, operand, is_left in steps:
        number: Any = operand.value if isinstance(operand, _Constant) else None
        kind = type(number).__name__
        if kind not in ("int", "float"):
            raise _Refused
        texts.append(f"{operation} {kind} {float.hex(number) if kind == 'float' else number}{' left' * is_left}")
    return f"{_IS}{', '.join(texts)}" if texts else ""


@functools.lru_cache(maxsize=1024)
def _parsed(formula: str) -> tuple[tuple[Callable[[Any, Any], Any], Any, bool], ...]:
    steps = []
    for step in formula.removeprefix(_IS).split(", ") if formula else ():
        operation, kind, number, *left = step.split(" ")
        operand: Any = float.fromhex(number) if kind == "float" else int(number)
        steps.append((_OPERATIONS.get(operation, operator.getitem), operand, bool(left)))
    return tuple(steps)


def item_formula(number: int) -> str:
    """How a member of a list follows from the list."""
    return f"{_IS}{_ITEM} int {number}"


def computed(formula: str, value: Any) -> Any:
    """What Python computes of a value that was read. Raises what it does."""
    for operation, operand, is_left in _parsed(formula):
        value = operation(operand, value) if is_left else operation(value, operand)
    return value


class AsReturned(dict[Any, Any]):
    """Values that were read in a call, as the body returns or keeps them: by the number of the read, or that and a
    formula."""

    def __missing__(self, key: tuple[int, str]) -> Any:
        return computed(key[1], self[key[0]])


def returned_at(reads: Sequence[str]) -> dict[int, list[tuple[str, str]]]:
    """The places in the result of values that the body only returns or keeps, each with its formula, by the number of
    their read."""
    places_by_read: dict[int, list[tuple[str, str]]] = {}
    for number, text in enumerate(reads):
        if text.startswith(RETURNED):
            places = [part.partition(_IS) for part in _split(text)[1].split(_AND) if not part.startswith(_KEPT)]
            places_by_read[number] = [(place, f"{sign}{formula}") for place, sign, formula in places]
    return places_by_read


def go_one_way(reads: Sequence[str]) -> bool:
    """Whether the body only returns or keeps all values that the host reads, and gets none of islands: it cannot go
    another way."""
    return all((text.startswith(RETURNED) and not text.startswith(ASKED)) or text == GIVES_NOTHING for text in reads)


def is_computed(text: str) -> bool:
    """Whether the body returns what it computes of the value."""
    return _IS in text


def as_returned(text: str, value: Any) -> Any:
    """What the body returns of a value that was read, by the text of the read."""
    kind, _ = _split(text)
    return _KINDS[kind](value) if kind else value


def kind_of_returned(text: str) -> Callable[[Any], Any] | None:
    """What makes of such a value what the body returns, by the text of the read; None: it is returned as it is."""
    kind, _ = _split(text)
    return _KINDS[kind] if kind else None


def _split(text: str) -> tuple[str, str]:
    places = text.removeprefix(RETURNED)
    kind, _, rest = places.partition(" of ")
    return (kind, rest) if kind in _KINDS else ("", places)
