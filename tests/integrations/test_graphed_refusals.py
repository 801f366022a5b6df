"""``make_graphed_callables``: errors, arguments that it refuses, and what runs before anything is recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import AnnotationError, CaptureError, CaptureWarning, capture, config, recordings
from capture.integrations.graphed import UnusedInputError, make_graphed_callables
from tests.support.device import DEVICE, rng_state
from tests.support.graphed import STEPS, Block, bits, bodies, both, rand, same, state, train, twins
from tests.support.graphed import fresh as fresh
from tests.support.unseen import Notes


class TwoPaths(nn.Module):
    """Uses neither its second argument nor its second weight."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(6, 6), nn.Linear(6, 6)

    @override
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


def test_an_unused_input_is_an_error() -> None:
    mine, theirs = twins(TwoPaths)
    samples = (rand(4, 6, grad=True), rand(4, 6, grad=True))
    with pytest.raises(UnusedInputError, match=r"TwoPaths\) depends on argument 'y', parameter 'idle.bias'") as error:
        make_graphed_callables(mine, samples)
    assert "allow_unused_input=True" in str(error.value)
    assert isinstance(error.value, (RuntimeError, CaptureError))
    assert "forward" not in mine.__dict__
    make_graphed_callables(mine, samples, allow_unused_input=True)
    before = bodies(mine)
    for number in range(STEPS):
        values = []
        for module in (mine, theirs):
            module.zero_grad()
            x, y = rand(4, 6, seed=number, grad=True), rand(4, 6, grad=True)
            module(x, y).square().mean().backward()
            assert y.grad is None
            values.append([bits(x.grad), state(module)])
        assert values[0] == values[1]
    assert bodies(mine) == before


def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda m: (m, rand(4, 6)), r"sample_args is a Tensor; give a tuple .* as in \(x,\)"),
        (lambda m: ((m,), (rand(4, 6),)), r"sample_args\[0\] is a Tensor; give a tuple"),
        (lambda m: ((m, double), ((rand(4, 6),),)), r"2 callables and 1 samples in sample_args"),
        (lambda m: ((m,), rand(4, 6)), r"1 callables and a Tensor in sample_args"),
        (lambda m: ([m, double], ((rand(4, 6),), (rand(4, 6),))), r"callables is a list; give a module, a function"),
        (lambda m: ((m, 3), ((rand(4, 6),), (rand(4, 6),))), r"callables\[1\] is a int; give a module or a function"),
        (lambda m: ((m, m), ((rand(4, 6),), (rand(4, 6),))), r"callables\[1\] is callables\[0\] again"),
        (lambda m: (m, (rand(4, 6), rand(4, 6))), r"arguments of callables \(Block\) do not fit: takes 1 positional"),
        (lambda m: (m, ()), r"arguments of callables \(Block\) do not fit: missing 1 required .* 'x'"),
        (lambda m: (Block, (rand(4, 6),)), r"not the class .*Block"),
        (lambda m: (m, (rand(4, 6),), -1), r"num_warmup_iters=-1 is not a whole number"),
        (lambda m: (m, (rand(4, 6),), True), r"num_warmup_iters=True is not a whole number"),
        (lambda m: (m, (rand(4, 6),), 3, None), r"allow_unused_input=None is neither"),
        (lambda m: (m, (rand(4, 6),), 3, False, "pool"), r"pool is a str and no pool's token"),
    ],
)
def test_bad_arguments(arguments: Callable[[nn.Module], Any], message: str) -> None:
    module = Block().to(DEVICE)
    with pytest.raises(AnnotationError, match=message):
        make_graphed_callables(*arguments(module))
    assert "forward" not in module.__dict__
    make_graphed_callables(module, (rand(4, 6),))


def test_what_is_captured_already() -> None:
    module = capture(Block())
    with pytest.raises(AnnotationError, match="captured already"):
        make_graphed_callables(module, (rand(4, 6),))
    assert recordings(module).recordings == 0


def test_an_exception_of_a_body_comes_out_and_nothing_is_captured() -> None:
    class Picky(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            self.norm.bias.detach().add_(1)
            raise LookupError("no")

    first, second = Block().to(DEVICE), Picky().to(DEVICE)
    before = state(first, second)
    with pytest.raises(LookupError, match="no") as error:
        make_graphed_callables((first, second), ((rand(4, 6),), (rand(4, 6),)))
    assert error.value.__notes__ == [
        f"make_graphed_callables ran callables[1] ({Picky.__qualname__}) with its sample arguments"
    ]
    assert state(first, second) == before
    assert "forward" not in first.__dict__
    assert "forward" not in second.__dict__


class Refuses(torch.autograd.Function):
    """Raises in its backward pass."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise LookupError("not back")


def test_an_exception_of_a_backward_pass_comes_out_and_nothing_is_left() -> None:
    class OneWay(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return Refuses.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]

    module = OneWay().to(DEVICE)
    hooks = module.a.weight.register_hook(lambda grad: grad * 2)
    before = state(module), bits(rng_state())
    with pytest.raises(LookupError, match="not back"):
        make_graphed_callables(module, (rand(4, 6),))
    assert (state(module), bits(rng_state())) == before
    assert "forward" not in module.__dict__
    assert len(module.a.weight._backward_hooks or {}) == 1
    hooks.remove()
    assert make_graphed_callables((), ()) == ()


def test_what_cannot_be_recorded_runs_eagerly_and_says_so() -> None:
    class Reads(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(np.from_dlpack(x.detach().cpu()).sum())

    mine, theirs = twins(lambda: nn.Sequential(Block(), Reads()))
    with pytest.warns(CaptureWarning, match="CG201") as caught:
        make_graphed_callables((mine[0], mine[1]), ((rand(4, 6),), (rand(4, 6, grad=True),)))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for number in range(STEPS):
        both(train, mine, theirs, number)
    assert recordings(mine[1]).recordings == 0
    assert recordings(mine[0]).replays >= 2 * STEPS


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_gradients_of_gradients() -> None:
    mine, theirs = twins(lambda: Block(drop=0.0))
    make_graphed_callables(mine, (rand(4, 6, grad=True),))
    for _ in range(3):
        gradients = []
        for module in (mine, theirs):
            x = rand(4, 6, grad=True)
            (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
            gradients.append(torch.autograd.grad(grad.square().sum(), [x, *module.parameters()], allow_unused=True))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_switched_off() -> None:
    mine, theirs = twins(Block)
    with config.patch(enabled=False):
        assert make_graphed_callables(mine, (rand(4, 6),)) is mine
        both(train, mine, theirs, 0)
    assert bodies(mine) == 0
    for number in range(STEPS):
        both(train, mine, theirs, number)
    assert recordings(mine).replays > 0


@pytest.mark.parametrize(("num_iters", "runs"), [(0, 1), (1, 1), (3, 3), (11, 11)])
def test_eager_runs_before_anything_is_recorded(num_iters: int, runs: int) -> None:
    notes = Notes()
    note = notes.add

    def body(x: Tensor) -> Tensor:
        note(torch.is_grad_enabled())
        return torch.tanh(x)

    fewest: list[str] = []
    for number in (1, num_iters):
        notes.clear()
        make_graphed_callables(body, (rand(4, grad=True),), num_warmup_iters=number)
        fewest = fewest or notes.all()
    assert len(notes.all()) - len(fewest) == runs - 1


def test_a_pool_is_taken_and_not_used() -> None:
    mine, theirs = twins(Block)
    make_graphed_callables(mine, (rand(4, 6),), pool=(0, 1))
    for number in range(STEPS):
        both(train, mine, theirs, number)


def test_kinds_of_callables() -> None:
    class Scaled:
        factor = 3.0

        def __call__(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * self.factor

        def method(self, x: Tensor) -> Tensor:
            return torch.sin(x) * self.factor

    scaled = Scaled()
    bodies_of: tuple[Callable[[Tensor], Tensor], ...] = (
        double, scaled, scaled.method, functools.partial(torch.mul, 2.0), torch.relu, lambda x: x + 1
    )  # fmt: skip
    made = make_graphed_callables(bodies_of, tuple((rand(5),) for _ in bodies_of))
    for number in range(STEPS):
        for function, body in zip(made, bodies_of, strict=True):
            same(function(rand(5, seed=number)), body(rand(5, seed=number)))
    assert all(recordings(function).replays >= STEPS and recordings(function).eager_calls == 0 for function in made)


def test_the_same_function_twice() -> None:
    first, second = make_graphed_callables((double, double), ((rand(4, grad=True),), (rand(4, grad=True),)))
    x = rand(4, grad=True)
    second(first(x)).sum().backward()
    same([x.grad], [torch.full((4,), 4.0, device=DEVICE)])
