"""Small programs that train and keep outputs and gradients of captured functions; see ``held_programs``."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.held_programs import CALLS, SIZE, Cap, Net, Said, net_of, of


def a_region_whose_outputs_are_kept(cap: Cap, said: Said) -> None:
    net, run = net_of(cap)
    for number in range(CALLS):
        y = run(of(number))
        y.square().mean().backward()
        said.hold(y.detach(), net.last, net.state)
        said.see(*[parameter.grad for parameter in net.parameters()])
        if number % 3:
            net.zero_grad()


def backward_passes_later(cap: Cap, said: Said) -> None:
    net, run = net_of(cap)
    losses: list[Tensor] = []
    for number in range(CALLS):
        losses.append(run(of(number)).square().mean())
        if number % 3 == 2:
            for loss in (losses[1], losses[0], losses[2]):
                loss.backward()
                said.see(*[parameter.grad for parameter in net.parameters()])
            said.hold(*[loss.detach() for loss in losses])
            losses.clear()


def gradients_kept(cap: Cap, said: Said) -> None:
    net, run = net_of(cap)
    for number in range(CALLS):
        run(of(number)).square().mean().backward()
        said.hold(*[parameter.grad for parameter in net.parameters()])
        net.zero_grad(set_to_none=number % 3 != 1)
    said.held = [value for value in said.held if isinstance(value, Tensor)]


def gradients_accumulated(cap: Cap, said: Said) -> None:
    net, run = net_of(cap, gradients="accumulate")
    for number in range(2 * CALLS):
        run(of(number)).square().mean().backward()
        if number % 4 == 1:
            said.hold(*[parameter.grad.detach() for parameter in net.parameters() if parameter.grad is not None])
        said.see(*[parameter.grad for parameter in net.parameters()])
        if number % 4 == 3:
            net.zero_grad()


def a_graph_kept(cap: Cap, said: Said) -> None:
    net, run = net_of(cap)
    kept = []
    for number in range(CALLS):
        y = run(of(number))
        y.sum().backward(retain_graph=True)
        kept.append(y)
        if number % 2:
            (kept[number // 2] * 2).sum().backward(retain_graph=True)
        said.see(*[parameter.grad for parameter in net.parameters()])
    said.hold(*[y.detach() for y in kept])


def outputs_of_regions_as_inputs(cap: Cap, said: Said) -> None:
    (first, f), (second, g) = net_of(cap), net_of(cap)
    hidden = torch.zeros(3, SIZE)
    for number in range(CALLS):
        y = f(of(number) + hidden)
        z = g(y)
        z.square().sum().backward()
        hidden = z.detach() if number % 2 else y.detach()
        said.see(*[parameter.grad for net in (first, second) for parameter in net.parameters()])
        said.hold(hidden, first.last, second.state)


def backward_through_time(cap: Cap, said: Said) -> None:
    net, run = net_of(cap)
    for number in range(4):
        h = of(number)
        states = [h]
        for _ in range(4):
            h = run(h) * 0.5
            states.append(h)
        sum(state.sum() for state in states).backward()  # type: ignore[union-attr]
        said.hold(*[state.detach() for state in states])
        said.see(*[parameter.grad for parameter in net.parameters()])


def whole_steps(cap: Cap, said: Said) -> None:
    net = Net().to(torch.get_default_device())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = cap(step)
    for number in range(2 * CALLS):
        said.hold(run(of(number)))
        if number % 4 == 1:
            said.hold(net.linear.weight.grad, net.last)
        said.see(*net.parameters(), *[parameter.grad for parameter in net.parameters()])


def evaluated_between_steps(cap: Cap, said: Said) -> None:
    net, run = net_of(cap)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(CALLS):
        loss = run(of(number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            said.hold(run(of(number + 1)))
        said.hold(loss.detach(), net.state)


def gradients_of_inputs(cap: Cap, said: Said) -> None:
    _, run = net_of(cap)
    for number in range(CALLS):
        x = of(number).requires_grad_()
        y = run(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        said.hold(gradient, y.detach())
        y.detach_().add_(1)


def exceptions_between_passes(cap: Cap, said: Said) -> None:
    net, run = net_of(cap)
    for number in range(CALLS):
        y = run(of(number))
        try:
            if number % 3 == 1:
                run(of(number, 3, SIZE + 1))
        except RuntimeError:
            said.see("raised")
        y.square().sum().backward()
        said.hold(y.detach(), net.last)
        said.see(*[parameter.grad for parameter in net.parameters()])


WITH_GRADIENTS = [
    a_region_whose_outputs_are_kept, backward_passes_later, gradients_kept, gradients_accumulated, a_graph_kept,
    outputs_of_regions_as_inputs, backward_through_time, whole_steps, evaluated_between_steps, gradients_of_inputs,
    exceptions_between_passes,
]  # fmt: skip
