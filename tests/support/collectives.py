"""Checks that each of two ranks runs: replayed collectives give eager's values while one rank is slower than the
other."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from capture import CaptureWarning, capture, config, mark_step_begin, recordings
from tests.support.ranks import said

CALLS = 9
Body = Callable[[Tensor], Any]


KEEPS_A_TENSOR = torch.__version__ < "2.13"
"""Before torch 2.13 a barrier's handle keeps a tensor after the call, so CG401 keeps the body eager."""


def bodies(rank: int) -> dict[str, Body]:
    """A body for each collective, by name. Each takes a tensor of 10,000 numbers."""
    world: Any = dist.group.WORLD
    operators: Any = torch.ops._c10d_functional

    def summed(x: Tensor) -> Tensor:
        made: Tensor = operators.wait_tensor(operators.all_reduce(x * 1.5, "sum", world.group_name))
        return made * 1.5

    def waited_for_by_use(x: Tensor) -> Tensor:
        made: Tensor = functional.all_reduce(x * 2.0, "sum", world) + 1
        return made

    def several(x: Tensor) -> Tensor:
        one, two = functional.all_reduce_coalesced([x * 1, x * 2], "sum", world)
        made: Tensor = one + two
        return made

    def gathered_along_rows(x: Tensor) -> Tensor:
        made: Tensor = functional.all_gather_tensor(x * 2.0, 0, world) + 1
        return made

    def scattered_sum(x: Tensor) -> Tensor:
        made: Tensor = functional.reduce_scatter_tensor(x * 2.0, "sum", 0, world) + 1
        return made

    def in_place(x: Tensor) -> Tensor:
        y = x * 1.5
        dist.all_reduce(y, op=dist.ReduceOp.MAX)
        return y * 1.5

    def of_an_argument(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x + 1

    def beside_other_work(x: Tensor) -> Tensor:
        y = x * 1.5
        work: Any = dist.all_reduce(y, async_op=True)
        z = (x + 5).sin()
        work.wait()
        return y + z

    def two_at_once(x: Tensor) -> Tensor:
        y, z = x * 1.5, x * 2.5
        works: list[Any] = [dist.all_reduce(one, async_op=True) for one in (y, z)]
        for work in works[::-1]:
            work.wait()
        return y - z

    def gathered(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x), torch.empty_like(x)]
        dist.all_gather(parts, x + 1)
        return parts[0] - parts[1]

    def gathered_into(x: Tensor) -> Tensor:
        whole = x.new_empty(2 * x.numel())
        dist.all_gather_into_tensor(whole, x + 1)
        return whole * 2

    def scattered_into(x: Tensor) -> Tensor:
        part = x.new_empty(x.numel() // 2)
        dist.reduce_scatter_tensor(part, x + 1)
        return part * 2

    def broadcast(x: Tensor) -> Tensor:
        y = x * 3
        dist.broadcast(y, 1)
        return y + 1

    def reduced(x: Tensor) -> Tensor:
        y = x * 3
        dist.reduce(y, 0)
        return y + 1 if rank == 0 else x + 1

    def exchanged(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x * 2)
        return y + 1

    def collected(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x), torch.empty_like(x)] if rank == 0 else None
        dist.gather(x * 1, parts, 0)
        return x + 1 if parts is None else parts[0] - parts[1]

    def barrier(x: Tensor) -> Tensor:
        y = x + 1
        dist.barrier()
        return y * 2

    def kept(x: Tensor) -> Tensor:
        """A body that frees what it sends right away, so that later operators get the memory."""
        y = (x * 1.5).sin()
        gathered = functional.all_gather_tensor(y, 0, world) * 1
        del y
        z = (x * 2.5).cos()
        dist.all_reduce(z)
        made: Tensor = gathered[: x.numel()] + z
        return made

    made = (
        summed, waited_for_by_use, several, gathered_along_rows, scattered_sum, in_place, of_an_argument,
        beside_other_work, two_at_once, gathered, gathered_into, scattered_into, broadcast, reduced, exchanged,
        collected, kept,
    )  # fmt: skip
    return {body.__name__: body for body in (*made, *(() if KEEPS_A_TENSOR else (barrier,)))}


def eager_bodies(rank: int) -> dict[str, tuple[str, Body]]:
    """Bodies that are not recorded, by name, with the code of the finding that says so."""

    def message(x: Tensor) -> Tensor:
        y = x * 1.0
        if rank == 0:
            dist.send(y, 1)
        else:
            dist.recv(y, 0)
        return y + 1

    def objects(x: Tensor) -> Tensor:
        given: list[Any] = [None, None]
        dist.all_gather_object(given, {"factor": rank + 2})
        made: Tensor = x * given[0]["factor"] * given[1]["factor"]
        return made

    def unfinished(x: Tensor) -> tuple[Tensor, Any]:
        y = x * 1.0
        return y, dist.all_reduce(y, async_op=True)

    codes = {objects: "CG201", unfinished: "CG702"}
    if torch.get_default_device().type == "cpu":  # NCCL's messages are kernels of a graph
        codes[message] = "CG702"
    return {body.__name__: (code, body) for body, code in codes.items()}


def value_of(result: Any) -> Tensor:
    """A result after the caller's own wait."""
    if isinstance(result, tuple):
        result[1].wait()
        result = result[0]
    tensor: Tensor = result
    return tensor


def compare(rank: int, name: str, body: Body) -> tuple[Any, list[str]]:
    """Call a body captured and eagerly in turn, and compare each result; gives counters and warnings."""
    captured = capture(body)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        held = []
        for number in range(CALLS):
            if rank == number % 2:
                time.sleep(0.004)  # the other rank's result is not there when its call returns
            if number % 3 == 0:
                mark_step_begin()
            given = [torch.arange(10_000.0).mul_(number + 1).add_(rank) for _ in range(2)]
            expected, result = value_of(body(given[0])), value_of(captured(given[1]))
            assert torch.equal(expected, result), (name, number)
            assert torch.equal(given[0], given[1]), (name, number)
            held.append((expected, result))
        assert all(torch.equal(wanted, result_kept) for wanted, result_kept in held), name
    return recordings(captured), said(caught)


def begun_before(rank: int) -> None:
    """Check a body that waits for a collective that the caller began: it runs eagerly, and says why."""
    operators: Any = torch.ops._c10d_functional
    for skips in (False, True):

        @capture
        def finishing(x: Tensor) -> Tensor:
            y: Tensor = operators.wait_tensor(x) + 1
            return y

        with torch.no_grad(), warnings.catch_warnings(record=True) as caught, config.patch(skip_warmup=skips):
            warnings.simplefilter("always", CaptureWarning)
            for number in range(CALLS):
                if rank == 1:
                    time.sleep(0.01)
                x = torch.full((100_000,), float(number))
                pending = operators.all_reduce(x, "sum", dist.group.WORLD.group_name)  # type: ignore[union-attr]
                assert torch.equal(finishing(pending), 2 * x + 1)
        assert recordings(finishing).replays == 0
        (text,) = said(caught)
        assert "CG702 collective-not-recorded: `wait_tensor` waits for what" in text


def handed_over(rank: int) -> None:
    """Check arguments that a collective is still writing, plain and inside a ``DTensor``, and results that are such."""
    mesh = init_device_mesh(torch.get_default_device().type, (2,))

    def body(x: Any, y: Any) -> Any:
        return x * 2, (y + 1).redistribute(mesh, [Replicate()]), functional.all_reduce(x + 1, "sum", mesh)

    captured = capture(body)
    with torch.no_grad():
        for number in range(CALLS):
            if rank == 1:
                time.sleep(0.01)
            values = torch.full((100_000,), float(number + 1))
            results = []
            for function in (body, captured):  # the first DTensor imports dynamo, which reads files
                x = functional.all_reduce(values, "sum", mesh)
                y = DTensor.from_local(values * rank, mesh, [Partial()]).redistribute(mesh, [Replicate()])
                z: Any = DTensor.from_local(y.to_local() * 1, mesh, [Shard(0)])
                first, second, third = function(x, z)
                results.append([first * 1, second.to_local() * 1, third * 1])
            assert torch.equal(results[0][0], values * 4)
            assert all(map(torch.equal, *results)), number
    # which members of dicts the wrappers look up is known two watched runs later where a recording run only captures
    watched = 1 if values.device.type == "cpu" else 3
    assert recordings(captured).replays == CALLS - watched - 1, recordings(captured)


def collectives(rank: int) -> None:
    """Check all bodies, then those that are not recorded."""
    begun_before(rank)
    handed_over(rank)
    for name, body in bodies(rank).items():
        counts, texts = compare(rank, name, body)
        assert texts == [], (name, texts)
        assert counts.replays > 0, (name, counts)
        assert counts.eager_calls == 0, (name, counts)
        assert counts.body_runs == CALLS - counts.replays, (name, counts)
    for name, (code, body) in eager_bodies(rank).items():
        counts, texts = compare(rank, name, body)
        assert counts.recordings == 0, name
        assert counts.body_runs == CALLS, name
        assert any(code in text for text in texts), (name, texts)
