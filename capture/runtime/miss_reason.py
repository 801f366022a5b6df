"""Miss reason: what asks for one more recording, in the user's words, for messages and miss events."""

from __future__ import annotations

from typing import Any

import torch

from capture.core.facts import LimitReached
from capture.key import modes, tensor_meta
from capture.key.exact import float_of
from capture.key.signature import Key
from capture.observe import source_location
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.state.call import Call
from capture.tree.node import Node, Pattern
from capture.tree.tree import Tree


def difference(captured: Captured, entry: Entry, call: Call, tree: Tree, pattern: Pattern | None) -> LimitReached:
    """Compare a call with the newest recording of its function under the current node."""
    num = tree.current.counts.get(captured.number, 0)
    where = source_location.user_location()
    siblings = [node for nodes in tree.current.children.values() for node in nodes if node.function is captured]
    same_key = [node for node in siblings if node.key[0] == entry.number]
    if pattern is not None and same_key:
        path, before, after, what = _other_place(call, same_key[-1], pattern)
        return LimitReached(num_recordings=num, difference=what, path=path, before=before, after=after, where=where)
    others = [candidate for candidate in captured.entries() if candidate is not entry and candidate.plan is not None]
    recorded = [candidate for candidate in others if candidate.nodes] or others
    part = _of_keys(captured, recorded[-1], entry, call) if recorded else None
    if part is None:
        return LimitReached(num_recordings=num, difference="its key is new", where=where)
    path, before, after = part
    what = f"{path} changed"
    return LimitReached(num_recordings=num, difference=what, path=path, before=before, after=after, where=where)


def _other_place(call: Call, node: Node, pattern: Pattern) -> tuple[str | None, str, str, str]:
    for (path, _), old, new in zip(call.paths(), node.key[1], pattern, strict=True):
        if old != new:
            before, after = ("outside the pool" if source is None else f"{source:#x}" for source in (old, new))
            return path, before, after, f"{path!r} is another output of this step"
    return None, "", "", "other outputs of this step are still held"


def _of_keys(captured: Captured, old: Entry, new: Entry, call: Call) -> tuple[str, str, str] | None:
    """First part of the key that differs: its name, and both values."""
    for index, (before, after) in enumerate(zip(old.key, new.key, strict=False)):
        if before == after:
            continue
        if index == 0:
            return _first(modes.NAMES, before.values, after.values)
        if index == 1:
            return _tensor(old, call) or _first(captured.binder.names, before, after)
        if index == 2:
            return _first(captured.named.labels(call.values), before, after)
        if index == 5:
            return _first(captured.optimizers.labels(), before, after)
        return ("module training flags" if index == 3 else "a guard"), "", ""
    return None if old.form == new.form else ("the alignment of an argument", str(old.form), str(new.form))


def _first(names: Any, before: Key, after: Key) -> tuple[str, str, str] | None:
    for name, one, other in zip(names, before, after, strict=False):
        if one != other:
            return str(name), _text(one), _text(other)
    return None


def _text(part: Any) -> str:
    """One part of a key, as the user would write it where it is a plain value."""
    if isinstance(part, tuple) and len(part) == 2 and part[0] is float:
        return repr(float_of(part[1]))
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], type):
        plain = part[0] in (int, bool, str, torch.Size)
        return repr(part[1]) if plain else f"{part[0].__name__} object"
    return part.__name__ if isinstance(part, type) else repr(part)[:60]


def _tensor(old: Entry, call: Call) -> tuple[str, str, str] | None:
    assert old.plan is not None
    planned = {placeholder.path: placeholder.tensor for placeholder in old.plan.placeholders}
    for path, leaf in call.paths():
        if issubclass(type(leaf), torch.Tensor) and path in planned:
            info, before = tensor_meta.tensor_info(leaf), planned[path]
            if (info.dtype, info.shape, info.device) != (before.dtype, before.shape, before.device):
                return path, str(before), str(info)
            if info.stride != before.stride:
                return path, f"strides {before.stride}", f"strides {info.stride}"
    return None
