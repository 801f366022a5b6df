"""Which names code uses only to look attributes up, or to set them: ``self.settings.scale``.

Of an object that C code compares or shows by all that it holds, as it does with a ``SimpleNamespace``, nothing else was
read then than those attributes. A local variable that is used in the same way may stand between.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types

from attrs import field
from typing_extensions import override

from capture.core.data import define
from capture.key.name_uses import UsesWalk, Value

_LOOK_UPS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"})
_HAVING_NAMES = frozenset(dis.hasname)
_ATTRIBUTE = "attribute"


@functools.lru_cache(maxsize=16384)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Names with whose values the code does nothing but look up or set attributes."""
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return frozenset()
    walk = _AttributeWalk(code.co_consts)
    walk.follow(code)
    handed_on = {value.name[0] for value in walk.locals if not set(value.uses) <= {_ATTRIBUTE}} | walk.unknown
    handed_on |= set(code.co_cellvars)
    kept_in = {id(value): name for value, name in walk.stored}
    names = dict[str, bool]()
    for value in walk.loaded:
        is_local = id(value) in kept_in and kept_in[id(value)] not in handed_on
        is_only_asked = bool(value.uses or is_local) and set(value.uses) <= {_ATTRIBUTE}
        is_only_asked = is_only_asked and (id(value) not in kept_in or is_local)
        names[value.name] = names.get(value.name, True) and is_only_asked
    return frozenset([name for name, is_only_asked in names.items() if is_only_asked]) - walk.unknown


@define(eq=False)
class _AttributeWalk(UsesWalk):
    """The instructions of one code object, with what becomes of its local variables."""

    locals: list[Value] = field(factory=list)
    stored: list[tuple[Value, str]] = field(factory=list)
    """What was put into local variables, and their names."""
    unknown: set[str] = field(factory=set)
    """Names of which nothing is known."""

    @override
    def step(self, instruction: dis.Instruction) -> None:
        name = instruction.opname
        if name.startswith("STORE_FAST_"):  # several at once
            self.unknown.update(instruction.argval)
        elif instruction.opcode in _HAVING_NAMES and name not in _LOOK_UPS:
            self.unknown.add(instruction.argval)
        super().step(instruction)
        if name.startswith("LOAD_FAST"):
            count = len(instruction.argval) if isinstance(instruction.argval, tuple) else 1
            self.locals += self.stack[-count:]

    @override
    def _attribute(self, instruction: dis.Instruction) -> None:
        name, base = instruction.argval, self._pop()
        base.uses.append("read" if name[:2] == "__" else _ATTRIBUTE)  # ``a.__eq__(b)``
        self._load(Value("attribute", name, base))
        if instruction.opname == "LOAD_METHOD" or "NULL|self" in instruction.argrepr:
            self.stack.append(Value("other"))

    @override
    def _apply(self, name: str, count: int) -> None:
        asked = 2 if name == "IS_OP" else 1 if name.startswith("POP_JUMP") else 0
        for _ in range(min(asked, len(self.stack))):  # whether it is the object, or one at all
            self._pop().uses.append(_ATTRIBUTE)
        if name == "IS_OP":
            self.stack.append(Value("other"))
        else:
            super()._apply(name, count)

    @override
    def _store(self, instruction: dis.Instruction) -> None:
        if instruction.opname == "STORE_ATTR" and len(self.stack) > 1:
            holder, value = self._pop(), self._pop()
            holder.uses.append(_ATTRIBUTE)
            self._read(value)
        elif instruction.opname == "STORE_FAST" and self.stack and self.stack[-1].kind in ("name", "attribute"):
            self.stored.append((self._pop(), instruction.argval))
        else:
            super()._store(instruction)
