"""Two ranks under ``torchrun``, a GPU each: a Llama-shaped model trains eagerly and captured, parallel in several ways,
bit for bit."""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from typing_extensions import override

from benchmarks.gpu.setting import Outcome, Setting, last_lines, ratio
from benchmarks.timing import Figure
from capture import CaptureWarning, capture, config, mark_step_begin, recordings, reset

BATCH, LENGTH, VOCABULARY, HEADS = 2, 64, 4096, 16
WIDTH, LAYERS = 1536, 8  # 250 million parameters
TINY = 64, 2
STEPS, TIMED = 50, 30
LIMIT_S = 300
ROOT = Path(__file__).resolve().parents[2]

Result = dict[str, Any]


class Layer(nn.Module):
    """Attention with rotary positions and a gated feed-forward layer (batch x length x width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.size = width // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        angles = torch.arange(LENGTH)[:, None] / 10_000 ** (torch.arange(0, self.size, 2) / self.size)
        self.turn: Tensor
        self.register_buffer("turn", torch.stack([angles.cos(), angles.sin()]))

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        change: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + change

    def _turned(self, x: Tensor) -> Tensor:
        (one, two), (cos, sin) = x.chunk(2, -1), self.turn
        return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)


class Llama(nn.Module):
    """Tokens (batch x length) to logits (batch x length x vocabulary)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Gathered(nn.Module):
    """A sharded weight as a whole one, its gradient averaged back: data parallelism by functional collectives alone."""

    @override
    def forward(self, weight: Any) -> Tensor:
        whole: Tensor = weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
        return whole


def _tensor_parallel(model: Llama, mesh: DeviceMesh) -> nn.Module:
    split = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    for layer in model.layers:
        parallelize_module(layer, mesh, {**split, "out": RowwiseParallel(), "down": RowwiseParallel()})
    return model


def _sharded(model: Llama, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _in_two_dimensions(shape: tuple[int, int]) -> Callable[[Llama, DeviceMesh], nn.Module]:
    """Tensor parallelism by columns and rows in one dimension of the mesh, sharding in the other."""

    def wrap(model: Llama, mesh: DeviceMesh) -> nn.Module:
        both = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("data", "tensor"))
        return _sharded(cast(Llama, _tensor_parallel(model, both["tensor"])), both["data"])

    return wrap


def _by_collectives(model: Llama, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:
        for name in ("q", "k", "v", "out", "gate", "up", "down"):
            linear: Any = getattr(layer, name)
            linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
            register_parametrization(linear, "weight", Gathered(), unsafe=True)
    return model


@frozen(kw_only=True)
class Way:
    """One kind of parallelism; ``whole``: the step is captured, else the layers are; ``splits``: the ranks get the same
    tokens; ``width`` of the model."""

    name: str
    wrap: Callable[[Llama, DeviceMesh], nn.Module]
    whole: bool = True
    splits: bool = False
    width: int = WIDTH


WAYS = (
    Way(name="DDP, whole step", wrap=lambda model, mesh: DistributedDataParallel(model, gradient_as_bucket_view=True)),
    Way(name="DDP, a layer each", wrap=lambda model, mesh: DistributedDataParallel(model), whole=False),
    Way(name="tensor parallel, whole step", wrap=_tensor_parallel, splits=True),
    Way(name="tensor parallel, a layer each", wrap=_tensor_parallel, whole=False, splits=True),
    Way(name="tensor parallel, a billion parameters, whole step", wrap=_tensor_parallel, splits=True, width=2 * WIDTH),
    Way(name="FSDP2, a layer each", wrap=_sharded, whole=False),
    Way(
        name="FSDP2 without resharding, a layer each",
        wrap=lambda model, mesh: _sharded(model, mesh, reshard_after_forward=False), whole=False,
    ),
    Way(name="FSDP2, whole step", wrap=_sharded),
    Way(
        name="FSDP2 without resharding, whole step",
        wrap=lambda model, mesh: _sharded(model, mesh, reshard_after_forward=False),
    ),
    Way(name="FSDP2 over two and tensor parallel over one, whole step", wrap=_in_two_dimensions((2, 1))),
    Way(name="FSDP2 over one and tensor parallel over two, whole step", wrap=_in_two_dimensions((1, 2)), splits=True),
    Way(name="functional collectives, whole step", wrap=_by_collectives),
)  # fmt: skip


def measure(setting: Setting) -> Outcome:
    """Run every way once; ranks that hang are ended after ``LIMIT_S`` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--module",
                   __name__, folder, setting.device, "tiny" if setting.tiny else "full"]  # fmt: skip
        started = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            code: int | None = started.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        by_rank = [[json.loads(path.read_text()) for path in sorted(Path(folder).glob(f"{rank}-*"))] for rank in (0, 1)]
    return _outcome(by_rank, code)


def _outcome(by_rank: list[list[Result]], code: int | None) -> Outcome:
    wrong = [
        f"{len(results)} of {len(WAYS)} ways in rank {rank}"
        for rank, results in enumerate(by_rank)
        if len(results) < len(WAYS)
    ]
    wrong += ["the ranks hang"] if code is None else [f"exit code {code}"] if code else []
    wrong += [
        f"{result['way']}, rank {rank}: {result['wrong']}"
        for rank in (0, 1)
        for result in by_rank[rank]
        if result["wrong"]
    ]
    figures: list[Figure] = []
    rows: list[tuple[str, ...]] = [("two ranks", "recordings", "replays", "eager calls", "why not", "losses, weights")]
    for result in by_rank[0]:
        if "eager ms" not in result:
            continue
        name = result["way"]
        figures += [
            Figure(name=f"{name}, eager", unit="ms a step", values=(result["eager ms"],)),
            Figure(name=f"{name}, ours", unit="ms a step", values=(result["ours ms"],)),
            ratio(f"{name}, ours", "/ eager, time", (result["ours ms"],), (result["eager ms"],), None),
            ratio(
                f"{name}, ours",
                "/ eager, peak memory",
                (result["ours MiB"],),
                (result["eager MiB"],),
                1.06 if name.endswith("whole step") else None,
            ),
        ]
        rows.append(
            (name, *map(str, result["counts"]), result["said"] or "-", "wrong" if result["wrong"] else "eager's bits")
        )
    details = {"steps": STEPS, "ranks": by_rank}
    return Outcome(figures=tuple(figures), rows=tuple(rows), wrong=tuple(wrong), details=details)


def _rank(folder: Path, setting: Setting) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if setting.on_gpu:
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device("cuda", rank))
        torch.backends.cudnn.deterministic = True
    warnings.simplefilter("ignore")
    dist.init_process_group("nccl" if setting.on_gpu else "gloo")
    mesh = init_device_mesh("cuda" if setting.on_gpu else "cpu", (2,))
    with config.patch(cache=False):
        for number, way in enumerate(WAYS):
            try:
                result = _compared(way, mesh, setting, rank)
            except Exception as error:  # noqa: BLE001 - both ranks go on with the next way
                result = {"wrong": last_lines(error), "trace": traceback.format_exc()[-2000:]}
            (folder / f"{rank}-{number:02}").write_text(json.dumps({"way": way.name, **result}))
            dist.barrier()
    dist.destroy_process_group()


def _compared(way: Way, mesh: DeviceMesh, setting: Setting, rank: int) -> Result:
    eager = _train(way, mesh, setting, rank, captures=False)
    ours = _train(way, mesh, setting, rank, captures=True)
    wrong = [] if ours["losses"] == eager["losses"] else ["losses differ"]
    wrong += [] if all(map(torch.equal, ours["weights"], eager["weights"])) else ["weights differ"]
    return {
        "eager ms": eager["ms"], "ours ms": ours["ms"], "eager MiB": eager["MiB"], "ours MiB": ours["MiB"],
        "counts": ours["counts"], "said": ours["said"], "texts": ours["texts"], "wrong": ", ".join(wrong),
        "loss": ours["losses"][-1],
    }  # fmt: skip


def _train(way: Way, mesh: DeviceMesh, setting: Setting, rank: int, *, captures: bool) -> Result:
    torch.manual_seed(0)
    for _ in range(3):  # free what the run before left; some objects become garbage only when others are freed
        gc.collect()
    if setting.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    inner = Llama(*setting.pick((way.width, LAYERS), TINY))
    layers = list(inner.layers)
    model = way.wrap(inner, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = step
    if captures and way.whole:
        run = capture(step)
    elif captures:
        for layer in layers:
            capture(layer)
    losses, times = [], []
    with torch.enable_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        for number in range(setting.pick(STEPS, 12)):
            tokens = _tokens(0 if way.splits else rank, number)
            setting.synchronize()
            begin = time.perf_counter()
            mark_step_begin()
            losses.append(run(tokens[:, :-1], tokens[:, 1:]).clone())
            setting.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
    texts = sorted({str(warning.message) for warning in caught if issubclass(warning.category, CaptureWarning)})
    counted = [recordings(function) for function in ([run] if way.whole else layers)] if captures else []
    most = torch.cuda.max_memory_reserved() / 2**20 if setting.on_gpu else 1.0
    weights: list[Any] = [parameter.detach() for parameter in model.parameters()]
    result = {
        "losses": [float(loss_value) for loss_value in losses],
        "weights": [(weight.full_tensor() if hasattr(weight, "full_tensor") else weight).cpu() for weight in weights],
        "ms": statistics.median(times[-TIMED:]),
        "MiB": most,
        "counts": [
            sum(getattr(counts, name) for counts in counted) for name in ("recordings", "replays", "eager_calls")
        ],
        "said": " ".join(sorted({text[:5] for text in texts})),
        "texts": [text[:500] for text in texts],
    }
    reset()
    return result


def _tokens(seed: int, number: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * seed + number)
    made = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator, device="cpu")
    return made.to(torch.get_default_device())


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), Setting(device=sys.argv[2], tiny=sys.argv[3] == "tiny"))
