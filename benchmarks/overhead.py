"""What a call costs beside its operators, and that it does not grow with the number of recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Effort, Figure, Side, alternate
from capture import capture, recordings
from capture.api.decorator import captured_states

FEW, MANY = 10, 500


def measure(effort: Effort, *, many: int = MANY) -> Iterator[Figure]:
    """Time calls with one tensor argument and one operator. Each shape has a recording; both sides call the same ten
    shapes."""
    shapes = [number * many // FEW for number in range(1, FEW + 1)]
    few_recordings, many_recordings = _recorded(shapes), _recorded(range(1, many + 1))
    inputs = [torch.ones(size) for size in shapes]
    replays = _replays(few_recordings, inputs)

    def call(function: Callable[[Tensor], Tensor]) -> Side:
        def side() -> None:
            for x in inputs:
                function(x)

        return side

    def operators() -> None:
        for replay, leaves in replays:
            replay(leaves)

    with torch.no_grad():
        rounds = alternate([call(few_recordings), operators, call(many_recordings)], effort)
    outside = tuple((few - alone) / FEW for few, alone, _ in rounds)
    few_us, alone_us, many_us = (min(times) / FEW for times in zip(*rounds, strict=True))
    yield Figure(
        name=f"outside the operators, 1 tensor, {FEW} recordings", unit="us a call", values=outside, bar=6.0,
        detail=f"call {few_us:.1f} us, operators {alone_us:.1f} us",
    )  # fmt: skip
    yield Figure(
        name=f"a call with {many} recordings", unit=f"/ with {FEW} recordings", bar=1.10,
        values=tuple(several / few for few, _, several in rounds),
        detail=f"{many_us:.1f} us against {few_us:.1f} us",
    )  # fmt: skip


def _recorded(sizes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """A function with a recording for each size."""

    @capture(max_recordings=len(sizes))
    def double(x: Tensor) -> Tensor:
        return x * 2.0

    with torch.no_grad():
        for size in sizes:
            for _ in range(2):
                double(torch.ones(size))
    assert recordings(double).recordings == len(sizes)
    return double


def _replays(
    function: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]
) -> list[tuple[Callable[[Any], None], list[Tensor]]]:
    """The engine's bare replay for each input."""
    (captured,) = captured_states(function)
    replays = []
    for entry, x in zip(captured.entries(), inputs, strict=True):
        (node,) = entry.nodes
        assert node.recording is not None
        replays.append((node.recording.replay, [x]))
    return replays
