"""What a recording costs: time against a bare CUDA graph capture, memory against one pool shared by hand."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.gpu.graphs import Hands
from benchmarks.gpu.setting import Outcome, Setting, ratio
from benchmarks.timing import Figure
from capture import capture, config, mark_step_begin, recordings, release

WIDTH, DEPTH, BATCHES = 64, 50, 20  # 50 x (Linear + GELU): 100 kernels
WIDE, FEW, SHAPES, ROWS = 1024, 8, 64, 8  # the memory part: up to 64 x 8 rows of 1024, so that 2 MiB an activation
Sizes = dict[str, int]


def measure(setting: Setting) -> Outcome:
    """Time and memory. Memory comes first, while there is no other pool."""
    with config.patch(drop_slow=False):  # many shapes in turn, each asked for twice: nothing shows that it will pay
        memory = _memory(setting)
        return _merged(memory, _time(setting))


def _merged(one: Outcome, other: Outcome) -> Outcome:
    return Outcome(
        figures=(*other.figures, *one.figures), rows=one.rows, details={**one.details, **other.details},
        wrong=(*one.wrong, *other.wrong),
    )  # fmt: skip


def _time(setting: Setting) -> Outcome:
    """Milliseconds to record 100 kernels, 20 shapes, ours and bare in turn."""
    torch.manual_seed(0)
    depth, batches = setting.pick(DEPTH, 4), setting.pick(BATCHES, 3)
    with torch.device(setting.device):
        body = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
        inputs = [torch.randn(batch, WIDTH) for batch in range(1, batches + 1)]
    captured = capture(lambda x: body(x), max_recordings=batches, name="hundred kernels")
    hands = Hands(setting)
    for x in inputs:  # so that libraries choose their kernels before, on both streams
        mark_step_begin()
        captured(x)
        hands.warm(functools.partial(body, x), runs=1)
    kept: list[object] = []
    bare_ms, whole_ms = [], []
    gc.collect()
    for x in inputs:
        bare_ms.append(_ms(functools.partial(_keep, kept, hands, functools.partial(body, x)), setting))
        mark_step_begin()
        whole_ms.append(_ms(functools.partial(captured, x), setting))
    wrong = []
    for x in inputs:
        mark_step_begin()
        if not torch.equal(captured(x), body(x)):
            wrong.append(f"record: a replay of batch {len(x)} differs from eager")
    totals = recordings(captured)
    if (totals.recordings, totals.eager_calls) != (batches, 0):
        wrong.append(f"record: not {batches} recordings: {totals}")
    events = [event.ms for event in totals.events if event.kind == "record"][-batches:]
    ours_ms = events if len(events) == batches else whole_ms
    unit = f"/ bare capture and instantiate ({'the record event' if ours_ms is events else 'the whole call'})"
    figures = (
        Figure(name=f"bare capture, {2 * depth} kernels", unit="ms", values=tuple(bare_ms)),
        Figure(name="ours, the record event", unit="ms", values=tuple(events)),
        Figure(name="ours, the whole call that records", unit="ms", values=tuple(whole_ms)),
        ratio("recording, ours", unit, ours_ms, bare_ms, 1.5),
        ratio("the call that records, ours", "/ bare capture and instantiate", whole_ms, bare_ms, None),
    )
    release(captured)
    return Outcome(figures=figures, wrong=tuple(wrong), details={"record events ms": [round(ms, 3) for ms in events]})


def _keep(kept: list[object], hands: Hands, body: Callable[[], Tensor]) -> None:
    kept.append(hands.capture_bare(body))


def _ms(side: Callable[[], object], setting: Setting) -> float:
    """Host milliseconds; the device is idle at the beginning, and may still work at the end."""
    setting.synchronize()
    begin = time.perf_counter()
    side()
    return (time.perf_counter() - begin) * 1e3


def _memory(setting: Setting) -> Outcome:
    """64 shapes in one go, largest first: bytes of the pool, of the graphs, and of the whole device."""
    torch.manual_seed(0)
    shapes = setting.pick(SHAPES, 4)
    wide = setting.pick(WIDE, 16)
    with torch.device(setting.device):
        body = nn.Sequential(*[layer for _ in range(FEW) for layer in (nn.Linear(wide, wide), nn.GELU())])
        inputs = [torch.randn(ROWS * size, wide) for size in range(shapes, 0, -1)]
    setting.synchronize()
    by_hand = _by_hand(body, inputs, setting)
    ours, steps, wrong = _ours(body, inputs, setting)
    header = ("memory of 64 recordings, largest first", "pool MiB", "reserved MiB", "device MiB", "graphs MiB")
    rows: list[tuple[str, ...]] = [header]
    for name, sizes in (("ours", ours), *by_hand.items()):
        parts = (f"{sizes[part] / 2**20:.2f}" if part in sizes else "" for part in ("pool", "reserved", "device"))
        rows.append((name, *parts, f"{sizes['graphs'] / 2**20:.2f}" if "graphs" in sizes else ""))
    figures = []
    best = min((sizes["reserved"] for sizes in by_hand.values()), default=0)
    if best > 0:
        figures = [
            Figure(name="pool of 64 recordings, ours", unit="/ one pool shared by hand", values=(ours["pool"] / best,),
                   bar=1.05, detail=f"{ours['pool'] / 2**20:.1f} and {best / 2**20:.1f} MiB"),
            Figure(name="reserved by torch, ours", unit="/ one pool shared by hand", values=(ours["reserved"] / best,),
                   detail=f"{ours['reserved'] / 2**20:.1f} and {best / 2**20:.1f} MiB"),
        ]  # fmt: skip
    return Outcome(
        figures=tuple(figures), rows=tuple(rows), wrong=tuple(wrong),
        details={"by hand": by_hand, "ours": ours, "ours after each recording": steps},
    )  # fmt: skip


def _settled(setting: Setting) -> Sizes:
    """Bytes taken now: by torch's allocator, and on the whole device."""
    gc.collect()
    if not setting.on_gpu:
        return {"reserved": 0, "device": 0}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {"reserved": torch.cuda.memory_reserved(), "device": total - free}


def _since(before: Sizes, setting: Setting) -> Sizes:
    now = _settled(setting)
    return {name: now[name] - before[name] for name in now}


def _by_hand(body: nn.Module, inputs: list[Tensor], setting: Setting) -> dict[str, Sizes]:
    """One pool, one static input buffer for all shapes; outputs kept, or given back to the pool as servers do."""
    sizes: dict[str, Sizes] = {}
    for name, keep in (("by hand, outputs given back", False), ("by hand, outputs kept", True)):
        hands = Hands(setting)
        hands.warm(lambda: body(inputs[-1]))
        before = _settled(setting)
        buffer = torch.empty_like(inputs[0])
        kept: list[object] = []
        for x in inputs:
            hand = hands.capture(functools.partial(body, buffer[: len(x)]), warmups=0)
            kept.append(hand if keep else hand.replay)
            del hand
        sizes[name] = _since(before, setting)
        kept.clear()
    return sizes


def _ours(body: nn.Module, inputs: list[Tensor], setting: Setting) -> tuple[Sizes, list[Sizes], list[str]]:
    # the limit also says how many shapes are tried before one has to come again (``runtime/budget.py``)
    captured = capture(lambda x: body(x), max_recordings=2 * len(inputs), name="many shapes")
    small = inputs[-1][:1]
    for _ in range(3):  # makes the capture stream's workspace, which does not count as a recording's memory
        mark_step_begin()
        captured(small)
    before, first = _settled(setting), recordings(captured)
    steps: list[Sizes] = []
    for x in inputs:
        for _ in range(2):
            mark_step_begin()
            captured(x)
        now = recordings(captured)
        steps.append({"rows": len(x), "pool": now.pool_bytes, "graphs": now.graph_bytes})
    last, taken = recordings(captured), _since(before, setting)
    wrong = []
    for x in inputs:
        mark_step_begin()
        if not torch.equal(captured(x), body(x)):
            wrong.append(f"record: a replay of {len(x)} rows differs from eager")
    if last.recordings != len(inputs) + 1:
        wrong.append(f"record: not {len(inputs) + 1} recordings: {last}")
    sizes = {
        "pool": last.pool_bytes - first.pool_bytes, "graphs": last.graph_bytes - first.graph_bytes, **taken,
        "graph, mean": (last.graph_bytes - first.graph_bytes) // len(inputs),
    }  # fmt: skip
    release(captured)
    return sizes, steps, wrong
