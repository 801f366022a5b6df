"""An input that only one call uses: its gradients come back as one sum. In all other programs they come use by use."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from tests.support.device import DEVICE
from tests.support.regions import bits

Kind = Literal["autograd", "accumulate"]
WIDTH = 16


class Residual(nn.Module):
    """Its input has two uses; the sum of their gradients with others depends on the order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    @override
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + made * 1.7


class Unsaved(nn.Module):
    """As ``Residual``, of an input that no operator saves."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(()))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x + self.gain) * 0.7 + x * 1.3 - x.roll(1, 0) * 0.3


Program = Callable[[Sequence[nn.Module], Tensor], Tensor]


def chain(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def skip(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """What a call used is used again later, by eager code: that gradient comes first."""
    first = blocks[0](x)
    y = blocks[1](first)
    y = blocks[2](y)
    y = blocks[3](y)
    result: Tensor = y + first * 0.3
    return result


def hidden(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """All that lies between is kept, and used in the end."""
    states = [x]
    for block in blocks:
        states.append(block(states[-1]))
    return states[-1] + sum(state.cos() for state in states)


def side(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Eager code uses a call's input before that call does."""
    total: Any = 0
    for block in blocks:
        total = total + x.sin()
        x = block(x)
    result: Tensor = x + total
    return result


def after(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Eager code uses a call's input right after that call."""
    total: Any = 0
    for block in blocks:
        y = block(x)
        total = total + x.sin() / 3
        x = y
    result: Tensor = x * total
    return result


def viewed(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """A view of a call's input is made before the call, and lives longer than the input."""
    views = []
    for block in blocks:
        views.append(x[1:])
        x = block(x)
    return x[1:] + torch.stack(views).exp().mean(0)


class Keeps(torch.autograd.Function):
    """Saves an input and differentiates it once more, in its own backward pass."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.detach().cos()


def saved(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Another node saves a call's input."""
    total: Any = 0
    for block in blocks:
        y = block(x)
        total = total + Keeps.apply(x)  # type: ignore[no-untyped-call]
        x = y
    result: Tensor = x + total
    return result


def hooked(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """A hook of a module keeps what it gave, and eager code uses that in the end."""
    found: list[Tensor] = []
    handles = [block.register_forward_hook(lambda _m, _i, out: found.append(out)) for block in blocks[1:3]]
    y = chain(blocks, x)
    for handle in handles:
        handle.remove()
    return y + found[0].cos() * found[1]


def twice(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Two chains of the same blocks, of which each begins where the other does."""
    start = blocks[0](x)
    return chain(blocks[1:], start) * chain(blocks[2:], start)


def retained(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The gradient of what lies between is asked for."""
    y = blocks[1](blocks[0](x))
    y.retain_grad()
    y.register_hook(lambda grad: grad * 1.5)
    return chain(blocks[2:], y)


PROGRAMS: dict[str, Program] = {
    one.__name__: one for one in (chain, skip, hidden, side, after, viewed, saved, hooked, twice, retained)
}  # fmt: skip


def random_program(seed: int) -> Program:
    """Blocks in a chain, between which eager code uses what it has, at random."""

    def run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        draw = random.Random(seed)
        kept, total = [x], x * 0.1
        for block in blocks:
            y = block(draw.choice(kept) if draw.random() < 0.15 else x)
            what = draw.randrange(8)
            if what == 0:
                kept.append(x)
            elif what == 1:
                total = total + x.cos()
            elif what == 2:
                total = total + y.sin()
            elif what == 3:
                kept.append(x.view_as(x))
            elif what == 4:
                kept.append(y)
            x = y
        return x * total + draw.choice(kept).sin()

    return run


def steps(program: Program, kind: type[nn.Module], gradients: Kind | None, length: int = 4) -> list[Any]:
    """Bits of results and gradients, step by step; of eager code if ``gradients`` is None."""
    torch.manual_seed(3)
    blocks = [kind().to(DEVICE) for _ in range(length)]
    if gradients is not None:
        for block in blocks:
            capture(block, gradients=gradients, warmup=1)
    found: list[Any] = []
    generator = torch.Generator("cpu").manual_seed(5)
    for _ in range(6):
        mark_step_begin()
        x = torch.randn(4, WIDTH, generator=generator, device="cpu").to(DEVICE).requires_grad_()
        y = program(blocks, x * 1.0)
        (y.square().mean() + y.sin().sum()).backward()
        found += [bits(y.detach()), bits(x.grad)]
        for parameter in (one for block in blocks for one in block.parameters()):
            found.append(bits(parameter.grad))
            parameter.grad = None
    if gradients is not None:
        found.append([recordings(block).eager_calls for block in blocks])
    return found


@pytest.mark.one_in(10)
@pytest.mark.parametrize("gradients", ["autograd", "accumulate"])
@pytest.mark.parametrize("kind", [Residual, Unsaved])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_gradients_are_eagers(name: str, kind: type[nn.Module], gradients: Kind) -> None:
    expected = steps(PROGRAMS[name], kind, None)
    assert steps(PROGRAMS[name], kind, gradients)[:-1] == expected


def changing(seed: int) -> Program:
    """Another random program in every step, of two in turn."""
    numbers = itertools.cycle((seed, seed + 1))
    return lambda blocks, x: random_program(next(numbers))(blocks, x)


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_program, changing])
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_gradients_of_random_programs_are_eagers(seed: int, make: Callable[[int], Program]) -> None:
    kind: type[nn.Module] = (Residual, Unsaved)[seed % 2]
    expected = steps(make(seed), kind, None, 7)
    gradients: tuple[Kind, ...] = ("autograd", "accumulate")
    for way in gradients:
        assert steps(make(seed), kind, way, 7)[:-1] == expected


def frames_of(y: Tensor) -> list[Any]:
    """The calls in the graph of a result, the last one first, as far as they follow each other."""
    found, node = [], y.grad_fn
    while node is not None and hasattr(node, "frame"):
        found.append(node.frame)
        node = node.next_functions[0][0]
    return found


@pytest.mark.parametrize("kind", [Residual, Unsaved])
def test_a_chain_sums_in_the_recordings(kind: type[nn.Module]) -> None:
    """All calls but the first, whose input eager code made, and the last, after which it may be used."""
    blocks = [capture(kind().to(DEVICE), warmup=1) for _ in range(5)]
    for _ in range(4):
        mark_step_begin()
        y = chain(blocks, torch.randn(4, WIDTH, device=DEVICE, requires_grad=True) * 1.0)
        assert [frame.is_sole_use for frame in frames_of(y)] in ([], [False, True, True, True, False])
        y.sum().backward()
        del y  # a kept result has its call recorded again
    assert [recordings(block).recordings for block in blocks] == [2] * 5  # forward and backward, from the first on


def noted(seen: list[Any], _module: nn.Module, _inputs: Any, output: Tensor) -> None:
    seen.append(output.grad_fn)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - {"chain", "twice", "retained", "hooked"}))
def test_what_is_used_elsewhere_comes_use_by_use(name: str) -> None:
    blocks = [capture(Residual().to(DEVICE), warmup=1) for _ in range(4)]
    for _ in range(4):
        mark_step_begin()
        seen: list[Any] = []
        note = functools.partial(noted, seen)
        follow = [block.register_forward_hook(note) for block in blocks]
        y = PROGRAMS[name](blocks, torch.randn(4, WIDTH, device=DEVICE, requires_grad=True) * 1.0)
        for handle in follow:
            handle.remove()
        sole = [hasattr(node, "frame") and node.frame.is_sole_use for node in seen]
        assert not any(sole[:2] if name == "skip" else sole)  # the second call's input is the one that is used again
        y.sum().backward()
