"""More bodies written in the style of well-known libraries: agents, graphs, solvers, routers, schedulers, decoders."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.guards.library_modules import (
    ATTENTION,
    Body,
    FrozenDict,
    PretrainedConfig,
    Processor,
    Settings,
    cholesky_jitter,
    gaussian,
    lightning,
    lora,
    products,
    ramp,
    transformer,
    unet,
)
from tests.support.device import DEVICE

# -------------------------------------------------------------------------- an agent with its optimizer and its replays


class Replays:
    def __init__(self) -> None:
        self.buffer: collections.deque[float] = collections.deque([1.0, 2.0], maxlen=4)
        self.full = False

    def __len__(self) -> int:
        return len(self.buffer)


class Agent:
    def __init__(self) -> None:
        self.policy, self.target = nn.Linear(8, 8).to(DEVICE), nn.Linear(8, 8).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.125)
        self.replays, self.gamma, self.schedule = Replays(), 0.5, [(0, 1.0), (10, 0.5)]
        self.loss_of: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss}
        self.loss = "mse"

    def learn(self, x: Tensor) -> Tensor:
        if len(self.replays) < 2:
            return x.sum()
        epsilon = next(value for start, value in reversed(self.schedule) if start <= len(self.replays))
        with torch.no_grad():
            goal = self.gamma * self.target(x)
        loss = self.loss_of[self.loss](self.policy(x), goal) * epsilon
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def agent() -> Body:
    trained = Agent()
    switches = {
        "gamma": lambda: setattr(trained, "gamma", 0.75),
        "rate": lambda: trained.optimizer.param_groups[0].update(lr=0.25),
        "loss": lambda: setattr(trained, "loss", "l1"),
        "replays": lambda: trained.replays.buffer.extend([1.0] * 4),
        "schedule": lambda: trained.schedule.insert(1, (1, 0.25)),
        "weight decay": lambda: trained.optimizer.param_groups[0].update(weight_decay=0.5),
    }
    return Body(trained.learn, (ramp(3, 8),), switches)


# ----------------------------------------------------------------------------------- graphs in a data object, as in PyG


class Storage(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Data:
    def __init__(self, **named: Any) -> None:
        self.__dict__["_store"] = Storage(named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_store"], name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        self._store[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._store


class GraphConv(nn.Module):
    def __init__(self, data: Data) -> None:
        super().__init__()
        self.linear, self.data, self.aggr = nn.Linear(4, 4), data, "add"
        self.inspector = {"message": ("x_j", "weight")}

    def message(self, **named: Any) -> Tensor:
        return named["x_j"] * named["weight"]  # type: ignore[no-any-return]

    @override
    def forward(self, x: Tensor) -> Tensor:
        source, goal = self.data.edges
        given = {"x_j": x[source], "weight": self.data.weight if "weight" in self.data else 1.0}
        out = torch.zeros_like(x).index_add(0, goal, self.message(**{k: given[k] for k in self.inspector["message"]}))
        return self.linear(out / self.data.count if self.aggr == "mean" else out)  # type: ignore[no-any-return]


def graphs() -> Body:
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]], device=DEVICE)
    data = Data(edges=edges, weight=2.0, count=2.0)
    net = GraphConv(data).to(DEVICE)
    switches = {
        "weight": lambda: setattr(data, "weight", 3.0),
        "unweighted": lambda: data._store.pop("weight"),
        "aggregation": lambda: setattr(net, "aggr", "mean"),
        "edges": lambda: setattr(data, "edges", edges.flip(0)),
    }
    return Body(net, (ramp(3, 4),), switches)


# ------------------------------------------------------------------------- solvers and their options, as in torchdiffeq


@dataclasses.dataclass
class Options:
    step_size: float = 0.25
    method: str = "midpoint"
    perturb: bool = False
    grid: tuple[float, ...] = (0.0, 0.25, 0.5)


class Euler:
    order = 1

    def __init__(self, options: Options) -> None:
        self.options = options

    def step(self, function: Any, t: float, y: Tensor) -> Tensor:
        return y + self.options.step_size * function(t, y)  # type: ignore[no-any-return]


class Midpoint(Euler):
    order = 2

    @override
    def step(self, function: Any, t: float, y: Tensor) -> Tensor:
        half = self.options.step_size / self.order
        return y + self.options.step_size * function(t + half, y + half * function(t, y))  # type: ignore[no-any-return]


SOLVERS: dict[str, type[Euler]] = {"euler": Euler, "midpoint": Midpoint}


def equations() -> Body:
    options, function = Options(), nn.Linear(4, 4).to(DEVICE)

    def solve(y: Tensor) -> Tensor:
        solver = SOLVERS[options.method](options)
        for t in options.grid:
            y = solver.step(lambda t, y: torch.tanh(function(y)) * (1.0 + t), t, y)
        return y * (0.5 if options.perturb else 1.0)

    switches = {
        "step": lambda: setattr(options, "step_size", 0.5),
        "method": lambda: setattr(options, "method", "euler"),
        "grid": lambda: setattr(options, "grid", (0.0, 0.5)),
        "perturb": lambda: setattr(options, "perturb", True),
        "order": lambda: setattr(Midpoint, "order", 4),
        "solvers": lambda: SOLVERS.__setitem__("midpoint", Euler),
    }
    return Body(solve, (ramp(3, 4),), switches)


# --------------------------------------------------------------------------------- a router over experts, by a registry


class Registry:
    _known: ClassVar[dict[str, type[nn.Module]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
        return lambda kind: cls._known.setdefault(name, kind)

    @classmethod
    def get(cls, name: str) -> type[nn.Module]:
        return cls._known[name]


@Registry.register("soft")
class Soft(nn.Module):
    temperature = 1.0

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x / self.temperature, -1)


@Registry.register("even")
class Even(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, 1.0 / x.shape[-1])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.kind = nn.Linear(4, 3), "soft"
        self.experts = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(3)})
        self.capacity: collections.defaultdict[str, float] = collections.defaultdict(lambda: 1.0, {"0": 2.0})
        self.disabled: set[str] = set()

    @override
    def forward(self, x: Tensor) -> Tensor:
        weights = Registry.get(self.kind)()(self.gate(x))
        used = [(i, one) for i, one in enumerate(self.experts.values()) if str(i) not in self.disabled]
        parts = [weights[:, i : i + 1] * one(x) * self.capacity.get(str(i), 1.0) for i, one in used]
        return torch.stack(parts).sum(0)


def experts() -> Body:
    net = Experts().to(DEVICE)
    switches = {
        "kind": lambda: setattr(net, "kind", "even"),
        "capacity": lambda: net.capacity.update({"1": 0.5}),
        "disabled": lambda: net.disabled.add("2"),
        "temperature": lambda: setattr(Soft, "temperature", 2.0),
        "registry": lambda: Registry._known.update(soft=Even),
        "pruned": lambda: net.experts.__delitem__("2"),
    }
    return Body(net, (ramp(3, 4),), switches)


# ----------------------------------------------------------------------------------------- a scheduler, as in diffusers


class Scheduler:
    order = 1

    def __init__(self) -> None:
        self.config: Any = FrozenDict(prediction_type="epsilon", clip_sample=True, clip_range=0.5)
        self.alphas = [0.9, 0.5, 0.1]
        self.timesteps = {2: 0.1, 1: 0.5, 0: 0.9}
        self._step_index: int | None = None

    @property
    def step_index(self) -> int:
        return 1 if self._step_index is None else self._step_index

    def step(self, sample: Tensor) -> Tensor:
        alpha = self.alphas[self.step_index] ** self.order
        match self.config.prediction_type:
            case "epsilon":
                sample = sample * alpha
            case "sample":
                sample = sample - alpha
            case prediction:
                raise ValueError(f"unknown {prediction}")
        if self.config.clip_sample:
            sample = sample.clamp(-self.config["clip_range"], self.config.clip_range)
        return sample * self.timesteps[self.step_index]


def scheduler() -> Body:
    made = Scheduler()
    switches = {
        "config": lambda: setattr(made, "config", FrozenDict(prediction_type="sample", clip_sample=False)),
        "attribute": lambda: setattr(made.config, "prediction_type", "sample"),
        "item": lambda: made.config.update(clip_range=0.125),
        "alphas": lambda: made.alphas.__setitem__(1, 0.25),
        "index": lambda: setattr(made, "_step_index", 2),
        "order": lambda: setattr(Scheduler, "order", 2),
    }
    return Body(made.step, (ramp(3, 4),), switches)


# --------------------------------------------------------------------------------- decoding, with states and processors


class State(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


FORCED: contextvars.ContextVar[float | None] = contextvars.ContextVar("FORCED", default=None)


class Decoder:
    def __init__(self) -> None:
        self.head, self.state = nn.Linear(4, 5).to(DEVICE), State.DECODE
        self.processors: list[Callable[[Tensor], Tensor]] = [self.temperature, functools.partial(torch.clamp, max=0.5)]
        self.options: Mapping[str, Any] = types.MappingProxyType({"temperature": 2.0, "steps": 2})
        self.stop, self.score = frozenset({3, 4}), operator.attrgetter("options")

    def temperature(self, logits: Tensor) -> Tensor:
        return logits / self.options["temperature"]  # type: ignore[no-any-return]

    def decode(self, x: Tensor) -> Tensor:
        for turn in range(self.options["steps"]):
            logits = self.head(x)
            if self.state is State.PREFILL:
                return logits  # type: ignore[no-any-return]
            for processor in self.processors:
                logits = processor(logits)
            with contextlib.suppress(KeyError):
                logits = logits * self.score(self)["scale"]
            forced = FORCED.get()
            x = x + (logits[:, :4] if forced is None else forced)
            if turn in self.stop or self.state == State.DONE:
                break
        return x


def decoding() -> Body:
    decoder = Decoder()
    options = {"temperature": 1.0, "steps": 1, "scale": 3.0}
    switches = {
        "state": lambda: setattr(decoder, "state", State.PREFILL),
        "done": lambda: setattr(decoder, "state", State.DONE),
        "processors": lambda: decoder.processors.pop(),
        "options": lambda: setattr(decoder, "options", types.MappingProxyType(options)),
        "stop": lambda: setattr(decoder, "stop", frozenset({0})),
        "forced": lambda: FORCED.set(1.0),
    }
    return Body(decoder.decode, (ramp(3, 4),), switches)


BODIES: dict[str, Callable[[], Body]] = {
    "transformers": transformer, "PEFT": lora, "diffusers block": unet, "Lightning": lightning, "gpytorch": gaussian,
    "e3nn": products, "agent": agent, "PyG": graphs, "torchdiffeq": equations, "router": experts,
    "scheduler": scheduler, "decoding": decoding,
}  # fmt: skip
_TABLES: tuple[dict[str, Any], ...] = (ATTENTION, PretrainedConfig.attribute_map, Registry._known, SOLVERS)
_CLASSES = ((Processor, "__call__"), (cholesky_jitter, "_state"), (Settings, "_state"), (Midpoint, "order"),
            (Soft, "temperature"), (Scheduler, "order"))  # fmt: skip


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Undo, at the end of the block, what a switch changes for the whole process."""
    tables = [(table, dict(table)) for table in _TABLES]
    kept: list[tuple[type, str, Any]] = [(kind, name, kind.__dict__.get(name)) for kind, name in _CLASSES]
    try:
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)
        for kind, name, value in kept:
            if value is not None:
                setattr(kind, name, value)
            elif name in kind.__dict__:
                delattr(kind, name)
