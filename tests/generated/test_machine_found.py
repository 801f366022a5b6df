"""Bugs that the random programs of ``machine.py`` found, with results, written inputs and shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, explain, recordings, warmup
from tests.support.device import DEVICE
from tests.support.found import CALLS, ones
from tests.support.found import _without_gradients as _without_gradients

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
assert issubclass(CaptureWarning, UserWarning)


class Swap:
    """Two tensors that change places."""

    def __init__(self) -> None:
        self.a, self.b = torch.ones(4), torch.zeros(4)

    def step(self, x: Tensor) -> Tensor:
        """Exchange the two and give the old ``b``."""
        self.a, self.b = self.b, self.a + x
        return self.a


class CapturedSwap(Swap):
    """The same, captured."""

    step = capture(Swap.step)


def test_attributes_that_swap_their_tensors_hold_eagers() -> None:
    """The value stored in one attribute is the tensor of another attribute that the body reads."""
    eager, ours = Swap(), CapturedSwap()
    for turn in range(CALLS):
        expected, out = eager.step(ones(turn)), ours.step(ones(turn))
        assert out is ours.a
        assert torch.equal(expected, out)
        assert torch.equal(eager.b, ours.b)


def test_metadata_changed_in_place_is_replayed() -> None:
    """``t_`` makes no tensor and writes no memory, but operators after it read the transposed one."""

    def body(x: Tensor) -> Tensor:
        y = x.clone()
        y.t_().add_(1)
        return y

    captured = capture(body)
    for turn in range(CALLS):
        x = torch.arange(12.0).view(3, 4) + turn
        out = captured(x)
        assert out.stride() == body(x).stride()
        assert torch.equal(out, body(x))


def test_one_tensor_returned_twice_is_one_object() -> None:
    """Leaves of a result that are one object in eager are one object in a replay."""

    @capture
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y

    for _ in range(CALLS):
        first, second = body(ones())
        assert first is second


def test_a_result_that_is_kept_on_an_attribute_is_that_attribute() -> None:
    """A result that the body also stores is the same object as the attribute, verified or not."""

    class Net(nn.Module):
        state: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.ones(4))

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.state = self.state + x
            return self.state

    for net in (capture(Net()), capture(Net(), verify="always")):
        for turn in range(CALLS):
            out = net(ones())
            assert out is net.state
            out.add_(1)
            assert net.state[0] == 1 + 2 * (turn + 1)


@pytest.mark.parametrize("policy", ["preserve", "clone"])
def test_a_write_through_one_output_counts_for_its_views(policy: Any) -> None:
    """Outputs that share memory share a version counter; else autograd would miss that a saved view was overwritten."""

    @capture(outputs=policy)
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[1:]

    for _ in range(CALLS):
        y, tail = body(ones())
        before = tail._version
        y.add_(1)
        assert tail._version > before


def test_a_gradient_from_an_overwritten_output_is_refused() -> None:
    """An output that was saved for a backward pass and then overwritten gives eager's error."""

    @capture
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[1:]

    for _ in range(CALLS):
        y, tail = body(ones())
        weight = torch.ones(3, requires_grad=True)
        with torch.enable_grad():
            loss = (weight * tail).sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_write_into_a_managed_input_counts_on_the_callers_tensor() -> None:
    """The caller holds another function's output; a replay that writes it must bump its version."""

    @capture
    def make(x: Tensor) -> Tensor:
        return x + 1

    @capture
    def write(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum()

    for _ in range(CALLS):
        made = make(ones())
        before = made._version
        write(made)
        assert made._version > before


def test_a_write_through_a_list_operator_counts_on_every_member() -> None:
    """``torch._foreach_*`` write a list of tensors."""
    weights = [torch.ones(4), torch.ones(2)]

    @capture
    def body(x: Tensor) -> Tensor:
        torch._foreach_mul_(weights, 0.5)
        return x + weights[0]

    for _ in range(CALLS):
        before = [weight._version for weight in weights]
        body(ones())
        assert all(weight._version > version for weight, version in zip(weights, before, strict=True))


@pytest.mark.parametrize(
    "body",
    [
        lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(x),
        lambda x: torch.complex(x, x + 1).conj(),
        lambda x: torch.complex(x, x + 1).imag,
    ],
    ids=["constant", "conjugate", "imaginary"],
)
def test_what_is_lifted_or_lazily_conjugated_is_recorded(body: Callable[[Tensor], Tensor]) -> None:
    """Outputs that are conjugated lazily, and numbers made into tensors, are recorded and not eager."""
    captured = capture(body)
    for turn in range(CALLS):
        assert torch.equal(captured(ones(turn)), body(ones(turn)))
    assert recordings(captured).replays == CALLS - 2


@pytest.mark.parametrize(
    "body",
    [lambda x, w: (x, x[4:]), lambda x, w: (x + 1, w[4:]), lambda x, w: (lambda y: (y, y[4:]))(x + 1)],
    ids=["argument", "static", "output"],
)
def test_an_empty_view_may_be_returned(body: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """A view without elements has a ``data_ptr`` of 0, which does not tell whose memory it is of."""
    weight = torch.ones(4, 4)
    captured = capture(body, static=["w"])
    for _ in range(CALLS):
        _, empty = captured(torch.ones(4, 4), weight)
        assert (empty.shape, empty.stride()) == ((0, 4), (4, 1))


def test_a_returned_argument_container_is_the_callers() -> None:
    """A dict or list argument that is returned is the caller's own object, so that later changes show in it."""
    cache = {"k": torch.ones(4)}
    lookup = capture(lambda x, cache: (x + cache["k"], cache))
    same = capture(lambda parts: parts)
    parts = [ones(), ones()]
    for _ in range(CALLS):
        assert lookup(ones(), cache)[1] is cache
        assert same(parts) is parts


@pytest.mark.parametrize("implicit", [False, True])
def test_one_view_returned_twice_is_one_object_on_the_callers_memory(implicit: bool) -> None:
    """An alias of an argument, or of a tensor the body found, that is two leaves of the result."""
    weight = torch.arange(16.0).view(4, 4)

    @capture
    def body(x: Tensor) -> tuple[Tensor, ...]:
        tail = (weight if implicit else x)[1:]
        return tail, x + 1, tail

    for turn in range(CALLS):
        x = torch.full((4, 4), float(turn))
        first, _, second = body(x)
        assert first is second
        assert first.data_ptr() == (weight if implicit else x)[1:].data_ptr()


@pytest.mark.parametrize(
    "write",
    [lambda a: a.view(-1).add_(1), lambda a: a[1:].uniform_(), lambda a: a.t().copy_(torch.ones(4, 4))],
    ids=["flat", "rows", "turned"],
)
def test_a_write_through_a_view_of_an_attribute_counts_on_the_attribute(write: Callable[[Tensor], Tensor]) -> None:
    """A write through a view of an attribute raises the attribute's version counter, whatever the view's geometry."""

    class Box:
        a: Tensor

    box = Box()
    box.a = torch.ones(4, 4)

    @capture
    def body(x: Tensor) -> Tensor:
        write(box.a)
        return x + 1

    for _ in range(CALLS):
        before = box.a._version
        body(ones())
        assert box.a._version > before


class Shared:
    """A body that writes its attribute and its argument."""

    def __init__(self) -> None:
        self.a = torch.ones(4)

    def step(self, x: Tensor) -> Tensor:
        """Write the attribute and the argument, which may be one tensor."""
        self.a.mul_(0.5)
        x.add_(3)
        return x + self.a


class CapturedShared(Shared):
    """The same, captured."""

    step = capture(Shared.step)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("calls_before", range(5))
@pytest.mark.parametrize("alias", [lambda t: t, lambda t: t[:]], ids=["itself", "view"])
def test_an_argument_may_share_memory_with_an_implicit_input(
    calls_before: int, alias: Callable[[Tensor], Tensor]
) -> None:
    """A write to one shows in the other, whenever they begin to share."""
    eager, ours = Shared(), CapturedShared()
    for _ in range(calls_before):
        eager.step(ones())
        ours.step(ones())
    for _ in range(3):
        expected, out = eager.step(alias(eager.a)), ours.step(alias(ours.a))
        assert torch.equal(expected, out)
        assert torch.equal(eager.a, ours.a)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_a_misaligned_input_gives_eagers_bits(offset: int) -> None:
    """Kernels may add in another order where the data is aligned differently, staging buffers included."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight = torch.randn(4, 4, generator=generator)
    captured = capture(lambda x: nn.functional.linear(x, weight, weight[0]))
    for _ in range(40):
        x = torch.randn(16 + offset, generator=generator)[offset:].view(4, 4)
        assert torch.equal(captured(x), nn.functional.linear(x, weight, weight[0]))


@pytest.mark.parametrize("options", [{}, {"verify": "always"}, {"outputs": "clone"}, {"warmup": 2}], ids=str)
def test_one_tensor_given_twice_and_kept_is_the_callers(options: Any) -> None:
    """An attribute holds the caller's own tensor after every phase."""

    class Box:
        last: Tensor

    box = Box()
    box.last = torch.zeros(4)

    @capture(**options)
    def body(x: Tensor, y: Tensor) -> Tensor:
        box.last = y
        return x * 2

    for turn in range(CALLS):
        x = ones(turn)
        body(x, x)
        assert box.last is x


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", [{}, {"verify": "always"}, {"warmup": 2}], ids=str)
@pytest.mark.parametrize("managed", [False, True])
def test_one_tensor_given_twice_and_returned_is_the_callers(options: Any, managed: bool) -> None:
    """An argument given twice and returned is the caller's tensor, also in the recording call, and where it is another
    function's output."""
    make = capture(lambda x: x + 1) if managed else torch.clone
    body = capture(lambda x, y: (x, y, y.mul_(2)), **options)
    for _ in range(CALLS):
        x = make(ones())
        assert all(returned is x for returned in body(x, x))
        del x


@pytest.mark.parametrize("trial", [explain, warmup])
def test_a_trial_undoes_metadata_changed_in_place(trial: Any) -> None:
    """Undoing a trial run also undoes ``t_`` on an argument."""
    x = torch.zeros(2, 3)
    trial(capture(lambda x: x.t_().add_(1)))(x)
    assert x.shape == (2, 3)
    assert x.sum() == 0


@pytest.mark.parametrize("trial", [explain, warmup])
@pytest.mark.parametrize("options", [{}, {"static": ["a"]}], ids=str)
def test_a_trial_of_a_body_that_raises_undoes_its_writes(trial: Any, options: Any) -> None:
    """Where the body raises in a trial run the exception comes out, and its writes are undone."""

    @capture(**options)
    def body(a: Tensor) -> Tensor:
        a.add_(1)
        raise KeyError("asked for")

    a = torch.zeros(4)
    with pytest.raises(KeyError, match="asked for"):
        trial(body)(a)
    assert a.sum() == 0


@pytest.mark.parametrize("policy", ["preserve", "clone"])
def test_outputs_of_several_dtypes_on_one_memory_share_a_version_counter(policy: Any) -> None:
    """A complex tensor and its imaginary part share memory and a version counter."""

    @capture(outputs=policy)
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(x, x + 1)
        return z, z.imag

    for _ in range(CALLS):
        z, imaginary = body(ones())
        before = imaginary._version
        z.mul_(2)
        assert imaginary._version > before


def test_a_repeated_call_notices_arguments_that_overlap() -> None:
    """Metadata equal to the last call's, but on shared memory: another alias pattern, so another entry."""

    def body(x: Tensor, y: Tensor) -> Tensor:
        y.mul_(2)
        return x + y

    captured = capture(body)
    with torch.no_grad():
        for i in range(12):
            ours, theirs = torch.arange(32.0) + i, torch.arange(32.0) + i
            shift = 0 if i % 3 == 2 else 16
            got = captured(ours[:16], ours[shift : shift + 16])
            assert torch.equal(got, body(theirs[:16], theirs[shift : shift + 16])), i
            assert torch.equal(ours, theirs), i


def test_two_views_of_one_output_that_are_written_count_it() -> None:
    """Managed arguments on one memory: the write shows in both version counters, on the recording run as well."""

    @capture
    def make(x: Tensor) -> Tensor:
        return x + 1

    @capture
    def write(x: Tensor, y: Tensor) -> Tensor:
        y[..., :2] = x[..., 2:]
        return x * 1

    with torch.no_grad():
        for i in range(6):
            made = make(torch.arange(16.0).view(4, 4) + i)
            wanted = torch.arange(16.0).view(4, 4) + i + 1
            before = made._version
            got = write(made, made.t())
            wanted.t()[..., :2] = wanted[..., 2:]
            assert torch.equal(made, wanted), i
            assert torch.equal(got, wanted), i
            assert made._version != before, i
            del made, got
    assert recordings(write).recordings >= 1
