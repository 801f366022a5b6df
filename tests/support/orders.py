"""Random orders of nodes that dependencies allow."""

from __future__ import annotations

import random
from collections.abc import Iterable


def some_order(size: int, edges: Iterable[tuple[int, int]], chosen: random.Random) -> list[int]:
    """A random order of ``size`` nodes. ``edges``: pairs of a node and one that has to come after it."""
    before: list[set[int]] = [set() for _ in range(size)]
    for first, then in edges:
        before[then].add(first)
    left, order = set(range(size)), list[int]()
    while left:
        node = chosen.choice([node for node in sorted(left) if not before[node] & left])
        left.remove(node)
        order.append(node)
    return order
