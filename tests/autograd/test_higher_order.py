"""Gradients of gradients through captured functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import CaptureWarning, capture, config, recordings
from tests.support.device import DEVICE
from tests.support.regions import Block, Several, assert_same_sums, bits, captured_twins, inputs, kept
from tests.support.regions import fresh as fresh


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore the warning that calls run eagerly afterwards, which another test checks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


def penalty(module: Any, x: Tensor, parameters: list[Tensor]) -> list[Any]:
    """A gradient penalty as in WGAN-GP."""
    for one in parameters:
        one.grad = None
    leaf = x.clone().requires_grad_()
    (d,) = torch.autograd.grad(module(leaf).sum(), leaf, create_graph=True)
    ((d.norm(dim=-1) - 1) ** 2).mean().backward()
    return [d, leaf.grad, *[one.grad for one in parameters]]


def of_an_inner_tensor(module: Any, x: Tensor, parameters: list[Tensor]) -> list[Any]:
    """Gradients of a gradient of the module's input, where that input is no leaf."""
    leaf = x.clone().requires_grad_()
    h = torch.sin(leaf)
    (d,) = torch.autograd.grad(module(h * 2).sum(), h, create_graph=True)
    return [d, *torch.autograd.grad(d.square().sum(), [leaf, *parameters], allow_unused=True)]


def weighted(module: Any, x: Tensor, parameters: list[Tensor]) -> list[Any]:
    """Differentiate by the incoming gradient as well, which is forward mode by two backward passes."""
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    v = torch.ones_like(y, requires_grad=True)
    (d,) = torch.autograd.grad(y, leaf, v, create_graph=True)
    return [d, *torch.autograd.grad(d, v, torch.cos(d.detach()))]


def of_parameters(module: Any, x: Tensor, parameters: list[Tensor]) -> list[Any]:
    """A Hessian times a vector."""
    grads = torch.autograd.grad(module(x).square().sum(), parameters, create_graph=True)
    product = sum(((grad * grad.detach()).sum() for grad in grads), torch.zeros((), device=x.device))
    return [*grads, *torch.autograd.grad(product, parameters, allow_unused=True)]


def third(module: Any, x: Tensor, parameters: list[Tensor]) -> list[Any]:
    leaf = x.clone().requires_grad_()
    (d,) = torch.autograd.grad(module(leaf).sum(), leaf, create_graph=True)
    (e,) = torch.autograd.grad(d.square().sum(), leaf, create_graph=True)
    return [d, e, *torch.autograd.grad(e.cos().sum(), [leaf, *parameters], allow_unused=True)]


def accumulated(module: Any, x: Tensor, parameters: list[Tensor]) -> list[Any]:
    """Differentiate gradients that ``backward`` put into ``.grad`` with a graph of their own."""
    leaf = x.clone().requires_grad_()
    module(leaf).square().sum().backward(create_graph=True)
    grads = [parameter.grad for parameter in parameters]
    total = sum((grad.square().sum() for grad in grads if grad is not None), torch.zeros((), device=x.device))
    for parameter in parameters:
        parameter.grad = None
    return [leaf.grad, *grads, *torch.autograd.grad(total, [leaf, *parameters], allow_unused=True)]


def repeated(module: Any, x: Tensor, parameters: list[Tensor]) -> list[Any]:
    """Second derivatives taken twice through the same graphs."""
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    (d,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    loss = d.square().sum()
    first = torch.autograd.grad(loss, leaf, retain_graph=True)
    second = torch.autograd.grad(loss, leaf)
    return [*first, *second]


USES: dict[str, Callable[[Any, Tensor, list[Tensor]], list[Any]]] = {
    one.__name__: one for one in (penalty, of_an_inner_tensor, weighted, of_parameters, third, accumulated, repeated)
}


class Plain(nn.Module):
    """The first operator is an addition, so that no node saves the input."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.l(x + 1)) * 3
        return y


class Flat(nn.Module):
    """The graph saves a view of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(24, 5)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.l(x.flatten()))


class Drawing(nn.Module):
    """A module with dropout: the graph keeps the mask that was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(torch.tanh(self.l(x))) * x
        return y


class Cubed(torch.autograd.Function):
    """A user's function whose backward pass has a graph of its own."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x.square()


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    @override
    def forward(self, x: Tensor) -> Tensor:
        cubed: Tensor = Cubed.apply(self.l(x))  # type: ignore[no-untyped-call]
        return cubed


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.n = nn.Conv1d(1, 3, 3), nn.GroupNorm(1, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.silu(self.n(self.c(x[:, None])))
        return y


MODULES: dict[str, Callable[[], nn.Module]] = {
    one.__name__: one for one in (Block, Plain, Flat, Drawing, WithFunction, Convolution)
}


def compared(use: Any, mine: Any, theirs: Any, number: int) -> None:
    found = []
    for one, enabled in ((theirs, False), (mine, True)):
        torch.manual_seed(number)
        with config.patch(enabled=enabled):
            found.append([kept(each) for each in use(one.m[0], inputs(number), list(one.m[0].parameters()))])
        one.zero_grad()
    assert_same_sums(*found)


def trained(module: Any, number: int) -> None:
    torch.manual_seed(number)
    x = inputs(number).requires_grad_()
    module(x.clone()).square().sum().backward()
    module(x).square().sum().backward()
    module(inputs(number)).sum().backward()
    module.zero_grad()


CASES = [(use, module, 5) for use in USES for module in MODULES]  # after 5 calls it is replayed
CASES += [(use, "Plain", before) for use in USES for before in (0, 1)]


@pytest.mark.one_in(18)
@pytest.mark.parametrize(("use", "module", "before"), CASES)
def test_as_in_eager(use: str, module: str, before: int) -> None:
    mine, theirs = captured_twins(MODULES[module])
    for number in range(before):
        for model in (mine, theirs):
            trained(model.m[0], number)
    if use != "third" or not before:
        compared(USES[use], mine, theirs, 7)
    else:  # the first time sums of the third order are added in another order
        my_values, their_values = ([*use_of(model)] for model in (mine, theirs))
        for a, b in zip(my_values, their_values, strict=True):
            torch.testing.assert_close(a, b)
    compared(USES[use], mine, theirs, 8)


def use_of(model: Any) -> list[Any]:
    torch.manual_seed(7)
    return third(model.m[0], inputs(7), list(model.m[0].parameters()))


def test_several_results_and_one_of_them_used() -> None:
    for before in (0, 1, 5):
        mine, theirs = captured_twins(Several)
        for number in range(before):
            for model in (mine, theirs):
                model.m[0](inputs(number).requires_grad_())["one"].sum().backward()

        def use(module: Any, x: Tensor, parameters: list[Tensor]) -> list[Any]:
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            (d,) = torch.autograd.grad(y["more"][0].sum(), leaf, create_graph=True)
            return [d, *torch.autograd.grad(d.square().sum(), [leaf, *parameters], allow_unused=True)]

        compared(use, mine, theirs, 7)


def test_that_calls_are_eager_from_then_on_is_told_once() -> None:
    mine, theirs = captured_twins(Plain)
    for number in range(5):
        trained(mine.m[0], number)
    assert recordings(mine.m[0]).replays > 0
    compared(penalty, mine, theirs, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CaptureWarning)
        for number in range(4):
            compared(penalty, mine, theirs, number)
    assert len(told) == 1
    assert "gradients of its gradients are asked for" in str(told[0].message)
    assert recordings(mine.m[0]).eager_calls == 4


def test_other_keys_go_on_being_replayed() -> None:
    """A second derivative for inputs of one shape, as in a GAN's critic, leaves replays of another shape as they
    are."""
    mine, theirs = captured_twins(Plain)
    for number in range(10):
        values = []
        for model, enabled in ((theirs, False), (mine, True)):
            with config.patch(enabled=enabled):
                made = penalty(model.m[0], inputs(number), list(model.m[0].parameters()))
                model.m[0](inputs(number, 8, 6)).sum().backward()
            values.append([bits(tensor) for tensor in (*made, *[p.grad for p in model.parameters()])])
        assert values[0] == values[1]
    assert recordings(mine.m[0]).replays >= 10


def test_the_penalty_in_every_fourth_step_beside_the_loss() -> None:
    """Loss and penalty use one forward call. Sums are added in eager's order from the second penalty on."""
    mine, theirs = captured_twins(Block)

    def step(module: Any, number: int) -> list[Any]:
        module.zero_grad()
        x = inputs(number).requires_grad_()
        y = module(x)
        loss = y.square().mean()
        if number % 4 == 0:
            (d,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = loss + d.square().mean()
        loss.backward()
        return [loss, x.grad, *[p.grad for p in module.parameters()]]

    for number in range(12):
        assert [bits(tensor) for tensor in step(mine.m[0], number)] == [
            bits(tensor) for tensor in step(theirs.m[0], number)
        ]


def test_a_write_to_what_was_saved_raises_as_in_eager() -> None:
    for before in (0, 1, 5):
        for captures in (False, True):
            module = nn.Linear(6, 6).to(DEVICE)
            f = capture(lambda x: torch.tanh(module(x))) if captures else lambda x: torch.tanh(module(x))  # noqa: B023
            for number in range(before):
                f(inputs(number).requires_grad_()).sum().backward()
            x = inputs(3).requires_grad_()
            (d,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
            with torch.no_grad():
                module.weight.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                d.sum().backward()


def test_a_freed_graph_raises_as_in_eager() -> None:
    for captures in (False, True):
        module = nn.Linear(6, 6).to(DEVICE)
        f = capture(lambda x: torch.tanh(module(x))) if captures else lambda x: torch.tanh(module(x))  # noqa: B023
        for number in range(4):
            f(inputs(number).requires_grad_()).sum().backward()
        x = inputs(3).requires_grad_()
        (d,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        d.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            d.sum().backward()


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("before", [0, 4])
def test_functional_jacobians_and_hessians(before: int, vectorize: bool) -> None:
    def body(x: Tensor) -> Tensor:
        return torch.sin(x) * x.square()

    f = capture(body)
    for number in range(before):
        f(inputs(number, 5).requires_grad_()).sum().backward()
    x = inputs(3, 5)
    of = torch.autograd.functional
    for _ in range(3):
        assert bits(of.jacobian(f, x, vectorize=vectorize)) == bits(of.jacobian(body, x, vectorize=vectorize))
        right = of.hessian(lambda x: body(x).sum(), x, vectorize=vectorize)
        assert bits(of.hessian(lambda x: f(x).sum(), x, vectorize=vectorize)) == bits(right)
        assert bits(of.jvp(f, x, torch.cos(x))[1]) == bits(of.jvp(body, x, torch.cos(x))[1])


def test_transforms() -> None:
    def body(x: Tensor) -> Tensor:
        return (torch.sin(x) * x.square()).sum()

    f = capture(body)
    for number in range(4):
        f(inputs(number, 5).requires_grad_()).backward()
    x = inputs(3, 5)
    for transform in (
        torch.func.grad,
        torch.func.hessian,
        lambda function: torch.func.grad(lambda y: torch.func.grad(function)(y).sum()),
    ):
        assert bits(transform(f)(x)) == bits(transform(body)(x))


@pytest.mark.parametrize("before", [0, 5])
def test_parameters_that_are_accumulated_beside_the_graph(before: int) -> None:
    mine, theirs = captured_twins(Plain, gradients="accumulate")
    for number in range(before):
        for model in (mine, theirs):
            trained(model.m[0], number)

    def use(module: Any, x: Tensor, parameters: list[Tensor]) -> list[Any]:
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward(create_graph=True)
        grads = [leaf.grad, *[parameter.grad for parameter in parameters]]
        total = sum((grad.square().sum() for grad in grads if grad is not None), torch.zeros((), device=x.device))
        leaf.grad = None
        for parameter in parameters:
            parameter.grad = None
        total.backward()
        return [*grads, leaf.grad, *[parameter.grad for parameter in parameters]]

    compared(use, mine, theirs, 7)
    compared(use, mine, theirs, 8)
