"""The two worlds that a random program runs in, one captured and one eager, and how functions join the catalogue."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from capture import (
    capture,
)
from capture.tree import thread_trees as thread_trees  # fmt: skip
from tests.support.device import DEVICE, rng_state, set_rng_state

C = TypeVar("C")
KNOWN: frozenset[str] = frozenset()
"""Entries, actions and operations left out while a bug they find is open."""


class Boom(Exception):
    """The error that bodies raise on request."""


class Mismatch(AssertionError):
    """The captured world differs from the eager one."""


class Box:
    """An object with plain attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Pair(NamedTuple):
    """A namedtuple output."""

    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Record:
    """A dataclass output."""

    value: Tensor
    note: str
    parts: list[Tensor]


BANK = torch.randn(4096, generator=torch.Generator(DEVICE).manual_seed(7))


def fresh(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """A new tensor whose values follow from ``seed``."""
    size = 1
    for length in shape:
        size *= length
    start = (seed * 37) % 2048
    values = BANK[start : start + size].reshape(shape)
    if dtype is torch.bool:
        return values > 0
    if not dtype.is_floating_point and not dtype.is_complex:
        return (values * 3).to(dtype)
    return values.to(dtype, copy=True)


@define(eq=False)
class World:
    """One of the two sides that are compared: everything that a caller owns."""

    captured: bool
    inputs: Literal["auto", "bind"] = "auto"
    tensors: list[Tensor] = field(factory=list)
    statics: list[Tensor] = field(factory=list)
    caches: list[dict[str, Tensor]] = field(factory=list)
    generators: list[torch.Generator] = field(factory=list)
    objects: list[tuple[str, Any]] = field(factory=list)
    modules: list[nn.Module] = field(factory=list)
    knobs: list[Callable[[int], None]] = field(factory=list)
    cast: list[tuple[Entry, Callable[..., Any]]] = field(factory=list)
    decorated: list[Any] = field(factory=list)
    held: list[Any] = field(factory=list)
    scratch: list[tuple[str, Any]] = field(factory=list)
    rng: Tensor = field(factory=lambda: torch.Generator(DEVICE).manual_seed(3).get_state())
    gradients: int = 0
    """0: ``no_grad``, 1: inference mode, 2: gradients are recorded."""
    autocast: bool = False
    default: torch.dtype = torch.float32

    @overload
    def capture(self, target: C, /, **options: Any) -> C: ...
    @overload
    def capture(self, **options: Any) -> Callable[[C], C]: ...
    def capture(self, target: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]
        """``capture`` in the captured world, nothing in the other."""
        if target is None:
            return functools.partial(self.capture, **options)
        if not self.captured:
            return target
        self.decorated.append(capture(target, inputs=self.inputs, **options))
        return self.decorated[-1]

    def watch(self, name: str, value: Any) -> Any:
        """Compare this object's state after every action."""
        self.objects.append((name, value))
        self.modules += [value] if isinstance(value, nn.Module) else []
        return value

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Use this world's generator state and modes during one action."""
        set_rng_state(self.rng)
        torch.set_default_dtype(self.default)
        with (
            (torch.no_grad, torch.inference_mode, torch.enable_grad)[self.gradients](),
            torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=self.autocast),
        ):
            yield
        torch.set_default_dtype(torch.float32)
        self.rng = rng_state()


Build = Callable[[World], Any]
Body = tuple[tuple[int, int, int], ...]
"""A generated body: (operation, register, register) each."""


@frozen
class Entry:
    """One function of the catalogue. ``spec``: a letter an argument, as ``Arguments`` reads them."""

    name: str
    spec: str
    build: Build
    borrow: bool = False
    eager: bool = False
    """Whether it can never be recorded."""


CATALOGUE: dict[str, Entry] = {}


def entry(spec: str, *, borrow: bool = False, eager: bool = False) -> Callable[[Build], Build]:
    """Add a function to the catalogue."""

    def add(build: Build) -> Build:
        CATALOGUE[build.__name__] = Entry(build.__name__, spec, build, borrow, eager)
        return build

    return add


def reglobal(function: Any, scope: dict[str, Any]) -> Any:
    """A copy of the function with globals of its own."""
    scope.update({**function.__globals__, **scope})
    return types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
