"""Random draws: replays draw what eager draws, in any mix with eager, and leave the generators where eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional

from capture import capture, mark_step_begin, warmup
from tests.gpu.draws import DEFAULT_ONLY, DRAWS
from tests.gpu.support import (
    DEVICE,
    ON_CUDA,
    counts,
    eager,
    generator,
    may_fall_back,
    needs_cuda,
    needs_gpu,
    rand,
    rng_state,
    same,
)

pytestmark = needs_gpu


def play(function: Callable[[Tensor], Any], script: str, draw: Callable[[], Tensor]) -> list[Any]:
    """Run a script of calls (c), other draws (d), seeds (0-9), and states saved (s) and put back (b)."""
    values: list[Any] = []
    saved = rng_state()
    for i, what in enumerate(script):
        if what == "c":
            values.append(function(rand(3, 4, seed=i)))
        elif what == "d":
            values.append(draw())
        elif what == "s":
            saved = rng_state()
        elif what == "b":
            torch.cuda.set_rng_state(saved, DEVICE) if ON_CUDA else torch.set_rng_state(saved)
        elif what in "02468" or not ON_CUDA:
            torch.manual_seed(int(what))
        else:
            torch.cuda.manual_seed(int(what))
        values.append(rng_state())
    return values


SCRIPTS = ("cccccc", "cdcdcdcdcd", "4cc4cc4cc", "ccscccbcccdbccc", "c1ccd3cc1ccd3cs2ccbc", "5c5c5c5cscccbdc")


@may_fall_back
@pytest.mark.parametrize("name", [*DRAWS, *DEFAULT_ONLY])
def test_default_generator(name: str) -> None:
    """Values and states equal eager's after every step of every script, seeds and rewinds included."""
    body = {**DRAWS, **DEFAULT_ONLY}[name]

    @capture
    def f(x: Tensor) -> Tensor:
        return body(x, None)

    def draw() -> Tensor:
        return torch.rand(5, device=DEVICE)

    for script in SCRIPTS:
        torch.manual_seed(100)
        ours = play(f, script, draw)
        torch.manual_seed(100)
        same(ours, play(lambda x: eager(f, x), script, draw))


def test_draws_are_replayed() -> None:
    """The common draws are recorded, not run eagerly."""

    @capture
    def f(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(4, device=x.device)

    for i in range(6):
        f(rand(3, 4, seed=i))
    assert counts(f) == (1, 1, 4, 0)


@may_fall_back
def test_warmup_leaves_no_trace() -> None:
    """``warmup`` watches and records, and every generator is where it was; the next calls draw what eager draws."""

    @capture
    def f(x: Tensor, g: Generator) -> Tensor:
        return functional.dropout(x, 0.5) + torch.rand(4, generator=g, device=x.device)

    ours, theirs = generator(1), generator(1)
    torch.manual_seed(7)
    before = (rng_state(), torch.get_rng_state(), ours.get_state())
    warmup(f)(rand(4), ours)
    same((rng_state(), torch.get_rng_state(), ours.get_state()), before)
    values = [f(rand(4, seed=i), ours) for i in range(4)]
    torch.manual_seed(7)
    same(values, [eager(f, rand(4, seed=i), theirs) for i in range(4)])
    same(ours.get_state(), theirs.get_state())


def test_warmup_then_every_call_is_a_replay() -> None:
    """After ``warmup`` of a function that draws, the first call replays."""

    @capture
    def f(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5)

    warmup(f)(rand(4))
    for i in range(3):
        f(rand(4, seed=i))
    assert counts(f) == (1, 1, 3, 0)


def test_recording_a_second_function_moves_no_generator() -> None:
    """Functions recorded at different times, in chains and branches, share one sequence with eager draws between."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @capture
    def g(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5)

    @capture
    def h(x: Tensor) -> Tensor:
        return torch.randn_like(x) * x

    def run(functions: dict[str, Callable[[Tensor], Tensor]]) -> list[Tensor]:
        torch.manual_seed(21)
        values = []
        for i, names in enumerate(("f", "f", "fg", "fg", "fgh", "fgh", "fh", "fh", "fgh", "h", "hf", "fg", "fhg")):
            mark_step_begin()
            x = rand(4, 4, seed=i)
            for name in names:
                x = functions[name](x)
                values.append(x.clone())
            values.extend([torch.rand(2, device=DEVICE), rng_state()])
        return values

    ours = run({"f": f, "g": g, "h": h})
    same(ours, run({"f": lambda x: eager(f, x), "g": lambda x: eager(g, x), "h": lambda x: eager(h, x)}))


@pytest.mark.parametrize("shapes", [((4,), (257, 33)), ((1,), (2, 3), (65536,))])
def test_advance_differs_between_recordings(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Recordings of different sizes advance the generator by different amounts, as eager does."""

    @capture
    def f(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5) + torch.rand_like(x)

    def run(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(2)
        found = []
        for i in range(12):
            found += [function(rand(*shapes[i % len(shapes)], seed=i)), rng_state(), torch.rand(2, device=DEVICE)]
        return found

    same(run(f), run(lambda x: eager(f, x)))


@may_fall_back
@pytest.mark.parametrize("what", ["manual_seed", "set_state", "fork_rng", "get_state", "seed of an argument"])
def test_generators_handled_in_the_body(what: str) -> None:
    """A body that seeds, saves or puts back a state: eager's values and states, however it is run."""

    @capture
    def f(x: Tensor, g: Generator) -> Tensor:
        if what == "manual_seed":
            torch.manual_seed(3)
        elif what == "seed of an argument":
            g.manual_seed(3)
        elif what == "fork_rng":
            with torch.random.fork_rng([DEVICE] if ON_CUDA else []):
                x = x + torch.rand_like(x)
        else:
            state = g.get_state()
            x = x + torch.rand(4, generator=g, device=x.device)
            if what == "set_state":
                g.set_state(state)
        return x + torch.rand_like(x) + torch.rand(4, generator=g, device=x.device)

    def run(function: Callable[..., Tensor]) -> list[Any]:
        torch.manual_seed(2)
        g = generator(4)
        found: list[Any] = []
        for i in range(6):
            found += [function(rand(4, seed=i), g), rng_state(), g.get_state()]
        return found

    same(run(f), run(lambda *args: eager(f, *args)))


@needs_cuda
def test_generator_in_use_by_a_graph_of_the_user() -> None:
    """A graph of the user's own that draws from the default generator, between our replays: one sequence."""
    buffer = torch.zeros(4, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer.copy_(torch.rand(4, device=DEVICE))

    @capture
    def f(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    def run(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(2)
        found = []
        for i in range(8):
            found.append(function(rand(4, seed=i)))
            graph.replay()
            found += [buffer.clone(), rng_state()]
        return found

    same(run(f), run(lambda x: eager(f, x)))


@may_fall_back
def test_row_148_draws_on_the_cpu_and_the_device() -> None:
    """A body that draws on both: both sequences are eager's."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x + torch.rand_like(x) + torch.rand(4).to(x.device)

    def run(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(2)
        found = []
        for i in range(6):
            found += [function(rand(4, seed=i)), rng_state(), torch.get_rng_state()]
        return found

    same(run(f), run(lambda x: eager(f, x)))
