"""Key difference: what varies from call to call, in the user's words.

Keys of one function have one form, so they are gone through side by side: where all are equal there is nothing to say,
and where they differ the smallest part that does is named, with the values it took.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from capture.core.facts import GivenUp, HostSync, Variation
from capture.core.interrupts import let_through
from capture.key import modes
from capture.key.exact import float_of
from capture.key.pytree import PLAIN_TYPES
from capture.key.signature import Token
from capture.native import native
from capture.observe import source_location
from capture.runtime.captured import Captured
from capture.state.call import Call
from capture.tree.node import Node

_SHOWN = 3  # values that are shown
_LONGEST = 40  # characters of one value
_TENSOR_PARTS = (
    "dtype", "shape", "strides", "device", "requires_grad", "inference", "address", "conjugate or negative bit",
)  # fmt: skip
_ORDINALS = {1: "1st", 2: "2nd", 3: "3rd"}


def given_up(captured: Captured, call: Call) -> GivenUp:
    """What the budget of a function was spent on, and what varied meanwhile."""
    budget, lives = captured.budget, captured.lives
    if lives.owe_most(budget):
        return _of_lives(captured)
    spent = budget.spent
    keys = [key for key in budget.keys if len(key) == len(budget.keys[-1])]
    of_keys = list(_of_keys(captured, keys, call)) if len(keys) > 1 else []
    variations = (*of_keys, *_of_state(budget.changed))
    reads: tuple[HostSync, ...] = ()
    if not of_keys and len(budget.changed) <= 1:
        all_facts = [entry.facts for entry in captured.entries() if entry.facts is not None]
        reads = tuple(dict.fromkeys(read for facts in all_facts for read in facts.host_syncs))
    return GivenUp(
        observations=spent.observations, recordings=spent.recordings, drops=spent.drops, ms=spent.ms,
        variations=variations, reads=reads, where=source_location.user_location(),
    )  # fmt: skip


def _of_lives(captured: Captured) -> GivenUp:
    """What was spent on objects that came and went."""
    lives = captured.lives
    receiver = captured.receiver
    if receiver is None:
        about, what, change = "function", "the function itself", f"captured anew, {lives.ended} times so far"
    else:
        kind = type(receiver).__name__
        about, what, change = "object", "'self'", f"a new {kind} object after few calls, {lives.ended} so far"
    return GivenUp(
        observations=lives.spent.observations, recordings=lives.spent.recordings, drops=lives.spent.drops,
        ms=lives.spent.ms, variations=(Variation(what=what, change=change, about=about),),
        where=source_location.user_location(),
    )  # fmt: skip


def changed_state(captured: Captured, node: Node, leaves: Sequence[Any]) -> str:
    """The first part of the state a recording relies on that has changed."""
    for guard in node.guard.guards():
        try:
            holds = native.Guards((guard,))(leaves) == 0
        except Exception as error:  # noqa: BLE001 - users' ``__eq__`` runs nowhere, but a source may be gone in many ways
            let_through(error)
            holds = False
        if not holds:
            return str(guard.source.path)
    return ""


def _of_state(changed: Sequence[str]) -> Iterator[Variation]:
    for path in dict.fromkeys(filter(None, changed)):
        count = sum(one == path for one in changed)
        yield Variation(
            what=f"'{path}'", change=f"replaced or changed {'once' if count == 1 else f'{count} times'}", about="state"
        )


def _of_keys(captured: Captured, keys: Sequence[tuple[Any, ...]], call: Call) -> Iterator[Variation]:
    """What varied in whole keys: modes, arguments, and the parts of ``Captured.rest``."""
    columns = list(zip(*keys, strict=True))
    yield from _each(modes.NAMES, [ambient.values for ambient in columns[0]])
    yield from _each(_arguments(captured), columns[1])
    if len(columns) > 3:
        yield from _each(_names(captured, call), columns[2])
        yield from _varied("the training flags of its modules", columns[3])
        yield from _each([f"guards[{at}]" for at in range(len(captured.annotation.guards))], columns[4])
        yield from _each([f"'{label}'" for label in captured.optimizers.labels()], columns[5])
    if len(set(columns[-1])) > 1:
        yield Variation(what="memory that arguments share", change=f"{len(set(columns[-1]))} ways in {len(keys)} calls")


def _arguments(captured: Captured) -> list[str]:
    """Arguments with their ordinals, and places that count as such by their paths."""
    names = captured.binder.names
    count = len(names) - len(captured.binder.places)
    own = [f"'{name}' ({_ORDINALS.get(at, f'{at}th')} argument)" for at, name in enumerate(names[:count], 1)]
    return own + [f"'{place.path}'" for place in captured.binder.places]


def _names(captured: Captured, call: Call) -> list[str]:
    """What the body names: globals with the file whose globals they are."""
    code = getattr(captured.function, "__code__", None)
    if code is None:
        return captured.named.labels(call.values)
    own = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_freevars, *code.co_cellvars}
    file = os.path.basename(code.co_filename)
    labels = captured.named.labels(call.values)
    return [f"'{label}'" if label.split(".")[0] in own else f"global '{label}' of {file}" for label in labels]


def _each(names: Sequence[str], values: Sequence[Sequence[Any]]) -> Iterator[Variation]:
    for name, column in zip(names, zip(*values, strict=False), strict=False):
        yield from _varied(name, column)


def _varied(name: str, parts: Sequence[Any]) -> Iterator[Variation]:
    """How one part of the key varied; nothing if it did not."""
    if all(part == parts[0] for part in parts):
        return
    form = _form(parts)
    if form is None:
        about = "number" if all(map(_is_number, parts)) else "size" if ", " in name else ""
        yield Variation(what=name, change=_values([_text(part) for part in parts]), about=about)
    elif form == "object":
        yield Variation(what=name, change=_objects(parts), about="object")
    else:
        for suffix, column in form:
            yield from _varied(f"{name}{suffix}", column)


def _form(parts: Sequence[Any]) -> Any:
    """How to go on below: names and columns of members; ``"object"`` where identity counts; None at a value."""
    if not all(type(part) is tuple and part for part in parts):
        return None
    heads = {part[0] for part in parts}
    lengths = {len(part) for part in parts}
    if all(isinstance(head, torch.dtype) for head in heads) and lengths == {len(_TENSOR_PARTS)}:
        return _of_tensors(parts)
    if len(heads) > 1:
        return None
    if any(isinstance(member, Token) for part in parts for member in part[1:2]):
        return "object"
    head = parts[0][0]
    if head in (int, bool, float, complex, str, set, torch.Size) or not isinstance(head, type) or head in PLAIN_TYPES:
        return None
    if len(lengths) > 1:
        return [(", number of members", [len(part) - 1 for part in parts])]
    names = [_member(part) for part in parts]
    if len(set(names)) == 1 and names[0] is not None:
        return [(f".{_name(name)}" if not str(name).startswith(".") else str(name), [part[at][1] for part in parts])
                for at, name in enumerate(names[0], 1)]  # fmt: skip
    if issubclass(head, (tuple, list)):
        return [(f"[{at - 1}]", [part[at] for part in parts]) for at in range(1, len(parts[0]))]
    return None


def _is_number(part: Any) -> bool:
    return type(part) is tuple and part[:1] in ((int,), (bool,), (float,), (complex,))


def _of_tensors(parts: Sequence[Any]) -> list[tuple[str, Sequence[Any]]]:
    """Metadata by name. Strides follow from the shape in most cases, and say nothing then."""
    columns = dict(zip(_TENSOR_PARTS, zip(*parts, strict=True), strict=True))
    if len(set(columns["shape"])) > 1:
        del columns["strides"]
        name, columns["shape"] = _shape(parts)
        return [(f", {name if one == 'shape' else one}", column) for one, column in columns.items()]
    return [(f", {name}", column) for name, column in columns.items()]


def _shape(parts: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """The one dimension that varies, or the whole shape."""
    shapes = [tuple(part[1]) for part in parts]
    if len({len(shape) for shape in shapes}) > 1:
        return "number of dimensions", tuple(len(shape) for shape in shapes)
    varying = [at for at in range(len(shapes[0])) if len({shape[at] for shape in shapes}) > 1]
    if len(varying) == 1:
        return f"dimension {varying[0]}", tuple(shape[varying[0]] for shape in shapes)
    return "shape", tuple(shapes)


def _member(part: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Names of the members of a mapping or of an object with fields."""
    pairs = part[1:]
    named = all(type(pair) is tuple and len(pair) == 2 and not isinstance(pair[0], type) for pair in pairs)
    return tuple(pair[0] for pair in pairs) if named else None


def _name(name: Any) -> Any:
    """A name as ``exact`` gives it, or an object's part has it for a member, as the user would write it."""
    if type(name) is not tuple:
        return name
    if isinstance(name[0], type):
        return _text(name)
    kind, at = name
    return at.__name__ if kind == "slot" else _name(at)


def _objects(parts: Sequence[Any]) -> str:
    kind = parts[0][0].__qualname__ if isinstance(parts[0][0], type) else str(parts[0][0])
    count = len({str(part[1:]) for part in parts})
    if count == len(parts):
        return f"a new {kind} object in every call"
    return f"{count} {kind} objects in {len(parts)} calls"


def _values(texts: Sequence[str]) -> str:
    found = list(dict.fromkeys(texts))
    if len(found) == 1:  # what differs lies deeper than is shown
        return f"{found[0]} that is another one, or changed"
    shown = ", ".join(found[:_SHOWN])
    return f"{len(found)} values in {len(texts)} calls ({shown}{', ...' if len(found) > _SHOWN else ''})"


def _text(part: Any) -> str:
    """One value, as the user would write it if it is plain."""
    match part:
        case (kind, str() as text) if kind is float:
            return repr(float_of(text))
        case (type() as kind, value) if kind in PLAIN_TYPES or kind is torch.Size:
            return _shortened(repr(value))
        case (torch.dtype() as dtype, torch.Size() as shape, *_):
            return f"a tensor {str(dtype).removeprefix('torch.')}{list(shape)}"
        case (type() as kind, *_):
            return f"a {kind.__qualname__}"
        case type():
            return f"a {part.__qualname__}"
    return _shortened(repr(part))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
