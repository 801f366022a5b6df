"""Parked: gradients that a body drops unread wait on the host while it is recorded.

The caller's gradients stay until a recording has come to something, as a failure must leave them, while the recording
makes the next ones in its pool: without this a whole training step would need their memory twice, for good.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from attrs import define, field

from capture import _containers, _state
from capture._call import Call
from capture._containers import TENSOR_TYPES
from capture._entry import Entry
from capture._liveness import Held, hold
from capture._torch_private import storage_use_count, use_count

WORTH = 32 << 20  # bytes; a copy to the host and back takes 0.2 ms a MiB, where the recording fails


@define
class Parked:
    """Tensors whose memory was given up, each with its values."""

    _kept: list[tuple[Held, torch.Tensor, int]] = field(factory=list)
    nbytes: int = 0

    def park(self, tensors: list[torch.Tensor]) -> None:
        """Copy to the host and give the memory up."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._kept.append((hold(storage), whole.cpu(), storage.nbytes()))
            self.nbytes += storage.nbytes()
            del whole
            storage.resize_(0)

    def settle(self) -> None:
        """Whoever is still there gets its values back."""
        kept, self._kept = self._kept, []
        with torch.no_grad():
            for reference, values, nbytes in kept:
                storage = reference()
                if storage is not None and not storage.nbytes():
                    storage.resize_(nbytes)
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(values)


def parked(entry: Entry, call: Call) -> Parked:
    """Park the gradients that the plan replaces without reading them, and that nobody else has."""
    found = Parked()
    paths = _dropped(entry)
    if not paths:
        return found
    with torch.no_grad(), torch.inference_mode(False):
        tensors = list(_alone(call, paths))
        if sum(one.untyped_storage().nbytes() for one in tensors) >= WORTH:
            found.park(tensors)
    return found


def _dropped(entry: Entry) -> set[str]:
    if entry.facts is None or entry.plan is None:
        return set()
    read = {one.path for one in entry.facts.placeholders}
    names = {effect.path for effect in entry.plan.effects if effect.kind == "tensor" and effect.path.endswith(".grad")}
    return {name for name in names if not any(path == name or path.startswith(f"{name}.") for path in read)}


def _alone(call: Call, paths: set[str]) -> Iterator[torch.Tensor]:
    """Plain tensors below the places, held by nothing but a parameter, or by a tensor that a parameter alone holds."""
    places = _state.snapshot(call.roots()).places
    holders = [places[path][0].holder for path in sorted(paths) if path in places]
    del places
    shared: dict[int, list[torch.Tensor]] = {}
    for holder in holders:
        if isinstance(holder, torch.Tensor):
            for one in _members(holder):
                shared.setdefault(id(one.untyped_storage()), []).append(one)
    for several in shared.values():  # on one storage, as those are that ``fully_shard`` reduced together
        storage = several[0].untyped_storage()
        if storage.resizable() and storage_use_count(storage) == len(several) + 1:
            yield several[0]


def _members(holder: torch.Tensor) -> Iterator[torch.Tensor]:
    gradient = holder.grad
    if gradient is None or gradient.requires_grad:
        return
    if sys.getrefcount(gradient) > _mine[0] or use_count(gradient) > _mine[1]:  # somebody else has it
        return
    for _, leaf in _containers.leaves(gradient):
        if type(leaf) in TENSOR_TYPES and leaf.layout is torch.strided and leaf.device.type == "cuda":
            yield leaf


def _probe() -> tuple[int, int]:
    """References that a look at a parameter's gradient makes itself, in Python and in C++."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    gradient = parameter.grad
    return sys.getrefcount(gradient), use_count(gradient)


_mine = _probe()
