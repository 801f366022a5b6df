"""The Python objects a function can reach.

``snapshot`` walks from the receiver, the objects among the arguments, and the closure cells and globals that the code
names. It tells which object owns an implicit input (``self.layers[3].weight``).
"""

from __future__ import annotations

import array
import contextvars
import functools
import queue
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from attrs import field

from capture.core.data import define, frozen
from capture.core.interrupts import let_through
from capture.key import numpy_arrays, pytree
from capture.key.attributes import MISSING, PROXIES, dict_of, is_unordered, keys_of, names_of, slots_of
from capture.key.code_names import (
    globals_in,
    globals_stored,
    imported_in,
    mentioned_in,
    module_lookups,
    with_packages,
)
from capture.key.name_uses import name_uses
from capture.key.objects import SHARDING, closed_package, has_state
from capture.key.packages import name_of
from capture.key.pytree import PLAIN_TYPES, TENSOR_TYPES
from capture.key.tensor_kind import hooks_on, is_leaf, refuses
from capture.native import native
from capture.state.cached_results import cached_in, misses_of
from capture.state.namespaces import Namespace, holds_state, is_of_users, scope_of, users_classes
from capture.state.source import Found, Source, SourceKind, Tables, default_of, members_of_module
from capture.torch_private.capabilities import generator_id, has_memory
from capture.torch_private.subclasses import is_wrapper

_SOURCES_LIMIT = 200_000  # of one snapshot; a walk this long takes about 0.3 s
_MEMBERS_LIMIT = 10_000  # of one container
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NO_HOOKS: tuple[tuple[Any, ...], ...] = ((), (), (), ())
_TENSORS = frozenset(TENSOR_TYPES)
_METHODS_OF_C = frozenset({types.BuiltinFunctionType, types.MethodWrapperType})
_PLAIN_CONTAINERS = frozenset({list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict})
_SETTING_OF_CLASSES = frozenset({"setattr", "delattr", "__setattr__", "__delattr__"})
_SETTING = _SETTING_OF_CLASSES | {"__dict__", "vars"}  # those of a class cannot be written
_DEFAULTS = ("__defaults__", "__kwdefaults__")
_OPENED = (
    queue.Queue, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
    threading.Event, threading.Condition, threading.Semaphore, threading.Barrier,
)  # fmt: skip
"""Classes of the standard library whose objects are opened, as users keep things in them. All others of it are
closed. That nobody waits for an event or a semaphore is guarded as any read, so that a change of it, put again by a
replay, has nobody to wake."""
CLOSED = (str, bytes, bytearray, type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, torch.Generator)


@define
class Snapshot:
    """Values of all sources, the tensors among them by storage, and the members of containers."""

    sources: dict[str, tuple[Source, Any]] = field(factory=dict)
    tensors: dict[int, list[tuple[Source, torch.Tensor]]] = field(factory=dict)
    """``id`` of the storage object -> its owners. The snapshot keeps the storages alive, so ids stay unique."""
    storages: list[torch.UntypedStorage] = field(factory=list)
    members: list[tuple[Source, Any, tuple[Any, ...]]] = field(factory=list)
    entered: list[tuple[Source, Any]] = field(factory=list)
    """Objects whose attributes were walked, each under the path it was found by first."""
    closed: list[Any] = field(factory=list)
    """Objects that were met and not looked into, as their classes belong to closed packages."""
    modules: list[torch.nn.Module] = field(factory=list)
    tables: list[tuple[Source, Tables]] = field(factory=list)
    """The dicts behind each module that keeps all in these, with the source it was found at."""
    module_kinds: dict[type[torch.nn.Module], tuple[bool, bool]] = field(factory=dict)
    """By class of the modules: whether they have slots, and whether a user wrote their ``forward``."""
    forwards: dict[types.FunctionType, int] = field(factory=dict)
    """``forward`` functions of users' modules, and how many sources each names."""
    generators: dict[int, Source] = field(factory=dict)
    namespaces: dict[int, Namespace] = field(factory=dict)
    """Classes, scopes, functions and the like, by ``id`` of what holds the names."""
    prefixes: set[str] = field(factory=set)
    """Those of ``namespaces``: each has one of its own."""
    states: list[tuple[Source, Any, Any]] = field(factory=list)
    """Objects whose content is not made of members, such as arrays, with that content: see ``content_of``."""
    hooks: list[tuple[Source, torch.nn.Module, tuple[tuple[Any, ...], ...]]] = field(factory=list)
    """Modules, and the keys of their tables of hooks: see ``keys_of_hooks``."""
    flags: list[tuple[Source, torch.Tensor, bool]] = field(factory=list)
    """Tensors that are there, and whether they require gradients."""
    inputs: Set[tuple[int, Any]] = frozenset()
    """Places whose values count as arguments."""
    kinds: set[type] = field(factory=set)
    """Classes of which all is noted that their objects have by name: see ``_by_name``."""
    rebuilt: set[str] = field(factory=set)
    """Paths at which the body put an equal container or value; filled by ``changes``."""
    dropped: set[str] = field(factory=set)
    """Of these, paths of containers whose members the body changed before it replaced them. A replay does not change
    the old container, so nobody else may hold it."""

    def owners(self, storage: torch.UntypedStorage) -> list[tuple[Source, torch.Tensor]]:
        """Places that hold a tensor on this storage."""
        return self.tensors.get(id(storage), [])

    def is_within_reach(self, storage: torch.UntypedStorage) -> bool:
        """Whether Python code may write the storage, or put another one in its place. Only compiled graphs
        (``integrations.compile``) keep their constants in a plain module, which no code of users reaches."""
        return any(type(source.holder) is not torch.nn.Module for source, _ in self.owners(storage))


@frozen(eq=False)
class Members:
    """How the members of a container changed."""

    container: Any
    keys: tuple[Any, ...]
    """The former keys of a dict."""
    before: tuple[Any, ...]
    keys_now: tuple[Any, ...] | None
    recipe: tuple[int, ...]
    """The present members: positions among the former ones, or, from -1 down, among the ``new`` ones."""
    new: list[Any]
    is_free: bool = False
    """The former members do not matter: the new ones were put at the end, and nothing else depends on what it holds."""


@frozen
class Change:
    """A source whose value differs. ``container`` means the members of a list, dict or set changed."""

    source: Source
    before: Any
    after: Any
    container: bool = False
    amount: int | None = None
    """The amount that was added to a number on which nothing else depends."""
    members: Members | None = None
    """Of a container, where it is known how the members changed; ``after`` has the new ones, too."""
    is_read_anew: bool = False
    """Each call puts a number there that the host read, and nothing else depends on it."""
    adds_read: bool = False
    """Each call adds such a number to what is there."""


def carries_graph(change: Change) -> bool:
    """Whether a tensor that is part of a graph was put in a place that a replay can put one in, such as a loss that a
    layer keeps beside its result. A gradient is no result."""
    tensor, source = change.after, change.source
    if change.container or type(tensor) is not torch.Tensor or issubclass(type(source.holder), torch.Tensor):
        return False
    return not refuses(tensor) and not is_leaf(tensor)


def roots(function: Any, receiver: Any, arguments: dict[str, Any]) -> list[Source]:
    """Where a walk starts. ``arguments`` are bound values by parameter name, the receiver left out."""
    sources: list[Source] = []
    if receiver is not None:
        sources.append(Source("root", receiver, None, "self"))
    for name, value in arguments.items():
        sources.append(Source("root", value, None, name))
    if issubclass(type(function), types.FunctionType):
        sources.extend([*function_sources(function, None), Source("root", function, None, "function")])
    elif receiver is None:
        sources.append(Source("root", function, None, "function"))
    return sources


def function_sources(function: types.FunctionType, parent: Source | None) -> list[Source]:
    sources = []
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        sources.append(Source("closure", cell, None, name, parent))
    return sources + global_sources(function.__code__, function.__globals__, parent)


def global_sources(code: types.CodeType, scope: dict[str, Any], parent: Source | None) -> list[Source]:
    """The globals that code names, and what it names of users' modules."""
    sources, read = list[Source](), globals_in(code)
    for name in read:
        value = scope.get(name, MISSING)
        if issubclass(type(value), types.ModuleType):
            sources += _module_globals(code, value, name, parent)
        elif value is not MISSING:
            sources.append(Source("global", scope, name, name, parent))
    if _modules_named(code):
        for name, module in _imported(code, scope):
            sources += _module_globals(code, module, name, parent)
    if name_uses(code).set:
        sources += set_in_libraries(code, scope, parent)
    stored = [name for name in globals_stored(code) if name not in read]
    return sources + [Source("global", scope, name, name, parent) for name in stored]


@functools.lru_cache(maxsize=4096)
def _modules_named(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    """Modules that code imports itself, with how many packages up their names begin, and texts by which it may look
    some up."""
    found: dict[tuple[str, int], None] = {}
    for part in (code, *[constant for constant in code.co_consts if isinstance(constant, types.CodeType)]):
        found |= dict.fromkeys(imported_in(part))
        if "gets" in module_lookups(part):
            found |= dict.fromkeys((constant, 0) for constant in part.co_consts if isinstance(constant, str))
    return tuple(found)


def _imported(code: types.CodeType, scope: dict[str, Any]) -> Iterator[tuple[str, types.ModuleType]]:
    """Modules that code imports or looks up itself, with the packages they are in, as far as they are there yet."""
    package = scope.get("__package__")
    names = {full: None for name, level in _modules_named(code) for full in with_packages(name, level, package)}
    for name in names:
        if type(module := sys.modules.get(name)) is types.ModuleType and is_of_users(name):
            yield name, module


def _module_globals(code: types.CodeType, module: types.ModuleType, name: str, parent: Source | None) -> list[Source]:
    """Names of a user's module that code may read or set there."""
    if not is_of_users(name_of(module)):
        return []
    namespace = dict_of(module) or {}
    return [
        Source("attribute", module, attribute, f"{name}.{attribute}", parent)
        for attribute in mentioned_in(code)
        if attribute in namespace and _leads_to_state(namespace[attribute])
    ]


def _leads_to_state(value: Any) -> bool:
    is_users_class = issubclass(type(value), type) and is_of_users(value.__module__)
    return holds_state(value) or type(value) is types.FunctionType or is_users_class


def set_in_libraries(code: types.CodeType, scope: dict[str, Any], parent: Source | None) -> list[Source]:
    """Names that code may have set in modules and classes of libraries which it names: of these nothing else is looked
    at. One that is not there yet is found in the next run."""
    names = name_uses(code).set
    if not names:
        return []
    holders = {name: scope[name] for name in globals_in(code) if name in scope}
    modules = [full for full, level in imported_in(code) if not level and full in sys.modules]
    todo = [*(holders | {full: sys.modules[full] for full in modules}).items()]
    sources, met = list[Source](), set[int]()
    for path, holder in todo:  # which grows: ``nn.functional.calls += 1``
        is_module = type(holder) is types.ModuleType
        if id(holder) in met or not (is_module or issubclass(type(holder), type)):
            continue
        met.add(id(holder))
        own = holder.__dict__
        if is_module:
            todo += [(f"{path}.{name}", own[name]) for name in mentioned_in(code) if name in own]
        if is_of_users(name_of(holder) if is_module else holder.__module__):
            continue
        sources += [
            Source("item", own, name, f"{path}.{name}", parent) if is_module
            else Source("attribute", holder, name, f"{path}.{name}", parent)
            for name in sorted(names & own.keys()) if type(own[name]) is not types.ModuleType
        ]  # fmt: skip
    return sources


def sets_in(code: types.CodeType, kind: Any) -> bool:
    """Whether the code may have set attributes of a user's class."""
    if not isinstance(kind, type) or not is_of_users(kind.__module__):
        return False
    return not name_uses(code).set.isdisjoint(kind.__dict__) or not _SETTING_OF_CLASSES.isdisjoint(code.co_names)


def modules_set(code: types.CodeType, scope: dict[str, Any]) -> Iterator[types.ModuleType]:
    """Users' modules in which code that ran may have set names: that which it belongs to, and those that it names."""
    names, stored = name_uses(code).set, globals_stored(code)
    sets_any = not _SETTING.isdisjoint(code.co_names)
    own = sys.modules.get(str(scope.get("__name__"))) if stored else None
    if own is not None and own.__dict__ is scope:
        yield own
    if names or sets_any:
        named = [value for name in globals_in(code) if type(value := scope.get(name)) is types.ModuleType]
        for module in (*named, *[module for _, module in _imported(code, scope)]):
            if is_of_users(name_of(module)) and (sets_any or not names.isdisjoint(module.__dict__)):
                yield module


def snapshot(starts: list[Source], inputs: Set[tuple[int, Any]] = frozenset()) -> Snapshot:
    """Walk breadth first from ``starts``; objects are entered once, under the first path found. ``inputs``: places, as
    ``place_key`` tells them, whose values are among the starts.

    What ``fully_shard`` keeps, reached by its hooks, comes last and owns nothing: a body that is stopped half way
    leaves it in the middle of a step, but its lists of tensors are others at every step.
    """
    state = Snapshot(inputs=inputs)
    entered: set[int] = set()
    aside: list[Found] = []
    _walk(state, entered, [(source, source.get()) for source in starts], aside)
    _walk(state, entered, aside, None)
    return state


def may_change(value: Any) -> bool:
    """Whether there is anything in the object that is compared: in a snapshot, or how far it has moved."""
    kind = type(value)
    if kind in PLAIN_TYPES or value is MISSING or not holds_state(value):
        return False
    if issubclass(kind, random.Random) or kind.__module__.startswith("numpy.random") or hasattr(kind, "__next__"):
        return True
    state = snapshot([Source("root", value, None, "root")])
    kept = (state.members, state.states, state.tensors, state.flags, state.tables, state.generators, state.namespaces)
    return any(kept) or any(source.kind not in ("root", "item") for source, _ in state.sources.values())


def _walk(state: Snapshot, entered: set[int], starts: list[Found], aside: list[Found] | None) -> None:
    """Go through the starts and what is found behind them. Most places of a network have plain values: they come first,
    and cost a look-up each."""
    sources, todo, shards, strided = state.sources, list(starts), dict[type, bool](), torch.strided
    for entry in todo:  # which grows
        if len(sources) >= _SOURCES_LIMIT:
            break
        source, value = entry
        path, kind = source.path, type(value)
        if path in sources and source.kind not in ("root", "scope"):
            named_apart = _named_apart(sources, source, value)
            if named_apart is None:
                continue
            entry, source, path = named_apart, named_apart[0], named_apart[0].path
        if kind in PLAIN_TYPES or value is MISSING:
            sources.setdefault(path, entry)
            continue
        if source.kind == "scope":
            _namespace(state, "global", value.__dict__, value.__dict__, f"{path}.", None)
            continue
        if aside is not None:
            is_shard = shards.get(kind)
            if is_shard is None:
                is_shard = shards[kind] = _is_sharding(kind)
            if is_shard:
                aside.append(entry)
                continue
        sources.setdefault(path, entry)  # a root may have the name that a variable has
        if state.inputs and source.kind != "root" and place_key(source) in state.inputs:
            continue
        if kind in _TENSORS:
            if value.layout is strided and aside is not None and has_memory(value):
                storage = value.untyped_storage()
                state.storages.append(storage)
                state.tensors.setdefault(id(storage), []).append(entry)
            if id(value) not in entered:
                entered.add(id(value))
                state.flags.append((source, value, value.requires_grad))
                if attributes := value.__dict__:
                    todo += _namespace(state, "attribute", value, attributes, f"{path}.", source)
                todo += _gradient(source, value)
                for name, hooks in hooks_on(value):
                    todo += _hooks(source, name, hooks)
        elif id(value) not in entered:
            entered.add(id(value))
            if kind is torch.Generator:
                state.generators.setdefault(generator_id(value), source)
            state.entered.append(entry)
            todo += _members(state, source, value)
            todo += _by_name(state, source, value)
            if is_wrapper(kind):
                todo += _gradient(source, value)


def _named_apart(sources: dict[str, Found], source: Source, value: Any) -> Found | None:
    """The place under a path of its own, where another function calls something else by this name, such as what each
    of several hooks calls so. None for a place that was met before."""
    if sources[source.path][0].holder is source.holder or source.parent is None:
        return None
    if source.kind not in ("closure", "global"):
        return None
    path = f"{source.parent.path}:{source.path}"
    return None if path in sources else (Source(source.kind, source.holder, source.name, path, source.parent), value)


def place_key(source: Source) -> tuple[int, Any]:
    """Equal for equal places."""
    holder = source.holder
    return id(holder.__dict__) if type(holder) is types.ModuleType else id(holder), source.name


def _is_sharding(kind: type) -> bool:
    return str(kind.__module__).startswith(SHARDING) and not issubclass(kind, torch.nn.Module)


def is_whole_module(value: Any) -> bool:
    """Whether it is a module with the tables of one: not one that is only half made, nor a weak proxy of one."""
    return issubclass(type(value), torch.nn.Module) and "_modules" in native.own_dict(value)


def _members(state: Snapshot, source: Source, value: Any) -> list[Found]:
    if issubclass(type(value), torch.nn.Module) and is_whole_module(value):
        return _module_members(state, source, value)
    if is_wrapper(type(value)):
        held = pytree.children(value)
        return [(Source("attribute", value, name[1:], f"{source.path}{name}", source), member) for name, member in held]
    if type(value) in PROXIES:
        return _root(source, native.referent(value))
    if type(value) in _METHODS_OF_C:  # ``log.append``, ``table.__setitem__``, ``variable.set``
        return _root(source, value.__self__)
    if type(value) is types.CellType:
        content = Source("closure", value, None, f"{source.path}.cell_contents", source)
        return [(content, content.get())]
    if issubclass(type(value), (torch.Tensor, *CLOSED)):
        if (content := content_of(value)) is not None:
            state.states.append((source, value, content))
        return []
    return [(open_member, open_member.get()) for open_member in _open_members(state, source, value)]


def _by_name(state: Snapshot, source: Source, value: Any) -> list[Found]:
    """What an object's class, a class itself, a function or a thread-local holds by name."""
    kind = type(value)
    if kind in state.kinds:
        return []
    if kind is types.FunctionType:
        return _of_function(state, source, value) if is_of_users(value.__module__) else []
    if issubclass(kind, threading.local):
        return _namespace(state, "item", value.__dict__, value.__dict__, f"{source.path}.", source)
    if issubclass(kind, types.ModuleType):
        return _of_module(state, value) if is_of_users(name_of(value)) else []
    if kind is contextvars.Context:  # one that code keeps, and runs functions in
        variables = [Source("context", value, one, f"{source.path}[{n}]", source) for n, one in enumerate(value)]
        return [(variable, variable.get()) for variable in variables]
    if kind is contextvars.ContextVar:
        context = Source("context", value, None, f"{source.path}.get()", source)
        default = default_of(value)
        return [(context, context.get()), *(_root(source, default) if default is not MISSING else ())]
    members: list[Found] = []
    if not issubclass(kind, type):
        state.kinds.add(kind)  # what follows is the same for all its objects, and is noted once
    for users_class in users_classes(value if issubclass(kind, type) else kind):
        prefix = f"{source.path}." if users_class is value else f"{users_class.__qualname__}."
        members += _namespace(state, "attribute", users_class, users_class.__dict__, prefix, None)
        scope = scope_of(users_class.__module__)
        if scope is not None:
            _namespace(state, "global", scope, scope, f"{users_class.__module__}.", None)
    if kind is not type and issubclass(kind, type):
        for users_class in users_classes(kind):
            members += _namespace(
                state, "attribute", users_class, users_class.__dict__, f"{users_class.__qualname__}.", None
            )
    return members


def _of_function(state: Snapshot, source: Source, function: types.FunctionType) -> list[Found]:
    scope = function.__globals__
    prefix = f"{scope.get('__name__')}." if state.namespaces else ""
    _namespace(state, "global", scope, scope, prefix, None)
    for name in globals_in(function.__code__):
        module = scope.get(name)
        if type(module) is types.ModuleType and is_of_users(name_of(module)):
            _namespace(state, "global", module.__dict__, module.__dict__, f"{name}.", None)
    if _modules_named(function.__code__):
        for name, module in _imported(function.__code__, scope):
            _namespace(state, "global", module.__dict__, module.__dict__, f"{name}.", None)
    members = _namespace(state, "attribute", function, function.__dict__, f"{source.path}.", source)
    places = [Source("attribute", function, name, f"{source.path}.{name}", source) for name in _DEFAULTS]
    return members + [(place, value) for place in places if (value := place.get())]


def _of_module(state: Snapshot, module: types.ModuleType) -> list[Found]:
    """A module that an object, a cell or a container holds: code gets it without naming it, and may use all of it."""
    scope = native.own_dict(module)
    _namespace(state, "global", scope, scope, f"{name_of(module)}.", None)
    return list(state.namespaces[id(scope)].members())


def _namespace(
    state: Snapshot, kind: SourceKind, holder: Any, names: Mapping[str, Any], prefix: str, parent: Source | None
) -> list[Found]:
    """Note all names, once, and give those that a walk goes on from. In a scope these are only names that code
    mentions."""
    if id(holder) in state.namespaces:
        return []
    while prefix and prefix in state.prefixes:
        prefix = f"{prefix[:-1]}'."
    state.prefixes.add(prefix)
    made = state.namespaces[id(holder)] = Namespace(
        kind, holder, prefix, parent, names, tuple(names), tuple(names.values())
    )
    return [] if kind == "global" else list(made.members())


def _gradient(source: Source, tensor: torch.Tensor) -> list[Found]:
    """The ``grad`` of a leaf that has one, or may get one."""
    try:
        if not tensor.is_leaf:
            return []
    except RuntimeError as error:  # a view made without gradients, of a base written with them: none may look
        let_through(error)
        return []
    gradient = tensor.grad
    if gradient is None and not (tensor.requires_grad and torch.is_grad_enabled()):
        return []
    return [(Source("attribute", tensor, "grad", f"{source.path}.grad", source), gradient)]


def _hooks(source: Source, name: str, table: Mapping[int, Any] | None) -> list[Found]:
    """Functions that autograd or a module calls, which keep state as any function does."""
    return [
        (Source("root", hook, None, f"{source.path}.{name}[{n}]", source), hook) for n, hook in (table or {}).items()
    ]


def _root(source: Source, value: Any) -> list[Found]:
    """The source of an object that another one leads to."""
    if value is None or type(value) is types.ModuleType:
        return []
    return [(Source("root", value, None, f"{source.path}()", source), value)]


def content_of(value: Any) -> Any:
    """The content of an object without members that code may change in place; None for all others."""
    kind = type(value)
    if kind is bytearray or kind is array.array:
        return bytes(value)
    if kind is functools._lru_cache_wrapper:
        return misses_of(value)
    if kind is contextvars.Context:  # of a value that is set there for the first time nobody can say how to unset it
        return frozenset(value)
    if kind is memoryview or numpy_arrays.is_memory_of_c(kind):
        return numpy_arrays.memory_of_c(value)
    if numpy_arrays.is_hash(kind):
        return numpy_arrays.digest_of(value)
    if numpy_arrays.is_array_type(kind) and not value.dtype.hasobject:
        return numpy_arrays.content(value) or (value.shape, hash(value.tobytes()))
    return None


def _open_members(state: Snapshot, source: Source, value: Any) -> list[Source]:
    if issubclass(type(value), (list, tuple, dict, set, frozenset, deque)):
        members = _container_sources(state, source, value)
        return members + (_attribute_sources(source, value) if type(value) not in _PLAIN_CONTAINERS else [])
    if issubclass(type(value), types.FunctionType):
        return [] if closed_package(value.__module__) else function_sources(value, source)
    if issubclass(type(value), types.MethodType):
        return [Source("root", value.__self__, None, f"{source.path}.__self__", source)]
    if issubclass(type(value), functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        sources = [Source("root", part, None, f"{source.path}.{name}", source) for name, part in parts.items()]
        return sources + _attribute_sources(source, value)
    if type(value) is weakref.ref:
        return [member for member, _ in _root(source, value())]
    if (content := content_of(value)) is not None:
        state.states.append((source, value, content))
    if numpy_arrays.is_memory_of_c(type(value)) and (below := numpy_arrays.kept_by_c(value)) is not None:
        return [member for member, _ in _root(source, below)]
    if issubclass(type(value), BaseException):
        names = ("args", "__notes__")
        kept = [Source("attribute", value, name, f"{source.path}.{name}", source) for name in names]
        return [*_attribute_sources(source, value), *kept]
    if closed_package(type(value).__module__) and not issubclass(type(value), _OPENED) and not has_state(type(value)):
        own = dict_of(value)
        if own is not None:
            state.closed.append(value)
            return [member for window in numpy_arrays.windows_in(own) for member, _ in _root(source, window)]
        return []
    sources = _attribute_sources(source, value)
    if type(value) is functools._lru_cache_wrapper:
        cached = enumerate(cached_in(value))
        sources += [Source("root", one, None, f"{source.path}()[{n}]", source) for n, one in cached]
    return sources


def _module_members(state: Snapshot, source: Source, module: torch.nn.Module) -> list[Found]:
    state.modules.append(module)
    members, tables = members_of_module(module, source)
    kind = type(module)
    known = state.module_kinds.get(kind)
    if known is None:  # a network has hundreds of modules of few classes
        known = state.module_kinds[kind] = any(True for _ in slots_of(kind)), _is_users(kind.forward)
    has_slots, is_users = known
    if has_slots:
        members += [(place, place.get()) for place in _slot_sources(module, source)]
    else:
        state.tables.append((source, tables))
    keys = keys_of_hooks(module)
    if keys is not _NO_HOOKS:
        members += _hook_sources(module, source)
    state.hooks.append((source, module, keys))
    if is_users:
        forward: Any = kind.forward
        if forward not in state.forwards:
            named = _forward_sources(module, forward)
            state.forwards[forward] = len(named)
            members += named
    return members


def module_sources(module: torch.nn.Module, source: Source) -> list[Found]:
    """Everything that a walk meets in a module, plain values too."""
    forward: Any = type(module).forward
    named = _forward_sources(module, forward) if _is_users(forward) else []
    return [*members_of_module(module, source)[0], *_hook_sources(module, source), *named]


def _hook_sources(module: torch.nn.Module, source: Source) -> list[Found]:
    own = module.__dict__
    return [hook for name in _HOOKS if (table := own[name]) for hook in _hooks(source, name, table)]


def keys_of_hooks(module: torch.nn.Module) -> tuple[tuple[Any, ...], ...]:
    """The numbers under which hooks are registered."""
    own = module.__dict__
    one, two, three, four = own[_HOOKS[0]], own[_HOOKS[1]], own[_HOOKS[2]], own[_HOOKS[3]]
    if not (one or two or three or four):  # as in almost every module
        return _NO_HOOKS
    return tuple(one), tuple(two), tuple(three), tuple(four)


def _is_users(forward: Any) -> bool:
    return isinstance(forward, types.FunctionType) and not closed_package(forward.__module__)


def _forward_sources(module: torch.nn.Module, forward: types.FunctionType) -> list[Found]:
    """What the code of ``forward`` names."""
    name = type(module).__name__
    named = function_sources(forward, None)
    return [(Source(one.kind, one.holder, one.name, f"{name}.forward:{one.path}"), one.get()) for one in named]


def _container_sources(state: Snapshot, source: Source, value: Any) -> list[Source]:
    keys = keys_of(value)
    if not issubclass(type(value), tuple):
        state.members.append((source, value, keys))
    if is_unordered(value):
        return []
    if issubclass(type(value), dict):
        names = [key if isinstance(key, str) else str(index) for index, key in enumerate(keys)]
    else:
        names = [str(key) for key in keys]
    pairs = list(zip(keys, names, strict=True))[:_MEMBERS_LIMIT]
    return [Source("item", value, key, f"{source.path}.{name}", source) for key, name in pairs]


def _attribute_sources(source: Source, value: Any) -> list[Source]:
    own, slots = names_of(value) or {}, _slot_sources(value, source)
    by_name = {place.name for place in slots}
    places = [
        Source("item", own, name, f"{source.path}.__dict__.{name}", source) if name in by_name
        else Source("attribute", value, name, f"{source.path}.{name}", source)
        for name in own if not name.startswith("__")
    ]  # fmt: skip
    return [*places, *slots][:_MEMBERS_LIMIT]


def _slot_sources(value: Any, source: Source) -> list[Source]:
    """The places of the slots of an object, by their names where a look-up of the name finds them."""
    return [
        Source("attribute", value, name, f"{source.path}.{name}", source) if is_found
        else Source("slot", value, slot, f"{source.path}.{slot.__objclass__.__qualname__}.{name}", source)
        for name, slot, is_found in slots_of(type(value))
    ]  # fmt: skip
