"""Two processes under gloo: what is not recorded yet is right, and named."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from capture import CaptureWarning, capture, config, recordings


def _work(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    functional: Any = torch.ops._c10d_functional
    group = dist.distributed_c10d._get_default_group().group_name

    @capture
    def summed(x: Tensor) -> Tensor:
        y: Tensor = functional.wait_tensor(functional.all_reduce(x * 1.0, "sum", group)) * 1.0
        return y

    @capture
    def in_place(x: Tensor) -> Tensor:
        y = x * 1.0
        dist.all_reduce(y)
        return y * 1.0

    with config.patch(cache=False), torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        for function in (summed, in_place):
            for number in range(6):
                if rank == 1:
                    time.sleep(0.02)  # the other rank's result is not there when its call returns
                x = torch.full((100_000,), float(number + 1))
                assert torch.equal(function(x), x * 2)
            assert recordings(function).recordings == 0
    named = ["CG202" in str(one.message) for one in caught if issubclass(one.category, CaptureWarning)]
    assert named == [True, True], [str(one.message) for one in caught]
    dist.destroy_process_group()


def test_collectives_on_the_cpu_run_eagerly_and_say_so(tmp_path: Path) -> None:
    """A replay would read a result before the threads that communicate have written it."""
    spawn(_work, args=(str(tmp_path),), nprocs=2)
