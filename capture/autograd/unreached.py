"""Leaves that the results used in a backward pass do not lead to.

A call is one node of the caller's graph, from which all its leaves are reached: to one that depends on none of the
results that are used, autograd brings the news that there is no gradient, and runs its hooks. Eager's pass does not
come there. So until such a pass is over, the hooks of these leaves are left out where no gradient has come. A gradient
that other code brings in the same pass runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from capture.core import forks
from capture.native import native
from capture.torch_private.autograd import at_end_of_pass, is_leaf_node, nodes_above
from capture.torch_private.capabilities import graph_task


def reaching(results: Sequence[torch.Tensor], inputs: Sequence[Any]) -> tuple[int, ...]:
    """Of each input, an edge of the graph behind these results: bit by bit, the results that lead to it. Empty where
    all lead to all."""
    ends, masks = {edge.node for edge in inputs}, [0] * len(inputs)
    for at, result in enumerate(results):
        edges: set[Any] = {(result.grad_fn, result.output_nr)}
        for node in nodes_above([result], ends):
            edges.update(node.next_functions)
        for number, edge in enumerate(inputs):
            masks[number] |= ((edge.node, edge.output_nr) in edges) << at
    return () if all(mask == (1 << len(results)) - 1 for mask in masks) else tuple(masks)


class _Quiet:
    """A hook that is left out in some passes. ``is_met``: whether such a pass has brought a gradient, by what the hook
    gets."""

    __slots__ = ("hook", "is_met", "tasks")

    def __init__(self, hook: Callable[[Any], Any], is_met: Callable[[Any], bool]) -> None:
        self.hook, self.is_met = hook, is_met
        self.tasks: set[int] = set()

    def __call__(self, given: Any) -> Any:
        return self.hook(given) if graph_task() not in self.tasks or self.is_met(given) else None


_changing = forks.lock()
"""Held while hooks are exchanged. C takes it and gives it back: ``with`` may be interrupted between the two."""


def leave_out_hooks(above: Sequence[tuple[Any, int]], is_reached: Sequence[bool]) -> None:
    """Leave out the hooks of leaves that are not reached. ``above``: what is above the inputs of the node that autograd
    runs now."""
    quiet: list[tuple[Any, Any, _Quiet]] = []
    task = graph_task()
    for (node, _), is_reached_now in zip(above, is_reached, strict=False):
        if is_reached_now or node is None or not is_leaf_node(node):
            continue
        leaf = node.variable
        tables = (
            (leaf._backward_hooks, _is_there),
            (getattr(leaf, "_post_accumulate_grad_hooks", None), _is_new(leaf)),
        )
        for hooks, is_met in tables:
            if hooks:
                quiet += _quieten(hooks, is_met, task)
    if quiet:
        at_end_of_pass(lambda: _put_back(quiet, task))


def _is_there(grad: torch.Tensor | None) -> bool:
    return grad is not None


def _is_new(leaf: torch.Tensor) -> Callable[[Any], bool]:
    """Whether its ``.grad`` is another one than now, or was added to."""
    then = leaf.grad
    version = 0 if then is None else then._version

    def is_new(_: object) -> bool:
        return leaf.grad is not then or (then is not None and then._version != version)

    return is_new


def _quieten(hooks: Any, is_met: Callable[[Any], bool], task: int) -> list[tuple[Any, Any, _Quiet]]:
    changed: list[tuple[Any, Any, _Quiet]] = []
    native.locked(_changing, _put_quiet, (hooks, is_met, task, changed), forks.wait_on)
    return changed


def _put_quiet(hooks: Any, is_met: Callable[[Any], bool], task: int, changed: list[tuple[Any, Any, _Quiet]]) -> None:
    for key, hook in list(hooks.items()):
        quiet = hook if isinstance(hook, _Quiet) else _Quiet(hook, is_met)
        if task not in quiet.tasks:
            quiet.tasks.add(task)
            hooks[key] = quiet
            changed.append((hooks, key, quiet))


def _put_back(changed: Sequence[tuple[Any, Any, _Quiet]], task: int) -> None:
    native.locked(_changing, _put_hooks, (changed, task), forks.wait_on)


def _put_hooks(changed: Sequence[tuple[Any, Any, _Quiet]], task: int) -> None:
    for hooks, key, quiet in changed:
        quiet.tasks.discard(task)
        if not quiet.tasks and hooks.get(key) is quiet:
            hooks[key] = quiet.hook
