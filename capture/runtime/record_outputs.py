"""Record outputs: builds the results of a recording run as the plan of its outputs says, as each replay does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from capture.autograd.saved_graph import ForwardOutputs
from capture.engines.base import Pool, Recorded
from capture.key.pytree import children, is_container, leaves
from capture.observe.described import DescribedRun
from capture.observe.result_objects import is_copied
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.state.call import Call, is_opaque
from capture.tree.liveness import Again
from capture.tree.output_planner import plan_outputs
from capture.tree.outputs import OutputPlan


def own_values(outputs: OutputPlan, call: Call, described: DescribedRun) -> list[Any]:
    """The values that the run itself left, with the caller's tensors in place of staged ones."""
    owners = {one.path: one.owners[0][1] for one in described.implicit if one.owners}
    return outputs.own_values(kept_values(described), call.leaves, owners.__getitem__)


def kept_values(described: DescribedRun) -> list[Any]:
    """Each leaf of the results and the effects, as the run left it."""
    return [
        leaf.value for leaf in (*described.outputs, *(leaf for effect in described.effects for leaf in effect.leaves))
    ]


def _ids(value: Any) -> set[int]:
    """``id`` of a structure, of the containers in it, and of its leaves."""
    ids, stack = set[int](), [value]
    while stack:
        part = stack.pop()
        if id(part) not in ids and is_container(part):
            stack += [member for _, member in children(part)]
        ids.add(id(part))
    return ids


def _again(captured: Captured, result: Any) -> dict[int, Again]:
    """What may be handed out again while nobody has it, by ``id``: what a forward pass has for its backward pass alone,
    and what becomes the ``grad`` of one parameter. Not results: a user's autograd function may make one the end of a
    graph, which it would keep alive."""
    if type(result) is ForwardOutputs:
        inner = set(map(id, result.saved)) - set(map(id, result.attached)) - _ids(result.result)
        return dict.fromkeys(inner, "inner")
    if captured.deposits is None:
        return {}
    number = Counter(map(id, result))
    return {
        id(member): "shown" for at, member in enumerate(result) if captured.deposits((at,)) and number[id(member)] == 1
    }


def with_gradients_read(described: DescribedRun, statics: Mapping[str, torch.Tensor]) -> set[int]:
    """``id`` of the tensors that get other gradients, and whose gradients before that the body read, as where it adds
    to them in a first backward pass and clears them before a second one. A replay must not write there until then."""
    read = {id(tensor) for tensor in statics.values()}
    replaced = [one.change for one in described.effects if one.change.source.name == "grad"]
    return {
        id(change.source.holder) for change in replaced if any(id(leaf) in read for _, leaf in leaves(change.before))
    }


def plan_recorded(captured: Captured, entry: Entry, recorded: Recorded, pool: Pool) -> OutputPlan:
    """How the outputs of this recording are built."""
    policy = captured.annotation.outputs
    policy = "preserve" if policy == "borrow" and entry.region is not None else policy  # autograd keeps what it saved
    described, watched = recorded.described, recorded.watched
    assert described is not None
    assert watched is not None
    owners = {source.path: tensor for owned in watched.before.tensors.values() for source, tensor in owned}
    left = _ids(watched.result).union(*[_ids(effect.change.after) for effect in described.effects])
    there = [(source, value) for source, value in watched.before.sources.values() if id(value) in left]
    callers = {id(value): source for source, value in there
           if is_container(value) or is_copied(value)
           or (source.kind == "root" and source.path != "self" and is_opaque(value))}  # fmt: skip
    plan = plan_outputs(
        policy, watched.result, described.outputs, described.effects, recorded.blocks,
        watched.arguments, owners.__getitem__, pool, callers, _again(captured, watched.result),
        watched.result.attached if type(watched.result) is ForwardOutputs else (),
    )  # fmt: skip
    if plan.own:  # parts of an argument that the body got as a copy are looked up in the caller's, which it left alone
        call = watched.call
        pairs = zip(call.binder.names, watched.values, call.values, strict=True)
        copied = {name for name, given, own in pairs if given is not own}
        plan.own = {number: found for number, found in plan.own.items() if found[1] not in copied}
    return plan
