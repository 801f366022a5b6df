"""Arguments that need gradients, of functions that run backward passes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, capture, mark_step_begin, recordings
from tests.support.decorated import with_gradients as with_gradients
from tests.support.device import DEVICE

CALLS = 9
Body = Callable[[Any, nn.Parameter], Any]


def backward(x: Tensor, w: nn.Parameter) -> Tensor:
    loss = (x * w).square().mean()
    loss.backward()
    return loss.detach()


def forces(x: Tensor, w: nn.Parameter) -> tuple[Tensor, Tensor]:
    energy = (x * w).square().sum()
    (gradient,) = torch.autograd.grad(energy, x)
    return energy.detach(), -gradient


def forces_of_parts(parts: dict[str, Tensor], w: nn.Parameter) -> list[Tensor]:
    energy = (parts["a"] * w).square().sum() + (parts["b"] + w).exp().sum()
    return list(torch.autograd.grad(energy, [parts["a"], parts["b"]]))


def twice(parts: dict[str, Tensor], w: nn.Parameter) -> list[Tensor]:
    """A body that gets the same object in two places."""
    energy = (parts["a"] * w).sum() * (parts["c"] * w).sum()
    return list(torch.autograd.grad(energy, [parts["a"]]))


def hessian(x: Tensor, w: nn.Parameter) -> Tensor:
    energy = (x * w).pow(4).sum()
    (first,) = torch.autograd.grad(energy, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return second


def attack(x: Tensor, w: nn.Parameter) -> Tensor:
    mine = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad((mine * w).square().sum(), mine)
    return x.detach() + gradient.sign()


def switched_on(x: Tensor, w: nn.Parameter) -> Tensor:
    """A body that switches gradients on; it is called under ``no_grad``."""
    with torch.no_grad():
        before = x * 3
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad((x * w).square().sum(), x)
    return gradient + before


def penalised(x: Tensor, w: nn.Parameter) -> Tensor:
    """The result needs a gradient of a gradient, in a backward pass that the caller runs."""
    (gradient,) = torch.autograd.grad((x * w).pow(3).sum(), x, create_graph=True)
    return (x * w).square().mean() + gradient.square().mean()


def step_of_parameters(x: Tensor, w: nn.Parameter) -> Tensor:
    """A step that trains ``w`` alone: the argument is detached."""
    loss = (x.detach() * w).square().mean()
    loss.backward()
    return loss.detach()


BODIES: dict[str, Body] = {
    "backward": backward, "forces": forces, "forces of parts": forces_of_parts, "twice": twice, "hessian": hessian,
    "attack": attack, "switched on": switched_on, "penalised": penalised, "step of parameters": step_of_parameters,
}  # fmt: skip
RECORDED = ("backward", "forces", "forces of parts", "twice", "hessian", "attack", "switched on", "step of parameters")


def values(kind: str, turn: int, kept: dict[str, Tensor] | None) -> tuple[Any, dict[str, Tensor]]:
    """The argument of this turn, and its leaf tensors. ``kept``: leaves of an earlier turn to fill and use again."""
    generator = torch.Generator(device=DEVICE).manual_seed(turn)
    made = {name: torch.rand(4, 8, generator=generator, device=DEVICE).requires_grad_() for name in ("a", "b")}
    if kept is not None:
        with torch.no_grad():
            for name, leaf in kept.items():
                leaf.copy_(made[name])
        made = kept
    if kind in ("forces of parts", "twice"):
        return {**made, "c": made["a"]}, made
    return made["a"], made


@pytest.mark.one_in(18)
@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("how", ["copy", "bind", "static"])
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("before", ["nothing", "something", "now and then", "later"])
def test_gradients_of_arguments(kind: str, how: str, leaf: bool, before: str) -> None:
    """What is in ``.grad`` of an argument before the call is replaced, added to, or left alone, as in eager."""
    body = BODIES[kind]
    options: Any = {"static": ["x"]} if how == "static" and kind not in ("forces of parts", "twice") else {}
    options = {"inputs": how} if how != "static" else options
    weights = [nn.Parameter(torch.linspace(0.5, 1.5, 8, device=DEVICE)) for _ in range(2)]
    given = list[Any](), list[Any]()
    kept = [values(kind, 0, None)[1] if how == "static" else None for _ in range(2)]

    def ours_of(w: nn.Parameter) -> Any:
        return capture(lambda x: body(x, w), **options)

    runs: list[Any] = [lambda x: body(x, weights[0]), ours_of(weights[1])]
    for turn in range(CALLS):
        for number, (run, weight) in enumerate(zip(runs, weights, strict=True)):
            mark_step_begin()
            weight.grad = None
            x, leaves = values(kind, turn, kept[number])
            full = {"nothing": False, "something": True, "now and then": turn % 3 == 1, "later": turn > 5}[before]
            for leaf_tensor in leaves.values():
                leaf_tensor.grad = torch.ones_like(leaf_tensor) if full else None
            if not leaf:
                x = {name: tensor * 2 for name, tensor in x.items()} if isinstance(x, dict) else x * 2
                if isinstance(x, dict):
                    x["c"] = x["a"]
            result = run(x)
            if kind == "penalised":
                result.backward()
            results = result if isinstance(result, (list, tuple)) else [result]
            copies = [tensor.detach().clone() for tensor in results]
            left = [tensor.grad for tensor in (*leaves.values(), weight)]
            given[number].append((copies, [None if grad is None else grad.clone() for grad in left]))
    for theirs, ours in zip(*given, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    is_recorded = kind in RECORDED and (leaf or kind != "backward")  # else it goes on in the caller's graph
    if is_recorded and before == "nothing":
        counted = recordings(runs[1])
        assert counted.replays >= CALLS - 4, [(finding.code, finding.what) for finding in counted.findings]


def squares(x: Tensor) -> Tensor:
    return x * x


def squares_backward(x: Tensor) -> Tensor:
    loss = (x * x).sum()
    loss.backward()
    return loss.detach()


def squares_slope(x: Tensor) -> Tensor:
    return torch.autograd.grad((x * x).sum(), x)[0]


@pytest.mark.parametrize("body", [squares, squares_backward, squares_slope])
@pytest.mark.parametrize("leaf", [True, False])
def test_a_padded_run_leaves_no_gradient_on_the_callers_tensors(body: Callable[[Tensor], Tensor], leaf: bool) -> None:
    """Padded runs are undone, so they must not go on into the graph of what they were padded from."""
    function = capture(buckets={"x": {0: "pow2"}})(body)
    for number in range(16):
        ours, theirs = (torch.randn(3 + number % 5, 4, device=DEVICE).requires_grad_() for _ in range(2))
        with torch.no_grad():
            theirs.copy_(ours)
        mine, eager = (run(x if leaf else x * 2) for run, x in ((function, ours), (body, theirs)))
        assert torch.equal(mine, eager)
        if eager.requires_grad:
            mine.sum().backward()
            eager.sum().backward()
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            assert torch.equal(ours.grad, theirs.grad)


def test_a_gradient_left_on_a_padded_argument_is_told() -> None:
    function = capture(buckets={"x": {0: "pow2"}})(squares_backward)
    with pytest.warns(CaptureWarning, match=r"CG502.*'x\.grad'"):
        function(torch.ones(5, 4, device=DEVICE, requires_grad=True))
