"""The globals, closure cells and attribute chains that a function's own code mentions.

Read from bytecode once per function. What deeper code reads of modules, and of objects near the body, is found while it
is watched (``guards.read_guards``).
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import itertools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from attrs import evolve
from typing_extensions import override

from capture.core.data import frozen
from capture.key import objects, pytree
from capture.key.attributes import MISSING as MISSING
from capture.key.attributes import (
    PROXIES,
    dict_of,
    has_places,
    is_descriptor,
    keeper_of,
    own_value,
    plain_class,
    slot_of,
    weak_or_none,
)  # fmt: skip
from capture.key.exact import bits_of
from capture.key.left_objects import MOST_PLACES, Left, PlaceKey, bare, content_of, key_of_place
from capture.key.module_kinds import Kinds
from capture.key.name_uses import name_uses
from capture.key.numpy_arrays import FROZEN, content, is_array_type
from capture.key.packages import module_of, name_of, package_of
from capture.key.pytree import PLAIN_TYPES
from capture.key.signature import Leaves, Unkeyable, identity_token, key_of
from capture.native import native

RootKind = Literal["parameter", "global", "closure"]
_OPENED = (torch.Tensor, list, tuple, dict)  # the key opens these itself
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
SMALL = 64  # a list or dict of at most so many members is compared by value on every call
_BY_NAME_OF_MODULE = frozenset({"import_module", "__import__", "find_spec"})
"""Code that names one of these may get modules by names that are worked out."""
_MODULES = "modules"
_IS_CALLED = 1 if sys.version_info >= (3, 12) else 0
"""The bit in the argument of ``LOAD_ATTR`` that says that a call follows: it has an instruction of its own before."""
_COMPARED = (int, str, bytes, torch.device)
_DEEPEST = 32  # how deep tuples in tuples are compared member by member


def same_value(first: Any, second: Any, depth: int = 0) -> bool:
    """Whether it is the same object, or a number, text, bytes or device of the same type and bits, or a tuple of
    such."""
    if first is second:
        return True
    kind = type(first)
    if kind is not type(second):
        return False
    if kind is float:  # 0.0 and -0.0 differ, and one NaN equals itself
        return bits_of(first) == bits_of(second)
    if kind is complex:
        return (bits_of(first.real), bits_of(first.imag)) == (bits_of(second.real), bits_of(second.imag))
    if issubclass(kind, tuple):
        pairs = zip(tuple.__iter__(first), tuple.__iter__(second), strict=False)
        same_size = tuple.__len__(first) == tuple.__len__(second) and depth < _DEEPEST
        return same_size and all(same_value(a, b, depth + 1) for a, b in pairs)
    return kind in _COMPARED and bool(first == second)


@frozen
class Chain:
    """``root`` followed by attribute names: ``self.cfg.scale`` is ``("parameter", "self", ("cfg", "scale"))``."""

    kind: RootKind
    root: str
    attributes: tuple[str, ...] = ()

    @override
    def __str__(self) -> str:
        return ".".join((self.root, *self.attributes))


@functools.lru_cache(maxsize=4096)
def chains(code: types.CodeType) -> tuple[Chain, ...]:
    """All chains in ``code`` and the code nested in it, rooted at globals, closure cells and parameters."""
    parameters = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    distinct: dict[Chain, None] = {}
    uses = name_uses(code)
    instructions = list(dis.get_instructions(code))
    index = 0
    while index < len(instructions):
        root = _root(instructions[index], parameters)
        index += 1
        if root is None:
            continue
        attributes: list[str] = []
        while index < len(instructions) and instructions[index].opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.append(str(instructions[index].argval))
            index += 1
        if not uses.is_only_updated(attributes[-1] if attributes else root[1]):
            distinct[Chain(root[0], root[1], tuple(attributes))] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for chain in chains(constant):
                # a cell of a function inside this one, not a free variable
                if chain.kind == "closure" and chain.root in parameters:
                    distinct[Chain("parameter", chain.root, chain.attributes)] = None
                elif chain.kind != "parameter":
                    distinct[chain] = None
    return tuple(distinct)


def operations(code: types.CodeType) -> list[tuple[int, int]]:
    """Number and whole argument of each operation of the code, which ``dis`` gives ten times as slowly."""
    units, extended, found = code.co_code, 0, []
    for operation, argument in zip(units[::2], units[1::2], strict=True):
        whole = extended | argument
        extended = whole << 8 if operation == dis.EXTENDED_ARG else 0
        found.append((operation, whole))
    return found


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals that the code uses. It does a tenth of the work of ``chains``, which would add 0.1 ms a function
    to a first call."""
    loaded = (argument >> 1 for operation, argument in operations(code) if operation == _LOAD_GLOBAL)
    names = {code.co_names[number]: None for number in loaded}  # the lowest bit said whether a call follows
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(globals_in(constant)))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def globals_stored(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals that the code assigns, whether it reads them or not."""
    names = {code.co_names[argument]: None for operation, argument in operations(code) if operation == _STORE_GLOBAL}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(globals_stored(constant)))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def mentioned_in(code: types.CodeType) -> tuple[str, ...]:
    """All names of attributes and globals in the code and in the code nested in it."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(mentioned_in(constant)))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def imported_in(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    """Modules that the code imports itself, with how many packages up their names begin."""
    if _IMPORT_NAME not in code.co_code[::2]:
        return ()
    before, modules = list[dis.Instruction](), []
    for instruction in dis.get_instructions(code):
        if instruction.opcode == _IMPORT_NAME:
            level = before[-2].argval if len(before) > 1 and type(before[-2].argval) is int else 0
            modules.append((str(instruction.argval), level))
        if instruction.opname not in ("EXTENDED_ARG", "CACHE"):
            before = [*before[-1:], instruction]
    return tuple(modules)


@functools.lru_cache(maxsize=4096)
def module_lookups(code: types.CodeType) -> frozenset[str]:
    """What the code does with modules by names that are worked out: it ``"asks"`` whether one is there, as in
    ``"pandas" in sys.modules``, or ``"gets"`` one. What it calls, as ``model.modules()``, is no ``sys.modules``."""
    if _MODULES in code.co_consts or not _BY_NAME_OF_MODULE.isdisjoint(code.co_names):
        return frozenset({"gets"})
    if _MODULES not in code.co_names:
        return frozenset()
    return frozenset(
        "asks" if following.opname == "CONTAINS_OP" else "gets"
        for one, following in itertools.pairwise(dis.get_instructions(code))
        if one.argval == _MODULES and one.opname != "LOAD_METHOD"
        and not (one.opname == "LOAD_ATTR" and (one.arg or 0) & _IS_CALLED)
    )  # fmt: skip


def with_packages(name: str, level: int, package: Any) -> Iterator[str]:
    """The full name of a module that code imports, after those of the packages it is in."""
    if level:
        try:
            name = importlib.util.resolve_name("." * level + name, package)
        except (ImportError, TypeError, ValueError, AttributeError):  # it raised in the body, too
            return
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _root(instruction: dis.Instruction, parameters: frozenset[str]) -> tuple[RootKind, str] | None:
    name = instruction.opname
    if name == "LOAD_GLOBAL":
        return "global", str(instruction.argval)
    if name in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
        root = str(instruction.argval)
        return ("parameter" if root in parameters else "closure"), root
    if name.startswith("LOAD_FAST"):  # newer Pythons load pairs; the last of them is the one an attribute follows
        local = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
        return ("parameter", str(local)) if local in parameters else None
    return None


def attribute(holder: Any, name: str) -> Any:
    """The attribute as stored, without running a property: instance first, then the class, else ``MISSING``."""
    if type(holder) in PROXIES:
        holder = native.referent(holder)
    if issubclass(type(holder), types.ModuleType):
        own = dict_of(holder)
        return MISSING if own is None else own.get(name, MISSING)
    own = own_value(holder, name)
    if own is not MISSING:
        return own
    if issubclass(type(holder), torch.nn.Module) and (tables := dict_of(holder)) is not None:
        for table in (tables.get("_parameters"), tables.get("_buffers"), tables.get("_modules")):
            if table is not None and name in table:
                return table[name]
    for kind in type(holder).__mro__:
        if name in kind.__dict__:
            value = kind.__dict__[name]
            if type(value) is types.MemberDescriptorType and slot_of(type(holder), name) is None:  # of a class in C
                return value.__get__(holder, type(holder))
            return MISSING if is_descriptor(value) else value
    return MISSING


def root_value(chain: Chain, function: types.FunctionType) -> Any:
    """Current value of a chain's root, ``MISSING`` for builtins, parameters and empty cells."""
    if chain.kind == "global":
        return function.__globals__.get(chain.root, MISSING)
    names = function.__code__.co_freevars
    if chain.root not in names or function.__closure__ is None:
        return MISSING
    try:
        return function.__closure__[names.index(chain.root)].cell_contents
    except ValueError:
        return MISSING


def chain_value(chain: Chain, function: types.FunctionType) -> Any:
    """Current value at the end of a chain, ``MISSING`` where it breaks off."""
    return _value_along(root_value(chain, function), chain.attributes)


def _value_along(value: Any, attributes: tuple[str, ...]) -> Any:
    for name in attributes:
        if value is MISSING:
            return MISSING
        value = attribute(value, name)
    return value


def is_by_value(container: Any) -> bool:
    """Whether it is a container that a key has by its members, where they are few."""
    kind = type(container)
    return kind is list or kind is dict or (kind is deque and has_places(container))


def part_of(
    value: Any, *, limit: int | None = SMALL, above: tuple[int, ...] = (), is_left: bool = False
) -> Any:  # fmt: skip
    """The key's part for one Python value: plain ones and tuples by value, others by identity.

    Lists, dicts and deques of at most ``limit`` members by value too, since they may be changed in place. ``above``:
    ``id`` of the containers that this one is in, which may be itself. ``is_left``: the body leaves other objects there,
    which are told by what they hold.
    """
    kind = type(value)
    if kind is Left:
        return part_of(value.value, limit=limit, is_left=True)
    if value is MISSING or value is None:
        return kind
    if issubclass(kind, torch.Tensor):  # ``isinstance`` would ask what a weak proxy stands for, which may be gone
        return "tensor", value.requires_grad  # its address and metadata are checked as an implicit input
    if is_array_type(kind) or (kind in FROZEN and (limit is None or len(value) <= limit)):
        return content(value) or (kind, object())  # equal to nothing: the call runs eagerly
    if issubclass(kind, tuple) or (is_by_value(value) and (limit is None or len(value) <= limit)):
        if id(value) in above:
            return (kind, above.index(id(value)))
        members: Iterable[Any] = value.items() if issubclass(type(value), dict) else plain_class(value).__iter__(value)
        above, most = (*above, id(value)), [value.maxlen] if kind is deque else []
        return (kind, *most, *[part_of(member, limit=limit, above=above, is_left=is_left) for member in members])
    if is_left:
        within = (*above, id(value))
        opened = content_of(value, above, lambda member: part_of(member, limit=limit, above=within, is_left=True))
        if opened is not None:
            return opened
    try:
        return key_of(value, Leaves()) if kind in PLAIN_TYPES else (kind, identity_token(value))
    except (Unkeyable, TypeError):
        return (kind, id(value))


@frozen(eq=False)
class NamedSource:
    """How to read the value of a name. ``holder`` is a dict (item ``name``), a cell, or a weak reference to an object
    (its attribute ``name``). Where ``holder`` is None, ``read`` gives the value: ``attributes`` of what
    ``root`` gives, if these are known."""

    read: Callable[[], Any]
    holder: dict[str, Any] | types.CellType | weakref.ref[Any] | None = None
    name: str = ""
    root: NamedSource | None = None
    attributes: tuple[str, ...] = ()
    keeper: Callable[[], Any] | None = None
    """Gives the object that keeps the value, where ``holder`` does not; None once that is gone."""


_INPUT = "an input"


class NamedKey:
    """The key's part for all chains that a body names, as they stand when it is called with the receiver (or None) and
    the bound values of the other parameters. Holds no reference to the receiver."""

    def __init__(self, parameters: tuple[str, ...] = (), static: Collection[str] = ()) -> None:
        self._parameters = parameters
        self._static = static
        self._fixed: list[NamedSource] = []
        self._of_receiver: list[tuple[Callable[[Any], Any], tuple[str, ...]]] = []
        """Functions that read a value from the receiver, with the names of the attributes they follow. The names are
        empty unless the receiver itself keeps the first of them."""
        self._of_values: dict[int, list[tuple[str, ...]]] = {}
        self._names: tuple[list[str], list[str]] = ([], [])
        self._added: list[tuple[Callable[[], Any], str]] = []
        self._values: dict[tuple[int, int | None], Any] = {}
        """Holders of values that no dict keeps by a name."""
        self._left: set[PlaceKey] = set()
        """Places in which the body leaves objects."""
        self._inputs: list[tuple[weakref.ref[Any], str]] = []
        """Objects below arguments, with names whose values other parts of the key have."""

    def is_empty(self) -> bool:
        """Whether the body names nothing."""
        return not (self._fixed or self._of_receiver or self._of_values)

    def __call__(self, current: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The parts for one call, hashable."""
        parts = [part_of(value) for value in self.read(current)]
        for position, attributes in self._of_values.items():
            value = values[position]
            if not issubclass(type(value), _OPENED) and type(value) not in PLAIN_TYPES:
                closed = self._parameters[position] in self._static
                parts += [
                    _INPUT if self._inputs and self._is_input(value, names)
                    else _object_part(value, names, closed=closed, left=self._left)
                    for names in attributes
                ]  # fmt: skip
        return tuple(parts)

    def _is_input(self, value: Any, attributes: tuple[str, ...]) -> bool:
        """Whether another part of the key has what is at the end of this chain below an argument."""
        keeper = _value_along(value, attributes[:-1])
        return any(keeper_of_input() is keeper and attributes[-1] == name for keeper_of_input, name in self._inputs)

    def read(self, current: Any) -> list[Any]:
        """The values themselves; those below other parameters left out."""
        found = [source.read() for source in self._fixed]
        if self._of_receiver:
            found += [read(current) for read, _ in self._of_receiver]
        return found

    def sources(self, receiver_of: Callable[[], Any]) -> list[NamedSource]:
        """Where the values are read from, in the order of ``read``."""
        places = list(self._fixed)
        receiver = NamedSource(receiver_of)
        for read, names in self._of_receiver:
            only = names[0] if len(names) == 1 else ""
            holder = receiver_of if only and isinstance(receiver_of, weakref.ref) else None
            reader = functools.partial(_read_of, read, receiver_of)
            places.append(NamedSource(reader, holder, only, receiver, names if len(names) > 1 else ()))
        return places

    def labels(self, values: tuple[Any, ...]) -> list[str]:
        """Names of the parts."""
        return [*self._names[0], *self._names[1], *[path for *_, path in self._below_values(values)]]

    def keeper_of(
        self, part: int, receiver_of: Callable[[], Any], values: tuple[Any, ...]
    ) -> tuple[Callable[[], Any], str, str] | None:  # fmt: skip
        """What keeps the value of a part: a function that gives it, the name of the value there, and the path. None
        where that is neither a dict, nor a cell, nor an object. ``values``: of the other parameters."""
        fixed = len(self._fixed)
        if part < fixed:
            source, path = self._fixed[part], self._names[0][part]
            if source.root is not None:
                return _below(source.root.read, source.attributes), source.attributes[-1], path
            held = source.holder
            keeper = source.keeper or (held if isinstance(held, weakref.ref) else None)
            if keeper is None and held is not None:
                keeper = keeper_of(held)
            return None if keeper is None else (keeper, source.name, path)
        if part < fixed + len(self._of_receiver):
            path = self._names[1][part - fixed]
            names = tuple(path.split(".")[1:])
            return _below(receiver_of, names), names[-1], path
        value, attributes, path = self._below_values(values)[part - fixed - len(self._of_receiver)]
        keeper = weak_or_none(_value_along(value, attributes[:-1]))
        return None if keeper is None else (keeper, attributes[-1], path)

    def _below_values(self, values: tuple[Any, ...]) -> list[tuple[Any, tuple[str, ...], str]]:
        """Objects among the arguments with the attributes that are read below them, and the path, in the order of the
        parts."""
        return [
            (values[position], names, ".".join((self._parameters[position], *names)))
            for position, attributes in self._of_values.items()
            if not issubclass(type(values[position]), _OPENED) and type(values[position]) not in PLAIN_TYPES
            for names in attributes
        ]

    def reader_of(self, part: int, receiver_of: Callable[[], Any]) -> tuple[Callable[[], Any], str] | None:
        """A function that gives the value of a part, and the path. None for what is below other parameters."""
        fixed = len(self._fixed)
        if part < fixed:
            return functools.partial(_bare_value, self._fixed[part].read), self._names[0][part]
        if part < fixed + len(self._of_receiver):
            read, _ = self._of_receiver[part - fixed]
            read_bare = functools.partial(_bare_value, functools.partial(_read_of, read, receiver_of))
            return read_bare, self._names[1][part - fixed]
        return None

    def tell_apart(self, keeper: Callable[[], Any], name: str, path: str, *, by_kind: bool = False) -> bool:
        """Read one more name from now on: in a dict, or of what an object or class keeps itself. False if it was read
        before. ``keeper`` gives the dict or object, or None once it is gone. ``by_kind``: of a module the kind."""
        kept = keeper()
        if any(keeper_of_name() is kept and name == known_name for keeper_of_name, known_name in self._added):
            return False
        self._added.append((keeper, name))

        def read() -> Any:
            keeper_now = keeper()
            return keeper_now.get(name, MISSING) if type(keeper_now) is dict else own_value(keeper_now, name)

        self._names[0].append(path)
        if by_kind and issubclass(type(read()), torch.nn.Module):
            kinds = Kinds()
            self._fixed.append(NamedSource(lambda: kinds.of(read())))
            return True
        holder = kept if type(kept) is dict else keeper if isinstance(keeper, weakref.ref) else None
        is_left = key_of_place(kept, name) in self._left
        self._fixed.append(NamedSource(_left(read) if is_left else read, holder, name, keeper=keeper))
        return True

    def tell_value_apart(self, read: Callable[[], Any], holder: Any, name: Any, path: str) -> bool:
        """As ``tell_apart``, for a value that no dict keeps by a name. It keeps its holder alive, so only some are
        told."""
        known = (id(holder), None if name is None else id(name))
        if known in self._values or len(self._values) == SMALL:
            return False
        self._values[known] = holder
        self._fixed.append(NamedSource(read, holder if isinstance(holder, types.CellType) else None))
        self._names[0].append(path)
        return True

    def leave_out(self, keeper: Any, name: Any, receiver: Any) -> None:
        """Leave a name out, and all chains that lead through it: another part of the key has it."""
        held = getattr(keeper, "__dict__", keeper)

        def leads_through(value: Any, attributes: Sequence[str]) -> bool:
            for attribute_name in attributes:
                if value is keeper and attribute_name == name:
                    return True
                value = attribute(value, attribute_name)
            return bare(value) is keeper and type(keeper) in (dict, list)  # compared by its members, if there are few

        def is_there(source: NamedSource) -> bool:
            first = source if source.root is None else source.root
            holder = first.keeper() if first.keeper is not None else first.holder
            holder = holder() if isinstance(holder, weakref.ref) else holder
            kept = (holder is keeper or holder is held) and (first.name == name or name is None)
            return kept or leads_through(first.read(), source.attributes)

        pairs = zip(self._fixed, self._names[0], strict=True)
        fixed = [both for both in pairs if not is_there(both[0])]
        both_of_receiver = zip(self._of_receiver, self._names[1], strict=True)
        of_receiver = [both for both in both_of_receiver if not leads_through(receiver, both[1].split(".")[1:])]
        self._fixed, self._of_receiver = [reader for reader, _ in fixed], [reader for reader, _ in of_receiver]
        self._names = [label for _, label in fixed], [label for _, label in of_receiver]
        held_weakly = weak_or_none(keeper) if self._of_values and type(name) is str else None
        self._inputs += [(held_weakly, name)] if held_weakly is not None else []

    def tell_by_content(self, places: Iterable[PlaceKey], receiver: Any) -> None:
        """Tell by what they hold, from now on, objects in these places, in which the body leaves others. What is below
        them is told so, too: it is found on another way in each call."""
        new = {*places} - self._left
        if not new:
            return
        if len(self._left) > MOST_PLACES:  # most are in objects that are gone
            self._left.clear()
        self._left |= new
        for at, source in enumerate(self._fixed):
            if type(source.read()) is not Left and any(place in new for place in _places_of(source)):
                self._fixed[at] = evolve(source, read=_left(source.read))
        for at, (read, names) in enumerate(self._of_receiver):
            way = self._names[1][at].split(".")[1:]
            if type(read(receiver)) is not Left and any(place in new for place in _way(receiver, way)):
                self._of_receiver[at] = _left(read), names

    def add(self, chain: Chain, function: types.FunctionType, receiver: Any, receiver_name: str | None) -> None:
        """Follow one chain that the function names."""
        if chain.kind != "parameter":
            source = _source(chain, function)
            if source is not None:
                self._fixed.append(source)
                self._names[0].append(str(chain))
        elif chain.root == receiver_name and chain.attributes:
            part = _receiver_reader(chain.attributes, receiver)
            if part is not None:
                self._of_receiver.append(part)
                self._names[1].append(str(chain))
        elif chain.root in self._parameters and chain.attributes:
            self._of_values.setdefault(self._parameters.index(chain.root), []).append(chain.attributes)


def named_key(
    function: Callable[..., Any], parameters: tuple[str, ...], receiver: Any = None, static: Collection[str] = ()
) -> NamedKey:
    """The key's part for what a function names. ``parameters``: names of the bound values; ``static``: those of them
    that are not opened.

    Left out: what torch itself defines, methods, and names found in ``builtins``. A function wrapped with
    ``functools.wraps`` (``torch.no_grad()``) names what it wraps names.
    """
    named = NamedKey(parameters, static)
    for wrapped in _unwrapped(function):
        code = wrapped.__code__
        receiver_name = code.co_varnames[0] if receiver is not None and code.co_argcount else None
        for chain in chains(code):
            named.add(chain, wrapped, receiver, receiver_name)
    return named


def _unwrapped(function: Any) -> list[types.FunctionType]:
    found = []
    while issubclass(type(function), types.FunctionType) and function not in found:
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found


def _object_part(value: Any, attributes: tuple[str, ...], *, closed: bool, left: Container[PlaceKey]) -> Any:
    """The key's part for the end of a chain below an argument. ``closed``: the object is compared by identity, whatever
    its class. What an opened object holds itself is in the argument's own part of the key."""
    if not closed and pytree.is_object(type(value)) and objects.holds(value, attributes[0]):
        return None
    if issubclass(type(value), torch.nn.Module) and (attributes[0] == "training" or attributes[0] in value._modules):
        return None
    is_left = bool(left) and any(place in left for place in _way(value, attributes))
    return part_of(_value_along(value, attributes), is_left=is_left)


def _way(value: Any, attributes: Iterable[str]) -> Iterator[PlaceKey]:
    """The places on the way along these attributes."""
    for name in attributes:
        if value is MISSING:
            return
        yield key_of_place(value, name)
        value = attribute(value, name)


def _places_of(source: NamedSource) -> Iterator[PlaceKey]:
    """The place of a name, and those on the way to it."""
    first = source if source.root is None else source.root
    holder = first.keeper() if first.keeper is not None else first.holder
    if isinstance(holder, weakref.ref):
        holder = holder()
    if holder is not None:
        yield key_of_place(holder, None if type(holder) is types.CellType else first.name)
    if source.root is not None:
        yield from _way(source.root.read(), source.attributes)


def _left(read: Callable[..., Any]) -> Callable[..., Any]:
    """Reads a value in a place in which the body leaves objects, or below one."""
    return lambda *args: Left(read(*args))


def _bare_value(read: Callable[[], Any]) -> Any:
    return bare(read())


def _source(chain: Chain, function: types.FunctionType) -> NamedSource | None:
    root = root_value(chain, function)
    if chain.kind == "global" and root is MISSING:
        return None
    if issubclass(type(root), types.ModuleType):
        if package_of(name_of(root)) == "torch" or type(chain_value(chain, function)) not in PLAIN_TYPES:
            return None
    elif issubclass(type(root), type) and package_of(module_of(root)) == "torch":
        return None
    if chain.kind == "global":
        scope = function.__globals__
        source = NamedSource(functools.partial(scope.get, chain.root, MISSING), scope, chain.root)
    elif chain.root in function.__code__.co_freevars and function.__closure__ is not None:
        cell = function.__closure__[function.__code__.co_freevars.index(chain.root)]
        source = NamedSource(_cell_reader(cell), cell)
    else:
        return None
    if not chain.attributes:
        return source
    read = lambda: _value_along(source.read(), chain.attributes)  # noqa: E731
    return NamedSource(read, root=source, attributes=chain.attributes)


def _cell_reader(cell: types.CellType) -> Callable[[], Any]:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return MISSING

    return read


def _below(root: Callable[[], Any], attributes: tuple[str, ...]) -> Callable[[], Any]:
    """A function that gives the object that has the last of these attributes."""
    return lambda: _value_along(root(), attributes[:-1])


def _read_of(read: Callable[[Any], Any], receiver_of: Callable[[], Any]) -> Any:
    return read(receiver_of())


def _receiver_reader(attributes: tuple[str, ...], receiver: Any) -> tuple[Callable[[Any], Any], tuple[str, ...]] | None:
    name = attributes[0]
    if issubclass(type(receiver), torch.nn.Module) and len(attributes) == 1:
        if name == "training" or name in receiver._modules:
            return None  # training flags and the module structure have checks of their own
        if attribute(receiver, name) is MISSING and hasattr(type(receiver), name):
            return None  # a method or property
    is_own = own_value(receiver, name) is not MISSING
    if len(attributes) == 1 and is_own:
        return lambda current: own_value(current, name), attributes
    return lambda current: _value_along(current, attributes), attributes if is_own else ()
