"""Graphs captured by hand: what an expert writes, and what ``capture`` is measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from benchmarks.gpu.setting import Setting

Body = Callable[[], Tensor]


@frozen
class Hand:
    """``replay()`` writes the body's result to ``output``. The tensors that the ``body`` uses live as long as this."""

    replay: Callable[[], object]
    output: Tensor
    body: Body


class Hands:
    """Captures bodies on one stream into one shared pool. On the CPU a replay runs the body."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.stream: Any = torch.cuda.Stream() if setting.on_gpu else None
        self.pool: Any = torch.cuda.graph_pool_handle() if setting.on_gpu else None

    def warm(self, body: Body, runs: int = 2) -> None:
        """Run the body on the capture stream, so that libraries have their workspaces there."""
        if self.stream is None:
            body()
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(runs):
                body()
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, body: Body, *, warmups: int = 2) -> Hand:
        """Capture a body that reads and writes tensors which stay where they are."""
        if warmups:
            self.warm(body, warmups)
        if self.stream is None:
            output = body()
            return Hand(lambda: output.copy_(body()), output, body)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            output = body()
        return Hand(graph.replay, output, body)

    def capture_bare(self, body: Body) -> object:
        """A capture with the least work: begin, run, end, instantiate. Gives the objects that keep it alive."""
        if self.stream is None:
            return body()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                output = body()
            finally:
                graph.capture_end()
        graph.instantiate()
        return graph, output


def compiled(body: Callable[..., Tensor], setting: Setting) -> Callable[..., Tensor]:
    """``torch.compile(mode="reduce-overhead")``; on the CPU the body itself."""
    if not setting.on_gpu:
        return body
    torch.compiler.reset()
    reduced: Callable[..., Tensor] = torch.compile(body, mode="reduce-overhead")
    return reduced
