"""A captured graph and what its recorder noted -> the edges that the data asks for.

Memory counts by address: what operators were seen to read and write, and every word of a kernel's parameters that lies
in none of their tensors (``schedule.accesses``). A graph that is no plain chain, as where the body has streams of its
own, keeps the edges it has, and so does one of which anything cannot be read.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

import torch

from capture.core.data import frozen
from capture.core.schedule import Schedule
from capture.engines.cuda import graph_edges, kernel_params
from capture.engines.cuda.graph_edges import PLAIN, GraphEdge
from capture.engines.cuda.kernel_params import GraphNode
from capture.engines.cuda.memory_recorder import MemoryNotes
from capture.engines.cuda.pool import CudaPool
from capture.engines.cuda.schedule_choice import Order
from capture.schedule.accesses import Memory, accesses
from capture.schedule.dependencies import Dependencies, Span, dependencies

_WAITING = ("nccl", "nvshmem", "symm", "persist", "cooperative")
"""In names of kernels whose blocks may wait for each other, or for another device."""


@frozen(eq=False)
class GraphSchedule:
    """Two ways to run the nodes of one graph."""

    graph: int
    nodes: tuple[int, ...]
    """Handles of all of them, as the driver tells them."""
    recorded: tuple[GraphEdge, ...]
    """In the order of capture, as the graph has them."""
    by_data: tuple[GraphEdge, ...]
    dependencies: Dependencies
    names: tuple[str, ...]
    """Operators on the longest path."""

    def give_edges(self, order: Order) -> None:
        """Before the graph is instantiated. Raises ``DriverError`` where it does not come out as it should: parameters
        are found by the order of nodes later on."""
        graph_edges.set_edges(self.graph, self.by_data if order == "by data" else self.recorded)
        if tuple(graph_edges.nodes_of(self.graph)) != self.nodes:
            raise kernel_params.DriverError("the driver tells the nodes in another order")
        graph_edges.check(self.graph)

    def report(self, chosen: str, times: tuple[float, float] | None) -> Schedule:
        """The two orders in the form for reports. ``times``: milliseconds of a replay as a chain, and by data."""
        found = self.dependencies
        chain, by_data = times or (None, None)
        return Schedule(widths=found.widths, longest=self.names, chosen=chosen, chain_ms=chain, by_data_ms=by_data)


def schedule_of(
    pool: CudaPool, graph: torch.cuda.CUDAGraph, notes: MemoryNotes, added: Sequence[int] = ()
) -> GraphSchedule | str:  # fmt: skip
    """Or why there is none. ``added``: handles of nodes that the capture did not make, which come before all others."""
    reason = kernel_params.missing() or graph_edges.missing() or notes.unsuited
    if reason is not None:
        return reason
    handle = int(graph.raw_cuda_graph())
    with torch.cuda.device(pool.device):
        every = tuple(graph_edges.nodes_of(handle))
        captured_nodes = [node for node in every if node not in added]
        recorded = graph_edges.edges_of(handle)
        nodes = [node for node in kernel_params.read(graph) if int(node.handle) not in added]
        if [int(node.handle) for node in nodes] != captured_nodes:
            return "it has graphs inside"
        chain = {(edge.first, edge.then): edge.data for edge in recorded if edge.first not in added}
        if set(chain) != set(itertools.pairwise(captured_nodes)):
            return "the body has streams of its own"
        if any(operator.end > len(captured_nodes) for operator in notes.operators):
            return "its nodes are not those of its capture"
        memory = Memory(_parts_of(pool), notes.lifetimes, _block_finder())
        needed = dependencies(accesses([_words(node) for node in nodes], notes.operators, memory))
    return GraphSchedule(
        handle,
        every,
        tuple(recorded),
        tuple(_edges(captured_nodes, needed, chain, added)),
        needed,
        _names(needed, notes, nodes),
    )


def _words(node: GraphNode) -> frozenset[int] | None:
    """The words of a node's parameters; None where they may lead to unknown memory."""
    words = node.words
    if words.closed is not None or words.kind == "other" or not words.words:
        return None
    if words.kind == "kernel":
        name = node.name().lower()
        if graph_edges.is_cooperative(int(node.handle)) or any(part in name for part in _WAITING):
            return None
    return frozenset(words.words)


def _edges(
    nodes: Sequence[int], needed: Dependencies, chain: dict[tuple[int, int], bytes], added: Sequence[int]
) -> list[GraphEdge]:  # fmt: skip
    """A kernel that was launched to begin before the one before it ends keeps that, where it waits for no other."""
    waits_for: dict[int, int] = {}
    for _, then in needed.edges:
        waits_for[then] = waits_for.get(then, 0) + 1
    edges = []
    for first, then in needed.edges:
        pair = nodes[first], nodes[then]
        edges.append(GraphEdge(*pair, chain.get(pair, PLAIN) if waits_for[then] == 1 else PLAIN))
    roots = [node for at, node in enumerate(nodes) if at not in waits_for]
    return [*(GraphEdge(copy, root) for copy in added for root in roots), *edges]


def _parts_of(pool: CudaPool) -> list[Span]:
    pool.find(0)  # look at the memory once
    return pool.parts()


def _block_finder() -> Callable[[int], Span | None]:
    """Blocks that torch's allocator handed out, else what the driver tells. A block that a graph uses is not freed."""
    blocks: list[Span] = []
    for segment in torch.cuda.memory_snapshot():
        begin = segment["address"]
        for block in segment["blocks"]:
            blocks.append((begin, begin + block["size"]))
            begin += block["size"]
    blocks.sort()
    begins = [begin for begin, _ in blocks]
    spans: dict[int, Span | None] = {}

    def find(address: int) -> Span | None:
        if address not in spans:
            at = bisect.bisect_right(begins, address) - 1
            is_inside = at >= 0 and address < blocks[at][1]
            spans[address] = blocks[at] if is_inside else graph_edges.block_of(address)
        return spans[address]

    return find


def _names(found: Dependencies, notes: MemoryNotes, nodes: Sequence[GraphNode]) -> tuple[str, ...]:
    named: dict[int, str] = {}
    for one in notes.operators:
        named.update(dict.fromkeys(range(one.first, one.end), one.name))
    return tuple(named.get(at) or nodes[at].name() for at in found.path())
