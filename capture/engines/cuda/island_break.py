"""An island between two graphs: what it is called with in each replay.

Memory of the pool is lent to it through fresh tensors, so that a storage which outlives the call tells that it was
kept. A tensor of the caller's, or a view of one, is the caller's own again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import field

from capture.core.data import define, frozen
from capture.engines.base import Block, Geometry, IslandCall, views_of
from capture.engines.cuda.pool import CudaPool
from capture.engines.island_arguments import filled, template_of
from capture.observe.islands import Before, Given, Place, given_among


@frozen(eq=False)
class Owner:
    """Whose memory it is: the argument at this position, else a tensor of Python state."""

    position: int | None
    tensor: torch.Tensor | None

    def get(self, leaves: Sequence[Any]) -> torch.Tensor:
        """In this call."""
        if self.position is not None:
            found: torch.Tensor = leaves[self.position]
            return found
        assert self.tensor is not None
        return self.tensor


@frozen(eq=False)
class Slot:
    """Stands for a tensor among the arguments."""

    number: int


@define(eq=False)
class IslandBreak:
    """The island, and templates of what it gets."""

    function: Callable[..., Any]
    grad: bool
    """The grad mode that the body called it in."""
    places: tuple[Place, ...] = ()
    """What the body changed before it."""
    _templates: tuple[Any, Any, Any] = ((), {}, ())
    """Arguments, those with names, and what the places held."""
    _lent: dict[Block, list[tuple[int, Geometry]]] = field(factory=dict)
    """Numbers of slots, with their tensors in memory of the pool."""
    _owned: list[tuple[int, Owner, Given]] = field(factory=list)
    """Numbers of slots, with the caller's tensors that they are, or are views of."""
    _count: int = 0
    _builders: dict[Block, Callable[[], torch.Tensor]] = field(factory=dict)
    """What makes the first tensor on each block of the pool."""

    def take(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], values: tuple[Any, ...],
        is_pools: Callable[[torch.Tensor], bool],
        owners: Callable[[torch.Tensor], Sequence[tuple[Owner, torch.Tensor]]],
    ) -> None:  # fmt: skip
        """Make templates of these. ``owners``: the tensors that the caller has on a storage. Raises LookupError where
        there are none."""

        def slot(tensor: torch.Tensor) -> Slot:
            self._count += 1
            number = self._count - 1
            if is_pools(tensor):
                storage = tensor.untyped_storage()
                block = Block(storage.data_ptr(), storage.nbytes())
                self._lent.setdefault(block, []).append((number, Geometry.of(tensor)))
                return Slot(number)
            roots = owners(tensor)
            given = given_among(tensor, [root for _, root in roots])
            if given is None:
                raise LookupError
            self._owned.append((number, roots[given.number][0], Given(0, given.view)))
            return Slot(number)

        self._templates = (template_of(args, slot), template_of(kwargs, slot), template_of(values, slot))

    def signature(self) -> tuple[Any, ...]:
        """Equal for what runs the same function."""
        return id(self.function), self.grad, tuple((id(place.holder()), place.name) for place in self.places)

    def call(
        self, pool: CudaPool, leaves: Sequence[Any], beside: Sequence[torch.Tensor],
        generators: Sequence[torch.Generator],
    ) -> IslandCall:  # fmt: skip
        """What runs in this call."""
        tensors: dict[int, torch.Tensor] = {}
        lent = []
        for block, views in self._lent.items():
            if block not in self._builders:
                self._builders[block] = pool.builder(block, views[0][1])
            first = tensors[views[0][0]] = self._builders[block]()
            if len(views) > 1:
                others = views_of(first, [geometry for _, geometry in views[1:]])
                tensors.update((number, view) for (number, _), view in zip(views[1:], others, strict=True))
            lent.append((block, first.untyped_storage()))
        for number, owner, given in self._owned:
            tensors[number] = given.among([owner.get(leaves)])
        args, kwargs, values = (
            filled(template, Slot, lambda slot: tensors[slot.number]) for template in self._templates
        )
        return IslandCall(
            self.function, args, kwargs, self.grad, lent, beside, generators, Before(self.places, values)
        )  # fmt: skip
