"""Names: the globals, closure cells and attribute chains that a function's own code mentions.

Read from bytecode once per function. What only deeper code reads is not here; ``guards=`` is the answer to that.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import Any, Literal

import torch
from attrs import frozen

from capture._bind import Unkeyable, identity_token, key_of
from capture._containers import PLAIN_TYPES

RootKind = Literal["self", "global", "closure"]
_LOADS = {"LOAD_GLOBAL": "global", "LOAD_DEREF": "closure", "LOAD_CLASSDEREF": "closure"}
_FAST_LOADS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_FAST_AND_CLEAR")
_SMALL = 16  # members of a plain container that are still compared by value


class _Missing:
    """Stands for an attribute or name that does not exist."""

    def __repr__(self) -> str:
        return "(absent)"


MISSING = _Missing()


@frozen
class Chain:
    """``root`` followed by attribute names: ``self.cfg.scale`` is ``("self", "self", ("cfg", "scale"))``."""

    kind: RootKind
    root: str
    attributes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.root, *self.attributes))


@functools.lru_cache(maxsize=4096)
def chains(code: types.CodeType, receiver: str | None = None) -> tuple[Chain, ...]:
    """All chains in ``code`` and the code nested in it. ``receiver``: name of the local that holds ``self``."""
    found: dict[Chain, None] = {}
    instructions = list(dis.get_instructions(code))
    index = 0
    while index < len(instructions):
        instruction = instructions[index]
        index += 1
        names = _roots(instruction, receiver)
        for position, (kind, root) in enumerate(names):
            attributes: list[str] = []
            while position == len(names) - 1 and index < len(instructions):
                following = instructions[index]
                if following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                    break
                attributes.append(str(following.argval))
                index += 1
            found[Chain(kind, root, tuple(attributes))] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(chains(constant, None)))
    if receiver is not None:  # nested code sees the receiver as a closure cell of its own
        found = {_as_receiver(chain, receiver): None for chain in found}
    return tuple(found)


def _as_receiver(chain: Chain, receiver: str) -> Chain:
    if chain.kind == "closure" and chain.root == receiver:
        return Chain("self", receiver, chain.attributes)
    return chain


def _roots(instruction: dis.Instruction, receiver: str | None) -> list[tuple[RootKind, str]]:
    name = instruction.opname
    if name in _LOADS:
        kind: RootKind = "global" if _LOADS[name] == "global" else "closure"
        return [(kind, str(instruction.argval))]
    if receiver is None:
        return []
    if name in _FAST_LOADS:
        return [("self", receiver)] if instruction.argval == receiver else []
    if name.startswith("LOAD_FAST") and isinstance(instruction.argval, tuple):  # paired loads of newer Pythons
        return [("self", receiver)] if instruction.argval[-1] == receiver else []
    return []


def attribute(holder: Any, name: str) -> Any:
    """The attribute as stored, without running a property: instance first, then the class, else ``MISSING``."""
    if isinstance(holder, types.ModuleType):
        return holder.__dict__.get(name, MISSING)
    own = getattr(holder, "__dict__", None)
    if own is not None and name in own:
        return own[name]
    if isinstance(holder, torch.nn.Module):
        for table in (holder._parameters, holder._buffers, holder._modules):
            if name in table:
                return table[name]
    for kind in type(holder).__mro__:
        if name in kind.__dict__:
            value = kind.__dict__[name]
            if isinstance(value, types.MemberDescriptorType):  # a slot
                return getattr(holder, name, MISSING)
            return MISSING if hasattr(value, "__get__") else value
    return MISSING


def root_value(chain: Chain, function: types.FunctionType, receiver: Any) -> Any:
    """Current value of a chain's root, ``MISSING`` for builtins and empty cells."""
    if chain.kind == "self":
        return receiver
    if chain.kind == "global":
        return function.__globals__.get(chain.root, MISSING)
    names = function.__code__.co_freevars
    if chain.root not in names or function.__closure__ is None:
        return MISSING
    try:
        return function.__closure__[names.index(chain.root)].cell_contents
    except ValueError:
        return MISSING


def chain_value(chain: Chain, function: types.FunctionType, receiver: Any) -> Any:
    """Current value at the end of a chain, ``MISSING`` where it breaks off."""
    value = root_value(chain, function, receiver)
    for name in chain.attributes:
        if value is MISSING:
            return MISSING
        value = attribute(value, name)
    return value


def _part(value: Any) -> Any:
    kind = type(value)
    if value is MISSING or value is None:
        return kind
    if isinstance(value, torch.Tensor):
        return "tensor"  # its address and metadata are checked as an implicit input
    if kind in (list, tuple, dict):
        members = list(value.values()) if kind is dict else value
        if len(members) <= _SMALL and all(type(member) in PLAIN_TYPES for member in members):
            return key_of(value, [])
        if kind is tuple:
            return (kind, len(value))
    try:
        return key_of(value, []) if kind in PLAIN_TYPES else (kind, identity_token(value))
    except (Unkeyable, TypeError):
        return (kind, id(value))


NamedKey = Callable[[Any], tuple[Any, ...]]


def _nothing(_: Any) -> tuple[Any, ...]:
    return ()


def named_key(function: Callable[..., Any], receiver: Any = None) -> NamedKey:
    """A callable of the receiver that gives the key's part for all chains the body names, as they stand then.

    Left out: what torch itself defines, methods, and names found in ``builtins``. Holds no reference to the
    receiver, only to its ``__dict__``.
    """
    if not isinstance(function, types.FunctionType):
        return _nothing
    parameters = function.__code__.co_varnames
    receiver_name = parameters[0] if receiver is not None and function.__code__.co_argcount else None
    getters: list[Callable[[Any], Any]] = []
    for chain in chains(function.__code__, receiver_name):
        if not chain.attributes and chain.kind == "self":
            continue
        getter = _getter(chain, function, receiver)
        if getter is not None:
            getters.append(getter)
    if not getters:
        return _nothing
    return lambda current: tuple([getter(current) for getter in getters])


def _getter(chain: Chain, function: types.FunctionType, receiver: Any) -> Callable[[Any], Any] | None:
    root = root_value(chain, function, receiver)
    if chain.kind == "global" and root is MISSING:
        return None
    if isinstance(root, types.ModuleType):
        value = chain_value(chain, function, receiver)
        if root.__name__.split(".")[0] == "torch" or type(value) not in PLAIN_TYPES:
            return None
    elif chain.kind != "self" and isinstance(root, type) and root.__module__.split(".")[0] == "torch":
        return None
    if chain.kind == "self" and isinstance(receiver, torch.nn.Module) and len(chain.attributes) == 1:
        name = chain.attributes[0]
        if name == "training" or name in receiver._modules:
            return None  # training flags and the module structure have checks of their own
        if attribute(receiver, name) is MISSING and hasattr(type(receiver), name):
            return None  # a method or property
        own = receiver.__dict__
        if name in own:
            return lambda _: _part(own.get(name, MISSING))
    if chain.kind == "global" and not chain.attributes:
        scope, name = function.__globals__, chain.root
        return lambda _: _part(scope.get(name, MISSING))
    return lambda current: _part(chain_value(chain, function, current))
