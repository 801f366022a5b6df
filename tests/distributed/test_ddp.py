"""Two processes that train one model: losses and weights equal eager's bit for bit in both."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from capture import CaptureWarning, capture, mark_step_begin, recordings
from capture.torch_private.autograd import TAKES_STALE_STREAMS
from tests.support.ranks import said, two_ranks

STEPS = 20
Wrap = Callable[[nn.Sequential], nn.Module]


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.b(torch.tanh(self.a(self.norm(x))))
        return y


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """A batch; each rank has another one. Every eighth is shorter on all ranks, so that it has another key."""
    generator = torch.Generator("cpu").manual_seed(100 * rank + number)
    rows = 5 if number % 8 == 7 else 8
    x = torch.randn(rows, 16, generator=generator, device="cpu")
    y = torch.randint(0, 4, (rows,), generator=generator, device="cpu")
    return x.to(torch.get_default_device()), y.to(torch.get_default_device())


def train(rank: int, wrap: Wrap, what: str) -> tuple[list[Tensor], list[str], list[Any]]:
    """Losses and final weights, warnings, and counts of what is captured: nothing, the ``blocks``, or the ``step``."""
    torch.manual_seed(0)
    layers = nn.Sequential(Block(), Block(), nn.Linear(16, 4))
    model = wrap(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)  # mixes kinds of tensors
    blocks = list(layers)[:2]
    for block in blocks if what == "blocks" else ():
        capture(block)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = capture(step) if what == "step" else step
    values = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        for number in range(STEPS):
            mark_step_begin()
            values.append(run(*batch(rank, number)).clone())
    weights: list[Any] = [parameter.detach() for parameter in model.parameters()]
    values += [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in weights]
    counted: dict[str, list[Any]] = {"nothing": [], "blocks": blocks, "step": [run]}
    return values, said(caught), [recordings(function) for function in counted[what]]


def replicated(**options: Any) -> Wrap:
    return lambda layers: DistributedDataParallel(layers, **options)


def sharded(layers: nn.Sequential, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    mesh = mesh or init_device_mesh(torch.get_default_device().type, (2,))
    for layer in layers.children():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(layers, mesh=mesh, **options)
    return layers


def in_two_dimensions(shape: tuple[int, int]) -> Wrap:
    """Tensor parallelism by columns and rows in one dimension of the mesh, sharding in the other."""

    def wrap(layers: nn.Sequential) -> nn.Module:
        mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=("data", "tensor"))
        for block in list(layers)[:2]:
            parallelize_module(block, mesh["tensor"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
        return sharded(layers, mesh["data"])

    return wrap


def tensor_parallel(layers: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    for block in list(layers)[:2]:
        parallelize_module(block, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
    return layers


def blocks_replay(counts: list[Any], texts: list[str]) -> None:
    assert texts == [], texts
    for count in counts:
        assert count.replays >= STEPS, count
        assert count.eager_calls == 0, count


def step_replays(counts: list[Any], texts: list[str]) -> None:
    """Check that the step replays as soon as the gradients exist, which are views of the buckets."""
    assert counts[0].replays >= 10, counts
    assert texts == [], texts


def buckets_are_unknown(counts: list[Any], texts: list[str]) -> None:
    assert counts[0].recordings == 0
    assert "CG105 implicit-input: the body reads" in texts[0]
    assert "gradient_as_bucket_view=True" in texts[0]


def from_the_third_step(counts: list[Any], texts: list[str]) -> None:
    """Check two recordings, one for each of two keys. Each key needs one more run, for the optimizer's state or for the
    parameters' gradients."""
    assert texts == [], texts
    assert counts[0].recordings == 2, counts
    assert counts[0].replays >= STEPS - 6, counts
    assert counts[0].eager_calls == 0, counts


def after_ten_passes(counts: list[Any], texts: list[str]) -> None:
    """Check that it replays after ten passes, which the wrapper measures on the device. The wrapper keeps the
    parameters' nodes, which belong to the stream that it was made on; torch before 2.13 lets no capture use those."""
    if not TAKES_STALE_STREAMS:
        assert any(text.startswith("CG904") and "stream" in text for text in texts), (counts, texts)
        return
    assert counts[0].replays >= 4, counts
    assert counts[0].eager_calls == 0, counts
    assert texts == [], texts


def says_why(counts: list[Any], texts: list[str]) -> None:
    """Check the reason that the finding gives. On the device another reason may come first."""
    replays = all(count.eager_calls == 0 for count in counts)
    assert replays or any(text.startswith(("CG401", "CG904", "CG105", "CG202", "CG204")) for text in texts), (
        counts,
        texts,
    )


Check = Callable[[list[Any], list[str]], None]
CASES: list[tuple[Wrap, dict[str, Check]]] = [
    (replicated(), {"blocks": blocks_replay, "step": buckets_are_unknown}),
    (replicated(gradient_as_bucket_view=True), {"blocks": blocks_replay, "step": step_replays}),
    (tensor_parallel, {"blocks": blocks_replay, "step": from_the_third_step}),
    (sharded, {"blocks": blocks_replay, "step": from_the_third_step}),
    (functools.partial(sharded, reshard_after_forward=False), {"step": from_the_third_step}),
    (in_two_dimensions((2, 1)), {"step": from_the_third_step}),
    (in_two_dimensions((1, 2)), {"step": from_the_third_step}),
]
ON_GPU: dict[tuple[int, str], Check] = {(1, "step"): after_ten_passes}
"""Checks on a GPU, by the number of the case and what is captured."""


def accumulates(rank: int, captures: bool) -> tuple[list[Tensor], Any]:
    """Micro-batches of which, from the tenth on, only every third communicates: ``no_sync`` changes what deeper code
    reads, and nothing that the body names."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(Block(), nn.Linear(16, 4)), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def pile_up(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    run, values = (capture(pile_up) if captures else pile_up), []
    for number in range(STEPS):
        mark_step_begin()
        communicates = number < STEPS // 2 or number % 3 == 2
        with contextlib.nullcontext() if communicates else model.no_sync():
            values.append(run(*batch(rank, number % 7)).clone())
        if communicates:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return [*values, *[parameter.detach() for parameter in model.parameters()]], run


def compressed(rank: int, captures: bool, builtin: bool = False) -> tuple[list[Tensor], Any]:
    """A hook on the buckets, in Python or torch's own, whose second half runs in another thread."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(Block(), nn.Linear(16, 4)), gradient_as_bucket_view=True)
    if builtin:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined]
    else:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = capture(step) if captures else step
    values = [run(*batch(rank, number)).clone() for number in range(STEPS // 2)]
    return [*values, *[parameter.detach() for parameter in model.parameters()]], run


def settings_change(rank: int, captures: bool) -> tuple[list[Tensor], Any]:
    """Between steps of a sharded model: gradients are not exchanged, or kept for the next pass, the model runs without
    gradients, is gathered by hand, or no longer resharded. Nothing that the body names changes."""
    torch.manual_seed(0)
    model: Any = sharded(nn.Sequential(Block(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    run, values = (capture(step) if captures else step), []
    for number in range(2 * STEPS):
        mark_step_begin()
        last = number < STEPS // 2 or number % 3 == 2
        model.set_requires_gradient_sync(last)
        if number == STEPS:
            with torch.no_grad():
                values.append(model(batch(rank, number)[0]))
        if number == STEPS + 4:
            model.unshard()
        if number == STEPS + 8:
            model.set_reshard_after_backward(False)
        if number == STEPS + 11:
            model.set_reshard_after_backward(True)
        values.append(run(*batch(rank, number % 7)).clone())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    weights: list[Any] = [parameter.detach() for parameter in model.parameters()]
    return [*values, *[weight.full_tensor() for weight in weights]], run


def special_cases(rank: int) -> None:
    builtin = functools.partial(compressed, builtin=True)
    cases: list[tuple[Any, set[str]]] = [
        (accumulates, set()), (compressed, {"CG202"}), (builtin, {"CG202"}), (settings_change, {"CG105"}),
    ]  # fmt: skip
    for case, codes in cases:
        expected, _ = case(rank, False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CaptureWarning)
            values, run = case(rank, True)
        assert [value.tolist() for value in values] == [value.tolist() for value in expected], (case, recordings(run))
        if torch.get_default_device().type == "cuda":
            says_why([recordings(run)], said(caught))
            continue
        assert codes <= {text[:5] for text in said(caught)}, said(caught)
        replays = case in (accumulates, settings_change)
        assert (recordings(run).replays > 3) is replays, (case, recordings(run), said(caught))


def training(rank: int) -> None:
    special_cases(rank)
    on_gpu = torch.get_default_device().type == "cuda"
    for number, (wrap, checks) in enumerate(CASES):
        expected, _, _ = train(rank, wrap, "nothing")
        for what, check in checks.items():
            values, texts, counts = train(rank, wrap, what)
            assert [value.tolist() for value in values] == [value.tolist() for value in expected], (what, counts)
            (ON_GPU.get((number, what), check) if on_gpu else check)(counts, texts)


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    two_ranks(training, tmp_path, seconds=240)
