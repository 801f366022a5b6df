"""Generators given explicitly: one, several, another one at each call, found by the body."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor

from capture import capture, config, mark_step_begin, recordings
from tests.gpu.draws import DRAWS
from tests.gpu.support import (
    DEVICE,
    ON_CUDA,
    eager,
    generator,
    may_fall_back,
    needs_gpu,
    rand,
    rng_state,
    same,
)

pytestmark = needs_gpu


@may_fall_back
@pytest.mark.parametrize("name", DRAWS)
def test_explicit_generator(name: str) -> None:
    """A generator given as an argument advances as in eager, through seeds and states; the default one does not."""
    body = DRAWS[name]

    @capture
    def f(x: Tensor, g: Generator) -> Tensor:
        return body(x, g)

    ours, theirs = generator(1), generator(1)
    before = rng_state()
    saved = ours.get_state()
    for i, what in enumerate("ccccscc3ccbcc7cbc"):
        if what == "s":
            saved = ours.get_state()
        for g in (ours, theirs):
            if what == "b":
                g.set_state(saved)
            elif what.isdigit():
                g.manual_seed(int(what))
        if what == "c":
            x = rand(3, 4, seed=i)
            same(f(x, ours), eager(f, x, theirs))
        same(ours.get_state(), theirs.get_state())
    same(rng_state(), before)


@may_fall_back
def test_several_generators() -> None:
    """Two explicit generators and the default one in one body: each has its own sequence."""

    @capture
    def f(x: Tensor, a: Generator, b: Generator) -> Tensor:
        first = torch.rand(4, generator=a, device=x.device)
        second = torch.randn(4, generator=b, device=x.device)
        return x + first * second + torch.rand_like(x) + torch.rand(4, generator=a, device=x.device)

    ours, theirs = [generator(1), generator(2)], [generator(1), generator(2)]
    torch.manual_seed(0)
    start = rng_state()
    values = [f(rand(4, seed=i), *ours) for i in range(7)]
    end = rng_state()
    torch.cuda.set_rng_state(start, DEVICE) if ON_CUDA else torch.set_rng_state(start)
    same(values, [eager(f, rand(4, seed=i), *theirs) for i in range(7)])
    same([g.get_state() for g in ours], [g.get_state() for g in theirs])
    same(rng_state(), end)


@may_fall_back
@pytest.mark.parametrize("life", ["alternating", "a new one each call", "a new one, the old ones kept"])
def test_another_generator_object(life: str) -> None:
    """Calls get different generator objects: each draws from the one it got, and no other advances."""

    @capture
    def f(x: Tensor, g: Generator) -> Tensor:
        return x + torch.rand(4, generator=g, device=x.device)

    kept = [(generator(seed), generator(seed)) for seed in (1, 2, 3)]
    for i in range(12):
        if life == "alternating":
            ours, theirs = kept[i // 2 % 3]
        else:
            ours, theirs = generator(i), generator(i)
        if life.endswith("kept"):
            kept.append((ours, theirs))
        x = rand(4, seed=i)
        same(f(x, ours), eager(f, x, theirs))
        same(ours.get_state(), theirs.get_state())
        for mine, its in kept:
            same(mine.get_state(), its.get_state())


@may_fall_back
def test_one_generator_under_two_names() -> None:
    """The same generator as both arguments, later two different ones: one sequence, then two."""

    @capture
    def f(x: Tensor, a: Generator, b: Generator) -> Tensor:
        return x + torch.rand(4, generator=a, device=x.device) * torch.rand(4, generator=b, device=x.device)

    first, second = generator(1), generator(2)
    twin_first, twin_second = generator(1), generator(2)
    for i in range(10):
        x = rand(4, seed=i)
        pairs = (
            ((first, first), (twin_first, twin_first))
            if i // 2 % 2 == 0
            else ((first, second), (twin_first, twin_second))
        )
        same(f(x, *pairs[0]), eager(f, x, *pairs[1]))
        same([first.get_state(), second.get_state()], [twin_first.get_state(), twin_second.get_state()])


@may_fall_back
def test_generator_from_a_closure_and_an_attribute() -> None:
    """A generator the body finds by itself, and its replacement by another object."""

    class Noise:
        def __init__(self, seed: int) -> None:
            self.generator = generator(seed)

    def make(seed: int) -> tuple[Callable[[Tensor], Tensor], tuple[Noise, Generator]]:
        noise, inside = Noise(seed), generator(seed + 1)

        def f(x: Tensor) -> Tensor:
            first = torch.rand(4, generator=noise.generator, device=x.device)
            return x + first * torch.rand(4, generator=inside, device=x.device)

        return f, (noise, inside)

    body, ours = make(5)
    reference, theirs = make(5)
    f = capture(body)
    for i in range(12):
        if i in (5, 9):
            for noise in (ours[0], theirs[0]):
                noise.generator = generator(i)
        if i == 7:
            for g in (ours[1], theirs[1]):
                g.manual_seed(3)
        x = rand(4, seed=i)
        same(f(x), reference(x))


@may_fall_back
def test_states_exchanged_between_generators() -> None:
    """``a.set_state(b.get_state())`` between calls, with the captured function drawing from ``a``."""

    @capture
    def f(x: Tensor, g: Generator) -> Tensor:
        return x + torch.randn(4, generator=g, device=x.device)

    ours, theirs, spare = generator(1), generator(1), generator(9)
    for i in range(8):
        x = rand(4, seed=i)
        same(f(x, ours), eager(f, x, theirs))
        torch.rand(i + 1, generator=spare, device=DEVICE)
        for g in (ours, theirs) if i % 3 == 1 else ():
            g.set_state(spare.get_state())
        same(torch.rand(3, generator=ours, device=DEVICE), torch.rand(3, generator=theirs, device=DEVICE))


class Noise:
    """Draws from a generator of its own, while it is on."""

    def __init__(self, seed: int, *, on: bool = True) -> None:
        self.generator = generator(seed)
        self.on = on

    def __call__(self, x: Tensor) -> Tensor:
        drawn = torch.rand(4, generator=self.generator, device=x.device) if self.on else x + 1
        return (x + drawn) * 2


def noisy(seed: int, *, on: bool = True) -> tuple[Callable[[Tensor], Tensor], Noise]:
    """A function that finds its generator in a closure."""
    noise = Noise(seed, on=on)
    return lambda x: noise(x), noise


def test_a_generator_found_by_a_body_whose_plan_was_cached(tmp_path: Path) -> None:
    """A plan from disk names the generator, for the first recording and for one at another place of the step."""
    before = capture(lambda x: (x - 1) * 3)
    with config.patch(cache=True, cache_dir=tmp_path):
        first = capture(noisy(1)[0])
        for i in range(4):
            first(rand(4, seed=i))
        (body, ours), (_, theirs) = noisy(3), noisy(3)
        f = capture(body)
        for i in range(10):
            x = rand(4, seed=i)
            mark_step_begin()
            if i % 4 > 1:
                same(f(before(x)), theirs((x - 1) * 3))
            else:
                same(f(x), theirs(x))
            same(ours.generator.get_state(), theirs.generator.get_state())
    now = recordings(f)
    assert (now.plans_loaded, now.observations, now.recordings) == (1, 0, 2)


@may_fall_back
def test_a_cached_plan_that_knows_of_no_draw(tmp_path: Path) -> None:
    """A plan from disk says that nothing is drawn, but the body draws: that is noticed, and the body is watched
    again."""
    with config.patch(cache=True, cache_dir=tmp_path):
        first = capture(noisy(1, on=False)[0])
        for i in range(4):
            first(rand(4, seed=i))
        (body, ours), (_, theirs) = noisy(3), noisy(3)
        f = capture(body)
        for i in range(8):
            x = rand(4, seed=i)
            same(f(x), theirs(x))
            same(ours.generator.get_state(), theirs.generator.get_state())
    now = recordings(f)
    assert (now.plans_loaded, now.recordings) == (1, 1)
    assert now.replays > 3
