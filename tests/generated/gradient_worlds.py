"""The worlds of random training programs: what trains, what waits for its backward pass, what is compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from capture import capture
from tests.generated.comparison import state_of, tensors_of
from tests.support.device import DEVICE, rng_state, set_rng_state

C = TypeVar("C")
WIDTH = 4
ROWS = 3
LIMIT = 4
"""The most pending losses, and the most held tensors."""
KNOWN: frozenset[str] = frozenset()
"""Regions, steps and actions left out while a bug they find is open."""


@define(eq=False)
class Pending:
    """A forward pass whose backward pass may still come."""

    loss: Tensor
    inputs: list[Tensor]
    outputs: list[Tensor]
    """The outputs that the caller keeps."""
    parts: tuple[Part, ...]


@define(eq=False)
class Part:
    """Captured functions over one module, its optimizer, and a captured step over both."""

    name: str
    module: nn.Module
    functions: list[Callable[..., Any]]
    ids: bool = False
    """Whether its input is indices and not a matrix."""
    once: bool = True
    """Whether each parameter is used once."""
    optimizer: Any = None
    step: Any = None
    said: str = ""
    """Names of step and optimizer."""


@define(eq=False)
class World:
    """One of the two sides that are compared: everything that a caller owns."""

    captured: bool
    outputs: Literal["preserve", "clone"] = "preserve"
    inputs: Literal["auto", "bind"] = "auto"
    parts: list[Part] = field(factory=list)
    pending: list[Pending] = field(factory=list)
    held: list[Tensor] = field(factory=list)
    former: list[Tensor] = field(factory=list)
    """Parameters that were replaced."""
    hooks: list[RemovableHandle] = field(factory=list)
    decorated: list[Any] = field(factory=list)
    scratch: list[tuple[str, Any]] = field(factory=list)
    rng: Tensor = field(factory=lambda: torch.Generator(DEVICE).manual_seed(5).get_state())

    def capture(self, target: C) -> C:
        """``capture`` in the captured world, nothing in the other."""
        if not self.captured:
            return target
        function: Any = target
        self.decorated.append(capture(function, outputs=self.outputs, inputs=self.inputs))
        made: C = self.decorated[-1]
        return made

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Use this world's generator state during one action."""
        set_rng_state(self.rng)
        with torch.enable_grad():
            yield
        self.rng = rng_state()

    def parameters(self) -> list[Tensor]:
        """The parameters of all parts, each once."""
        found = {id(p): p for part in self.parts for p in part.module.parameters()}
        return list(found.values())

    def forget_gradients(self) -> None:
        """Clear gradients as a caller does after a backward pass that raised."""
        waiting = [tensor for one in self.pending for tensor in (*one.inputs, *one.outputs)]
        for tensor in (*self.parameters(), *self.former, *[t for t in waiting if t.is_leaf or t.retains_grad]):
            tensor.grad = None
        self.held.clear()


def everything(w: World) -> list[tuple[str, Any]]:
    """All that a caller of this world can see, in the same order in both worlds."""
    tensors_seen: list[tuple[str, Any]] = []
    for index, part in enumerate(w.parts):
        for name, value in state_of(part.module, f"{index}.{part.name}"):
            tensors_seen += _with_gradient(name, value)
        for group in part.optimizer.param_groups:
            for at, parameter in enumerate(group["params"]):
                state = part.optimizer.state.get(parameter, {})
                tensors_seen += [(f"{index}.{part.said}.{at}.{name}", value) for name, value in state.items()]
    for at, loss_to_come in enumerate(w.pending):
        tensors_seen.append((f"pending.{at}.loss", loss_to_come.loss))
        for kind, tensors in (("inputs", loss_to_come.inputs), ("outputs", loss_to_come.outputs)):
            for number, tensor in enumerate(tensors):
                tensors_seen += _with_gradient(f"pending.{at}.{kind}.{number}", tensor)
    tensors_seen += [(f"held.{at}", tensor) for at, tensor in enumerate(w.held)]
    for at, tensor in enumerate(w.former):
        tensors_seen += _with_gradient(f"former.{at}", tensor)
    for name, value in w.scratch:
        tensors_seen += [(f"{name}.{at}", tensor) for at, tensor in enumerate(tensors_of(value))]
    return tensors_seen


def _with_gradient(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Tensor):
        return [(name, value)]
    found: list[tuple[str, Any]] = [(name, value), (f"{name} is a leaf", value.is_leaf)]
    if value.is_leaf or value.retains_grad:
        found.append((f"{name}.grad", value.grad))
    return found
