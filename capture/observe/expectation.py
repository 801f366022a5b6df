"""What a recording run has to do again, if a watched run has already told everything about it.

Most recordings come right after a watched run of the same key and have to equal it: the same operators with the same
Python values on known memory. Then the facts of the watched run hold for the recording, and only its tensors have to be
found. A body with anything special in it is looked at in full in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from capture.core.data import frozen
from capture.core.facts import Facts, Mutation, OutputInfo
from capture.key.pytree import TENSOR_TYPES, result_leaves
from capture.key.tensor_meta import alias_groups
from capture.observe.described import DescribedRun, ImplicitInput
from capture.observe.facts_builder import Classifier, effects_of, kinds_as_effects, output_info
from capture.observe.run import ObservedRun
from capture.observe.trace import External
from capture.state.call import Call
from capture.state.snapshot import Snapshot
from capture.torch_private import capabilities


@frozen(eq=False)
class Expectation:
    """What a recording has to do again."""

    facts: Facts
    implicit: tuple[str, ...]
    """Paths of the implicit inputs."""
    written: dict[str, Mutation]
    """How each input that is written was written, by path."""
    same_kind: Callable[..., bool]
    """Tells whether other implicit inputs have the metadata of these."""
    unread: frozenset[str]
    """See `DescribedRun`."""


def expected(watched: ObservedRun, described: DescribedRun) -> Expectation | None:
    """What recordings have to do again; None where the body has to be looked at in full."""
    facts, trace = described.facts, watched.watch.trace
    special = (
        facts.host_syncs, facts.host_work, facts.subclasses, facts.opaque, facts.gradients, facts.escapes, facts.drifts,
        facts.unseen, facts.sequence_change, facts.refused, facts.unkeyed,
    )  # fmt: skip
    leaves = [*described.outputs, *(leaf for effect in described.effects for leaf in effect.leaves)]
    plain = (
        trace.plain
        and not trace.host_copies.were_made
        and not trace.gradients  # a backward pass inside the body is looked at in full
        and not any(special)
        and len(facts.devices) == 1
        and not facts.devices[0].startswith(("cpu", "meta"))
        and all(draw.generator == "default" for draw in facts.draws)
        and all(placeholder.alias_group is None and not placeholder.replaced for placeholder in facts.placeholders)
        and all(
            placeholder.mutation is None or placeholder.mutation.evidence == "schema"
            for placeholder in facts.placeholders
        )
        and all(input_.owners and not input_.also for input_ in described.implicit)
        and all(leaf.kind in ("fresh", "input", "input-view", "python") for leaf in leaves)
        and all(effect.kind in ("tensor", "value", "count", "members") for effect in facts.effects)
        and capabilities.HAS_METADATA_GUARD
    )
    if not plain:
        return None
    return Expectation(
        facts=facts,
        implicit=tuple(input_.path for input_ in described.implicit),
        written={
            placeholder.path: placeholder.mutation
            for placeholder in facts.placeholders
            if placeholder.mutation is not None
        },
        same_kind=_guard([input_.owners[0][1] for input_ in described.implicit]),
        unread=described.unread,
    )


def _guard(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    return capabilities.metadata_guard(tensors) if tensors else lambda: True


def find_implicit(before: Snapshot, wanted: Expectation) -> list[ImplicitInput] | None:
    """The implicit inputs as they are now; None if one is not a tensor, is of another kind, or shares memory."""
    implicit = []
    for path in wanted.implicit:
        source, tensor = before.sources.get(path, (None, None))
        plain = isinstance(tensor, torch.Tensor) and type(tensor) in TENSOR_TYPES and tensor.layout is torch.strided
        if source is None or tensor is None or not plain:
            return None
        storage = tensor.untyped_storage()
        owners = before.owners(storage)
        is_alone = len(owners) == 1 and owners[0][1] is tensor  # as almost all are
        if not is_alone and any(owner is not tensor for _, owner in owners):
            return None
        external = External(tensor, storage, None, wanted.written.get(path))
        implicit.append(ImplicitInput(path, tuple(owners), external))
    return implicit if wanted.same_kind(*[input_.external.tensor for input_ in implicit]) else None


def other_result(expected: Sequence[OutputInfo], found: Sequence[OutputInfo], call: Call) -> str | None:
    """A result that is another kind of tensor in a run that only captured than in the watched one, such as the seed
    that operators of attention give. What a backward pass needs may be: it knows of seeds."""
    for planned, one in zip(expected, found, strict=False):
        needed = call.keeps_program and one.path.startswith("output.saved.")
        if planned.compared == one.compared and planned.made != one.made and not needed:
            return f"{one.path} is {one.tensor} while capturing, and {planned.tensor} otherwise"
    return None


def confirm(
    watched: ObservedRun, wanted: Expectation, implicit: list[ImplicitInput], wrote: set[str]
) -> DescribedRun | str:
    """The run described by the facts that were known before, or what was not as expected.

    ``wrote``: paths of the inputs that were written.
    """
    if wrote != set(wanted.written):
        return "other inputs are written"
    paths = {id(leaf): path for path, leaf in watched.arguments}
    paths.update({id(input_.external.tensor): input_.path for input_ in implicit})
    for tensor, version in watched.versions:
        if tensor._version != version and paths.get(id(tensor)) not in wrote:
            return "a tensor was written that no operator told of"
    tensors = [leaf for _, leaf in watched.arguments if isinstance(leaf, torch.Tensor)]
    if wrote and any(group is not None for group in alias_groups([*tensors, *(o.external.tensor for o in implicit)])):
        return "inputs share memory"
    classify = Classifier(watched, watched.arguments)
    outputs = [classify.leaf(path, value) for path, value in result_leaves(watched.result)]
    effects, effect_facts = effects_of(watched, classify)
    watched.watch.trace.arrays.clear()  # of which the run before proved what becomes of them
    output_facts = [output_info(output, watched) for output in outputs]
    if [output.compared for output in output_facts] != [output.compared for output in wanted.facts.outputs]:
        return "the outputs are others"
    if (difference := other_result(wanted.facts.outputs, output_facts, watched.call)) is not None:
        return difference
    effect_facts += kinds_as_effects(watched, [*(leaf for effect in effects for leaf in effect.leaves), *outputs])
    if [effect.compared for effect in effect_facts] != [effect.compared for effect in wanted.facts.effects]:
        return "other state is changed"
    if any(leaf.kind not in ("fresh", "input", "input-view", "python") for effect in effects for leaf in effect.leaves):
        return "state is set to a tensor from elsewhere"
    return DescribedRun(wanted.facts, implicit, outputs, effects, unread=wanted.unread)
