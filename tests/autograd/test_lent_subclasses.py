"""Parameters of tensor subclasses that hold other tensors are lent like plain ones (see ``test_leaf_swap``), and the
path of one that cannot be lent is named."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typing_extensions import override

from capture import capture, recordings
from capture.autograd import saved_graph
from capture.autograd.leaf_swap import lent
from capture.autograd.saved_graph import SavedGraph
from capture.engines.cuda.copy_in import DeviceCopy
from capture.observe.dispatch_mode import ObserveMode
from capture.runtime.training_region import Region
from capture.torch_private.capabilities import unseen
from tests.autograd.test_leaf_swap import node_of, on_a_device
from tests.key.test_subclasses import mesh as mesh
from tests.support.device import DEVICE, without_default_device
from tests.support.regions import Block, bits, captured_twins, inputs
from tests.support.regions import fresh as fresh


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 6)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.tanh(self.a(x)))
        return y


def split(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    return parallelize_module(Layer().to(DEVICE), mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})


def whole(tensor: Any) -> Any:
    return None if tensor is None else bits(tensor.full_tensor())


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[SavedGraph]:
    """The backward programs of all regions recorded in the test, which treat the CPU as a device with streams."""
    on_a_device(monkeypatch)
    settled, settle = list[SavedGraph](), Region.settle

    def noted(region: Region, node: Any, program: SavedGraph) -> None:
        settled.append(program)
        settle(region, node, program)

    monkeypatch.setattr(Region, "settle", noted)
    return settled


def test_graphs_end_at_nodes_of_the_runs_own(mesh: DeviceMesh, programs: list[SavedGraph]) -> None:
    """Recorded graphs end at the exchanged tensors' nodes, although an earlier loss keeps the parameters' own."""
    mine, theirs = split(mesh), split(mesh)
    kept = [model(inputs(99)).sum() for model in (mine, theirs)]
    nodes = [node_of(parameter) for parameter in mine.parameters()]
    capture(mine)
    for number in range(8):
        values = []
        for model in (mine, theirs):
            model.zero_grad()
            y = model(inputs(number))
            y.square().mean().backward()
            values.append([bits(y), *[whole(p.grad) for p in model.parameters()]])
        assert values[0] == values[1], number
    assert recordings(mine).replays >= 6, recordings(mine)
    assert programs
    for program in programs:
        assert program.foreign == ()
        assert {*map(id, program.parameters)} == {*map(id, mine.parameters())}
        assert not {id(edge.node) for edge in program.inputs} & set(map(id, nodes))
    for loss in kept:
        loss.backward()
    assert [whole(p.grad) for p in mine.parameters()] == [whole(p.grad) for p in theirs.parameters()]


def test_recordings_keep_no_memory_of_theirs(mesh: DeviceMesh, programs: list[SavedGraph]) -> None:
    mine = split(mesh)
    capture(mine)
    for number in range(5):
        mine(inputs(number)).sum().backward()
    local = mine.a.weight._local_tensor
    storage = weakref.ref(local.untyped_storage())
    local.data = local.data.clone()
    for number in range(3):
        mine(inputs(number)).sum().backward()
    gc.collect()
    assert programs
    assert storage() is None


def test_lent_ones_are_themselves_again(mesh: DeviceMesh) -> None:
    weight: Any = nn.Parameter(distribute_tensor(torch.ones(4, 4, device=DEVICE), mesh, [Replicate()]))
    graph, version = (weight * 2).sum(), weight._version
    node, local = node_of(weight), weight._local_tensor
    with contextlib.suppress(KeyError), lent([weight]) as lent_tensors:
        assert node_of(weight) is not node
        assert [tensor for _, tensor in lent_tensors.values()] == [weight]
        (weight * 3).sum().backward()
        with torch.no_grad():
            weight.add_(1)
        raise KeyError
    assert node_of(weight) is node
    assert weight._local_tensor is local
    assert weight._version == version + 1
    assert whole(weight.grad) == bits(torch.full((4, 4), 3.0))
    assert whole(weight) == bits(torch.full((4, 4), 2.0))
    squares = (weight * weight).sum()
    with torch.no_grad(), lent([weight]):
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    del graph


def test_what_could_not_be_lent_is_named(programs: list[SavedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter to which C++ has a weak reference stays; the error of a failed backward capture names its path."""
    mine, _ = captured_twins(Block)
    weak = torch._C._WeakTensorRef(mine.m[0].a.weight)  # type: ignore[attr-defined]
    for number in range(5):
        mine.m[0](inputs(number)).sum().backward()
    assert not weak.expired()
    told = "self.a.weight, to which C++ code has a weak reference"
    assert {end for program in programs for end in program.foreign_ends} == {told}
    program = next(candidate for candidate in programs if candidate.foreign_ends)
    monkeypatch.setattr(saved_graph, "is_capturing_now", lambda: True)
    monkeypatch.setattr(saved_graph, "is_capturing", lambda: True)

    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation would make the legacy stream depend on a capturing blocking stream")

    monkeypatch.setattr(torch.autograd, "grad", refuses)
    with pytest.raises(RuntimeError, match="legacy stream") as raised:
        program.gradients([], [torch.ones(())] * len(program.outputs))
    assert raised.value.__notes__ == [saved_graph.ENDS_ELSEWHERE.format(told)]


def test_a_body_that_casts_what_it_is_lent(programs: list[SavedGraph]) -> None:
    """Autocast's cache outlives the call, as the block is the caller's: it must hold none of the exchanged tensors."""
    mine, theirs = captured_twins(Block)
    for number in range(8):
        values = []
        for model in (mine, theirs):
            model.zero_grad()
            leaves = list(model.parameters())
            with torch.autocast(DEVICE.type, torch.bfloat16):
                y = model.m[0](inputs(number))
            y.float().sum().backward()
            assert all(now is before for now, before in zip(model.parameters(), leaves, strict=True))
            values.append([bits(y.float()), *[bits(p.grad) for p in model.parameters()]])
        assert values[0] == values[1], number
    assert recordings(mine.m[0]).replays >= 6
    assert programs
    assert all(program.foreign == () for program in programs)


class Copying(nn.Module):
    """Reads its weight through a copy, as a recording does with a weight whose address changes in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.detach().clone().t()) @ self.weight


def test_what_is_saved_of_a_copy_is_found_in_the_original(
    programs: list[SavedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph saves the weight itself and not the copy, whose memory the next call overwrites. This test runs on the
    CPU alone: it finds copies by their bytes, for which the host would wait for a GPU."""

    def original(_: ObserveMode, tensor: Tensor) -> Tensor | None:
        weight, storage = mine.m[0].weight.detach(), tensor.untyped_storage()
        if storage is weight.untyped_storage() or storage.nbytes() != weight.nbytes:
            return None
        with unseen():
            is_copy = bytes(storage.tolist()) == bytes(weight.untyped_storage().tolist())
            return DeviceCopy("self.weight", weight, storage, 0).source_of(tensor) if is_copy else None

    monkeypatch.setattr(ObserveMode, "original", original)
    with without_default_device():
        mine, theirs = (model.to("cpu") for model in captured_twins(Copying))
        for number in range(8):
            values = []
            for model in (mine, theirs):
                x = inputs(number).cpu().requires_grad_()
                model.zero_grad()
                model.m[0](x).square().mean().backward()
                values.append([bits(x.grad), bits(model.m[0].weight.grad)])
            assert values[0] == values[1], number
    assert recordings(mine.m[0]).replays >= 4  # ``original`` above is a function of the test that the library calls
    weight = mine.m[0].weight
    assert programs
    for program in programs:
        assert program.num_saved == 1  # what comes out of tanh
        assert [tensor is weight for tensor in program.held] == [True]


@pytest.mark.parametrize("lead", [0, 32])
def test_views_of_a_copy_and_of_what_it_copies(lead: int) -> None:
    whole = torch.arange(60, dtype=torch.float32)
    tensor = whole[8:56].view(6, 8)
    copy = DeviceCopy("w", tensor, torch.empty(48 * 4 + lead, dtype=torch.uint8).untyped_storage(), lead)
    copy.copy_in(tensor)
    for view in (tensor, tensor.t(), tensor[2:5, 1::3], tensor.reshape(-1)[7:], tensor.view(torch.int32)[1]):
        there = copy.view_of(view)
        assert there is not None
        assert bits(there) == bits(view)
        back = copy.source_of(there)
        assert (back.data_ptr(), back.dtype, back.shape, back.stride()) == (
            view.data_ptr(), view.dtype, view.shape, view.stride(),
        )  # fmt: skip
