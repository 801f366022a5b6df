"""What a tensor tells Python that is not part of a call's key, such as its offset in its storage.

No operator shows these reads, and nothing checks the answers in the next call. As in ``host_reads``, methods of torch's
classes are wrapped while a body is watched, in the watching thread only.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from capture.core.data import frozen
from capture.torch_private.getters import PROPERTIES_OF_TENSORS
from capture.torch_private.monkeypatch import Listening, Replaced, is_asked_by_users, made_once

Holder = torch.Tensor | torch.UntypedStorage
COUNTING = ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "set_")
"""Functions that count from where a storage begins if they are given a number. torch's own code, which works one out
of where the tensor is now, calls the operators."""
_METHODS = ("storage_offset", "storage", "is_shared", "is_pinned", "_is_view")
_KEYED = frozenset({
    "shape", "dtype", "layout", "device", "ndim", "nbytes", "itemsize", "requires_grad", "name", "volatile",
    "_has_symbolic_sizes_strides", "_python_dispatch",
    "is_cuda", "is_mtia", "is_cpu", "is_xla", "is_xpu", "is_ipu", "is_sparse", "is_sparse_csr", "is_mkldnn", "is_mps",
    "is_maia", "is_vulkan", "is_quantized", "is_meta", "is_nested",
})  # fmt: skip
"""Properties whose answers follow from the key."""
_NOTED_ELSEWHERE = frozenset(
    {"T", "H", "mT", "mH", "real", "imag", "data", "grad", "_grad", "grad_fn", "_grad_fn", "_cdata"}
)
"""Those that give tensors, gradients, nodes and addresses."""
_PROPERTIES = tuple(
    name for name in PROPERTIES_OF_TENSORS if name not in _KEYED | _NOTED_ELSEWHERE
)  # fmt: skip
"""All others, such as what a tensor has in its graph, its hooks, how often it was written. torch may add some."""
_OF_GRAPHS = frozenset({
    "is_leaf", "retains_grad", "output_nr", "_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype",
})  # fmt: skip
"""One answer for all tensors that need no gradients."""
_OF_STORAGES = ("nbytes", "size", "__len__", "is_shared", "is_pinned")


@frozen(eq=False)
class _Reads:
    note_read: Callable[[str, Holder], None]
    note_form: Callable[[], None]
    theirs: Mapping[int, torch.Tensor]


_listening = Listening()


@contextmanager
def unkeyed_reads(
    note_read: Callable[[str, Holder], None], note_form: Callable[[], None],
    arguments: Iterable[tuple[str, Any]], theirs: Mapping[int, torch.Tensor],
) -> Iterator[None]:  # fmt: skip
    """Call ``note_read(name, holder)`` where code in this thread asks a tensor or a storage for one of these, and
    ``note_form()`` where it asks for strides.

    ``arguments``: the leaves that the body got. Of what the caller's code put on them the key has the names alone.
    ``theirs``: see `stand_ins`; they answer.
    """
    tensor, storage = torch.Tensor, torch.UntypedStorage
    tensors = _methods(tensor, _METHODS) | _properties(tensor, _PROPERTIES) | _forms(tensor, ("stride",))
    tensors |= _counts(tensor, _there(tensor)) | _stood(tensor, ("is_inference",))
    functions = _counts(torch, _there(torch)) | _stood(torch, ("is_inference",))
    given = {id(leaf): leaf for _, leaf in arguments if isinstance(leaf, torch.Tensor)}
    named = {number: leaf for number, leaf in given.items() if leaf.__dict__}
    if named:
        tensors["__getattribute__"] = _attributes(named, _asked)
    stand_ins = Replaced((tensor, tensors), (storage, _methods(storage, _OF_STORAGES)), (torch, functions))
    with _listening.by(_Reads(note_read, note_form, theirs)), stand_ins:
        yield


@functools.cache
def _there(holder: Any) -> tuple[str, ...]:
    """The functions that count, of those that are there."""
    return tuple([name for name in COUNTING if hasattr(holder, name)])


def _asked(name: str, holder: Any) -> Any:
    if threading.get_ident() != _listening.thread or not is_asked_by_users():
        return holder
    if name in _OF_GRAPHS and not holder.requires_grad:
        return holder  # as the key says
    to: _Reads = _listening.to
    to.note_read(name, holder)
    return to.theirs.get(id(holder), holder)


def _asked_for_strides(_: str, holder: Any) -> Any:
    if threading.get_ident() == _listening.thread and is_asked_by_users():
        _listening.to.note_form()
    return holder


def _stood_for(_: str, holder: Any) -> Any:
    """As the key says; what stands in for an argument is no inference tensor, as it is written."""
    return _listening.to.theirs.get(id(holder), holder) if threading.get_ident() == _listening.thread else holder


def _method(asked: Callable[[str, Any], Any], name: str, original: Any) -> Any:
    def ask(holder: Any, *args: Any, **kwargs: Any) -> Any:
        return original(asked(name, holder), *args, **kwargs)

    return ask


def _property(name: str, original: Any) -> Any:
    def ask(holder: Any) -> Any:
        return original.__get__(_asked(name, holder))

    return property(ask, getattr(original, "__set__", None), getattr(original, "__delete__", None))


def _counting(name: str, original: Any) -> Any:
    """Of these only the place counts. A storage as a whole counts as a place, too."""

    def look(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "set_" and (
            len(args) + len(kwargs) > 1 or any(isinstance(value, torch.UntypedStorage) for value in args)
        ):
            _asked(name, args[0] if args else kwargs["source"])
        elif name != "set_" and (kwargs.get("storage_offset") is not None or _numbers_in(args) > 2):
            _asked(name, tensor)
        return original(tensor, *args, **kwargs)

    return look


def _numbers_in(args: tuple[Any, ...]) -> int:
    """How many of size, stride and offset are given."""
    return sum(value is not None and not isinstance(value, torch.Tensor) for value in args)


_methods, _forms, _stood = [
    made_once(functools.partial(_method, asked)) for asked in (_asked, _asked_for_strides, _stood_for)
]
_properties, _counts = made_once(_property), made_once(_counting)


def _attributes(named: Mapping[int, torch.Tensor], asked: Callable[[str, Any], Any]) -> Any:
    """Reads of what the caller's code has put on these tensors."""
    original = torch.Tensor.__getattribute__

    def ask(tensor: Any, name: str) -> Any:
        if id(tensor) in named and (name == "__dict__" or name in original(tensor, "__dict__")):
            asked(name, tensor)
        return original(tensor, name)

    return ask


def stand_ins(given: Iterable[tuple[str, Any]], theirs: Iterable[tuple[str, Any]]) -> dict[int, torch.Tensor]:
    """The caller's tensors, by ``id`` of what the body got instead, which has the attributes that were put on them."""
    originals = {}
    for (_, leaf), (_, original) in zip(given, theirs, strict=True):
        if leaf is not original and isinstance(original, torch.Tensor):
            originals[id(leaf)] = original
            leaf.__dict__.update(original.__dict__)
    return originals
