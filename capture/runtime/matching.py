"""Matching: the entry of a call by its key, and the recording of it that may run now."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from capture.engines.base import Backend
from capture.engines.registry import backend_for
from capture.key.modes import Ambient, ambient
from capture.key.signature import Leaf, Leaves, deaths
from capture.rules.compile_plan import compile_plan
from capture.runtime import branches, inputs
from capture.runtime.buckets import Values
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry, drop_dead, drop_unused
from capture.runtime.phases import enter
from capture.state import snapshot
from capture.torch_private.subclasses import unseen
from capture.tree.node import Node, Pattern
from capture.tree.tree import Tree


def entry_of(captured: Captured, values: Values) -> tuple[Entry, list[Leaf]]:
    """The entry of a call as things stand now, and its dynamic leaves.

    Raises ``Unkeyable`` or ``TypeError`` for unhashable values.
    """
    return find_entry(captured, values, ambient())


def find_entry(captured: Captured, values: Values, modes: Ambient) -> tuple[Entry, list[Leaf]]:
    leaves = Leaves()
    if not captured.optimizers.has_looked:  # once, also where no call ever gets a key
        state = snapshot.snapshot(captured.call(values, leaves).roots())
        captured.optimizers.search(state, captured.function, (captured.receiver, *values))
    arguments = captured.arguments(values, leaves)  # first: it may open objects, which become a part of the key
    key = (modes, arguments, *(() if captured.stateless else captured.rest(values)))
    family = captured.families.get(key)
    if family is None:
        if captured.deaths_seen != deaths():
            captured.deaths_seen = deaths()
            captured.budget.lose(drop_dead(captured.families))
        drop_unused(captured.families, most=2 * captured.annotation.max_recordings + 8)
        family = captured.families[key] = inputs.family_of(leaves)
    pattern = inputs.alias_pattern(leaves, family.spans) if len(leaves) > 1 else ()
    entry = family.find(pattern, leaves)
    if entry is None:
        entry = family.add(Entry((*key, pattern), shares_memory=bool(pattern)), pattern, leaves)
    return entry.in_use(), leaves


def starts_over(captured: Captured, entry: Entry, tree: Tree, pattern: Pattern) -> bool:
    """Whether this call begins a step of its own. A backward pass belongs behind its forward pass."""
    return not captured.is_backward and tree.may_start_over(entry.nodes, entry.number, pattern)


def fitting(captured: Captured, entry: Entry, tree: Tree, pattern: Pattern) -> Node | None:
    """The recording that may run now. One that would write in memory that somebody uses is dropped: it is made again
    beside that memory."""
    for node in tuple(tree.current.children.get((entry.number, pattern), ())):
        if node.dead_before and not node.may_run():
            continue
        if tree.lingering and node is not tree.awaited:
            tree.settle_gradients(node)
        if tree.is_clear(node):
            return node
        captured.log.add("drop", "it writes in memory that is still used")
        if node in entry.nodes:
            entry.nodes.remove(node)
        tree.forget(node)
    return None


@unseen
def engine_of(captured: Captured, entry: Entry, leaves: Sequence[Leaf]) -> Backend | None:
    """The engine for this call's device; without one the entry goes eager."""
    if entry.backend is not None:
        return entry.backend
    devices = {leaf.device for leaf in leaves if issubclass(type(leaf), (torch.Tensor, torch.Generator))}
    receiver = captured.receiver
    if issubclass(type(receiver), torch.nn.Module):
        devices |= {tensor.device for tensor in receiver.parameters()}
    others = sorted((device for device in devices if device.type not in ("cpu", "meta")), key=str)
    device = others[0] if others else torch.device("cpu")
    entry.backend = backend_for(device)
    if entry.backend is None:
        entry.may_change = False
        entry.plan = compile_plan(captured.annotation, captured.bare_facts(backend_missing=device.type))
        enter(captured, entry, "eager")
    return entry.backend


def siblings_after(reads: branches.Reads, node: Node, tree: Tree) -> list[Node]:
    """Recordings that cannot go on from this one, and may have been made for these reads."""
    every = tuple(tree.current.children.get(node.key, ()))
    apart = [one for one in every if one is not node and one.number not in node.joined]
    return [one for one in apart if one.reads[: len(reads)] == reads and branches.fits(one, tree)]


def made_since(known: Sequence[Node], entry: Entry, tree: Tree) -> Node | None:
    """A recording of this thread's that was not among these: other threads record the same entry in trees of theirs."""
    return next((node for node in tuple(entry.nodes) if node.tree is tree and node not in known), None)
