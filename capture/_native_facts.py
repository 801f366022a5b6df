"""Native facts: the check of a recording, as it is written in Python, as facts for the C module.

The text of a check is made of few forms (``_checks``), which are read here again. What has another form is left to
Python.
"""

from __future__ import annotations

import array
import ast
import itertools
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from capture._bind import Switches
from capture._fast import native
from capture._named import MISSING, Source
from capture._torch_private_layout import layout

# as in ``native/facts.c``
ITEM, ABSENT, SIZE, ITEMS, ATTRIBUTE, GIVES, BELOW, BELOW_ANY, CELL, ARGUMENT, APART = range(11)
WEAK, TENSOR = 16, 48  # more to a kind: the object that a weak reference refers to is expected, and of its class
Fact = tuple[int, Any, Any, Any, int]
Scope = dict[str, Any]
_KINDS = frozenset([torch.Tensor, torch.nn.Parameter, torch.nn.Buffer])


class _OtherForm(Exception):
    """A text that no fact says."""


def facts_of(texts: Iterable[str], scope: Scope, tensors: Sequence[torch.Tensor], apart: Sequence[Fact] = ()) -> Any:
    """The C module's look at these conditions, and at metadata and addresses of the tensors. None if there is none."""
    where = layout()
    if native is None or where is None or not all(map(_is_plain, tensors)):
        return None
    try:
        facts = tuple(fact for text in texts for fact in _all_of(ast.parse(text, mode="eval").body, scope))
    except (_OtherForm, KeyError):
        return None
    return native.Facts((*facts, *apart), native.Tensors(tuple(tensors), where) if tensors else None)


def apart_of(copied: Sequence[tuple[int, int]], begins: Sequence[int], ends: Sequence[int]) -> list[Fact]:
    """Arguments, by position and bytes, share no memory with these pieces, which ascend."""
    pieces = array.array("Q", itertools.chain.from_iterable(zip(begins, ends, strict=True))).tobytes()
    return [(APART, None, position, pieces, nbytes) for position, nbytes in copied]


def flags_of(switches: Switches) -> list[Fact] | None:
    """What says that switches of modules are as they are now. None where one is in no ``__dict__``."""
    owns, weak, sharded = switches
    if sharded:
        return None
    facts: list[Fact] = [(ITEM, own, name, own[name], 0) for own, name in owns]
    for reference, name in weak:
        own = reference().__dict__
        if name not in own:
            return None
        facts.append((BELOW, reference, name, own[name], 0))
    return facts


def named_fact(value: Any, source: Source, *, weakly: bool) -> Fact:
    """What says that a name has this very value. ``weakly``: without keeping it alive, and of its class; a tensor also
    needs a gradient as it does now."""
    more = 0 if not weakly else TENSOR if isinstance(value, torch.Tensor) else WEAK
    expected = weakref.ref(value) if weakly else value
    if value is MISSING:
        return GIVES, source.read, None, expected, 0
    match source.holder:
        case dict() as table:
            return ITEM + more, table, source.name, expected, 0
        case types.CellType() as cell:
            return CELL + more, cell, None, expected, 0
        case weakref.ref() as receiver:
            return BELOW + more, receiver, source.name, expected, 0
    return GIVES + more, source.read, None, expected, 0


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _KINDS and tensor.layout is torch.strided and not tensor.is_nested


def _all_of(node: ast.expr, scope: Scope) -> Iterator[Fact]:
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            for one in values:
                yield from _all_of(one, scope)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call(func=ast.Name("any"), args=[ast.Name(name)])):
            yield from ((SIZE, one, None, None, 0) for one in scope[name])
        case ast.Call(func=ast.Name(name), args=[]):
            yield GIVES, scope[name], None, True, 0
        case ast.Call(func=ast.Name("has"), args=[ast.Name(own), ast.Name(wanted)]):
            yield (ITEMS, scope[own], *scope[wanted], 0)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield _compared(left, op, right, scope)
        case _:
            raise _OtherForm


def _compared(left: ast.expr, op: ast.cmpop, right: ast.expr, scope: Scope) -> Fact:
    match left, op, right:
        case ast.Constant(key), ast.NotIn(), ast.Name(name) if isinstance(scope[name], dict):
            return ABSENT, scope[name], key, None, 0
        case ast.Call(func=ast.Name("len"), args=[ast.Name(name)]), ast.Eq(), ast.Constant(int(size)):
            return SIZE, scope[name], None, None, size
        case _, ast.IsNot(), ast.Constant(None):
            return (BELOW_ANY, *_below(left, scope), None, 0)
        case ast.Call(
            func=ast.Attribute(value=ast.Subscript(value=ast.Name("t"), slice=ast.Constant(position)), attr="data_ptr")
        ), ast.Eq(), ast.Name(name):
            return ARGUMENT, None, position, None, scope[name]
        case _, ast.Is(), ast.Name(name):
            return _same(left, scope[name], scope)
        case _, ast.Is(), ast.Constant(value):
            return _same(left, value, scope)
    raise _OtherForm


def _same(left: ast.expr, expected: Any, scope: Scope) -> Fact:
    match left:
        case ast.Subscript(value=ast.Name(name), slice=ast.Constant(key)):
            return ITEM, scope[name], key, expected, 0
        case ast.Subscript(value=ast.Name(name), slice=ast.Name(key)):
            return ITEM, scope[name], scope[key], expected, 0
        case ast.Attribute(value=ast.Name(name), attr=attribute):
            return ATTRIBUTE, scope[name], attribute, expected, 0
        case ast.Call(func=ast.Name(name), args=[]):
            return GIVES, scope[name], None, expected, 0
    holder, key = _below(left, scope)
    return BELOW, holder, key, expected, 0


def _below(left: ast.expr, scope: Scope) -> tuple[Any, Any]:
    """A weak reference, and what is looked up in the ``__dict__`` of what it refers to."""
    match left:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Attribute(value=ast.Call(func=ast.Name(name), args=[]), attr="__dict__"), attr="get"
            ),
            args=[ast.Constant(key), *_],
        ):
            return scope[name], key
    raise _OtherForm
