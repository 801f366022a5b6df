"""Tensors that a graph cannot read where they are, most of them on the CPU.

A CPU tensor that comes from outside the body gets a copy on the device, filled before every replay, and so does a
device tensor in Python state that is another one in every call. Where the body takes a view of one from outside on the
CPU, or converts it (``torch.from_numpy(x).float().to(device)``), the graph does so with its copy. A CPU tensor that the
body makes of constants is a constant. All else refuses the recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from capture.core.data import frozen
from capture.engines.base import Geometry, StateTensors
from capture.engines.cuda.capture_graph import RefusedError
from capture.engines.cuda.copy_in import DeviceConstant, DeviceCopy, make_device_copy
from capture.engines.cuda.pool import CudaPool
from capture.engines.staging import over
from capture.observe.operator_schema import (
    CONVERSIONS,
    Operator,
    OperatorTraits,
    is_alike_everywhere,
    is_mask,
    keeps_bits,
    tensors_in,
)
from capture.state.snapshot import Snapshot
from capture.torch_private.capabilities import unseen

# With a CPU scalar these give the bits they give with a device scalar of the same type. Others do not: `div` multiplies
# by an inverse made on the host, `pow` has kernels for some exponents (torch 2.11, aten/src/ATen/native/cuda).
_SAME_BITS = frozenset(
    {
        "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum",
        "where", "masked_fill", "masked_fill_", "index", "index_put", "index_put_", "_index_put_impl_",
        "_unsafe_index", "_unsafe_index_put", "fill", "fill_",
    }
)  # fmt: skip
_COPIES = frozenset(["_to_copy", "copy_", "copy", "device_put"])


@frozen
class Replacement:
    """What a CPU tensor may be replaced by in a call of ``op``."""

    op: OperatorTraits
    copied: bool
    """A constant, by a copy on the device: indexing makes one of CPU indices and values, which no capture survives."""
    device_copy: bool
    """One from outside, by a tensor that is filled before every replay. Not a number that is filled in under a mask:
    with a device tensor the operator counts the mask's elements."""


@frozen(eq=False)
class Converted:
    """A CPU tensor that the body converted from one that came from outside: the graph does so where it is used."""

    storage: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype
    origin: torch.Tensor | Converted
    """What the device has of the tensor that it was converted from. A tensor on the CPU is kept by the body alone."""
    geometry: Geometry
    """Of the tensor that it was converted from: the same elements in the same order."""

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The device's view of a CPU tensor on the same storage; None if it reads the memory as something else."""
        if tensor.dtype != self.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        return self._view(Geometry.of(tensor))

    def _view(self, geometry: Geometry) -> torch.Tensor:
        origin = self.origin._view(self.geometry) if isinstance(self.origin, Converted) else self.origin
        there = origin.to(self.dtype)
        return over(there.untyped_storage(), evolve(geometry, offset=geometry.offset + int(there.storage_offset())))


class HostTensors:
    """CPU tensors of one recording. ``device_copies``: what has to be copied before a replay."""

    def __init__(self, pool: CudaPool, arguments: list[tuple[str, Any]], before: Snapshot, state: StateTensors) -> None:
        self._pool = pool
        self._before = before
        self._positions: dict[int, tuple[int, torch.Tensor]] = {}
        for position, (_, leaf) in enumerate(arguments):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
                self._positions.setdefault(id(leaf.untyped_storage()), (position, leaf))
        self.device_copies: dict[int, DeviceCopy] = {}
        self.constants: list[DeviceConstant] = []
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._converted: dict[int, Converted] = {}
        self._unowned: dict[int, torch.Tensor] = {}
        self._halves: set[torch.dtype] = set()
        self.moving: dict[int, tuple[str, torch.Tensor]] = {}
        """Device tensors in Python state that are others in the next call, by ``id`` of their storage."""
        for path in state.moving:
            value = before.sources[path][1] if path in before.sources else None
            if isinstance(value, torch.Tensor) and value.device == pool.device:
                self._note_moving(path, value)
        argument_storages = {id(leaf.untyped_storage()) for _, leaf in arguments if isinstance(leaf, torch.Tensor)}
        for key, owners in before.tensors.items():  # a tensor in the pool is replaced soon, if it is not written
            source, value = owners[0]
            if (
                key not in argument_storages
                and state.written.isdisjoint(owner.path for owner, _ in owners)
                and value.device == pool.device
                and value.numel()
                and pool.knows(value.data_ptr())
            ):
                self._note_moving(source.path, value)

    def run(self, op: Operator, op_traits: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of which at least one tensor is on the CPU."""
        if op_traits.lifts:
            return self._lift(op, op_traits, args, kwargs)
        devices = {tensor.device.type for tensor in tensors_in(args, kwargs)}
        target = _target(op_traits, args, kwargs)
        if devices == {"cpu"} and (target is None or target.type == "cpu"):
            return self._on_host(op, op_traits, args, kwargs)
        if op_traits.base in _COPIES:
            return self._copy(op, op_traits, args, kwargs)
        tensors = tensors_in(args, kwargs)
        self._halves = {
            tensor.dtype for tensor in tensors if tensor.dtype in (torch.float16, torch.bfloat16) and tensor.is_cuda
        }
        masked = op_traits.indexes and any(is_mask(index) for index in args[1])
        replacement = Replacement(
            op_traits, copied=op_traits.indexes and not masked, device_copy=op_traits.base in _SAME_BITS and not masked
        )
        named = {name: self._replace(value, replacement) for name, value in kwargs.items()}
        return op(*[self._replace(value, replacement) for value in args], **named)

    def _lift(self, op: Operator, op_traits: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``torch.tensor(...)`` has made a constant; a graph that was traced before copies one that it holds."""
        converted = self._conversion_of(args[0])
        if converted is None and not self._is_literal(op_traits, args[0]):
            raise RefusedError(f"{op_traits.name} takes a CPU tensor that others may write between calls")
        result = op(*args, **kwargs)
        if converted is not None:
            self._note_conversion(op_traits, args[0], result)
        else:
            self.note_constant(result)
        return result

    def _on_host(self, op: Operator, op_traits: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        constant = all(self._is_constant(tensor) for tensor in tensors_in(args, kwargs))
        view = not op_traits.writes and any(a.alias_info is not None for a in op._schema.arguments)
        converts = op_traits.base in CONVERSIONS and is_alike_everywhere(op_traits, args, kwargs)
        if op_traits.draws or not (constant or view or converts):
            raise RefusedError(_differs(op_traits))
        result = op(*args, **kwargs)
        if constant and not view:
            for tensor in tensors_in((result,), {}):
                self.note_constant(tensor)
        elif converts and not view:
            self._note_conversion(op_traits, args[0], result)
        return result

    def _note_conversion(self, op_traits: OperatorTraits, source: torch.Tensor, result: torch.Tensor) -> None:
        """The result has the elements of the source, which came from outside, in the same order."""
        storage = result.untyped_storage()
        if storage is source.untyped_storage():
            return
        before = self._conversion_of(source)
        if before is not None:
            origin: torch.Tensor | Converted | None = before if before.dtype == source.dtype else None
        else:
            device_copy = self._device_copy(source)
            origin = device_copy.view_of(source) if device_copy is not None else None
        if origin is None or not keeps_bits(source.dtype, result.dtype) or result.stride() != source.stride():
            raise RefusedError(_differs(op_traits))
        self._converted[id(storage)] = Converted(weakref.ref(storage), result.dtype, origin, Geometry.of(source))

    def _conversion_of(self, tensor: torch.Tensor) -> Converted | None:
        storage = tensor.untyped_storage()
        converted = self._converted.get(id(storage))
        return converted if converted is not None and converted.storage() is storage else None

    def _is_literal(self, op_traits: OperatorTraits, tensor: torch.Tensor) -> bool:
        """Whether nobody can write what is lifted, or put another tensor in its place."""
        storage = tensor.untyped_storage()
        if self._is_constant(tensor):
            return True
        if id(storage) in self._positions:
            return False
        if self._before.owners(storage):
            return not self._before.is_within_reach(storage)
        return (
            op_traits.base != "lift_fresh_copy" and storage.resizable()
        )  # else a graph keeps it, or an array lends it

    def _note_moving(self, path: str, value: torch.Tensor) -> None:
        storage = value.untyped_storage()
        if all(tensor is value for _, tensor in self._before.owners(storage)):
            self.moving[id(storage)] = (path, value)

    def is_copy(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on a buffer that is filled before every replay."""
        storage = tensor.untyped_storage()
        copies = [device_copy.storage for device_copy in self.device_copies.values()]
        return any(copy is storage or copy.data_ptr() == storage.data_ptr() for copy in copies)

    def original(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor in Python state that this one on the device is a copy of, or a view of a copy; None for others."""
        storage = tensor.untyped_storage()
        copies = [
            device_copy for device_copy in self.device_copies.values() if device_copy.tensor.device == tensor.device
        ]
        copy = next((copy for copy in copies if copy.storage is storage), None)
        if copy is None or tensor.is_neg():
            return None
        with unseen():  # it is no operator of the body's
            return copy.source_of(tensor)

    def will_write(self, tensors: Sequence[torch.Tensor]) -> None:
        """The operator that comes next writes these: not to a copy, which nobody would see."""
        for tensor in tensors:
            if id(tensor.untyped_storage()) in self.moving or self.is_copy(tensor):
                raise RefusedError("a tensor that is read through a copy is written")

    def replace_moving(self, value: Any) -> Any:
        """An operator's argument with tensors that move replaced by their copies in the pool."""
        if isinstance(value, (list, tuple)):
            return type(value)([self.replace_moving(member) for member in value])
        if not isinstance(value, torch.Tensor) or id(value.untyped_storage()) not in self.moving:
            return value
        storage = value.untyped_storage()
        path, owner = self.moving[id(storage)]
        device_copy = self.device_copies.get(id(storage))
        if device_copy is None:
            device_copy = self.device_copies[id(storage)] = make_device_copy(self._pool, path, owner)
        there = device_copy.view_of(value)
        if there is None:
            raise RefusedError(f"memory beside {path}, which is another tensor in every call, is read")
        return there

    def note_constant(self, tensor: torch.Tensor) -> None:
        """A CPU tensor that follows from constants of the body."""
        storage = tensor.untyped_storage()
        self._made[id(storage)] = weakref.ref(storage)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        made = self._made.get(id(storage))
        return made is not None and made() is storage

    def _copy(self, op: Operator, op_traits: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        into = op_traits.base in ("copy_", "copy")
        source = args[1] if into and len(args) > 1 else args[0]
        target = args[0].device if into else _target(op_traits, args, kwargs)
        if source.device.type != "cpu" or target is None or target.type == "cpu":
            raise RefusedError(f"{op_traits.name} copies to the CPU")
        outside = self._from_outside(source)
        if isinstance(outside, DeviceCopy):
            waits = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            outside.waits = outside.waits and waits
        if outside is not None:
            there = outside.view_of(source)
        else:
            constant = self._is_constant(source)
            there = self._constant(source)
            if not constant:
                self._unowned[id(there)] = there
        if there is None:
            raise RefusedError(f"{op_traits.name} copies memory beyond the CPU tensor it was given")
        if op_traits.base == "device_put":
            result = there.clone()  # it would hand on what is on the device already
        else:
            arguments = tuple(there if value is source else value for value in args)
            result = op(*arguments, **{**kwargs, "non_blocking": False} if "non_blocking" in kwargs else kwargs)
        if any(there is tensor for tensor in self._unowned.values()):
            self._unowned[id(result)] = self._unowned.pop(id(there))
        return result

    def note_lifted(self, tensor: torch.Tensor) -> None:
        """``torch.tensor(..., device=...)``: what was copied from the CPU just now is a constant of the body."""
        self._unowned.pop(id(tensor), None)

    def unexplained(self) -> str | None:
        """What was copied from the CPU without anybody known to own it."""
        return "a CPU tensor that nobody is known to own is copied to the device" if self._unowned else None

    def _replace(self, value: Any, replacement: Replacement) -> Any:
        """What the graph reads instead of a CPU tensor."""
        if isinstance(value, (list, tuple)):
            return type(value)([self._replace(member, replacement) for member in value])
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        if self._is_constant(value) and (replacement.copied or value.dim() == 0):
            return self._constant(value) if replacement.copied else value
        outside = self._from_outside(value) if replacement.device_copy and self._has_precision(value) else None
        there = outside.view_of(value) if outside is not None else None
        if there is None:
            raise RefusedError(
                f"{replacement.op.name} takes a CPU tensor, whose value the graph would freeze; pass a Python number "
                "or a tensor on the device"
            )
        return there

    def _has_precision(self, value: torch.Tensor) -> bool:
        """Whether a CPU scalar enters a kernel in the precision it computes in, a device scalar in the operands'
        type."""
        return not (value.dim() == 0 and self._halves and value.dtype not in self._halves)

    def _from_outside(self, tensor: torch.Tensor) -> DeviceCopy | Converted | None:
        """What gives the device a CPU tensor that came from outside, or one that was converted from such."""
        return self._conversion_of(tensor) or self._device_copy(tensor)

    def _device_copy(self, tensor: torch.Tensor) -> DeviceCopy | None:
        """The copy of a CPU tensor that came from outside; None for one that nobody is known to own."""
        storage = tensor.untyped_storage()
        device_copy = self.device_copies.get(id(storage))
        if device_copy is None:
            position, leaf = self._positions.get(id(storage), (None, None))
            owners = self._before.owners(storage)
            if leaf is not None and position is not None:
                device_copy = make_device_copy(self._pool, position, leaf)
            elif owners:
                device_copy = make_device_copy(self._pool, owners[0][0].path, owners[0][1])
            else:
                return None
            self.device_copies[id(storage)] = device_copy
        return device_copy

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for it on the device, outside of the pool; filled when the capture is over, as nothing runs before."""
        here = tensor.detach().clone(memory_format=torch.contiguous_format)  # the body may write to its own later
        geometry = evolve(Geometry.of(here), offset=0)
        there = over(self._pool.outside(here.untyped_storage().nbytes()), geometry)
        self.constants.append(DeviceConstant(here, there))
        return there


def _target(known: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that an operator names."""
    named = args[1] if known.base == "device_put" and len(args) > 1 else kwargs.get("device")
    return None if named is None else torch.device(named)


def _differs(known: OperatorTraits) -> str:
    return f"{known.name} computes on the CPU with values that may differ in the next call"
