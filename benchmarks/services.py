"""What ``benchmarks.server`` serves: thirty functions and modules, each beside its own eager code.

A service answers a request with the captured result and eager's. Weights change while no thread is in a call.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from capture import Recordings, Severity, capture, recordings

WIDTH, WORDS = 32, 50
Answer = tuple[Any, Any, float, float]
"""The captured result, eager's, and how long each took, in seconds."""


class Shared:
    """A lock that many may hold together, or one alone."""

    def __init__(self) -> None:
        self._inside, self._changed = 0, threading.Condition()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hold it together with others."""
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold it alone: wait until all others have left, and let no new ones in."""
        with self._changed:
            self._changed.wait_for(lambda: not self._inside)
            yield


class Mlp(nn.Module):
    """An MLP with an adapter that is swapped as a whole."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False))
        self.scale = 1.0

    @override
    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        if fails:
            raise ValueError("this request fails")
        result: Tensor = x + self.adapter(x) * self.scale
        return result


class Attention(nn.Module):
    """Attention of one head, with a mask."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.query, self.rest = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)

    @override
    def forward(self, x: Tensor, *, fails: bool = False) -> dict[str, Tensor]:
        scores = (self.query(x) @ x.mT) / WIDTH**0.5
        if fails:
            raise ValueError("this request fails")
        mixed = torch.softmax(scores.tril(), -1) @ x
        for one in self.rest:
            mixed = torch.relu(one(mixed))
        return {"mixed": self.norm(mixed), "scores": scores}


class Lookup(nn.Module):
    """An embedding; an index out of range makes its operator raise."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.depth = depth

    @override
    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(words)
        for _ in range(self.depth):
            x = torch.tanh(self.out(x))
        return x.mean(0), x


class Cell(nn.Module):
    """A recurrent cell that keeps its state on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(2 * WIDTH, WIDTH)
        self.h: Tensor = torch.zeros(1, WIDTH)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.h = torch.tanh(self.cell(torch.cat([x[:1], self.h], -1)))
        return self.h * 2


def scaled(x: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    """A function, with draws of a request's own generator."""
    noise = torch.empty_like(x).normal_(generator=generator)
    return torch.sin(x) * factor + noise


def disarm() -> None:
    """End the present request's time limit."""
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, 0)


def _not_replayed(f: Any, call: Callable[[], Any]) -> str:
    before = recordings(f)
    call()
    after = recordings(f)
    if after.replays > before.replays:
        return ""
    events = after.events[len(after.events) - max(_new_events(before, after), 1) :]
    told = ", then ".join(f"{event.kind}: {event.detail:.60}" for event in events[-9:])
    why = [f"{finding.code} {finding.what:.120}" for finding in after.findings if finding.severity >= Severity.EAGER]
    return "; ".join([f"{after.function}: {told}", *why[-1:] * (events[-1].kind == "eager")])


def _new_events(before: Recordings, after: Recordings) -> int:
    """How many of the events that are kept came between the two."""
    last = before.events[-1].at if before.events else 0.0
    return sum(event.at > last for event in after.events)


class Service:
    """A stateless service: a captured module, whose class has the eager forward."""

    may_time_out = True

    def __init__(self, kind: Callable[[int], nn.Module], depth: int, device: torch.device, eager: bool) -> None:
        self.module = kind(depth).to(device)
        self.device, self.shared, self.kind = device, Shared(), kind
        # its own ones, as weights are loaded while only this service's calls are kept out
        self.adapters = _adapters(device)
        self.spare = [one.state_dict() for one in (kind(depth).to(device), kind(depth).to(device))]
        self.f: Any = _served(self.module, eager, name=f"{type(self.module).__name__.lower()}{depth}")

    def request(self, random: Random, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for a request; one in a hundred is wrong."""
        fails = random.random() < 0.01
        if self.kind is Lookup:
            words = torch.randint(WORDS, (size,))
            if fails and self.device.type == "cpu":
                words[-1] = WORDS
            return (words.to(self.device),), {}
        return (self.drawn(size),), {"fails": True} if fails else {}

    def drawn(self, size: int) -> Tensor:
        """A random input, drawn on the CPU: with torch 2.11 no thread draws on a device while another one captures."""
        return torch.randn(size, WIDTH).to(self.device)

    def call(self, ours: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call; an error is an answer, too."""
        try:
            with torch.no_grad():
                return self.f(*args, **kwargs) if ours else type(self.module).forward(self.module, *args, **kwargs)
        except (ValueError, IndexError) as error:
            return f"{type(error).__name__}: {error}"

    def answer(self, random: Random, size: int, arm: Callable[[], None]) -> Answer:
        """The captured and the eager answer. ``arm`` is called before the captured call, which may then time out."""
        args, kwargs = self.request(random, size)
        with self.shared.together():
            try:
                arm()
                begin = clock()
                ours = self.call(True, args, kwargs)
                took = clock() - begin
            finally:
                disarm()  # before the lock is released: an alarm in the release would leave it locked
            begin = clock()
            return ours, self.call(False, args, kwargs), took, clock() - begin

    def answer_eagerly(self, random: Random, size: int) -> None:
        """The eager answer alone."""
        args, kwargs = self.request(random, size)
        self.call(False, args, kwargs)

    def probe(self, random: Random, size: int) -> str:
        """Why a usual call of this thread is not replayed; empty where it is."""
        args, _ = self.request(random, size)
        with self.shared.alone():
            return _not_replayed(self.f, lambda: self.call(True, args, {}))

    def change(self, random: Random) -> None:
        """Change weights: write into the parameters, replace them, or swap the adapter."""
        with self.shared.alone(), torch.no_grad():
            if isinstance(self.module, Mlp) and random.random() < 0.7:
                self.module.adapter = random.choice(self.adapters)
            else:
                self.module.load_state_dict(random.choice(self.spare), assign=random.random() < 0.2)


def _adapters(device: torch.device) -> list[nn.Sequential]:
    """Three adapters."""
    made = [(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)) for _ in range(3)]
    return [nn.Sequential(*layers).to(device) for layers in made]


class Training(Service):
    """A service with gradients through a region that all threads share; each thread gets its own gradients."""

    may_time_out = False

    @override
    def call(self, ours: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            result = self.f(*args, **kwargs) if ours else type(self.module).forward(self.module, *args, **kwargs)
        except (ValueError, IndexError) as error:
            return f"{type(error).__name__}: {error}"
        leaves = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else [result]
        loss = sum(leaf.square().mean() for leaf in leaves)
        used = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        return [leaf.detach() for leaf in leaves], torch.autograd.grad(loss, used, allow_unused=True)


class Drawing(Service):
    """A function that draws from the request's generator and uses its number."""

    def __init__(self, number: int, device: torch.device, eager: bool) -> None:
        self.device, self.shared = device, Shared()
        self.f = _served(scaled, eager, name=f"scaled{number}", max_recordings=12)  # three numbers for each size

    @override
    def request(self, random: Random, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            self.drawn(size),
            random.choice([0.5, 1.0, 2.0]),
            random.randrange(1000),
        ), {}

    @override
    def call(self, ours: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, factor, seed = args
        generator = torch.Generator(self.device).manual_seed(seed)
        with torch.no_grad():
            return (self.f if ours else scaled)(x, factor, generator), generator.initial_seed()

    @override
    def change(self, random: Random) -> None:
        pass


class Sessions(Service):
    """A service with a state for each thread."""

    def __init__(self, number: int, device: torch.device, eager: bool) -> None:
        self.device, self.shared, self.number, self.eager = device, Shared(), number, eager
        self._local = threading.local()

    def pair(self) -> tuple[Cell, Cell, Any]:
        """This thread's captured cell, eager cell, and the function that is called."""
        if not hasattr(self._local, "pair"):
            ours, eager = Cell().to(self.device), Cell().to(self.device)
            eager.load_state_dict(ours.state_dict())
            ours.h = eager.h = torch.zeros(1, WIDTH, device=self.device)
            self._local.pair = ours, eager, _served(ours, self.eager, name=f"cell{self.number}")
        own: tuple[Cell, Cell, Any] = self._local.pair
        return own

    @override
    def answer(self, random: Random, size: int, arm: Callable[[], None]) -> Answer:
        ours, eager, f = self.pair()
        x = self.drawn(size % 4 + 1)
        with torch.no_grad():
            h, count = eager.h, eager.count.clone()
            begin = clock()
            result = eager(x)
            eager_took, expected = clock() - begin, (result, eager.h, eager.count.clone())
            try:
                arm()
                begin = clock()
                result = f(x)
                took = clock() - begin
                return (result, ours.h, ours.count.clone()), expected, took, eager_took
            except TimeoutError:
                disarm()
                # the call was stopped before, between or after its two writes
                if torch.equal(ours.count, count) or torch.equal(ours.h, h):
                    eager.h = h
                eager.count.copy_(ours.count)
                if not torch.equal(ours.h, eager.h) or float(ours.count - count) not in (0, 1):
                    return "a state that eager does not leave", None, 0.0, 0.0
                raise

    @override
    def answer_eagerly(self, random: Random, size: int) -> None:
        """Each thread has its own state, and four sizes in all."""

    @override
    def probe(self, random: Random, size: int) -> str:
        _, eager, f = self.pair()
        x = self.drawn(2)
        with torch.no_grad():
            eager(x)
            return _not_replayed(f, lambda: f(x))

    @override
    def change(self, random: Random) -> None:
        pass


def _served(function: Any, eager: bool, **options: Any) -> Any:
    return function if eager else capture(function, **options)


def services(device: torch.device, *, eager: bool = False) -> list[Service]:
    """The thirty services. ``eager``: none is captured."""
    torch.manual_seed(0)
    made: list[Service] = [Service(Mlp, depth, device, eager) for depth in range(1, 9)]
    made += [Service(Attention, depth, device, eager) for depth in range(1, 6)]
    made += [Service(Lookup, depth, device, eager) for depth in range(1, 5)]
    made += [Training(kind, depth, device, eager) for kind in (Mlp, Attention) for depth in range(1, 4)]
    made += [Drawing(number, device, eager) for number in range(3)]
    return made + [Sessions(number, device, eager) for number in range(4)]
