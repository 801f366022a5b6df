"""What a random program does: calls, writes, replacements, settings. ``ACTIONS`` weighs them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import nn

from capture import (
    CaptureError,
    config,
    explain,
    mark_step_begin,
    release,
    reset,
    warmup,
)
from capture.tree import thread_trees as thread_trees  # fmt: skip
from tests.generated.comparison import Arguments, tensors_of
from tests.generated.worlds import Body, Boom, Entry, World, fresh


@frozen
class Program:
    """A program as integers. ``cast``: entries of the catalogue, then ``bodies``; a step is (action, target, form,
    seed)."""

    cast: tuple[int, ...]
    steps: tuple[tuple[int, int, int, int], ...]
    bodies: tuple[Body, ...] = ()
    poison: bool = False
    marks: bool = False
    verify: bool = False
    rounds: int = 1
    """How often all steps are done, with other values and other results held."""
    bind: bool = False
    """Captured with ``inputs="bind"``."""


Act = Callable[[World, int, int, int], Any]
HELD_LIMIT = 6


def call(w: World, target: int, form: int, seed: int) -> Any:
    """Call a function; hold its result, a view of it, or nothing."""
    one, function = w.cast[target % len(w.cast)]
    arguments = Arguments(w, form, seed).pick(one.spec)
    return _called(w, one, function, arguments, seed)


def _called(w: World, one: Entry, function: Callable[..., Any], arguments: tuple[Any, ...], seed: int) -> Any:
    w.scratch.append(("arguments", list(arguments)))
    result = function(*arguments)
    if not one.borrow and seed % 8 in (5, 6, 7):
        tensors = tensors_of(result)
        w.held.append(tensors[0][..., :1] if seed % 8 == 7 and tensors and tensors[0].dim() else result)
        del w.held[:-HELD_LIMIT]
    return result


def chained(w: World, target: int, form: int, seed: int) -> Any:
    """A function of another one's output, dropped or held."""
    body, function = w.cast[target % len(w.cast)]
    then, consumer = w.cast[(target + form) % len(w.cast)]
    if body.borrow or then.spec[0] not in "mra":
        return call(w, target, form, seed)
    result = function(*Arguments(w, form, seed).pick(body.spec))
    fitting = [t for t in tensors_of(result) if t.dtype is torch.float32 and t.shape == (4, 4)]
    if not fitting:
        return result
    if form % 3 == 0:
        w.scratch.append(("middle", result))
    torch.clear_autocast_cache()
    arguments = Arguments(w, form // 8, seed + 1, first=fitting[seed % len(fitting)]).pick(then.spec)
    del result, fitting
    return _called(w, then, consumer, arguments, seed)


def looped(w: World, target: int, form: int, seed: int) -> Any:
    """``h = f(h)`` a few times."""
    body, function = w.cast[target % len(w.cast)]
    if body.borrow or body.spec[0] not in "mra":
        return call(w, target, form, seed)
    h = fresh((4, 4), seed=seed)
    for turn in range(2 + seed % 3):
        torch.clear_autocast_cache()
        result = function(*Arguments(w, form, seed + turn, first=h).pick(body.spec))
        fitting = [t for t in tensors_of(result) if t.dtype is torch.float32 and t.shape == (4, 4)]
        del result
        if not fitting:
            break
        h = fitting[0]
        del fitting
    return h


def drop(w: World, target: int, form: int, seed: int) -> None:
    """Forget something held."""
    if w.held:
        del w.held[target % len(w.held)]


def view(w: World, target: int, form: int, seed: int) -> None:
    """Hold a view of a held tensor, instead of it or beside it."""
    tensors = [tensor for tensor in tensors_of(w.held) if tensor.dim()]
    if tensors:
        tensor = tensors[target % len(tensors)]
        w.held.append((tensor[:1], tensor.transpose(0, -1), tensor.detach())[form % 3])
        del w.held[:-HELD_LIMIT]


def write(w: World, target: int, form: int, seed: int) -> None:
    """Write in place to any tensor that the caller can reach."""
    modules = [p for m in w.modules for p in (*m.parameters(), *m.buffers())]
    caches = [tensor for cache in w.caches for tensor in cache.values()]
    reachable = [*tensors_of(w.held), *w.tensors, *w.statics, *caches, *modules]
    tensor = reachable[(target + 8 * form) % len(reachable)]
    if tensor.dtype is torch.bool:
        tensor.logical_not_()
    elif form % 2 and tensor.dim():
        tensor[:1] = seed
    else:
        tensor.mul_(2).add_(seed % 5)


def replace_tensor(w: World, target: int, form: int, seed: int) -> None:
    """Put another tensor where the caller has one."""
    (w.tensors if form % 2 else w.statics)[target % 2] = fresh((4, 4), seed=seed)
    if form % 8 == 0:
        w.caches[target % 2]["k"] = fresh((4, 4), seed=seed)


def replace_parameter(w: World, target: int, form: int, seed: int) -> None:
    """Replace a module's parameter or buffer in one of the ways there are."""
    if not w.modules:
        return replace_tensor(w, target, form, seed)
    net = w.modules[target % len(w.modules)]
    member = [m for m in net.modules() if m._parameters or m._buffers][seed % 2 :: 2] or [net]
    table = member[0]._parameters or member[0]._buffers
    name, old = next(iter(table.items()), (None, None))
    if name is None or old is None:
        return None
    new = fresh(tuple(old.shape), old.dtype, seed)
    way = form % 8
    if way == 0:
        setattr(member[0], name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
    elif way == 1:
        old.data = new
    elif way in (2, 3):
        copied = {
            key: value.clone() * 0.5 if value.is_floating_point() else value.clone()
            for key, value in net.state_dict().items()
        }
        net.load_state_dict(copied, assign=way == 2)
    elif way == 4:
        net.to(torch.float64)
    elif way in (5, 6):
        net.to(torch.float32)
    elif isinstance(old, nn.Parameter):
        old.requires_grad_(not old.requires_grad)
    return None


def train(w: World, target: int, form: int, seed: int) -> None:
    """Switch a module, or a part of it, between training and evaluation."""
    if w.modules:
        parts = list(w.modules[target % len(w.modules)].modules())
        parts[form % len(parts)].train(bool(seed % 2))


def turn_knob(w: World, target: int, form: int, seed: int) -> None:
    """Change a Python value or a tensor that some body names."""
    if w.knobs:
        w.knobs[target % len(w.knobs)](seed)


def modes(w: World, target: int, form: int, seed: int) -> None:
    """Switch autocast, the default dtype, or how gradients are handled."""
    if target % 4 == 0:
        w.autocast = not w.autocast
    elif target % 4 == 1:
        w.default = torch.float64 if w.default is torch.float32 else torch.float32
    else:
        w.gradients = form % 3


def reseed(w: World, target: int, form: int, seed: int) -> None:
    """Seed a generator."""
    if target % 2:
        torch.manual_seed(seed)
    else:
        w.generators[form % 2].manual_seed(seed)


def disabled(w: World, target: int, form: int, seed: int) -> Any:
    """Make a call while capturing is switched off."""
    with config.patch(enabled=False):
        return call(w, target, form, seed)


def collect(w: World, target: int, form: int, seed: int) -> None:
    """Collect garbage."""
    if w.captured:
        gc.collect()


def mark(w: World, target: int, form: int, seed: int) -> None:
    """Begin a new step."""
    if w.captured:
        mark_step_begin()


def forget(w: World, target: int, form: int, seed: int) -> None:
    """Call ``reset`` or ``release`` for one function or all."""
    if w.captured and w.decorated:
        one = w.decorated[target % len(w.decorated)] if form % 4 else None
        (reset if seed % 2 else release)(one)


def without_trace(w: World, target: int, form: int, seed: int) -> None:
    """Call ``explain`` or ``warmup``: neither changes anything, whatever the body does."""
    body, function = w.cast[target % len(w.cast)]
    arguments = Arguments(w, form, seed).pick(body.spec)
    w.scratch.append(("arguments", list(arguments)))
    if w.captured and any(function is decorated for decorated in w.decorated):
        try:
            (explain if seed % 2 else warmup)(function)(*arguments)
        except CaptureError:
            raise
        except (Boom, RuntimeError, ValueError):
            pass


ACTIONS: dict[str, tuple[int, Act]] = {
    "call": (12, call),
    "burst": (12, call),
    "chained": (6, chained),
    "looped": (3, looped),
    "drop": (3, drop),
    "view": (2, view),
    "write": (4, write),
    "replace_tensor": (2, replace_tensor),
    "replace_parameter": (3, replace_parameter),
    "train": (2, train),
    "turn_knob": (3, turn_knob),
    "modes": (2, modes),
    "reseed": (1, reseed),
    "collect": (1, collect),
    "mark": (4, mark),
    "forget": (1, forget),
    "without_trace": (2, without_trace),
    "borrow": (1, call),
    "disabled": (1, disabled),
}
DECK: tuple[str, ...] = tuple(name for name, (weight, _) in ACTIONS.items() for _ in range(weight))
