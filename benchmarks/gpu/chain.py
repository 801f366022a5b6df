"""32 captured layers called in a chain, against 32 bare replays: no copies between them, little host time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.gpu.graphs import Hand, Hands
from benchmarks.gpu.setting import Outcome, Setting, host_us, last_lines, sides_of
from benchmarks.timing import Figure, Side
from capture import capture, mark_step_begin, recordings

WIDTH, LAYERS = 64, 32
FACTOR, PER_LAYER_US = 1.15, 1.5
COUNTED = ("recordings", "replays", "rebinds", "eager_calls", "observations", "checkpoints", "misses", "evacuations")


class Layer(nn.Module):
    """Linear and GELU; every instance has its own recordings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @override
    @capture
    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, width."""
        return F.gelu(self.linear(x))


def measure(setting: Setting) -> Outcome:
    """Host microseconds a chain, and over what the bar allows; kernels and copies of both by the profiler."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        layers = [Layer() for _ in range(LAYERS)]
        x = torch.randn(1, WIDTH)
    hands = Hands(setting)
    by_hand: list[Hand] = []
    for layer in layers:
        by_hand.append(_captured_by_hand(hands, layer, by_hand[-1].output if by_hand else x))

    def ours() -> Tensor:
        mark_step_begin()
        h = x
        for layer in layers:
            h = layer(h)
        return h

    def bare() -> Tensor:
        for hand in by_hand:
            hand.replay()
        return by_hand[-1].output

    right = _eager(layers, x)
    wrong = [f"chain: call {number} differs from eager" for number in range(5) if not torch.equal(ours(), right)]
    if not torch.equal(bare(), right):
        wrong.append("chain: the graphs captured by hand differ from eager")
    before = _totals(layers)
    steps = setting.pick(500, 4)
    mine, theirs = sides_of(host_us([ours, bare], setting, calls=steps, burst=1))
    after = _totals(layers)
    moved = {name: after[name] - before[name] for name in COUNTED}
    if any(count for name, count in moved.items() if name != "replays"):
        wrong.append(f"chain: more than replays while timing: {moved}")
    events = {"ours": _device_events(ours, setting), "by hand": _device_events(bare, setting)}
    return Outcome(
        figures=_figures(mine, theirs, events), wrong=tuple(wrong),
        details={"totals": after, "while timing": moved, "device events a chain": events},
    )  # fmt: skip


def _captured_by_hand(hands: Hands, layer: Layer, x: Tensor) -> Hand:
    return hands.capture(lambda: F.gelu(layer.linear(x)))


def _eager(layers: list[Layer], x: Tensor) -> Tensor:
    for layer in layers:
        x = F.gelu(layer.linear(x))
    return x


def _totals(layers: list[Layer]) -> dict[str, int]:
    found = [recordings(layer) for layer in layers]
    return {name: sum(getattr(one, name) for one in found) for name in COUNTED}


def _figures(mine: tuple[float, ...], theirs: tuple[float, ...], events: dict[str, str]) -> tuple[Figure, ...]:
    allowed = [FACTOR * value + PER_LAYER_US * LAYERS for value in theirs]
    return (
        Figure(name=f"chain of {LAYERS}, ours", unit="us a chain, host", values=mine, detail=events["ours"]),
        Figure(name=f"chain of {LAYERS}, bare replays", unit="us a chain, host", values=theirs,
               detail=events["by hand"]),
        Figure(
            name="ours", unit=f"/ ({FACTOR} x bare + {PER_LAYER_US} us x {LAYERS})", bar=1.0,
            values=tuple(a / b for a, b in zip(mine, allowed, strict=True)),
        ),
    )  # fmt: skip


def _device_events(side: Side, setting: Setting) -> str:
    """Kernels and copies that one chain runs on the device."""
    if not setting.on_gpu:
        return "not counted on the CPU"
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            side()
            torch.cuda.synchronize()
        names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    except (RuntimeError, AttributeError) as error:
        return f"not counted: {last_lines(error)}"
    copies = sum("copy" in name.lower() for name in names)
    return f"{len(names) - copies} kernels, {copies} copies"
