"""The forms that tensors of a run had before it: their memory, sizes and strides. ``tensor.data =`` gives a tensor
another one, and no operator tells of it: afterwards the forms are compared, and an undone run puts them back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from capture.core.data import frozen
from capture.state.snapshot import Snapshot
from capture.torch_private.subclasses import unseen


@frozen(eq=False)
class Form:
    """A tensor, and what was behind it."""

    tensor: torch.Tensor
    path: str
    name: str
    storage: torch.UntypedStorage
    """Kept alive, so that another storage is another object."""
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    lazily: torch.Tensor | None
    """An alias of one that is lazily conjugated or negated."""

    def lies_elsewhere(self) -> bool:
        """Whether the tensor is on other memory now."""
        return self.tensor.layout is not torch.strided or self.tensor.untyped_storage() is not self.storage

    def is_another(self) -> bool:
        """Whether it lies elsewhere, or has another form there."""
        now = self.tensor
        return (
            now.layout is not torch.strided
            or now.untyped_storage() is not self.storage
            or (self.dtype, self.offset, self.shape, self.stride)
            != (now.dtype, int(now.storage_offset()), now.shape, now.stride())
            or (now.is_conj() or now.is_neg()) != (self.lazily is not None)
        )

    def put_back(self) -> None:
        """Give the tensor what was behind it. Its node in autograd stays, with the hooks that somebody keeps on it."""
        if self.tensor.is_inference():  # ``data`` would make it a tensor of the other kind
            with torch.inference_mode():
                self.tensor.set_(self.storage, self.offset, self.shape, self.stride)
            return
        with torch.inference_mode(False), torch.no_grad():
            data = torch.empty(0, dtype=self.dtype, device=self.storage.device)  # whatever the default device is
            data.set_(self.storage, self.offset, self.shape, self.stride)
            self.tensor.data = data if self.lazily is None else self.lazily


@unseen
def forms_of(before: Snapshot, arguments: Iterable[tuple[str, Any]]) -> list[Form]:
    """Those of all tensors that the run can reach."""
    reached = [(one.path, str(one.name), tensor) for owners in before.tensors.values() for one, tensor in owners]
    reached += [(path, path, leaf) for path, leaf in arguments if issubclass(type(leaf), torch.Tensor)]
    found: dict[int, Form] = {}
    for path, name, tensor in reached:
        if id(tensor) not in found and tensor.layout is torch.strided and not tensor.is_nested:
            found[id(tensor)] = Form(
                tensor=tensor, path=path, name=name, storage=tensor.untyped_storage(), dtype=tensor.dtype,
                offset=int(tensor.storage_offset()), shape=tensor.shape, stride=tensor.stride(),
                lazily=tensor.detach() if tensor.is_conj() or tensor.is_neg() else None,
            )  # fmt: skip
    return [*found.values()]
