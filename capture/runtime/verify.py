"""Verify: run a replay and the body beside each other on the same inputs, state and draws, and compare bits.

The replay goes first, its traces are put back, then the body runs: its effects are the ones that stay, so they
happen once. What a body computes differently from itself is told apart by running it a second time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import field

from capture.autograd.philox_seeds import may_be_seed
from capture.core import config
from capture.core.data import define, frozen
from capture.core.interrupts import is_interrupt
from capture.key import pytree, tensor_meta
from capture.key.modes import inlined
from capture.key.numpy_arrays import is_array_type
from capture.native import native
from capture.observe import islands, run
from capture.runtime import branches
from capture.runtime.branches import Followed
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.replay import replay
from capture.state.call import Call
from capture.torch_private import version_counters
from capture.torch_private.generators import default_generators
from capture.torch_private.threads import others_may_run
from capture.tree.node import Node
from capture.tree.output_structure import EffectSlot
from capture.tree.tree import Tree

Results = list[tuple[str, torch.Tensor | str | bytes]]
"""Values by path."""
NO_MEMORY = "memory does not suffice to compare it with eager"
OTHERS_DRAW = "another thread draws from the same generator meanwhile"
_DOUBTS = 4
"""Comparisons that find the recording wrong before that is believed, where another thread may draw in between."""
_NOISE = 8
"""Times what two runs of a body differ by: a third is no further off. What was read at a wrong address is."""


def is_due(captured: Captured, node: Node) -> bool:
    """Whether the annotation or the settings ask for this replay to be verified, or numbers that it is given."""
    modes = (captured.annotation.verify, config.current().verify)
    is_given = node.given is not None and node.given.count.is_due
    asked = is_given or "always" in modes or ("first" in modes and not node.verified)
    return asked and not node.groups  # a rank that communicates twice for one call would do so alone


@define(eq=False)
class State:
    """Everything a call may change: tensors it writes, places it sets, generators it draws from."""

    tensors: list[tuple[str, torch.Tensor, torch.UntypedStorage]] = field(factory=list)
    sources: list[tuple[EffectSlot, Any]] = field(factory=list)
    generators: list[tuple[torch.Generator, torch.Tensor]] = field(factory=list)
    versions: list[tuple[torch.Tensor, int]] = field(factory=list)

    def put_back(self, named: Callable[[], dict[str, Any]], left: State | None = None) -> None:
        """Restore this state. ``left``: the state since then. What other threads drew meanwhile is not undone."""
        with torch.no_grad():
            for _, tensor, contents in self.tensors:
                tensor.untyped_storage().copy_(contents, False)
        version_counters.set_back(self.versions)
        for slot, value in self.sources:
            slot.put_back(named, value)
        for position, (generator, state) in enumerate(self.generators):
            if left is None or torch.equal(generator.get_state(), left.generators[position][1]):
                generator.set_state(state)

    def drew_like(self, other: State) -> bool:
        """Whether both runs left their generators in the same states. A recording that draws otherwise than its body
        does not, nor do two runs between which another thread drew: those say nothing."""
        mine, theirs = ([state for _, state in one.generators] for one in (self, other))
        return not others_may_run() or all(map(torch.equal, mine, theirs))


def _state(entry: Entry, nodes: Sequence[Node], call: Call, named: Callable[[], dict[str, Any]]) -> State:
    """``nodes``: those that may turn out to run, as branches of a body do."""
    state, seen = State(), set[int]()
    for path, tensor in [path_and_tensor for node in nodes for path_and_tensor in _written(entry, node, call)]:
        storage = tensor.untyped_storage()
        if not tensor.is_inference():
            state.versions.append((tensor, tensor._version))
        if id(storage) not in seen:
            seen.add(id(storage))
            state.tensors.append((path, tensor, storage.clone()))
    slots = {slot.path: slot for node in nodes if node.outputs is not None for slot in node.outputs.effects}
    state.sources = [(slot, slot.saved(named)) for slot in slots.values()]
    drawn = {id(generator): generator for node in nodes for generator in _drawn(entry, node, call)}
    state.generators = [(generator, generator.get_state()) for generator in drawn.values()]
    return state


def _drawn(entry: Entry, node: Node, call: Call) -> list[torch.Generator]:
    """What a call draws from, or may draw from. Where other threads run, the rest is their business."""
    named = {name for plan in entry.plans() for name in plan.generators}
    unseen = entry.facts is None or bool(entry.facts.unseen) or not others_may_run()
    given = [(path, leaf) for path, leaf in call.paths() if isinstance(leaf, torch.Generator)]
    generators = default_generators() if unseen or "default" in named else []
    generators += [leaf for path, leaf in given if unseen or path in named]
    return generators + (list(node.generators) if unseen or named - {"default"} - {path for path, _ in given} else [])


def _written(entry: Entry, node: Node, call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """What a call writes, and may write: kernels that no operator tells of may write all that the body can reach."""
    unseen = entry.facts is not None and bool(entry.facts.unseen)
    leaves = dict(call.paths())
    for placeholder in [placeholder for plan in entry.plans() for placeholder in plan.placeholders]:
        tensor = leaves.get(placeholder.path) if placeholder.kind == "argument" else node.statics.get(placeholder.path)
        if (placeholder.mutated or unseen) and isinstance(tensor, torch.Tensor):
            yield placeholder.path, tensor
    if unseen:
        yield from node.statics.items()


def _results(result: Any, state: State, *, copied: bool) -> Results:
    """All values a call gave: results, written memory, effects, generator states. ``copied``: what changes them later
    does not change these."""
    results: Results = []
    values = [*pytree.result_leaves(result)]
    for slot, value in state.sources:
        values += [(f"{slot.path}{path.removeprefix('output')}", leaf) for path, leaf in pytree.result_leaves(value)]
    for path, leaf in values:
        results.append((path, leaf.detach() if isinstance(leaf, torch.Tensor) else _content(leaf)))
    if copied:
        results = _copies(results)
    for path, tensor, contents in state.tensors:
        whole = contents.nbytes() // tensor.element_size()
        results.append((path, tensor_meta.bytes_of(contents)[: whole * tensor.element_size()].view(tensor.dtype)))
    results += [(f"generator {index}", value.clone()) for index, (_, value) in enumerate(state.generators)]
    return results


def _content(value: Any) -> torch.Tensor | str | bytes:
    """What is compared of a result that is no tensor. The text of an array leaves out most of a large one."""
    if not is_array_type(type(value)) or value.dtype.hasobject:
        return repr(value)
    try:
        return torch.from_numpy(value.copy())
    except TypeError:  # numbers that torch has not
        return f"{value.dtype.str} {value.shape}".encode() + bytes(value.tobytes())


def _copies(results: Results) -> Results:
    return [(path, value.clone() if isinstance(value, torch.Tensor) else value) for path, value in results]


def _different(one: Results, other: Results) -> list[int]:
    """Positions of values that differ, and the first that only one of both has."""
    pairs = zip(one, other, strict=False)
    found = [position for position, ((_, a), (_, b)) in enumerate(pairs) if not is_same(a, b)]
    return found if len(one) == len(other) else [*found, min(len(one), len(other))]


def is_same(a: torch.Tensor | str | bytes, b: torch.Tensor | str | bytes) -> bool:
    """Whether two values of ``Results`` are equal bit for bit."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    if a.device != b.device and (may_be_seed(a) or may_be_seed(b)):
        return True  # only a captured kernel leaves it on the device; the results tell what was drawn
    return tensor_meta.same_bits(a, b)


def _first_wrong(different: list[int], ours: Results, theirs: Results, again: Results) -> str | None:
    """The first of the ``different`` values that is further from the body's than the body is from itself in a second
    run: kernels that add up in any order give other bits every time."""
    varying = set(_different(theirs, again))
    for position in different:
        if position >= min(len(ours), len(theirs), len(again)):
            return "the number of results"
        if position not in varying or not _is_near(ours[position][1], theirs[position][1], again[position][1]):
            return ours[position][0]
    return None


def _is_near(ours: Any, theirs: Any, again: Any) -> bool:
    """Whether it is no further off than a few times what two runs of the body differ by. What is no floating-point
    tensor may vary by any amount."""
    tensors = (ours, theirs, again)
    if not all(isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point for tensor in tensors):
        return True
    if len({(tensor.dtype, tensor.shape) for tensor in tensors}) > 1:
        return False
    ours, theirs, again = (tensor if tensor.dtype is torch.float64 else tensor.float() for tensor in tensors)
    return torch.equal(ours.isnan(), theirs.isnan()) and _distance(ours, theirs) <= _NOISE * _distance(theirs, again)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().nan_to_num(nan=0.0).max())


def _names(values: Results, different: list[int]) -> str:
    return values[different[0]][0] if different[0] < len(values) else "the number of results"


class NoMemoryError(Exception):
    """There is not enough memory for the copies that a comparison needs."""


class _Stopped(Exception):
    """No recording goes on after what the host read."""

    def __init__(self, found: Followed) -> None:
        super().__init__()
        self.found = found


@frozen(eq=False)
class Verified:
    """The outcome of a verification."""

    result: Any = None
    """The replay's where nothing differs, else the body's own."""
    has_result: bool = True
    """False: there was not enough memory even for the replay, and the body has not run."""
    differs: str | None = None
    """The path of the first value that differs from the body's."""
    is_wrong: bool = False
    """It is further from the body's value than the body is from itself."""
    undecided: str | None = None
    """Why the comparison decides nothing."""
    stopped: Followed | None = None
    """No recording goes on after what the host read. Nothing has happened."""


@define(eq=False)
class Comparison:
    """One verification. ``eager``: the body's own result, once it ``has_run`` and its effects are there."""

    captured: Captured
    entry: Entry
    node: Node
    tree: Tree
    call: Call
    eager: Any = None
    has_run: bool = False
    at: Sequence[Node] | None = None
    """The recordings that may run in this call."""
    ran: Sequence[islands.Outcome] = ()
    """Islands that ran in the replay."""

    def taken(self, result: Any = None, *, copied: bool = True) -> tuple[State, Results]:
        """Everything as it is after this result. See `_results`."""
        try:
            siblings = self.tree.current.children.get(self.node.key, ())
            nodes = [sibling for sibling in siblings if sibling.reads] if self.at is None else self.at
            self.at = nodes or [self.node]
            state = _state(self.entry, self.at, self.call, self.call.named_roots)
            return state, _results(result, state, copied=copied)
        except torch.OutOfMemoryError as error:
            raise NoMemoryError from error

    def _copied(self, results: Results) -> Results:
        try:
            return _copies(results)
        except torch.OutOfMemoryError as error:
            raise NoMemoryError from error

    def _leaves(self) -> list[Any]:
        return self.call.leaves

    def _replayed(self, before: State) -> Any:
        where = self.captured, self.node, self.tree, self.call.values, self._leaves()
        if not self.node.reads:
            return replay(*where, None)
        went = branches.replay(*where, None, kept=[tensor for _, tensor, _ in before.tensors])
        if went.node is None:
            raise _Stopped(went)
        self.node, self.ran = went.node, went.ran
        return went.result

    def _body(self) -> Any:
        """The body, with islands that ran in the replay answered."""
        if self.ran:
            islands.answer(self, list(self.ran))
        try:
            return run_body(self.captured, self.call)
        finally:
            islands.settle(self)

    def run(self) -> Verified:
        """Replay, put back, run the body, compare."""
        captured, (before, _) = self.captured, self.taken()
        given, stopped = list[Any](), list[Followed]()

        def replayed() -> tuple[State, Results]:
            try:
                given.append(self._replayed(before))
            except _Stopped as error:
                stopped.append(error.found)
                raise
            return self.taken(given[0])

        try:
            left, ours = put_back_after(replayed, before, self.call, unless=stopped)
        except _Stopped:
            return Verified(stopped=stopped[0], has_result=False)
        except Exception as error:
            if is_interrupt(error) or any(facts.islands for facts in self.entry.known_facts()):
                raise
            return Verified(self._body())  # an operator raised, and all was put back: eager leaves what came before it
        self.eager = self._body()
        self.has_run = True
        after, theirs = self.taken(self.eager, copied=False)  # as large as the results, in most calls for nothing
        if not after.drew_like(left):
            captured.log.add("verify", OTHERS_DRAW)
            return Verified(self.eager, undecided=OTHERS_DRAW)
        different = _different(ours, theirs)
        if not different:
            captured.log.add("verify", "equal")
            self.node.verified = True
            if self.node.given is not None:
                self.node.given.count.compared()
            for slot, value in left.sources:  # the result may be what an effect kept
                slot.put_back(self.call.named_roots, value)
            return Verified(given[0])
        theirs = self._copied(theirs)
        native.committed(bool, (), lambda _: before.put_back(self.call.named_roots, after))
        _, again = put_back_after(lambda: self.taken(self._body()), after, self.call)
        wrong = _first_wrong(different, ours, theirs, again)
        if (wrong is None or self.node.doubts < _DOUBTS) and after.generators and others_may_run():
            # another thread may have drawn before one run's draws and after the other's, as many numbers each time;
            # what is wrong is so every time
            self.node.doubts += wrong is not None
            captured.log.add("verify", OTHERS_DRAW)
            return Verified(self.eager, undecided=OTHERS_DRAW)
        captured.log.add("verify", f"{_names(ours, different)} differs")
        return Verified(self.eager, differs=wrong or _names(ours, different), is_wrong=wrong is not None)


def put_back_after(
    take: Callable[[], tuple[State, Results]], before: State, call: Call, unless: Sequence[Any] = ()
) -> tuple[State, Results]:  # fmt: skip
    """What is ``taken``, and whatever ends that: all is as it was ``before``, ``unless`` a replay that stopped has put
    back what was its own: what islands did stays."""
    taken: list[tuple[State, Results]] = []

    def run() -> None:
        taken.append(take())

    def finish(_: bool) -> None:
        if not unless:
            before.put_back(call.named_roots, taken[0][0] if taken else None)

    native.committed(run, (), finish)
    return taken[0]


def verified(captured: Captured, entry: Entry, node: Node, tree: Tree, call: Call) -> Verified:
    """Replay, put back, run the body, compare."""
    captured.log.counters.verifications += 1
    comparison = Comparison(captured, entry, node, tree, call)
    try:
        return comparison.run()
    except NoMemoryError:
        captured.log.add("verify", NO_MEMORY)
        return Verified(comparison.eager, has_result=comparison.has_run, undecided=NO_MEMORY)


def run_body(captured: Captured, call: Call) -> Any:
    """What a replay is compared with: the body, with captured functions inside it inlined. Islands that ran in the
    replay may be steps of optimizers."""
    captured.log.counters.body_runs += 1
    with captured.optimizers.steps_apart(run.run_island) if islands.are_answered() else contextlib.nullcontext():
        return inlined(call.run)
