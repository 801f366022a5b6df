"""Which names code can have looked up: all that it mentions as an attribute, a global, a key or a text.

Names in a library's code count for objects of that package's classes; names in users' code count for all objects.
"""

from __future__ import annotations

import builtins
import dis
import functools
import re
import sys
import types
from collections.abc import Iterable
from typing import Any

from attrs import field

from capture.core.data import define, frozen
from capture.guards.answers import OF_TENSORS
from capture.key.attribute_names import attribute_names
from capture.key.code_names import globals_in, imported_in, module_lookups, operations, with_packages
from capture.key.name_uses import ASKING, is_computed, name_uses
from capture.key.packages import is_library, package_of
from capture.state import keyed_reads
from capture.state.code_run import CodeRun
from capture.torch_private.dynamo import names_in_guards

_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_SETTING = {dis.opmap[name] for name in ("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME")}
_NAMING = set(dis.hasname)
_FLAGS = {
    dis.opmap[name]: bits
    for name, bits, since in (("LOAD_GLOBAL", 1, (3, 11)), ("LOAD_ATTR", 1, (3, 12)), ("LOAD_SUPER_ATTR", 2, (3, 12)))
    if sys.version_info >= since
}
"""How many bits of its argument, the lowest ones, tell an operation something else than a name."""
OF_ALL_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__class__", "__annotations__"})
_IN_ITS_DICT = frozenset({"__doc__", "__module__", "__annotations__"})
"""Of these, what a class keeps in its own ``__dict__``, where code asks for it."""
_OF_DEFINITIONS = frozenset({"__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__subclasses__"})
"""What C code keeps of a function or class."""
_FORMATTING = frozenset({"format", "format_map"})
_IN_FORMATS = re.compile(r"[.\[{]([A-Za-z_]\w*)")
_FOR_HINTS = frozenset({"get_type_hints", "get_annotations", "signature"})
_FOR_ALL_TENSORS = frozenset({
    "parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "_parameters", "_buffers",
})  # fmt: skip
"""Code that names one of these may look at all tensors of a module."""
SPECIAL = frozenset(
    name
    for kind in (int, float, str, bytes, list, dict, set, type, memoryview, types.FunctionType, types.GeneratorType)
    for name in dir(kind)
    if name[:2] == "__"
) | {
    "__copy__",
    "__deepcopy__",
    "__match_args__",
    "__get__",
    "__set__",
    "__delete__",
    "__enter__",
    "__exit__",
    "__getattr__",
    "__next__",
    "__matmul__",
    "__rmatmul__",
    "__imatmul__",
    "__missing__",
    "__index__",
    "__torch_function__",
    "__torch_dispatch__",
    "__set_name__",
    "__del__",
    "forward",
    "setup_context",
}
"""Names that syntax and C code look up in classes; the last two are of ``autograd.Function``, whose ``apply`` is in C
from torch 2.14 on."""
_TAKING_APART = frozenset({"__reduce__", "__reduce_ex__", "__getstate__", "dump", "dumps"})
"""Code that names one of these may have C code read whatever an object holds."""
_ACCESSORS = frozenset({"Module.__getattr__", "Module.__setattr__", "Module.__delattr__"})
"""Methods of torch that look into the tables of every module, by names that other code mentions."""
_STATE_IS_USERS = frozenset({"threading"})
"""Libraries whose objects keep what users' code tells them to, as an event's flag: what is only set is guarded, too, as
a replay sets it again."""


@frozen
class Uses:
    """The names that one code object mentions."""

    names: frozenset[str]
    scope: tuple[str, ...]
    """Names of globals and builtins."""
    stored: frozenset[str]
    """Names of globals that it sets."""
    set: frozenset[str]
    """All names that it sets."""
    asks: bool
    """It asks whether an attribute is there, or gives a default for one."""
    is_computed: bool
    """It looks up names that are not constants, or asks for all names."""
    imported: tuple[tuple[str, int], ...]
    """Modules that it imports itself, with how many packages up their names begin."""
    module_lookups: frozenset[str]
    """See ``code_names``."""
    matches: bool
    """It has ``match`` patterns, which read the attributes that a class lists in ``__match_args__``."""


@functools.lru_cache(maxsize=16384)
def uses_of(code: types.CodeType) -> Uses:
    """What the code mentions; of the code in it that a function of its own runs, only the names of globals."""
    mentioned = _looked_up(code)
    texts = {constant for constant in code.co_consts if type(constant) is str and constant.isidentifier()}
    for constant in code.co_consts:
        if type(constant) is tuple:  # names of keyword arguments, and tuples of names
            texts.update(part for part in constant if type(part) is str and part.isidentifier())
    if not mentioned.isdisjoint(_FORMATTING):  # ``"{0.name}".format(x)``
        texts.update(
            name for constant in code.co_consts if type(constant) is str for name in _IN_FORMATS.findall(constant)
        )
    asks = bool(mentioned & ASKING)
    scope = globals_in(code) if code.co_flags & 1 else code.co_names  # a module or class looks up all its names
    matches = _MATCH_CLASS in code.co_code[::2]
    return Uses(
        names=frozenset(mentioned | texts), scope=tuple(scope), stored=_stored(code), set=name_uses(code).set,
        asks=asks, is_computed=is_computed(code), imported=imported_in(code), matches=matches,
        module_lookups=module_lookups(code),
    )  # fmt: skip


def _looked_up(code: types.CodeType) -> set[str]:
    """Names that it does not only set."""
    names = set(code.co_names)
    if _SETTING.isdisjoint(code.co_code[::2]):
        return names
    kept, sets = set(), set()
    for operation, argument in operations(code):
        if operation in _SETTING:
            sets.add(code.co_names[argument])
        elif operation in _NAMING:
            kept.add(code.co_names[argument >> _FLAGS.get(operation, 0)])
    return names - (sets - kept)


def _stored(code: types.CodeType) -> frozenset[str]:
    if _STORE_GLOBAL not in code.co_code[::2]:
        return frozenset()
    return frozenset(code.co_names[argument] for operation, argument in operations(code) if operation == _STORE_GLOBAL)


def place_of(code: types.CodeType) -> tuple[str, int]:
    """File and line where it is written; code that Dynamo makes of it has the same."""
    return code.co_filename, code.co_firstlineno


@define(eq=False)
class Names:
    """The names that all code of a run mentions."""

    by_package: dict[str, set[str]] = field(factory=dict)
    """By the package of the code, where that is a library; users' code has an empty name."""
    scopes: dict[int, tuple[dict[str, Any], set[str]]] = field(factory=dict)
    """By ``id`` of globals: those, and the names that were looked up there."""
    stored: set[tuple[int, str]] = field(factory=set)
    """By ``id`` of a library's globals, names that its own code sets while it runs. Those that move, such as counters,
    are left out."""
    set_only: set[str] = field(factory=set)
    """Names that users' code sets and no code looks up. Their values are guarded, too: a replay sets what the recording
    run changed, so it has to begin with the same values."""
    codes: set[types.CodeType] = field(factory=set)
    compiled: set[types.CodeType] = field(factory=set)
    """Code among these that ``torch.compile`` made, and whose guards told what it looks up."""
    asked: set[str] = field(factory=set)
    """Names that users' code asks for where they may be absent."""
    imported: set[str] = field(factory=set)
    """Modules that users' code imported itself, and those that they are in."""
    is_computed: bool = False
    """Users' code looked up names that are no constants."""
    module_lookups: set[str] = field(factory=set)
    """What users' code does with modules by such names (``code_names.module_lookups``)."""
    matches: bool = False
    """Code took objects apart by patterns."""
    of_definitions: frozenset[str] = frozenset()
    """What users' code may ask of functions and classes that C code keeps."""
    of_tensors: frozenset[str] = frozenset()
    """What users' code may ask of tensors that neither operators nor metadata show."""
    asks_for_all: bool = False
    """Users' code may look at all tensors of a module."""
    run: CodeRun = field(factory=CodeRun)
    _of_classes: dict[type, frozenset[str]] = field(factory=dict)
    _of_codes: list[tuple[types.CodeType, frozenset[str]]] = field(factory=list)
    _keys: dict[str, frozenset[Any] | keyed_reads.Early | None] = field(factory=dict)
    _only_asked: dict[str, bool] = field(factory=dict)
    _special: dict[frozenset[str], frozenset[str]] = field(factory=dict)
    _packages: dict[frozenset[str], frozenset[str]] = field(factory=dict)

    def of_class(self, kind: type) -> frozenset[str]:
        """Names that may have been looked up in an object of the class."""
        known = self._of_classes.get(kind)
        if known is None:
            known = self._of_classes[kind] = self.of_packages([package_of(one.__module__) for one in kind.__mro__])
        return known

    def keys_of(self, name: str) -> frozenset[Any] | keyed_reads.Early | None:
        """The keys that the last run looked up in a dict that its code calls by this name, where it reads nothing else
        of it. ``EARLY``: the next run tells them."""
        if name not in self._keys:
            if not self._of_codes:
                self._of_codes += [(code, uses_of(code).names) for code in {*self.run.latest, *self.run.unseen}]
            codes = [code for code, _ in self._of_codes if _mentions(code, name)]
            takes_apart = any(not _TAKING_APART.isdisjoint(names) for _, names in self._of_codes)
            is_known = not (self.is_computed or self.compiled or takes_apart) and bool(codes)
            run = self.run
            self._keys[name] = keyed_reads.keys_of(name, codes, run.looked_up, run.looked_at) if is_known else None
        return self._keys[name]

    def only_asks(self, name: str) -> bool:
        """Whether all code that mentions the name only looks up attributes of what has it."""
        if name not in self._only_asked:
            is_known = not (self.is_computed or self.compiled)
            codes = [code for code in self.codes if _mentions(code, name)] if is_known else []
            self._only_asked[name] = bool(codes) and all(name in attribute_names(code) for code in codes)
        return self._only_asked[name]

    def of_own_class(self, kind: type) -> frozenset[str]:
        """Names that may have been looked up in a class: those, and what syntax calls."""
        names = self.of_class(kind)
        known = self._special.get(names)
        if known is None:
            asked = _IN_ITS_DICT & (self.of_packages(()) | self.of_definitions)
            known = self._special[names] = ((names | SPECIAL) - OF_ALL_CLASSES) | asked
        return known

    def of_packages(self, packages: Iterable[str]) -> frozenset[str]:
        """The same for objects that belong to these packages."""
        kinds = frozenset({"", *packages} & self.by_package.keys())
        names = self._packages.get(kinds)
        if names is None:
            mentioned = frozenset().union(*[self.by_package[one] for one in kinds]) if kinds else frozenset()
            names = self._packages[kinds] = frozenset(map(sys.intern, mentioned))
        return names


def _mentions(code: types.CodeType, name: str) -> bool:
    return name in uses_of(code).names or name in code.co_freevars or name in code.co_cellvars


def names_of(run: CodeRun, more: Iterable[str] = ()) -> Names:
    """What the code of some runs mentions, what objects such as ``operator.attrgetter`` look up for it, and what
    compiled code has in its guards."""
    names = Names(run=run)
    names.by_package[""] = set(more)
    names._keys.update(dict.fromkeys(more))
    for code, scopes in run.codes.items():
        uses = uses_of(code)
        names.codes.add(code)
        guarded = names_in_guards(code)
        if guarded is not None:
            names.compiled.add(code)
            names.by_package[""] |= guarded
        for scope in scopes:
            package = package_of(scope.get("__name__"))
            owner = package if is_library(package) else ""
            if not (package == "torch" and code.co_qualname in _ACCESSORS):
                names.by_package.setdefault(owner, set()).update(uses.names)
            if owner in _STATE_IS_USERS:
                names.by_package[owner].update(uses.set)
            names.scopes.setdefault(id(scope), (scope, set()))[1].update(uses.scope)
            if guarded is not None:
                names.scopes[id(scope)][1].update(guarded & (scope.keys() | vars(builtins).keys()))
            if not owner:
                names.set_only |= uses.set
                names.scopes[id(scope)][1].update(uses.stored)
            if "globals" in uses.scope:  # ``globals()`` may be asked for any name
                names.scopes[id(scope)][1].update(name for name in scope if name[:2] != "__")
            if owner:
                names.stored.update((id(scope), name) for name in uses.stored)
            names.matches = names.matches or uses.matches
            if not owner:
                takes_apart = not _TAKING_APART.isdisjoint(uses.names)
                names.is_computed = names.is_computed or uses.is_computed or takes_apart
                names.module_lookups |= uses.module_lookups
                if uses.asks:
                    names.asked.update(uses.names)
                for name, level in uses.imported:
                    names.imported.update(with_packages(name, level, scope.get("__package__")))
    names.set_only.difference_update(*names.by_package.values())
    names.by_package[""] |= names.set_only
    users = names.by_package[""]
    if not users.isdisjoint(_FOR_HINTS):
        users |= {"__signature__", "__wrapped__"}
    names.of_definitions = frozenset(_OF_DEFINITIONS & users) | (
        frozenset() if users.isdisjoint(_FOR_HINTS) else {"__annotations__"}
    )
    names.of_tensors = frozenset(OF_TENSORS.keys() & users)
    names.asks_for_all = names.is_computed or not users.isdisjoint(_FOR_ALL_TENSORS)
    return names
