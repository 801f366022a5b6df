"""What operators of ``torch.distributed`` do that their schemas do not tell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from capture.key.pytree import result_leaves
from capture.torch_private.cuda import expandable_segments
from capture.torch_private.distributed import group_of, groups_exist, wait_for_tensor, wait_for_work

NAMESPACES = frozenset(["c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"])
_LOCAL = frozenset(["wait_tensor", "_wrap_tensor_autograd", "check_for_nan"])
_WRITE_NOTHING = frozenset(["send", "barrier", "monitored_barrier_", "check_for_nan"])
_MESSAGES = frozenset(["send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops"])
_ALL_WAIT = (
    "allreduce", "all_reduce", "allgather", "all_gather", "_allgather", "reduce_scatter", "_reduce_scatter", "alltoall",
    "all_to_all", "barrier",
)  # fmt: skip


def communicates(namespace: str, base: str) -> bool:
    """Whether ranks exchange something, so that each has to run the operator as often as the others."""
    return namespace in NAMESPACES and base not in _LOCAL


def writes_first(namespace: str, base: str) -> bool:
    """Whether the operator writes its first argument, although its schema does not say so: all but a few of ``c10d``
    do."""
    return namespace == "c10d" and base not in _WRITE_NOTHING


def waits_for_all(base: str) -> bool:
    """Whether no rank completes it before every rank of the group has begun."""
    return base.startswith(_ALL_WAIT)


def group_name(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Name of the collective's process group; empty where it cannot be found."""
    given = [*zip((argument.name for argument in op._schema.arguments), args, strict=False), *kwargs.items()]
    for name, value in given:
        if name == "group_name":
            return value if isinstance(value, str) else str(getattr(value, "group_name", ""))
        if name == "process_group":
            group = group_of(value)
            return "" if group is None else str(group.group_name)
    return ""


def obstacle(base: str, *, on_host: bool) -> str | None:
    """Why an engine does not record a collective; None where it does. Reads after the operator's name. Accelerators
    take what the library behind the group can put into a graph."""
    if base == "wait_tensor":
        return "waits for what a collective before the call makes, which is read when the call begins"
    if not on_host:
        return None
    if base in _MESSAGES:
        return "sends between two ranks, of which each runs other operators, so that they cannot agree on a recording"
    if base == "monitored_barrier_":
        return "measures on the host how long each rank takes"
    if wait_for_work is None:
        return "gives a handle that this torch does not open"
    return None


def registers_segments() -> bool:
    """Whether NCCL registers the memory that captured collectives use, as it does unless told not to. It cannot with
    expandable segments."""
    return os.environ.get("NCCL_GRAPH_REGISTER") != "0" and expandable_segments()


def finished(op: Any, namespace: str, result: Any) -> Any:
    """The result of a collective, once it is complete."""
    if namespace == "c10d":
        work = result[-1] if isinstance(result, (tuple, list)) else result
        if wait_for_work is not None and isinstance(work, torch.ScriptObject):
            wait_for_work(work)
        return result
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        wait_for_tensor(tensor)
    return result


def finish(*tensors: torch.Tensor) -> None:
    """Wait for collectives that began before the call and write tensors which are read next."""
    for tensor in tensors if groups_exist() else ():
        wait_for_tensor(tensor)


def finish_kept(values: Iterable[Any]) -> None:
    """Before a capture ends, wait for everything that it began, also where the body leaves the waiting to its
    caller."""
    for value in values if groups_exist() else ():  # opening an asynchronous one waits for it
        finish(*[leaf for _, leaf in result_leaves(value) if isinstance(leaf, torch.Tensor)])


def waiting(function: Callable[..., Any], op: Any, namespace: str) -> Callable[..., Any]:
    """The operator, and the wait for what it gives: threads of the process group do the work."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return finished(op, namespace, function(*args, **kwargs))

    return run
