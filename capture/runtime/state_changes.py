"""State changes: state that the body can have read is another one now, so that keys get other parts, or recordings are
dropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from capture.core.facts import Facts, gradients_left
from capture.guards.read import Places
from capture.key.attributes import MISSING, keeper_of, own_value, weak_or_none
from capture.key.input_places import InputPlace
from capture.key.signature import Leaf, forget_module_structure
from capture.observe.capture_lock import locked
from capture.runtime import branches, decisions, key_difference
from capture.runtime.buckets import Values
from capture.runtime.captured import Captured
from capture.runtime.entry import MOST_STOPS, Entry
from capture.runtime.phases import enter, forget
from capture.runtime.verdict import GO_ON, START_OVER, Reply, Verdict
from capture.state.call import Call
from capture.state.source import Source
from capture.tree.node import Node
from capture.tree.thread_trees import tree_for
from capture.tree.tree import Tree


def cuts_steps(captured: Captured, entry: Entry, tree: Tree, facts: Facts, *, was_stopped: bool = False) -> bool:
    """Optimizers whose steps read values, or compute numbers, that no recording has are islands from now on, or, where
    no recording can be cut for those, no more. What was recorded and planned before is dropped. ``was_stopped``: a
    recording was, by the engine."""
    optimizers = captured.optimizers
    those_of_host = bool(facts.host_work) or any(not host_sync.is_compared for host_sync in facts.host_syncs)
    if any(island.obstacle for island in facts.islands) and optimizers.refuse_islands():
        message = "the step of an optimizer cannot run eagerly between two segments"
    elif decisions.may_take_reads(captured, entry, facts) and not was_stopped:
        if not captured.reads_wait and optimizers.ask_host():
            captured.reads_wait = True
            captured.budget.start_anew()  # another way is tried before the next call's key is known
        return False
    elif _has_new_islands(captured, entry, tree, those_of_host=those_of_host, those_stopped=was_stopped):
        message = _CUT
    else:
        if optimizers.is_lost:  # further branches would tell nothing more
            entry.steadiness.stops = max(entry.steadiness.stops, MOST_STOPS)
        return False
    _plan_anew(captured, entry, tree, message)
    return True


_CUT = "the step of an optimizer is another one in each call: it runs eagerly between two segments from now on"


def _has_new_islands(
    captured: Captured, entry: Entry, tree: Tree, *, those_of_host: bool, those_stopped: bool = False
) -> bool:  # fmt: skip
    if not tree.backend.runs_islands or not branches.may_follow(entry):
        return False
    return captured.optimizers.make_islands(those_of_host=those_of_host, those_stopped=those_stopped)


def _plan_anew(captured: Captured, entry: Entry, tree: Tree, message: str) -> None:
    """Keys have other parts from now on, and bodies other segments: what was tried had keys that no call has any
    more."""
    decisions.take_reads_no_more(captured)
    captured.log.add("plan", message)
    captured.budget.start_anew()
    forget(captured, entry, tree)
    captured.retire()


def after_move(
    captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree, reply: Reply
) -> Reply:  # fmt: skip
    """Go on with a call after ``rebind`` looked at a recording whose state had moved or changed."""
    if reply.verdict is Verdict.OBSERVE:
        if not (tells_apart(captured, entry, node.guard.places) or _tells_frozen_apart(captured, entry, node)):
            changed = key_difference.changed_state(captured, node, leaves)
            captured.log.add("drop", f"{changed or 'what the recording relies on'} was replaced")
            captured.budget.spend("drops", 0.0, changed=changed)
            forget(captured, entry, tree)
            for holder in (captured.receiver, *values, *captured.optimizers.modules()):
                if issubclass(type(holder), torch.nn.Module):
                    forget_module_structure(holder)
        return START_OVER
    if reply.verdict is Verdict.EAGER:
        entry.plan = reply.plan
        enter(captured, entry, "eager")
        return GO_ON
    return reply


def tells_apart(captured: Captured, entry: Entry, places: Places) -> bool:
    """What the body can have read has other values than those that are known: they are part of the key from now on,
    and all that was recorded is dropped, as no call has one of the keys so far any more."""
    if finds_inputs(captured, entry, places):
        return True
    paths = (
        locked(places.tell_apart, captured.named, captured.optimizers.tables) if places.all else []
    )  # else another thread's stand-ins may be seen
    return _make_anew(captured, entry, paths, "is another value")


def _tells_frozen_apart(captured: Captured, entry: Entry, node: Node) -> bool:
    """As ``tells_apart``, of weights that were frozen or thawed, as a discriminator's are for its generator's step. Of
    a tensor that is kept by a name the key has whether it asks for gradients."""
    paths = []
    for source in node.guard.frozen_or_thawed():
        keeper = _keeper(source)
        if keeper is not None and captured.named.tell_apart(keeper, source.name, source.path):
            paths.append(source.path)
    is_new = _make_anew(captured, entry, paths, "was frozen or thawed")
    if is_new:  # each can be only two things: what was tried so far had keys that no call has any more
        captured.budget.start_anew()
    return is_new


def _keeper(source: Source) -> Callable[[], Any] | None:
    """Gives the dict or object that keeps a tensor by a name; None for what has no names."""
    holder = source.holder
    if type(source.name) is not str:
        return None
    if type(holder) is dict:
        return keeper_of(holder)
    if isinstance(holder, weakref.ref):
        return holder
    return weak_or_none(holder) if own_value(holder, source.name) is not MISSING else None


def _make_anew(captured: Captured, entry: Entry, paths: Sequence[str], why: str) -> bool:
    """Keys have other parts from now on, which tell of these paths; nothing is done where there are none."""
    if not paths:
        return False
    captured.log.add("drop", f"{paths[0]} {why}, and tells calls apart from now on")
    captured.budget.spend("drops", 0.0, changed=paths[0])
    if entry.backend is not None:
        forget(captured, entry, tree_for(entry.backend, captured.pool.number))
    captured.retire()
    return True


def takes_gradients(captured: Captured, entry: Entry, call: Call, tree: Tree, facts: Facts) -> bool:
    """Gradients that the body's own backward pass leaves on arguments, or adds to, are inputs from now on: another
    call's argument has one or has none. What was recorded and planned before is dropped."""
    left = gradients_left(facts)
    if not left or captured.is_backward or captured.sizes is not None or facts.gradients:
        return False
    if not captured.take_gradients([info.path for info in left.values()], call.values):
        return False
    _plan_anew(captured, entry, tree, f"{', '.join(left)}: an input from now on")
    return True


def finds_inputs(captured: Captured, entry: Entry, places: Places) -> bool:
    """Objects that are others in call after call are inputs from now on, and all that was recorded is dropped."""
    if captured.is_backward or captured.sizes is not None:
        return False
    counters, replacements = captured.log.counters, captured.replacements
    number = counters.body_runs + counters.replays
    replacements.compare(places.others(), number)
    if not entry.was_watched:
        replacements.note_new_key(number)
    groups = {id(group) for group in captured.optimizers.groups_of_islands()}
    # what a step that runs eagerly is told is its own business, such as the betas that a schedule sets
    inputs_found = [input_ for input_ in replacements.inputs() if input_.key()[0] not in groups]
    if not inputs_found:
        return False
    _take_inputs(captured, entry, inputs_found, "object")
    return True


def _take_inputs(captured: Captured, entry: Entry, places: Sequence[InputPlace], what: str) -> None:
    captured.take_inputs(places)
    paths = ", ".join([place.path for place in places])
    captured.log.add("drop", f"{paths}: another {what} in each call, an input from now on")
    if entry.backend is not None:
        forget(captured, entry, tree_for(entry.backend, captured.pool.number))
    captured.retire()


def finds_moving(captured: Captured, entry: Entry, node: Node) -> bool:
    """Tensors that the body itself replaces in call after call, as a hidden state, are inputs from now on, on engines
    where an argument is read where it lies. To point a recording at each takes longer than that. Where there are
    recordings of other keys, as after a warm-up, they would have to be made again."""
    assert entry.backend is not None
    if captured.is_backward or captured.sizes is not None or entry.region is not None or entry.backend.has_own_memory:
        return False
    effects = () if node.outputs is None else node.outputs.effects
    current = node.guard.current() if effects else None
    if current is None:
        return False
    left = {effect.path for effect in effects}
    pairs = zip(node.guard.owners, current, strict=True)
    moved = [(owner.sources, tensor) for owner, tensor in pairs if tensor is not owner.tensor and owner.path in left]
    found = captured.replacements.moving((sources[0], tensor) for sources, tensor in moved if len(sources) == 1)
    if not found or any(one.nodes for one in captured.entries() if one is not entry):
        return False
    _take_inputs(captured, entry, found, "tensor")
    return True
