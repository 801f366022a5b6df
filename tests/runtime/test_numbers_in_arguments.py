"""Numbers in containers among the arguments are lifted, asked, counted up and written as those that are arguments."""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import Tensor

from capture import CaptureWarning, capture, config, recordings
from tests.support.device import DEVICE, LIFTS
from tests.support.observed import bits
from tests.support.observed import fresh as fresh

pytestmark = pytest.mark.skipif(not LIFTS, reason="the engine lifts no numbers")
CALLS = 40
W = torch.linspace(-1, 1, 64, device=DEVICE).view(8, 8)


@attrs.define(eq=False)
class Slots:
    position: int = 0
    scale: float = 1.5
    last: Any = None


class Plain:
    """Opened, as it holds a tensor."""

    def __init__(self) -> None:
        self.position, self.scale, self.last = 0, 1.5, torch.ones(4, device=DEVICE)


class Pair(NamedTuple):
    name: str
    options: dict[str, Any]


def used(x: Tensor, s: Any) -> Any:
    return torch.relu(x @ W) * s["step"]


def learning_rate(x: Tensor, s: Any) -> Any:
    return x - s["lr"] * torch.tanh(x @ W)


def two(x: Tensor, s: Any) -> Any:
    return (x * s["lr"] + s["step"]) @ W


def counted(x: Tensor, s: Any) -> Any:
    s["step"] += 1
    return torch.relu(x @ W) * s["step"]


def only_counted(x: Tensor, s: Any) -> Any:
    s["step"] += 1
    return torch.relu(x @ W)


def every_fourth(x: Tensor, s: Any) -> Any:
    s["step"] += 1
    return x @ W if s["step"] % 4 else x + 1


def warmed_up(x: Tensor, s: Any) -> Any:
    return x * (s["lr"] * min(s["step"] / 10, 1.0))


def decayed(x: Tensor, s: Any) -> Any:
    s["lr"] *= 0.95
    return x * s["lr"]


def in_list(x: Tensor, s: Any) -> Any:
    s[0] += 1
    return (x @ W) * s[0] + s[1]


def attribute(x: Tensor, s: Any) -> Any:
    s.position += 1
    return torch.sin(x * s.position) * s.scale


def position(x: Tensor, s: Any) -> Any:
    return torch.sin(x * s.position) * s.scale


def nested(x: Tensor, s: Any) -> Any:
    s["outer"][1]["step"] += 1
    return x * s["outer"][1]["step"] + s["outer"][0]


def in_tuple(x: Tensor, s: Any) -> Any:
    return x * s.options["lr"]


def taken_out(x: Tensor, s: Any) -> Any:
    """The body takes the number away, and puts it back under another name."""
    s["then"] = s.pop("step")
    result = x * s["then"]
    s["step"] = s.pop("then")
    return result


def kept(x: Tensor, s: Any) -> Any:
    """It shows in another place, too."""
    s["history"] = s["step"]
    return x + s["step"]


def told(x: Tensor, s: Any) -> tuple[Tensor, str]:
    return x * 2, f"step {s['step']}"


def given_back(x: Tensor, s: Any) -> tuple[Tensor, Any]:
    return x * s["step"], s["step"] + 1


def raising(x: Tensor, s: Any) -> Any:
    if s["step"] == 23:
        raise ValueError(s["step"])
    return x * s["step"]


def loss_kept(x: Tensor, s: Any) -> Any:
    loss = torch.relu(x @ W).mean()
    s["last"] = loss.item()
    s["step"] += 1
    return loss


def running_mean(x: Tensor, s: Any) -> Any:
    loss = torch.relu(x @ W).mean()
    s["step"] += 1
    s["lr"] += (loss.item() - s["lr"]) / s["step"]
    return loss


def best(x: Tensor, s: Any) -> Any:
    loss = torch.relu(x @ W).mean()
    value = loss.item()
    if value < s["lr"]:
        s["lr"] = value
    return loss


def spread(x: Tensor, s: Any) -> Any:
    def scaled(y: Tensor, step: int, lr: float) -> Tensor:
        return y * lr + step

    return scaled(x @ W, **s)


def counts(step: Any = 0, lr: float = 0.5) -> Callable[[], Any]:
    return lambda: {"step": step, "lr": lr}


def next_step(s: Any, call: int) -> None:
    s["step"] = call


def next_lr(s: Any, call: int) -> None:
    s["lr"] = 0.5 * math.cos(call / 7)


def next_position(s: Any, call: int) -> None:
    s.position = call


def nothing(s: Any, call: int) -> None:
    del s, call


Case = tuple[Callable[[Tensor, Any], Any], Callable[[], Any], Callable[[Any, int], None], int]
"""The body, what makes its container, what happens to that between calls, and how many of 40 calls replay."""
CASES: dict[str, Case] = {
    "used": (used, counts(), next_step, 30),
    "used, in an OrderedDict": (used, lambda: OrderedDict(step=0), next_step, 30),
    "used, in a defaultdict": (used, lambda: defaultdict(int), next_step, 30),
    "learning rate": (learning_rate, counts(), next_lr, 30),
    "two": (two, counts(), lambda s, call: s.update(step=call, lr=0.5 + call / 8), 28),
    "counted": (counted, counts(), nothing, 30),
    "only counted": (only_counted, counts(), nothing, 30),
    "every fourth": (every_fourth, counts(), nothing, 25),
    "warmed up": (warmed_up, counts(), next_step, 20),
    "decayed": (decayed, counts(), nothing, 25),
    "in a list": (in_list, lambda: [0, 2.5], nothing, 30),
    "attribute": (attribute, Slots, nothing, 30),
    "attribute of an object": (attribute, Plain, nothing, 30),
    "position": (position, Slots, next_position, 30),
    "position of an object": (position, Plain, next_position, 30),
    "nested": (nested, lambda: {"outer": [0.5, {"step": 0}]}, nothing, 30),
    "in a tuple": (in_tuple, lambda: Pair("a", {"lr": 0.5}), lambda s, call: next_lr(s.options, call), 30),
    "taken out": (taken_out, counts(), next_step, 0),
    "kept": (kept, counts(), next_step, 0),
    "told": (told, counts(), next_step, 0),
    "given back": (given_back, counts(), next_step, 25),
    "raising": (raising, counts(), next_step, 10),
    "loss kept": (loss_kept, lambda: {"step": 0, "last": 0.0}, nothing, 30),
    "running mean": (running_mean, counts(), nothing, 30),
    "best": (best, counts(lr=100.0), nothing, 20),
    "spread": (spread, counts(), next_step, 30),
}


def outcome(body: Callable[[Tensor, Any], Any], x: Tensor, s: Any) -> Any:
    try:
        return bits(body(x, s)), bits(state(s))
    except ValueError as error:
        return repr(error), bits(state(s))


def state(s: Any) -> Any:
    if isinstance(s, (Slots, Plain)):
        return [type(s.position), s.position, s.scale, s.last]
    return [s.name, dict(s.options)] if isinstance(s, Pair) else s


def inputs(call: int) -> Tensor:
    return torch.linspace(-1, 1 + call, 32, device=DEVICE).view(4, 8)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("which", ["the same", "a new one"])
@pytest.mark.parametrize("name", CASES)
def test_numbers_in_containers(name: str, which: str) -> None:
    body, make, between, replays = CASES[name]
    function, ours, theirs = capture(body), make(), make()
    with warnings.catch_warnings(), config.patch(drop_slow=False):
        warnings.simplefilter("ignore", CaptureWarning)
        for call in range(CALLS):
            if which == "a new one":
                ours, theirs = copy.deepcopy(ours), copy.deepcopy(theirs)
            for one in (ours, theirs):
                between(one, call)
            assert outcome(function, inputs(call), ours) == outcome(body, inputs(call), theirs), f"call {call}"
    counters = recordings(function)
    assert counters.replays >= replays, [(finding.code, finding.what) for finding in counters.findings]


def test_one_container_in_two_places() -> None:
    """What is counted in one place shows in the other, where that is the same container."""

    def body(x: Tensor, first: dict[str, int], second: dict[str, int]) -> Tensor:
        first["step"] += 1
        return x * second["step"]

    function = capture(body)
    with warnings.catch_warnings(), config.patch(drop_slow=False):
        warnings.simplefilter("ignore", CaptureWarning)
        for call in range(CALLS):
            alone = [({"step": call}, {"step": call + 3}) for _ in range(2)]
            joined = [({"step": call},) * 2 for _ in range(2)]
            for ours, theirs in (alone, joined):
                x = inputs(call)
                assert bits(function(x, *ours)) == bits(body(x, *theirs))
                assert ours == theirs
    assert recordings(function).replays >= 30


@pytest.mark.parametrize("given", ["by name", "by position"])
def test_in_keyword_arguments(given: str) -> None:
    def body(x: Tensor, *rest: Any, **options: Any) -> Any:
        return x * (rest[0]["step"] if rest else options["options"]["step"]) + options.get("bias", 0.5)

    function = capture(body)
    with warnings.catch_warnings(), config.patch(drop_slow=False):
        warnings.simplefilter("ignore", CaptureWarning)
        for call in range(CALLS):
            x, step = inputs(call), {"step": call}
            args, kwargs = ((step,), {}) if given == "by position" else ((), {"options": step, "bias": 1.5 + call})
            assert bits(function(x, *args, **kwargs)) == bits(body(x, *args, **kwargs))
    assert recordings(function).replays >= 28


def test_containers_of_another_form() -> None:
    """A place that is gone, or holds something else, is no number then, and the call is another one."""
    forms: list[Callable[[int], Any]] = [
        lambda call: {"step": call}, lambda call: {"step": float(call)}, lambda call: {"lr": call, "step": call},
        lambda call: {"step": call, "lr": call}, lambda call: {"step": torch.full((), call, device=DEVICE)},
        lambda call: {"step": call % 2 == 0}, lambda call: {"lr": call}, lambda call: [call], lambda call: None,
    ]  # fmt: skip

    def body(x: Tensor, s: Any) -> Any:
        if s is None:
            return x + 1
        return x * (s.get("step", 7) + 10 * s.get("lr", 0)) if isinstance(s, dict) else x * s[0]

    function = capture(body, max_recordings=32)
    with warnings.catch_warnings(), config.patch(drop_slow=False):
        warnings.simplefilter("ignore", CaptureWarning)
        for call in range(90):
            form = forms[call % len(forms) if call > 20 else 0]
            x = inputs(call)
            assert bits(function(x, form(call))) == bits(body(x, form(call))), call
