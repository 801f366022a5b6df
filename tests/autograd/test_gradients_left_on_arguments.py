"""Bodies whose own backward pass leaves gradients on arguments, or adds to those that are there, are replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings
from tests.support.decorated import with_gradients as with_gradients
from tests.support.device import DEVICE

CALLS = 18


def made(*shape: int, number: int) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(number)
    return torch.randn(*shape, generator=generator, device=DEVICE)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(made(3, 5, number=1))
        self.v = nn.Parameter(made(5, 1, number=2))
        self.kept: Any = None

    @override
    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = torch.tanh(x @ self.w) @ self.v
        return value


Body = Callable[[Net, torch.optim.Optimizer, Any], Any]


def saliency(net: Net, _: torch.optim.Optimizer, x: Tensor) -> Any:
    net(x).sum().backward()
    assert x.grad is not None
    return x.grad.abs().amax(1)


def attack(net: Net, _: torch.optim.Optimizer, x: Tensor) -> Any:
    """One step of a descent on the input, which is written in place."""
    if x.grad is not None:
        x.grad.zero_()
    loss = net(x).square().mean()
    loss.backward()
    with torch.no_grad():
        assert x.grad is not None
        x -= 0.1 * x.grad.sign()
    return loss.detach()


def anew(net: Net, _: torch.optim.Optimizer, x: Tensor) -> Any:
    x.grad = None
    loss = net(x).square().mean()
    loss.backward()
    return loss.detach()


def taken_away(net: Net, _: torch.optim.Optimizer, x: Tensor) -> Any:
    net(x).square().mean().backward()
    assert x.grad is not None
    result, x.grad = x.grad * 2, None
    return result


def several_times(net: Net, _: torch.optim.Optimizer, x: Tensor) -> Any:
    for factor in (1.0, 2.0, 3.0):
        net(x * factor).square().mean().backward()
    assert x.grad is not None
    return x.grad.norm()


def required_inside(net: Net, _: torch.optim.Optimizer, x: Tensor) -> Any:
    x.requires_grad_()
    net.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    return loss.detach()


def physics(net: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
    """A step on the residual of an equation: it needs derivatives in space, and leaves ``x.grad`` by the way."""
    x.requires_grad_()
    u = net(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    loss = (slope.square().sum(1) + u[:, 0].square()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def in_dict(net: Net, _: torch.optim.Optimizer, batch: dict[str, Any]) -> Any:
    energy = net(batch["pos"]).sum() * batch["scale"]
    energy.backward()
    return torch.neg(batch["pos"].grad)


@frozen(eq=False)
class Frame:
    positions: Tensor
    cell: Tensor


def in_object(net: Net, _: torch.optim.Optimizer, frame: Frame) -> Any:
    energy = (net(frame.positions) * frame.cell.sum()).sum()
    energy.backward()
    assert frame.positions.grad is not None
    assert frame.cell.grad is not None
    return frame.positions.grad + frame.cell.grad.sum()


def by_hand(_: Net, __: torch.optim.Optimizer, weights: list[Tensor]) -> Any:
    """Training without modules: weights are arguments."""
    w, b, x = weights
    loss = (torch.tanh(x @ w) + b).square().mean()
    loss.backward()
    with torch.no_grad():
        for weight in (w, b):
            assert weight.grad is not None
            weight -= 0.05 * weight.grad
            weight.grad.zero_()
    return loss.detach()


def twice_the_same(net: Net, _: torch.optim.Optimizer, pair: list[Tensor]) -> Any:
    """The same object in two places has one gradient."""
    (net(pair[0]) * net(pair[1] + 1)).sum().backward()
    assert pair[0].grad is pair[1].grad
    assert pair[0].grad is not None
    return pair[0].grad * 1


def kept_elsewhere(net: Net, _: torch.optim.Optimizer, x: Tensor) -> Any:
    """The gradient is known to the module, too."""
    loss = net(x).square().mean()
    loss.backward()
    net.kept = x.grad
    return loss.detach()


def plain(shape: tuple[int, ...] = (4, 3), *, asks: bool = True) -> Callable[[int], Any]:
    return lambda number: made(*shape, number=number).requires_grad_(asks)


def pair(number: int) -> list[Tensor]:
    x = made(4, 3, number=number).requires_grad_()
    return [x, x]


BODIES: dict[str, tuple[Body, Callable[[int], Any]]] = {
    "saliency": (saliency, plain()),
    "attack": (attack, plain()),
    "anew": (anew, plain()),
    "taken away": (taken_away, plain()),
    "several times": (several_times, plain()),
    "required inside": (required_inside, plain(asks=False)),
    "physics": (physics, plain(asks=False)),
    "in a dict": (in_dict, lambda number: {"pos": plain()(number), "scale": 2.0}),
    "in an object": (in_object, lambda number: Frame(plain()(number), plain((3, 3))(number + 1))),
    "by hand": (by_hand, lambda number: [plain((3, 5))(number), plain((5,))(number), made(4, 3, number=number)]),
    "twice the same": (twice_the_same, pair),
    "kept elsewhere": (kept_elsewhere, plain()),
}  # fmt: skip
EAGER = {("kept elsewhere", "same"), ("kept elsewhere", "in turn"), ("kept elsewhere", "new, with some")}
"""What is written in one place shows in another, which no copy does (CG103)."""
if (
    DEVICE.type == "cuda"
):  # a capture runs nodes that a backward pass made in another order than eager's threads (CG206)
    EAGER |= {("physics", which) for which in ("new", "same", "in turn", "new, with some")}


def tensors_in(value: Any) -> list[Tensor]:
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    if isinstance(value, Frame):
        members = [value.positions, value.cell]
    if members is None:
        return [value] if isinstance(value, Tensor) else []
    return [tensor for member in members for tensor in tensors_in(member)]


def state_of(tensors: list[Tensor]) -> list[Any]:
    return [
        (one.detach().clone(), one.requires_grad, one._version, None if one.grad is None else one.grad.clone())
        for one in tensors
    ]


def arguments_of(make: Callable[[int], Any], which: str) -> Iterator[Any]:
    known = [make(number) for number in range(3)]
    for call in range(CALLS):
        value = known[0] if which == "same" else known[call % 3] if which == "in turn" else make(call)
        if which == "new, with some" and call % 3:
            for tensor in tensors_in(value):
                tensor.grad = torch.ones_like(tensor) if tensor.requires_grad else None
        yield value


def run(name: str, which: str, optimizer: str, *, captured: bool, **options: Any) -> tuple[list[Any], Any]:
    body, make = BODIES[name]
    net = Net().to(DEVICE)
    updates = getattr(torch.optim, optimizer)(net.parameters(), lr=0.01)

    def call(x: Any) -> Any:
        return body(net, updates, x)

    function = capture(call, **options) if captured else call
    seen, kept = list[Any](), list[Tensor]()
    for value in arguments_of(make, which):
        result = function(value)
        kept += tensors_in(value)
        seen.append((state_of([result]), state_of(tensors_in(value)), state_of([*net.parameters()])))
    seen.append((state_of(kept),))
    return seen, function


@pytest.mark.one_in(6)
@pytest.mark.parametrize("which", ["new", "same", "in turn", "new, with some"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("how", ["copy", "bind"])
@pytest.mark.parametrize("name", BODIES)
def test_what_is_left_on_arguments(name: str, how: str, optimizer: str, which: str) -> None:
    theirs, _ = run(name, which, optimizer, captured=False)
    ours, function = run(name, which, optimizer, captured=True, inputs=how)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    counted = recordings(function)
    if (name, which) not in EAGER:
        assert counted.replays >= 5, [(finding.code, finding.what) for finding in counted.findings]
