"""Kinds of Python state that a body reads, and what may happen to each: the rows of the table of cells.

A kind is a piece of source. It defines ``state``, which whoever runs the body keeps, ``read(state)``, which gives a
number, and the changes, by name of what happens: each is source, too, and runs in the same namespace.
"""

from __future__ import annotations

from attrs import frozen

REPLACED, IN_PLACE, DELETED, ADDED = "replaced", "changed in place", "deleted", "added"
HEAD = """
import abc, array, collections, contextvars, copy, dataclasses, enum, functools, itertools, operator, sys, threading
import types, typing, weakref
import torch
from torch import nn

class Box:
    def __init__(self, **kept):
        self.__dict__.update(kept)

def reads(state):
    return read(state)
"""


@frozen
class Kind:
    """One row of the table."""

    name: str
    source: str
    changes: dict[str, str]


def kind(name: str, source: str, **changes: str) -> Kind:
    """A row. ``changes``: ``replaced``, ``in_place``, ``deleted``, ``added``."""
    names = {"replaced": REPLACED, "in_place": IN_PLACE, "deleted": DELETED, "added": ADDED}
    return Kind(name, source, {names[key]: text for key, text in changes.items()})


def reads(expression: str) -> str:
    """A function that multiplies its argument by what the kind reads."""
    return f"\ndef read(state):\n    return {expression}\n"
