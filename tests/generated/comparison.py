"""Random arguments, and everything that two worlds are compared by."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from capture.tree import thread_trees as thread_trees  # fmt: skip
from tests.generated.bodies import Owner
from tests.generated.worlds import KNOWN, Box, Mismatch, World, fresh

# ------------------------------------------------------------------------------------------------------------ arguments
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
ROWS = (4, 1, 2, 0, 3)
SHAPES = ((4, 4), (4,), (), (0, 4), (2, 3, 2), (1,))


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves of a result with their paths."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield f"{path}:type", type(value)
        for index, member in enumerate(value):
            yield from leaves(member, f"{path}.{index}")
    elif dataclasses.is_dataclass(value) or isinstance(value, (Box, Owner)):
        yield from leaves(vars(value), path)
    else:
        yield path, value


def tensors_of(value: Any) -> list[Tensor]:
    """Tensors among the leaves of a result."""
    return [leaf for _, leaf in leaves(value, "") if isinstance(leaf, Tensor)]


class Arguments:
    """Makes the arguments of a call. ``form`` chooses the kinds of tensors, ``seed`` the values of new ones."""

    def __init__(self, world: World, form: int, seed: int, first: Tensor | None = None) -> None:
        self._world, self._form, self._seed, self._first = world, form, seed, first
        self._tensors: list[Tensor] = []

    def pick(self, spec: str) -> tuple[Any, ...]:
        """One argument a letter of ``spec``."""
        return tuple([self._one(letter) for letter in spec])

    def _digit(self, base: int = 16) -> int:
        self._form, digit = divmod(self._form, base)
        return digit

    def _one(self, letter: str) -> Any:
        world = self._world
        self._seed += 1
        if letter in "mra":
            tensor = self._tensor(letter)
            self._tensors.append(tensor)
            return tensor
        if letter == "l":
            return [self._one("m"), self._one("m")]
        if letter == "i":
            return fresh((3,), torch.int64, self._seed) % 4
        if letter == "p":
            return torch.tensor([self._seed % 4])
        if letter == "k":
            return self._digit(4) % 3
        if letter == "f":
            return (0.5, 2.0, -0.0, float("nan"))[self._digit(4)]
        if letter == "b":
            return self._seed % 4 == 3
        if letter == "g":
            return world.generators[self._digit(4) == 3]
        if letter == "c":
            return world.caches[self._digit(4) == 3]
        digit = self._digit(8)
        usual = len(self._tensors) % 2
        tensor = (
            world.statics[(usual, usual, usual, usual, usual, 1 - usual, 2)[digit]] if digit < 7 else world.tensors[0]
        )
        self._tensors.append(tensor)
        return tensor

    def _tensor(self, letter: str) -> Tensor:
        if self._first is not None and not self._tensors:
            return self._first
        world, seed, form = self._world, self._seed, self._digit()
        previous = self._tensors[-1] if self._tensors else None
        plain = fresh((4, 4), seed=seed)
        fitting = (lambda t: True) if letter == "a" else (lambda t: t.dtype is torch.float32 and t.shape == (4, 4))
        if form == 6:
            return world.tensors[seed % 2]
        if form == 7:
            return world.tensors[0]
        if form in (8, 9):
            kept = [tensor for tensor in tensors_of(world.held) if fitting(tensor)]
            return kept[-1 - seed % len(kept) if form == 9 else -1] if kept else plain
        if form == 10 and previous is not None and fitting(previous) and "same_twice" not in KNOWN:
            return previous
        if form == 11 and previous is not None and fitting(previous) and previous.dim() == 2:
            return previous.t()
        if letter == "m":
            return self._odd_matrix(form, plain)
        if form in (12, 13):
            return fresh((ROWS[self._digit(8) % 5], 4), seed=seed)
        if form == 14 and letter == "a":
            return fresh(SHAPES[self._digit(8) % 6], DTYPES[self._digit(8) % 6], seed)
        if form == 15:
            return fresh((6, 4), seed=seed)[self._digit(2) :: 2]
        return plain

    def _odd_matrix(self, form: int, plain: Tensor) -> Tensor:
        if form == 12:
            return plain.t()
        if form == 13 and "misaligned" not in KNOWN:
            return fresh((17,), seed=self._seed)[1:].reshape(4, 4)
        if form == 14:
            return plain[:1].expand(4, 4)
        if form == 15:
            base = self._world.tensors[2]
            return base[1:].view(-1)[:16].view(4, 4) if self._digit(2) else base[:4]
        return plain


# ------------------------------------------------------------------------------------------------------------ comparing
def bits(tensor: Tensor) -> Tensor:
    """The values as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def metadata(tensor: Tensor) -> tuple[Any, ...]:
    """Everything but values and place."""
    return (
        type(tensor), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad,
        tensor.is_inference(), tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def state_of(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers, flags and plain attributes of a module and its children."""
    for prefix, member in module.named_modules():
        at = f"{path}.{prefix}"
        for table in (member._parameters, member._buffers):
            for name, tensor in table.items():
                yield f"{at}.{name}", tensor
        for name, value in vars(member).items():
            if not name.startswith("_") and name != "forward":
                yield from leaves(value, f"{at}.{name}")


def everything(world: World) -> list[tuple[str, Any]]:
    """All that a caller of this world can see, in the same order in both worlds."""
    found: list[tuple[str, Any]] = []
    owned = (("tensors", world.tensors), ("statics", world.statics), ("caches", world.caches), ("held", world.held))
    for name, values in (*owned, *world.objects, *world.scratch, ("generators", world.generators)):
        found.extend(state_of(values, name) if isinstance(values, nn.Module) else leaves(values, name))
    return found


def sharing(tensors: list[tuple[str, Tensor]]) -> dict[str, tuple[int, int, int]]:
    """Per tensor: which earlier one is the same object, which shares its storage, and the distance in bytes."""
    objects: dict[int, int] = {}
    storages: dict[int, tuple[int, int]] = {}
    shares = {}
    for index, (name, tensor) in enumerate(tensors):
        same = -1 if "identity" in KNOWN else objects.setdefault(id(tensor), index)
        if not tensor.numel():
            shares[name] = (same, -1, 0)
            continue
        address = tensor.data_ptr()
        first, begin = storages.setdefault(tensor.untyped_storage().data_ptr(), (index, address))
        shares[name] = (same, first, address - begin)
    return shares


def plain(value: Any) -> Any:
    """A value in a form that compares by content."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return (type(value), repr(value)) if isinstance(value, (int, float, complex, str, bytes)) else value


class Comparison:
    """Compares both worlds; remembers version counters from one time to the next. ``look``: all that is compared."""

    def __init__(self, look: Callable[[Any], list[tuple[str, Any]]] = everything) -> None:
        self._look = look
        self._versions: dict[str, tuple[weakref.ref[Tensor], int, weakref.ref[Tensor], int]] = {}

    def check(self, eager: Any, ours: Any) -> None:
        """Raise ``Mismatch`` at the first difference."""
        expected, actual = self._look(eager), self._look(ours)
        if [name for name, _ in expected] != [name for name, _ in actual]:
            raise Mismatch(f"structure: {[n for n, _ in expected]} != {[n for n, _ in actual]}")
        pairs: list[tuple[str, Tensor, Tensor]] = []
        for (name, a), (_, b) in zip(expected, actual, strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                pairs.append((name, a, b))
                self._tensors(name, a, b)
            elif not (a is b or plain(a) == plain(b)):
                raise Mismatch(f"{name}: {a!r} eagerly, {b!r} captured")
        mine, theirs = sharing([(n, b) for n, _, b in pairs]), sharing([(n, a) for n, a, _ in pairs])
        names = [name for name, _, _ in pairs]
        for name in names:
            if mine[name] != theirs[name]:
                said = [
                    f"(is {names[s]}, on {names[f] if f >= 0 else None} + {d})"
                    for s, f, d in (theirs[name], mine[name])
                ]
                raise Mismatch(f"memory of {name}: {said[0]} eagerly, {said[1]} captured")
        if not torch.equal(eager.rng, ours.rng):
            raise Mismatch("state of the default generator")
        self._count(pairs)

    def _tensors(self, name: str, a: Tensor, b: Tensor) -> None:
        if metadata(a) != metadata(b):
            raise Mismatch(f"metadata of {name}: {metadata(a)} eagerly, {metadata(b)} captured")
        if not torch.equal(bits(a), bits(b)):
            raise Mismatch(f"values of {name}: {a!r} eagerly, {b!r} captured")

    def _count(self, pairs: list[tuple[str, Tensor, Tensor]]) -> None:
        before, self._versions = self._versions, {}
        for name, a, b in pairs:
            if "versions" in KNOWN or a.is_inference() or b.is_inference() or name.startswith("result"):
                continue
            self._versions[name] = (weakref.ref(a), a._version, weakref.ref(b), b._version)
            then = before.get(name)
            same = then is not None and then[0]() is a and then[2]() is b
            if then is not None and same and then[1] != a._version and then[3] == b._version:
                raise Mismatch(f"{name} was written, but its version counter says nothing")
