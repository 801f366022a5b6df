"""What code does with the values of names: which of them it only counts up, or only adds to.

``self.calls += 1`` reads ``calls``, but nothing other than ``calls`` depends on it; ``self.log.append(x)`` does not
depend on what is in the log. The instructions are followed with a stack that tells where each value comes from. At a
jump, or at an instruction that is not known here, everything on the stack counts as read.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from attrs import field

from capture.core.data import define, frozen

ADDING = frozenset({"append", "extend"})
"""Methods of lists and deques that add members at the end and return None."""
_GIVING_ITEMS = frozenset({"get", "setdefault"})
"""Methods of dicts that give the item of a key, and something else where there is none."""
_FILLING = "update"
"""The method of dicts that puts values in by keys."""
_UPDATING = ("+", "+=", "-", "-=")
_NAMED = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_STORED = ("STORE_GLOBAL", "STORE_NAME", "STORE_DEREF")
_WITHOUT_EFFECT = frozenset({"RESUME", "NOP", "PRECALL", "CACHE", "EXTENDED_ARG", "COPY_FREE_VARS", "MAKE_CELL",
                             "NOT_TAKEN"})  # fmt: skip
_BY_TEXT = frozenset({"getattr", "hasattr", "delattr", "attrgetter", "methodcaller"})
"""Code that mentions one of these may read what it has as texts."""
ASKING = frozenset({"getattr", "hasattr", "delattr", "setattr"})
_SETTING = frozenset({"setattr", "__setattr__", "__setitem__", "setdefault"})
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_WHOLE = frozenset({"vars", "__dict__", "attrgetter", "dir", "__getattribute__", "asdict", "astuple", "fields"})
_BY_NAME = ("__getattr__", "__getattribute__", "__setattr__", "__delattr__")


@functools.lru_cache(maxsize=16384)
def is_computed(code: types.CodeType) -> bool:
    """Whether the code looks up names that are not constants, or asks for all names (``vars``, ``__dict__``). Functions
    that get names which other code mentions, as ``__getattr__`` does, do not count."""
    mentioned = set(code.co_names)
    computed = not mentioned.isdisjoint(_WHOLE) or (not mentioned.isdisjoint(ASKING) and not _asks_for_constants(code))
    return computed and code.co_name not in _BY_NAME


def asks_for_all(code: types.CodeType) -> bool:
    """Whether it asks for all names that something has, or keeps a function that looks one up."""
    return not _WHOLE.isdisjoint(code.co_names)


def loads_asking(instruction: dis.Instruction) -> bool:
    """Whether it loads a function that looks names up: a global, or one of ``builtins``."""
    return instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", *_ATTRIBUTES) and instruction.argval in ASKING


def _asks_for_constants(code: types.CodeType) -> bool:
    """Whether each ``getattr(x, "name")`` in the code has a constant name. A call that cannot be read from the
    instructions counts as computed."""
    before: list[dis.Instruction] = []
    wanted = 0
    for instruction in dis.get_instructions(code):
        if loads_asking(instruction):
            wanted += 1
        elif instruction.opname in ("CALL", "CALL_FUNCTION", "CALL_KW") and wanted:
            count = instruction.arg or 0
            tail = [each for each in before if each.opname not in ("PRECALL", "CACHE", "KW_NAMES")]
            place = 1 if count == 2 else 2
            asks = count in (2, 3) and len(tail) >= place and type(tail[-place].argval) is str
            wanted -= asks and tail[-place].opname == "LOAD_CONST"
        before = [*before[-4:], instruction]
    return not wanted


@define(eq=False)
class Value:
    """Something on the stack: a ``local``, ``constant``, ``name``, ``attribute`` or ``item`` of its ``base``, a
    ``method`` of it that gives items or puts some in, a ``sum`` with it, the ``base`` itself once it was ``filled``, a
    new ``dict`` of values by constant keys (its name), or anything else. ``uses``: what was done with it."""

    kind: str
    name: Any = None
    base: Value | None = None
    uses: list[str] = field(factory=list)

    def is_like(self, value: Value | None) -> bool:
        """Whether it is the same expression."""
        if self is value:
            return True
        if value is None or (self.kind, type(self.name)) != (value.kind, type(value.name)) or self.name != value.name:
            return False
        if self.kind in ("attribute", "item"):
            return self.base is not None and self.base.is_like(value.base)
        return self.kind in ("local", "name")

    def full_name(self) -> Any:
        """Its name; of an item, with the key after the name of what it is in."""
        return (self.base.full_name(), self.name) if self.kind == "item" and self.base is not None else self.name


@frozen
class NameUses:
    """Names by what is done with them. One may be in several of these."""

    read: frozenset[str]
    """Something may follow from their values."""
    called: frozenset[str]
    """Something follows from what they do as methods: their values are no numbers, nor plain containers."""
    filled_anyhow: frozenset[str]
    """Names in which values are put by keys that are not constants."""
    counted: frozenset[str]
    """A number is added to them."""
    grown: frozenset[str]
    """Members are added at the end of what they name."""
    items_read: frozenset[tuple[str, Any]]
    """Names with constant keys: something may follow from what is kept there by that key. An item of an item has the
    pair of the outer one in place of a name."""
    items_updated: frozenset[tuple[str, Any]]
    """Names with constant keys: a number is added to what is kept there, or members are added at its end."""
    set: frozenset[str]
    """They are given values."""
    set_anew: frozenset[Any]
    """They are given values that are no sums with their own, as a count is set to 0. Items as in ``items_read``."""
    filled: frozenset[str]
    """Names in which values are put by constant keys."""
    asked: frozenset[Any]
    """Names that are asked for items by a method, which an object that is no dict may answer from all that it has."""
    stores: frozenset[tuple[str, Any, int]]
    """Names that are given values as an ``attribute``, constant keys that are given some as an ``item``, and names in
    which ``any`` item may be given one, each with the instruction that does it; -1 where a call does it by a text."""

    def is_only_updated(self, name: str) -> bool:
        """Whether the name, or an item of it, is counted up, added to or filled, and nothing else depends on it here.
        Reads of its other items are found while the body is watched."""
        is_filled_anyhow = name in self.filled_anyhow and (name in self.counted or name in self.grown)
        if name in self.read or name in self.called or is_filled_anyhow:
            return False
        counted = {_ends(item)[1] for item in self.items_updated if _ends(item)[0] == name}
        set_anew = {_ends(item)[1] for item in self.set_anew if type(item) is tuple and _ends(item)[0] == name}
        read = {_ends(item)[1] for item in self.items_read if _ends(item)[0] == name}
        if counted:
            return not counted & (read | set_anew)
        return (
            not read
            and not (name in self.counted and name in self.set_anew)
            and (name in self.counted or name in self.grown or name in self.filled)
        )


def _ends(item: tuple[Any, Any]) -> tuple[str, tuple[Any, ...]]:
    """The name and all keys of an item, or of an item of an item."""
    name, key = item
    if type(name) is not tuple:
        return name, (key,)
    outermost, keys = _ends(name)
    return outermost, (*keys, key)


@functools.lru_cache(maxsize=16384)
def name_uses(code: types.CodeType) -> NameUses:
    """Of one code object; what is in it are code objects of their own."""
    walk = UsesWalk(code.co_consts)
    walk.follow(code)
    if not _SETTING.isdisjoint(code.co_names):
        walk.note_texts(code.co_consts)
    texts = _texts(code.co_consts) if not _BY_TEXT.isdisjoint(code.co_names) else ()
    return walk.name_uses(texts)


@functools.lru_cache(maxsize=16384)
def updated_names(code: types.CodeType) -> frozenset[str]:
    """Names that the code gives what an addition in place (``+=``) came to, whatever it adds. Of items, all constant
    keys that may be meant."""
    names, is_update = set[str](), False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("SWAP", "EXTENDED_ARG", "CACHE"):
            continue
        if is_update and instruction.opname in ("STORE_ATTR", *_STORED):
            names.add(instruction.argval)
        elif is_update and instruction.opname == "STORE_SUBSCR":
            names.update(one for one in code.co_consts if type(one) is str)
        is_update = instruction.opname == "BINARY_OP" and instruction.argrepr in ("+=", "-=")
    return frozenset(names)


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for one in constants:
        if type(one) is str:
            yield from one.split(".")
        elif type(one) is tuple:
            yield from _texts(one)


@define(eq=False)
class UsesWalk:
    """The instructions of one code object, one after the other."""

    _constants: tuple[Any, ...]
    stack: list[Value] = field(factory=list)
    loaded: list[Value] = field(factory=list)
    versions: dict[str, int] = field(factory=dict)
    """How often a local variable was set."""
    set: builtins.set[str] = field(factory=builtins.set)
    set_anew: builtins.set[Any] = field(factory=builtins.set)
    filled: builtins.set[str] = field(factory=builtins.set)
    asked: builtins.set[Any] = field(factory=builtins.set)
    _keywords: tuple[str, ...] = ()
    """Of the call to come, up to Python 3.12."""
    _stores: builtins.set[tuple[str, Any, int]] = field(factory=builtins.set)
    _called: builtins.set[str] = field(factory=builtins.set)
    _filled_anyhow: builtins.set[str] = field(factory=builtins.set)
    _at: int = 0

    def note_texts(self, constants: Iterable[Any]) -> None:
        """The code may set what has one of these names."""
        texts = {one for one in constants if type(one) is str}
        self._stores |= {(kind, one, -1) for one in texts for kind in ("attribute", "item")}
        self.set_anew |= texts

    def follow(self, code: types.CodeType) -> None:
        """Follow all instructions."""
        for instruction in dis.get_instructions(code):
            self.step(instruction)
        self.escape()

    def step(self, instruction: dis.Instruction) -> None:
        """Follow one instruction."""
        self._at = instruction.offset
        name = instruction.opname
        if name in _WITHOUT_EFFECT:
            return
        if instruction.is_jump_target:
            self.escape()
        if name in _NAMED:
            if "NULL" in instruction.argrepr:
                self.stack.append(Value("other"))
            self._load(Value("name", instruction.argval))
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            self.stack.append(Value("constant", instruction.argval))
        elif name.startswith("LOAD_FAST"):
            for each in instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,):
                self.stack.append(Value("local", (each, self.versions.get(each, 0))))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            self._attribute(instruction)
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            self._item()
        elif name == "BINARY_OP":
            self._sum(instruction.argrepr)
        elif name in ("COPY", "SWAP") and 0 < (instruction.arg or 0) <= len(self.stack):
            self._move(name, instruction.arg or 0)
        elif name.startswith("STORE"):
            self._store(instruction)
        elif name == "KW_NAMES":
            self._keywords = self._constants[instruction.arg or 0]
        else:
            self._apply(name, instruction.arg or 0)
            self._keywords = ()

    def escape(self) -> None:
        """Everything on the stack may be used from here on: it counts as read."""
        for value in self.stack:
            self._read(value)
        self.stack.clear()

    def name_uses(self, texts: Iterable[str]) -> NameUses:
        """All names that were loaded, by what was done with them."""
        named = [loaded_value for loaded_value in self.loaded if loaded_value.kind != "item"]
        items = [
            (loaded_value, loaded_value.full_name())
            for loaded_value in self.loaded
            if loaded_value.kind == "item" and loaded_value.base is not None
        ]
        return NameUses(
            read=frozenset(value.name for value in named if not value.uses or "read" in value.uses) | frozenset(texts),
            called=frozenset(self._called),
            filled_anyhow=frozenset(self._filled_anyhow),
            counted=frozenset(value.name for value in named if "counted" in value.uses),
            grown=frozenset(value.name for value in named if "grown" in value.uses),
            items_read=frozenset(key for value, key in items if "read" in value.uses or not value.uses),
            items_updated=frozenset(key for value, key in items if "counted" in value.uses or "grown" in value.uses),
            set=frozenset(self.set),
            set_anew=frozenset(self.set_anew),
            filled=frozenset(self.filled),
            asked=frozenset(self.asked),
            stores=frozenset(self._stores),
        )

    def _pop(self) -> Value:
        return self.stack.pop() if self.stack else Value("other")

    def _use(self, value: Value | None, how: str) -> None:
        if value is not None:
            value.uses.append(how)

    def _read(self, value: Value) -> None:
        """Count a value as read."""
        value.uses.append("read")
        if value.kind in ("sum", "method", "filled"):
            self._use(value.base, "read")

    def _load(self, value: Value) -> None:
        self.loaded.append(value)
        self.stack.append(value)

    def _move(self, name: str, depth: int) -> None:
        if name == "COPY":
            self.stack.append(self.stack[-depth])
        else:
            self.stack[-1], self.stack[-depth] = self.stack[-depth], self.stack[-1]

    def _apply(self, name: str, count: int) -> None:
        """An instruction that takes some values from the top of the stack and puts one there."""
        taken = {"BUILD_MAP": 2 * count, "CALL": count + 2, "CALL_KW": count + 3, "BINARY_SLICE": 3,
                 "BUILD_CONST_KEY_MAP": count + 1}.get(name)  # fmt: skip
        if name in ("BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "BUILD_STRING"):
            taken = count
        elif name in ("COMPARE_OP", "IS_OP", "CONTAINS_OP"):
            taken = 2
        elif name.startswith("UNARY_") or name == "POP_TOP":
            taken = 1
        if taken is None and name != "PUSH_NULL":
            self.escape()
            return
        if name in ("CALL", "CALL_KW") and (self._fills_by_method(name, count) or self._item_by_method(name, count)):
            return
        made = self._made_dict(name, count)
        if name == "POP_TOP" and self.stack and self.stack[-1].kind == "item" and self.stack[-1].uses == ["given"]:
            self.stack.pop()  # ``d.setdefault(key, value)``
            return
        for _ in range(taken or 0):
            self._read(self._pop())
        if name != "POP_TOP":
            self.stack.append(made or Value("other"))

    def _made_dict(self, name: str, count: int) -> Value | None:
        """A new dict whose keys are constant texts, of which the values on the stack are taken."""
        if name == "BUILD_CONST_KEY_MAP" and self.stack and self.stack[-1].kind == "constant":
            keys = tuple(self.stack[-1].name)
        elif name == "BUILD_MAP" and count and len(self.stack) >= 2 * count:
            of_keys = self.stack[-2 * count :: 2]
            keys = tuple([key.name if key.kind == "constant" else None for key in of_keys])
        else:
            return None
        return Value("dict", keys) if all(type(key) is str for key in keys) else None

    def _fills_by_method(self, name: str, count: int) -> bool:
        """``d.update(key=value)`` or ``d.update({"key": value})``, which put values in a dict by constant keys as
        ``d["key"] = value`` does."""
        keywords = self._keywords
        if name == "CALL_KW":
            keywords = tuple(self.stack[-1].name) if self.stack and self.stack[-1].kind == "constant" else ()
        called = self.stack[-count - 2 - (name == "CALL_KW") :]
        if len(called) < count + 2 or called[0].kind != "method" or called[0].name != _FILLING or not count:
            return False
        made = called[2] if count == len(keywords) + 1 and called[2].kind == "dict" else None
        base, is_known = called[0].base, made is not None or count == len(keywords)
        if base is None or not (is_known or (count == 1 and base.kind in ("name", "attribute"))):
            return False
        for value in called[2:]:
            self._read(value)
        del self.stack[-len(called) :]
        self._fill(base, [*(made.name if made is not None else ()), *keywords])
        if not is_known:
            self._use(base, "item")
            self._fill_anyhow(base)
        self.stack.append(Value("other"))
        return True

    def _fill(self, container: Value, keys: Iterable[str]) -> None:
        self.asked.add(container.full_name())  # another object than a dict may do anything with it
        for key in keys:
            self._put_item(container, Value("constant", key), Value("other"))

    def _fill_anyhow(self, container: Value) -> None:
        self._filled_anyhow.add(container.name)
        self.filled.add(container.name)
        self._stores.add(("any", container.name, self._at))

    def _item_by_method(self, name: str, count: int) -> bool:
        """``d.get(key)``, ``d.get(key, other)`` or ``d.setdefault(key, other)``: where there is such a key, that item.
        That there is one is guarded."""
        called = self.stack[-count - 2 :] if 1 <= count <= 2 and len(self.stack) >= count + 2 else []
        is_asked = bool(called) and called[0].kind == "method" and called[0].name in _GIVING_ITEMS
        if name != "CALL" or not is_asked or called[2].kind != "constant":
            return False
        method, key = called[0], called[2]
        for value in called[3:]:
            self._read(value)
        del self.stack[-count - 2 :]
        method.uses.append("read")
        self._use(method.base, "item")
        self.asked.add(method.base.full_name() if method.base is not None else None)
        self._load(Value("item", key.name, method.base))
        if method.name == "setdefault":
            self.stack[-1].uses.append("given")
        return True

    def _attribute(self, instruction: dis.Instruction) -> None:
        base = self._pop()
        is_method = instruction.opname == "LOAD_METHOD" or "NULL|self" in instruction.argrepr
        # whoever gets the bound method can only add members
        if instruction.argval in ADDING and base.kind in ("name", "attribute", "item"):
            self._use(base, "grown")
            self.stack += [Value("other")] * (2 if is_method else 1)
            return
        is_of_dicts = instruction.argval in _GIVING_ITEMS or instruction.argval == _FILLING
        if is_method and is_of_dicts and base.kind in ("name", "attribute", "item"):
            self._load(Value("method", instruction.argval, base))
        else:
            self._read(base)
            value = Value("attribute", instruction.argval, base)
            if is_method:
                self._called.add(instruction.argval)
                self.stack.append(value)
            else:
                self._load(value)
        if is_method:
            self.stack.append(Value("other"))

    def _item(self) -> None:
        key, container = self._pop(), self._pop()
        if key.kind == "constant" and container.kind in ("name", "attribute", "item"):
            self._use(container, "item")
            self._load(Value("item", key.name, container))
            return
        self._read(key)
        self._read(container)
        self.stack.append(Value("other"))

    def _sum(self, operator: str) -> None:
        right, left = self._pop(), self._pop()
        self._read(right)
        if operator == "|=" and right.kind == "dict" and left.kind in ("name", "attribute", "item"):
            self._fill(left, right.name)
            self.stack.append(Value("filled", None, left))
            return
        if operator in _UPDATING:
            self.stack.append(Value("sum", operator, left))
            return
        self._read(left)
        self.stack.append(Value("other"))

    def _store(self, instruction: dis.Instruction) -> None:
        if instruction.opname in _STORED:
            self._put(Value("name", instruction.argval), self._pop())
        elif instruction.opname == "STORE_ATTR":
            holder, value = self._pop(), self._pop()
            self._put(Value("attribute", instruction.argval, holder), value)
            self._read(holder)
        elif instruction.opname == "STORE_SUBSCR":
            key, container, value = self._pop(), self._pop(), self._pop()
            self._put_item(container, key, value)
        else:
            for each in instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,):
                self.versions[each] = self.versions.get(each, 0) + 1
            if instruction.opname == "STORE_FAST":
                self._read(self._pop())
            else:
                self.escape()

    def _put(self, place: Value, value: Value) -> None:
        self.set.add(place.name)
        self._stores.add(("attribute", place.name, self._at))
        if value.kind == "filled" and value.base is not None and value.base.is_like(place):
            return
        before = value.base if value.kind == "sum" else None
        if before is None or not before.is_like(place):
            self.set_anew.add(place.name)
            self._read(value)
            return
        before.uses.append("counted")
        if value.name == "+=":
            before.uses.append("grown")  # ``+=`` on a list gives the same list

    def _put_item(self, container: Value, key: Value, value: Value) -> None:
        is_constant = key.kind == "constant"
        if value.kind == "filled" and value.base is not None and value.base.is_like(Value("item", key.name, container)):
            return
        is_named = container.kind in ("name", "attribute")
        self._use(container, "item" if is_constant or is_named else "read")
        if is_named and not is_constant:
            self._fill_anyhow(container)
        before = value.base if value.kind == "sum" else None
        same = before is not None and before.kind == "item" and is_constant and type(before.name) is type(key.name)
        if before is not None and same and before.name == key.name and container.is_like(before.base):
            before.uses.append("counted")
            return
        holder = container
        if is_constant:
            self._stores.add(("item", key.name, self._at))
            self.set_anew.add(Value("item", key.name, container).full_name())
        while holder.kind == "item" and holder.base is not None:
            holder = holder.base
        if is_constant and holder.kind in ("name", "attribute"):
            self.filled.add(holder.name)
        self._read(value)
        self._read(key)
