"""One capture from begin to end, and the way back from one that failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from capture.core.interrupts import guarded, let_through
from capture.engines.cuda.driver import node_counter
from capture.engines.cuda.pool import CudaPool
from capture.engines.cuda.streams import in_order
from capture.torch_private import capabilities, cuda
from capture.torch_private.warned import warned

T = TypeVar("T")


def _nothing() -> None:
    """A graph without nodes: the body only made views."""


class RefusedError(BaseException):
    """Raised through the body to stop a capture before torch or the driver would break it.

    No ``Exception``: a body that catches those must not go on with a capture that is given up.
    """


def unbroken(pool: CudaPool, run: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    """What ``run`` gives, which captures into this pool. Whatever stops it, such as a signal between two lines of this
    file, no capture goes on after it, nothing is taken for one, and the caller's stream is the current one."""
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream(pool.device)

    def mend(_: list[BaseException]) -> None:
        pool.stop_capture()
        pool.abandon()
        torch.cuda.set_stream(stream)  # which makes its device the current one
        torch.cuda.set_device(device)

    return guarded(run, arguments, mend)


class Capture:
    """One ``torch.cuda.CUDAGraph`` on the pool's stream.

    ``error``: why the capture itself could not be ended, where the body did not raise. The mode is relaxed: libraries
    may initialise themselves in the middle of the body, and graphs, events and tensors may be collected meanwhile.
    """

    def __init__(self, pool: CudaPool, generators: Sequence[torch.Generator]) -> None:
        self._pool = pool
        self._generators = list({capabilities.generator_id(generator): generator for generator in generators}.values())
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph(keep_graph=True)
        self.error: str | None = None
        self.is_empty = False
        self._is_open = False
        self._caller: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Everything launched inside the block becomes the graph. What the block raises comes out unchanged."""
        pool = self._pool
        before = torch.cuda.current_stream(pool.device)
        self._caller = before
        pool.keep_workspaces()
        with torch.cuda.device(pool.device), torch.cuda.stream(pool.stream):
            assert self._graph is not None
            for generator in self._generators:
                self._graph.register_generator_state(generator)
            pool.stream.wait_stream(before)
            pool.begin_capture()
            try:
                self._begin()
                try:
                    yield
                finally:
                    self._end()
            finally:
                pool.stop_capture()  # what ended the body may have come while a graph was ended before an island
        before.wait_stream(pool.stream)

    def pause(self) -> None:
        """End the graph so far, and make it ready: ``graph`` and ``launcher`` are its own until ``resume``."""
        self._end()
        self._pool.end_capture()
        if self.error is not None:
            raise RefusedError(self.error)
        self.instantiate()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """While it is paused: what runs inside the block runs where the caller's own code does."""
        caller, own = self._caller, self._pool.stream
        assert caller is not None
        caller.wait_stream(own)
        try:
            with torch.cuda.stream(caller):
                yield
        finally:
            own.wait_stream(caller)

    def resume(self) -> None:
        """Begin another graph in the same pool, on the same stream."""
        self._graph, self.is_empty = torch.cuda.CUDAGraph(keep_graph=True), False
        for generator in self._generators:
            self._graph.register_generator_state(generator)
        self._pool.begin_capture()
        try:
            self._begin()
        except RuntimeError as error:  # the body is not to catch it
            let_through(error)
            self.error = str(error).partition("\n")[0]
            raise RefusedError(self.error) from error

    def generators(self) -> list[torch.Generator]:
        """All that torch may hand seeds from: those that were named, and the device's own."""
        return [torch.cuda.default_generators[self._pool.index], *self._generators]

    def launcher(self) -> Callable[[], None]:
        """What launches the graph on the current stream."""
        return _nothing if self.is_empty or self._graph is None else cuda.graph_launcher(self._graph)

    def handle(self) -> int | None:
        """Handle of the graph itself, to add to before it is instantiated; None where there is none, or torch does not
        tell."""
        if self.is_empty or self._graph is None:
            return None
        tell = getattr(self._graph, "raw_cuda_graph", None)
        return None if tell is None or not hasattr(self._graph, "raw_cuda_graph_exec") else int(tell())

    def executable(self) -> int | None:
        """Handle of the instantiated graph, 0 for one without nodes; None where torch does not tell."""
        if self.is_empty or self._graph is None:
            return 0
        tell = getattr(self._graph, "raw_cuda_graph_exec", None)
        return None if tell is None else int(tell())

    def graph(self) -> torch.cuda.CUDAGraph | None:
        """The graph itself, if it has nodes."""
        return None if self.is_empty else self._graph

    def instantiate(self) -> None:
        """Make the graph ready to launch."""
        if not self.is_empty and self._graph is not None:
            self._graph.instantiate()

    def drop(self) -> None:
        """Destroy the graph, if nobody else holds it. No ``reset``: torch would release the pool twice (2.11)."""
        self._graph = None

    def _begin(self) -> None:
        assert self._graph is not None
        self._pool.captured = self._graph, self._generators
        try:
            in_order(self._pool.device, self._graph.capture_begin, self._pool.id, "relaxed")
            self._is_open = True
        except RuntimeError:
            self._pool.stop_capture()
            raise

    def _end(self) -> None:
        if not self._is_open:  # it stopped between two graphs
            return
        self._is_open = False
        try:
            assert self._graph is not None
            count = node_counter(self._pool.stream)
            nodes = -1 if count is None else count()
            _, objected = warned(torch.cuda.CUDAGraph.capture_end, self._graph)  # torch says where it is empty
            self.is_empty = objected if nodes < 0 else nodes == 0
        except RuntimeError as error:
            let_through(error)
            self.error = str(error).partition("\n")[0]
            return self._pool.stop_capture()
        self._pool.captured = None
