"""Rows of ``docs/rows.md`` about draws, without recomputation: generators advance as in eager."""

from __future__ import annotations

import torch
from torch import Tensor

from capture import capture
from tests.support.device import AGAIN, DEVICE, rng_state
from tests.support.rows import counts, eager, rand, same
from tests.support.rows import fresh as fresh


def test_row_142_draws_are_eagers() -> None:
    """Warm-up, recording and replays give eager's sequence, between other draws and after a new seed."""

    @capture
    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(4)

    def run(function: object) -> list[Tensor]:
        draws = []
        for seed in (0, 1, 0):
            torch.manual_seed(seed)
            for i in range(4):
                draws.append(function(rand(4, seed=i)))  # type: ignore[operator]
                draws.append(torch.rand(2))
        return draws

    ours, theirs = run(f), run(lambda x: eager(f, x))
    same(ours, theirs)
    same(ours[:8], ours[16:])
    assert counts(f) == (1, 1 + AGAIN, 10 - AGAIN, 0)


def test_row_151_generator_argument() -> None:
    """A generator given as an argument, another one at times: each advances as in eager, the default one not at all."""

    @capture
    def f(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(4, generator=generator)

    ours = [torch.Generator(DEVICE).manual_seed(seed) for seed in (1, 2)]
    theirs = [torch.Generator(DEVICE).manual_seed(seed) for seed in (1, 2)]
    before = rng_state()
    for i in range(8):
        x = rand(4, seed=i)
        same(f(x, ours[i // 2 % 2]), eager(f, x, theirs[i // 2 % 2]))
        same([generator.get_state() for generator in ours], [generator.get_state() for generator in theirs])
    assert torch.equal(before, rng_state())
    assert counts(f) == (1, 1, 6, 0)


def test_row_152_recording_takes_no_extra_draws() -> None:
    """After each call the generator is where one eager call would leave it."""

    @capture
    def f(x: Tensor) -> Tensor:
        return torch.bernoulli(torch.full((4,), 0.5)) + torch.multinomial(torch.ones(4), 2).sum() + x

    torch.manual_seed(3)
    states, values = [], []
    for i in range(5):
        values.append(f(rand(4, seed=i)))
        states.append(rng_state())
    torch.manual_seed(3)
    for i in range(5):
        same(values[i], eager(f, rand(4, seed=i)))
        assert torch.equal(states[i], rng_state()), i
