"""Verify: run a replay and the body beside each other on the same inputs, state and draws, and compare bits.

The replay goes first, its traces are put back, then the body runs: its effects are the ones that stay, so they
happen once. What a body computes differently from itself is told apart by running it a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from capture import _config, _containers, _tensors
from capture._call import Call
from capture._compile import compile_plan
from capture._entry import Entry
from capture._facts import Verification
from capture._generators import default_generators
from capture._node import Node
from capture._seeds import may_be_seed
from capture._skeleton import EffectSlot
from capture._tree import Tree

if TYPE_CHECKING:
    from capture._runtime import Captured


def is_due(captured: Captured, node: Node) -> bool:
    """The annotation or the settings ask for this replay to be verified."""
    modes = (captured.annotation.verify, _config.current().verify)
    asked = "always" in modes or ("first" in modes and not node.verified)
    return asked and not node.groups  # a rank that communicates twice for one call would do so alone


@define(eq=False)
class State:
    """Everything a call may change: tensors it writes, places it sets, generators it draws from."""

    tensors: list[tuple[str, torch.Tensor, torch.UntypedStorage]] = field(factory=list)
    places: list[tuple[EffectSlot, Any]] = field(factory=list)
    generators: list[tuple[torch.Generator, torch.Tensor]] = field(factory=list)

    def put_back(self, named: Callable[[], dict[str, Any]]) -> None:
        """Make everything as it was when this was taken."""
        with torch.no_grad():
            for _, tensor, contents in self.tensors:
                tensor.untyped_storage().copy_(contents, False)
        for slot, value in self.places:
            slot.at(named).set(value)
        for generator, state in self.generators:
            generator.set_state(state)


def _state(entry: Entry, node: Node, call: Call, named: Callable[[], dict[str, Any]]) -> State:
    found = State()
    leaves = dict(call.paths())
    assert entry.plan is not None
    assert node.outputs is not None
    for one in entry.plan.placeholders:
        tensor = leaves.get(one.path) if one.kind == "argument" else node.statics.get(one.path)
        if one.mutated and isinstance(tensor, torch.Tensor):
            found.tensors.append((one.path, tensor, tensor.untyped_storage().clone()))
    found.places = [(slot, slot.at(named).get()) for slot in node.outputs.effects]
    generators = [*default_generators(), *(leaf for leaf in call.leaves if isinstance(leaf, torch.Generator))]
    found.generators = [(generator, generator.get_state()) for generator in (*generators, *node.generators)]
    return found


def _results(result: Any, state: State) -> list[tuple[str, torch.Tensor | str]]:
    """Copies of all values a call gave: results, written tensors, effects, generator states."""
    found: list[tuple[str, torch.Tensor | str]] = []
    values = [*_containers.result_leaves(result)]
    for slot, value in state.places:
        values += [
            (f"{slot.path}{path.removeprefix('output')}", leaf) for path, leaf in _containers.result_leaves(value)
        ]
    for path, leaf in values:
        found.append((path, leaf.detach().clone() if isinstance(leaf, torch.Tensor) else repr(leaf)))
    found += [(path, tensor.detach().clone()) for path, tensor, _ in state.tensors]
    found += [(f"generator {index}", value.clone()) for index, (_, value) in enumerate(state.generators)]
    return found


def _first_difference(
    one: Sequence[tuple[str, torch.Tensor | str]], other: Sequence[tuple[str, torch.Tensor | str]]
) -> str | None:
    for (path, a), (_, b) in zip(one, other, strict=False):
        tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        if tensors and a.device != b.device and (may_be_seed(a) or may_be_seed(b)):  # type: ignore[union-attr, arg-type]
            continue  # only a captured kernel leaves it on the device; the results tell what was drawn
        if not (_tensors.same_bits(a, b) if tensors else type(a) is type(b) and a == b):  # type: ignore[arg-type]
            return path
    return None if len(one) == len(other) else "the number of results"


def verified(
    captured: Captured, entry: Entry, node: Node, tree: Tree, call: Call, *,
    differs: Callable[[str], None] | None = None,
) -> Any:  # fmt: skip
    """Replay, put back, run the body, compare. Gives the replay's result, or the body's where they differ.

    ``differs`` is told the first value in which a body that equals itself differs, instead of a recording's end.
    """

    def named() -> dict[str, Any]:
        return {**call.named_values(), "self": captured.receiver}

    captured.log.counters.verifications += 1
    before = _state(entry, node, call, named)
    replayed = captured.replay(node, tree, call.values, call.leaves)
    left = _state(entry, node, call, named)
    ours = _results(replayed, left)
    before.put_back(named)
    eager = captured.run_body(call)
    after = _state(entry, node, call, named)
    theirs = _results(eager, after)
    path = _first_difference(ours, theirs)
    captured.log.add("verify", "equal" if path is None else f"{path} differs")
    if path is None:
        node.verified = True
        for slot, value in left.places:  # the result may be what an effect kept
            slot.at(named).set(value)
        return replayed
    before.put_back(named)
    again = _results(captured.run_body(call), _state(entry, node, call, named))
    unstable = _first_difference(theirs, again)
    after.put_back(named)
    if differs is not None and unstable is None:
        replayed, left = None, State()  # what lies in the pool is not held here
        differs(path)
        return eager
    facts = captured.bare_facts(verification=Verification(path=path, deterministic=unstable is None))
    plan = compile_plan(captured.annotation, facts)
    if unstable is None:
        captured.forget(entry, tree)
        entry.phase, entry.plan = "eager", plan
        captured.report(plan)
    else:
        captured.note_findings(plan)
    return eager
