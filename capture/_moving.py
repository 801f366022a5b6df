"""Moving: outputs that are still held when their step is over leave the pool, or turn stale if they were borrowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from capture._copies import on_storage
from capture._liveness import StaleTensor, make_stale
from capture._node import Node
from capture._outputs import OutputPlan
from capture.backends import Pool


def invalidate(node: Node, number: int) -> bool:
    """Make borrowed outputs raise. False if a view of one is held: a view cannot raise, so it keeps its values."""
    assert node.outputs is not None
    tensors = [tensor for reference in node.outputs.tensors[number] if (tensor := reference()) is not None]
    alone = len(tensors) == 1 and type(tensors[0]) is torch.Tensor
    alone = alone and node.outputs.is_sole_holder(number, tensors[0])
    for tensor in tensors:
        if type(tensor) is torch.Tensor:
            make_stale(tensor, node.function.annotation)
    if alone:
        node.outputs.lose(number)
    return alone


def move_out(pool: Pool, node: Node, number: int, storage: torch.UntypedStorage) -> bool:
    """Give what holds this group memory of its own. False if that cannot be done."""
    outputs, log = node.outputs, node.log
    assert outputs is not None
    assert log is not None
    if not pool.find(storage.data_ptr()):  # it left already, as a static tensor of another recording
        outputs.lose(number)
        return True
    if not pool.evacuate(storage) and not _move_tensors(outputs, number):
        return False
    outputs.lose(number)
    log.counters.evacuations += 1
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


def note_gradients(node: Node, path: Sequence[Node]) -> None:
    """Gradients of parameters were held as a step began, and moved one by one. Where that is so in one step after the
    other, copies cost less: those are made of all at once."""
    assert node.log is not None
    replays = node.log.counters.replays
    if node.moved_at is not None and replays - node.moved_at <= sum(one.log is node.log for one in path):
        copy_from_now_on(node, "from step to step")
    node.moved_at = replays


def copy_from_now_on(node: Node, why: str) -> None:
    """An output that was kept will be kept again: hand out copies."""
    outputs, log = node.outputs, node.log
    assert outputs is not None
    assert log is not None
    if outputs.policy == "preserve":
        outputs.policy, outputs.preserving = "clone", False
        node.see()
        node.function.copied_entries.add(node.key[0])
        log.add("step", f"an output is kept {why}; its function hands out copies from now on")
