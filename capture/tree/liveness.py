"""Whether anybody still uses the memory of an output.

Only the storage's own life counts: a tensor, any view of it, or a tensor saved for backward keeps it alive.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from typing_extensions import override

from capture.core.errors import BorrowedOutputError
from capture.core.facts import BorrowedUse, Facts
from capture.core.options import Annotation
from capture.key import pytree
from capture.native import native, seen
from capture.rules.compile_plan import compile_plan
from capture.torch_private import capabilities
from capture.torch_private.capabilities import storage_use_count, use_count
from capture.torch_private.subclasses import is_wrapper
from capture.torch_private.tensor_reads import counts_holders

StorageWatch = Callable[[], torch.UntypedStorage | None]
"""Returns the storage while somebody uses it, else None."""


hold: Callable[[torch.UntypedStorage], StorageWatch] = (
    weakref.ref if capabilities.CAPABILITIES.storage_weakref else capabilities.CountedStorage
)
"""Watch a storage without keeping it alive."""


Again = Literal["no", "inner", "apart", "shown"]
"""Whether a tensor may be handed out again. An ``inner`` one never reaches a user; a ``shown`` one does. Who gets one
``apart`` keeps it alone: its Python references tell whether it is used, 0.02 us where torch's counts take 0.5. Whoever
leaves it to others than a replay says so before (``native.tell_uses``), and then the counts are asked once more."""


@seen
class SharedStorage:
    """Hands out tensors over one piece of memory: aliases of a first one, made once, which cost 0.5 us instead of 3.

    They share its storage, whose use counts tell whether any of them, a view, or somebody in C++ is alive. Neither
    versions nor gradients are shared. ``again``: one alias is handed out again and again while nobody has it (0.05 us);
    of what users get, if they left nothing on it.
    """

    __slots__ = ("_again", "_make", "address", "alone", "first", "held", "storage")

    def __init__(self, make: Callable[[], torch.Tensor], *, again: Again) -> None:
        self._make, self._again, self.address = make, again, 0
        self.first: torch.Tensor | None = None
        """The tensor of which the others are aliases. Nobody else has it."""
        self.held: StorageWatch | None = None
        """Tells whether a tensor that was handed out since the last renewal is used."""
        self.alone = 0
        """Number of C++ holders of the storage while no user has it, without the alias that is handed out again."""
        self.storage: torch.UntypedStorage | None = None
        """The storage of ``first``, which all aliases share."""

    def forget(self) -> None:
        """Start anew with the next tensor: the memory has other users from now on, or none."""
        self.first = self.held = self.storage = None

    def part(self) -> None:
        """Leave what was handed out to its holders."""
        if self.first is not None and self._again != "no":
            self.held.part()  # type: ignore[union-attr] # it is the C module's

    def keep_apart(self) -> None:
        """What is handed out is kept apart from now on, if it is an inner tensor."""
        if self._again == "inner":
            self._again = "apart"
            if isinstance(self.held, native.StorageWatch):
                self.held.keep_apart()

    def renewed(self) -> torch.Tensor:
        """A new tensor over a first one that is made anew, watched by ``held``. Called where C could not hand out an
        alias of the last first one: there is none, or others watch its memory, or that was swapped."""
        made = self._make()
        if not capabilities.CAPABILITIES.storage_counts:
            self.held = hold(made.untyped_storage())
            return made
        again = self._again if counts_holders() else "no"
        watch = self._settle(made, again, _lowest_counts(self._make, made, again))
        if again == "apart":
            watch.keep_apart()
        alias: torch.Tensor | None = watch.again() if again != "no" else None
        return made.data if alias is None else alias  # another thread has it, which lists all objects

    def _settle(self, made: torch.Tensor, again: Again, lowest: list[int]) -> Any:
        """Make this the first tensor, which nobody else has. Gives what watches its storage."""
        self.first, self.address, self.storage = made, made.data_ptr(), made.untyped_storage()
        watch = self.held = _watch(self.storage, made, again)
        self.alone = watch.settle(lowest)
        return watch


_LOWEST: dict[tuple[str, bool, bool, bool], list[int]] = {}
"""The lowest counts of holders while nobody uses a storage, by device type, whether an alias of it is handed out again,
whether its tensor is a view (a conjugated one is), and inference mode."""

_COUNTED = 4  # tensors of a kind, before it is used first


def _lowest_counts(make: Callable[[], torch.Tensor], made: torch.Tensor, again: Again) -> list[int]:
    """For ``native.StorageWatch.settle``. A thread that lists all objects may have what is counted just then; so the
    first of a kind are several, made one after another."""
    kind = made.device.type, again != "no", made._is_view(), made.is_inference()
    lowest = _LOWEST.get(kind)
    if lowest is None:
        lowest = [sys.maxsize] * 4
        for _ in range(_COUNTED):
            SharedStorage(make, again=again)._settle(make(), again, lowest)
        _LOWEST[kind] = lowest
    return lowest


def _watch(storage: torch.UntypedStorage, first: torch.Tensor, again: Again) -> Any:
    """Tells whether anybody came to use a storage since its ``settle``, which gives the holders.
    ``first``: the tensor whose alias is handed out ``again``."""
    only = None if again == "no" else first
    count, uses = capabilities.count_holders, capabilities.raw_use_count
    return native.StorageWatch(count, storage, storage._cdata, only, uses, again == "shown")


def is_sole_holder(tensor: torch.Tensor, others: int = 1) -> bool:
    """Whether no other tensor, view or saved activation uses the tensor or its memory. ``others``: number of known
    holders of the storage, its Python object among them."""
    return storage_use_count(tensor.untyped_storage()) <= others + 1 and use_count(tensor) <= 1


def _holders(parameter: torch.Tensor) -> tuple[int, int]:
    gradient = parameter.grad
    assert gradient is not None
    return use_count(gradient), sys.getrefcount(gradient)


def _with_lone_gradient() -> torch.Tensor:
    with torch.inference_mode(False):
        parameter = torch.zeros(1, requires_grad=True, device="cpu")
        parameter.grad = torch.zeros(1, device="cpu").data
    return parameter


_ALONE = _holders(_with_lone_gradient())


class _Holding:
    """Holds a tensor as a wrapper subclass holds its inner tensors; for a probe."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(1, device="cpu")


def _members(holder: Any, gradient: torch.Tensor | None) -> list[tuple[torch.Tensor, int]] | None:
    """Tensors that a gradient holds, or what ``holder`` does, with references to them; None if those hold others."""
    members = [(holder.tensor, 0)] if gradient is None else [(one, 0) for _, one in pytree.children(gradient)]
    members = [(one, sys.getrefcount(one)) for one, _ in members if isinstance(one, torch.Tensor)]
    return members if all(type(one) in pytree.TENSOR_TYPES for one, _ in members) else None


def _probe_members() -> int:
    found = _members(_Holding(), None)
    assert found is not None
    return found[0][1]


def _probe_shared() -> int:
    kept = torch.zeros(1, device="cpu")
    return _ALONE[1] - sys.getrefcount(kept)


_MEMBER, _SHARED = _probe_members(), _probe_shared()
"""Number of references to a tensor that only another tensor holds, and how many more there are if C++ holds it, too."""


def _is_lone_member(member: tuple[torch.Tensor, int]) -> bool:
    """Whether nobody else holds this tensor, as far as reference counts tell. Views of it count as holders in C++."""
    tensor, references = member
    return references <= _MEMBER + (_SHARED if use_count(tensor) > 1 else 0)


def only_gradients(
    parameters: Sequence[torch.Tensor], storage: torch.UntypedStorage, others: int
) -> list[torch.Tensor] | None:
    """The plain tensors on the storage where gradients of these parameters, or what those gradients are made of, use it
    and nobody else does. ``others``: as above."""
    held: list[tuple[torch.Tensor, int]] = []
    for parameter in parameters:
        if parameter.grad is None:
            return None
        number, references = _holders(parameter)
        gradient = parameter.grad
        if references != _ALONE[1]:
            return None
        if is_wrapper(type(gradient)):
            members = _members(None, gradient)
            if number != _ALONE[0] or members is None or not all(map(_is_lone_member, members)):
                return None
            held += [(tensor, use_count(tensor) - 1) for tensor, _ in members if tensor.untyped_storage() is storage]
        elif gradient.untyped_storage() is storage:
            held.append((gradient, number - _ALONE[0]))
    views = Counter(id(tensor._base) for tensor, _ in held)  # views of each other, or of one that nobody else has
    mine = {id(tensor) for tensor, _ in held}
    bases = {id(base): base for tensor, _ in held if (base := tensor._base) is not None and id(base) not in mine}
    held += [(base, use_count(base) - 1) for base in bases.values()]
    base = None
    alone = len(mine) >= len(parameters) and all(more <= views[id(tensor)] for tensor, more in held)
    if not alone or storage_use_count(storage) > others + len(held) or max(_references(bases), default=0) > _BASE:
        return None
    return [tensor for tensor, _ in held if id(tensor) in mine]


def _references(bases: dict[int, Any]) -> list[int]:
    return [sys.getrefcount(base) for base in bases.values()]


def _probe_base() -> int:
    view = torch.zeros(2, device="cpu")[:1]
    found = [(view._base, 0)]
    return _references({id(base): base for base, _ in found})[0]


_BASE = _probe_base()


LONE_GRADIENT = native.gradient_counts(_with_lone_gradient(), capabilities.raw_use_count)
"""Counts of the holders of a gradient, by torch and by C code, where nobody but its parameter has it."""


def are_untouched_gradients(
    parameters: Sequence[torch.Tensor | None], shared_storages: Sequence[SharedStorage], fresh: Callable[..., bool]
) -> bool:
    """Whether what each source handed out last is the gradient of its parameter, nobody else uses it, and but for its
    values it is as it was made, which ``fresh`` compares."""
    counters = capabilities.count_holders, capabilities.raw_use_count
    untouched: bool = native.are_untouched(tuple(parameters), tuple(shared_storages), *counters, fresh, LONE_GRADIENT)
    return untouched


class StaleTensor(torch.Tensor):
    """What a borrowed output becomes at the end of its step: every use raises."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in (*args, *(kwargs or {}).values()):
            for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
                if isinstance(tensor, StaleTensor):
                    raise BorrowedOutputError(_stale_text(tensor.__dict__.get("_capture_annotation")))
        raise BorrowedOutputError(_stale_text(None))


def _stale_text(annotation: Annotation | None) -> str:
    annotation = annotation or Annotation(function="a captured function")
    use = BorrowedUse(function=annotation.function, where=annotation.defined_at)
    plan = compile_plan(annotation, Facts(function=annotation.function, borrowed_use=use))
    return "\n".join(finding.message(function=annotation.function) for finding in plan.findings[:1])


def make_stale(tensor: torch.Tensor, annotation: Annotation) -> None:
    """Turn a borrowed output that is still held into one that raises, naming the function that made it."""
    tensor._capture_annotation = annotation  # type: ignore[attr-defined]
    tensor.__class__ = StaleTensor
