"""Random bodies with reads, islands, draws, writes and exceptions give what eager gives, call after call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import define, field, frozen
from torch import Tensor

from capture import capture, config, island, recordings
from tests.segments.bodies import draw
from tests.segments.test_bodies import fresh
from tests.support.device import DEVICE, rng_state, set_rng_state
from tests.support.observed import bits

__all__ = ["fresh"]

Step = tuple[int, int, int, int]
"""Number of the action, and three numbers that it takes."""
_VALUES = 4
QUICK, SLOW = 60, 1000


@frozen
class Drawn:
    """One program: its steps, the arguments of its calls by number, and what surrounds them."""

    steps: tuple[Step, ...]
    calls: tuple[int, ...]
    poison: bool
    keeps: bool


def drawn(number: int) -> Drawn:
    source = random.Random(number)
    count = source.randint(2, 9)
    number_of = source.randrange
    steps = tuple((number_of(len(ACTIONS)), number_of(12), number_of(12), number_of(12)) for _ in range(count))
    kinds = source.randint(1, 4)
    calls = tuple(source.randrange(kinds) for _ in range(source.randint(8, 16)))
    return Drawn(steps, calls, poison=source.random() < 0.4, keeps=source.random() < 0.3)


@define(eq=False)
class World:
    """The state of one program, and its islands."""

    state: Tensor = field(factory=lambda: torch.zeros(4, 4))
    log: list[Any] = field(factory=list)
    generator: torch.Generator = field(factory=lambda: torch.Generator(DEVICE).manual_seed(7))
    last: Tensor | None = None
    islands: list[Callable[..., Any]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        log, state, generator = self.log, self.state, self.generator

        @island
        def note(v: Tensor) -> None:
            log.append(round(float(v.sum()), 3))

        @island
        def double(v: Tensor) -> Tensor:
            return v * 2

        @island
        def unchanged(v: Tensor) -> Tensor:
            return v

        @island
        def halves(v: Tensor) -> dict[str, Any]:
            return {"rows": v[:2], "mean": v.mean(), "many": [v + 1]}

        @island
        def write(v: Tensor) -> None:
            v.mul_(0.5)

        @island
        def write_state(v: Tensor) -> None:
            state.add_(v.mean())

        @island
        def noise(v: Tensor) -> Tensor:
            return torch.rand_like(v) + torch.rand(v.shape, generator=generator, device=v.device)

        @island
        def check(v: Tensor) -> int:
            if v[0, 0] > 3:
                raise ValueError("too large")
            return int(v[0, 0] > 0)

        self.islands = [note, double, unchanged, halves, write, write_state, noise, check]


def _operate(v: Tensor, kind: int) -> Tensor:
    return [v * 2, v + 1, v.relu(), v.sin(), v.t().contiguous(), v @ v * 0.1, v - v.mean(), v.clamp(-1, 1)][kind % 8]


def _apply(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    values[a % _VALUES] = _operate(values[b % _VALUES], c)


def _add(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    values[a % _VALUES] = values[b % _VALUES] + values[c % _VALUES]


def _write(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    values[a % _VALUES].add_(values[b % _VALUES].detach() * 0.5)


def _write_state(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    world.state.mul_(0.5).add_(values[a % _VALUES])


def _read_state(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    values[a % _VALUES] = values[b % _VALUES] + world.state


def _draw(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    v = values[a % _VALUES]
    generator = world.generator if c % 3 == 0 else None
    values[b % _VALUES] = v + torch.rand(v.shape, generator=generator, device=v.device)


def _branch(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    v = values[a % _VALUES]
    values[b % _VALUES] = _operate(v, c) if v[0, 0] > 0 else _operate(v, c + 3)


def _count(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    n = int((values[a % _VALUES][0, :2] > 0).sum())
    values[b % _VALUES] = values[c % _VALUES] * n


def _listed(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    signs = values[a % _VALUES][0, :2].sign()
    kinds: list[Any] = [signs.tolist(), signs.cpu().numpy(), repr(signs), f"{signs[0]:.0f}"]
    read = kinds[c % 4]
    values[b % _VALUES] = values[b % _VALUES] * (2 if read[0] in (1.0, "1") else 3)


def _sized(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    v = values[a % _VALUES]
    picked = v[0][v[0] > 0] if c % 2 else (v[0] > 0).nonzero().to(v.dtype)
    values[b % _VALUES] = values[b % _VALUES] + picked.sum()


def _island(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    result = world.islands[c % len(world.islands)](values[a % _VALUES])
    if isinstance(result, dict):
        result = result["rows"].sum() + result["mean"] + result["many"][0]
    if isinstance(result, Tensor):
        values[b % _VALUES] = result
    elif result is not None:
        values[b % _VALUES] = values[b % _VALUES] + result


def _raise(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    if values[a % _VALUES][1, 1] > 2.5:
        raise ValueError("as it is")


def _keep(values: list[Tensor], world: World, a: int, b: int, c: int) -> None:
    if c % 4 == 0:
        world.last = values[a % _VALUES]
    elif world.last is not None:
        values[b % _VALUES] = values[b % _VALUES] + world.last


ACTIONS = [
    _apply, _apply, _add, _write, _write_state, _read_state, _draw, _branch, _branch, _count, _listed, _sized, _island,
    _island, _island, _raise, _keep,
]  # fmt: skip


def made(program: Drawn, world: World) -> Callable[[Tensor, Tensor], Any]:
    steps = program.steps

    def body(x: Tensor, y: Tensor) -> Any:
        values = [x, y, x * 1, y + x]
        for action, a, b, c in steps:
            ACTIONS[action](values, world, a, b, c)
        return values[2], {"y": values[3]}

    return body


def run(program: Drawn, *, captured: bool) -> tuple[list[Any], Any]:
    world, kept = World(), []
    function = made(program, world)
    function = capture(function) if captured else function
    observed: list[Any] = []
    for number in program.calls:
        x, y = draw(number), draw(number + 100)
        try:
            result = function(x, y)
        except ValueError as error:
            result = str(error)
        last = None if world.last is None else bits(world.last)
        observed.append(
            (bits(result), bits([x, y]), bits(world.state), last, list(world.log), bits(world.generator.get_state()),
             bits(rng_state()))
        )  # fmt: skip
        if program.keeps:
            kept.append(result)
        del result
    observed.append(bits(kept))
    return observed, function


def check(number: int) -> int:
    """Compare one program, captured, with eager. Gives how many calls were replayed."""
    program, begin = drawn(number), rng_state()
    expected, _ = run(program, captured=False)
    set_rng_state(begin)
    with config.patch(poison=program.poison):
        observed, function = run(program, captured=True)
    for at, (theirs, ours) in enumerate(zip(expected, observed, strict=True)):
        assert ours == theirs, f"program {number}, call {at}: {program}"
    return recordings(function).replays


@pytest.mark.one_in(18)
@pytest.mark.parametrize("begin", range(0, QUICK, 4))
def test_programs_equal_their_eager_twins(begin: int) -> None:
    for number in range(begin, begin + 4):
        check(number)


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(QUICK, SLOW, 94))
def test_many_programs_equal_their_eager_twins(begin: int) -> None:
    replayed = [check(number) for number in range(begin, begin + 94)]
    assert sum(map(bool, replayed)) > (47 if DEVICE.type == "cpu" else 0)
