"""Which results need gradients that outlive a run, and what prevents a separate recording of the backward pass.

A backward pass inside the body that leaves no graph behind does not count.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from capture.core import forks
from capture.core.facts import GradientObstacle, GradientUse, SubclassLeaf
from capture.core.interrupts import suppress
from capture.key import pytree
from capture.key.tensor_kind import is_leaf, refuses
from capture.observe import kept_by_nodes
from capture.observe.described import KeptEffect, KeptLeaf, kinds_of
from capture.observe.run import ObservedRun
from capture.observe.trace import External
from capture.state.snapshot import Change, carries_graph
from capture.state.source import Source
from capture.torch_private.autograd import is_leaf_node, name_of, nodes_above

_RECOMPUTES = "CheckpointFunctionBackward"
Arguments = Callable[[torch.UntypedStorage], Sequence[tuple[int, torch.Tensor]]]
"""Argument leaves on a storage."""


def uses(watched: ObservedRun, arguments: Arguments, kept: Sequence[KeptLeaf]) -> list[GradientUse]:
    """What needs gradients; empty if nothing that is left has an autograd graph."""
    handed_back = ("input", "static")  # the caller's tensors have their graphs from elsewhere
    freed = {at for at, kind in kinds_of(kept).items() if kind.freed is not None}
    others = [leaf for at, leaf in enumerate(kept) if at not in freed and leaf.kind not in handed_back]
    left = [leaf.value for leaf in others if isinstance(leaf.value, torch.Tensor)]
    written = [one for one in watched.watch.trace.externals.values() if one.mutation is not None]
    left += [tensor for external in written for tensor in _there(watched, arguments, external)]
    if all(is_leaf(tensor) for tensor in left):
        return []
    uses_found = []
    for (storage, _), use in watched.watch.trace.gradients.items():
        external = watched.watch.trace.externals.get(storage)
        path = _path(watched, arguments, external) if external is not None else None
        uses_found.append(GradientUse(path=path, op=use.op, where=use.where))
    return uses_found or [GradientUse(path=None, op="")]


def obstacles(
    watched: ObservedRun, arguments: Arguments, outputs: Sequence[KeptLeaf], effects: Sequence[KeptEffect]
) -> list[GradientObstacle]:
    """Why forward and backward cannot be a pair of recordings; empty if they can."""
    tensors = [leaf.value for leaf in outputs] + [
        external.tensor for external in watched.watch.trace.externals.values()
    ]
    if any(isinstance(tensor, torch.Tensor) and refuses(tensor) for tensor in tensors):
        return [GradientObstacle(path=None, reason="autograd refuses to look at a view that was written")]
    beside = [effect for effect in effects if _is_like_a_result(watched, effect.change)]
    outputs = [*outputs, *[leaf for effect in beside for leaf in effect.leaves]]
    effects = [effect for effect in effects if effect not in beside]
    obstacles_found = [*_outputs(outputs), *_effects(watched, effects), *_externals(watched, arguments)]
    if not torch.is_grad_enabled():
        obstacles_found.append(GradientObstacle(path=None, reason="gradients are switched on inside alone"))
    trace = watched.watch.trace
    obstacles_found += [
        GradientObstacle(path=None, reason=f"the body uses {name}", where=at) for name, at in trace.hooks
    ]
    if trace.has_checkpoints and (watched.changed or any(external.mutation for external in trace.externals.values())):
        reason = "the body writes state, and parts of it run again in the backward pass"
        obstacles_found.append(GradientObstacle(path=None, reason=reason))
    obstacles_found += _switched_on(watched, outputs)
    obstacles_found += _partly_reached(watched, outputs)
    nodes = _nodes(watched, outputs)
    if any(name_of(node) == _RECOMPUTES for node in nodes):
        obstacles_found.append(GradientObstacle(path=None, reason="the body is recomputed in the backward pass"))
    before = watched.before
    state = {id(value) for _, value in before.entered} | {id(value) for _, value, _ in before.members}
    plain = [leaf for _, leaf in watched.arguments if type(leaf) is torch.Tensor and leaf.layout is torch.strided]
    own = {id(tensor.untyped_storage()) for tensor in plain if not tensor.is_nested}.union(watched.watch.alive())
    keeper = kept_by_nodes.keeper(nodes, state, own)
    if keeper is not None:
        reason = f"{keeper.__qualname__} keeps tensors in attributes of its ctx, apart from save_for_backward()"
        obstacles_found.append(GradientObstacle(path=None, reason=reason))
    return obstacles_found


def _is_like_a_result(watched: ObservedRun, change: Change) -> bool:
    """Whether what it leaves with a graph can become part of the caller's as results do: the body does not read what
    was there before, as a layer does that goes on from its last state."""
    if not carries_graph(change):
        return False
    old = change.before
    is_read = isinstance(old, torch.Tensor) and id(old.untyped_storage()) in watched.watch.trace.externals
    return not is_read


def of_wrappers(watched: ObservedRun) -> Iterator[SubclassLeaf]:
    """Tensors that hold other tensors and are part of a graph themselves, of which those they hold know nothing."""
    arguments = watched.call.named_values(watched.values) if torch.is_grad_enabled() else {}
    given = [wrapper for name, value in arguments.items() for wrapper in pytree.wrappers(value, name)]
    results = [("output", watched.result), *[(change.source.path, change.after) for change in watched.changed]]
    left = [wrapper for path, value in results for wrapper in pytree.wrappers(value, path) if not wrapper[1].is_leaf]
    for path, wrapper in (*given, *left):
        if wrapper.requires_grad:
            yield SubclassLeaf(path=path, type=f"{type(wrapper).__qualname__} that needs gradients")


def _there(watched: ObservedRun, arguments: Arguments, external: External) -> list[torch.Tensor]:
    """Tensors on memory from outside that are there when the body is over. What it made there itself, such as
    ``tensor.data``, is gone with the body, or is a result or an effect; where it wrote that first, ``external`` has
    this and not the caller's own tensor."""
    given = [tensor for _, tensor in arguments(external.storage)]
    owned = [tensor for _, tensor in watched.before.owners(external.storage)]
    return [*given, *owned] or [external.tensor]


def _path(watched: ObservedRun, arguments: Arguments, external: External) -> str | None:
    there = arguments(external.storage)
    owners = watched.before.owners(external.storage)
    return watched.arguments[there[0][0]][0] if there else (owners[0][0].path if owners else None)


def _outputs(outputs: Sequence[KeptLeaf]) -> Iterator[GradientObstacle]:
    seen: dict[int, torch.Tensor] = {}
    for leaf in outputs:
        if not isinstance(leaf.value, torch.Tensor) or not leaf.value.requires_grad:
            continue
        if leaf.kind != "fresh":
            yield GradientObstacle(path=leaf.path, reason=f"{leaf.path} is no new tensor ({leaf.kind})")
        elif leaf.value.grad_fn is None:
            yield GradientObstacle(path=leaf.path, reason=f"{leaf.path} is a leaf that the body made")
        elif not _are_apart(seen.setdefault(id(leaf.value.untyped_storage()), leaf.value), leaf.value):
            yield GradientObstacle(path=leaf.path, reason=f"{leaf.path} shares memory with another output")


def _are_apart(first: torch.Tensor, then: torch.Tensor) -> bool:
    """Whether no write to one of two results on the same memory has to become part of the other's graph: they are
    views that one operator made at once, such as ``chunk``, which autograd lets nobody write; or it knows of no
    views at all."""
    if first is then or first.grad_fn is None or then.grad_fn is None:
        return first is then
    if first._is_view() or then._is_view():
        are_views = first._is_view() and then._is_view()
        return are_views and first.grad_fn is then.grad_fn and first.output_nr != then.output_nr
    return True


def _effects(watched: ObservedRun, effects: Sequence[KeptEffect]) -> Iterator[GradientObstacle]:
    given = {id(leaf) for _, leaf in watched.arguments}
    for effect in effects:
        source: Source = effect.change.source
        if source.name == "grad" and isinstance(source.holder, torch.Tensor):
            yield GradientObstacle(path=source.path, reason="the body runs a backward pass of its own")
        elif source.name == "requires_grad" and id(source.holder) in given:
            # The forward pass gets stand-ins of the arguments, made before the body asks for gradients or does not.
            yield GradientObstacle(path=source.path, reason=f"{source.path} is changed by the body")
        elif any(isinstance(leaf.value, torch.Tensor) and leaf.value.requires_grad for leaf in effect.leaves):
            yield GradientObstacle(path=source.path, reason=f"{source.path} is left with an autograd graph")


def _externals(watched: ObservedRun, arguments: Arguments) -> Iterator[GradientObstacle]:
    for external in watched.watch.trace.externals.values():
        if external.mutation is None:
            continue
        path, first = _path(watched, arguments, external), external.tensor
        there = _there(watched, arguments, external)
        if any(not is_leaf(tensor) or (tensor is first and tensor.requires_grad) for tensor in there):
            reason = f"{path or 'a tensor'} is written"
            yield GradientObstacle(path=path, reason=reason, where=external.mutation.where)


def _switched_on(watched: ObservedRun, outputs: Sequence[KeptLeaf]) -> Iterator[GradientObstacle]:
    """Where the graphs of results end at a tensor that needed no gradients when the body began, also one that needs
    none again: a replay's node has an edge to those alone that need some when the call begins."""
    needed = {id(tensor): (source.path, was_needed) for source, tensor, was_needed in watched.before.flags}
    graphs = [leaf.value for leaf in outputs if isinstance(leaf.value, torch.Tensor) and leaf.value.grad_fn is not None]
    for tensor, _ in ends_of([graph.grad_fn for graph in graphs], _known(watched)):
        path, was_needed = needed.get(id(tensor), ("", True))
        if not was_needed:
            yield GradientObstacle(path=path, reason=f"{path} needed no gradients before")


def _partly_reached(watched: ObservedRun, outputs: Sequence[KeptLeaf]) -> Iterator[GradientObstacle]:
    """Where only some results are used, the one node of the caller's graph tells inputs that eager would not reach that
    there is no gradient for them. Hooks and functions of users may not expect that. (Hooks of leaves are left out then:
    ``capture.autograd.unreached``.)"""
    tensors = [
        leaf.value for leaf in outputs if isinstance(leaf.value, torch.Tensor) and leaf.value.grad_fn is not None
    ]
    edges = _known(watched)
    reached = [{id(tensor): tensor for tensor, _ in ends_of([ends.grad_fn], edges)} for ends in tensors]
    everywhere = set.intersection(*[set(ends) for ends in reached]) if reached else set()
    for ends in reached:
        for key, tensor in ends.items():
            users = isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction)
            if key not in everywhere and (users or (tensor._backward_hooks and tensor.grad_fn is not None)):
                reason = "not every result depends on an input with hooks, or with a backward function of its own"
                yield GradientObstacle(path=None, reason=reason)
                return


def _known(watched: ObservedRun) -> dict[tuple[Any, int], torch.Tensor]:
    """Inputs of the body that came with a graph, by node and output number."""
    inputs = [leaf for _, leaf in watched.arguments if isinstance(leaf, torch.Tensor)]
    inputs += [external.tensor for external in watched.watch.trace.externals.values()]
    return {(tensor.grad_fn, tensor.output_nr): tensor for tensor in inputs if tensor.grad_fn is not None}


def ends_of(
    above: list[Any], with_graphs: dict[tuple[Any, int], torch.Tensor]
) -> list[tuple[torch.Tensor, GradientEdge]]:
    """Where a graph ends: at leaves, and at tensors of Python state that came with a graph of their own
    (``with_graphs``, by node and output number)."""
    stack, seen, ends = [*above], set(above), {}
    while stack:
        for node, number in stack.pop().next_functions:
            if (node, number) in with_graphs:
                ends[node, number] = with_graphs[node, number]
            elif node is not None and node not in seen:
                seen.add(node)
                if is_leaf_node(node):
                    ends[node, 0] = node.variable
                else:
                    stack.append(node)
    return [(tensor, GradientEdge(node, number)) for (node, number), tensor in ends.items()]


def saved_above(ends: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What the nodes of a graph have saved, once for each time, where it is still there."""
    for node in nodes_above(ends):
        users = isinstance(node, torch.autograd.function.BackwardCFunction)
        for name in (
            ["saved_tensors"]
            if users
            else [name_in_node for name_in_node in dir(node) if name_in_node.startswith("_saved_")]
        ):
            saved: Any = None
            with suppress(RuntimeError):  # its saved tensors were freed
                saved = getattr(node, name)
            yield from (leaf for _, leaf in pytree.leaves(saved) if isinstance(leaf, torch.Tensor))


def _nodes(watched: ObservedRun, outputs: Sequence[KeptLeaf]) -> list[Any]:
    """The nodes of the graph that the body made."""
    ends = [leaf.value for leaf in outputs if isinstance(leaf.value, torch.Tensor)]
    known = [node for node, _ in _known(watched)]
    return list(nodes_above(ends, known))


_depths = Counter[int]()
"""By thread, how many functions of users run now, one inside the other, that differentiate anew."""


def begin_differentiating(*_: object) -> None:
    """A user's function begins, in whose own backward passes hooks run that ``hooks_off`` skips around it."""
    _depths[threading.get_ident()] += 1


def end_differentiating(*_: object) -> None:
    """It has ended."""
    _depths[threading.get_ident()] -= 1


class _Muted:
    """A hook on a tensor, which is skipped in some threads, at the depth at which that was asked for."""

    __slots__ = ("hook", "threads")

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self.hook = hook
        self.threads = Counter[tuple[int, int]]()

    def __call__(self, grad: torch.Tensor) -> Any:
        here = threading.get_ident()
        return None if self.threads[here, _depths[here]] else self.hook(grad)


_muting = forks.lock()


@contextlib.contextmanager
def hooks_off(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hooks of tensors run where the caller's own graph ends, and not where gradients are only computed for it. Other
    threads may run a backward pass of their own meanwhile, with all hooks; so may functions of users that differentiate
    anew."""
    tables = [hooks for hooks in (quiet._backward_hooks for quiet in tensors) if hooks]
    if not tables:
        yield
        return
    thread = threading.get_ident()
    depth = _depths[thread]
    here, muted = (thread, depth), list[tuple[Any, Any, _Muted]]()
    try:
        with _muting:
            for hooks in tables:
                for key, hook in list(hooks.items()):
                    quiet = hook if isinstance(hook, _Muted) else _Muted(hook)
                    quiet.threads[here] += 1
                    muted.append((hooks, key, quiet))
                    hooks[key] = quiet
        yield
    finally:
        _depths[thread] = depth  # a function that raised has not ended it
        with _muting:
            for hooks, key, quiet in muted:
                quiet.threads[here] -= 1
                if not quiet.threads.total() and hooks.get(key) is quiet:
                    hooks[key] = quiet.hook
