"""Rows of ``docs/rows.md``: what a replay hands out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from tests.support.device import AGAIN, DEVICE
from tests.support.rows import any_live, counts, eager, kids, ran, rand, results, roots, same, times, total, warned
from tests.support.rows import fresh as fresh


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def test_row_099_output_that_is_a_static_is_the_callers_own() -> None:
    """Static inputs, parameters and views of them come back on the caller's own memory, never the pool's."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(rand(4, 4))

        @capture(static=["s"])
        @override
        def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
            return self.weight, self.weight[1:], s.t(), s, x + s

    net, s = Net(), rand(4, 4, seed=1)
    for i in range(4):
        x = rand(4, 4, seed=i)
        weight, part, turned, whole, fresh_one = net(x, s)
        same((weight, part, turned, whole, fresh_one), (net.weight, net.weight[1:], s.t(), s, x + s))
        assert weight is net.weight
        assert whole is s
        assert storage_of(part) == storage_of(net.weight)
        assert storage_of(turned) == storage_of(s)
        part.fill_(float(i))
        assert net.weight[2, 2] == float(i)
    (node,) = roots()
    assert len(results(node).groups) == 1


@torch.no_grad()
def test_row_100_parameter_returned_and_sliced() -> None:
    """A parameter returned as it is and sliced, after it was replaced as well: always the module's present one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(rand(4))

        @capture
        @override
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.p[0], self.p, self.p + x

    net = Net()
    for i in range(6):
        if i == 4:
            net.p = nn.Parameter(rand(4, seed=40))
        first, whole, summed = net(rand(4, seed=i))
        same((first, summed), (net.p[0], net.p + rand(4, seed=i)))
        assert whole is net.p
        assert storage_of(first) == storage_of(net.p)
        del first, whole, summed
        same(net.p, rand(4, seed=40) if i >= 4 else rand(4))


def test_row_101_output_that_is_an_input_is_the_callers_own() -> None:
    """A returned input is the caller's own object, a view of it a view of the caller's own tensor."""

    @capture
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x[0], x.view(2, 2).t()

    for i in range(4):
        x = rand(4, seed=i)
        whole, first, turned = f(x)
        assert whole is x
        same((first, turned), (x[0], x.view(2, 2).t()))
        assert storage_of(first) == storage_of(turned) == storage_of(x)
        x.mul_(3)
        same((first, turned), (x[0], x.view(2, 2).t()))
    assert counts(f) == (1, 1, 2, 0)


def test_row_101_view_of_an_input_with_an_offset() -> None:
    """The input is itself a view, at another offset in each call."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x[1:3]

    base = rand(64)
    for i in range(5):
        x = base[i * 4 : i * 4 + 4]
        y = f(x)
        same(y, x[1:3])
        y.fill_(float(i))
        assert base[i * 4 + 2] == float(i)


def test_row_102_view_of_an_earlier_output_shares_its_memory() -> None:
    """A function that returns a view of another one's output returns it on the very memory of that output."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2

    @capture
    def g(y: Tensor) -> tuple[Tensor, Tensor]:
        return y[1:], y + 1

    for i in range(5):
        mark_step_begin()
        x = rand(4, seed=i)
        y = f(x)
        part, shifted = g(y)
        same((y, part, shifted), (x * 2, (x * 2)[1:], x * 2 + 1))
        assert storage_of(part) == storage_of(y)
        part.fill_(5.0)
        assert y[3] == 5.0
        del y, shifted
        same(part, torch.full((3,), 5.0))
        (node,) = roots() or (None,)
        assert node is None or any_live(node)
        del part


def test_row_103_outputs_on_one_storage_share_it() -> None:
    """Outputs that share memory in eager share it after every replay, and share nothing with the others."""

    @capture
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = x + 1
        return y, y[1:], y.view(2, 2), x * 2

    for i in range(5):
        x = rand(4, seed=i)
        whole, part, square, doubled = f(x)
        same((whole, part, square, doubled), eager(f, x))
        assert storage_of(whole) == storage_of(part) == storage_of(square) != storage_of(doubled)
        whole.zero_()
        same((part, square, doubled), (torch.zeros(3), torch.zeros(2, 2), x * 2))


def test_row_104_geometry_and_dtype_are_eagers() -> None:
    """Sizes, strides, offsets and dtypes of outputs are those of eager."""

    @capture
    def f(x: Tensor) -> dict[str, Tensor]:
        wide = (x + 1).to(memory_format=torch.channels_last)
        return {
            "channels": wide,
            "turned": (x[0, 0] * 2).t(),
            "sliced": (x * 3)[:, 1:, ::2],
            "half": x.to(torch.bfloat16),
            "mask": x > 0,
            "index": x.argmax(-1),
            "expanded": (x[:, :1] * 2).expand(2, 3, 4, 4),
            "scalar": x.sum(),
            "complex": torch.complex(x, x * 2),
        }

    for i in range(4):
        x = rand(2, 3, 4, 4, seed=i)
        actual, expected = f(x), eager(f, x)
        assert list(actual) == list(expected)
        for name in expected:
            same(actual[name], expected[name])
            assert actual[name].storage_offset() == expected[name].storage_offset(), name
    assert counts(f) == (1, 1 + AGAIN, 2 - AGAIN, 0)


def test_row_106_none_and_ints_pass_through() -> None:
    """Python values that follow from the key come back as they are, in their places."""

    @capture
    def f(x: Tensor) -> tuple[Any, ...]:
        return None, 3, x + 1, [x.shape[0], None], {"size": x.size(), "name": "f"}, True

    for i in range(4):
        x = rand(4, seed=i)
        actual = f(x)
        assert (actual[0], actual[1], actual[3:]) == (None, 3, ([4, None], {"size": x.size(), "name": "f"}, True))
        same(actual[2], x + 1)
    assert counts(f) == (1, 1 + AGAIN, 2 - AGAIN, 0)
    assert f(rand(4))[3] is not f(rand(4))[3]


def test_row_107_a_number_that_is_only_returned_is_read_anew() -> None:
    """Each replay reads it where the body reads it by a name of its own."""
    f = capture(lambda x: (float(x.sum()), x + 1))
    for i in range(5):
        x = rand(4, seed=i)
        same(f(x), (float(x.sum()), x + 1))


@pytest.mark.parametrize("read", [Tensor.item, lambda s: s.tolist()])
def test_row_107_python_values_of_data_are_refused(read: Any) -> None:
    """A body that turns data into a Python value runs eagerly, with one warning that names the line."""

    @capture
    def f(x: Tensor) -> tuple[Any, Tensor]:
        ran("f")
        return read(x.sum()), x + 1

    with warned("CG201"):
        for i in range(5):
            x = rand(4, seed=i)
            same(f(x), eager(f, x))
    (finding,) = [finding for finding in recordings(f).findings if finding.code == "CG201"]
    assert finding.where is not None
    assert ("read(x.sum())" if read is Tensor.item else "s.tolist()") in finding.where.code
    assert (times("f"), total()) == (5, 0)


def test_row_107_python_values_that_drift_are_refused() -> None:
    """A Python output that differs from run to run for no reason in the key is not frozen."""
    calls: list[int] = []
    count = calls.append

    @capture
    def f(x: Tensor) -> tuple[Tensor, int]:
        count(1)
        return x + 1, len(times_called())

    def times_called() -> list[int]:
        return calls

    with warned("CG20", most=2):
        for i in range(6):
            y, n = f(rand(4, seed=i))
            same(y, rand(4, seed=i) + 1)
            assert n == i + 1


def test_row_108_empty_outputs() -> None:
    """Outputs without elements have eager's shapes and dtypes, beside others."""

    @capture
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros(0), (x + 1)[0:0], torch.zeros(100)[0:0], torch.zeros(3, 0, dtype=torch.int64), x * 2

    for i in range(4):
        x = rand(4, seed=i)
        same(f(x), eager(f, x))
    assert counts(f) == (1, 1, 2, 0)
    (node,) = roots()
    assert not kids(node)


def test_row_110_state_of_an_output_does_not_leak() -> None:
    """Hooks, attributes and ``requires_grad_()`` put on an output are gone from the next one."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2

    for i in range(5):
        y = f(rand(4, seed=i))
        assert not y.requires_grad
        assert y._backward_hooks is None
        assert not hasattr(y, "tag")
        y.tag = i  # type: ignore[attr-defined]
        y.add_(1)
        y.requires_grad_().register_hook(lambda grad: grad * 2)
        y.sum().backward()
        same(y.grad, torch.full((4,), 2.0))


@torch.no_grad()
def test_row_112_autocast_caches_no_cast() -> None:
    """Under autocast a weight changed in place, and an output changed between two uses, are cast anew."""
    weight = nn.Parameter(rand(4, 4, seed=1))

    @capture
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ weight, x * 2

    for i in range(6):
        x = rand(4, 4, seed=i)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            product, out = f(x)
            same((product, out), (x @ weight.clone(), x * 2))
            same(out @ x, (x * 2) @ x)
            out.zero_()
            same(out @ x, torch.zeros(4, 4, dtype=torch.bfloat16))
        weight.mul_(-1.25)
    assert counts(f) == (1, 1 + AGAIN, 4 - AGAIN, 0)
