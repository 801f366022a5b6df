"""Read walk: from objects that are the same in each call, breadth first, to all that a body can have read.

``opened_code`` and ``opened_objects`` go into functions, classes, modules, containers and the like. Names, attributes
and members are handled here, whatever object keeps them.
"""

from __future__ import annotations

import abc
import builtins
import functools
import itertools
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from attrs import evolve, field

from capture.core.data import define, frozen
from capture.guards.ambient import asked_of_packages, is_getter, value_given_by
from capture.guards.answers import same_abstract_classes, same_definitions, same_of_tensors
from capture.guards.guard import Guard, Referent, itself, looked_up
from capture.guards.names_used import SPECIAL, Names
from capture.guards.read import Counted, Key, OtherTensors, Place, Read, Replaced, ValuePlace
from capture.key.attributes import HEAP, IMMUTABLE, MISSING, Slot, dict_of, in_slot, slots_of, weak_or_none
from capture.key.code_names import SMALL
from capture.key.input_places import InputPlace, may_be_input
from capture.key.numpy_arrays import windows_in
from capture.key.packages import is_library, module_of, name_of, package_of, users_modules
from capture.key.pytree import PLAIN_TYPES
from capture.key.tensor_kind import hooks_on
from capture.state.keyed_reads import EARLY
from capture.state.moving_names import moves
from capture.state.snapshot import Members
from capture.state.source import Source
from capture.torch_private.dynamo import COMPILERS, MODULE_PREFIX
from capture.torch_private.getters import asked_of_torch

CLOSED = frozenset({"builtins", "_io", "socket", "re", "typing", "abc",
                     "concurrent", "multiprocessing", "asyncio", "capture", "importlib",
                     "inspect", "contextlib"})  # fmt: skip
"""Packages whose objects are not opened: machinery that has no part in what a body computes, or our own."""
_STEPS_ASIDE = ("torch.nn.parallel", "torch.distributed", *COMPILERS)
"""Packages whose objects count their steps in attributes, and that have switches or guards of their own here."""
_NOT_OPENED = (
    torch.Tensor, torch.Generator, torch.Stream, torch.Event, torch.UntypedStorage, torch.device,
    types.CodeType, types.FrameType, types.TracebackType,
)  # fmt: skip
_WITH_GUARDS = (torch.Tensor, torch.Generator)
SEQUENCES: tuple[Any, ...] = (list, set, deque)
_NO_TABLES: Mapping[str, Any] = {}
_SMALL = 64  # so many members of a library's container are looked at
HANDLE = "__capture__"  # in the ``__dict__`` of a function that is captured
MOST_OBJECTS = 50_000
"""Objects that one walk opens, at some 10 us each. A model's config and layers are hundreds, a data set is millions. A
call that reaches more is eager, as its guards would take longer than its operators."""
Opener = Callable[["ReadWalk", Any, str], None]
"""Goes into an object, which was reached by this path."""


@frozen(eq=False)
class OfClass:
    """What a walk does with objects of one class."""

    open: Opener | None
    has_attributes: bool
    is_closed: bool
    """The class is of a package whose objects are not looked into."""
    is_module: bool
    is_users: bool
    """The class was made by a ``class`` statement: its objects may be given another class, or another ``__dict__``."""
    slots: tuple[tuple[str, Slot, bool], ...]
    """As ``slots_of`` gives them."""
    wanted: frozenset[str]
    """Names that may have been looked up in its objects."""
    is_whole: bool
    """C code compares or shows its objects by all that they hold. So they are guarded as a whole, where code does more
    with one than look up attributes."""


@define(eq=False)
class ReadWalk:
    """One walk, breadth first, from what is known to be the same in each call with this key."""

    names: Names
    changed: dict[Key, Any]
    """Places that the body itself gave another value, with the value from before. A plain value has to be there again
    at the begin of a replay, else an object of the same class."""
    rebuilt: Mapping[int, Members | None]
    """Containers whose members the body changed, by ``id``, with the former members where these are expected again."""
    tensors: Collection[int]
    """``id`` of tensors that have guards of their own."""
    opener: Callable[[type], Opener | None]
    """Gives the function that goes into objects of a class."""
    counted: Collection[str] = ()
    """See ``Place``."""
    by_name: Collection[int] = ()
    """``id`` of dicts that are guarded only at keys that the code mentions."""
    more_names: set[str] = field(factory=set)
    """Names that objects such as ``operator.attrgetter`` look up."""
    found: Read = field(factory=Read)
    _changed_in: dict[int, dict[Any, Any]] = field(factory=dict)
    seen: set[int] = field(factory=set)
    _queue: deque[tuple[Any, str]] = field(factory=deque)
    _classes_met: dict[type, OfClass] = field(factory=dict)
    kept: list[Any] = field(factory=list)
    """Objects that were met. Keeping them alive means that no ``id`` is used twice."""
    empty: list[Any] = field(factory=list)
    functions: list[types.FunctionType] = field(factory=list)
    classes: list[type] = field(factory=list)
    _objects: list[tuple[Any, dict[str, Any] | None]] = field(factory=list)
    """Objects to go into, with their ``__dict__`` where guards do not have to look it up."""
    _other_tensors: dict[int, torch.Tensor] = field(factory=dict)
    _answering: dict[int, torch.Tensor] = field(factory=dict)
    """Tensors that code may ask for what no operator reads."""
    _definitions: dict[tuple[str, bool], list[Any]] = field(factory=dict)
    """Functions (False) and classes (True), by the name of an attribute that C code keeps of them and users' code asks
    for, such as ``__name__``."""
    builtins: set[str] = field(factory=set)
    """Names of C functions that were found as values."""
    _of_dynamo: set[int] = field(factory=set)
    """``id`` of modules that compiled code reads by names that Dynamo gave them."""
    _getters: dict[int, Any] = field(factory=dict)
    """Functions in C that may tell of a setting, by ``id``."""
    _keyed: dict[int, tuple[dict[Any, Any], str, frozenset[Any]]] = field(factory=dict)
    """By ``id``, dicts of which code looked up these keys alone. One that is reached in another way, too, is opened as
    a whole."""
    _only_asked: dict[int, tuple[Any, str]] = field(factory=dict)
    """By ``id``, objects of which code only looked up attributes. One that is reached in another way, too, is guarded
    as a whole."""
    _asked: set[int] = field(factory=set)
    """``id`` of those that were gone into."""
    packages: set[str] = field(factory=set)
    """Of modules that closure cells of users' functions hold."""

    def note_in_c(self, function: types.BuiltinFunctionType) -> None:
        """Note a function in C, not a method, that users' code may call: it may be a getter of a setting."""
        self.builtins.add(function.__name__)
        if is_getter(function) and id(function) not in self._getters:
            self._getters[id(function)] = function
            if (value := value_given_by(function)) is not MISSING:
                self.enter(value, f"{function.__module__}.{function.__name__}()")

    # --------------------------------------------------------------------------------------------------- from the top

    def begin(self, function: Any, starts: Iterable[tuple[Any, str]], scopes: Iterable[dict[str, Any]]) -> None:
        """Start at the captured function, at these objects, and at globals. The first function's globals have plain
        names."""
        for (keeper, name), before in self.changed.items():
            self._changed_in.setdefault(keeper, {})[name] = before
        function_globals = getattr(function, "__globals__", None)
        self.enter(function, "" if issubclass(type(function), types.FunctionType) else "function")
        for value, path in starts:
            self.enter(value, path)
        for scope in scopes:
            module = scope.get("__name__", "a module")
            self._scope(scope, "" if scope is function_globals else f"{module}.")
            if type(scope) is not dict:  # a look-up of a global may run code
                self.found.obstacle = ("globals in a dict of a class of its own", module)
                return
            self._builtins_of(scope)
        self._scope(vars(sys.modules["builtins"]), "builtins.")
        self._imported()
        self._added_to_tensors()
        while self._queue or self._open_keyed():
            value, path = self._queue.popleft()
            if len(self.seen) > MOST_OBJECTS:
                self.found.obstacle = (f"more than {MOST_OBJECTS:,} objects", path)
                break
            self._open(value, path)
        self._finish()

    def _open_keyed(self) -> bool:
        """Go into dicts that are reached in no other way than by names with which code only looks up keys. Whether
        there is more to open then."""
        while self._only_asked and not self._queue:
            at, (value, path) = self._only_asked.popitem()
            if at not in self.seen and at not in self._asked:
                self._asked.add(at)
                self.kept.append(value)
                self.attributes(value, evolve(self.of_class(type(value)), is_whole=False), path)
        while self._keyed and not self._queue:
            _, (table, path, keys) = self._keyed.popitem()
            if id(table) in self.seen:
                continue
            if all(type(key) is str for key in keys):
                self._guard_keys(table, keys, path)
            else:
                self.guard_members(table, sorted(keys, key=repr), f"{path}.", always)
        return bool(self._queue)

    def _guard_keys(self, table: dict[str, Any], keys: frozenset[str], path: str) -> None:
        """Guard what a dict has by these keys. In the place of what the body changes, as of a list that it appends to,
        another one of its kind may be."""
        names, kept, kinds = self.columns(id(table), table, keys, path)
        for name, value in zip(names, kept, strict=True):
            self.note_object(value, f"{path}.{name}", table, name)
        self.add(looked_up(itself(table, path), keys, names, kept, kinds), lambda: table)

    def _is_keyed(self, value: Any, name: Any, path: str) -> bool:
        """Whether it is a dict of which the code with this name for it looks up known keys alone, and nothing is
        changed. Those members are guarded later, and so are attributes of an object of which it looks up nothing
        else."""
        if type(value) is types.SimpleNamespace and self.names.only_asks(name):
            self._only_asked.setdefault(id(value), (value, path))
            return True
        if type(value) not in (dict, defaultdict) or not value:
            return False
        if id(value) in self.rebuilt or id(value) in self._changed_in:
            return False
        keys = self.names.keys_of(name)
        if keys is EARLY:
            self.found.places.early.add(id(value))
        if keys is None or keys is EARLY:
            return False
        self.kept.append(value)
        before = self._keyed.get(id(value), (value, path, frozenset[Any]()))
        self._keyed[id(value)] = value, before[1], before[2] | keys
        return True

    def _imported(self) -> None:
        """Modules that code which ran imported itself, and what users' code reads of them and of others of their
        packages. Modules of other packages are not gone into: what a large one imports leads to all others, and code
        imports it late to save time."""
        imported = self.names.imported
        mentioned = self.names.of_packages(())
        if self.names.module_lookups:
            self.loaded_modules("sys.modules")
        if "gets" in self.names.module_lookups:
            imported = imported | users_modules() | mentioned.intersection(sys.modules)
        if not imported:
            return
        self.guard_members(sys.modules, sorted(imported), "sys.modules.", never)
        met = set[int]()
        queue = deque(sys.modules.get(name) for name in sorted(imported))
        while queue:
            module = queue.popleft()
            if not isinstance(module, types.ModuleType) or id(module) in met or package_of(name_of(module)) in CLOSED:
                continue
            met.add(id(module))
            members = sorted(mentioned.intersection(vars(module)))
            self.guard_members(vars(module), members, f"{name_of(module)}.", opens_no_module)
            held = [value for value in map(vars(module).get, members) if isinstance(value, types.ModuleType)]
            queue += [value for value in held if package_of(name_of(value)) == package_of(name_of(module))]

    def loaded_modules(self, path: str) -> None:
        """``sys.modules``, where code may ask for any of them: which modules there are. Where it gets one, too, users'
        own and those that code mentions are gone into, as in ``_imported``: all that were ever loaded are some 100,000
        objects."""
        if self.found.looks_up_modules:
            return
        loaded = dict(sys.modules)
        names, source = tuple(loaded), itself(sys.modules, path)
        self.found.looks_up_modules = True
        self.found.guards.append(Guard("length", source, len(loaded)))
        there = looked_up(source, frozenset(names), names, tuple(loaded.values()), (None,) * len(names))
        self.found.guards.append(there)
        if "gets" not in self.names.module_lookups:
            return
        for name in sorted(users_modules() | self.names.of_packages(()).intersection(loaded)):
            self.enter_value(loaded.get(name), f"{path}.{name}")

    def _added_to_tensors(self) -> None:
        """Methods and the like of the class of all tensors, by the names that code mentions, and that syntax looks up.
        Those that others than torch put there are gone into."""
        wanted = self.names.of_packages(()) | SPECIAL
        there = {name: value for name, value in vars(torch.Tensor).items() if name in wanted}
        for name, value in there.items():
            if not is_library(_maker(value)):
                self.enter(value, f"Tensor.{name}")
        names, values, kinds = tuple(there), tuple(there.values()), (None,) * len(there)
        source = itself(torch.Tensor, "torch.Tensor")
        self.add(looked_up(source, wanted, names, values, kinds), lambda: torch.Tensor)

    def _scope(self, scope: dict[str, Any], prefix: str) -> None:
        """Globals: names that code in this module looked up, or in any module where they are built in."""
        if package_of(scope.get("__name__")) in CLOSED and prefix != "builtins.":
            return
        if prefix == "builtins.":
            wanted = {
                name
                for scope_of_name, names in self.names.scopes.values()
                for name in names
                if name not in scope_of_name
            }
        else:
            wanted = self.names.scopes[id(scope)][1]
        is_theirs = is_library(package_of(scope.get("__name__")))
        self.guard_members(scope, sorted(wanted), prefix, opens_of_library if is_theirs else opens_none_of_dynamo)
        for name in wanted & scope.keys() if self.names.compiled else ():
            if not opens_none_of_dynamo(name, scope[name]):
                self._named_by_dynamo(scope[name])

    def _named_by_dynamo(self, module: types.ModuleType) -> None:
        """A module that only compiled code reaches by this name: members that guards name. Names that other code works
        out are not looked up there."""
        package = package_of(name_of(module))
        if id(module) in self._of_dynamo or package in CLOSED or is_library(package):
            return
        self._of_dynamo.add(id(module))
        members = self.names.of_packages([package]) & vars(module).keys()
        self.guard_members(vars(module), sorted(members), f"{name_of(module)}.", opens_no_module)
        for member in map(vars(module).get, members):
            if isinstance(member, types.ModuleType):
                self._named_by_dynamo(member)

    def _builtins_of(self, scope: dict[str, Any]) -> None:
        """Builtins that globals bring along, as code has them that may use few: names that are no globals."""
        own = scope.get("__builtins__")
        if type(own) is dict and own is not vars(builtins):
            wanted = self.names.scopes[id(scope)][1] - scope.keys() if id(scope) in self.names.scopes else ()
            self.guard_members(own, sorted(wanted), f"{scope.get('__name__', 'a module')}.__builtins__.", always)

    def guard_members(
        self, scope: dict[str, Any], wanted: Iterable[str], prefix: str, opens: Callable[[str, Any], bool]
    ) -> None:
        """Guard the members of an object. ``opens``: tells by name and value whether to go into a member."""
        absent, there = [], []
        for name in wanted:
            value = scope.get(name, MISSING)
            if (id(scope), name) in self.names.stored:
                self._set_by_library(scope, name, prefix, opens)
                continue
            before = self.changed.get((id(scope), name), value)
            if type(before) is Replaced and self._is_set_only(name):
                continue
            before = before_of(before)
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
                self.note_object(value, f"{prefix}{name}", scope, name)
                if opens(name, value) and not self._is_keyed(value, name, f"{prefix}{name}"):
                    self.enter_value(value, f"{prefix}{name}")
        if absent or there:
            guard = Guard("members", itself(scope, prefix.rstrip(".") or "globals"), (tuple(absent), tuple(there)))
            self.add(guard, lambda: scope)

    def _set_by_library(self, scope: dict[str, Any], name: str, prefix: str, opens: Callable[[str, Any], bool]) -> None:
        """A global that a library's own code may set. It is no place that tells calls apart, as it may be a counter."""
        value, moving = scope.get(name, MISSING), moves(scope, name)
        self.found.is_early = self.found.is_early or moving is None
        if moving is False:
            there = () if value is MISSING else ((name, value),)
            expected = (() if there else (name,), there)
            self.found.guards.append(Guard("members", itself(scope, prefix.rstrip(".") or "globals"), expected))
            if there and opens(name, value):
                self.enter_value(value, f"{prefix}{name}")

    def add(self, guard: Guard, keeper: Callable[[], Any]) -> None:
        self.found.guards.append(guard)
        self.found.places.all.append(Place(guard, keeper, self.counted))

    def _finish(self) -> None:
        guards = self.found.guards
        dicts, others = (
            [container for container in self.empty if issubclass(type(container), dict) is are] for are in (True, False)
        )
        for several in (dicts, others):  # one guard for all of them is checked fastest; dicts share one version
            if several:
                guards.append(Guard("empty", itself(tuple(several), "what was empty")))
        if self.functions:
            functions = tuple(self.functions)
            parts = [
                part
                for function in functions
                for part in (function.__code__, function.__defaults__, function.__kwdefaults__)
            ]
            guards.append(Guard("functions", itself(functions, "code and defaults"), tuple(parts)))
        if self.classes:
            guards.append(
                Guard("bases", itself(tuple(self.classes), "bases"), tuple([o.__mro__ for o in self.classes]))
            )
        if self._objects:
            objects = tuple([_weakly(value) for value, _ in self._objects])
            kinds, owns = tuple([type(value) for value, _ in self._objects]), tuple([own for _, own in self._objects])
            guards.append(Guard("classes", itself(objects, "classes"), (kinds, owns)))
        if id(vars(abc)) in self.names.scopes:  # an abstract class was asked: C code keeps what is registered with it
            token = abc.get_cache_token
            guards.append(Guard("value", Source("call", token, None, "registered with abstract classes"), token()))
            if same := same_abstract_classes(self.classes, {*self.classes, *self._classes_met}):
                guards.append(Guard("value", Source("call", same, None, "what abstract classes remember"), True))
        asked = itertools.chain(
            asked_of_torch(self.names.of_packages(self.names.by_package) | self.builtins),
            asked_of_packages(self.names, self._classes_met, self._getters.values(), self.packages),
        )
        for path, read, value in asked:
            guards.append(Guard("value", Source("call", read, None, path), value))
        if self._other_tensors:
            same = OtherTensors(list(self._other_tensors.values()))
            guards.append(Guard("value", Source("call", same, None, "tensors that no operator read"), True))
        guards.extend(self._answers())
        closed = {
            id(value) for value in self.kept if issubclass(type(value), (types.FunctionType, types.ModuleType, type))
        }
        self.found.opened = frozenset(self.seen - closed)

    def note_class(self, value: Any) -> None:
        """Note an object that may get another class, so that code would find other attributes."""
        self._objects.append((value, None))
        for base in type(value).__mro__[:-1]:
            self.enter(base, base.__qualname__)

    def note_definition(self, value: Any) -> None:
        """Note a function or class of users: code may ask for attributes of it that C code keeps, such as its name."""
        for name in self.names.of_definitions:
            self._definitions.setdefault((name, issubclass(type(value), type)), []).append(value)

    def _answers(self) -> Iterator[Guard]:
        """What functions, classes and tensors tell of themselves, all of one kind in one guard."""
        for (name, of_classes), asked in self._definitions.items():
            if (guard := same_definitions(asked, name, of_classes=of_classes)) is not None:
                yield guard
        for name in sorted(self.names.of_tensors):
            yield same_of_tensors(list(self._answering.values()), name)

    # -------------------------------------------------------------------------------------------------- what is opened

    def enter(self, value: Any, path: str) -> None:
        kind = type(value)  # not ``isinstance``: a weak proxy answers for the object behind it
        if kind in PLAIN_TYPES or id(value) in self.seen:
            return
        if issubclass(kind, _NOT_OPENED):
            if kind is torch.Generator and "initial_seed" in self.names.by_package.get("", ()):
                read = value.initial_seed
                self.found.guards.append(Guard("value", Source("call", read, None, f"{path}.initial_seed()"), read()))
            return
        self.seen.add(id(value))
        self.kept.append(value)
        if (kind is dict or kind is OrderedDict) and not value:  # a module has ten empty tables of hooks
            self._open(value, path)
            return
        self._queue.append((value, path))

    def _enters_empty(self, table: Any, kind: type) -> bool:
        """``enter`` for an empty dict that the walk came to as an attribute: a module has ten such tables of hooks, of
        each of which there is nothing to say but that it is empty. False: there is more to it."""
        if id(table) in self.rebuilt or id(table) in self._changed_in or id(table) in self.tensors:
            return False
        met = self._classes_met.get(kind) or self.of_class(kind)
        own = None if kind is dict else dict_of(table)
        if met.is_users or met.slots or own:
            return False
        self.seen.add(id(table))
        self.kept.append(table)
        self.empty += [table] if own is None or met.is_closed else [table, own]
        return True

    def _open(self, value: Any, path: str) -> None:
        kind = type(value)
        met = self._classes_met.get(kind) or self.of_class(kind)
        if met.open is not None:
            met.open(self, value, path)
        if met.has_attributes:
            self.attributes(value, met, path)

    def of_class(self, kind: type) -> OfClass:
        """The record for a class. With the first object of a class that is not closed, the walk goes into its classes,
        too."""
        made = self._classes_met.get(kind)
        if made is not None:
            return made
        has_attributes = not issubclass(kind, (type, types.ModuleType, types.FunctionType))
        module: Any = module_of(kind)
        is_closed = package_of(module) in CLOSED or (type(module) is str and module.startswith(_STEPS_ASIDE))
        if has_attributes and not is_closed:
            for base in kind.__mro__[:-1]:
                self.enter(base, base.__qualname__)
        made = self._classes_met[kind] = OfClass(
            self.opener(kind), has_attributes, is_closed, issubclass(kind, torch.nn.Module),
            kind.__flags__ & (HEAP | IMMUTABLE) == HEAP and not issubclass(kind, weakref.ref),
            tuple(slots_of(kind)),
            self.names.of_class(kind) if has_attributes and not is_closed else frozenset(),
            _is_whole(kind),
        )  # fmt: skip
        return made

    def enter_value(self, value: Any, path: str) -> None:
        if not self._is_other_tensor(value, path):
            self.enter(value, path)

    def _is_other_tensor(self, value: Any, path: str) -> bool:
        """Whether it is a tensor that no operator read: Python code may have looked at its metadata, but not at its
        values."""
        if not issubclass(type(value), torch.Tensor):
            return False
        self._attributes_of_tensor(value)
        self._hooks_of_tensor(value, path)
        if self.names.of_tensors and id(value) not in self._answering:
            self._answering[id(value)] = value
        if self._has_own_guard(value):
            return False
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            self._other_tensors[id(value)] = value
        return True

    def _has_own_guard(self, value: Any) -> bool:
        """Whether it has a guard of its own: it is one of ``tensors``, which include generators."""
        if issubclass(type(value), _WITH_GUARDS):
            self.found.tensors.add(id(value))
        return id(value) in self.tensors

    def _attributes_of_tensor(self, value: torch.Tensor) -> None:
        """Attributes that users' code put on the tensor. Most tensors have none, and only code that asks can tell."""
        attributes = None if id(value) in self.seen else dict_of(value)
        if attributes is None or not (attributes or self.names.asked):
            return
        self.seen.add(id(value))
        self.kept.append(value)
        if attributes:
            self.guard_names(value, attributes, self.names.of_packages(()), "an attribute of a tensor")
        else:
            self.empty.append(attributes)

    def _hooks_of_tensor(self, value: torch.Tensor, path: str) -> None:
        """Functions that a backward pass in the body calls for the tensor, which read state as any function does. Which
        ones they are is a part of the key."""
        for name, table in hooks_on(value):
            for number, hook in table.items():
                self.enter(hook, f"{path}.{name}[{number}]")

    def note_object(self, value: Any, path: str, keeper: Any, name: Any, *, is_attribute: bool = False) -> None:
        """Note an object that might be an input, unless the body itself puts it there."""
        if may_be_input(value):
            get = (weak_or_none(keeper) if is_attribute else None) or (lambda: keeper)
            held = weak_or_none(value) or (lambda: value)
            self.found.places.objects.append((InputPlace(path, get, name, is_attribute), held))

    def expect(self, key: Key, value: Any, path: str) -> tuple[Any, type | None]:
        """The value that is expected here, into which the walk goes; or a class, where any of its objects will do."""
        if key in self.changed:
            value = self.changed[key]
            if type(value) is Counted:
                return None, value.kind
            value = value.before if type(value) is Replaced else value
            return (value, None) if type(value) in PLAIN_TYPES else (None, type(value))
        if id(value) in self.rebuilt and self.rebuilt[id(value)] is None:
            return None, type(value)
        self.enter_value(value, path)
        return (None, type(value)) if self._has_own_guard(value) else (value, None)

    # ------------------------------------------------------------------------------------------------------ attributes

    def attributes(self, value: Any, of_class: OfClass, path: str) -> None:
        """Guard what is in an object's ``__dict__`` and slots, and in its classes."""
        namespace = dict_of(value)
        if of_class.is_closed:
            if namespace is not None and of_class.is_module:  # such as the one that ``torch.compile`` returns
                self._module(namespace, path, weak_or_none(value))
            for window in windows_in(namespace):
                self.enter(window, path)
            return
        if of_class.is_users:
            self._objects.append(
                (value, None if namespace is None or _handle_of(namespace.get("forward")) else namespace)
            )
        if namespace is not None:
            tables = self._module(namespace, path, weak_or_none(value)) if of_class.is_module else {}
            if namespace or of_class.is_users or id(value) in self._changed_in:
                in_slots = {name for name, _, is_found in of_class.slots if is_found}
                is_all = of_class.is_whole or self.names.is_computed
                self.guard_names(value, namespace, of_class.wanted - in_slots, path, tables, is_all=is_all)
            else:  # a class of Python's own, such as ``OrderedDict``: attributes on it are rare
                self.empty.append(namespace)
        for slot in of_class.slots:
            self._slot(value, slot, of_class.wanted, path)

    def guard_names(
        self, value: Any, namespace: dict[str, Any], wanted: frozenset[str], path: str,
        tables: Mapping[str, Any] = _NO_TABLES, *, is_all: bool | None = None,
    ) -> None:  # fmt: skip
        """``tables``: what else has to be there, as the object that it is. ``is_all``: all names were looked up; None:
        if code computes names."""
        if value is not namespace and id(namespace) in self._changed_in:  # told by the dict of an object
            for name, before in self._changed_in[id(namespace)].items():
                self.changed[id(value), name] = self._changed_in.setdefault(id(value), {})[name] = before
        if self.names.is_computed if is_all is None else is_all:
            wanted |= frozenset(namespace)
            begun_with = self._length_before(namespace, self._changed_in.get(id(value), {}))
            self.found.guards.append(Guard("length", itself(namespace, path), begun_with))
        handle = _handle_of(namespace["forward"]) if "forward" in namespace else None
        is_captured = handle is not None
        if is_captured:  # a captured instance, which its own ``__dict__`` would keep alive
            wanted -= {"forward"}
            self._captured(value, handle, path)
        if not is_all:  # or C code looked at it, too
            wanted -= self.always_set(id(value))
        names, kept, kinds = self.columns(id(value), namespace, wanted, path, value if value is not namespace else None)
        if value is namespace:  # of a thread-local
            for name, value_there in zip(names, kept, strict=True):
                self.note_object(value_there, f"{path}.{name}", namespace, name)
        # what the body itself replaces is guarded where it is looked up
        own = [name for name in tables if name not in wanted and (id(value), name) not in self.changed]
        tables = {name: tables[name] for name in own}
        wanted, names = wanted.union(tables), (*names, *tables)
        kept, kinds = (*kept, *tables.values()), (*kinds, *[None] * len(tables))
        keeper = weak_or_none(value)
        holder = keeper if is_captured and keeper is not None else namespace
        guard = looked_up(itself(holder, path), wanted, names, kept, kinds)
        self.add(guard, keeper if keeper is not None else lambda: namespace)

    @staticmethod
    def _length_before(namespace: Mapping[str, Any], changed: Mapping[str, Any]) -> int:
        """How many names were there as the run began: it may have added some, and removed others."""
        more = [(before_of(before) is not MISSING) - (name in namespace) for name, before in changed.items()]
        return len(namespace) + sum(more)

    def compare_as_it_is(self, keeper: int, names: Collection[str]) -> None:
        """Compare what is there now, though it was seen to change: not only the body changes it."""
        for name in names:
            self.changed.pop((keeper, name), None)
            self._changed_in.get(keeper, {}).pop(name, None)

    def always_set(self, keeper: int) -> frozenset[str]:
        """Names in it to which the body gives something else, and which no code looks up."""
        changed = self._changed_in.get(keeper, {})
        return frozenset(
            [name for name, before in changed.items() if type(before) is Replaced and self._is_set_only(name)]
        )

    def _is_set_only(self, name: Any) -> bool:
        """Whether no code looks the name up, not even by a name that it computes."""
        return name in self.names.set_only and not self.names.is_computed

    def columns(
        self, keeper: int, namespace: Mapping[str, Any], wanted: frozenset[str], path: str, holder: Any = None
    ) -> tuple[tuple[str, ...], tuple[Any, ...], tuple[type | None, ...]]:
        """Names that are there, their values, and, where any object of a class will do, the class."""
        present = {name: value for name, value in namespace.items() if name in wanted}
        is_changed = keeper in self._changed_in
        if is_changed:
            present |= {name: before for name, before in self._changed_in[keeper].items() if name in wanted}
            present = {name: value for name, value in present.items() if before_of(value) is not MISSING}
        values, kinds, seen = list(present.values()), list[type | None](), self.seen
        for at, (name, value) in enumerate(present.items()):
            kind = type(value)
            if holder is not None and kind not in PLAIN_TYPES and (keeper, name) not in self.changed:
                self.note_object(value, f"{path}.{name}" if path else name, holder, name, is_attribute=True)
            if not is_changed and (kind in PLAIN_TYPES or (id(value) in seen and not issubclass(kind, _WITH_GUARDS))):
                kinds.append(None)  # shortcut for the common case of the lines below
                continue
            is_own = is_changed and (keeper, name) in self.changed
            if not is_own and (kind is dict or kind is OrderedDict) and not value and self._enters_empty(value, kind):
                kinds.append(None)
                continue
            if not is_own and self._is_keyed(value, name, f"{path}.{name}" if path else name):
                kinds.append(None)
                continue
            values[at], kept = self.expect((keeper, name), value, f"{path}.{name}" if path else name)
            kinds.append(kept)
        return tuple(present), tuple(values), tuple(kinds)

    def _captured(self, value: Any, handle: Any, path: str) -> None:
        source = Source("weak", weakref.ref(value), "forward", f"{path}.forward")
        self.found.guards.append(Guard("object", source, Referent.of(value.__dict__["forward"])))
        self.enter(getattr(handle, "function", None), f"{path}.forward")

    def _slot(self, value: Any, described: tuple[str, Slot, bool], wanted: frozenset[str], path: str) -> None:
        name, slot, is_found = described
        held, key = in_slot(slot, value), (id(value), name if is_found else slot)
        before = self.changed.get(key, held)
        if name not in wanted and not self.names.is_computed:
            return
        if type(before) is Replaced and self._is_set_only(name):
            return
        if before_of(before) is MISSING:
            read = functools.partial(_is_unset, slot, value)
            self.found.guards.append(Guard("value", Source("call", read, None, f"{path}.{name}"), True))
            return
        self.guard_place(key, held, Source("slot", value, slot, f"{path}.{name}"))
        if is_found and key not in self.changed:
            self.note_object(held, f"{path}.{name}", value, name, is_attribute=True)

    def _module(self, own: dict[str, Any], path: str, owner: weakref.ref[Any] | None) -> dict[str, Any]:
        """Go into a module: its submodules, and the parameters and buffers that it has. Gives the dicts that keep
        these, which users may replace as a whole."""
        tables = {}
        for name in ("_modules", "_parameters", "_buffers"):
            table = own.get(name)
            if issubclass(type(table), dict):
                self.seen.add(id(table))
                if table:
                    keeper = None if owner is None else functools.partial(_table_of, owner, name)
                    self.guard_table(table, path, is_tensors=name != "_modules", keeper=keeper)
                else:
                    self.empty.append(table)
                tables[name] = table
        return tables

    def guard_table(
        self, table: dict[Any, Any], path: str, *, is_tensors: bool = False, before: Members | None = None,
        keeper: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        """All members of a dict, in order. Of a module's tensors, those that its code can name have to be there.
        ``before``: those that it had, if the body changed them. ``keeper``: gives the dict, if something else keeps
        it alive."""
        expected: list[tuple[Any, type | None]] = []
        items = list(dict.items(table)) if before is None else list(zip(before.keys, before.before, strict=True))
        items = [
            (key, member) for key, member in items if before_of(self.changed.get(item_key(table, key))) is not MISSING
        ]
        for key, member in items:
            place = f"{path}.{key}" if type(key) is str and not key.isdigit() else f"{path}[{_key_text(key)}]"
            is_unnamed = is_tensors and not self.names.asks_for_all and key not in self.names.by_package.get("", ())
            if is_unnamed and issubclass(type(member), torch.Tensor) and not self._has_own_guard(member):
                expected.append((None, type(member)))
                continue
            expected.append(self.expect(item_key(table, key), member, place))
            if not is_tensors and item_key(table, key) not in self.changed:
                self.note_object(member, place, table, key)
            if not is_tensors and type(key) is not str:
                self.enter_value(key, f"a key of {path}")
        keys = tuple([key for key, _ in items])
        values, kinds = tuple([value for value, _ in expected]), tuple([kind for _, kind in expected])
        guard = Guard("table", itself(table, path), (keys, values, kinds))
        if type(table) is dict and not is_tensors and len(keys) <= SMALL:
            self.add(guard, keeper or (lambda: table))
        else:
            self.found.guards.append(guard)
        if type(table) is OrderedDict and len(keys) > 1:  # it has an order besides that of the dict
            source = Source("root", table, OrderedDict, path)
            order = tuple(table) if before is None and len(keys) == len(table) else keys
            self.found.guards.append(Guard("sequence", source, (order, (None,) * len(keys))))

    def guard_place(self, key: Key, held: Any, source: Source, name: str | None = None) -> None:
        """Guard a place that has a guard of its own. ``name``: what code calls it."""
        is_keyed = name is not None and key not in self.changed and self._is_keyed(held, name, source.path)
        value, kind = (held, None) if is_keyed else self.expect(key, held, source.path)
        if key not in self.changed and source.kind in ("closure", "context"):
            self.note_object(held, source.path, source.holder, None)
        if kind is None:
            weak = issubclass(type(value), (types.FunctionType, torch.nn.Module))
            guard = Guard("object", source, Referent.of(value)) if weak else Guard("value", source, value)
            self.found.guards.append(guard)
            if type(value) in PLAIN_TYPES:
                self.found.places.all.append(ValuePlace(guard))
        elif type(self.changed.get(key)) is Counted:
            read = functools.partial(_holds_a, source, kind)
            self.found.guards.append(Guard("value", Source("call", read, None, source.path), True))


def _is_whole(kind: type) -> bool:
    """Whether a class in C whose objects have a ``__dict__`` says when two of them are equal. A container looks at its
    members for that."""
    in_c = [one for one in kind.__mro__[:-1] if one.__dictoffset__ and one.__flags__ & (HEAP | IMMUTABLE) != HEAP]
    return any("__eq__" in vars(one) and not hasattr(one, "__len__") for one in in_c)


def _holds_a(source: Source, kind: type) -> bool:
    return type(source.get()) is kind


def _table_of(module: weakref.ref[Any], name: str) -> Any:
    return (dict_of(module()) or {}).get(name)


def _maker(value: Any) -> str:
    """The package of what a class holds: of a property, that of its function."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    return package_of(getattr(value, "__module__", None))


def before_of(value: Any) -> Any:
    return value.before if type(value) is Replaced else value


def _is_a(scope: dict[str, Any], name: str, kind: type) -> bool:
    return type(scope.get(name)) is kind


def _is_unset(slot: Slot, value: Any) -> bool:
    return in_slot(slot, value) is MISSING


def _key_text(key: Any) -> str:
    return str(key) if type(key) in PLAIN_TYPES else type(key).__qualname__


def always(_: str, __: Any) -> bool:
    return True


def never(_: str, __: Any) -> bool:
    return False


def opens_none_of_dynamo(name: str, value: Any) -> bool:
    """Whether to go into a member of users' globals as into any other: not into modules that Dynamo put there."""
    return not (name.startswith(MODULE_PREFIX) and issubclass(type(value), types.ModuleType))


def opens_no_module(_: str, value: Any) -> bool:
    """Whether to go into a member of a module that a body imports."""
    return not issubclass(type(value), types.ModuleType)


def and_wrapped(original: Any) -> Iterator[Any]:
    """A function and what it wraps: on torch 2.11 a function of the compiler's own stands around the user's."""
    seen = list[Any]()
    while original is not None and all(one is not original for one in seen):
        seen.append(original)
        original = getattr(original, "__func__", original)
        yield original
        original = getattr(original, "__dict__", {}).get("__wrapped__")


def opens_of_library(name: str, value: Any) -> bool:
    """Whether to go into a member of a library's module: what its functions read there may be set by others, as the
    level of the first logger is. Not into large tables, which it makes for itself, and functions in C."""
    kind = type(value)
    if issubclass(kind, (types.FunctionType, types.ModuleType, type)):
        return True
    if issubclass(kind, (dict, list)):
        return len(value) <= _SMALL
    return not issubclass(kind, types.BuiltinFunctionType)


def _handle_of(forward: Any) -> Any:
    """The record of a captured function; None for any other object."""
    function = forward.__func__ if isinstance(forward, types.MethodType) else forward
    return function.__dict__.get(HANDLE) if issubclass(type(function), types.FunctionType) else None


def _weakly(value: Any) -> Any:
    reference = weak_or_none(value)
    return value if reference is None else reference


def item_key(container: Any, key: Any) -> Key:
    """A container of a class of its own may have an attribute with the same name."""
    return id(container), (item_key, key) if type(container).__dictoffset__ else key
