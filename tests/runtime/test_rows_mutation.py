"""Rows of ``docs/rows.md``: bodies that write into their inputs."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import UncapturableError, capture, mark_step_begin, recordings
from tests.support.device import AGAIN, DEVICE, REBINDS
from tests.support.rows import (
    copies_back,
    copies_in,
    counts,
    descendants,
    eager,
    followed,
    kids,
    ran,
    rand,
    roots,
    same,
    times,
    total,
    warned,
)
from tests.support.rows import fresh as fresh


def test_row_117_mutated_argument_is_copied_in_and_back() -> None:
    """A mutated plain argument is recorded; the caller's tensor ends up as in eager, once per call, and is returned."""

    @capture
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ran("f")
        x.add_(2)
        x[1:].mul_(y[1:])
        return x, x + y

    for i in range(5):
        x, y, twin = rand(4, seed=i), rand(4, seed=i + 9), rand(4, seed=i)
        whole, summed = f(x, y)
        assert whole is x
        same((x, summed), eager(f, twin, y))
        same(y, rand(4, seed=i + 9))
    assert times("f") == 2 + AGAIN
    assert counts(f)[3] == 0


def test_row_118_mutated_state_is_written_once_per_call() -> None:
    """Parameters, buffers, statics and closure tensors are written in place: exactly once a call, from the first on."""
    inside = torch.zeros(4)

    class Net(nn.Module):
        seen: Tensor
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(4))

        @override
        def forward(self, x: Tensor, cache: Tensor, tape: Tensor) -> Tensor:
            self.seen += 1
            self.mean.lerp_(x, 0.25)
            cache[1:].add_(x[1:])
            tape.add_(self.mean)
            return self.mean * self.seen + cache

    net = Net()
    twin = copy.deepcopy(net)
    capture(net, static=["cache", "tape"])
    ours, theirs = (torch.zeros(4), inside), (torch.zeros(4), torch.zeros(4))
    for i in range(6):
        x = rand(4, seed=i)
        same(net(x, *ours), twin(x, *theirs))
        same((list(net.buffers()), ours), (list(twin.buffers()), theirs))
    assert counts(net) == (1, 1, 4, 0)


@torch.no_grad()
def test_row_118_batch_norm_statistics() -> None:
    """Running statistics and ``num_batches_tracked``, which no schema announces, advance as in eager."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4, momentum=0.5))
    twin = copy.deepcopy(net)
    capture(net)
    for i in range(6):
        x = rand(5, 4, seed=i)
        same(net(x), twin(x))
        same(list(net.state_dict().values()), list(twin.state_dict().values()))


def test_row_119_mutated_managed_input_is_recorded() -> None:
    """An output of the step that the next function writes into is written in place, without copies."""

    @capture
    def make(x: Tensor) -> Tensor:
        return x + 1

    @capture
    def mutate(y: Tensor) -> Tensor:
        return y.add_(2).mul(3)

    for i in range(5):
        mark_step_begin()
        x = rand(4, seed=i)
        y = make(x)
        z = mutate(y)
        same((y, z), (x + 1 + 2, (x + 1 + 2) * 3))
        del y, z
    (parent,) = roots()
    (child,) = kids(parent)
    assert (copies_in(child), copies_back(child)) == (0, 0)
    assert counts(mutate) == (1, 1, 3, 0)


def test_row_120_same_function_on_a_tensor_of_the_caller() -> None:
    """The same function given the caller's own tensor on that path: another recording, copied in and back."""

    @capture
    def make(x: Tensor) -> Tensor:
        return x + 1

    @capture
    def mutate(y: Tensor) -> Tensor:
        return y.add_(2).mul(3)

    for i in range(8):
        mark_step_begin()
        x = rand(4, seed=i)
        y = make(x)
        mine = y.clone() if i % 2 else y
        z = mutate(mine)
        same((mine, z), (x + 1 + 2, (x + 1 + 2) * 3))
        same(y, x + 1 if i % 2 else x + 1 + 2)
        del y, z, mine
    assert descendants() == [2]
    assert counts(mutate)[3] == 0


def test_row_122_mutation_is_said_once_per_function() -> None:
    """The finding about a mutated argument stands once per function, however many paths and calls; no warning."""

    @capture
    def make(x: Tensor) -> Tensor:
        return x + 1

    @capture
    def mutate(y: Tensor) -> Tensor:
        return y.add_(2)

    for i in range(4):
        mark_step_begin()
        y = make(rand(4, seed=i))
        mutate(y)
        del y
        mark_step_begin()
        mutate(rand(4, seed=i))
    assert [finding.code for finding in recordings(mutate).findings].count("CG102") == 1
    assert recordings(mutate).recordings == 2


@torch.no_grad()
def test_row_123_storage_of_a_parameter_written_through_data() -> None:
    """``weight.data *= mask``, which bumps no version, happens once per call, as in eager."""

    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(rand(4, 4) + 2)
            self.register_buffer(
                "mask", torch.rand(4, 4, generator=torch.Generator(DEVICE).manual_seed(3)).round() + 0.5
            )

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data *= self.mask
            return x @ self.weight

    net = Masked()
    twin = copy.deepcopy(net)
    capture(net)
    for i in range(6):
        x = rand(2, 4, seed=i)
        same(net(x), twin(x))
        same(net.weight.data, twin.weight.data)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("how", ["data", "set"])
def test_row_123_storage_of_a_parameter_exchanged(how: str) -> None:
    """A body that gives a parameter other memory (``.data =``, ``set_``) leaves it as eager does, call by call."""

    class Swapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(rand(4, 4))

        @override
        def forward(self, x: Tensor) -> Tensor:
            if how == "data":
                self.weight.data = self.weight.data * 1.5
            else:
                self.weight.set_((self.weight.detach() * 1.5).untyped_storage(), 0, (4, 4), (4, 1))
            return x @ self.weight

    net = Swapping()
    twin = copy.deepcopy(net)
    capture(net)
    for i in range(6):
        x = rand(2, 4, seed=i)
        same(net(x), twin(x))
        same(net.weight.data, twin.weight.data)


@torch.no_grad()
def test_a_tensor_set_to_a_storage_is_a_view_of_its_owner() -> None:
    """Recurrent layers make such views of weights that do not lie in one piece."""

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(rand(4))

        @override
        def forward(self, x: Tensor) -> Tensor:
            storage = self.weight.untyped_storage()
            return (
                x
                + torch.empty(0, device=x.device).set_(storage, 1, (3,), (1,)) * torch.empty(0).to(x).set_(storage)[1:]
            )

    net = Looking()
    twin = copy.deepcopy(net)
    capture(net)
    for i in range(10):
        if i == 5:
            net.weight.data, twin.weight.data = (rand(4, seed=9) for _ in range(2))
        if i > 6:
            net.weight.add_(1)
            twin.weight.add_(1)
        same(net(rand(3, seed=i)), twin(rand(3, seed=i)))
    assert recordings(net).replays >= 6
    assert not recordings(net).eager_calls


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("value", ["scalar", "tensor"])
def test_row_125_boolean_mask_assignment(value: str) -> None:
    """``x[mask] = value`` over changing masks is eager's, however it is run."""

    @capture
    def f(x: Tensor, mask: Tensor) -> Tensor:
        y = x.clone()
        y[mask] = 7.0 if value == "scalar" else torch.full((), 7.0)
        return y

    for i in range(6):
        x = rand(3, 4, seed=i)
        mask = rand(3, 4, seed=i + 10) > 0.1
        same(f(x, mask), eager(f, x, mask))


def test_row_127_static_moves_while_a_buffer_is_mutated() -> None:
    """A replaced buffer and bias beside a counter that the body writes: no error, no write lost or doubled."""

    class Net(nn.Module):
        count: Tensor
        bias: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))
            self.register_buffer("bias", rand(4))

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(x)
            return self.count + self.bias

    net = Net()
    twin = copy.deepcopy(net)
    capture(net)
    for i in range(9):
        if i in (3, 6):
            for module in (net, twin):
                module.bias = rand(4, seed=i)
                if i == 6:
                    module.count = module.count.clone() + 1
        x = rand(4, seed=i)
        same(net(x), twin(x))
        same(net.count, twin.count)
    followed(net, 2)
    assert counts(net) == (1, 1, 7, 0) if REBINDS else counts(net)[2] >= 3


def test_row_128_or_error_mode_raises_instead_of_falling_back() -> None:
    """``fallback="error"``: what would run eagerly raises with the findings, and leaves no trace."""
    state = torch.zeros(4)

    @capture(fallback="error")
    def f(x: Tensor) -> Tensor:
        ran("f")
        state.add_(1)
        x.mul_(2)
        return x * float(np.from_dlpack(x.sum().cpu()))

    for i in range(3):
        x = rand(4, seed=i)
        with pytest.raises(UncapturableError, match="CG201") as caught:
            f(x)
        assert [finding.code for finding in caught.value.findings] == ["CG201"]
        same((x, state), (rand(4, seed=i), torch.zeros(4)))
    assert total() == 0


def test_row_128_or_error_mode_records_what_can_be_recorded() -> None:
    """``fallback="error"`` on a mutated argument is no error: that is recorded here."""

    @capture(fallback="error")
    def f(x: Tensor) -> Tensor:
        return x.mul_(2) + 1

    for i in range(4):
        x = rand(4, seed=i)
        same(f(x), rand(4, seed=i) * 2 + 1)
        same(x, rand(4, seed=i) * 2)
    assert counts(f) == (1, 1, 2, 0)


def test_row_128_eager_fallback_is_the_default() -> None:
    """Without the option the same body runs eagerly with one warning, mutations once per call."""
    state = torch.zeros(4)

    @capture
    def f(x: Tensor) -> Tensor:
        state.add_(1)
        return x.mul_(2) * float(np.from_dlpack(x.sum().cpu()))

    with warned("CG201"):
        for i in range(4):
            x, twin = rand(4, seed=i), rand(4, seed=i)
            same(f(x), twin.mul_(2) * float(np.from_dlpack(twin.sum().cpu())))
            same((x, state), (twin, torch.full((4,), i + 1.0)))
