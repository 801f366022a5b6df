"""Weights that move: the cost of a rebind against recording again, for a small block and a Llama-shaped 1B model."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from benchmarks.gpu import nets
from benchmarks.gpu.setting import Outcome, Setting, ratio
from benchmarks.timing import Figure, undisturbed
from capture import capture, mark_step_begin, recordings, release

ROUNDS, SWAPS, FRESH = 7, 20, 3
Weights = list[tuple[nn.Module, str, nn.Parameter]]


class Block(nn.Module):
    """Linear, LayerNorm, GELU."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, size), nn.LayerNorm(size)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.norm(self.linear(x)))


@define
class Times:
    """Milliseconds of whole calls, one a round, and of the library's own events."""

    again: list[float]
    alternating: list[float]
    fresh: list[float]
    plain: list[float]
    first: float
    events: dict[str, list[float]]


def measure(setting: Setting) -> Outcome:
    """Both models; every call's result is compared with eager."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        block = Block(setting.pick(1024, 16)).requires_grad_(False)
        x = torch.randn(16, setting.pick(1024, 16))
    wrong: list[str] = []
    figures = _figures("block", _times("block", block, block, x, setting, wrong))
    model = nets.llama(setting)
    ids = torch.arange(8, device=setting.device).view(1, 8)
    # the model would make it with a host sync
    mask = torch.ones(8, 8, dtype=torch.bool, device=setting.device).tril()[None, None]
    step = functools.partial(_logits, model, mask)
    figures += _figures("Llama 1B", _times("Llama 1B", model, step, ids, setting, wrong))
    return Outcome(figures=tuple(figures), wrong=tuple(wrong))


def _logits(model: Any, mask: Tensor, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    found: Tensor = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return found


def _figures(name: str, times: Times) -> list[Figure]:
    figures = [
        ratio(f"{name}: a call that rebinds, buffers alternate", "/ a call that records again", times.alternating,
              times.again, 1 / 20),
        ratio(f"{name}: a call that rebinds, fresh buffers", "/ a call that records again", times.fresh, times.again,
              1 / 20),
        Figure(name=f"{name}: call that records again", unit="ms", values=tuple(times.again)),
        Figure(name=f"{name}: call that rebinds, buffers alternate", unit="ms", values=tuple(times.alternating)),
        Figure(name=f"{name}: call that rebinds, fresh buffers", unit="ms", values=tuple(times.fresh)),
        Figure(name=f"{name}: plain replay", unit="ms", values=tuple(times.plain)),
        Figure(name=f"{name}: first move, calibrated and compared", unit="ms", values=(times.first,)),
    ]  # fmt: skip
    for kind, values in times.events.items():
        figures.append(Figure(name=f"{name}: event {kind}", unit="ms", values=tuple(values or [0.0])))
    return figures


def _weights(model: nn.Module) -> Weights:
    found = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        found.append((model.get_submodule(owner), last, parameter))
    return found


def _copies(weights: Weights) -> Weights:
    """New parameters for all places, with slightly other values; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for _, _, parameter in weights:
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(parameter.detach() * 1.25, requires_grad=False)
    return [(owner, name, made[id(parameter)]) for owner, name, parameter in weights]


def _put(weights: Weights) -> None:
    for owner, name, parameter in weights:
        owner._parameters[name] = parameter


def _times(
    name: str, model: nn.Module, body: Callable[[Tensor], Tensor], x: Tensor, setting: Setting, wrong: list[str]
) -> Times:
    captured = capture(lambda x: body(x), name=f"{name} swapped")
    anchor = capture(lambda x: x + 1, name="anchor")  # keeps the pool when the recording is released
    sides = [_weights(model)]
    sides.append(_copies(sides[0]))

    def call() -> float:
        setting.synchronize()
        begin = time.perf_counter()
        captured(x)
        return (time.perf_counter() - begin) * 1e3

    def check(what: str) -> None:
        mark_step_begin()
        if not torch.equal(captured(x), body(x)):
            wrong.append(f"rebind: {name}, {what}: a replay differs from eager")

    for function in (anchor, anchor, captured, captured, captured):
        mark_step_begin()
        function(x)
    _put(sides[1])
    mark_step_begin()
    first = call()
    check("first move")
    again, alternating, fresh, plain = [], [], [], []
    with undisturbed():
        for _ in range(ROUNDS):
            alternating.append(statistics.median(_swapped(call, sides, number) for number in range(SWAPS)))
            check("alternating")
            copies = [_copies(sides[0]) for _ in range(FRESH)]
            fresh.append(statistics.median(_swapped(call, copies, number) for number in range(FRESH)))
            check("fresh")
            del copies
            plain.append(statistics.median(_marked(call) for _ in range(SWAPS)))
            _put(sides[0])
            mark_step_begin()
            captured(x)
            release(captured)
            again.append(_marked(call))
            _swapped(call, sides, 1)  # the new recording learns
    now = recordings(captured)
    if now.eager_calls or now.recordings != ROUNDS + 1:
        wrong.append(f"rebind: {name}: {now.recordings} recordings, {now.eager_calls} eager calls")
    kinds = ("record", "calibrate", "rebind")
    events = {kind: [event.ms for event in now.events if event.kind == kind][-ROUNDS:] for kind in kinds}
    release(captured)
    release(anchor)
    return Times(again, alternating, fresh, plain, first, events)


def _marked(call: Callable[[], float]) -> float:
    mark_step_begin()
    return call()


def _swapped(call: Callable[[], float], sides: list[Weights], number: int) -> float:
    _put(sides[number % len(sides)])
    return _marked(call)
