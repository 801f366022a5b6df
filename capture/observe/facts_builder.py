"""One watched run -> ``Facts``, and the live objects that a recording needs beside them.

The second half of observation. Nothing here runs user code; objects are only compared.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve

from capture.core.facts import (
    CodeLocation,
    Collective,
    Drift,
    Effect,
    EffectKind,
    Escape,
    Facts,
    HostSync,
    HostWork,
    Mutation,
    OpaqueLeaf,
    OutputInfo,
    Owner,
    PlaceholderInfo,
    SubclassLeaf,
)  # fmt: skip
from capture.key import objects, pytree
from capture.key.code_names import MISSING
from capture.key.input_places import given_gradients
from capture.key.pytree import PLAIN_TYPES, TENSOR_TYPES, result_leaves
from capture.key.tensor_kind import attributes_of, is_leaf, kept_for_gradients
from capture.key.tensor_meta import alias_groups, storage_of, tensor_info
from capture.observe import computed, gradient_uses, written_lines
from capture.observe.altered_operators import altered_operators
from capture.observe.computed import Computed
from capture.observe.described import MADE, DescribedRun, ImplicitInput, KeptEffect, KeptLeaf, kinds_of
from capture.observe.dropped import empty_dropped
from capture.observe.kept_value import KeptReads, is_value_of
from capture.observe.operator_schema import read_text
from capture.observe.result_objects import identity_text, is_copied, is_used_up, is_value
from capture.observe.returned_value import item_formula, returned_at
from capture.observe.run import ObservedRun, collections_of_old
from capture.observe.trace import External, Produced, RunTrace
from capture.observe.unattributed_memory import UnattributedMemory
from capture.state.c_calls import is_called_in_foreign_code
from capture.state.call import is_opaque
from capture.state.snapshot import Change, place_key
from capture.state.source import Source
from capture.torch_private.capabilities import has_memory, is_zero_tensor
from capture.torch_private.devices import captures_kernels
from capture.torch_private.freed_graph import leave_graph
from capture.torch_private.subclasses import unseen

_OWNERS: dict[str, Owner] = {
    "parameter": "parameter", "buffer": "buffer", "attribute": "attribute", "closure": "closure", "global": "global",
    "item": "item", "root": "argument",
}  # fmt: skip
READ_ANEW = "read in every call"
"""What an effect, or an output, tells of a number that the host read and the body only keeps."""
_SHOWN = 60  # characters of a value that are shown
_LETTING_GO = 0.2  # seconds that threads of a process group may hold tensors that they have sent


@unseen
def describe(watched: ObservedRun, *, runs: int = 1) -> DescribedRun:
    """Facts of one watched run. The run's own references are dropped: memory it alone held is free afterwards."""
    call, trace = watched.call, watched.watch.trace
    arguments = [(path, leaf) for path, leaf in watched.arguments if issubclass(type(leaf), torch.Tensor)]
    _note_versions(watched)
    objects.learn(call.values, objects.may_open_argument)
    objects.learn((watched.result, *(change.after for change in watched.changed)))
    classify = Classifier(watched, watched.arguments)
    implicit = classify.implicit()
    effects, effect_facts = effects_of(watched, classify, found := computed.settle(watched))
    outputs = _outputs(watched, classify, found)
    kept = [leaf for effect in effects for leaf in effect.leaves] + outputs
    effect_facts += [*kinds_as_effects(watched, kept), *watched.left]
    _note_unproven_arrays(watched, outputs, effects)
    _note_inference(watched, kept)
    implicit += (handed_on := classify.handed_on(kept))
    gradients = gradient_uses.uses(watched, classify.argument, kept)
    obstacles = gradient_uses.obstacles(watched, classify.argument, outputs, effects) if gradients else []
    opaque = _opaque_outputs(watched, outputs)
    _leave_graphs(() if gradients else kept)
    left = _escapes(watched, kept, is_explained=bool(gradients or opaque))
    _find_state(watched, implicit)
    placeholders = _placeholders(watched, arguments, implicit, {effect.path for effect in effect_facts})
    facts = Facts(
        function=call.annotation.function,
        defined_at=call.annotation.defined_at,
        runs=runs,
        placeholders=tuple(placeholders),
        outputs=tuple(output_info(leaf, watched) for leaf in outputs),
        drifts=_taken_up(watched, outputs),
        effects=tuple(effect_facts),
        host_syncs=tuple(trace.syncs.values()),
        reads=tuple(trace.reads),
        islands=tuple(dict.fromkeys(trace.islands)),
        breaks=tuple(trace.breaks),
        host_work=tuple(trace.work) + _once_a_line(trace),
        unkeyed=tuple(trace.unkeyed),
        reads_form=_reads_form(watched, kept),
        reads_whole=trace.reads_whole or _is_odd(trace),
        runners=tuple(trace.runners),
        collectives=(*trace.collectives.values(), *_handles(outputs)),
        draws=tuple(trace.draws.values()),
        devices=tuple(sorted(trace.devices)),
        opaque=(*call.opaque_leaves(), *_held_twice(watched), *opaque),
        subclasses=tuple(_subclasses(watched)),
        escapes=tuple(Escape(tensor=escape.info, op=escape.op, where=escape.where) for escape in left),
        gradients=tuple(gradients),
        given_gradients=given_gradients(call.binder.places),
        gradient_obstacles=tuple(obstacles),
        inlined=tuple(trace.inlined),
        unmatched_static=tuple(_unmatched(watched)),
        known_paths=tuple(path for path, _ in watched.arguments),
        altered=tuple(altered_operators(trace)) if watched.watch.is_mode else (),
        calls_foreign=_may_call_foreign(watched),
        num_ops=trace.num_ops,
        sequence=tuple(trace.sequence),
        scalars=tuple(trace.scalars),
    )
    unread = {path for path, leaf in arguments if trace.is_unread(leaf)}.union(input_.path for input_ in handed_on)
    run = DescribedRun(facts, implicit, outputs, effects, unread=frozenset(unread), computed=found)
    return run.with_copies(trace.host_copies) if trace.host_copies.known else run


def _leave_graphs(leaves: Sequence[KeptLeaf]) -> None:
    for leaf in leaves:
        if leaf.kind == "fresh":
            leave_graph(leaf.value)


def uses_unwritten(watched: ObservedRun, described: DescribedRun) -> bool:
    """Whether the body used or left memory that it made and no operator wrote, where a mode would show operators."""
    left = [*described.outputs, *[leaf for effect in described.effects for leaf in effect.leaves]]
    watch = watched.watch
    if watch.by_mode:
        return False
    tensors = [leaf.value for leaf in left if issubclass(type(leaf.value), torch.Tensor)]
    return watch.uses_blank or (bool(watch.blank) and any(map(watch.is_blank, tensors)))


def _may_call_foreign(watched: ObservedRun) -> bool:
    """See ``Facts.calls_foreign``. No profile function is told of some of it, so what the body can reach counts."""
    return watched.ran.calls_foreign or any(
        map(is_called_in_foreign_code, {type(value) for _, value in watched.before.sources.values()})
    )


def _note_unproven_arrays(watched: ObservedRun, outputs: Sequence[KeptLeaf], effects: Sequence[KeptEffect]) -> None:
    """Arrays of which the code said that they are only returned or kept, and that are found elsewhere: the body may
    have followed their values."""
    trace = watched.watch.trace
    for array in KeptReads(watched).unproven_arrays(outputs, effects) if trace.arrays else ():
        trace.syncs["numpy", id(array), False, None] = HostSync(op="numpy", where=array.where)
    trace.arrays.clear()


def _find_state(watched: ObservedRun, implicit: Sequence[ImplicitInput]) -> None:
    """Tensors of which nobody knows whose they are, or that outlive the run: an object of a library that the body names
    may hold them, such as a gradient scaler. It is looked into in the next run."""
    storages = {id(one.external.storage) for one in implicit if not one.owners} | set(watched.watch.alive())
    found = objects.find_state(watched.before.closed, storages) if storages else ()
    if found:
        watched.once = f"{found[0]} was found to hold tensors of the body"


def _held_twice(watched: ObservedRun) -> list[OpaqueLeaf]:
    """Containers among the arguments that Python state holds, too, and that the body changes by one of the two ways."""
    changed = [change.source for change in watched.changed]
    if not changed:
        return []
    paths = {id(value): path for path, value in watched.call.containers()}
    leaves = []
    for source, value in watched.before.sources.values():
        path = paths.get(id(value)) if place_key(source) not in watched.before.inputs else None
        if path is None or source.is_in_argument():
            continue
        if any(change.path.startswith((f"{path}.", f"{source.path}.")) for change in changed):
            kind = type(value).__qualname__
            leaves.append(OpaqueLeaf(path=path, type=kind, role="argument", num_tensors=0, also=source.path))
    return leaves


def _reads_form(watched: ObservedRun, kept: Sequence[KeptLeaf]) -> bool:
    """Whether nobody asked for strides, and what is left is new, or the caller's own: views of arguments have their
    strides."""
    trace = watched.watch.trace
    odd = trace.reads_form or trace.syncs or _is_odd(trace)
    return bool(odd) or any(leaf.kind not in ("fresh", "input", "python") for leaf in kept)


def _is_odd(trace: RunTrace) -> bool:
    """Whether the body asked for more than operators and reads of values give."""
    return any((trace.work, trace.unkeyed, trace.hooks, trace.lent))


def _escapes(watched: ObservedRun, leaves: Sequence[KeptLeaf], *, is_explained: bool) -> list[Produced]:
    """Tensors made by the body that outlive it, except those on the memory of what it gives and leaves; none where
    other facts explain them."""
    if is_explained or "foreign" in [leaf.kind for leaf in leaves]:
        return []
    kept = {id(leaf.value.untyped_storage()) for leaf in leaves if leaf.kind == "fresh"}
    copies = watched.watch.trace.host_copies
    kept |= copies.kept() if copies.known else set()
    left = [produced for key, produced in watched.watch.alive().items() if key not in kept]
    if left:
        empty_dropped(watched.before, watched.changed)
        left = [produced for key, produced in watched.watch.alive().items() if key not in kept]
    if left:  # a reference cycle is no escape; to look for one among all objects takes 0.1 s in a process with torch
        gc.collect(1 if watched.collections == collections_of_old() else 2)
        left = [produced for key, produced in watched.watch.alive().items() if key not in kept]
    until = time.monotonic() + (_LETTING_GO if watched.watch.trace.collectives else 0)
    while left and time.monotonic() < until:
        time.sleep(0.001)
        left = [produced for key, produced in watched.watch.alive().items() if key not in kept]
    return left


def _note_versions(watched: ObservedRun) -> None:
    """Note writes that show in a version counter although no schema announced them."""
    for tensor, version in watched.versions:
        if tensor._version == version or tensor.layout is not torch.strided:  # a sparse tensor is reported as such
            continue
        storage = tensor.untyped_storage()
        external = watched.watch.trace.externals.setdefault(id(storage), External(tensor, storage, None))
        if external.mutation is None:
            external.mutation = Mutation(evidence="version", op="unknown")


class Classifier:
    """Tells, after the run, on whose memory a tensor lies."""

    def __init__(self, watched: ObservedRun, arguments: Sequence[tuple[str, Any]]) -> None:
        self._watched = watched
        self._arguments: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for position, (_, leaf) in enumerate(arguments):
            if issubclass(type(leaf), torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
                self._arguments.setdefault(id(leaf.untyped_storage()), []).append((position, leaf))
        self._implicit: dict[int, str] = {}
        self._replaced = {change.source.path for change in watched.changed}
        changed = [change for change in watched.changed if not change.container or change.members is not None]
        left = [watched.result, *[change.after for change in changed]]
        if watched.watch.trace.has_checkpoints:  # reading what their graphs saved would run those blocks again
            left = []
        tensors = [leaf for value in left for _, leaf in result_leaves(value) if issubclass(type(leaf), torch.Tensor)]
        self._untold = UnattributedMemory(watched.before, tensors)

    def implicit(self) -> list[ImplicitInput]:
        """Memory from outside the body that belongs to no argument."""
        inputs: list[ImplicitInput] = []
        for key, external in self._watched.watch.trace.externals.items():
            if external.tensor.layout is not torch.strided or external.tensor.is_nested:
                continue  # it has no memory, and is reported as such
            if key in self._arguments:
                if external.mutation is not None:
                    inputs += self._beside_arguments(key, external)
                continue
            if external.tensor.device.type != "cpu" and external in self._untold:
                continue
            inputs.append(self._owned(external, f"(unknown tensor {len(inputs)})"))
            self._implicit[key] = inputs[-1].path
        return inputs

    def _beside_arguments(self, key: int, external: External) -> list[ImplicitInput]:
        """Python state on a written argument's memory that the body used, too, as far as tensor objects tell."""
        call = self._watched.call
        paths = {path for path, _ in self._watched.arguments} | given_gradients(call.binder.places)
        used = self._watched.watch.trace.objects
        return [
            ImplicitInput(source.path, ((source, tensor),), external)
            for source, tensor in self._watched.before.owners(external.storage)
            if source.path not in paths and id(tensor) in used
        ]

    def _owned(self, external: External, unknown: str) -> ImplicitInput:
        owners = self._owners(external.storage)
        if not owners:
            return ImplicitInput(unknown, (), external)
        source, tensor = owners[0]
        same = tuple(owner for owner in owners if owner[1] is tensor)
        return ImplicitInput(source.path, same, external, tuple(owner for owner in owners if owner[1] is not tensor))

    def _owners(self, storage: torch.UntypedStorage) -> list[tuple[Source, torch.Tensor]]:
        """Places that hold a tensor on this memory. Those that the body does not change come first."""
        return sorted(self._watched.before.owners(storage), key=lambda one: one[0].path in self._replaced)

    def handed_on(self, kept: Sequence[KeptLeaf]) -> list[ImplicitInput]:
        """Static tensors among outputs and effects that no operator read."""
        inputs = []
        for leaf in kept:
            if leaf.kind in ("static", "static-view") and leaf.source not in self._implicit.values():
                storage = leaf.value.untyped_storage()
                owners = self._owners(storage)
                tensor = next(tensor for source, tensor in owners if source.path == leaf.source)
                same = tuple(owner for owner in owners if owner[1] is tensor)  # the body may have it from any of these
                self._implicit[id(storage)] = str(leaf.source)
                inputs.append(ImplicitInput(str(leaf.source), same, External(tensor, storage, None)))
        return inputs

    def argument(self, storage: torch.UntypedStorage) -> list[tuple[int, torch.Tensor]]:
        """Argument leaves on this storage."""
        return self._arguments.get(id(storage), [])

    def _fresh(self, path: str, value: torch.Tensor) -> KeptLeaf:
        """A tensor that the body made, maybe by a copy to the host."""
        copy = self._watched.watch.trace.host_copies.of(value)
        if copy is None:
            return KeptLeaf(path, value, "fresh")
        if not copy.is_left_as(value):
            self._watched.watch.trace.syncs.setdefault(*copy.sync)
            return KeptLeaf(path, value, "fresh")
        return KeptLeaf(path, value, "fresh", host=copy.kind)

    def leaf(self, path: str, value: Any) -> KeptLeaf:
        """Classify one leaf of an output or effect."""
        if not issubclass(type(value), torch.Tensor):
            for array in self._watched.watch.trace.arrays.values():
                if (found := array.standing_for(path, value)) is not None:
                    return evolve(self.leaf(path, found[0]), array=found[1])
            return KeptLeaf(path, value, "python")
        is_plain = type(value) in TENSOR_TYPES and value.layout is torch.strided and has_memory(value)
        if not is_plain or value.is_neg():
            return KeptLeaf(path, value, "foreign")  # memory alone does not rebuild a lazily negated tensor
        storage = value.untyped_storage()
        if self._watched.watch.lies_in_array(storage):
            return KeptLeaf(path, value, "foreign")
        arguments = self.argument(storage)
        for position, argument in arguments:
            if argument is value:
                return KeptLeaf(path, value, "input", position)
        if arguments:
            return KeptLeaf(path, value, "input-view", arguments[0][0])
        if self._watched.watch.made(value):
            known = self._watched.watch.trace.host_copies.known
            return self._fresh(path, value) if known else KeptLeaf(path, value, "fresh")
        owners = self._owners(storage)
        if owners and any(tensor is value for _, tensor in owners):
            owner = next(source for source, tensor in owners if tensor is value)
            implicit_path = self._implicit.get(id(storage))
            same = any(source.path == implicit_path and tensor is value for source, tensor in owners)
            return KeptLeaf(path, value, "static", implicit_path if same else owner.path)
        if owners:
            return KeptLeaf(path, value, "static-view", owners[0][0].path)
        if captures_kernels(value.device):  # made by a kernel no operator tells of, or not in the pool when recorded
            return KeptLeaf(path, value, "fresh")
        return KeptLeaf(path, value, "foreign")


def effects_of(
    watched: ObservedRun, classify: Classifier, found: Computed | None = None
) -> tuple[list[KeptEffect], list[Effect]]:  # fmt: skip
    """What the run left in Python state: the effects that a replay repeats, and the facts of all of them. ``found``:
    formulas of what it left."""
    kept: list[KeptEffect] = []
    facts: list[Effect] = []
    reads, effects = KeptReads(watched), list[KeptEffect]()
    with_same = computed.with_unchanged(watched, found, reads.with_unchanged(watched.changed))
    told = {change.source.path for change in with_same}
    for change in [*with_same, *[change for change in _made_again(watched) if change.source.path not in told]]:
        change = reads.without_amount(change)
        left = () if change.amount is not None else pytree.leaves(change.after, change.source.path)
        effects.append(KeptEffect(change, tuple(classify.leaf(p, v) for p, v in left)))
    replaced = {id(change.source) for change in watched.changed if not change.container}
    for effect in computed.marked(watched, found, reads.marked(effects)):
        change, leaves, path = effect.change, effect.leaves, effect.change.source.path
        line = written_lines.line_that_wrote(watched.ran, change)
        kind = _kind_of_effect(change, leaves)
        if not replaced.isdisjoint(map(id, itertools.islice(change.source.chain(), 1, None))):
            kind = "python"  # it is in an object that the body then replaced, which a replay does not find any more
        before, after = _before_and_after(change, leaves)
        if kind in ("tensor", "value", "count", "members"):
            kept.append(effect)
        if kind == "tensor":
            produced = [watched.watch.trace.produced.get(id(leaf.value.untyped_storage()))
                        for leaf in leaves if leaf.kind == "fresh"]  # fmt: skip
            line = next((line_of_leaf.where for line_of_leaf in produced if line_of_leaf is not None), None)
        facts.append(Effect(path=path, kind=kind, before=before, after=after, where=line))
    facts += _filled_and_replaced(watched)
    return kept, facts


def _filled_and_replaced(watched: ObservedRun) -> Iterator[Effect]:
    """Containers that the body filled, and then put others in their places, where it left the former ones elsewhere. A
    replay does not fill those. What nobody has after the call need not be filled (``recording_guard._Held``)."""
    before, kept = watched.before, set[int]()
    todo = [watched.result, *[change.after for change in watched.changed]] if before.dropped else []
    while todo:
        value = todo.pop()
        if id(value) not in kept and pytree.is_container(value):
            kept.add(id(value))
            todo += [member for _, member in pytree.children(value)]
    for path in sorted(before.dropped):
        source, container = before.sources[path]
        if id(container) in kept:
            change = Change(source, container, "other members", container=True)
            line = written_lines.line_that_wrote(watched.ran, change)
            yield Effect(path=path, kind="container", before="members", after="other members", where=line)


def _made_again(watched: ObservedRun) -> list[Change]:
    """Places where the body put a container equal to the one before: by the next call it may not be."""
    return [
        Change(source, value, now)
        for source, value in watched.rebuilt()
        if type(now := source.get()) in (list, dict, tuple) and all(_is_plain(one) for _, one in pytree.leaves(now))
    ]


def _kind_of_effect(change: Change, leaves: Sequence[KeptLeaf]) -> EffectKind:
    if change.amount is not None:
        return "count"
    plain = all(leaf.kind != "python" or _is_plain(leaf.value) for leaf in leaves)
    is_plain = plain and not any(leaf.kind == "foreign" for leaf in leaves)
    if change.container:
        return "members" if is_plain and change.members is not None else "container"
    if not is_plain:
        return "python"
    return "tensor" if any(issubclass(type(leaf.value), torch.Tensor) for leaf in leaves) else "value"


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN_TYPES or value is MISSING


def _before_and_after(change: Change, leaves: Sequence[KeptLeaf]) -> tuple[str, str]:
    """The values before and after, as text. A value that has to be the same in each run is given in full."""
    members = change.members
    if change.amount is not None:
        return "a number", f"{change.amount:+d}"
    if change.container and members is None:
        return str(change.before), str(change.after)
    plain_leaves = [leaf for leaf in leaves if leaf.kind == "python" and _is_plain(leaf.value)]
    plain = [leaf.value for leaf in plain_leaves if leaf.read is None]
    values = ", ".join([_short(leaf.value) if leaf.read is None else READ_ANEW for leaf in plain_leaves])
    if any(len(repr(value)) > _SHOWN for value in plain):
        values += f" #{hashlib.sha1(repr(plain).encode()).hexdigest()[:16]}"
    if members is None:
        shown = values if leaves and len(plain_leaves) == len(leaves) else _short(change.after)
        return _short(change.before), shown
    if members.is_free:
        return "members", f"+{len(members.new)} members {values}".rstrip()
    recipe = ",".join(map(str, members.recipe))
    return f"{len(members.before)} members", f"{len(members.recipe)} members ({recipe}) {values}".rstrip()


def kinds_as_effects(watched: ObservedRun, kept: Sequence[KeptLeaf]) -> list[Effect]:
    """What tensors that the body made are beside their memory, in words. What a replay cannot make is no value."""
    facts = []
    for at, kind in kinds_of(kept).items():
        leaf, changes = kept[at], list[tuple[str, EffectKind, str, str]]()
        if kind.kind is not torch.Tensor:
            changes.append(("__class__", "value", "Tensor", kind.kind.__name__))
        if kind.freed is not None:
            changes.append(("grad_fn", "value", "None", kind.freed))
        elif kind.requires_grad:
            changes.append(("requires_grad", "value", "False", "True"))
        for name, value in attributes_of(leaf.value).items():
            changes.append((name, "value" if name in kind.attributes else "python", repr(MISSING), _short(value)))
        facts += [
            Effect(path=f"{leaf.path}.{name}", kind=how, before=was, after=now) for name, how, was, now in changes
        ]
    return [*facts, *_kept_for_gradients(watched, kept)]


def _kept_for_gradients(watched: ObservedRun, kept: Sequence[KeptLeaf]) -> Iterator[Effect]:
    """Gradients of leaves that the body made, and hooks on them."""
    left = [("output", watched.result), *[(change.source.path, change.after) for change in watched.changed]]
    around = [wrapper for path, value in left for wrapper in pytree.wrappers(value, path)]
    old = {id(value) for _, value in watched.before.sources.values()} if around else ()
    made = [(leaf.path, leaf.value) for leaf in kept if leaf.kind in MADE]
    for path, tensor in [*made, *[wrapper for wrapper in around if id(wrapper[1]) not in old]]:
        for name, value in kept_for_gradients(tensor) if is_leaf(tensor) and tensor.requires_grad else ():
            yield Effect(path=f"{path}.{name}", kind="python", before="None", after=_short(value))


def _short(value: Any) -> str:
    if issubclass(type(value), torch.Tensor):
        return str(tensor_info(value)) if value.layout is torch.strided and not value.is_nested else "tensor"
    if type(value) in PLAIN_TYPES or type(value).__name__ == "_Missing":
        text = repr(value)
    else:
        text = f"{type(value).__name__} object"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _placeholders(
    watched: ObservedRun, arguments: list[tuple[str, torch.Tensor]], implicit: list[ImplicitInput], replaced: set[str]
) -> list[PlaceholderInfo]:
    externals = watched.watch.trace.externals
    tensors: list[tuple[str, torch.Tensor, External | None, Owner, ImplicitInput | None]] = []
    for path, tensor in arguments:
        external = externals.get(id(tensor.untyped_storage())) if tensor.layout is torch.strided else None
        tensors.append((path, tensor, external, "argument", None))
    for implicit_input in implicit:
        kind: Owner = _OWNERS.get(implicit_input.owners[0][0].kind, "unknown") if implicit_input.owners else "unknown"
        tensor = implicit_input.owners[0][1] if implicit_input.owners else implicit_input.external.tensor
        tensors.append((implicit_input.path, tensor, implicit_input.external, kind, implicit_input))
    groups = alias_groups([tensor for _, tensor, _, _, _ in tensors])
    return [
        PlaceholderInfo(
            path=path,
            kind="argument" if implicit_input is None else "implicit",
            tensor=tensor_info(tensor),
            owner=owner,
            static=watched.call.is_static(path) or implicit_input is not None,
            alias_group=group,
            used=external is not None,
            mutation=external.mutation if external is not None else None,
            replaced=path in replaced,
            first_use=external.first_use if external is not None else None,
        )
        for (path, tensor, external, owner, implicit_input), group in zip(tensors, groups, strict=True)
    ]


def _once_a_line(trace: RunTrace) -> tuple[HostWork, ...]:
    """What was computed on the host beside work for a device."""
    found: dict[CodeLocation | None, HostWork] = {}
    if all(device.startswith(("cpu", "meta")) for device in trace.devices):
        return ()
    for op, where in trace.cpu_work.values():
        found.setdefault(where, HostWork(op=op, kind="compute", where=where))
    return tuple(found.values())


def _opaque_outputs(watched: ObservedRun, outputs: list[KeptLeaf]) -> list[OpaqueLeaf]:
    given = {id(value) for source, value in watched.before.sources.values() if source.kind == "root"}  # handed back
    return [
        OpaqueLeaf(path=leaf.path, type=type(leaf.value).__qualname__, role="output", num_tensors=count)
        for leaf in outputs
        if leaf.kind == "python"
        and id(leaf.value) not in given
        and is_opaque(leaf.value)
        and (count := pytree.count_tensors(leaf.value))
    ]


def _handles(outputs: list[KeptLeaf]) -> list[Collective]:
    """A handle that the caller waits for is another object after every collective."""
    work = getattr(torch.distributed, "Work", None)
    left = "is handed out unfinished, and a replay gives no new handle"
    return [
        Collective(op=leaf.path, group="", all_wait=False, obstacle=left)
        for leaf in outputs if work is not None and isinstance(leaf.value, work)
    ]  # fmt: skip


def _note_inference(watched: ObservedRun, kept: Sequence[KeptLeaf]) -> None:
    """What a replay makes is either in inference mode or not."""
    kinds = {leaf.value.is_inference() for leaf in kept if leaf.kind == "fresh"}
    if len(kinds) > 1 and not torch.is_inference_mode_enabled():
        work = HostWork(op="handing out tensors of inference mode together with others", kind="unsafe", where=None)
        watched.watch.trace.work.append(work)


def odd_kind(tensor: torch.Tensor) -> str | None:
    """What keeps a tensor from being rebuilt from memory, sizes and strides; None for a plain one."""
    if type(tensor) not in TENSOR_TYPES:
        return type(tensor).__qualname__
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return f"{str(tensor.layout).removeprefix('torch.')} tensor"
    if is_zero_tensor(tensor):
        return "zero tensor without memory"
    return "lazily negated tensor" if tensor.is_neg() else None


def _subclasses(watched: ObservedRun) -> list[SubclassLeaf]:
    leaves: list[SubclassLeaf] = []
    names = {id(storage_of(leaf)): path for path, leaf in watched.arguments if issubclass(type(leaf), torch.Tensor)}
    for path, leaf in (*watched.arguments, *result_leaves(watched.result)):
        kind = _odd(leaf, may_conjugate=path.startswith("output")) if issubclass(type(leaf), torch.Tensor) else None
        if kind is not None:
            leaves.append(SubclassLeaf(path=path, type=kind))
    for external in watched.watch.trace.externals.values():
        kind = _odd(external.tensor)
        if kind is not None:
            path = names.get(id(external.storage)) or _owner(watched, external)
            leaves.append(SubclassLeaf(path=path, type=kind, where=None if path else external.first_use))
    return list(dict.fromkeys([*leaves, *gradient_uses.of_wrappers(watched)]))


def _odd(tensor: torch.Tensor, *, may_conjugate: bool = False) -> str | None:
    lazy = None if may_conjugate or not tensor.is_conj() else "lazily conjugated tensor"
    return odd_kind(tensor) or lazy


def _owner(watched: ObservedRun, external: External) -> str:
    """A place of Python state that holds memory which the body used; empty if there is none."""
    owners = watched.before.owners(external.storage)
    return owners[0][0].path if owners else ""


def _unmatched(watched: ObservedRun) -> list[str]:
    paths = [path for path, _ in watched.arguments] + list(watched.before.sources)
    return [
        name
        for name in watched.call.annotation.static
        if not any(path == name or path.startswith((f"{name}.", f"{name}[")) for path in paths)
    ]


def _outputs(watched: ObservedRun, classify: Classifier, found: Computed | None) -> list[KeptLeaf]:
    """All leaves of the result. ``found``: formulas of what the run left."""
    leaves = [classify.leaf(path, value) for path, value in result_leaves(watched.result)]
    trace, values = watched.watch.trace, {leaf.path: leaf.value for leaf in leaves}
    reads: dict[str, int | tuple[int, str]] = {}
    for number, several in returned_at(trace.reads).items():
        if type(trace.kept.get(number, (None, ()))[0]) is list:
            reads |= _members_of_list(watched, number, [place for place, _ in several], values)
            continue
        number_of_path: dict[str, int | tuple[int, str]] = {}
        for place, formula in several:
            path = watched.call.place_in_result(place)
            number_of_path[path] = (number, formula) if formula else number
            if formula and not is_value_of(trace, number, formula, values.get(path)):
                trace.reads[number], number_of_path = read_text(trace.kept[number][0]), {}
                break
        reads |= number_of_path
    leaves = [evolve(leaf, read=reads[leaf.path]) if leaf.path in reads else leaf for leaf in leaves]
    return leaves if found is None else [computed.of_formula(watched, leaf, found.outputs) for leaf in leaves]


def _members_of_list(
    watched: ObservedRun, number: int, places: Sequence[str], values: Mapping[str, Any]
) -> dict[str, tuple[int, str]]:
    """By path, the members of a list that was read and is returned; none, and the read is compared, where they are not
    found."""
    trace, reads = watched.watch.trace, dict[str, tuple[int, str]]()
    members = trace.kept[number][0]
    for place in places:
        path = watched.call.place_in_result(place)
        inside = [leaf for leaf in values if leaf.startswith(f"{path}.")]
        formulas = list(map(item_formula, range(len(inside))))
        is_there = len(inside) == len(members) and all(
            is_value_of(trace, number, formula, values[leaf]) for leaf, formula in zip(inside, formulas, strict=True)
        )
        if not is_there:
            trace.reads[number] = read_text(members)
            return {}
        reads |= {leaf: (number, formula) for leaf, formula in zip(inside, formulas, strict=True)}
    return reads


def _taken_up(watched: ObservedRun, outputs: Sequence[KeptLeaf]) -> tuple[Drift, ...]:
    """Iterators and coroutines that the run made: whoever gets one uses it up, so the next call has another. Told after
    one run, so that none is recorded: a coroutine of a run that is thrown away would warn that nobody awaited it."""
    new = [output for output in outputs if is_used_up(output.value) and not watched.had(output.value)]
    names = [f"the {type(one.value).__qualname__} of that call" for one in new]
    return tuple([Drift(path=one.path, first=name, second="another") for one, name in zip(new, names, strict=True)])


def output_info(leaf: KeptLeaf, watched: ObservedRun) -> OutputInfo:
    """One leaf of the result as plain data. The value of a number that every call reads anew is left out."""
    if leaf.read is not None:
        return OutputInfo(path=leaf.path, kind="python", value=READ_ANEW)
    source = watched.arguments[leaf.source][0] if isinstance(leaf.source, int) else leaf.source
    if leaf.kind == "foreign" and odd_kind(leaf.value) is not None:
        return OutputInfo(path=leaf.path, kind="python", value="tensor")  # reported as what it is
    if issubclass(type(leaf.value), torch.Tensor):
        tensor = tensor_info(leaf.value)
        return OutputInfo(
            path=leaf.path,
            kind=leaf.kind,
            source=source,
            tensor=tensor,
            value=None if leaf.array is None else str(leaf.array),
        )
    held = objects.referent(leaf.value)
    text = repr(leaf.value)[:200] if held is None else f"weakref to {type(held).__qualname__}"
    if held is None and not (is_value(leaf.value) or is_copied(leaf.value) or watched.had(leaf.value)):
        text += identity_text(leaf.value)
    return OutputInfo(path=leaf.path, kind=leaf.kind, source=source, value=text)
