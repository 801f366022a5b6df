"""Two processes of one process group for a test, which are started together and killed after a time.

Under gloo on the CPU, or under NCCL with a GPU for each.
"""

from __future__ import annotations

import gc
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from capture import CaptureWarning, config


def _run(work: Callable[..., Any], rank: int, path: str, results: Any, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device(device, rank))
    warnings.simplefilter("ignore", FutureWarning)  # torch's warnings about its own names
    os.environ["STORE"] = f"{path}/store"
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{path}/store", rank=rank, world_size=2)
    try:
        with config.patch(cache=False):
            value = work(rank)
        gc.collect()  # objects with a pending collective keep threads, which abort the process at exit
        if dist.is_initialized():
            dist.destroy_process_group()
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def two_ranks(
    work: Callable[..., Any], path: Path, *, seconds: float = 60, may_die: tuple[int, ...] = (), device: str = "cpu"
) -> list[Any]:
    """The results of ``work(rank)`` in two processes, whose tensors are on ``device``; None for one of ``may_die`` that
    died.

    Raises ``AssertionError`` where one raised, died, or was not done in time; both are killed in the end.
    """
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    started = [context.Process(target=_run, args=(work, rank, str(path), results, device)) for rank in range(2)]
    for process in started:
        process.start()
    try:
        for process in started:
            process.join(seconds)
        late = [rank for rank, process in enumerate(started) if process.is_alive()]
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
                process.join()
    values: list[Any] = [None, None]
    while not results.empty():
        rank, value, error = results.get()
        assert error is None, f"rank {rank}\n{error}"
        values[rank] = value
    assert not late, f"ranks {late} hang"
    assert all(process.exitcode == 0 for rank, process in enumerate(started) if rank not in may_die)
    return values


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    """Texts of this library's warnings."""
    return [str(one.message) for one in caught if issubclass(one.category, CaptureWarning)]
