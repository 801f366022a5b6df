"""How the results and effects of one recording run are to be built after each replay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve

from capture.core.options import Outputs
from capture.engines.base import Block, Geometry, Pool
from capture.key.tensor_kind import Kind, WithoutGraph
from capture.observe.described import KeptEffect, KeptLeaf, kinds_of
from capture.state.snapshot import Change
from capture.state.source import Reference, Source, lasting
from capture.tree.liveness import Again, SharedStorage
from capture.tree.output_structure import EffectSlot, Slot, Structures, filler, in_several_places, slot_of_change
from capture.tree.outputs import Alias, OutputGroup, OutputPlan


def plan_outputs(
    policy: Outputs,
    result: Any,
    outputs: Sequence[KeptLeaf],
    effects: Sequence[KeptEffect],
    blocks: Sequence[Block | None],
    arguments: Sequence[tuple[str, Any]],
    owners: Callable[[str], torch.Tensor],
    pool: Pool,
    callers: dict[int, Source],
    again: Mapping[int, Again],
    attached: Sequence[torch.Tensor],
) -> OutputPlan:
    """The plan for what one recording run left. ``blocks``: as in ``Recorded``. ``again``: by ``id``, which tensors may
    be handed out again. ``attached``: those of a region that are part of the caller's graph."""
    leaves = [*outputs, *(leaf for effect in effects for leaf in effect.leaves)]
    groups: dict[int, tuple[Block, list[int], list[Geometry]]] = {}
    aliases, constants, empties, repeats, reads = [], [], [], [], []
    seen: dict[int, int] = {}
    for position, (leaf, block) in enumerate(zip(leaves, blocks, strict=True)):
        value = leaf.value
        if issubclass(type(value), torch.Tensor) and seen.setdefault(id(value), position) != position:
            repeats.append((position, seen[id(value)]))
        elif leaf.kind == "fresh" and block is not None and value.numel():
            entry = groups.setdefault(id(value.untyped_storage()), (block, [], []))
            entry[1].append(position)
            entry[2].append(Geometry.of(value))
        elif leaf.kind == "fresh":
            empties.append((position, evolve(Geometry.of(value), offset=0), value.device))
        elif leaf.read is not None:
            reads.append((position, leaf.read))
        elif leaf.kind == "python":
            constants.append((position, None if id(value) in callers else value))  # the caller's own is not kept alive
        else:
            assert leaf.source is not None
            base = arguments[leaf.source][1] if isinstance(leaf.source, int) else owners(leaf.source)
            aliases.append((position, _alias(leaf, base)))
    changes = [effect.change for effect in effects]
    structures = _structures(result, leaves, changes, callers)
    skeleton = structures.skeleton(result)
    afters = [None if change.amount is not None else structures.skeleton(change.after) for change in changes]
    slots = tuple(map(slot_of_change, changes, afters, itertools.repeat(structures.former), itertools.repeat({})))
    made = tuple(
        OutputGroup(block, tuple(p), tuple(g), tuple(leaves[at].path for at in p)) for block, p, g in groups.values()
    )
    is_inference = any(leaf.kind == "fresh" and leaf.value.is_inference() for leaf in leaves)
    inference = is_inference and not torch.is_inference_mode_enabled()
    shared_storages = tuple(_source(pool, g, again.get(id(leaves[g.positions[0]].value), "no")) for g in made)
    kinds = _kinds(made, leaves, attached)
    alone = isinstance(skeleton, Slot) and len(leaves) == len(made) == 1 and not (inference or effects or kinds)
    gradients, taken, others = _gradients(made, effects, slots)
    shared = _shared_gradients(made, effects, len(outputs), gradients)
    every = [*gradients.values(), *(parameter for several in shared.values() for parameter in several)]
    return OutputPlan(
        policy=policy, preserving=policy != "borrow", count=len(leaves), skeleton=skeleton, groups=made,
        aliases=tuple(aliases), kinds=kinds, constants=tuple(constants), reads=tuple(reads),
        empties=tuple(empties), repeats=tuple(repeats), effects=slots, inference=inference, live=[None] * len(made),
        tensors=[[] for _ in made], shared_storages=shared_storages, single=shared_storages[0] if alone else None,
        gradients=gradients, shared=shared, replaced={id(of()): of for of in every}, fills=filler(skeleton),
        numbers=tuple(range(len(made))), first_positions=tuple(group.positions[0] for group in made), slots=taken,
        others=(tuple(number for number in range(len(made)) if number not in gradients), others), own=structures.own,
    )  # fmt: skip


def _structures(
    result: Any, leaves: Sequence[KeptLeaf], changes: Sequence[Change], callers: dict[int, Source]
) -> Structures:
    several = in_several_places([result, *[change.after for change in changes if change.amount is None]])
    return Structures(iter(range(len(leaves))), callers, _arrays(leaves), _former(changes), several)


def _former(changes: Sequence[Change]) -> dict[int, Any]:
    """What the body replaced, by ``id`` of the place."""
    return {id(change.source): change.before for change in changes if not change.container}


def _kinds(
    groups: Sequence[OutputGroup], leaves: Sequence[KeptLeaf], attached: Sequence[torch.Tensor]
) -> tuple[tuple[int, Kind], ...]:
    """By position, what leaves are beside their memory. Of groups of which some have a graph, the other ones,
    such as ``y.detach()`` beside ``y``, are to get none: a replay builds them as views of each other."""
    joined, kinds = {id(tensor) for tensor in attached}, kinds_of(leaves)
    joined |= {id(leaves[at].value) for at, kind in kinds.items() if kind.freed is not None}
    kinds_by_position: list[tuple[int, Kind]] = [*kinds.items()]
    for group in groups:
        others = [at for at in group.positions if id(leaves[at].value) not in joined]
        if 0 < len(others) < len(group.positions):
            kinds_by_position += [(at, WithoutGraph()) for at in others if at not in kinds and leaves[at].array is None]
    copies = [(position, leaf.host) for position, leaf in enumerate(leaves) if leaf.host is not None]
    arrays = [(position, leaf.array) for position, leaf in enumerate(leaves) if leaf.array is not None]
    return (*kinds_by_position, *copies, *arrays)  # an array lies on the copy's memory


def _arrays(leaves: Sequence[KeptLeaf]) -> frozenset[int]:
    return frozenset({position for position, leaf in enumerate(leaves) if leaf.array is not None})


def _gradients(
    groups: Sequence[OutputGroup], effects: Sequence[KeptEffect], slots: Sequence[EffectSlot]
) -> tuple[dict[int, Reference], dict[int, EffectSlot], tuple[EffectSlot, ...]]:
    """Gradients and the effects that set them, by the group that each is alone in; and all other effects."""
    holders, taken, others = {}, {}, []
    numbers = {group.positions: number for number, group in enumerate(groups)}
    for effect, slot in zip(effects, slots, strict=True):
        source, skeleton = effect.change.source, slot.skeleton
        is_gradient = (
            source.name == "grad" and issubclass(type(source.holder), torch.Tensor) and isinstance(skeleton, Slot)
        )
        number = numbers.get((skeleton.index,)) if is_gradient else None
        if number is None or number in holders:
            others.append(slot)
        else:
            holders[number], taken[number] = lasting(source.holder), slot
    return holders, taken, tuple(others)


def _shared_gradients(
    groups: Sequence[OutputGroup], effects: Sequence[KeptEffect], first: int, gradients: Container[int]
) -> dict[int, tuple[Reference, ...]]:
    """For other groups on which only gradients lie: the tensors whose gradients they are. ``first``: position of the
    first leaf of an effect."""
    holders: dict[int, torch.Tensor] = {}
    for effect in effects:
        source = effect.change.source
        if source.name == "grad" and issubclass(type(source.holder), torch.Tensor):
            holders |= dict.fromkeys(range(first, first + len(effect.leaves)), source.holder)
        first += len(effect.leaves)
    return {
        number: tuple(lasting(holders[position]) for position in group.positions)
        for number, group in enumerate(groups)
        if number not in gradients and all(position in holders for position in group.positions)
    }


def _source(pool: Pool, group: OutputGroup, again: Again) -> SharedStorage | None:
    """What hands out the tensors of a group; None for views of each other, which share a version counter."""
    if len(group.geometries) > 1:
        return None
    return SharedStorage(pool.builder(group.block, group.geometries[0]), again=again)


def _alias(leaf: KeptLeaf, base: torch.Tensor) -> Alias:
    value = leaf.value
    assert leaf.source is not None
    return Alias(
        leaf.source,
        same=value is base,
        dtype=value.dtype,
        shift=int(value.storage_offset()) * value.element_size() - int(base.storage_offset()) * base.element_size(),
        shape=tuple(value.shape),
        stride=tuple(value.stride()),
        conj=value.is_conj(),
    )
