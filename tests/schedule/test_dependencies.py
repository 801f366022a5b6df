"""Edges of a schedule, tried on a simulated memory: all orders that they allow give the same values, and no edge can be
left out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.schedule.dependencies import Dependencies, Edge, Node, Span, dependencies
from tests.support.orders import some_order

BYTES = 12
SETTINGS = settings(max_examples=25, deadline=None, derandomize=True, database=None)


@st.composite
def spans(draw: st.DrawFn) -> tuple[Span, ...]:
    begins = draw(st.lists(st.integers(0, BYTES - 1), max_size=2))
    return tuple((begin, draw(st.integers(begin, min(begin + 4, BYTES)))) for begin in begins)


@st.composite
def programs(draw: st.DrawFn, *, most: int = 6, alone: bool = False) -> list[Node]:
    """A random program. ``alone``: each node is an operator of its own."""
    operator, nodes = 0, []
    for _ in range(draw(st.integers(0, most))):
        operator += 1 if alone else draw(st.integers(0, 3)) > 0
        barrier = draw(st.integers(0, 7)) == 7
        nodes.append(Node(operator, draw(spans()), draw(spans()), is_barrier=barrier))
    return nodes


def conflicts(nodes: Sequence[Node]) -> set[Edge]:
    """All pairs that have to keep their order, computed directly from the addresses that they read and write."""
    return {
        (first, then)
        for first, then in itertools.combinations(range(len(nodes)), 2)
        if nodes[first].is_barrier
        or nodes[then].is_barrier
        or nodes[first].operator == nodes[then].operator
        or touched(nodes[first].writes) & touched((*nodes[then].reads, *nodes[then].writes))
        or touched(nodes[first].reads) & touched(nodes[then].writes)
    }


def touched(found: Iterable[Span]) -> set[int]:
    return {address for begin, end in found for address in range(begin, end)}


def closure(edges: Iterable[Edge], size: int) -> set[Edge]:
    after: list[set[int]] = [set() for _ in range(size)]
    for first, then in sorted(edges, reverse=True):
        after[first] |= {then} | after[then]
    return {(first, then) for first in range(size) for then in after[first]}


def orders(size: int, edges: Iterable[Edge]) -> Iterator[list[int]]:
    """Every order that the edges allow."""
    before = [{first for first, then in edges if then == number} for number in range(size)]

    def extend(order: list[int]) -> Iterator[list[int]]:
        if len(order) == size:
            yield order
        for number in range(size):
            if number not in order and before[number] <= set(order):
                yield from extend([*order, number])

    return extend([])


def run(nodes: Sequence[Node], order: Iterable[int]) -> tuple[list[object], dict[int, object]]:
    """Memory after the nodes ran one after another, and what each one read. A node writes something that follows from
    all it read, and from what was in its place. A barrier touches everything."""
    memory: list[object] = list(range(BYTES))
    seen: dict[int, object] = {}
    for number in order:
        node = nodes[number]
        all_addresses = range(BYTES) if node.is_barrier else ()
        seen[number] = read = tuple(memory[address] for address in [*sorted(touched(node.reads)), *all_addresses])
        for address in [*sorted(touched(node.writes)), *all_addresses]:
            memory[address] = hash((number, read, memory[address]))
    return memory, seen


@given(programs())
@SETTINGS
def test_every_order_gives_the_memory_of_the_chain(nodes: list[Node]) -> None:
    chain = run(nodes, range(len(nodes)))
    found = dependencies(nodes)
    for order in itertools.islice(orders(len(nodes), found.edges), 120):
        assert run(nodes, order) == chain


@given(programs(most=20), st.randoms(use_true_random=False))
@SETTINGS
def test_long_programs_in_random_orders(nodes: list[Node], chosen: random.Random) -> None:
    chain, found = run(nodes, range(len(nodes))), dependencies(nodes)
    for _ in range(3):
        assert run(nodes, some_order(len(nodes), found.edges, chosen)) == chain


@given(programs(most=15))
@SETTINGS
def test_edges_are_the_conflicts_without_those_that_follow(nodes: list[Node]) -> None:
    wanted, found = closure(conflicts(nodes), len(nodes)), dependencies(nodes).edges
    assert closure(found, len(nodes)) == wanted
    for edge in found:
        assert edge not in closure([one for one in found if one != edge], len(nodes))


@given(programs(most=5, alone=True))
@SETTINGS
def test_a_planted_missing_edge_is_found(nodes: list[Node]) -> None:
    """Without one edge some order gives other values, so the first test would notice a schedule that lacks an edge.
    Nodes that touch no memory are left out."""
    chain, edges = run(nodes, range(len(nodes))), dependencies(nodes).edges
    shows = [node.is_barrier or bool(touched((*node.reads, *node.writes))) for node in nodes]
    for missing in edges:
        if not all(shows[number] for number in missing):
            continue
        left = closure(edges, len(nodes)) - {missing}  # edges that follow from others stay
        assert any(run(nodes, order) != chain for order in orders(len(nodes), left))


@given(programs(most=25))
@SETTINGS
def test_levels_and_the_longest_path(nodes: list[Node]) -> None:
    graph = dependencies(nodes)
    for first, then in graph.edges:
        assert graph.levels[first] < graph.levels[then]
    path = graph.path()
    assert len(path) == graph.longest
    assert all(edge in graph.edges for edge in itertools.pairwise(path))
    assert sum(graph.widths) == len(nodes)
    assert graph.width == max(graph.widths, default=0)


def test_independent_branches_run_side_by_side() -> None:
    """Eight branches of three kernels, each reading a shared input, and a sum of their results."""
    nodes = []
    for branch in range(8):
        memory = [(0, 100), *(((branch * 3 + at) * 100 + 100, (branch * 3 + at) * 100 + 200) for at in range(3))]
        nodes += [Node(branch * 3 + at, (memory[at],), (memory[at + 1],)) for at in range(3)]
    nodes.append(Node(24, tuple(nodes[branch * 3 + 2].writes[0] for branch in range(8)), ((9000, 9100),)))
    graph = dependencies(nodes)
    assert (graph.longest, graph.width, len(graph.edges)) == (4, 8, 24)


def test_memory_that_is_used_again_ties_branches() -> None:
    """The second branch writes to memory where the first one's results were: it comes after the first."""
    branch = [Node(0, ((0, 10),), ((10, 20),)), Node(1, ((10, 20),), ((20, 30),))]
    again = [evolve(node, operator=node.operator + 2) for node in branch]
    assert dependencies([*branch, *again]).longest == 4


def test_a_range_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ValueError, match="ends at 0x4, before it begins at 0x8"):
        dependencies([Node(0, ((8, 4),))])


def test_nothing_is_no_path() -> None:
    assert dependencies([]) == Dependencies((), ())
    assert (dependencies([]).longest, dependencies([]).width, dependencies([]).path()) == (0, 0, ())


def test_a_thousand_nodes() -> None:
    """Chained layers that all read the weights: the number of edges grows with the nodes, not with their square."""
    nodes = [Node(at, ((0, 64), (64 + at * 8, 72 + at * 8)), ((72 + at * 8, 80 + at * 8),)) for at in range(1000)]
    found = dependencies(nodes)
    assert found.edges == tuple((at, at + 1) for at in range(999))
