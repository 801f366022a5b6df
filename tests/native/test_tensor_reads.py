"""What the C module reads of a tensor, through torch's C ABI and without it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture
from capture.native import native
from capture.torch_private import capabilities, tensor_reads
from tests.support.device import DEVICE
from tests.support.fast_paths import fresh as fresh
from tests.support.fast_paths import way as way


def test_tensors_are_read_through_the_abi_whatever_the_heap_holds() -> None:
    assert tensor_reads.reads_tensors(), "only slower without it, but every supported torch has it"
    assert tensor_reads.counts_holders()
    kept = []
    for number in range(50):
        kept += [bytearray(size + number) for size in (40, 88, 184, 200, 400)]
        if number % 3:
            del kept[:: 1 + number % 4]
        assert tensor_reads._place_of_impl() > 0
        assert tensor_reads._reads_right()


def test_each_property_that_is_compared_has_a_price_and_a_reader() -> None:
    for read in tensor_reads.PROPERTIES:
        assert read.read_by
        assert read.nanoseconds >= 0


@pytest.mark.parametrize("broken", ["missing", "wrong", "elsewhere"])
def test_without_the_abi_torch_is_asked_and_it_is_said(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is gone, one that gives something else, a tensor that keeps its pointer elsewhere."""
    if broken == "missing":
        monkeypatch.setattr(tensor_reads, "_FUNCTIONS", (*tensor_reads._FUNCTIONS[:4], "no_such_thing"))
    elif broken == "wrong":
        data_ptr, dim, sizes, strides, *more = tensor_reads._FUNCTIONS  # wrong, and reads no more than there is
        monkeypatch.setattr(tensor_reads, "_FUNCTIONS", (data_ptr, dim, strides, sizes, *more))
    else:
        monkeypatch.setattr(tensor_reads, "_place_of_impl", lambda: 0)
    tensor_reads.reads_tensors.cache_clear()
    try:
        x = torch.ones(3)
        if broken == "elsewhere":  # ``_cdata`` is asked: slower, and as right
            assert tensor_reads.reads_tensors()
            holds = tensor_reads.static_tensors([x], asks_gradient=True)
        else:
            with pytest.warns(RuntimeWarning, match="through its C ABI"):
                assert not tensor_reads.reads_tensors()
            holds = tensor_reads.static_tensors([x], asks_gradient=True)
        assert holds()
        x.unsqueeze_(0)
        assert not holds()
    finally:
        monkeypatch.undo()
        tensor_reads.reads_tensors.cache_clear()
        assert tensor_reads.reads_tensors()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "data", t.data.conj()), lambda t: setattr(t, "data", t.data.clone()),
        lambda t: torch.utils.swap_tensors(t, nn.Parameter(t.detach().clone())),
        lambda t: setattr(t, "data", torch._neg_view(t.data)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["complex", "imaginary"])
def test_other_bits_behind_the_same_metadata_are_seen(change: Callable[[Tensor], Any], form: str) -> None:
    made = torch.randn(4, 4, dtype=torch.complex64, device=DEVICE)
    parameter = nn.Parameter(made if form == "complex" else made.imag)
    holds = tensor_reads.static_tensors([parameter], asks_gradient=True)
    assert holds()
    try:
        change(parameter)
    except RuntimeError:  # a real tensor has no conjugate view of its own
        return
    assert holds() is (form == "imaginary" and not parameter.is_neg() and parameter.data_ptr() == made.data_ptr() + 4)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.filterwarnings("ignore:CG107")  # a conjugate parameter runs eagerly, and says so
def test_parameters_that_are_conjugated_swapped_and_converted_between_calls(way: str) -> None:
    """``.data =``, ``swap_tensors`` and ``.double()`` under the swap flag put another tensor behind the same object."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64, device=DEVICE))

        @override
        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.w.dtype) @ self.w

    plain, mine = Model(), Model()
    mine.load_state_dict(plain.state_dict())
    captured, x = capture(mine), torch.randn(2, 4, dtype=torch.complex64, device=DEVICE)
    replacement = torch.randn(4, 4, dtype=torch.complex64, device=DEVICE)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.no_grad():
            for number in range(16):
                for model in (plain, mine):
                    if number == 4:
                        model.w.data = model.w.data.conj()
                    if number == 8:
                        torch.utils.swap_tensors(model.w, nn.Parameter(replacement.clone()))
                    if number == 12:
                        model.to(torch.complex128)
                assert torch.equal(captured(x), plain(x)), number
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def some_tensor(choose: random.Random) -> Tensor:
    """Few shapes, so that many are alike; views, numbers of dimensions beyond those torch keeps in the object."""
    shape = choose.choice([(), (0,), (3,), (2, 3), (3, 2), (2, 0), (1, 2, 3), (1,) * 5, (1,) * 6, (1, 1, 1, 1, 1, 2)])
    dtype = choose.choice([torch.float32, torch.float32, torch.float64, torch.int32, torch.complex64, torch.bfloat16])
    with torch.inference_mode(choose.random() < 0.1):
        made = torch.zeros([size + choose.choice([0, 0, 1]) for size in shape], dtype=dtype, device=DEVICE)
        if made.dim() and choose.random() < 0.5:
            made = made.as_strided(shape, made.stride())
        if choose.random() < 0.3:
            made = made.mT if made.dim() > 1 else made.conj()
        if choose.random() < 0.2:
            made = torch._neg_view(made)
        if choose.random() < 0.2:
            made = made.detach()
    if made.dtype.is_floating_point and not made.is_inference() and choose.random() < 0.5:
        made = made.detach().requires_grad_()
        made = made if choose.random() < 0.5 else made.view_as(made)
    return nn.Parameter(made) if made.is_leaf and made.requires_grad and choose.random() < 0.3 else made


@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_of_a_tensor_is_what_torch_says(seed: int) -> None:
    assert tensor_reads.reads_tensors()
    choose, read = random.Random(seed), 0
    for tensor in (some_tensor(choose) for _ in range(150)):
        address, sizes, strides, _, requires, lazy = native.tensor_metadata(tensor)
        assert (address, sizes, strides) == (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        assert bool(requires) is tensor.requires_grad
        if tensor.is_complex():  # no public operator makes a negative view of other tensors
            assert lazy == tensor.is_conj() + 2 * tensor.is_neg()
        holds, metadata = native.StaticTensors((tensor,), None), capabilities.metadata_check([tensor])
        assert holds()
        assert metadata()
        read += 1
    assert read == 150
    assert native.tensor_metadata(1) is None
    with pytest.raises(TypeError):
        native.StaticTensors((1,), None)
