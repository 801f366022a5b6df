"""Names that torch does not document and that several stages use; those of one subject are in the files beside it.

Each name stands behind a probe; ``CAPABILITIES`` says what was found. Without a name the stated fallback is
slower or records less, never wrong. Source of each: torch 2.11 to 2.13, read in the installed package.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional
import torch.profiler
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree  # registered containers; without it only built-in ones are opened

from capture.core.data import frozen
from capture.core.interrupts import let_through
from capture.torch_private.operator_watch import unseen as unseen


@frozen(kw_only=True)
class Capabilities:
    """What this torch offers beyond its documented interface."""

    storage_weakref: bool
    """A Python weak reference to an untyped storage lives exactly as long as the memory is in use.
    Without it liveness is read from the storage's use count (0.27 us instead of 0.03 us)."""
    global_state_guard: bool
    """``GlobalStateGuard``: ambient modes compared in 0.2 us. Without it they are read one by one (2 us)."""
    pool_checkpoint: bool
    """State of a private CUDA pool can be read and put back, which all paths of a tree need to share memory.
    Without it (``cudaMallocAsync``, a pluggable allocator) every recording has a pool of its own."""
    storage_counts: bool
    """``count_holders`` tells how many hold a storage, so that outputs may be aliases of one tensor made once (0.5 us).
    Without it every output gets a storage of its own (1 to 3 us)."""


def _probe_storage_weakref() -> bool:
    tensor = torch.empty(4, device="cpu")
    reference = weakref.ref(tensor.untyped_storage())
    view = tensor[1:]
    del tensor
    alive = reference() is not None
    del view
    return alive and reference() is None


try:
    from torch._C._dynamo import guards as _guards
    from torch._C._dynamo.guards import GlobalStateGuard as GlobalStateGuard
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:  # pragma: no cover - every supported torch has them
    GlobalStateGuard = _TensorGuards = _guards = None  # type: ignore[assignment, misc]

_POOL_NAMES = (
    "_cuda_getCheckpointState", "_cuda_setCheckpointPoolState", "_cuda_checkPoolLiveAllocations",
    "_cuda_cudaCachingAllocator_raw_delete", "_free_And_Remove_DeleterFn", "_cuda_memorySnapshot",
)  # fmt: skip


def _probe_pool_checkpoint() -> bool:
    if not torch.backends.cuda.is_built() or not torch.cuda.is_available():
        return False
    native = torch.cuda.get_allocator_backend() == "native"
    return native and all(hasattr(torch._C, name) for name in _POOL_NAMES)


def _no_count(_: int) -> int:
    return 0


count_holders: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", _no_count)
"""Strong holders of the storage at an address (``_cdata``), its Python object included (0.1 us)."""


def _probe_storage_counts() -> bool:
    first = torch.empty(4, device="cpu")
    storage = first.untyped_storage()
    alone = count_holders(storage._cdata)
    with torch.no_grad():  # a view made with gradients on holds its base as well
        alias = first.data
        counts = [count_holders(storage._cdata)]
        view = alias[1:]
        del alias
        counts.append(count_holders(storage._cdata))
        del view
    return min(counts) > alone and count_holders(storage._cdata) == alone


CAPABILITIES = Capabilities(
    pool_checkpoint=_probe_pool_checkpoint(),
    storage_weakref=_probe_storage_weakref(),
    global_state_guard=GlobalStateGuard is not None,
    storage_counts=_probe_storage_counts(),
)


class CountedStorage:
    """A weak hold on a storage by its use count, called like a ``weakref.ref``, where those are not reliable."""

    __slots__ = ("_weak",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._weak = StorageWeakRef(storage)

    def __call__(self) -> torch.UntypedStorage | None:
        if self._weak.expired():
            return None
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return found


raw_use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
"""Holders of the tensor in C++ and Python together (a Python reference counts once in all)."""


def use_count(tensor: torch.Tensor) -> int:
    """As ``raw_use_count``, by a method call, which is faster for one tensor."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


def is_not_resizable(error: BaseException) -> bool:
    """Whether an operator was to resize memory that is not torch's own. torch has no class for this error."""
    return type(error) is RuntimeError and "not resizable" in str(error)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Strong holders of the storage, the Python storage object included."""
    weak = storage._weak_ref()
    try:
        count: int = torch._C._storage_Use_Count(weak)  # type: ignore[arg-type] # an address, as the stub says
    finally:
        torch.UntypedStorage._free_weak_ref(weak)
    return count


def _always() -> bool:
    return True


def _constant_zero() -> int:
    return 0


def _no_interpreter() -> None: ...


# Without these counters a foreign mode is not noticed at the call; the observation then sees its operators.
dispatch_mode_depth: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _constant_zero)
FUNCTION_MODES = ("torch.overrides", "torch.utils._device")
"""Modules that pass on what torch's functions are called for, where a mode of those is set, as a default device is.
Where they have other names, a checkpointed block is eager, and a value that is returned is compared."""
function_mode_depth: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", _constant_zero)
functorch_interpreter: Callable[[], object | None] = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", _no_interpreter
)
# -1 outside of forward-mode differentiation, and everywhere without this name: a replay would give no tangents then.
DUAL_LEVEL = torch.autograd.forward_ad, "_current_level"
"""Where the level of forward-mode differentiation is kept; in a torch that keeps it elsewhere there is none."""
dual_level: Callable[[], int] = functools.partial(getattr, *DUAL_LEVEL, -1)


def _unknown_mode(_: int) -> object:
    return object()


# Without this name every function mode counts as somebody else's.
function_mode: Callable[[int], object] = getattr(torch._C, "_get_function_stack_at", _unknown_mode)
is_tracing: Callable[[], object | None] = getattr(torch._C, "_get_tracing_state", _no_interpreter)


def _probe_saved_hooks() -> Callable[[bool], object | None]:
    top: Callable[[bool], object | None] = torch._C._autograd._top_saved_tensors_default_hooks
    with torch.autograd.graph.saved_tensors_hooks(_no_packing, _no_packing):
        if top(True) is None:
            raise TypeError
    return top


def _no_packing(tensor: Any) -> Any:
    return tensor


def _no_hooks(_: bool) -> None: ...


# Without this name hooks on saved tensors are called for what a region saves, not for what eager saves.
try:
    saved_hooks: Callable[[bool], object | None] = _probe_saved_hooks()
except (AttributeError, TypeError):  # pragma: no cover - every supported torch has it
    saved_hooks = _no_hooks


def autocast_inside(kinds: Sequence[str]) -> Any:
    """A context in which an operator called from a dispatch mode casts what its kernel calls, as in plain eager.

    torch hides autocast from everything below a mode, so that kernels that call further operators (``_trilinear``)
    would compute in another precision than eagerly. ``kinds``: device types for which autocast is on. Without these
    names: nothing.
    """
    if not kinds:
        return contextlib.nullcontext()
    try:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{kinds[0].upper()}"))
        for kind in kinds[1:]:
            keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}"))
        include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        return torch._C._ForceDispatchKeyGuard(include, exclude - keys)
    except (AttributeError, TypeError):  # pragma: no cover - torch without these bindings
        return contextlib.nullcontext()


# Without this name a mode that hands a call on (torch.set_default_device) comes to the function that has torch's name
# at that time, also where a watched run replaced it: what the library calls counts as the body's, which goes eager.
without_function_modes: Callable[[], contextlib.AbstractContextManager[Any]] = getattr(
    torch._C, "DisableTorchFunction", contextlib.nullcontext
)
"""What is called in the block meets no torch-function mode and no ``__torch_function__`` of a subclass."""


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """No dispatch mode is in force in the block. Without torch's name for that, none sees an operator there."""
    leave_out = getattr(_python_dispatch, "_disable_current_modes", None)
    found: contextlib.AbstractContextManager[Any] = unseen() if leave_out is None else leave_out()
    return found


def only_default_device_modes() -> bool:
    """True if every active torch-function mode is ``torch.device`` used as a context or a default device."""
    from torch.utils._device import DeviceContext

    stack = [function_mode(i) for i in range(function_mode_depth())]
    return all(isinstance(mode, DeviceContext) for mode in stack)


def _of_default_device() -> frozenset[types.CodeType]:
    try:
        from torch.utils import _device as module
    except ImportError:
        return frozenset()
    mode = vars(getattr(module, "DeviceContext", object)).get("__torch_function__")
    known = getattr(getattr(module, "_device_constructors", None), "__wrapped__", None)
    return frozenset([one.__code__ for one in (mode, known) if isinstance(one, types.FunctionType)])


DEFAULT_DEVICE_CODE = _of_default_device()
"""What runs around each function of torch under a default device: it reads that device, and which functions take one.
Empty in a torch that has other names."""
NO_TASK = -1
"""What ``graph_task`` gives outside of a run of autograd."""


def _no_task() -> int:
    return NO_TASK


graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _no_task)
"""Number of the run of autograd that this thread works in, never used again; -1 outside of one. Without it, who waits
for autograd is looked up in every backward pass."""

HAS_METADATA_GUARD = _TensorGuards is not None
"""Metadata of several tensors can be compared in one call; without it keys are always built in full."""


def metadata_guard(tensors: Sequence[torch.Tensor], free: Sequence[int] = ()) -> Callable[..., bool]:
    """A function that tells whether other tensors have the types and metadata of these. Needs the guard. ``free``: of
    how many first dimensions the strides may be others, for each tensor."""
    sizes: Any = [list(tensor.size()) for tensor in tensors]  # Any: the stub asks for one tensor's
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    for numbers, count in zip(strides, free, strict=False):
        numbers[:count] = [None] * count
    return _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def metadata_check(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """A function that tells whether these tensors still have their dtype, sizes, strides and flags.

    Without ``TensorGuards`` (0.05 us a tensor) sizes and strides are compared in Python (0.3 us a tensor).
    """
    if not tensors:
        return _always
    if _TensorGuards is None:
        expected = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        return lambda: [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors] == expected
    check, fixed = metadata_guard(tensors), tuple(tensors)
    return lambda: check(*fixed)


def _probe_addresses_equal() -> Callable[[Any, Any, Any], bool] | None:
    compare: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    first, second = torch.empty(1, device="cpu"), torch.empty(1, device="cpu")
    here, numbers = [first.data_ptr(), second.data_ptr()], [0, 1]
    try:
        verdicts = compare([first, second], here, numbers), compare([second, first], here, numbers)
    except TypeError:
        return None
    return compare if verdicts == (True, False) else None


_addresses_equal = _probe_addresses_equal()


def address_check(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """A function that tells whether these tensors are still where they are now.

    Without torch's comparison, which only CUDA builds have, addresses are read one by one (0.1 us a tensor).
    """
    kept, addresses = list(tensors), [tensor.data_ptr() for tensor in tensors]
    if not kept:
        return _always
    if _addresses_equal is not None:
        return functools.partial(_addresses_equal, kept, addresses, list(range(len(kept))))
    read = torch.Tensor.data_ptr
    return lambda: list(map(read, kept)) == addresses


set_grad_enabled: Callable[[bool], object] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)
"""Switch grad mode (0.05 us); the public class of this name does the same in 0.5 us."""


def is_registered_container(kind: type) -> bool:
    """Whether it is a pytree node type registered with torch (``ModelOutput``, ``TensorDict`` where it registers)."""
    return kind in pytree.SUPPORTED_NODES


def open_registered(value: object) -> tuple[list[Any], Any]:
    """One level of a registered container: its children and the context that rebuilds it."""
    children, spec = pytree.tree_flatten(value, is_leaf=lambda child: child is not value)
    return children, spec


def close_registered(children: Sequence[object], spec: Any) -> Any:
    """The reverse of ``open_registered``."""
    return pytree.tree_unflatten(list(children), spec)


def registered_key(spec: Any) -> object:
    """A hashable that tells two structures of one container type apart."""
    return (spec.type, repr(spec.context), spec.num_children)


def leaf_like(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf that needs gradients, of the tensor's type, on its memory and with its version counter, made unseen by
    dispatch modes. Without this name a mode sees one operator more."""
    make = getattr(torch.Tensor, "_make_subclass", None)
    found: torch.Tensor = tensor.detach().requires_grad_() if make is None else make(type(tensor), tensor, True)
    return found


# Without this name a leaf at which some graph ends cannot be lent to a capture: a whole step then runs eagerly.
swap_tensors: Callable[[torch.Tensor, torch.Tensor], object] | None = getattr(torch._C, "_swap_tensor_impl", None)
"""Exchange what two tensor objects stand for; the objects and their Python attributes stay."""


# Zeros without memory, as autograd makes them. Without this name they count as plain tensors.
is_zero_tensor: Callable[[torch.Tensor], bool] = getattr(torch, "_is_zerotensor", lambda _: False)


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError) as error:
        let_through(error)
        return False
    return True


has_memory: Callable[[torch.Tensor], bool] = getattr(torch._C, "_has_storage", _has_memory)
"""It lies in memory, and does not stand for several others, as under a transform. Without this name it is tried."""


def generator_id(generator: torch.Generator) -> int:
    """Tells generators apart where operators get them as new Python objects around the same generator."""
    return getattr(generator, "_cdata", id(generator))


def _profiling() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


_PROFILER_FLAG = "_is_profiler_enabled"
HAS_PROFILER_FLAG = hasattr(torch.autograd.profiler, _PROFILER_FLAG)
is_profiling: Callable[[], bool] = _profiling if HAS_PROFILER_FLAG else _always
"""A profiler runs (0.06 us), in whichever thread. Without this flag ranges are entered always, but for replays in C,
which then have none."""

profiler_range: Callable[[str], Any] = getattr(
    getattr(torch._C, "_profiler", None), "_RecordFunctionFast", torch.profiler.record_function
)
"""A range in a profiler's trace (0.5 us), without an operator of its own. Without this name the public one (11 us)."""


def profiler_flag() -> tuple[dict[str, Any], str] | None:
    """A dict and the name in it that is True while a profiler runs, for C to look at; None where torch has none."""
    return (vars(torch.autograd.profiler), _PROFILER_FLAG) if HAS_PROFILER_FLAG else None


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


_EMPTY = {
    "cpu": getattr(_guards, "_empty_strided_cpu", None),
    "cuda": getattr(_guards, "_empty_strided_cuda", None),
}


def empty_maker(device: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: Any) -> Callable[[], torch.Tensor]:
    """A function that makes dense tensors; on CUDA on the current device. As compiled code makes them (1.2 us); without
    that through the public operator (2.8 us), which may also fill them."""
    make = _EMPTY.get(device)
    if make is None:
        return functools.partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)
    return functools.partial(make, shape, stride, dtype)


def function_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``apply`` for tensors that no transform of ``torch.func`` made: below torch's own in Python, which looks for such
    ones (8 us for 13 tensors). Without it torch's own."""
    below = getattr(super(torch.autograd.Function, function), "apply", None)
    return function.apply if below is None else below


copy_all: Callable[[Any, Any], Any] = getattr(torch, "_foreach_copy_", _copy_each)
"""Copy a list of tensors into a list of tensors in as few kernels as torch can; else one by one."""
