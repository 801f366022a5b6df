"""Recordings that use a process group are gone before the group is.

A graph that holds a collective refers to the group's communicator, which cannot end before it.
"""

from __future__ import annotations

import functools

import torch

from capture.core.alive import Alive
from capture.core.facts import Facts
from capture.torch_private.distributed import before_shutdown
from capture.tree.node import Node

_users: Alive[Node] = Alive()
_num_worlds = 0


def num_worlds() -> int:
    """How many default groups ended so far: what was said in one of them is nothing to the next."""
    return _num_worlds


def note_user(node: Node, facts: Facts) -> None:
    """A recording that communicates ends with the first of its groups."""
    node.groups = frozenset([collective.group for collective in facts.collectives])
    if node.groups:
        watch_group_ends()
        _users.add(node)


@functools.cache
def watch_group_ends() -> bool:
    """Notice the end of a process group from now on. False where torch does not let it."""
    return before_shutdown(_ended)


def _ended(group: str) -> None:
    global _num_worlds
    world = torch.distributed.group.WORLD
    _num_worlds += world is not None and world.group_name == group
    for node in _users.all():
        if group in node.groups or "" in node.groups:  # torch did not tell which
            _users.discard(node)
            node.drop()
            for entry in node.function.entries():
                if node in entry.nodes:
                    entry.nodes.remove(node)
