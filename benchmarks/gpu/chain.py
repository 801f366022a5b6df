"""32 captured layers called in a chain, against 32 bare replays: no copies between them, little host time.

As modules, whose call is torch's own Python (``empty``), and as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
COUNTED = ("recordings", "replays", "rebinds", "eager_calls", "observations", "checkpoints", "misses", "kept_outputs")


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


class Empty(nn.Module):
    """A module that does nothing, to time a module's call by itself."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``x``: anything."""
        return x


def function_of(layer: Layer) -> Callable[[Tensor], Tensor]:
    """The layer's computation as a function, without a module's call."""
    linear = layer.linear

    @capture
    def body(x: Tensor) -> Tensor:
        return F.gelu(linear(x))

    return body


def measure(setting: Setting) -> Outcome:
    """Host microseconds a chain, and over what the bar allows; kernels and copies of both by the profiler."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        layers = [Layer() for _ in range(LAYERS)]
        x = torch.randn(1, WIDTH)
    functions, empties = [function_of(layer) for layer in layers], [Empty() for _ in layers]
    hands = Hands(setting)
    by_hand: list[Hand] = []
    for layer in layers:
        by_hand.append(_captured_by_hand(hands, layer, by_hand[-1].output if by_hand else x))

    def ours() -> Tensor:
        mark_step_begin()
        return _through(layers, x)

    def ours_as_functions() -> Tensor:
        mark_step_begin()
        return _through(functions, x)

    def empty() -> Tensor:
        return _through(empties, x)

    def bare() -> Tensor:
        for hand in by_hand:
            hand.replay()
        return by_hand[-1].output

    right = _eager(layers, x)
    wrong = [
        f"chain: call {number} of {side.__name__} differs from eager"
        for side in (ours, ours_as_functions)
        for number in range(5)
        if not torch.equal(side(), right)
    ]
    if not torch.equal(bare(), right):
        wrong.append("chain: the graphs captured by hand differ from eager")
    before = _totals([*layers, *functions])
    steps = setting.pick(500, 4)
    values = sides_of(host_us([ours, ours_as_functions, bare, empty], setting, calls=steps, burst=1))
    after = _totals([*layers, *functions])
    moved = {name: after[name] - before[name] for name in COUNTED}
    if any(count for name, count in moved.items() if name != "replays"):
        wrong.append(f"chain: more than replays while timing: {moved}")
    events = {"ours": _device_events(ours, setting), "by hand": _device_events(bare, setting)}
    return Outcome(
        figures=_figures(values, events), wrong=tuple(wrong),
        details={"totals": after, "while timing": moved, "device events a chain": events},
    )  # fmt: skip


def _captured_by_hand(hands: Hands, layer: Layer, x: Tensor) -> Hand:
    return hands.capture(lambda: F.gelu(layer.linear(x)))


def _through(parts: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for part in parts:
        x = part(x)
    return x


def _eager(layers: list[Layer], x: Tensor) -> Tensor:
    for layer in layers:
        x = F.gelu(layer.linear(x))
    return x


def _totals(captured: Sequence[Callable[..., Any]]) -> dict[str, int]:
    found = [recordings(one) for one in captured]
    return {name: sum(getattr(one, name) for one in found) for name in COUNTED}


def _figures(values: Sequence[tuple[float, ...]], events: dict[str, str]) -> tuple[Figure, ...]:
    mine, as_functions, theirs, empty = values
    allowed = [FACTOR * value + PER_LAYER_US * LAYERS for value in theirs]
    unit, over = "us a chain, host", f"/ ({FACTOR} x bare + {PER_LAYER_US} us x {LAYERS})"
    return (
        Figure(name=f"chain of {LAYERS}, ours", unit=unit, values=mine, detail=events["ours"]),
        Figure(name=f"chain of {LAYERS}, ours as functions", unit=unit, values=as_functions),
        Figure(name=f"chain of {LAYERS}, bare replays", unit=unit, values=theirs, detail=events["by hand"]),
        Figure(name=f"chain of {LAYERS}, modules that do nothing", unit=unit, values=empty),
        *(
            Figure(name=name, unit=over, bar=1.0, values=tuple(a / b for a, b in zip(side, allowed, strict=True)))
            for name, side in (("ours", mine), ("ours as functions", as_functions))
        ),
    )


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
