"""State: the Python objects a function can reach.

``snapshot`` walks from the receiver, the arguments' objects, and the closure cells and globals the code names. It
tells who owns an implicit input (``self.layers[3].weight``).
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from attrs import define, field, frozen

from capture import _containers
from capture._containers import PLAIN_TYPES, TENSOR_TYPES
from capture._named import MISSING, chain_value, chains, globals_in
from capture._places import Found, Place, Tables, members_of_module, own_places
from capture._torch_private import generator_id
from capture._torch_private_subclass import is_wrapper

_PLACES_LIMIT = 200_000  # of one snapshot; a walk this long takes about 0.3 s
_MEMBERS_LIMIT = 10_000  # of one container
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSORS = frozenset(TENSOR_TYPES)
CLOSED = (str, bytes, bytearray, type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, torch.Generator)
_CLOSED_PACKAGES = frozenset({"builtins", "threading", "_thread", "logging", "_io", "weakref", "socket", "re", "typing",
                              "concurrent", "multiprocessing", "queue", "asyncio", "capture"})  # fmt: skip
_SHARDING = "torch.distributed.fsdp"
_OPEN_OF_TORCH = ("torch.optim", _SHARDING)


@define
class Snapshot:
    """Values at all places, the tensors among them by storage, and the members of containers."""

    places: dict[str, tuple[Place, Any]] = field(factory=dict)
    tensors: dict[int, list[tuple[Place, torch.Tensor]]] = field(factory=dict)
    """``id`` of the storage object -> its owners. The snapshot keeps the storages alive, so ids stay unique."""
    storages: list[torch.UntypedStorage] = field(factory=list)
    members: list[tuple[Place, Any, tuple[Any, ...]]] = field(factory=list)
    entered: list[tuple[Place, Any]] = field(factory=list)
    """Objects whose attributes were walked, each under the path it was found by first."""
    modules: list[torch.nn.Module] = field(factory=list)
    tables: list[tuple[Place, Tables]] = field(factory=list)
    """The dicts behind each module, with the place it was found at."""
    forwards: dict[types.FunctionType, int] = field(factory=dict)
    """``forward`` functions of users' modules, and how many places each names."""
    generators: dict[int, Place] = field(factory=dict)
    rebuilt: set[str] = field(factory=set)
    """Paths where the body put an equal container, or value, once ``changes`` has looked."""

    def owners(self, storage: torch.UntypedStorage) -> list[tuple[Place, torch.Tensor]]:
        """Places that hold a tensor on this storage."""
        return self.tensors.get(id(storage), [])

    def is_within_reach(self, storage: torch.UntypedStorage) -> bool:
        """Python code may write the storage, or put another one in its place. What a plain module holds nobody reaches:
        only compiled graphs (``integrations.compile``) keep their constants in one."""
        return any(type(place.holder) is not torch.nn.Module for place, _ in self.owners(storage))


@frozen
class Change:
    """A place whose value differs. ``container`` means the members of a list, dict or set changed."""

    place: Place
    before: Any
    after: Any
    container: bool = False


def roots(function: Any, receiver: Any, arguments: dict[str, Any]) -> list[Place]:
    """Where a walk starts. ``arguments`` are bound values by parameter name, the receiver left out."""
    found: list[Place] = []
    if receiver is not None:
        found.append(Place("root", receiver, None, "self"))
    for name, value in arguments.items():
        found.append(Place("root", value, None, name))
    if isinstance(function, types.FunctionType):
        found.extend(function_places(function, None))
    elif receiver is None:
        found.append(Place("root", function, None, "function"))
    return found


def function_places(function: types.FunctionType, parent: Place | None) -> list[Place]:
    found = []
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        found.append(Place("closure", cell, None, name, parent))
    scope = function.__globals__
    for name in globals_in(function.__code__):
        value = scope.get(name, MISSING)
        if isinstance(value, types.ModuleType):
            found += _module_globals(function, name, parent)
        elif value is not MISSING:
            found.append(Place("global", scope, name, name, parent))
    return found


def _module_globals(function: types.FunctionType, name: str, parent: Place | None) -> list[Place]:
    """Tensors and containers that the function names as attributes of a module of the user's."""
    module, code = function.__globals__[name], function.__code__
    if module.__name__.startswith("torch"):
        return []
    chained = [chain for chain in chains(code) if (chain.kind, chain.root) == ("global", name)]
    return [
        Place("attribute", module, chain.attributes[0], str(chain), parent)
        for chain in chained
        if len(chain.attributes) == 1 and isinstance(chain_value(chain, function), (torch.Tensor, list, dict))
    ]


def snapshot(starts: list[Place]) -> Snapshot:
    """Walk breadth first from ``starts``; objects are entered once, under the first path found.

    What ``fully_shard`` keeps, reached by its hooks, comes last and owns nothing: a body that is stopped half way
    leaves it in the middle of a step, but its lists of tensors are others at every step.
    """
    found = Snapshot()
    entered: set[int] = set()
    aside: list[Found] = []
    _walk(found, entered, [(place, place.get()) for place in starts], aside)
    _walk(found, entered, aside, None)
    return found


def _walk(found: Snapshot, entered: set[int], starts: list[Found], aside: list[Found] | None) -> None:
    places, queue = found.places, deque(starts)
    while queue and len(places) < _PLACES_LIMIT:
        one = queue.popleft()
        place, value = one
        if place.path in places and place.kind != "root":
            continue
        kind = type(value)
        if kind in PLAIN_TYPES:
            places[place.path] = one
            continue
        if aside is not None and _is_sharding(kind):
            aside.append(one)
            continue
        places[place.path] = one
        if kind in _TENSORS:
            if value.layout is torch.strided and aside is not None:
                storage = value.untyped_storage()
                found.storages.append(storage)
                found.tensors.setdefault(id(storage), []).append(one)
            if id(value) not in entered:
                entered.add(id(value))
                queue.extend(_gradient(place, value))
                if hooks := value._backward_hooks:
                    queue.extend(_hooks(place, "_backward_hooks", hooks))
        elif id(value) not in entered:
            entered.add(id(value))
            if kind is torch.Generator:
                found.generators.setdefault(generator_id(value), place)
            found.entered.append(one)
            queue.extend(_members(found, place, value))
            if is_wrapper(kind):
                queue.extend(_gradient(place, value))


def _is_sharding(kind: type) -> bool:
    return kind.__module__.startswith(_SHARDING) and not issubclass(kind, torch.nn.Module)


def _members(found: Snapshot, place: Place, value: Any) -> list[Found]:
    if isinstance(value, torch.nn.Module):
        return _module_members(found, place, value)
    if is_wrapper(type(value)):
        held = _containers.children(value)
        return [(Place("attribute", value, name[1:], f"{place.path}{name}", place), one) for name, one in held]
    if isinstance(value, (torch.Tensor, *CLOSED)):
        return []
    return [(one, one.get()) for one in _open_members(found, place, value)]


def _gradient(place: Place, tensor: torch.Tensor) -> list[Found]:
    """The ``grad`` of a leaf that has one, or may get one."""
    try:
        if not tensor.is_leaf:
            return []
    except RuntimeError:  # a view made without gradients, whose base was written with them: autograd refuses to look
        return []
    gradient = tensor.grad
    if gradient is None and not (tensor.requires_grad and torch.is_grad_enabled()):
        return []
    return [(Place("attribute", tensor, "grad", f"{place.path}.grad", place), gradient)]


def _hooks(place: Place, name: str, table: Mapping[int, Any] | None) -> list[Found]:
    """Functions that autograd or a module calls, which keep state as any function does."""
    return [(Place("root", hook, None, f"{place.path}.{name}[{n}]", place), hook) for n, hook in (table or {}).items()]


def _open_members(found: Snapshot, place: Place, value: Any) -> list[Place]:
    if isinstance(value, (list, tuple, dict, set, frozenset, deque)):
        members = _container_places(found, place, value)
        return members + (_attribute_places(found, place, value) if getattr(value, "__dict__", None) else [])
    if isinstance(value, types.FunctionType):
        return [] if closed_package(value.__module__) else function_places(value, place)
    if isinstance(value, types.MethodType):
        return [Place("root", value.__self__, None, f"{place.path}.__self__", place)]
    if isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        return [Place("root", part, None, f"{place.path}.{name}", place) for name, part in parts.items()]
    if closed_package(type(value).__module__):
        return []
    return _attribute_places(found, place, value)


@functools.lru_cache(maxsize=4096)
def closed_package(module: str | None) -> bool:
    package = (module or "").split(".")[0]
    return package in _CLOSED_PACKAGES or (package == "torch" and not (module or "").startswith(_OPEN_OF_TORCH))


def _module_members(found: Snapshot, place: Place, module: torch.nn.Module) -> list[Found]:
    found.modules.append(module)
    members, tables = members_of_module(module, place)
    found.tables.append((place, tables))
    members += _hook_places(module, place)
    forward: Any = type(module).forward
    if forward not in found.forwards and _is_users(forward):
        named = _forward_places(module, forward)
        found.forwards[forward] = len(named)
        members += named
    return members


def module_places(module: torch.nn.Module, place: Place) -> list[Found]:
    """Everything that a walk meets in a module, plain values too."""
    forward: Any = type(module).forward
    named = _forward_places(module, forward) if _is_users(forward) else []
    return [*own_places(module, place), *_hook_places(module, place), *named]


def _hook_places(module: torch.nn.Module, place: Place) -> list[Found]:
    own = module.__dict__
    return [one for name in _HOOKS if (table := own[name]) for one in _hooks(place, name, table)]


def _is_users(forward: Any) -> bool:
    return isinstance(forward, types.FunctionType) and not closed_package(forward.__module__)


def _forward_places(module: torch.nn.Module, forward: types.FunctionType) -> list[Found]:
    """What the code of ``forward`` names."""
    name = type(module).__name__
    named = function_places(forward, None)
    return [(Place(one.kind, one.holder, one.name, f"{name}.forward:{one.path}"), one.get()) for one in named]


def _container_places(found: Snapshot, place: Place, value: Any) -> list[Place]:
    if isinstance(value, (set, frozenset, deque)):
        found.members.append((place, value, tuple(value)))
        return []
    if isinstance(value, dict):
        keys = tuple(value)
        found.members.append((place, value, keys))
        names = [key if isinstance(key, str) else str(index) for index, key in enumerate(keys)]
    else:
        keys = tuple(range(len(value)))
        if isinstance(value, list):
            found.members.append((place, value, keys))
        names = [str(key) for key in keys]
    pairs = list(zip(keys, names, strict=True))[:_MEMBERS_LIMIT]
    return [Place("item", value, key, f"{place.path}.{name}", place) for key, name in pairs]


def _attribute_places(found: Snapshot, place: Place, value: Any) -> list[Place]:
    names = [name for name in getattr(value, "__dict__", {}) if not name.startswith("__")]
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names.extend(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))
    return [Place("attribute", value, name, f"{place.path}.{name}", place) for name in names[:_MEMBERS_LIMIT]]
