"""Names of ``torch.distributed`` beyond its documented interface, each behind a probe with a stated fallback."""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from capture.core.interrupts import let_through, suppress
from capture.torch_private.monkeypatch import replaced

_HAS_GROUPS = dist.is_available()
_without_modes: Callable[[], contextlib.AbstractContextManager[Any]] | None
_without_modes = getattr(torch._C, "_DisableTorchDispatch", None)


def _groups_reader() -> Callable[[], bool]:
    """As ``is_initialized``, of which five calls in a row say the same (0.1 us for 0.6)."""
    world: Any = getattr(getattr(dist, "distributed_c10d", None), "_world", None)
    if not _HAS_GROUPS:
        return bool
    if not hasattr(world, "_default_pg"):
        return dist.is_initialized
    return lambda: world._default_pg is not None


groups_exist: Callable[[], bool] = _groups_reader()
"""This process is in a process group now. Where torch keeps its world elsewhere, it is asked."""


def _work_waiter() -> Callable[[Any], object] | None:
    unbox = getattr(getattr(dist, "Work", None), "unbox", None)
    return None if unbox is None else lambda handle: unbox(handle).wait()


# Without ``Work.unbox`` an operator's handle cannot be waited for: collectives that give one are not recorded.
wait_for_work: Callable[[Any], object] | None = _work_waiter()


def wait_for_tensor(tensor: torch.Tensor) -> None:
    """Wait until a functional collective has made this tensor. Without the operator there are no functional
    collectives, and this does nothing."""
    torch.ops._c10d_functional.wait_tensor.default(tensor)


def group_of(boxed: Any) -> Any:
    """The process group that an operator of ``c10d`` got; None where torch does not hand it out, so that its ranks do
    not agree and its end is not noticed."""
    unbox = getattr(getattr(dist, "ProcessGroup", None), "unbox", None)
    if unbox is None or not isinstance(boxed, torch.ScriptObject):
        return boxed if hasattr(boxed, "group_name") else None
    return unbox(boxed)


def text_of(boxed: Any) -> str:
    """What an operator of ``c10d`` got beside tensors, by value: a group's name, a reduction's number. An address where
    torch does not tell, so that no two runs seem the same and what uses it runs eagerly."""
    kind = str(boxed._type()).rpartition(".")[2]
    if kind == "ProcessGroup" and (group := group_of(boxed)) is not None:
        return f"group {group.group_name}"
    if kind == "ReduceOp" and boxed._has_method("op"):
        number = boxed.op()
        if number != _WITH_FACTOR:  # which is not told
            return f"reduction {number}"
    return repr(boxed)


_WITH_FACTOR = int(dist.ReduceOp.PREMUL_SUM) if _HAS_GROUPS else -1  # type: ignore[call-overload]


def replicas_among(modules: Sequence[torch.nn.Module]) -> list[Any]:
    """Each ``DistributedDataParallel`` among the modules."""
    return [module for module in modules if isinstance(module, DistributedDataParallel)] if groups_exist() else []


def sharding_of(module: torch.nn.Module) -> Any:
    """What ``fully_shard`` keeps of a module. None where there is nothing, or torch does not tell: then its settings
    are not part of keys."""
    find = getattr(type(module), "_get_fsdp_state", None)  # not of the object: its ``__getattr__`` would run
    return find(module) if callable(find) else None


def progress_of(state: Any) -> tuple[Any, ...]:
    """Settings of ``fully_shard``, such as ``set_requires_gradient_sync``, and where it is in a step: all plain values
    that it keeps of a module, how many other things, and whether gradients of whole parameters wait to be exchanged."""
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    kept = [state, getattr(state, "_state_ctx", None), *groups]
    parameters = [one for group in groups for one in getattr(group, "fsdp_params", ())]
    plain = [_plain(value) for one in kept if one is not None for value in vars(one).values()]
    return (*plain, any(map(_waits, parameters)))


def _waits(parameter: Any) -> bool:
    if getattr(parameter, "unsharded_accumulated_grad", None) is not None:
        return True
    return getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, enum.Enum)):
        return value
    return len(value) if isinstance(value, (list, tuple, dict, set)) else type(value)


def _has_hook_of_torchs(module: Any) -> bool:
    """Whether the module has a communication hook that is written in C++. False where torch does not tell."""
    try:
        return "BuiltinCommHook" in str(module._get_ddp_logging_data().get("comm_hook"))
    except (AttributeError, RuntimeError) as error:
        let_through(error)
        return False


@contextlib.contextmanager
def handles_watched(note_use: Callable[[str], None], modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """In the block ``Work.wait`` is no business of dispatch modes: some backends copy results in it, from memory that
    no operator told of. Without torch's guard they see that, and what does it runs eagerly. ``note_use(name)`` is
    called where a future is taken from a handle: what it leads to runs in other threads, unseen. So do hooks of torch's
    own that one of the ``modules`` the body can reach has."""
    if not groups_exist() or _without_modes is None:
        yield
        return
    if any(map(_has_hook_of_torchs, replicas_among(modules))):
        note_use("a communication hook of torch's own")
    work: Any = dist.Work
    wait, get_future, thread = work.wait, work.get_future, threading.get_ident()

    @functools.wraps(wait)
    def unseen(handle: Any, *args: Any, **kwargs: Any) -> Any:
        with _without_modes():
            return wait(handle, *args, **kwargs)

    @functools.wraps(get_future)
    def noted(handle: Any) -> Any:
        if threading.get_ident() == thread:
            note_use("Work.get_future")
        return get_future(handle)

    with replaced(work, {"wait": unseen, "get_future": noted}):
        yield


def buckets_to_arrange(modules: Sequence[torch.nn.Module]) -> Callable[[], str]:
    """Tells what a ``DistributedDataParallel`` among ``modules`` did meanwhile that it does once, if anything: arrange
    its buckets in the second forward pass, with an exchange through the host, or have gradients lie there. An empty
    text where torch does not tell: the step then runs eagerly as one that reads values, or unknown memory."""
    replicated = replicas_among(modules)
    waiting = [replica for replica in replicated if getattr(replica, "_has_rebuilt_buckets", None) is False]
    viewing = [replica for replica in replicated if getattr(replica, "gradient_as_bucket_view", False)]
    bare = [
        parameter
        for module in viewing
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.grad is None
    ]

    def done() -> str:
        if any(getattr(replica, "_has_rebuilt_buckets", False) for replica in waiting):
            return "DistributedDataParallel arranged its buckets"
        came = bare and all(parameter.grad is not None for parameter in bare)
        return "gradients came to lie in the buckets of DistributedDataParallel" if came else ""

    return done


_MEASURED = 10  # torch/csrc/distributed/c10d/reducer.hpp, 2.11: should_collect_runtime_stats


def passes_measured(modules: Sequence[torch.nn.Module]) -> int:
    """Forward passes to come of a ``DistributedDataParallel`` among ``modules`` that it measures with events of the
    device, which no capture survives: those to its eleventh. 0 where torch does not tell."""
    left = 0
    for replica in replicas_among(modules):
        with suppress(AttributeError, RuntimeError, TypeError, ValueError):
            if replica.device_type != "cpu":
                left = max(left, _MEASURED - int(replica._get_ddp_logging_data().get("iteration", 0)))
    return left


def default_store() -> Any:
    """The key-value store that the default group was made with; None where there is none, so that ranks do not agree
    and each goes on by itself."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None) if _HAS_GROUPS else None
    try:
        return None if find is None else find()
    except (RuntimeError, ValueError, KeyError) as error:
        let_through(error)
        return None


def collectives_so_far() -> int:
    """How many collectives the default group has sent, which is the same in all ranks at one place of a program; 0
    where torch does not count."""
    count = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None)
    try:
        return 0 if count is None else int(count())
    except RuntimeError as error:  # a backend that does not count
        let_through(error)
        return 0


def ranks_of(group: str) -> list[int]:
    """Ranks, as the default group counts them, of the members of a group, by its name; all ranks where torch does not
    find it."""
    c10d: Any = dist.distributed_c10d
    try:
        return list(dist.get_process_group_ranks(c10d._resolve_process_group(group)))
    except (AttributeError, RuntimeError, ValueError, KeyError, TypeError) as error:
        let_through(error)
        return list(range(dist.get_world_size()))


def before_shutdown(call: Callable[[str], object]) -> bool:
    """Have ``call(name)`` called before a process group ends, by ``destroy_process_group`` or by itself. False where
    torch's class does not take that: recordings then have to be released by hand."""
    kind: Any = getattr(dist, "ProcessGroup", None)
    hooked = False
    for name in ("shutdown", "abort"):
        original = getattr(kind, name, None)
        if original is not None:
            setattr(kind, name, _calling(call, original))
            hooked = True
    return hooked


def _calling(call: Callable[[str], object], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def end(group: Any, *args: Any, **kwargs: Any) -> Any:
        call(str(group.group_name))
        return original(group, *args, **kwargs)

    return end
