"""The parameters of a captured graph's nodes, through the driver API of ``cuda-bindings``: read, and set anew.

A CUDA graph holds the addresses it was captured with. Where a tensor moves, the node's parameters are written again in
the executable graph, which costs 1 to 2 us a kernel; capturing again costs a run of the body. ``read`` gives the nodes
in the order of their capture, so that two captures of one body can be compared node by node (``address_inference``
does); ``GraphNode.editor`` gives what sets some of a node's words.

Invariant: a node whose parameters cannot be read to the last byte is ``closed`` and no graph with such a node is
patched. A parameter that was overlooked would go on pointing at the old tensor, which may be freed by then: the graph
would read and write memory of somebody else's.

Kernels are launched in two styles: an array of pointers to parameters, or one block of bytes (``extra``), which cuBLAS
uses for Hopper. Both become one block of bytes here, in which by-value structures and tensor maps show their addresses
as plain 8-byte words.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from capture.core.data import define
from capture.engines.cuda.address_inference import NodeParameters

_NAMES = (
    "cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphKernelNodeGetParams", "cuGraphExecKernelNodeSetParams",
    "cuGraphMemcpyNodeGetParams", "cuGraphExecMemcpyNodeSetParams", "cuGraphMemsetNodeGetParams",
    "cuGraphExecMemsetNodeSetParams", "cuGraphChildGraphNodeGetGraph", "cuFuncGetParamInfo", "cuKernelGetParamInfo",
    "cuFuncGetName", "cuKernelGetName", "cuCtxGetCurrent",
)  # fmt: skip
_HARMLESS = ("EMPTY", "EVENT_RECORD", "WAIT_EVENT")  # they touch no memory
_BUFFER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE
_WORD = 8


class DriverError(RuntimeError):
    """A call of the driver did not succeed."""


@functools.cache
def missing() -> str | None:
    """What keeps this process from reading and setting parameters; None if nothing does."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return "the package cuda-bindings is not installed"
    absent = [name for name in _NAMES if not hasattr(driver, name)]
    if absent:
        return f"the installed cuda-bindings lacks {absent[0]}"
    for name in ("raw_cuda_graph", "raw_cuda_graph_exec"):
        if not hasattr(torch.cuda.CUDAGraph, name):
            return f"this torch lacks CUDAGraph.{name}"
    return None


@functools.cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a call that succeeded."""
    if int(answer[0]):
        raise DriverError(str(answer[0]))
    return answer[1] if len(answer) == 2 else answer[1:]


class ParameterWriter(Protocol):
    """Sets some words of one node's parameters."""

    def set(self, executable: Any, values: Sequence[int]) -> bool:
        """Launches from now on have these words; those under way do not. False if the driver refuses."""


class BytesWriter(Protocol):
    """Sets some bytes of one node's parameters."""

    def set(self, executable: Any, values: Sequence[bytes]) -> bool:
        """As ``ParameterWriter.set``."""


@define(eq=False)
class GraphNode:
    """One node: its parameters, and what is needed to set them."""

    handle: Any
    words: NodeParameters
    name: Callable[[], str]
    _editor: Callable[[Sequence[int]], ParameterWriter] | None = None
    _block: Callable[[], _KernelBlock] | None = None

    def editor(self, indices: Sequence[int]) -> ParameterWriter:
        """A writer for the words with these indices."""
        if self._editor is None:
            raise DriverError(f"{self.name()} has no parameters")
        return self._editor(indices)

    def bytes_editor(self, offsets: Sequence[int]) -> BytesWriter:
        """A writer for the values that begin at these bytes of a kernel's block. What other editors of this node set
        stays."""
        if self._block is None:
            raise DriverError(f"{self.name()} has no block of parameters")
        return _BytesEditor(self._block(), offsets)


def executable_of(graph: torch.cuda.CUDAGraph) -> Any:
    """The driver's handle of an instantiated graph."""
    return _driver().CUgraphExec(int(graph.raw_cuda_graph_exec()))


def read(graph: torch.cuda.CUDAGraph) -> list[GraphNode]:
    """All nodes in the order of their capture, those of graphs inside it in the place of theirs."""
    driver = _driver()
    return list(_nodes(driver, driver.CUgraph(int(graph.raw_cuda_graph())), {}))


def read_captured(graph: torch.cuda.CUDAGraph, added: frozenset[int] = frozenset()) -> list[GraphNode]:
    """As ``read``, without the nodes that the capture did not make: ``added`` has their handles."""
    return [one for one in read(graph) if not added or int(one.handle) not in added]


def _nodes(driver: Any, graph: Any, layouts: dict[int, list[tuple[int, int]]]) -> Iterator[GraphNode]:
    _, count = _checked(driver.cuGraphGetNodes(graph, 0))
    handles, count = _checked(driver.cuGraphGetNodes(graph, count)) if count else ([], 0)
    kinds = driver.CUgraphNodeType
    for handle in handles[:count]:
        kind = _checked(driver.cuGraphNodeGetType(handle))
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            yield _kernel(driver, handle, layouts)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            yield _memcpy(driver, handle)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            yield _memset(driver, handle)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from _nodes(driver, _checked(driver.cuGraphChildGraphNodeGetGraph(handle)), layouts)
        else:
            yield _other(handle, kind.name.removeprefix("CU_GRAPH_NODE_TYPE_"))


def _other(handle: Any, name: str) -> GraphNode:
    closed = None if name in _HARMLESS else f"a node of the kind {name} may hold addresses"
    return GraphNode(handle, NodeParameters("other", (name,), (), closed=closed), lambda: name)


# ---- kernels


def _kernel(driver: Any, handle: Any, layouts: dict[int, list[tuple[int, int]]]) -> GraphNode:
    params = _checked(driver.cuGraphKernelNodeGetParams(handle))
    function, kernel = int(params.func), int(params.kern)
    if params.kernelParams:
        layout = layouts.get(function or kernel)
        if layout is None:
            layout = layouts[function or kernel] = _layout(driver, params, function)
        block = _from_pointers(int(params.kernelParams), layout)
    else:
        layout, block = [], _from_extra(int(params.extra)) if params.extra else b""
    shape = (
        params.gridDimX, params.gridDimY, params.gridDimZ, params.blockDimX, params.blockDimY, params.blockDimZ,
        params.sharedMemBytes,
    )  # fmt: skip
    parameters = NodeParameters(
        "kernel", (function, kernel, *shape, tuple(layout), len(block)), _words(block), filled=not layout
    )
    shared = functools.cache(functools.partial(_KernelBlock, driver, handle, layout, block))
    return GraphNode(
        handle, parameters, functools.partial(_kernel_name, driver, handle),
        lambda indices: _KernelEditor(shared(), indices), shared,
    )  # fmt: skip


def _layout(driver: Any, params: Any, function: int) -> list[tuple[int, int]]:
    """Offset and size of each parameter."""
    parameters: list[tuple[int, int]] = []
    while True:
        index = len(parameters)
        answer = (
            driver.cuFuncGetParamInfo(params.func, index)
            if function
            else driver.cuKernelGetParamInfo(params.kern, index)
        )
        if int(answer[0]):
            return parameters
        parameters.append((int(answer[1]), int(answer[2])))


def _from_pointers(address: int, layout: list[tuple[int, int]]) -> bytes:
    if not layout:
        return b""
    pointers = (ctypes.c_void_p * len(layout)).from_address(address)
    block = bytearray(max(offset + size for offset, size in layout))
    for pointer, (offset, size) in zip(pointers, layout, strict=True):
        block[offset : offset + size] = ctypes.string_at(pointer, size)
    return bytes(block)


def _from_extra(address: int) -> bytes:
    buffer = size = 0
    position = 0
    while True:
        tag, value = (ctypes.c_void_p * 2).from_address(address + position)
        if tag == _BUFFER:
            buffer = value or 0
        elif tag == _SIZE:
            size = ctypes.c_size_t.from_address(value or 0).value
        else:
            return ctypes.string_at(buffer, size) if buffer else b""
        position += 16


def _words(block: bytes) -> tuple[int, ...]:
    padded = block + bytes(-len(block) % _WORD)
    return struct.unpack(f"<{len(padded) // _WORD}Q", padded)


class _KernelBlock:
    """The block of parameters of one node, as the executable graph is to have it. Addresses and numbers are set in the
    same block, as the driver takes all of it at once. Made once a node, as reading its parameters takes 20 us."""

    def __init__(self, driver: Any, handle: Any, layout: list[tuple[int, int]], block: bytes) -> None:
        self._call, self._handle = driver.cuGraphExecKernelNodeSetParams, handle
        self._params = params = _checked(driver.cuGraphKernelNodeGetParams(handle))
        self._buffer = buffer = ctypes.create_string_buffer(block, len(block))
        begin = ctypes.addressof(buffer)
        if layout:
            pointers = (ctypes.c_void_p * len(layout))(*[begin + offset for offset, _ in layout])
            params.kernelParams = ctypes.addressof(pointers)
            self._alive: tuple[Any, ...] = (pointers,)
        else:
            size = ctypes.c_size_t(len(block))
            extra = (ctypes.c_void_p * 5)(_BUFFER, begin, _SIZE, ctypes.addressof(size), 0)
            params.extra = ctypes.addressof(extra)
            self._alive = (size, extra)

    def write(self, offset: int, value: bytes) -> None:
        """Nothing is launched with it before ``apply``."""
        struct.pack_into(f"{len(value)}s", self._buffer, offset, value)

    def apply(self, executable: Any) -> bool:
        """Have launches from now on use the block as it is. False if the driver refuses."""
        return not self._call(executable, self._handle, self._params)[0].value


class _KernelEditor:
    """Sets words."""

    def __init__(self, block: _KernelBlock, indices: Sequence[int]) -> None:
        self._block, self._offsets = block, [index * _WORD for index in indices]

    def set(self, executable: Any, values: Sequence[int]) -> bool:
        for offset, value in zip(self._offsets, values, strict=True):
            self._block.write(offset, struct.pack("<Q", value))
        return self._block.apply(executable)


class _BytesEditor:
    """Sets numbers, which may be shorter than a word."""

    def __init__(self, block: _KernelBlock, offsets: Sequence[int]) -> None:
        self._block, self._offsets = block, offsets

    def set(self, executable: Any, values: Sequence[bytes]) -> bool:
        for offset, value in zip(self._offsets, values, strict=True):
            self._block.write(offset, value)
        return self._block.apply(executable)


def _kernel_name(driver: Any, handle: Any) -> str:
    params = _checked(driver.cuGraphKernelNodeGetParams(handle))
    answer = driver.cuFuncGetName(params.func) if int(params.func) else driver.cuKernelGetName(params.kern)
    return "a kernel" if int(answer[0]) else answer[1].decode(errors="replace")


# ---- copies and fills


def _memcpy(driver: Any, handle: Any) -> GraphNode:
    params = _checked(driver.cuGraphMemcpyNodeGetParams(handle))
    device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    sides = (params.srcMemoryType, params.dstMemoryType)
    same = (
        *(int(side) for side in sides), params.WidthInBytes, params.Height, params.Depth,
        params.srcXInBytes, params.srcY, params.srcZ, params.srcLOD, params.srcPitch, params.srcHeight,
        params.dstXInBytes, params.dstY, params.dstZ, params.dstLOD, params.dstPitch, params.dstHeight,
    )  # fmt: skip
    if any(side != device for side in sides):
        closed = "a copy from or to the host may hold addresses"
        return GraphNode(handle, NodeParameters("memcpy", same, (), closed=closed), lambda: "memcpy")
    words = (int(params.srcDevice), int(params.dstDevice))
    context = _checked(driver.cuCtxGetCurrent())
    return GraphNode(
        handle, NodeParameters("memcpy", same, words, filled=True), lambda: "memcpy",
        functools.partial(_CopyEditor, driver, handle, context),
    )  # fmt: skip


class _CopyEditor:
    def __init__(self, driver: Any, handle: Any, context: Any, indices: Sequence[int]) -> None:
        self._call, self._handle, self._context = driver.cuGraphExecMemcpyNodeSetParams, handle, context
        self._params = _checked(driver.cuGraphMemcpyNodeGetParams(handle))
        self._names = [("srcDevice", "dstDevice")[index] for index in indices]

    def set(self, executable: Any, values: Sequence[int]) -> bool:
        for name, value in zip(self._names, values, strict=True):
            setattr(self._params, name, value)
        return not self._call(executable, self._handle, self._params, self._context)[0].value


def _memset(driver: Any, handle: Any) -> GraphNode:
    params = _checked(driver.cuGraphMemsetNodeGetParams(handle))
    same = (params.elementSize, params.value, params.width, params.height, params.pitch)
    context = _checked(driver.cuCtxGetCurrent())
    return GraphNode(
        handle, NodeParameters("memset", same, (int(params.dst),), filled=True), lambda: "memset",
        functools.partial(_FillEditor, driver, handle, context),
    )  # fmt: skip


class _FillEditor:
    def __init__(self, driver: Any, handle: Any, context: Any, indices: Sequence[int]) -> None:
        del indices  # there is one
        self._call, self._handle, self._context = driver.cuGraphExecMemsetNodeSetParams, handle, context
        self._params = _checked(driver.cuGraphMemsetNodeGetParams(handle))

    def set(self, executable: Any, values: Sequence[int]) -> bool:
        (self._params.dst,) = values
        return not self._call(executable, self._handle, self._params, self._context)[0].value
