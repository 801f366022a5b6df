"""Read guards: what a body can have read of Python state is as it was.

For each object that is reached from the receiver, the arguments, the globals and the closure cells of code that ran,
every name in that code is looked up, in the object and in its classes. What is found, and that the rest is not there,
becomes a guard. Nothing is looked up as users' classes do: dicts, slots and the MRO are followed.
"""

from __future__ import annotations

import abc
import array
import contextvars
import functools
import gc
import operator
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from capture.guards.guard import OK, Guard, Referent, itself
from capture.guards.names_used import OF_ALL_CLASSES, Names, names_of, place_of
from capture.key import numpy_arrays
from capture.key.code_names import MISSING, NamedKey, part_of, same_value
from capture.key.input_places import InputPlace, may_be_input
from capture.key.objects import referent
from capture.key.packages import is_library, package_of
from capture.key.pytree import PLAIN_TYPES, is_object
from capture.native import native
from capture.state.call import Call
from capture.state.code_run import CodeRun
from capture.state.effects import uses_of_names
from capture.state.snapshot import Change, Members
from capture.state.source import Source
from capture.torch_private import capabilities
from capture.torch_private.dynamo import COMPILERS
from capture.torch_private.getters import asked_of_torch

_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of classes: made by a ``class`` statement, and not to be changed
CLOSED = frozenset({"builtins", "threading", "_thread", "logging", "_io", "socket", "re", "typing", "abc",
                     "concurrent", "multiprocessing", "asyncio", "capture", "importlib", "warnings",
                     "inspect", "contextlib"})  # fmt: skip
"""Packages whose objects are not opened: machinery that has no part in what a body computes, or our own."""
_STEPS_ASIDE = ("torch.nn.parallel", "torch.distributed", *COMPILERS)
"""Whose objects count their steps in attributes, and have switches or guards of their own."""
_NOT_OPENED = (
    torch.Tensor, torch.Generator, torch.Stream, torch.Event, torch.UntypedStorage, torch.device,
    types.CodeType, types.FrameType, types.GeneratorType, types.TracebackType,
)  # fmt: skip
_WITH_GUARDS = (torch.Tensor, torch.Generator)
_OF_ALL_MODULES = frozenset({"__builtins__", "__spec__", "__loader__", "__cached__"})
_SEQUENCES: tuple[Any, ...] = (list, set, deque)
_SMALL = 64  # members of a library's container
_COMPILED = "_torchdynamo_orig_callable"
"""In the ``__dict__`` of a function that ``torch.compile`` made; without it, its globals and cells are not guarded."""
_DISABLED = "_torchdynamo_disable"
_HANDLE = "__capture__"  # in the ``__dict__`` of a function that is captured
Key = tuple[int, Any]
"""``id`` of what keeps a value, and the name there."""


@frozen
class Counted:
    """Stands for any number of this class, in a place that the body only adds to."""

    kind: type


@frozen
class Replaced:
    """Stands for what was where the body put a new object, as it always does. It counts where it was read."""

    before: Any


@define(eq=False)
class Place:
    """A guard on names, and who keeps them: told weakly where that is possible. Never changed, as a ``Guard``."""

    guard: Guard
    keeper: Callable[[], Any]
    counted: Collection[str] = ()
    """Names that code only adds to: whatever their values were, nothing followed from them."""

    def tell_apart(self, named: NamedKey) -> list[str]:
        """Make names that have other values a part of the key. Gives the paths of those that were none before."""
        path = self.guard.source.path
        others = [
            (name, f"{path}.{name}") for name, old, new in self.others()
            if part_of(old) != part_of(new) and not (name in self.counted and type(new) is int)
        ]  # fmt: skip
        return [full for name, full in others if named.tell_apart(self.keeper, name, full)]

    def own(self) -> Any:
        """The dict that keeps the names."""
        return _own_dict(self.keeper())

    def others(self) -> list[tuple[str, Any, Any]]:
        """Names that have other values now, with those then and now."""
        own = _own_dict(self.keeper())
        if own is None:
            return []
        expected = self.guard.expected
        pairs: list[tuple[str, Any, Any]]
        if self.guard.kind == "members":
            absent, there = expected
            pairs = [(name, value, None) for name, value in there]
        else:
            _, names, values, kinds = expected
            pairs, absent = list(zip(names, values, kinds, strict=True)), expected[0] - set(names)
        differences = [(name, MISSING, own[name]) for name in absent if name in own]
        for name, value, kind in pairs:
            now = own.get(name, MISSING)
            if kind is None and not same_value(now, value):
                differences.append((name, value, now))
        return differences


def _own_dict(keeper: Any) -> Any:
    """What a guard on names is about: an object's ``__dict__``, also of one that is a dict of a class of its own."""
    return keeper if type(keeper) is dict else getattr(keeper, "__dict__", None)


MOST_OBJECTS = 50_000
"""That a walk opens, some 10 us each: a model's config and layers are hundreds, a data set is millions. Beyond it the
call is eager, as its guards would take longer than its operators."""


@define(eq=False)
class Places:
    """Guards on names, and who keeps them."""

    all: list[Place] = field(factory=list)
    objects: list[tuple[InputPlace, Callable[[], Any]]] = field(factory=list)
    """Where objects are kept that might be inputs, and what gives those objects while they are there: another one in
    each call makes them such."""
    _guards: Callable[[Sequence[Any]], int] | None = None

    def tell_apart(self, named: NamedKey) -> list[str]:
        """See `Place.tell_apart`. Most often nothing is another value, which the C module sees."""
        if self._guards is None:
            self._guards = native.Guards(tuple([one.guard for one in self.all]))
        if self._guards(()) == OK:
            return []
        return [path for one in self.all for path in one.tell_apart(named)]


@define(eq=False)
class Read:
    """Guards on all that was read, and the places that keep it."""

    guards: list[Guard] = field(factory=list)
    places: Places = field(factory=Places)
    obstacle: tuple[str, str] | None = None
    """What was read and cannot be guarded, and its path."""
    opened: frozenset[int] = frozenset()
    """``id`` of objects that were gone into: what can have been read of them is in guards of its own."""
    tensors: set[int] = field(factory=set)
    """``id`` of all tensors that were met."""
    own: frozenset[int] = frozenset()
    """Those of them that have guards of their own."""
    begun_with: tuple[Any, ...] = ()

    def still_holds(self, run: CodeRun, call: Call, tensors: Collection[int]) -> bool:
        """Another walk would find the same guards: it begins with the same, and all that was read is as it was."""
        if self.obstacle is not None or self.begun_with != _begins_with(run, call):
            return False
        return self.tensors.intersection(tensors) == self.own and native.Guards(tuple(self.guards))(()) == OK


class OtherTensors:
    """Tensors that no operator read have the metadata that they had: Python code may look at it."""

    __slots__ = ("_same", "kinds")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._same = capabilities.metadata_check(tensors)
        self.kinds = [
            (type(one), one.dtype, one.shape, one.stride(), one.device, one.requires_grad, one.is_inference())
            for one in tensors
        ]

    def __call__(self) -> bool:
        return self._same()


@frozen(eq=False)
class _OfClass:
    """What a walk does with objects of one class."""

    open: Callable[[ReadWalk, Any, str], None] | None
    has_attributes: bool
    is_closed: bool
    """Of a package whose objects are not looked into."""
    is_module: bool
    is_users: bool
    """Made by a ``class`` statement: its objects may be given another class, or another ``__dict__``."""
    has_slots: bool
    wanted: frozenset[str]
    """Names that may have been looked up in its objects."""


@define(eq=False)
class ReadWalk:
    """One walk, breadth first, from what is known to be the same in each call with this key."""

    names: Names
    changed: dict[Key, Any]
    """Places that the body itself gave another value, with the one before: that has to be there again if it is a plain
    one, and of others one of its class."""
    rebuilt: Mapping[int, Members | None]
    """Containers whose members the body changed, by ``id``, with those that it had, where these count."""
    tensors: Collection[int]
    """``id`` of tensors that have guards of their own."""
    is_static: bool = False
    """Functions that are reached count as if they had run."""
    compiled: list[types.FunctionType] = field(factory=list)
    """Functions that are compiled, or that compiled ones may call, and whose code is in no names yet."""
    counted: Collection[str] = ()
    """See ``Place``."""
    by_name: Collection[int] = ()
    """``id`` of dicts of which only those members count whose names the code mentions."""
    more_names: set[str] = field(factory=set)
    """What objects such as ``operator.attrgetter`` look up."""
    found: Read = field(factory=Read)
    _changed_in: dict[int, dict[Any, Any]] = field(factory=dict)
    _seen: set[int] = field(factory=set)
    _queue: deque[tuple[Any, str]] = field(factory=deque)
    _classes_met: dict[type, _OfClass] = field(factory=dict)
    _kept: list[Any] = field(factory=list)
    """Keeps what was seen, so that no ``id`` comes twice."""
    _empty: list[Any] = field(factory=list)
    _functions: list[types.FunctionType] = field(factory=list)
    _classes: list[type] = field(factory=list)
    _objects: list[tuple[Any, dict[str, Any] | None]] = field(factory=list)
    """With their ``__dict__``, where the guards on its names do not look it up."""
    _other_tensors: dict[int, torch.Tensor] = field(factory=dict)
    _builtins: set[str] = field(factory=set)
    """Names of functions in C that were found as values."""

    # --------------------------------------------------------------------------------------------------- from the top

    def begin(self, function: Any, starts: Iterable[tuple[Any, str]], scopes: Iterable[dict[str, Any]]) -> None:
        """Go from the function that is captured, from these objects, and from globals. The first one's globals have
        plain names."""
        for (keeper, name), before in self.changed.items():
            self._changed_in.setdefault(keeper, {})[name] = before
        own = getattr(function, "__globals__", None)
        self._enter(function, "" if isinstance(function, types.FunctionType) else "function")
        for value, path in starts:
            self._enter(value, path)
        for scope in scopes:
            module = scope.get("__name__", "a module")
            self._scope(scope, "" if scope is own else f"{module}.")
        self._scope(vars(sys.modules["builtins"]), "builtins.")
        while self._queue:
            value, path = self._queue.popleft()
            if len(self._seen) > MOST_OBJECTS:
                self.found.obstacle = (f"more than {MOST_OBJECTS:,} objects", path)
                break
            self._open(value, path)
        self._finish()

    def _scope(self, scope: dict[str, Any], prefix: str) -> None:
        """Globals: names that code in this module looked up, or in any module where they are built in."""
        if package_of(scope.get("__name__")) in CLOSED and prefix != "builtins.":
            return
        if prefix == "builtins.":
            wanted = {name for other, names in self.names.scopes.values() for name in names if name not in other}
        else:
            wanted = self.names.scopes[id(scope)][1]
        is_theirs = is_library(package_of(scope.get("__name__")))
        self._members(scope, sorted(wanted), prefix, _opens_of_library if is_theirs else _always)

    def _members(
        self, scope: dict[str, Any], wanted: Iterable[str], prefix: str, opens: Callable[[str, Any], bool]
    ) -> None:
        """``opens``: by name and value, whether to go into it."""
        absent, there = [], []
        for name in wanted:
            value = scope.get(name, MISSING)
            if (id(scope), name) in self.names.stored:
                continue
            before = self.changed.get((id(scope), name), value)
            if type(before) is Replaced and name in self.names.set_only:
                continue
            before = _before(before)
            if before is MISSING:
                absent.append(name)
            elif type(before) is Counted:
                read = functools.partial(_is_a, scope, name, before.kind)
                self.found.guards.append(Guard("value", Source("call", read, None, f"{prefix}{name}"), True))
            elif (id(scope), name) in self.changed:
                if type(before) in PLAIN_TYPES:
                    there.append((name, before))
            elif not self._has_own_guard(value):
                there.append((name, value))
                self._note_object(value, f"{prefix}{name}", scope, name)
                if opens(name, value):
                    self._value(value, f"{prefix}{name}")
        if absent or there:
            guard = Guard("members", itself(scope, prefix.rstrip(".") or "globals"), (tuple(absent), tuple(there)))
            self._add(guard, lambda: scope)

    def _add(self, guard: Guard, keeper: Callable[[], Any]) -> None:
        self.found.guards.append(guard)
        self.found.places.all.append(Place(guard, keeper, self.counted))

    def _finish(self) -> None:
        guards = self.found.guards
        if self._empty:  # one guard for all is made and looked at fastest
            guards.append(Guard("empty", itself(tuple(self._empty), "what was empty")))
        if self._functions:
            functions = tuple(self._functions)
            parts = [part for one in functions for part in (one.__code__, one.__defaults__, one.__kwdefaults__)]
            guards.append(Guard("functions", itself(functions, "code and defaults"), tuple(parts)))
        if self._classes:
            guards.append(
                Guard("bases", itself(tuple(self._classes), "bases"), tuple([o.__mro__ for o in self._classes]))
            )
        if self._objects:
            objects = tuple([_weakly(one) for one, _ in self._objects])
            kinds, owns = tuple([type(one) for one, _ in self._objects]), tuple([own for _, own in self._objects])
            guards.append(Guard("classes", itself(objects, "classes"), (kinds, owns)))
        if id(vars(abc)) in self.names.scopes:  # an abstract class was asked: C code keeps what is registered with it
            read = abc.get_cache_token
            guards.append(Guard("value", Source("call", read, None, "registered with abstract classes"), read()))
        for path, read, value in asked_of_torch(self.names.of_packages(self.names.by_package) | self._builtins):
            guards.append(Guard("value", Source("call", read, None, path), value))
        if self._other_tensors:
            same = OtherTensors(list(self._other_tensors.values()))
            guards.append(Guard("value", Source("call", same, None, "tensors that no operator read"), True))
        closed = {id(one) for one in self._kept if issubclass(type(one), (types.FunctionType, types.ModuleType, type))}
        self.found.opened = frozenset(self._seen - closed)

    # -------------------------------------------------------------------------------------------------- what is opened

    def _enter(self, value: Any, path: str) -> None:
        kind = type(value)  # not ``isinstance``, which asks the object: a weak proxy answers for another one
        if kind in PLAIN_TYPES or id(value) in self._seen or issubclass(kind, _NOT_OPENED):
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if (kind is dict or kind is OrderedDict) and not value:  # a module has ten of them, its tables of hooks
            self._dict(value, path)
            if kind is OrderedDict:
                self._attributes(value, self._of_class(kind), path)
            return
        self._queue.append((value, path))

    def _open(self, value: Any, path: str) -> None:
        kind = type(value)
        met = self._classes_met.get(kind) or self._of_class(kind)
        if met.open is not None:
            met.open(self, value, path)
        if met.has_attributes:
            self._attributes(value, met, path)

    def _of_class(self, kind: type) -> _OfClass:
        """With the first object of a class that is not closed, its classes are gone into, too."""
        made = self._classes_met.get(kind)
        if made is not None:
            return made
        opened = next((open_it for of, open_it in _OPENED if issubclass(kind, of)), None)
        if opened is None and numpy_arrays.is_array_type(kind):
            opened = ReadWalk._array
        has_attributes = not issubclass(kind, (type, types.ModuleType, types.FunctionType))
        module: Any = kind.__module__
        is_closed = package_of(module) in CLOSED or (type(module) is str and module.startswith(_STEPS_ASIDE))
        if has_attributes and not is_closed:
            for base in kind.__mro__[:-1]:
                self._enter(base, base.__qualname__)
        made = self._classes_met[kind] = _OfClass(
            opened, has_attributes, is_closed, issubclass(kind, torch.nn.Module),
            kind.__flags__ & (_HEAP | _IMMUTABLE) == _HEAP and not issubclass(kind, weakref.ref),
            any(base.__flags__ & _HEAP and "__slots__" in base.__dict__ for base in kind.__mro__[:-1]),
            self.names.of_class(kind) if has_attributes and not is_closed else frozenset(),
        )  # fmt: skip
        return made

    def _method(self, value: types.MethodType, path: str) -> None:
        self._enter(value.__func__, path)
        self._enter(value.__self__, f"{path}.__self__")

    def _builtin_method(self, value: types.BuiltinFunctionType, path: str) -> None:
        """Such as ``runs.append``: what it works on. Of a module, it may be a getter of torch's."""
        self._builtins.add(value.__name__)
        if not isinstance(value.__self__, types.ModuleType | None):
            self._enter(value.__self__, f"{path}.__self__")

    def _partial(self, value: functools.partial[Any], path: str) -> None:
        for name in ("func", "args", "keywords"):
            self._enter(getattr(value, name), f"{path}.{name}")

    def _each(self, values: Any, path: str) -> None:
        plain: Any = tuple if issubclass(type(values), tuple) else frozenset
        for at, one in enumerate(plain.__iter__(values)):
            self._value(one, f"{path}[{at}]")

    def _value(self, value: Any, path: str) -> None:
        if not self._is_other_tensor(value):
            self._enter(value, path)

    def _is_other_tensor(self, value: Any) -> bool:
        """A tensor that no operator read: Python code may look at its metadata. Its values do not count."""
        if not issubclass(type(value), torch.Tensor):
            return False
        self._attributes_of_tensor(value)
        if self._has_own_guard(value):
            return False
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            self._other_tensors[id(value)] = value
        return True

    def _has_own_guard(self, value: Any) -> bool:
        """It is one of ``tensors``, among which are generators."""
        if issubclass(type(value), _WITH_GUARDS):
            self.found.tensors.add(id(value))
        return id(value) in self.tensors

    def _attributes_of_tensor(self, value: torch.Tensor) -> None:
        """What users' code put on it. Most have nothing, and only code that asks can tell that there is something."""
        own = None if id(value) in self._seen else _dict_of(value)
        if own is None or not (own or self.names.asked):
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if own:
            self._names(value, own, self.names.of_packages(()), "an attribute of a tensor")
        else:
            self._empty.append(own)

    def _note_object(self, value: Any, path: str, keeper: Any, name: Any, *, is_attribute: bool = False) -> None:
        """Unless the body itself puts it there."""
        if may_be_input(value):
            get = (_weak_or_none(keeper) if is_attribute else None) or (lambda: keeper)
            held = _weak_or_none(value) or (lambda: value)
            self.found.places.objects.append((InputPlace(path, get, name, is_attribute), held))

    def _expected(self, key: Key, value: Any, path: str) -> tuple[Any, type | None]:
        """What has to be here again, which is gone into; or a class of which anything may be here."""
        if key in self.changed:
            value = self.changed[key]
            if type(value) is Counted:
                return None, value.kind
            value = value.before if type(value) is Replaced else value
            return (value, None) if type(value) in PLAIN_TYPES else (None, type(value))
        if id(value) in self.rebuilt and self.rebuilt[id(value)] is None:
            return None, type(value)
        self._value(value, path)
        return (None, type(value)) if self._has_own_guard(value) else (value, None)

    # ------------------------------------------------------------------------------------------------------ attributes

    def _attributes(self, value: Any, of_class: _OfClass, path: str) -> None:
        """What is in the object's ``__dict__`` and slots, and in its classes."""
        kind, own = type(value), _dict_of(value)
        if of_class.is_closed:
            if own is not None and of_class.is_module:  # such as what ``torch.compile`` puts around one
                self._module(own, path)
                self._compiled_module(own)
            return
        if of_class.is_users:
            self._objects.append((value, None if own is None or _handle_of(own.get("forward")) else own))
        if own is not None:
            if of_class.is_module:
                self._module(own, path)
                if self.is_static and type(kind.forward) is types.FunctionType:
                    self._as_if_run(kind.forward)
            if own or of_class.is_users or id(value) in self._changed_in:
                self._names(value, own, of_class.wanted, path)
            else:  # of a class of Python's, such as ``OrderedDict``: hardly anybody puts something on it
                self._empty.append(own)
        if of_class.has_slots:
            self._slots(value, kind, of_class.wanted, path)

    def _names(self, value: Any, own: dict[str, Any], wanted: frozenset[str], path: str) -> None:
        if self.names.is_computed:
            wanted |= frozenset(own)
            if id(value) not in self._changed_in:
                self.found.guards.append(Guard("length", itself(own, path), len(own)))
        handle = _handle_of(own["forward"]) if "forward" in own else None
        is_captured = handle is not None
        if is_captured:  # a captured instance, which its own ``__dict__`` would keep alive
            wanted -= {"forward"}
            self._captured(value, handle, path)
        wanted -= self._always_set(id(value))
        names, kept, kinds = self._columns(id(value), own, wanted, path, value if value is not own else None)
        if value is own:  # of a thread
            for name, value_there in zip(names, kept, strict=True):
                self._note_object(value_there, f"{path}.{name}", own, name)
        keeper = _weak_or_none(value)
        holder = keeper if is_captured and keeper is not None else own
        expected = (wanted, names, kept, kinds)
        self._add(Guard("names", itself(holder, path), expected), keeper if keeper is not None else lambda: own)

    def _always_set(self, keeper: int) -> frozenset[str]:
        """Names there to which the body gives tensors, and which no code looks up."""
        changed = self._changed_in.get(keeper, {})
        return frozenset(
            [name for name, before in changed.items() if type(before) is Replaced and name in self.names.set_only]
        )

    def _columns(
        self, keeper: int, own: Mapping[str, Any], wanted: frozenset[str], path: str, holder: Any = None
    ) -> tuple[tuple[str, ...], tuple[Any, ...], tuple[type | None, ...]]:
        """Names that are there, their values, and classes, where they count instead."""
        there = {name: value for name, value in own.items() if name in wanted}
        is_changed = keeper in self._changed_in
        if is_changed:
            there |= {name: before for name, before in self._changed_in[keeper].items() if name in wanted}
            there = {name: value for name, value in there.items() if _before(value) is not MISSING}
        values, kinds, seen = list(there.values()), list[type | None](), self._seen
        for at, (name, value) in enumerate(there.items()):
            kind = type(value)
            if holder is not None and kind not in PLAIN_TYPES and (keeper, name) not in self.changed:
                self._note_object(value, f"{path}.{name}" if path else name, holder, name, is_attribute=True)
            if not is_changed and (kind in PLAIN_TYPES or (id(value) in seen and not issubclass(kind, _WITH_GUARDS))):
                kinds.append(None)  # the common case of the one below
                continue
            values[at], kept = self._expected((keeper, name), value, f"{path}.{name}" if path else name)
            kinds.append(kept)
        return tuple(there), tuple(values), tuple(kinds)

    def _captured(self, value: Any, handle: Any, path: str) -> None:
        source = Source("weak", weakref.ref(value), "forward", f"{path}.forward")
        self.found.guards.append(Guard("object", source, Referent.of(value.__dict__["forward"])))
        self._enter(getattr(handle, "function", None), f"{path}.forward")

    def _slots(self, value: Any, kind: type, wanted: frozenset[str], path: str) -> None:
        for base in kind.__mro__[:-1]:
            if not base.__flags__ & _HEAP or "__slots__" not in base.__dict__:
                continue
            for name, slot in base.__dict__.items():
                if type(slot) is not types.MemberDescriptorType or (name not in wanted and not self.names.is_computed):
                    continue
                try:
                    held = slot.__get__(value, kind)
                except AttributeError:
                    read = functools.partial(_is_unset, slot, value)
                    self.found.guards.append(Guard("value", Source("call", read, None, f"{path}.{name}"), True))
                    continue
                self._one((id(value), name), held, Source("slot", value, slot, f"{path}.{name}"))

    def _module(self, own: dict[str, Any], path: str) -> None:
        """A module's submodules, and the parameters and buffers that it has."""
        for name in ("_modules", "_parameters", "_buffers"):
            table = own.get(name)
            if isinstance(table, dict):
                self._seen.add(id(table))
                if table:
                    self._table(table, path, is_tensors=name != "_modules")
                else:
                    self._empty.append(table)

    def _table(
        self, table: dict[Any, Any], path: str, *, is_tensors: bool = False, before: Members | None = None
    ) -> None:
        """All members of a dict, in order. Of a module's tensors, those that its code can name have to be there.
        ``before``: those that it had, if the body changed them."""
        expected: list[tuple[Any, type | None]] = []
        items = list(dict.items(table)) if before is None else list(zip(before.keys, before.before, strict=True))
        items = [(key, member) for key, member in items if _before(self.changed.get(_item(table, key))) is not MISSING]
        for key, member in items:
            place = f"{path}.{key}" if type(key) is str and not key.isdigit() else f"{path}[{_key_text(key)}]"
            is_unnamed = is_tensors and key not in self.names.by_package.get("", ())
            if is_unnamed and issubclass(type(member), torch.Tensor) and not self._has_own_guard(member):
                expected.append((None, type(member)))
                continue
            expected.append(self._expected(_item(table, key), member, place))
            if not is_tensors and _item(table, key) not in self.changed:
                self._note_object(member, place, table, key)
            if not is_tensors and type(key) is not str:
                self._value(key, f"a key of {path}")
        keys = tuple([key for key, _ in items])
        values, kinds = tuple([value for value, _ in expected]), tuple([kind for _, kind in expected])
        self.found.guards.append(Guard("table", itself(table, path), (keys, values, kinds)))
        if type(table) is OrderedDict and len(keys) > 1:  # has an order beside that of the dict
            source = Source("root", table, OrderedDict, path)
            order = tuple(table) if before is None and len(keys) == len(table) else keys
            self.found.guards.append(Guard("sequence", source, (order, (None,) * len(keys))))

    def _dict(self, value: dict[Any, Any], path: str) -> None:
        before = self.rebuilt.get(id(value))
        if id(value) in self.rebuilt and before is None:
            return
        name = dict.get(value, "__name__")
        module = sys.modules.get(name) if type(name) is str else None
        if module is not None and getattr(module, "__dict__", None) is value:  # as guards of Dynamo's get it
            self._enter(module, path)
            return
        if id(value) in self.by_name and before is None and not self.names.is_computed:
            named = self.names.of_packages(["torch"])
            self._members(value, sorted(name for name in value if name in named), f"{path}.", _always)
        elif value or before is not None:
            self._table(value, path, before=before)
        else:
            self._empty.append(value)

    def _sequence(self, value: Any, path: str) -> None:
        before = self.rebuilt.get(id(value))
        if id(value) in self.rebuilt and before is None:
            return
        plain = next(one for one in _SEQUENCES if issubclass(type(value), one))
        members = tuple(plain.__iter__(value)) if before is None else before.before
        expected = [self._expected(_item(value, at), member, f"{path}[{at}]") for at, member in enumerate(members)]
        kept, kinds = tuple([member for member, _ in expected]), tuple([kind for _, kind in expected])
        if before is None and plain is list:
            for at, member in enumerate(members):
                self._note_object(member, f"{path}[{at}]", value, at)
        self.found.guards.append(Guard("sequence", Source("root", value, plain, path), (kept, kinds)))

    def _one(self, key: Key, held: Any, source: Source) -> None:
        """A place of its own."""
        value, kind = self._expected(key, held, source.path)
        if key not in self.changed and source.kind in ("closure", "context"):
            self._note_object(held, source.path, source.holder, None)
        if kind is None:
            weak = issubclass(type(value), (types.FunctionType, torch.nn.Module))
            guard = Guard("object", source, Referent.of(value)) if weak else Guard("value", source, value)
            self.found.guards.append(guard)
        elif type(self.changed.get(key)) is Counted:
            read = functools.partial(_holds_a, source, kind)
            self.found.guards.append(Guard("value", Source("call", read, None, source.path), True))

    # ----------------------------------------------------------------------------------------- functions and the like

    def _function(self, value: types.FunctionType, path: str) -> None:
        """Its code, its defaults, and its closure cells, where it ran."""
        if _HANDLE in value.__dict__:
            self._enter(getattr(value.__dict__[_HANDLE], "function", None), path)
        if _COMPILED in value.__dict__ and self._has_run_compiled(value):
            self._compiled(value.__dict__[_COMPILED], path)
        if not is_library(package_of(value.__module__)):
            self._attributes_of_function(value)
        if value.__code__ not in self.names.codes:
            if self.is_static and not is_library(package_of(value.__module__)):
                self._as_if_run(value)
            return
        self._functions.append(value)
        for default in (*(value.__defaults__ or ()), value.__kwdefaults__ or {}):
            self._value(default, f"a default of {value.__qualname__}")
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._kept.append(cell)
                self._cell(cell, f"{value.__qualname__}:{name}" if path else name)

    def _attributes_of_function(self, value: types.FunctionType) -> None:
        """What is kept on a function itself. One that is captured would be kept alive by its ``__dict__``."""
        wanted, own = self.names.of_packages(()), value.__dict__
        wanted -= {_HANDLE, _COMPILED, *self._always_set(id(value))}
        names, kept, kinds = self._columns(id(value), own, wanted, value.__qualname__)
        holder: Any = weakref.ref(value) if _HANDLE in own else own
        source = itself(holder, value.__qualname__)
        self._add(Guard("names", source, (wanted, names, kept, kinds)), weakref.ref(value))

    def _has_run_compiled(self, value: types.FunctionType) -> bool:
        """What ``torch.compile`` made of it ran, or may have run inside of such a part. What ``torch.compiler.disable``
        makes has that form, too, and runs as it is written."""
        if value.__dict__.get(_DISABLED):
            return False
        codes = [getattr(one, "__code__", None) for one in _and_wrapped(value.__dict__[_COMPILED])]
        known = [place_of(one) for one in codes if type(one) is types.CodeType]
        return self.is_static or not known or not self.names.places.isdisjoint(known)

    def _compiled(self, original: Any, path: str) -> None:
        """What ``torch.compile`` got. It runs as other code, by values that it found when it was compiled."""
        self._enter(original, path)
        for function in _and_wrapped(original):
            if type(function) is types.FunctionType:
                self._as_if_run(function)

    def _compiled_module(self, own: dict[str, Any]) -> None:
        """The module in one that ``torch.compile`` made."""
        original = own["_modules"].get("_orig_mod")
        if original is not None:
            self._compiled(type(original).forward, "")

    def _as_if_run(self, function: types.FunctionType) -> None:
        """What torch's own functions, and Triton's, read in a compiled part is its compiler's business: behind them lie
        all modules of both."""
        package = package_of(function.__module__)
        is_apart = package in CLOSED or is_library(package) or package == "triton"
        if not is_apart and function.__code__ not in self.names.codes:
            self.compiled.append(function)

    def _cell(self, cell: types.CellType, path: str) -> None:
        try:
            held = cell.cell_contents
        except ValueError:
            read = functools.partial(_is_empty, cell)
            self.found.guards.append(Guard("value", Source("call", read, None, path), True))
            return
        self._one((id(cell), None), held, Source("closure", cell, None, path))

    def _class(self, kind: type, _: str) -> None:
        """What code can have read of a class itself, or through its objects."""
        module: Any = kind.__module__
        if kind.__flags__ & (_HEAP | _IMMUTABLE) != _HEAP or package_of(module) in CLOSED:
            return
        if type(module) is str and module.startswith(COMPILERS):
            return
        for base in kind.__mro__[1:-1]:
            self._enter(base, base.__qualname__)
        wanted = self.names.of_own_class(kind)
        if self.names.is_computed and not is_library(package_of(kind.__module__)):
            wanted |= frozenset(kind.__dict__) - OF_ALL_CLASSES
            self.found.guards.append(Guard("length", itself(kind.__dict__, kind.__qualname__), len(kind.__dict__)))
        if self.names.matches:
            self.more_names.update(one for one in kind.__dict__.get("__match_args__", ()) if type(one) is str)
        self._classes.append(kind)
        wanted -= self._always_set(id(kind))
        names, kept, kinds = self._columns(id(kind), kind.__dict__, wanted, kind.__qualname__, kind)
        self._add(Guard("names", itself(kind, kind.__qualname__), (wanted, names, kept, kinds)), lambda: kind)
        self._attributes_of_metaclass(kind)

    def _attributes_of_metaclass(self, kind: type) -> None:
        if type(kind) is not type:
            metaclass: type = type(kind)
            for one in metaclass.__mro__:
                if one not in (type, object):
                    self._enter(one, one.__qualname__)

    def _wrapped(self, value: Any, path: str) -> None:
        self._enter(value.__func__, path)

    def _property(self, value: property, path: str) -> None:
        for part in (value.fget, value.fset):
            self._enter(part, path)

    def _python_module(self, module: types.ModuleType, path: str) -> None:
        """What users' code reads of a module that it imported."""
        if package_of(module.__name__) in CLOSED:
            return
        own, package = module.__dict__, package_of(module.__name__)
        users, wanted = self.names.of_packages(()), self.names.of_packages([package])
        prefix = f"{module.__name__}."
        if is_library(package):
            there = {name for name in wanted if name in own} | (self.names.asked - own.keys())
            self._members(own, sorted(there), prefix, lambda name, one: name in users and _opens_of_library(name, one))
            if type(module) is not types.ModuleType:
                computed = dir(type(module)) if self.names.is_computed else ()
                self._given_by_class(module, (users | {*computed}) - own.keys(), prefix)
            return
        wanted |= {"__getattr__"}  # what is looked up where a name is absent
        if self.names.is_computed:
            wanted |= own.keys() - OF_ALL_CLASSES
            self.found.guards.append(Guard("length", itself(own, module.__name__), len(own)))
        self._members(own, sorted(wanted - _OF_ALL_MODULES), prefix, _always)

    def _given_by_class(self, module: types.ModuleType, wanted: Iterable[str], prefix: str) -> None:
        """What a module of a class of its own gives for names that it does not have, but its class or a module behind
        it does, as torch's modules of switches do. One that makes what it is asked for, as ``torch.ops``, has none."""
        behind = [vars(one) for one in vars(module).values() if type(one) is types.ModuleType]
        known = set().union(*map(vars, type(module).__mro__[:-2]), *behind)
        for name in sorted(known.intersection(wanted)):
            value = MISSING if name[:2] == "__" else getattr(module, name, MISSING)
            if type(value) in PLAIN_TYPES:
                read = functools.partial(getattr, module, name, MISSING)
                self.found.guards.append(Guard("value", Source("call", read, None, f"{prefix}{name}"), value))
            elif value is not MISSING and _opens_of_library(name, value):
                self._value(value, f"{prefix}{name}")

    def _cache(self, value: Any, path: str) -> None:
        """``functools.lru_cache``: what it holds, and that nothing came or went."""
        self._enter(value.__wrapped__, path)
        info = value.cache_info()
        read = functools.partial(_cache_state, value)
        self.found.guards.append(Guard("value", Source("call", read, None, f"{path}.cache_info()"), info.misses))
        for part in gc.get_referents(value):
            if isinstance(part, dict) and part is not value.__dict__:
                for held in part.values():
                    self._value(held, f"{path}()")
            elif part is not value.__wrapped__:
                self._value(part, f"{path}()")

    def _context(self, value: contextvars.ContextVar[Any], path: str) -> None:
        held = value.get(MISSING)
        source = Source("context", value, None, path)
        if held is MISSING:
            read = functools.partial(value.get, MISSING)
            self.found.guards.append(Guard("value", Source("call", read, None, path), MISSING))
        else:
            self._one((id(value), None), held, source)

    def _reference(self, value: weakref.ref[Any], path: str) -> None:
        held = value()
        if held is not None:
            self._enter(held, path)
        self.found.guards.append(
            Guard("value", Source("call", functools.partial(_is_dead, value), None, path), held is None)
        )

    def _proxy(self, value: Any, path: str) -> None:
        held = native.referent(value)
        if held is not None:
            self._enter(held, path)
        is_dead = functools.partial(_proxy_is_dead, value)
        self.found.guards.append(Guard("value", Source("call", is_dead, None, path), held is None))

    def _getter(self, value: Any, path: str) -> None:
        """Its names are in no code. Those that ``operator.itemgetter`` has need not be: all members are guarded."""
        self.more_names.update(part for name in value.__reduce__()[1] if type(name) is str for part in name.split("."))

    def _buffer(self, value: array.array[Any], path: str) -> None:
        if len(value) * value.itemsize > numpy_arrays.MOST_BYTES:
            self.found.obstacle = self.found.obstacle or ("the content of a large array", path)
            return
        read = functools.partial(_same_bytes, value, value.tobytes())
        self.found.guards.append(Guard("value", Source("call", read, None, path), True))

    def _array(self, value: Any, path: str) -> None:
        """An array is written in place: what counts is its content."""
        content = numpy_arrays.content(value)
        if content is None:
            self.found.obstacle = self.found.obstacle or ("the content of a large array", path)
            return
        read = functools.partial(_same_content, value, content)
        self.found.guards.append(Guard("value", Source("call", read, None, path), True))

    def _view(self, value: Any, path: str) -> None:
        for held in gc.get_referents(value):
            self._value(held, path)

    def _thread_local(self, value: threading.local, path: str) -> None:
        """What this thread has there: recordings are of one thread."""
        own = value.__dict__
        self._names(own, own, self.names.of_class(type(value)), path)


_OPENED: tuple[tuple[Any, Callable[[ReadWalk, Any, str], None]], ...] = (
    (types.FunctionType, ReadWalk._function),
    (type, ReadWalk._class),
    (types.ModuleType, ReadWalk._python_module),
    (dict, ReadWalk._dict),
    ((tuple, frozenset), ReadWalk._each),
    (_SEQUENCES, ReadWalk._sequence),
    (types.MethodType, ReadWalk._method),
    (types.BuiltinFunctionType, ReadWalk._builtin_method),
    (functools.partial, ReadWalk._partial),
    (bytearray, ReadWalk._array),
    (functools._lru_cache_wrapper, ReadWalk._cache),
    (contextvars.ContextVar, ReadWalk._context),
    (weakref.ref, ReadWalk._reference),
    (types.MappingProxyType, ReadWalk._view),
    ((staticmethod, classmethod), ReadWalk._wrapped),
    (property, ReadWalk._property),
    (threading.local, ReadWalk._thread_local),
    ((operator.attrgetter, operator.methodcaller), ReadWalk._getter),
    (array.array, ReadWalk._buffer),
    (weakref.ProxyTypes, ReadWalk._proxy),
)


def _holds_a(source: Source, kind: type) -> bool:
    return type(source.get()) is kind


def _before(value: Any) -> Any:
    return value.before if type(value) is Replaced else value


def _is_a(scope: dict[str, Any], name: str, kind: type) -> bool:
    return type(scope.get(name)) is kind


def _is_unset(slot: types.MemberDescriptorType, value: Any) -> bool:
    try:
        slot.__get__(value, type(value))
    except AttributeError:
        return True
    return False


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where it is empty
    except ValueError:
        return True
    return False


def _cache_state(cache: Any) -> int:
    return int(cache.cache_info().misses)


def _is_dead(reference: weakref.ref[Any]) -> bool:
    return reference() is None


def _proxy_is_dead(proxy: Any) -> bool:
    return native.referent(proxy) is None


def _same_bytes(value: array.array[Any], known: bytes) -> bool:
    return value.tobytes() == known


def _same_content(value: Any, known: tuple[Any, ...]) -> bool:
    return numpy_arrays.content(value) == known


def _key_text(key: Any) -> str:
    return str(key) if type(key) in PLAIN_TYPES else type(key).__qualname__


def _always(_: str, __: Any) -> bool:
    return True


def _and_wrapped(original: Any) -> Iterator[Any]:
    """A function and what it wraps: on torch 2.11 a function of the compiler's own stands around the user's."""
    seen = list[Any]()
    while original is not None and all(one is not original for one in seen):
        seen.append(original)
        original = getattr(original, "__func__", original)
        yield original
        original = getattr(original, "__dict__", {}).get("__wrapped__")


def _opens_of_library(name: str, value: Any) -> bool:
    """What a library's module holds is its own business, but for functions, classes, modules, and small containers such
    as tables of hooks; and for what others put there."""
    kind = type(value)
    if issubclass(kind, (types.FunctionType, types.ModuleType, type)):
        return True
    if issubclass(kind, (dict, list)):
        return len(value) <= _SMALL
    return not is_library(package_of(kind.__module__))


def _handle_of(forward: Any) -> Any:
    """What captures it; None for what is not captured."""
    function = forward.__func__ if isinstance(forward, types.MethodType) else forward
    return function.__dict__.get(_HANDLE) if isinstance(function, types.FunctionType) else None


def _dict_of(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, without running what a class may define for it."""
    if not type(value).__dictoffset__:
        return None
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if type(own) is dict else None


def _weak_or_none(value: Any) -> Callable[[], Any] | None:
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def _weakly(value: Any) -> Any:
    reference = _weak_or_none(value)
    return value if reference is None else reference


def read_by(
    run: CodeRun, call: Call, changed: Iterable[Change], rebuilt: Sequence[tuple[Source, Any]], tensors: Collection[int]
) -> Read:
    """What code that ran in this call can have read. ``changed``, ``rebuilt``: what the body gave other values.
    ``tensors``: see ``ReadWalk``."""
    try:
        places, containers = changed_places(changed, rebuilt)
        for place in call.binder.places:  # arguments, in effect: another object in each call
            places.setdefault(place.key(), place.read())
        read = _read_by(run, call, (places, containers), tensors)
    except Exception as error:  # noqa: BLE001 - a strange class of a user's, or a mistake of ours: never the caller's
        read = Read(obstacle=(f"state that cannot be followed ({type(error).__name__}: {error})", "self"))
    if read.obstacle is None and not run.is_complete:
        read.obstacle = ("what code runs below a profile function that the body sets", "self")
    read.begun_with = _begins_with(run, call)
    if read.obstacle is not None:
        read.guards.append(Guard("value", Source("call", _never, None, read.obstacle[1]), True))
    return read


def _read_by(
    run: CodeRun, call: Call, changed: tuple[dict[Key, Any], dict[int, Members | None]], tensors: Collection[int]
) -> Read:
    """Code in compiled parts does not run as it is written: once one is found, all functions that are reached count."""
    ran, is_static, more, body = run, False, set[str](), call.function
    groups = {id(one) for one in call.optimizers.groups_of_islands()}
    if isinstance(body, types.FunctionType):  # of a graph module's piece it is a function of ours, which is not noted
        run.add_function(body)
    while True:
        names, uses = names_of(ran, more), uses_of_names(ran)
        walk = ReadWalk(names, *changed, tensors, is_static=is_static, counted=uses.only_counted(), by_name=groups)
        walk.begin(call.function, starts_of(call), [scope for scope, _ in names.scopes.values()])
        if not walk.compiled and walk.more_names <= more:
            walk.found.own = frozenset(walk.found.tensors.intersection(tensors))
            return walk.found
        more |= walk.more_names
        if walk.compiled and not is_static:
            ran, is_static = CodeRun(), True
            ran.note(run)
        for compiled in walk.compiled:
            ran.add_function(compiled)


def _begins_with(run: CodeRun, call: Call) -> tuple[Any, ...]:
    """What a walk begins with. Code is only added to a run."""
    return id(run), sum(map(len, run.codes.values())), len(run.codes), [id(one) for one, _ in starts_of(call)]


def _never() -> bool:
    return False


def starts_of(call: Call) -> list[tuple[Any, str]]:
    """The receiver, and objects among the arguments that are the same ones in each call with the key. Those that are
    opened are others in each call: of them the classes."""
    named = [] if call.receiver is None else [(call.receiver, "self")]
    opened = [one for _, one in call.containers() if is_object(type(one))]
    others = {id(one) for one in opened}
    for path, leaf in call.all_leaves():
        if not isinstance(leaf, torch.Tensor) and id(referent(leaf)) not in others:
            named.append((leaf, path))
    return named + [(kind, kind.__qualname__) for kind in dict.fromkeys(map(type, opened))]


def path_read(read: Read, changes: Iterable[Change]) -> str | None:
    """The path of one of these changes that guards are about: code may have read what was there before."""
    for change in changes:
        if any(_is_about(guard, change) for guard in read.guards):
            return change.source.path
    return None


def _is_about(guard: Guard, change: Change) -> bool:
    place = change.source.get() if change.container else change.source.holder
    ids = {id(place), id(place if change.container else _dict_of(place))} - {id(None)}
    holder, name = guard.source.holder, change.source.name
    if guard.kind == "empty":
        return any(id(one) in ids for one in holder)
    if guard.kind in _OF_MANY or id(holder) not in ids:
        return False
    if change.container or guard.kind in ("table", "sequence"):
        return True
    if guard.kind == "length":
        return change.before is MISSING or change.after is MISSING
    if guard.kind in ("members", "names"):
        there = [one[0] for one in guard.expected[1]] if guard.kind == "members" else guard.expected[1]
        return name in guard.expected[0] or name in there
    return bool(guard.source.name == name)


_OF_MANY = ("functions", "bases", "classes")


def changed_places(
    changed: Iterable[Change], rebuilt: Sequence[tuple[Source, Any]]
) -> tuple[dict[Key, Any], dict[int, Members | None]]:
    """The places that a body gave other values, and containers whose members it changed."""
    places: dict[Key, Any] = {}
    containers: dict[int, Members | None] = {}
    for change in changed:
        if change.container:
            is_guarded = change.members is not None and not change.members.is_free
            containers[id(change.source.get())] = change.members if is_guarded else None
        elif change.amount is not None:
            places[_key_of(change.source)] = Counted(type(change.before))
        elif type(change.after) not in PLAIN_TYPES and change.after is not MISSING:
            places[_key_of(change.source)] = Replaced(change.before)
        else:
            places[_key_of(change.source)] = change.before
    return places | {_key_of(source): before for source, before in rebuilt}, containers


def _key_of(source: Source) -> Key:
    holder = source.holder
    if source.kind == "item":
        return _item(holder, source.name)
    return id(holder.__dict__) if type(holder) is types.ModuleType else id(holder), source.name


def _item(container: Any, key: Any) -> Key:
    """A container of a class of its own may have an attribute with the same name."""
    return id(container), (_item, key) if type(container).__dictoffset__ else key
