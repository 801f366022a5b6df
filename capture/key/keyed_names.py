"""Which names code uses only to look members up by key: ``self.loggers[name]``, ``history["loss"]``.

Of such a dict nothing else was read than what these keys lead to. They are constants, or arguments that the code never
sets, so that the frame tells them when it begins.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

from attrs import field
from typing_extensions import override

from capture.core.data import define, frozen
from capture.key.name_uses import UsesWalk, Value, name_uses


@frozen
class Keys:
    """The keys that one code object looks up."""

    arguments: frozenset[str]
    """Names of arguments that are keys."""
    constants: frozenset[Any]


@functools.lru_cache(maxsize=16384)
def keyed_names(code: types.CodeType) -> Mapping[str, Keys]:
    """Names of which the code only looks members up, by arguments of its own or by constants."""
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    walk = _KeyWalk(code.co_consts)
    walk.follow(code)
    given = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - walk.versions.keys()
    uses = name_uses(code)
    known = dict[str, Keys]()
    items = {item for item in uses.items_read | uses.items_updated | uses.set_anew if type(item) is tuple}
    # whatever is done with it then, such as a look into what is there: ``history["loss"][0]``
    for each in walk.loaded:
        if each.kind == "item" and each.base is not None and each.base.kind in _NAMED:
            items.add((each.base.name, each.name))
    for name in {name for name, _ in (*walk.keyed, *items) if type(name) is str}:
        arguments = frozenset([key for keyed, key in walk.keyed if keyed == name])
        loads = [value for value in walk.loaded if value.kind in _NAMED and value.name == name]
        is_keyed = all(value.uses and set(value.uses) <= {"item", _KEYED} for value in loads)
        if is_keyed and arguments <= given and name not in uses.called:
            known[name] = Keys(arguments, frozenset([key for keyed, key in items if keyed == name]))
    return known


_KEYED = "keyed"
_NAMED = ("name", "attribute")


@define(eq=False)
class _KeyWalk(UsesWalk):
    """The instructions of one code object, with look-ups by local variables."""

    keyed: set[tuple[str, str]] = field(factory=set)
    """Names, and the local variables that are keys."""

    def _is_keyed(self, container: Value, key: Value) -> bool:
        """Note a look-up by a local variable."""
        if key.kind != "local" or container.kind not in _NAMED:
            return False
        container.uses.append(_KEYED)
        self.keyed.add((container.name, key.name[0]))
        return True

    @override
    def _item(self) -> None:
        if len(self.stack) > 1 and self._is_keyed(self.stack[-2], self.stack[-1]):
            self.stack[-2:] = [Value("other")]
        else:
            super()._item()

    @override
    def _apply(self, name: str, count: int) -> None:
        if name == "CONTAINS_OP" and len(self.stack) > 1 and self._is_keyed(self.stack[-1], self.stack[-2]):
            self.stack[-2:] = [Value("other")]
        else:
            super()._apply(name, count)

    @override
    def _item_by_method(self, name: str, count: int) -> bool:
        """``d.get(key)`` or ``d.get(key, other)``."""
        called = self.stack[-count - 2 :] if 1 <= count <= 2 and len(self.stack) >= count + 2 else []
        base = called[0].base if called and called[0].kind == "method" and called[0].name == "get" else None
        if name != "CALL" or base is None or not self._is_keyed(base, called[2]):
            return super()._item_by_method(name, count)
        for value in called[3:]:
            self._read(value)
        del self.stack[-count - 2 :]
        self.stack.append(Value("other"))
        return True
