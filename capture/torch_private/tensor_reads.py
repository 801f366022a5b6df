"""How the C module reads a tensor: through torch's stable C ABI, which libtorch exports from 2.11 on.

Every replay compares the tensors that its recording reads where they are: 200 of them in some microseconds, where
torch's own comparison takes 16. The ABI gives address, sizes, strides and dtype. What it lacks is read from the
properties of the Python class (``PROPERTIES`` says what, where and at what price).

No offset into an object of torch's is used but one: where a Python tensor keeps the pointer that its ``_cdata`` gives.
It is looked for in this process, within the object's own size, and each tensor is asked for ``_cdata`` where it is not
found. Then every change of a tensor is tried, and has to show. Where one does not, or a function is missing, torch's
comparison is used: right, and slower.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from capture.core.data import frozen
from capture.core.interrupts import let_through
from capture.native import native
from capture.torch_private.capabilities import HAS_METADATA_GUARD, metadata_check
from capture.torch_private.libraries import library
from capture.torch_private.probe import probe

_FUNCTIONS = ("data_ptr", "dim", "sizes", "strides", "dtype")
"""Of the ABI, behind ``aoti_torch_get_``; in the order in which the C module takes them."""
_COMPLEX = ("complex32", "complex64", "complex128")
_REAL = ("float16", "float32", "float64")
"""What the parts of complex numbers are: a view of one may have the negative bit."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Classes whose properties nobody overrides. ``Buffer`` makes plain tensors, so that no object has it as its class."""


@frozen(kw_only=True)
class Property:
    """One property of a static tensor that every replay compares."""

    name: str
    read_by: str
    nanoseconds: int
    """Time to compare it for one tensor, on one idle core."""


PROPERTIES = (
    Property(name="address", read_by="aoti_torch_get_data_ptr", nanoseconds=3),
    Property(name="sizes, strides", read_by="aoti_torch_get_dim, _sizes, _strides", nanoseconds=3),
    Property(name="dtype", read_by="aoti_torch_get_dtype", nanoseconds=1),
    Property(name="device", read_by="the address, which is on one device only", nanoseconds=0),
    Property(
        name="requires_grad",
        read_by="the getter of Tensor.requires_grad, where gradient mode is on or code asks",
        nanoseconds=15,
    ),
    Property(
        name="conjugate and negative bit",
        read_by="Tensor.is_conj, is_neg of what may be a conjugate or its imaginary part",
        nanoseconds=120,
    ),
    Property(name="class", read_by="the object", nanoseconds=0),
)
"""No public operator sets the negative bit of a tensor whose elements lie next to each other; ``torch._neg_view`` does,
and is not seen. Arguments, other tensors in every call, are compared by torch's ``TensorGuards`` (80 ns each). It also
sees dispatch keys that a transform, or a mode that Dynamo does not ignore, turns on in this thread."""


@functools.cache
def reads_tensors() -> bool:
    """Whether the C module reads tensors through the ABI in this process; else ``metadata_check`` compares them, with a
    warning once."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        try:
            _set_up()
            if _reads_right() and _tells_all():
                return True
            reason = "they do not tell every change of a tensor"
        except (OSError, AttributeError, ValueError, TypeError, RuntimeError) as error:
            let_through(error)
            reason = str(error).partition("\n")[0]
    native.forget_abi()
    warnings.warn(
        f"torch {torch.__version__} cannot be read through its C ABI ({reason}): every call compares tensors by "
        "torch's own guards, some 150 ns a tensor instead of 20. The results are the same.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def static_tensors(tensors: Sequence[torch.Tensor], *, asks_gradient: bool) -> Any:
    """A function of the C module that tells whether these tensors have the metadata and the address that they have
    now. Each is a plain strided tensor. ``asks_gradient``: whether a gradient is required of them is part of it."""
    fixed = tuple(tensors)
    return native.StaticTensors(fixed, None if reads_tensors() else metadata_check(fixed), asks_gradient)


def _set_up() -> None:
    libtorch = library("libtorch_cpu")
    functions = [getattr(libtorch, f"aoti_torch_get_{name}") for name in _FUNCTIONS]
    native.use_abi(
        functions=tuple([ctypes.cast(function, ctypes.c_void_p).value for function in functions]),
        impl_at=_place_of_impl(),
        base=torch._C.TensorBase,
        plain=_PLAIN,
        complex_types=tuple([getattr(libtorch, f"aoti_torch_dtype_{name}")() for name in _COMPLEX]),
        real_types=tuple([getattr(libtorch, f"aoti_torch_dtype_{name}")() for name in _REAL]),
    )


def _place_of_impl() -> int:
    """Where a Python tensor keeps the pointer that ``_cdata`` gives; 0 where that is not the same place in all."""
    found = {
        native.find_word(one, one._cdata) for one in (_plain(), _plain(), torch.nn.Parameter(_plain()), _swapped())
    }
    return int(found.pop()) if len(found) == 1 else 0


def _swapped() -> torch.Tensor:
    tensor = _plain()
    _swap(tensor, torch.ones(3, device="cpu"))
    return tensor


def _plain() -> torch.Tensor:
    return torch.zeros(4, 4, device="cpu")


def _frozen() -> torch.Tensor:
    """torch keeps what it made for a gradient that is no longer required."""
    return _plain().requires_grad_().requires_grad_(False)


def _leaf() -> torch.Tensor:
    return _plain().requires_grad_()


def _complex() -> torch.Tensor:
    return torch.zeros(4, 4, dtype=torch.complex64, device="cpu")


def _imaginary() -> torch.Tensor:
    return _complex().imag


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data = value


Change = Callable[[torch.Tensor], object]


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Leaves no note of the interpreter's on the class, which others may compare."""
    noted = "__slotnames__" in torch.Tensor.__dict__
    torch.utils.swap_tensors(one, other)
    if not noted and "__slotnames__" in torch.Tensor.__dict__:
        del torch.Tensor.__slotnames__  # type: ignore[attr-defined]


_CHANGES: tuple[Change, ...] = (
    lambda t: t.t_(),
    lambda t: t.unsqueeze_(0),
    lambda t: t.as_strided_((3, 4), (4, 1)),
    lambda t: t.as_strided_((4, 3), (3, 1), 1),
    lambda t: t.resize_(2, 2),
    lambda t: t.set_(torch.zeros(4, 4, dtype=t.dtype).untyped_storage()),
    lambda t: _set_data(t, torch.zeros(4, 4, dtype=t.dtype)),
    lambda t: _set_data(t, t.detach().t()),
    lambda t: _set_data(t, t.detach().view(torch.int32)),
    lambda t: t.requires_grad_(not t.requires_grad),
    lambda t: _swap(t, torch.zeros(4, 4)),
    lambda t: t.untyped_storage().resize_(1 << 20),
    lambda t: setattr(t, "__class__", torch.nn.Parameter),
)
_CONJUGATIONS: tuple[tuple[Callable[[], torch.Tensor], Change], ...] = (
    (_complex, lambda t: _set_data(t, t.detach().conj())),
    (_imaginary, lambda t: _set_data(t, torch._neg_view(t.detach()))),
)
"""The same address, sizes, strides and dtype, and other values."""
_KEPT: tuple[Change, ...] = (
    lambda t: t.fill_(2.0),
    lambda t: t.view(-1),
    lambda t: t * 2,
    lambda t: t.untyped_storage(),
)


def _shows(tensor: torch.Tensor, change: Change) -> bool | None:
    """The C module sees the change; None where torch does not let the tensor be changed like this."""
    same = native.StaticTensors((tensor,), None)
    if not same():
        return None
    try:
        change(tensor)
    except RuntimeError as error:
        let_through(error)
        return None
    return not same()


def _tells_all() -> bool:
    """Whether each change of a tensor shows, whatever its gradient, and nothing else does."""
    for make in (_plain, _frozen, _leaf):
        if not native.StaticTensors((make(),), None)():
            return False
        if any(_shows(make(), change) is False for change in _CHANGES):
            return False
        if any(_shows(make(), change) for change in _KEPT):
            return False
    with torch.enable_grad():
        in_graph = all(_shows(make(), lambda t: t.mul_(_leaf())) for make in (_plain, _frozen))
    return in_graph and all(_shows(make(), change) for make, change in _CONJUGATIONS)


def _kinds() -> Iterator[torch.Tensor]:
    """Tensors of many kinds."""
    yield from (_plain(), _frozen(), _leaf(), _complex(), _complex().conj(), _imaginary(), _swapped())
    yield _complex().conj().imag
    yield from (torch.zeros(shape, device="cpu") for shape in ((), (0,), (4, 0), (1,) * 7))
    yield _plain()[1:, ::2]
    yield torch.zeros(1, device="cpu").expand(4, 4)
    yield torch.nn.Parameter(_plain(), requires_grad=False)
    with torch.enable_grad():
        yield _leaf() * 2
    with torch.inference_mode():
        yield _plain()
    for dtype in (torch.float64, torch.int32, torch.bool, torch.bfloat16, torch.float16):
        yield _plain().to(dtype)


def _reads_right() -> bool:
    """Whether the C module reads what Python says, of tensors of many kinds."""
    for tensor in _kinds():
        address, sizes, strides, _, requires, lazy = native.tensor_metadata(tensor)
        properties_read = (address, sizes, strides, bool(requires), lazy)
        bits = tensor.is_conj() + 2 * tensor.is_neg()
        if properties_read != (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.requires_grad, bits):
            return False
    return HAS_METADATA_GUARD


@probe
def counts_holders() -> bool:
    """Whether each new holder of a gradient, or of its memory, shows, and each change of it. Else torch is asked in
    Python."""
    if not reads_tensors():
        return False
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        return all(_hold_shows(hold) for hold in _holds())


def _hold_shows(hold: Change) -> bool:
    from capture.torch_private.capabilities import count_holders, raw_use_count

    parameter, memory = _leaf(), torch.zeros(4, 4)
    storage = memory.untyped_storage()
    watch = native.StorageWatch(count_holders, storage, storage._cdata)
    watch.settle()
    parameter.grad = memory.data
    counts = native.gradient_counts(parameter, raw_use_count)
    is_untouched = native.Untouched((parameter,), (watch,), raw_use_count, counts)
    before = is_untouched((parameter,))
    kept = hold(parameter)
    shown = not is_untouched((parameter,))
    del kept
    return bool(before and shown)


def _holds() -> Iterator[Change]:
    """What somebody does to a gradient, given its parameter, to have it or to change it. The results are kept."""
    leaf = _leaf()
    yield lambda p: p.grad
    yield lambda p: p.grad.view(-1)  # type: ignore[union-attr]
    yield lambda p: p.grad.data  # type: ignore[union-attr]
    yield lambda p: p.grad.detach()  # type: ignore[union-attr]
    yield lambda p: p.grad.untyped_storage()  # type: ignore[union-attr]
    yield lambda p: setattr(leaf, "grad", p.grad)
    yield lambda p: _multiplied(leaf, p)
    yield lambda p: p.grad.t_()  # type: ignore[union-attr]
    yield lambda p: p.grad.requires_grad_()  # type: ignore[union-attr]
    yield lambda p: setattr(p.grad, "note", 1)
    yield lambda p: setattr(p, "grad", torch.zeros(4, 4))
    yield lambda p: setattr(p, "grad", None)
    yield lambda p: _set_data(p.grad, torch.zeros(4, 4))  # type: ignore[arg-type]


def _multiplied(other: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Its graph has saved the gradient."""
    with torch.enable_grad():
        return other.clone() * parameter.grad  # type: ignore[operator]
