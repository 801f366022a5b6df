"""Bodies that switch what their arguments need: the caller sees it, and gradients go there or not, as in eager code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, explain, recordings
from capture.core.findings import Severity
from tests.support.regions import bits

STEPS = 8
pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # told once, where it is eager
Net = Callable[[Tensor], Tensor]
Body = Callable[[Net, Tensor], Tensor]


def switched_on(net: Net, x: Tensor) -> Tensor:
    """As energy models do, which differentiate for their input."""
    return net(x.requires_grad_())


def on_in_a_dict(net: Net, x: Tensor) -> Tensor:
    batch = {"x": x}
    batch["x"].requires_grad = True
    return net(batch["x"])


def differentiated(net: Net, x: Tensor) -> Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return gradient


def on_and_off(net: Net, x: Tensor) -> Tensor:
    y = net(x.requires_grad_())
    x.requires_grad_(False)
    return y


def switched_off(net: Net, x: Tensor) -> Tensor:
    x.requires_grad_(False)
    return net(x)


def off_at_the_end(net: Net, x: Tensor) -> Tensor:
    y = net(x)
    x.requires_grad_(False)
    return y


def detached_in_place(net: Net, x: Tensor) -> Tensor:
    return net(x.detach_())


def off_and_on(net: Net, x: Tensor) -> Tensor:
    x.requires_grad_(False)
    y = net(x)
    x.requires_grad_()
    return y


BODIES = [switched_on, on_in_a_dict, differentiated, on_and_off, switched_off, off_at_the_end]


class Layer(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.body = body

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.net, x)


def log_of(layer: nn.Module, *, needed: bool, trained: bool) -> list[object]:
    """What a caller sees of each call, with or without a backward pass after it."""
    log: list[object] = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(4, 3).requires_grad_(needed)
        y = layer(x)
        if trained and y.requires_grad:
            y.square().mean().backward()
        log += [bits(y), y.requires_grad, x.requires_grad, x.is_leaf, bits(x.grad)]
        for parameter in layer.parameters():
            log.append(bits(parameter.grad))
            parameter.grad = None
    return log


def layer_of(body: Body, *, frozen: bool) -> Layer:
    torch.manual_seed(1)
    return Layer(body).requires_grad_(not frozen)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "called"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("needed", [False, True], ids=["needs none", "needs one"])
@pytest.mark.parametrize("body", [*BODIES, detached_in_place, off_and_on])
def test_as_in_eager(body: Body, needed: bool, frozen: bool, trained: bool) -> None:
    eager = log_of(layer_of(body, frozen=frozen), needed=needed, trained=trained)
    ours = log_of(capture(layer_of(body, frozen=frozen)), needed=needed, trained=trained)
    assert ours == eager


def test_a_computed_argument_that_is_detached() -> None:
    logs = []
    for layer in (layer_of(detached_in_place, frozen=False), capture(layer_of(detached_in_place, frozen=False))):
        log: list[object] = []
        for step in range(STEPS):
            torch.manual_seed(step)
            leaf = torch.randn(4, 3, requires_grad=True)
            x = leaf * 2
            layer(x).sum().backward()
            log += [x.requires_grad, x.is_leaf, bits(leaf.grad)]
        logs.append(log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("stays", [False, True], ids=["for the call", "from now on"])
def test_a_buffer_that_needs_gradients_for_a_while(stays: bool, frozen: bool) -> None:
    class Scaled(Layer):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__(lambda net, x: net(x))
            self.register_buffer("scale", torch.ones(1))

        @override
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) * self.scale.requires_grad_()
            self.scale.requires_grad_(stays)
            return y

    logs = []
    for wrapped in (False, True):
        torch.manual_seed(1)
        layer = Scaled().requires_grad_(not frozen)
        called, log = capture(layer) if wrapped else layer, list[object]()
        for step in range(STEPS):
            torch.manual_seed(step)
            y = called(torch.randn(4, 3))
            if y.requires_grad:
                y.sum().backward()
            log += [bits(y), y.requires_grad, layer.scale.requires_grad, bits(layer.scale.grad)]
            if step % 3 == 2:
                layer.scale = torch.ones(1)
        logs.append(log)
    assert logs[0] == logs[1]


def test_the_finding_names_the_argument() -> None:
    layer = capture(layer_of(switched_on, frozen=False))
    found = [finding for finding in explain(layer)(torch.randn(4, 3)).findings if finding.code == "CG501"]
    assert [finding.severity for finding in found] == [Severity.EAGER]
    assert "x.requires_grad is changed by the body" in found[0].what


def test_without_a_graph_it_is_still_replayed() -> None:
    layer = layer_of(lambda net, x: net(x.requires_grad_()).detach(), frozen=False)

    @capture
    def run(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        return y

    for _ in range(STEPS):
        x = torch.randn(4, 3)
        run(x)
        assert x.requires_grad
    assert recordings(run).replays
