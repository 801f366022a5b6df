"""Results: the outputs of a recording run, as its plan builds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from capture._call import Call, is_opaque
from capture._containers import children, is_container
from capture._describe import Described
from capture._entry import Entry
from capture._liveness import Again
from capture._outputs import OutputPlan
from capture._plan_outputs import plan_outputs
from capture._program import Pair
from capture.backends import Pool, Recorded

if TYPE_CHECKING:
    from capture._runtime import Captured


def named(captured: Captured, call: Call) -> Callable[[], dict[str, Any]]:
    return lambda: {**call.named_values(), "self": captured.receiver}


def own_values(outputs: OutputPlan, call: Call, described: Described) -> list[Any]:
    owners = {one.path: one.owners[0][1] for one in described.implicit if one.owners}
    return outputs.own_values(_kept_values(described), call.leaves, owners.__getitem__)


def _kept_values(described: Described) -> list[Any]:
    return [
        leaf.value for leaf in (*described.outputs, *(one for effect in described.effects for one in effect.leaves))
    ]


def _ids(value: Any) -> set[int]:
    """``id`` of a structure, of the containers in it, and of its leaves."""
    found = {id(value)}
    return found.union(*[_ids(member) for _, member in children(value)]) if is_container(value) else found


def _again(captured: Captured, result: Any) -> dict[int, Again]:
    """What may be handed out again while nobody has it, by ``id``: what a forward pass has for its backward pass alone,
    and what becomes the ``grad`` of one parameter. Not results: a user's autograd function may make one the end of a
    graph, which it would keep alive."""
    if type(result) is Pair:
        inner = set(map(id, result.saved)) - set(map(id, result.attached)) - _ids(result.result)
        return dict.fromkeys(inner, "inner")
    if captured.deposits is None:
        return {}
    number = Counter(map(id, result))
    return {id(one): "shown" for at, one in enumerate(result) if captured.deposits((at,)) and number[id(one)] == 1}


def plan_recorded(captured: Captured, entry: Entry, recorded: Recorded, pool: Pool) -> OutputPlan:
    """How the outputs of this recording are built."""
    policy = captured.annotation.outputs
    policy = "preserve" if policy == "borrow" and entry.region is not None else policy  # autograd keeps what it saved
    policy = "clone" if policy == "preserve" and entry.number in captured.copied_entries else policy
    described, watched = recorded.described, recorded.watched
    assert described is not None
    assert watched is not None
    owners = {place.path: tensor for owned in watched.before.tensors.values() for place, tensor in owned}
    left = _ids(watched.result).union(*[_ids(effect.change.after) for effect in described.effects])
    there = [(place, value) for place, value in watched.before.places.values() if id(value) in left]
    own = {id(value): place for place, value in there
           if is_container(value) or (place.kind == "root" and place.path != "self" and is_opaque(value))}  # fmt: skip
    return plan_outputs(
        policy, watched.result, described.outputs, described.effects, recorded.blocks,
        watched.arguments, owners.__getitem__, pool, own, _again(captured, watched.result),
    )  # fmt: skip
