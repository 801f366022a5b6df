"""Inputs: how each leaf of a call reaches the body that is recorded, and what memory the leaves share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve

from capture.core.findings import Policy
from capture.core.interrupts import let_through
from capture.core.plan import CapturePlan
from capture.engines.base import Input
from capture.engines.staging import dense_enough
from capture.key import tensor_meta
from capture.key.pytree import TENSOR_TYPES
from capture.key.tensor_meta import alias_groups, any_overlap, memory_of
from capture.runtime.entry import Entry, Family
from capture.state import snapshot
from capture.state.call import Call
from capture.state.source import Source
from capture.torch_private.subclasses import unseen
from capture.tree.node import Pattern
from capture.tree.tree import Tree


def span_of(leaf: Any) -> int:
    """Bytes between a tensor's first element and the end of its last; 0 for what is no strided tensor."""
    strided = issubclass(type(leaf), torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    return tensor_meta.span_bytes(leaf) if strided else 0


def _has_address(leaf: torch.Tensor) -> bool:
    try:
        leaf.data_ptr()
    except RuntimeError as error:
        let_through(error)
        return False
    return True


@unseen
def family_of(leaves: Sequence[Any]) -> Family:
    """A family of calls like this one."""
    spans = tuple(map(span_of, leaves))
    seen = [i for i, leaf in enumerate(leaves) if spans[i] and _has_address(leaf)]
    loose = [i for i in seen if tensor_meta.leading_ones(leaves[i].shape, leaves[i].stride())]
    odd = any(issubclass(type(leaf), torch.Tensor) and type(leaf) not in TENSOR_TYPES for leaf in leaves)
    placed, on_host = tuple(i for i in seen if leaves[i].numel() > 1), frozenset(i for i in seen if leaves[i].is_cpu)
    whole = frozenset(i for i in seen if tensor_meta.is_whole(leaves[i].dtype))
    return Family(spans, placed, tuple(loose), on_host, whole, has_subclasses=odd)


def alias_pattern(leaves: Sequence[Any], spans: Sequence[int]) -> tuple[Any, ...]:
    """The pattern of shared memory: empty if no two leaves share memory; else for each leaf its group, its distance
    from the group's first byte, and the first position that holds the same object."""
    begins = [leaf.data_ptr() if span else 0 for leaf, span in zip(leaves, spans, strict=True)]
    if not any_overlap(begins, spans):
        return ()
    groups = alias_groups([leaf if span else torch.empty(0) for leaf, span in zip(leaves, spans, strict=True)])
    first: dict[int, int] = {}
    for group, begin in zip(groups, begins, strict=True):
        if group is not None:
            first[group] = min(first.get(group, begin), begin)
    objects = [id(leaf) for leaf in leaves]
    return tuple(
        None if group is None else (group, begin - first[group], objects.index(objects[position]))
        for position, (group, begin) in enumerate(zip(groups, begins, strict=True))
    )


def inputs_for(call: Call, entry: Entry, tree: Tree, pattern: Pattern) -> list[Input]:
    """How each leaf reaches the body. Without a plan every argument may turn out to be written."""
    plans = entry.plans()
    often = entry.often_moved()
    mutated = {placeholder.path for plan in plans for placeholder in plan.placeholders if placeholder.mutated}
    policies: dict[str, Policy] = {}
    # Of all plans: which way the body goes is not known yet.
    for placeholder in [placeholder for plan in plans for placeholder in plan.placeholders]:
        policies[placeholder.path] = max(policies.get(placeholder.path, placeholder.policy), placeholder.policy)
    tensors = [leaf if issubclass(type(leaf), torch.Tensor) else torch.empty(0) for leaf in call.leaves]
    groups = alias_groups(tensors)
    inputs = []
    for position, (path, leaf) in enumerate(call.paths()):
        managed = pattern[position]
        if managed is not None:
            inputs.append(Input(position=position, how="managed", managed=tree.block_of(managed)))
        elif not issubclass(type(leaf), torch.Tensor) or (
            path not in often and (policies.get(path) is Policy.STATIC or call.is_static(path))
        ):
            inputs.append(Input(position=position, how="static"))
        elif policies.get(path) is Policy.BIND and _may_be_bound(leaf, path, entry, often):
            inputs.append(Input(position=position, how="static", is_bound=True))
        else:
            back = policies.get(path, Policy.COPY_BACK) is Policy.COPY_BACK or path in mutated
            inputs.append(Input(position=position, how="copy-back" if back else "copy", group=groups[position]))
    return _apart(call, inputs)


def _owners(call: Call) -> Callable[[torch.Tensor], list[tuple[Source, torch.Tensor]]]:
    """Tells which places in Python state, arguments left out, hold a tensor on a leaf's memory. That of an array has
    another storage for each tensor on it."""
    state, arguments = snapshot.snapshot(call.roots()), {path for path, _ in call.paths()}
    others = [one for owners in state.tensors.values() for one in owners if one[0].path not in arguments]

    def owners(leaf: torch.Tensor) -> list[tuple[Source, torch.Tensor]]:
        found = [one for one in state.owners(leaf.untyped_storage()) if one[0].path not in arguments]
        if not found and leaf.is_cpu and not leaf.untyped_storage().resizable():
            begin, end = memory_of(leaf.untyped_storage())
            spans = [(one, memory_of(one[1].untyped_storage())) for one in others if one[1].is_cpu]
            found = [one for one, (first, last) in spans if first < end and begin < last]
        return found

    return owners


def _apart(call: Call, inputs: Sequence[Input]) -> list[Input]:
    """Marks static arguments on whose memory Python state holds tensors, too."""
    static = {input_.position for input_ in inputs if input_.how == "static" and span_of(call.leaves[input_.position])}
    if not static:
        return list(inputs)
    owners = _owners(call)
    shared = {position for position in static if owners(call.leaves[position])}
    return [evolve(input_, is_apart=True) if input_.position in shared else input_ for input_ in inputs]


def _may_be_bound(leaf: torch.Tensor, path: str, entry: Entry, often: frozenset[str]) -> bool:
    """Whether it lies on the engine's device, and the graph can be pointed at it, as far as is known."""
    assert entry.backend is not None
    here = leaf.device == torch.device(entry.backend.name) and leaf.numel() > 0 and dense_enough(leaf)
    follows = here and path not in often and path not in entry.unbindable and not entry.has_reads
    return follows and entry.backend.rebinds_tensors


def moving_paths(entry: Entry) -> frozenset[str]:
    """Implicit inputs that are another tensor in almost every call: those the body itself gives a new value, and
    those that moved often. An engine that cannot bind them anew copies them."""
    plans = entry.plans()
    if not plans:
        return frozenset(entry.moves)
    effects = {effect.path for plan in plans for effect in plan.effects}
    often = entry.often_moved()
    return frozenset(
        path for path in _copyable(plans)
        if path in often or any(f"{path}.".startswith(f"{effect}.") for effect in effects)
    )  # fmt: skip


def written_paths(entry: Entry) -> frozenset[str]:
    """Tensors in Python state that the body is known to write."""
    planned = [placeholder for plan in entry.plans() for placeholder in plan.placeholders]
    return frozenset(one.path for one in planned if one.kind == "implicit" and one.mutated)


def known_to_move(entry: Entry) -> frozenset[str]:
    """Of whose moves the next recording knows: ``moving_paths``, and what moved once where no copy helps: no operator
    reads it, or the body writes it."""
    return moving_paths(entry) | (frozenset(entry.moves) - _copyable(entry.plans()))


def _copyable(plans: Sequence[CapturePlan]) -> set[str]:
    planned = [placeholder for plan in plans for placeholder in plan.placeholders if placeholder.kind == "implicit"]
    return {one.path for one in planned} - {one.path for one in planned if one.mutated}


def generators_of(call: Call, entry: Entry) -> list[torch.Generator]:
    """Generators the body may draw from: arguments, and those in Python state unless it is known to use none."""
    generators = [leaf for leaf in call.leaves if issubclass(type(leaf), torch.Generator)]
    arguments, plans = (
        {"default", *(path for path, leaf in call.paths() if issubclass(type(leaf), torch.Generator))},
        entry.plans(),
    )
    if plans and all(arguments.issuperset(plan.generators) for plan in plans):
        return generators
    state = snapshot.snapshot(call.roots())
    return generators + [source.get() for source in state.generators.values()]


def shares_with_state(call: Call, plans: Sequence[CapturePlan]) -> bool:
    """Whether an argument shares memory with a tensor in Python state that the body uses, and the body writes
    something."""
    planned = [placeholder for plan in plans for placeholder in plan.placeholders]
    if plans and not any(placeholder.mutated for placeholder in planned):
        return False
    tensors = [leaf for leaf in call.leaves if issubclass(type(leaf), torch.Tensor) and leaf.layout is torch.strided]
    owners = _owners(call)
    used = {placeholder.path for placeholder in planned if placeholder.kind == "implicit"} if plans else None
    for leaf in tensors:
        for source, owned in owners(leaf):
            if (used is None or source.path in used) and alias_groups([leaf, owned])[0] is not None:
                return True
    return False
