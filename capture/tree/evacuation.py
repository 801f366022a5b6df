"""Outputs that are still held when their step is over leave the pool, or turn stale if they were borrowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from capture.engines.base import Pool
from capture.key.tensor_meta import is_dense
from capture.torch_private import capabilities
from capture.tree.clone import on_storage
from capture.tree.liveness import StaleTensor, are_untouched_gradients, make_stale
from capture.tree.node import Node
from capture.tree.outputs import OutputPlan

OutputGroup = tuple[Node, int]
"""A node and the number of a group of its outputs."""


def invalidate(node: Node, number: int) -> bool:
    """Make borrowed outputs raise. False if a view of one is held: a view cannot raise, so it keeps its values."""
    outputs = _outputs_of(node)
    tensors = [tensor for reference in outputs.tensors[number] if (tensor := reference()) is not None]
    alone = len(tensors) == 1 and type(tensors[0]) is torch.Tensor
    alone = alone and outputs.is_sole_holder(number, tensors[0])
    for tensor in tensors:
        if type(tensor) is torch.Tensor:
            make_stale(tensor, node.function.annotation)
    if alone:
        outputs.lose(number)
    return alone


def move_out(pool: Pool, groups: Sequence[OutputGroup]) -> list[OutputGroup]:
    """Give what holds these groups memory of its own. Gives those where that cannot be done."""
    left = _move_gradients(pool, groups)
    return [(node, number) for node, number in left if not _move_group(pool, node, number)]


def _move_gradients(pool: Pool, groups: Sequence[OutputGroup]) -> list[OutputGroup]:
    """All gradients that parameters alone hold, with one operator. Gives the rest."""
    by_node: dict[int, tuple[Node, list[int]]] = {}
    for node, number in groups:
        by_node.setdefault(node.number, (node, []))[1].append(number)
    alone: dict[tuple[int, int], torch.Tensor] = {}
    for node, numbers in by_node.values():
        found = _lone_gradients(_outputs_of(node), numbers)
        alone |= {(node.number, number): gradient for number, gradient in found}
    if not alone:
        return list(groups)
    gradients = list(alone.values())
    pool.enter()
    with torch.no_grad(), torch.inference_mode(False):
        copies = [torch.empty_like(one) for one in gradients]
        capabilities.copy_all(copies, gradients)
        for gradient, copied in zip(gradients, copies, strict=True):
            gradient.data = copied
    left = [(node, number) for node, number in groups if (node.number, number) not in alone]
    for node, number in groups:
        if (node.number, number) in alone:
            _note_moved(node, number)
    return left


def _note_moved(node: Node, number: int) -> None:
    assert node.log is not None
    _outputs_of(node).lose(number)
    node.log.counters.evacuations += 1


def _lone_gradients(outputs: OutputPlan, numbers: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
    """Groups that are each the ``grad`` of one parameter, dense, as it was made, and used by nobody else."""
    pairs: Sequence[tuple[int, torch.Tensor | None]] = _deposited(outputs, numbers)
    if outputs.gradients and outputs.keeps_gradients():
        pairs = [(number, outputs.gradients[number]()) for number in numbers if number in outputs.gradients]
    found = [(number, one.grad) for number, one in pairs if one is not None]
    return [(number, one) for number, one in found if one is not None and is_dense(one.shape, one.stride())]


def _deposited(outputs: OutputPlan, numbers: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
    if outputs.deposits is None or not capabilities.HAS_METADATA_GUARD:
        return []
    pairs, shared_storages, firsts = [], [], []
    for number in numbers:
        shared, parameters = outputs.shared_storages[number], outputs.deposits(outputs.groups[number].positions)
        if shared is not None and shared.first is not None and parameters and shared.held is outputs.live[number]:
            shared.part()
            pairs.append((number, parameters[0]))
            shared_storages.append(shared)
            firsts.append(shared.first)
    parameters = tuple([one for _, one in pairs])
    if not pairs or not are_untouched_gradients(parameters, shared_storages, capabilities.metadata_guard(firsts)):
        return []
    return pairs


def _move_group(pool: Pool, node: Node, number: int) -> bool:
    outputs = _outputs_of(node)
    shared, held = outputs.shared_storages[number], node.live[number]
    if shared is not None:
        shared.part()
    storage = held() if held is not None else None
    if storage is None:
        return True
    if not pool.find(storage.data_ptr()):  # it left already, as a static tensor of another recording
        outputs.lose(number)
        return True
    if not pool.evacuate(storage) and not _move_tensors(outputs, number):
        return False
    _note_moved(node, number)
    return True


def _move_tensors(outputs: OutputPlan, number: int) -> bool:
    _, gradients = outputs.gradients_of(number)
    if gradients:
        with torch.no_grad():
            moved = on_storage(gradients[0].untyped_storage().clone(), gradients)
            for gradient, there in zip(gradients, moved, strict=True):
                gradient.data = there
        return True
    tensors = [tensor for reference in outputs.tensors[number] if (tensor := reference()) is not None]
    if len(tensors) != 1 or type(tensors[0]) is StaleTensor or not outputs.is_sole_holder(number, tensors[0]):
        return False
    with torch.inference_mode(tensors[0].is_inference()), torch.no_grad():
        tensors[0].data = on_storage(tensors[0].untyped_storage().clone(), tensors)[0]
    return True


def note_gradients(groups: Sequence[OutputGroup], path: Sequence[Node]) -> None:
    """These were held as a step began. Where gradients are in one step after the other, copies cost less than to move
    them: those need no look at who holds them."""
    for node in {node.number: node for node, number in groups if _outputs_of(node).is_gradient(number)}.values():
        assert node.log is not None
        replays = node.log.counters.replays
        if node.moved_at is not None and replays - node.moved_at <= sum(one.log is node.log for one in path):
            copy_from_now_on(node, "from step to step")
        node.moved_at = replays


def _outputs_of(node: Node) -> OutputPlan:
    assert node.outputs is not None
    return node.outputs


def copy_from_now_on(node: Node, why: str) -> None:
    """An output that was kept will be kept again: hand out copies."""
    outputs, log = _outputs_of(node), node.log
    assert log is not None
    if outputs.policy == "preserve":
        outputs.policy, outputs.preserving = "clone", False
        node.see()
        node.function.copied_entries.add(node.key[0])
        log.add("step", f"an output is kept {why}; its function hands out copies from now on")
