"""The part of ``_torch_private`` that finds out where torch keeps what it knows of a tensor.

The C module compares a tensor's metadata as bytes, 200 tensors in 2 us, where torch's own comparisons take 20. Offsets
are found in this process, in tensors made for it: the first place that differs, as what lies behind them is anybody's.
Then every change of metadata is tried, and has to show. Where one does not, the stated fallback is used: torch's
comparisons.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator

import torch

from capture._fast import native
from capture._torch_private import HAS_METADATA_GUARD, metadata_guard

Layout = tuple[int, int, int, int, int, tuple[int, ...], int, int, int]
"""Offsets, as ``native/tensors.c`` names them."""
_WORD = 8
_OBJECT, _IMPL, _STORAGE, _META = 64, 192, 64, 96  # bytes that are looked at
MOST_DIMS = 5
"""Of a tensor whose sizes lie in the object itself."""
_BEGIN = 16  # after the table of virtual functions and the reference counts


def _words(address: int, nbytes: int) -> list[int]:
    return list((ctypes.c_uint64 * (nbytes // _WORD)).from_buffer_copy(ctypes.string_at(address, nbytes)))


def _offset_of(value: int, address: int, nbytes: int) -> int:
    return _WORD * _words(address, nbytes).index(value)


def _impl(tensor: torch.Tensor) -> int:
    return int(tensor._cdata)


def _find() -> Layout:
    """Raises ``ValueError``, ``StopIteration`` or ``AttributeError`` where something is not found."""
    plain, leaf = torch.zeros(3, 5, device="cpu"), torch.zeros(3, 5, device="cpu")
    to_impl = _offset_of(_impl(plain), id(plain), _OBJECT)
    storage = int(plain.untyped_storage()._cdata)
    to_storage = _offset_of(storage, _impl(plain), _IMPL)
    to_data = _offset_of(plain.data_ptr(), storage, _STORAGE)
    before = _words(_impl(leaf), _IMPL)
    leaf.requires_grad_()
    after = _words(_impl(leaf), _IMPL)
    to_meta = next(_WORD * at for at, (old, new) in enumerate(zip(before, after, strict=True)) if not old and new)
    meta = after[to_meta // _WORD]
    with_gradient = ctypes.string_at(meta, 2 * _META)
    leaf.requires_grad_(False)
    without = ctypes.string_at(meta, 2 * _META)
    to_requires = next(at for at, (old, new) in enumerate(zip(with_gradient, without, strict=True)) if old != new)
    with torch.enable_grad():
        made = leaf.requires_grad_() * 2
    meta = _words(_impl(made), _IMPL)[to_meta // _WORD]
    with_function = _words(meta, _META)
    made.detach_()  # one object before and after, as torch leaves parts of a new one as the heap had them
    both = enumerate(zip(with_function, _words(meta, _META), strict=True))
    functions = [_WORD * at for at, (old, new) in both if old and not new]
    end = _dispatch_keys() + _WORD
    sizes = _sizes(plain, end)
    return to_impl, to_storage, to_data, to_meta, to_requires, tuple(functions[:2]), _BEGIN, end, sizes


def _sizes(tensor: torch.Tensor, end: int) -> int:
    """Offset of the sizes, up to five of which torch keeps in the object itself, and the strides behind them; ``end``
    where they are not found."""
    words, dims = _words(_impl(tensor), _IMPL), tensor.dim()

    def begin_at(at: int) -> bool:
        strides = at + MOST_DIMS
        same = words[at : at + dims] == list(tensor.shape)
        return same and words[strides : strides + dims] == list(tensor.stride())

    return next((_WORD * at for at in range(end // _WORD) if begin_at(at)), end)


def _dispatch_keys() -> int:
    """Offset of the dispatch keys, which come last: a conjugate differs by one bit in them, always the same.

    All are alive at once and conjugated in the other order, so that the distance of two objects is not the same.
    """
    numbers = [torch.zeros(size, dtype=torch.complex64, device="cpu") for size in range(2, 7)]
    conjugates = [number.conj() for number in reversed(numbers)]
    bits: list[list[int]] = []
    for number, conjugate in zip(numbers, reversed(conjugates), strict=True):
        both = zip(_words(_impl(number), _IMPL), _words(_impl(conjugate), _IMPL), strict=True)
        bits.append([old ^ new for old, new in both])
    same = [set(one) for one in zip(*bits, strict=True)]
    return next(
        _WORD * at
        for at, one in enumerate(same)
        if at >= _BEGIN // _WORD and len(one) == 1 and next(iter(one)).bit_count() == 1
    )


def _changed(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data = value


_CHANGES: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda t: t.t_(),
    lambda t: t.unsqueeze_(0),
    lambda t: t.as_strided_((3, 4), (4, 1)),
    lambda t: t.as_strided_((4, 3), (3, 1), 1),
    lambda t: t.resize_(2, 2),
    lambda t: t.set_(torch.zeros(4, 4).untyped_storage()),
    lambda t: _changed(t, torch.zeros(4, 4)),
    lambda t: _changed(t, t.detach().t()),
    lambda t: _changed(t, t.detach().view(torch.int32)),
    lambda t: _changed(t, t.detach().view(torch.complex64)),
    lambda t: _changed(t, torch._neg_view(t.detach())),
    lambda t: t.requires_grad_(not t.requires_grad),
    lambda t: t.untyped_storage().resize_(1 << 20),
    lambda t: setattr(t, "__class__", torch.nn.Parameter),
)
_KEPT: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda t: t.fill_(2.0),
    lambda t: t.view(-1),
    lambda t: t * 2,
    lambda t: t.untyped_storage(),
)


def _plain() -> torch.Tensor:
    return torch.zeros(4, 4, device="cpu")


def _frozen() -> torch.Tensor:
    """torch keeps what it made for a gradient that is no longer required."""
    return _plain().requires_grad_().requires_grad_(False)


def _leaf() -> torch.Tensor:
    return _plain().requires_grad_()


def _tells_all(layout: Layout) -> bool:
    """Each change of a tensor shows, whatever its gradient, and nothing else does."""
    for make in (_plain, _frozen, _leaf):
        for number, change in enumerate((*_CHANGES, *_KEPT)):
            tensor = make()
            same = native.Tensors((tensor,), layout)
            if not same():
                return False
            try:
                change(tensor)
            except RuntimeError:
                continue  # torch does not let a leaf be changed like this
            if same() == (number < len(_CHANGES)):
                return False
    return all(_tells_operators(make(), layout) for make in (_plain, _frozen))


def _tells_operators(tensor: torch.Tensor, layout: Layout) -> bool:
    """That an operator gives a tensor a gradient function shows."""
    same = native.Tensors((tensor,), layout)
    with torch.enable_grad():
        tensor.mul_(_leaf())
    return not same()


def _holders() -> Iterator[Callable[[torch.Tensor], object]]:
    """What somebody does to a gradient, given its parameter, to have it or to change it. The results are kept."""
    other = _leaf()
    yield lambda p: p.grad
    yield lambda p: p.grad.view(-1)  # type: ignore[union-attr]
    yield lambda p: p.grad.data  # type: ignore[union-attr]
    yield lambda p: p.grad.detach()  # type: ignore[union-attr]
    yield lambda p: p.grad.untyped_storage()  # type: ignore[union-attr]
    yield lambda p: setattr(other, "grad", p.grad)
    yield lambda p: _multiplied(other, p)
    yield lambda p: p.grad.t_()  # type: ignore[union-attr]
    yield lambda p: p.grad.requires_grad_()  # type: ignore[union-attr]
    yield lambda p: setattr(p.grad, "note", 1)
    yield lambda p: setattr(p, "grad", torch.zeros(4, 4))
    yield lambda p: setattr(p, "grad", None)
    yield lambda p: _changed(p.grad, torch.zeros(4, 4))  # type: ignore[arg-type]


def _multiplied(other: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Its graph has saved the gradient."""
    with torch.enable_grad():
        return other.clone() * parameter.grad  # type: ignore[operator]


@functools.cache
def counts_layout() -> Layout | None:
    """The same where torch's counts of holders are found as well: each new one of a tensor, or of its memory, shows.
    None where one does not: then torch is asked for each."""
    found = layout()
    if found is None:
        return None
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        for hold in _holders():
            parameter = _leaf()
            parameter.grad = torch.zeros(4, 4).data
            known = native.Untouched((parameter,), found)
            if not known((parameter,)):
                return None
            kept = hold(parameter)
            if known((parameter,)):
                return None
            del kept
    return found


@functools.cache
def layout() -> Layout | None:
    """Where things are; None where that is not known for sure."""
    if native is None:
        return None
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        try:
            found = _find()
            return found if _tells_all(found) else None
        except (ValueError, AttributeError, TypeError, RuntimeError, StopIteration):
            return None


def _kinds() -> Iterator[torch.Tensor]:
    """Tensors of many kinds, some alike."""
    for make in (_plain, _leaf):
        for change in (*_CHANGES, _KEPT[0]):
            tensor = make()
            try:
                change(tensor)
            except RuntimeError:
                continue  # torch does not let a leaf be changed like this
            yield tensor
    yield _frozen()
    yield from (torch.zeros(shape, device="cpu") for shape in ((), (0,), (4, 0), (1,) * MOST_DIMS))
    with torch.enable_grad():
        yield _leaf() * 2
        yield (_leaf() * 2).detach()
        yield _leaf()[1:]
    with torch.inference_mode():
        yield _plain()
    for dtype in (torch.float64, torch.int32, torch.bool, torch.bfloat16, torch.complex64):
        yield _plain().to(dtype)
    yield _plain().to(torch.complex64).conj()
    yield torch.zeros(1, device="cpu").expand(4, 4)
    yield torch.nn.Parameter(_plain())
    yield torch.nn.Parameter(_plain(), requires_grad=False)


@functools.cache
def alike_layout() -> Layout | None:
    """The same where bytes tell no less of other tensors than torch's own comparison does."""
    found = layout()
    if found is None or found[-1] == found[-2] or not HAS_METADATA_GUARD:
        return None
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        kinds = list(_kinds())
        for tensor in kinds:
            known, guard = native.Alike((tensor,), found), metadata_guard((tensor,))
            if known((tensor,)) != (tensor.data_ptr(),):
                return None
            for other in kinds:
                addresses = known((other,))
                if addresses is not None and (not guard(other) or addresses != (other.data_ptr(),)):
                    return None
        plain = native.Alike((_plain(),), found)
        return found if plain((_plain(),)) is not None else None  # else it is of no use
