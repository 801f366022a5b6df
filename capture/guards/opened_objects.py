"""How a walk goes into methods, containers, caches, references and the like."""

from __future__ import annotations

import array
import contextvars
import functools
import gc
import io
import operator
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from capture.guards.guard import Guard
from capture.guards.opened_code import open_cell, open_class, open_function, open_module
from capture.guards.read import ValuePlace
from capture.guards.read_walk import SEQUENCES, Opener, ReadWalk, always, item_key
from capture.key import numpy_arrays
from capture.key.attributes import HEAP, IMMUTABLE, MISSING, dict_of, weak_or_none
from capture.key.code_names import SMALL, part_of
from capture.key.packages import is_library, module_of, package_of
from capture.key.pytree import PLAIN_TYPES
from capture.native import native
from capture.observe.host_draws import UNKNOWN, is_moving, position_of
from capture.state.cached_results import KeepsThese, cached_in, misses_of
from capture.state.source import Source, default_of


def _method(walk: ReadWalk, value: types.MethodType, path: str) -> None:
    walk.enter(value.__func__, path)
    walk.enter(value.__self__, f"{path}.__self__")


def _builtin_method(walk: ReadWalk, value: types.BuiltinFunctionType, path: str) -> None:
    """A method in C, such as ``runs.append``: the object that it works on. One of a module may be a getter."""
    if issubclass(type(value.__self__), types.ModuleType | None):
        walk.note_in_c(value)
    else:
        walk.builtins.add(value.__name__)
        walk.enter(value.__self__, f"{path}.__self__")


_PARTS_OF_PARTIAL = ("func", "args", "keywords")
_parts_of_partial = operator.attrgetter(*_PARTS_OF_PARTIAL)


def _partial(walk: ReadWalk, value: functools.partial[Any], path: str) -> None:
    """Its ``__setstate__`` gives it other parts."""
    parts = _parts_of_partial(value)
    for name, part in zip(_PARTS_OF_PARTIAL, parts, strict=True):
        walk.enter(part, f"{path}.{name}")
    read = functools.partial(_parts_of_partial, value)
    walk.found.guards.append(Guard("value", Source("call", read, None, f"the parts of {path}"), parts))


def _each(walk: ReadWalk, values: Any, path: str) -> None:
    plain: Any = tuple if issubclass(type(values), tuple) else frozenset
    for at, one in enumerate(plain.__iter__(values)):
        walk.enter_value(one, f"{path}[{at}]")


def _dict(walk: ReadWalk, value: dict[Any, Any], path: str) -> None:
    if issubclass(type(value), defaultdict):
        _attribute_in_c(walk, value, "default_factory", path)
    before = walk.rebuilt.get(id(value))
    if id(value) in walk.rebuilt and before is None:
        return
    name = dict.get(value, "__name__")
    module = sys.modules.get(name) if type(name) is str else None
    if module is not None and dict_of(module) is value:  # the form in which Dynamo's guards get it
        walk.enter(module, path)
        return
    if value is sys.modules and before is None:
        walk.loaded_modules(path)
    elif id(value) in walk.by_name and before is None and not walk.names.is_computed:
        named = walk.names.of_packages(["torch"])
        walk.guard_members(value, sorted(name for name in value if name in named), f"{path}.", always)
    elif dict.__len__(value) or before is not None:
        walk.guard_table(value, path, before=before)
    else:
        walk.empty.append(value)


def _sequence(walk: ReadWalk, value: Any, path: str) -> None:
    before = walk.rebuilt.get(id(value))
    if id(value) in walk.rebuilt and before is None:
        return
    plain = next(plain_class for plain_class in SEQUENCES if issubclass(type(value), plain_class))
    members = tuple(plain.__iter__(value)) if before is None else before.before
    expected = [walk.expect(item_key(value, at), member, f"{path}[{at}]") for at, member in enumerate(members)]
    kept, kinds = tuple([member for member, _ in expected]), tuple([kind for _, kind in expected])
    if before is None and plain is list:
        for at, member in enumerate(members):
            if item_key(value, at) not in walk.changed:
                walk.note_object(member, f"{path}[{at}]", value, at)
    guard = Guard("sequence", Source("root", value, plain, path), (kept, kinds))
    walk.found.guards.append(guard)
    if (
        before is None
        and len(members) <= SMALL
        and not any(item_key(value, at) in walk.changed for at in range(len(members)))
    ):
        walk.found.places.all.append(ValuePlace(guard))


def _attribute_in_c(walk: ReadWalk, value: Any, name: str, path: str) -> None:
    """An attribute of an object that C code keeps outside of any ``__dict__``."""
    held = getattr(value, name)
    walk.enter_value(held, f"{path}.{name}")
    read = functools.partial(getattr, value, name)
    walk.found.guards.append(Guard("value", Source("call", read, None, f"{path}.{name}"), held))


def _error(walk: ReadWalk, value: BaseException, path: str) -> None:
    for name in ("args", "__cause__", "__context__"):
        _attribute_in_c(walk, value, name, path)
    if is_library(package_of(module_of(type(value)))) and (own := dict_of(value)) is not None:
        walk.guard_names(own, own, walk.names.of_packages(()), path)


def _memory(walk: ReadWalk, value: memoryview, path: str) -> None:
    """A window on other memory, by what is in it."""
    try:
        content = value.tobytes() if value.nbytes <= numpy_arrays.MOST_BYTES else None
    except ValueError:  # it was released
        return
    if content is None:
        walk.found.obstacle = walk.found.obstacle or ("the content of a large array", path)
        return
    walk.found.guards.append(Guard("value", Source("call", functools.partial(_content_of, value), None, path), content))


def _content_of(value: Any) -> bytes | None:
    try:
        return bytes(memoryview(value))
    except ValueError:
        return None


def _memory_of_c(walk: ReadWalk, value: Any, path: str) -> None:
    """A number, structure or array of ``ctypes``, or a map of a file: memory that Python code reads. Objects that a
    pointer keeps, as it leads to their memory, are gone into."""
    if (kept := numpy_arrays.kept_by_c(value)) is not None:
        walk.enter_value(kept, path)
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):  # a function of a library; a map that was closed
        return
    if view.nbytes > numpy_arrays.MOST_BYTES:
        walk.found.obstacle = walk.found.obstacle or ("the content of a large array", path)
        return
    read = functools.partial(_content_of, value)
    walk.found.guards.append(Guard("value", Source("call", read, None, path), read()))


def _hash(walk: ReadWalk, value: Any, path: str) -> None:
    read = functools.partial(numpy_arrays.digest_of, value)
    walk.found.guards.append(Guard("value", Source("call", read, None, path), read()))


def _host_generator(walk: ReadWalk, value: Any, path: str) -> None:
    """A generator of the host's whose state code asks for. One that only draws moves, and the call is eager."""
    if not walk.names.of_packages(()).isdisjoint(_ASKING_FOR_STATE):
        position = position_of(value)
        if position is not UNKNOWN:
            read = functools.partial(position_of, value)
            walk.found.guards.append(Guard("value", Source("call", read, None, f"the state of {path}"), position))


_ASKING_FOR_STATE = ("getstate", "get_state", "bit_generator", "__getstate__", "__reduce__")


def _iterator(walk: ReadWalk, value: Any, path: str) -> None:
    """An iterator that code looks at without taking from it: how much is left, or a copy of it. One that code takes
    from moves, and the call is eager; one that only others take from must not drop a recording."""
    asked = _ASKING_FOR_POSITION.intersection(walk.names.of_packages(()))
    if not asked and ("copy" not in walk.names.by_package or issubclass(type(value), io.IOBase)):  # no file is copied
        return
    position = position_of(value)
    if position is UNKNOWN:
        walk.found.obstacle = walk.found.obstacle or ("where an iterator stands", path)
        return
    for held in gc.get_referents(value):
        walk.enter_value(held, path)
    read = functools.partial(position_of, value)
    walk.found.guards.append(Guard("value", Source("call", read, None, f"where {path} stands"), position))


_ASKING_FOR_POSITION = frozenset({
    "__length_hint__", "length_hint", "__reduce__", "__reduce_ex__", "gi_frame", "gi_running", "gi_suspended",
    "getgeneratorstate", "getgeneratorlocals",
})  # fmt: skip


def _lock(walk: ReadWalk, value: Any, path: str) -> None:
    """Whether a lock is taken, where code may ask for that."""
    asked = _ASKING_OF_LOCKS.intersection(walk.names.of_packages(["threading"]))
    reads = [one for one in (getattr(value, name, None) for name in ("locked", "_is_owned")) if one is not None]
    if asked and reads:
        walk.found.guards.append(Guard("value", Source("call", reads[0], None, f"{path}.locked()"), reads[0]()))


_ASKING_OF_LOCKS = frozenset({"locked", "acquire"})


def _wrapped(walk: ReadWalk, value: Any, path: str) -> None:
    walk.enter(value.__func__, path)


def _property(walk: ReadWalk, value: property, path: str) -> None:
    for part in (value.fget, value.fset):
        walk.enter(part, path)


def _cache(walk: ReadWalk, value: Any, path: str) -> None:
    """``functools.lru_cache``: what it holds, and that no entry was added, removed or made anew."""
    walk.enter(value.__wrapped__, path)
    counted = functools.partial(misses_of, value)
    walk.found.guards.append(Guard("value", Source("call", counted, None, f"{path}.cache_info()"), counted()))
    if held := cached_in(value):
        walk.found.guards.append(Guard("value", Source("call", KeepsThese(value), None, f"{path}()"), True))
    for part in held:
        walk.enter_value(part, f"{path}()")


def _context(walk: ReadWalk, value: contextvars.ContextVar[Any], path: str) -> None:
    default = default_of(value)
    if default is not MISSING:  # it stays that object, which may be changed in place
        walk.enter_value(default, f"{path}.get()")
    held = value.get(MISSING)
    source = Source("context", value, None, path)
    if held is MISSING:
        read = functools.partial(value.get, MISSING)
        walk.found.guards.append(Guard("value", Source("call", read, None, path), MISSING))
        walk.found.places.all.append(ValuePlace(Guard("value", source, MISSING)))
    else:
        walk.guard_place((id(value), None), held, source)


def _other_context(walk: ReadWalk, value: contextvars.Context, path: str) -> None:
    """A context that code keeps: others may run in it, and set its variables."""
    for at, (variable, held) in enumerate(value.items()):
        place, read = f"{path}[{at}]", functools.partial[Any](value.get, variable, MISSING)
        expected, kind = walk.expect((id(value), variable), held, place)
        if kind is None:
            walk.found.guards.append(Guard("value", Source("call", read, None, place), expected))
        else:
            read = functools.partial(_gives_a, read, kind)
            walk.found.guards.append(Guard("value", Source("call", read, None, place), True))
    read = functools.partial(_has_variables, value, frozenset(value))
    walk.found.guards.append(Guard("value", Source("call", read, None, path), True))


def _reference(walk: ReadWalk, value: weakref.ref[Any], path: str) -> None:
    held = value()
    if held is not None:
        walk.enter(held, path)
    walk.found.guards.append(
        Guard("value", Source("call", functools.partial(_is_dead, value), None, path), held is None)
    )


def _proxy(walk: ReadWalk, value: Any, path: str) -> None:
    held = native.referent(value)
    if held is not None:
        walk.enter(held, path)
    is_dead = functools.partial(_proxy_is_dead, value)
    walk.found.guards.append(Guard("value", Source("call", is_dead, None, path), held is None))


def _getter(walk: ReadWalk, value: Any, path: str) -> None:
    """The names that ``operator.attrgetter`` looks up are in no code. Keys of ``operator.itemgetter`` need no names, as
    all members of a container are guarded."""
    walk.more_names.update(part for name in value.__reduce__()[1] if type(name) is str for part in name.split("."))


def _buffer(walk: ReadWalk, value: array.array[Any], path: str) -> None:
    if len(value) * value.itemsize > numpy_arrays.MOST_BYTES:
        walk.found.obstacle = walk.found.obstacle or ("the content of a large array", path)
        return
    read = functools.partial(_same_bytes, value, value.tobytes())
    walk.found.guards.append(Guard("value", Source("call", read, None, path), True))


def _array(walk: ReadWalk, value: Any, path: str) -> None:
    """An array is written in place, so its content is compared."""
    content = numpy_arrays.content(value)
    if content is None:
        walk.found.obstacle = walk.found.obstacle or ("the content of a large array", path)
        return
    read = functools.partial(_same_content, value, content)
    walk.found.guards.append(Guard("value", Source("call", read, None, path), True))


def _keeps_in_c(kind: type) -> bool:
    """Whether a class in C, of which nothing else is known here, keeps other objects, such as a queue."""
    is_in_c = kind.__flags__ & (HEAP | IMMUTABLE) != HEAP
    return is_in_c and bool(kind.__flags__ & _COLLECTED) and not kind.__dictoffset__


_COLLECTED = 1 << 14  # a flag of classes: their objects tell the collector what they keep


def _held_in_c(walk: ReadWalk, value: Any, path: str) -> None:
    """What an object of such a class keeps, as it tells the collector."""
    held = _others_held(value)
    if not held:
        return
    for one in held:
        walk.enter_value(one, path)
    if _is_fixed(type(value)):
        return
    hashed: object = type(value).__hash__
    if hashed is None or hashed is object.__hash__:  # else it is hashed by what it keeps, as ``int | None`` is
        read = functools.partial(_keeps_these, value, tuple(map(_told, held)))
        walk.found.guards.append(Guard("value", Source("call", read, None, f"what {path} keeps"), True))


def _is_fixed(kind: type) -> bool:
    """Whether it is a descriptor of Python's own, such as the method in C of a class: what one keeps stays."""
    return kind.__module__ == "builtins" and hasattr(kind, "__get__")


def _others_held(value: Any) -> list[Any]:
    """All that it keeps but its class and texts, such as its own name."""
    return [one for one in gc.get_referents(value) if type(one) is not str and not issubclass(type(one), type)]


def _keeps_these(value: Any, known: tuple[Any, ...]) -> bool:
    """A guard's function: the object keeps the same others. None of them is kept alive by this."""
    held = _others_held(value)
    return len(held) == len(known) and all(map(_is_told, held, known))


def _told(value: Any) -> Any:
    """What tells an object from others: a plain value itself; else the class, and a weak reference or the ``id``."""
    if type(value) in PLAIN_TYPES:
        return type(value), part_of(value)
    return type(value), weak_or_none(value) or id(value)


def _is_told(value: Any, told: Any) -> bool:
    kind, known = told
    if type(value) is not kind:
        return False
    if kind in PLAIN_TYPES:
        return bool(part_of(value) == known)
    return known() is value if type(known) is weakref.ref else id(value) == known


def _view(walk: ReadWalk, value: Any, path: str) -> None:
    for held in gc.get_referents(value):
        walk.enter_value(held, path)


_VIEWS: tuple[Any, ...] = (types.MappingProxyType, *[type(view(kind())) for kind in (dict, OrderedDict) for view in
                                   (kind.keys, kind.values, kind.items)])  # fmt: skip


def _thread_local(walk: ReadWalk, value: threading.local, path: str) -> None:
    """A thread-local: what this thread keeps there, as each recording belongs to one thread."""
    own = value.__dict__
    walk.guard_names(own, own, walk.names.of_class(type(value)), path)


def _has_variables(context: contextvars.Context, known: frozenset[contextvars.ContextVar[Any]]) -> bool:
    return frozenset(context) == known


def _gives_a(read: Callable[[], Any], kind: type) -> bool:
    return type(read()) is kind


def _is_dead(reference: weakref.ref[Any]) -> bool:
    return reference() is None


def _proxy_is_dead(proxy: Any) -> bool:
    return native.referent(proxy) is None


def _same_bytes(value: array.array[Any], known: bytes) -> bool:
    return value.tobytes() == known


def _same_content(value: Any, known: tuple[Any, ...]) -> bool:
    return numpy_arrays.content(value) == known


OPENED: tuple[tuple[Any, Opener], ...] = (
    (types.FunctionType, open_function),
    (type, open_class),
    (types.ModuleType, open_module),
    (dict, _dict),
    ((tuple, frozenset), _each),
    (SEQUENCES, _sequence),
    (types.MethodType, _method),
    (types.BuiltinFunctionType, _builtin_method),
    (functools.partial, _partial),
    (bytearray, _array),
    (functools._lru_cache_wrapper, _cache),
    (contextvars.ContextVar, _context),
    (contextvars.Context, _other_context),
    (weakref.ref, _reference),
    (_VIEWS, _view),
    ((staticmethod, classmethod), _wrapped),
    (property, _property),
    (threading.local, _thread_local),
    ((operator.attrgetter, operator.methodcaller), _getter),
    (array.array, _buffer),
    (weakref.ProxyTypes, _proxy),
    (BaseException, _error),
    (memoryview, _memory),
    (types.CellType, open_cell),
    (random.Random, _host_generator),
    ((type(threading.Lock()), type(threading.RLock())), _lock),
)


def opener_of(kind: type) -> Opener | None:
    """The function that goes into objects of this class."""
    found = next((open_it for of, open_it in OPENED if issubclass(kind, of)), None)
    if found is None and type(kind.__module__) is str and kind.__module__.startswith("numpy.random"):
        return _host_generator
    if found is None and numpy_arrays.is_memory_of_c(kind):
        return _memory_of_c
    if found is None and numpy_arrays.is_hash(kind):
        return _hash
    if found is None and is_moving(kind):
        return _iterator
    if found is None and numpy_arrays.is_array_type(kind):
        return _array
    return _held_in_c if found is None and _keeps_in_c(kind) else found
