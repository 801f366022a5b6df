"""Two branches of one tree share their pool: it has the size of the larger branch, not the sum."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.timing import Effort, Figure
from capture import capture, mark_step_begin, recordings

ROWS, BIG_B, BIG_C = 64, 4096, 6144
Branch = Callable[[Tensor], Tensor]


def measure(effort: Effort) -> Iterator[Figure]:
    """The pool of A then B or A then C, over the larger pool of the two alone. Bytes are exact, so one round is
    enough."""
    pools = {wanted: _pool_bytes(wanted) for wanted in ("b", "c", "bc")}
    largest = max(pools["b"], pools["c"])
    yield Figure(
        name="pool of two branches", unit="/ larger branch", values=(pools["bc"] / largest,), bar=1.05,
        detail=", ".join(f"{name} {nbytes / 1e6:.2f} MB" for name, nbytes in pools.items()),
    )  # fmt: skip


def _pool_bytes(wanted: str) -> int:
    """Bytes of the pool after these branches were recorded and replayed, in a new thread, which has its own tree."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(_run(wanted)))
    thread.start()
    thread.join()
    (nbytes,) = found
    return nbytes


def _run(wanted: str) -> int:
    torch.manual_seed(0)

    @capture
    def a(x: Tensor) -> Tensor:
        return x + 1.0

    @capture
    def b(x: Tensor) -> Tensor:
        wide = x.repeat(1, BIG_B // ROWS)
        return (wide.sin() * wide.cos()).sum(1)

    @capture
    def c(x: Tensor) -> Tensor:
        wide = x.repeat(1, BIG_C // ROWS)
        return (wide.tanh() + wide.exp()).mean(1)

    branches: dict[str, Branch] = {"b": b, "c": c}
    x = torch.randn(ROWS, ROWS)
    with torch.no_grad():
        for _ in range(4):
            for name in wanted:
                mark_step_begin()
                middle = a(x)
                branches[name](middle)
                del middle
    for name in wanted:
        assert recordings(branches[name]).recordings == 1, recordings(branches[name])
    return recordings(a).pool_bytes
