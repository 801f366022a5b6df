"""Edges of a captured graph, asked of the driver and set anew before the graph is instantiated.

The driver's C interface is called directly. ``cuda-bindings`` before 13.3 gives freed memory for the data of edges, and
some drivers (13.0) take the first edge's data for all edges of a call: so each edge is set in a call of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from capture.core.data import frozen
from capture.engines.cuda.driver import driver_function
from capture.engines.cuda.kernel_params import DriverError
from capture.schedule.dependencies import Span

PLAIN = bytes(8)
"""The data of an edge whose second node waits until the first one has ended."""
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_RANGE_BEGIN, _RANGE_SIZE, _MEMORY_TYPE = 11, 12, 2  # CU_POINTER_ATTRIBUTE_*
_NAMES = (
    "cuGraphGetNodes", "cuGraphGetEdges_v2", "cuGraphAddDependencies_v2", "cuGraphRemoveDependencies_v2",
    "cuGraphKernelNodeGetAttribute", "cuPointerGetAttribute", "cuGraphUpload",
    "cuGraphInstantiateWithFlags", "cuGraphExecDestroy",
)  # fmt: skip
_EVERYTHING = (0, 1 << 64)


@frozen
class GraphEdge:
    """Handles of two nodes, and the edge's data as the driver has it (8 bytes)."""

    first: int
    then: int
    data: bytes = PLAIN


def missing() -> str | None:
    """What keeps this process from setting edges; None if nothing does."""
    absent = next((name for name in _NAMES if driver_function(name) is None), None)
    return None if absent is None else f"the driver lacks {absent}"


def _function(name: str) -> Callable[..., int]:
    found = driver_function(name)
    if found is None:
        raise DriverError(f"the driver lacks {name}")
    return found


def _check(name: str, error: int) -> None:
    if error:
        raise DriverError(f"{name} fails (error {error})")


def nodes_of(graph: int) -> list[int]:
    """Handles of a graph's own nodes, those of a capture in the order in which it added them."""
    call, count = _function("cuGraphGetNodes"), ctypes.c_size_t()
    _check("cuGraphGetNodes", call(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    if not count.value:
        return []
    nodes = (ctypes.c_void_p * count.value)()
    _check("cuGraphGetNodes", call(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    return [node or 0 for node in nodes]


def edges_of(graph: int) -> list[GraphEdge]:
    """All edges of a graph."""
    call, count = _function("cuGraphGetEdges_v2"), ctypes.c_size_t()
    _check("cuGraphGetEdges", call(ctypes.c_void_p(graph), None, None, None, ctypes.byref(count)))
    size = count.value
    if not size:
        return []
    first, then, data = (ctypes.c_void_p * size)(), (ctypes.c_void_p * size)(), (ctypes.c_char * (8 * size))()
    _check("cuGraphGetEdges", call(ctypes.c_void_p(graph), first, then, data, ctypes.byref(count)))
    raw = bytes(data)
    return [GraphEdge(first[at] or 0, then[at] or 0, raw[8 * at : 8 * at + 8]) for at in range(size)]


def set_edges(graph: int, edges: Sequence[GraphEdge]) -> None:
    """Give a graph these edges and no others. Raises ``DriverError``: it may have any of them then."""
    for one in edges_of(graph):
        _change("cuGraphRemoveDependencies_v2", graph, one)
    for one in edges:
        _change("cuGraphAddDependencies_v2", graph, one)


def _change(name: str, graph: int, edge: GraphEdge) -> None:
    first, then = ctypes.c_void_p(edge.first), ctypes.c_void_p(edge.then)
    data = ctypes.create_string_buffer(edge.data, 8)
    one = ctypes.c_size_t(1)
    _check(name, _function(name)(ctypes.c_void_p(graph), ctypes.byref(first), ctypes.byref(then), data, one))


def check(graph: int) -> None:
    """Raises ``DriverError`` where the graph cannot be instantiated. Asked beforehand: torch destroys the graph that it
    has before it makes another one."""
    made = ctypes.c_void_p()
    call = _function("cuGraphInstantiateWithFlags")
    _check("cuGraphInstantiate", call(ctypes.byref(made), ctypes.c_void_p(graph), ctypes.c_ulonglong(0)))
    _check("cuGraphExecDestroy", _function("cuGraphExecDestroy")(made))


def is_cooperative(node: int) -> bool:
    """Whether it is a kernel whose blocks wait for each other, or one about which the driver says nothing."""
    value = (ctypes.c_uint64 * 8)()  # CUlaunchAttributeValue
    failed = _function("cuGraphKernelNodeGetAttribute")(ctypes.c_void_p(node), ctypes.c_int(_COOPERATIVE), value)
    return bool(failed) or bool(value[0] & 0xFFFFFFFF)


def block_of(address: int) -> Span | None:
    """What was allocated around an address, as far as the driver tells; None if it is no address that it knows."""
    call = _function("cuPointerGetAttribute")
    kind, begin, size = ctypes.c_uint(), ctypes.c_uint64(), ctypes.c_size_t()
    at = ctypes.c_uint64(address)
    if call(ctypes.byref(kind), ctypes.c_int(_MEMORY_TYPE), at):
        return None
    failed = call(ctypes.byref(begin), ctypes.c_int(_RANGE_BEGIN), at)
    failed = failed or call(ctypes.byref(size), ctypes.c_int(_RANGE_SIZE), at)
    return _EVERYTHING if failed or not size.value else (begin.value, begin.value + size.value)


def upload(executable: int, stream: int) -> None:
    """Bring an instantiated graph to the device before parameters of it are set: set before the first launch, they make
    every later one 10 % slower from about 128 nodes on (H100, driver 580). Where that fails nothing is lost."""
    call = driver_function("cuGraphUpload")
    if call is not None and executable:
        call(ctypes.c_void_p(executable), ctypes.c_void_p(stream))
