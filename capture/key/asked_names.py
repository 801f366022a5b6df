"""Names that code looks up by texts, as far as its instructions tell: ``getattr(self, f"layer{i}")`` asks for names
that begin with ``layer``, ``getattr(F, kind)`` for one of a module.

The instructions are followed with a stack that tells what each value is. Where that is not known here, and at each
place that jumps lead to, a value may be anything: any name may be asked for.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import field

from capture.core.data import define, frozen
from capture.key.name_uses import asks_for_all, is_computed, loads_asking
from capture.key.packages import is_library, name_of, package_of

_MOST_NAMES = 64  # in a list that is gone through


@frozen
class _Text:
    """A text on the stack: all of it, or what it begins with."""

    text: str
    is_whole: bool = True


@frozen
class _Global:
    """A global, or an attribute of one: its names."""

    names: tuple[str, ...]


@frozen
class _Each:
    """A member of one of these globals, in a loop over that."""

    names: frozenset[str]


@frozen
class Asked:
    """One look-up: of ``receiver`` (a ``_Global``, or something else), by ``text``."""

    receiver: Any
    text: Any


_ANY = Asked(None, _Text("", is_whole=False))


def beginnings(code: types.CodeType, scope: Mapping[str, Any]) -> frozenset[str]:
    """What the names begin with that the code looks up by texts which it computes, in objects that are no modules of
    libraries; the empty text where any name may be meant. ``scope``: the globals that it runs in."""
    found = set[str]()
    for one in _asked(code):
        if isinstance(one.receiver, _Global) and _is_library(one.receiver, scope):
            continue
        if isinstance(one.text, _Text):
            found.add(one.text.text)
        else:
            found.update(_members(one.text, scope))
    return frozenset(found)


def _is_library(receiver: _Global, scope: Mapping[str, Any]) -> bool:
    value = scope.get(receiver.names[0])
    for name in receiver.names[1:]:
        value = vars(value).get(name) if type(value) is types.ModuleType else None
    return type(value) is types.ModuleType and is_library(package_of(name_of(value)))


def _members(text: _Each, scope: Mapping[str, Any]) -> Iterator[str]:
    for name in text.names:
        found = scope.get(name)
        if isinstance(found, (list, tuple)) and len(found) <= _MOST_NAMES and all(type(one) is str for one in found):
            yield from found
        else:
            yield ""


@functools.lru_cache(maxsize=16384)
def _asked(code: types.CodeType) -> tuple[Asked, ...]:
    if not is_computed(code):
        return ()
    if asks_for_all(code):
        return (_ANY,)
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _WITHOUT_EFFECT]
    walk = _Walk(_loops(instructions))
    for instruction in instructions:
        walk.step(instruction)
    return (*walk.found, *([_ANY] if walk.loaded > walk.called else []))


def _loops(instructions: Sequence[dis.Instruction]) -> Mapping[str, _Each]:
    """Local names that have nothing but the members of globals, in loops over these."""
    found: dict[str, set[str | None]] = {}
    iterated: str | None = None
    for before, instruction in itertools.pairwise(instructions):
        if instruction.opname == "GET_ITER":
            iterated = before.argval if before.opname == "LOAD_GLOBAL" else None
        elif instruction.opname.startswith("STORE_FAST") or instruction.opname == "DELETE_FAST":
            of = iterated if before.opname == "FOR_ITER" and instruction.opname == "STORE_FAST" else None
            for name in instruction.argval if type(instruction.argval) is tuple else (instruction.argval,):
                found.setdefault(name, set()).add(of)
    return {name: _Each(frozenset(filter(None, of))) for name, of in found.items() if None not in of}


_WITHOUT_EFFECT = frozenset({"RESUME", "NOP", "PRECALL", "CACHE", "EXTENDED_ARG", "COPY_FREE_VARS", "MAKE_CELL",
                             "KW_NAMES", "NOT_TAKEN"})  # fmt: skip
_ASKS = object()  # a function that looks names up


@define(eq=False)
class _Walk:
    """The instructions of one code object, one after the other."""

    loops: Mapping[str, _Each]
    found: list[Asked] = field(factory=list)
    stack: list[Any] = field(factory=list)
    loaded: int = 0
    """So many functions that look names up were loaded, and ``called`` of them called in a way that is known here."""
    called: int = 0

    def step(self, instruction: dis.Instruction) -> None:
        """Follow one instruction."""
        name, argument = instruction.opname, instruction.argval
        if instruction.is_jump_target:
            self.stack.clear()
        self.loaded += loads_asking(instruction)
        if name == "LOAD_GLOBAL":
            self._load(instruction)
        elif name == "LOAD_CONST" and type(argument) is str:
            self.stack.append(_Text(argument))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            self._attribute(instruction)
        elif name in ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW") and argument in self.loops:
            self.stack.append(self.loops[argument])
        elif name == "BUILD_STRING":
            parts = [self._pop() for _ in range(instruction.arg or 0)]
            self.stack.append(_begin_of(parts[-1]))
        elif name == "BINARY_OP" and instruction.argrepr in ("+", "%"):
            _, left = self._pop(), self._pop()
            self.stack.append(_begin_of(left, until="%" if instruction.argrepr == "%" else ""))
        elif name in ("CALL", "CALL_KW"):
            self._call(instruction.arg or 0, with_names=name == "CALL_KW")
        else:
            self._go_on(instruction)

    def _pop(self) -> Any:
        return self.stack.pop() if self.stack else None

    def _load(self, instruction: dis.Instruction) -> None:
        value = _ASKS if loads_asking(instruction) else _Global((instruction.argval,))
        self.stack += [value, None] if instruction.argrepr.endswith("NULL") else [value]
        if instruction.argrepr.startswith("NULL"):
            self.stack[-1:] = [None, value]

    def _attribute(self, instruction: dis.Instruction) -> None:
        base = self._pop()
        value: Any = _Global((*base.names, instruction.argval)) if isinstance(base, _Global) else None
        if isinstance(base, _Text) and instruction.argval == "format":
            value = _begin_of(base, until="{")  # what it is called with follows
        is_method = instruction.opname == "LOAD_METHOD" or "NULL|self" in instruction.argrepr
        self.stack += [value, None] if is_method else [value]

    def _call(self, count: int, *, with_names: bool) -> None:
        if with_names:
            self._pop()
        arguments = [self._pop() for _ in range(count)][::-1]
        called = [self._pop(), self._pop()]
        if _ASKS in called:
            self.called += 1
            text = arguments[1] if count >= 2 and not with_names else None
            is_known = isinstance(text, (_Text, _Each))
            if not (isinstance(text, _Text) and text.is_whole):  # else its name counts as read
                self.found.append(Asked(arguments[0] if count else None, text if is_known else _begin_of(None)))
        text = next((one for one in called if isinstance(one, _Text)), None)
        self.stack.append(_begin_of(text) if text is not None else None)

    def _go_on(self, instruction: dis.Instruction) -> None:
        """Of what it leaves on the stack nothing is known."""
        try:
            effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        except ValueError:
            self.stack.clear()
            return
        if instruction.opname.startswith(("LOAD_", "PUSH_")) and effect >= 0:
            self.stack += [None] * effect
        elif instruction.opname in ("POP_TOP", "STORE_FAST"):
            self._pop()
        elif instruction.opname.startswith("FORMAT") or instruction.opname == "CONVERT_VALUE":
            for _ in range(1 - effect):
                self._pop()
            self.stack.append(None)
        else:
            self.stack = [None] * max(0, len(self.stack) + effect)


def _begin_of(value: Any, until: str = "") -> _Text:
    text = value.text if isinstance(value, _Text) else ""
    return _Text(text.partition(until)[0] if until else text, is_whole=False)
