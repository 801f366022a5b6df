"""Two processes train one model, each way of splitting the work, its whole step captured.

    torchrun --nproc-per-node 2 examples/08_several_processes.py [ddp] [fsdp] [tensor] [both]

Under NCCL with a GPU for each process, else under gloo on the CPU.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from capture import capture, mark_step_begin, recordings

STEPS = 40


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + change


def replicated(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)  # gradients are views of the buckets


def sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def split(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for block in list(model)[1:-1]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def split_and_sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    both = init_device_mesh(mesh.device_type, (1, 2), mesh_dim_names=("data", "tensor"))
    split(model, both["tensor"])
    return sharded(model, both["data"])


WAYS: dict[str, Callable[[nn.Sequential, DeviceMesh], nn.Module]] = {
    "ddp": replicated, "fsdp": sharded, "tensor": split, "both": split_and_sharded,
}  # fmt: skip


def train(way: str, mesh: DeviceMesh, *, captures: bool) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = WAYS[way](nn.Sequential(nn.Linear(16, 32), Block(32), Block(32), nn.Linear(32, 4)), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = capture(step) if captures else step
    rank = 0 if way in ("tensor", "both") else dist.get_rank()  # ranks that split the layers see the same examples
    losses = []
    for number in range(STEPS):
        torch.manual_seed(1000 * rank + number)
        mark_step_begin()
        losses.append(run(torch.randn(8, 16), torch.randint(4, (8,))).item())
    return losses, str(recordings(run)) if captures else ""


HOW = f"""This example runs in two processes, which torchrun starts:

    torchrun --nproc-per-node 2 {sys.argv[0]} [ddp] [fsdp] [tensor] [both]

Each way of splitting one model over two processes trains it twice, eagerly and with its whole step captured. It prints
that the losses are the same in both, and how many steps were replayed. With two GPUs it uses NCCL, else gloo."""
if "RANK" not in os.environ:
    print(HOW)
    sys.exit()

on_gpu = torch.cuda.device_count() > 1
if on_gpu:
    torch.set_default_device(torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if on_gpu else "gloo")


def compare(ways: list[str]) -> None:
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (2,))
    for way in ways:
        eager, _ = train(way, mesh, captures=False)
        captured, counts = train(way, mesh, captures=True)
        same = torch.tensor(float(eager == captured))
        dist.all_reduce(same)
        if dist.get_rank() == 0:
            print(f"{way}: same losses as eager in {int(same)} processes")
            print(counts)
            print("gained: operators and collectives of a step are one replay; why: all ranks agreed to record it")


compare(sys.argv[1:] or list(WAYS))
gc.collect()  # device meshes keep groups alive, whose threads abort if they hold a tensor when Python ends (torch 2.13)
dist.destroy_process_group()
