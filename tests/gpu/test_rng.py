"""Random draws: replays draw what eager draws, in any mix with eager, and leave the generators where eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional

from capture import capture, mark_step_begin, warmup
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

Draw = Callable[[Tensor, Any], Tensor]

DRAWS: dict[str, Draw] = {
    "rand": lambda x, g: x + torch.rand(x.shape, generator=g, device=x.device),
    "randn": lambda x, g: x + torch.randn(x.shape, generator=g, device=x.device),
    "randint": lambda x, g: x + torch.randint(0, 1000, x.shape, generator=g, device=x.device),
    "bernoulli": lambda x, g: x + torch.bernoulli(torch.full_like(x, 0.5), generator=g),
    "bernoulli_": lambda x, g: x + torch.empty_like(x).bernoulli_(0.3, generator=g),
    "exponential_": lambda x, g: x + torch.empty_like(x).exponential_(2.0, generator=g),
    "normal_": lambda x, g: x + torch.empty_like(x).normal_(1.0, 3.0, generator=g),
    "uniform_": lambda x, g: x + torch.empty_like(x).uniform_(-1, 1, generator=g),
    "normal": lambda x, g: torch.normal(x, torch.ones_like(x), generator=g),
    "multinomial": lambda x, g: torch.multinomial((x + 1).flatten(), 3, generator=g) * 1.5,
    "multinomial replaced": lambda x, g: torch.multinomial((x + 1).flatten(), 9, replacement=True, generator=g) * 1.5,
    "randperm": lambda x, g: torch.randperm(x.numel(), generator=g, device=x.device) + x.flatten(),
    "several": lambda x, g: (
        torch.rand(7, generator=g, device=x.device).sum()
        + torch.randn(x.shape, generator=g, device=x.device)
        + torch.empty(3, 4, device=x.device).exponential_(generator=g)
    ),
}
DEFAULT_ONLY: dict[str, Draw] = {
    "dropout": lambda x, g: functional.dropout(x, 0.5),
    "dropout twice": lambda x, g: functional.dropout(functional.dropout(x, 0.3), 0.2) + functional.dropout(x, 0.9),
    "feature dropout": lambda x, g: functional.dropout2d(x.view(1, 3, 2, 2), 0.5).flatten(),
    "rand_like": lambda x, g: torch.rand_like(x) + torch.randn_like(x) * torch.randint_like(x, 9),
    "rrelu": lambda x, g: functional.rrelu(x, training=True),
    "large": lambda x, g: torch.rand(513, 1025, device=x.device) + x.sum(),
}


def play(function: Callable[[Tensor], Any], script: str, draw: Callable[[], Tensor]) -> list[Any]:
    """Run a script of calls (c), other draws (d), seeds (0-9), and states saved (s) and put back (b)."""
    found: list[Any] = []
    saved = rng_state()
    for i, what in enumerate(script):
        if what == "c":
            found.append(function(rand(3, 4, seed=i)))
        elif what == "d":
            found.append(draw())
        elif what == "s":
            saved = rng_state()
        elif what == "b":
            torch.cuda.set_rng_state(saved, DEVICE) if ON_CUDA else torch.set_rng_state(saved)
        elif what in "02468" or not ON_CUDA:
            torch.manual_seed(int(what))
        else:
            torch.cuda.manual_seed(int(what))
        found.append(rng_state())
    return found


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
    """Another generator object at a call: the draws come from it, and no other moves."""

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
        for one, other in kept:
            same(one.get_state(), other.get_state())


@may_fall_back
def test_one_generator_under_two_names() -> None:
    """The same generator as both arguments, later two different ones: one sequence, then two."""

    @capture
    def f(x: Tensor, a: Generator, b: Generator) -> Tensor:
        return x + torch.rand(4, generator=a, device=x.device) * torch.rand(4, generator=b, device=x.device)

    one, two = generator(1), generator(2)
    other, another = generator(1), generator(2)
    for i in range(10):
        x = rand(4, seed=i)
        pairs = ((one, one), (other, other)) if i // 2 % 2 == 0 else ((one, two), (other, another))
        same(f(x, *pairs[0]), eager(f, x, *pairs[1]))
        same([one.get_state(), two.get_state()], [other.get_state(), another.get_state()])


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
        found = []
        for i, names in enumerate(("f", "f", "fg", "fg", "fgh", "fgh", "fh", "fh", "fgh", "h", "hf", "fg", "fhg")):
            mark_step_begin()
            x = rand(4, 4, seed=i)
            for name in names:
                x = functions[name](x)
                found.append(x.clone())
            found.extend([torch.rand(2, device=DEVICE), rng_state()])
        return found

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
