"""Outputs and gradients that are handed out again, and who holds them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin
from capture.native import native
from capture.torch_private import tensor_reads
from capture.torch_private.capabilities import count_holders, raw_use_count
from capture.tree.liveness import SharedStorage
from tests.support.device import DEVICE
from tests.support.fast_paths import fresh as fresh
from tests.support.fast_paths import way as way


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t, lambda t: t.view(-1), lambda t: t.detach(), lambda t: t.untyped_storage(), lambda t: [t][0],
        lambda t: torch.ones(4, requires_grad=True, device="cpu") * t,
    ],
)  # fmt: skip
def test_an_alias_is_handed_out_again_only_while_nobody_has_it(use: Callable[[Tensor], Any]) -> None:
    assert tensor_reads.counts_holders()
    first = torch.zeros(4, device="cpu")
    storage = first.untyped_storage()
    watch = native.StorageWatch(count_holders, storage, storage._cdata, first, raw_use_count)
    assert watch.settle() == 2  # the tensor and the storage's object
    assert watch() is None
    taken = watch.again()
    assert taken.data_ptr() == first.data_ptr()
    assert (watch(), watch.again()) == (storage, None)
    number, used = id(taken), use(taken)
    del taken
    assert (watch(), watch.again()) == (storage, None)
    del used
    assert watch() is None
    assert id(watch.again()) == number


def test_an_alias_that_was_changed_is_not_handed_out_again() -> None:
    assert tensor_reads.counts_holders()
    first = torch.zeros(4, device="cpu")
    storage = first.untyped_storage()
    changes: list[Callable[[Tensor], Any]]
    changes = [lambda t: t.resize_(2), lambda t: t.requires_grad_(), lambda t: setattr(t, "data", torch.ones(2))]
    for change in changes:
        watch = native.StorageWatch(count_holders, storage, storage._cdata, first, raw_use_count)
        watch.settle()
        change(watch.again())
        assert watch.again() is None
    with pytest.raises(TypeError):
        native.StorageWatch(count_holders, storage, storage._cdata, first)


LEAVES: list[Callable[[Tensor], Any]] = [
    lambda t: setattr(t, "note", 1), lambda t: t.add_(1), lambda t: t.requires_grad_(), lambda t: t.t_(),
    weakref.ref, lambda t: weakref.finalize(t, int), lambda t: setattr(t, "data", torch.ones(2, 3)),
    lambda t: t.resize_(1, 2), lambda t: setattr(t, "__class__", nn.Parameter),
]  # fmt: skip
"""What somebody leaves on a tensor, or makes of it, before it is dropped."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("several", [False, True])
def test_an_output_is_as_new_whatever_was_left_on_the_last_one(
    leave: Callable[[Tensor], Any], several: bool, way: str
) -> None:
    def body(x: Tensor) -> Any:
        return (x * 2, x + 1) if several else x * 2

    mine, x = capture(body), torch.randn(3, 2, device=DEVICE)
    for _ in range(4):
        mine(x)
    for _ in range(3):
        mark_step_begin()
        y = mine(x)[0] if several else mine(x)
        assert (type(y), y._version, y.requires_grad, y.__dict__) == (Tensor, 0, False, {})
        assert torch.equal(y, x * 2)
        assert y.stride() == (2, 1)
        left = leave(y)
        del y
        if isinstance(left, weakref.ref):
            mine(x)
            assert left() is None


def test_an_output_that_became_part_of_a_graph_lets_go_of_it(way: str) -> None:
    """A user's autograd function returns it: gradients are off in there."""
    mine, x = capture(lambda x: x * 2), torch.randn(3, 2, device=DEVICE, requires_grad=True)

    class Twice(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor) -> Tensor:
            result: Tensor = mine(x.detach())
            return result

        @staticmethod
        @override
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    for _ in range(5):
        y = Twice.apply(x * 1)  # type: ignore[no-untyped-call]
        node = weakref.ref(y.grad_fn)
        y.sum().backward()
        del y
        assert node() is None
    assert torch.equal(x.grad, torch.full_like(x, 10))  # type: ignore[arg-type]


def test_an_output_that_is_held_is_not_handed_out_again(way: str) -> None:
    mine, x = capture(lambda x: x * 2), torch.randn(3, 2, device=DEVICE)
    uses: list[Callable[[Tensor], Any]]
    uses = [lambda t: t, lambda t: t[1:], lambda t: t.detach(), lambda t: t.untyped_storage(), lambda t: [t]]
    for use in uses:
        for _ in range(4):
            mine(x)
        kept = use(mine(x))
        before = torch.tensor(list(kept)) if isinstance(kept, torch.UntypedStorage) else kept
        before = before.clone() if isinstance(before, Tensor) else before[0].clone()
        mark_step_begin()
        next_output = mine(x + 1)
        after = torch.tensor(list(kept)) if isinstance(kept, torch.UntypedStorage) else kept
        assert torch.equal(before, after if isinstance(after, Tensor) else after[0])
        assert torch.equal(next_output, (x + 1) * 2)
        del next_output, kept, after


def test_what_watches_a_storage_counts_all_that_use_it() -> None:
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    watch = native.StorageWatch(count_holders, storage, storage._cdata)
    alone = watch.settle()
    assert watch() is None
    view = tensor[1:]
    assert watch() is storage
    del view
    assert watch() is None
    again = tensor.untyped_storage()
    assert watch() is again
    del again
    assert (watch(), watch.settle()) == (None, alone)
    with pytest.raises(TypeError):
        watch(1)
    with pytest.raises(TypeError):
        native.StorageWatch(count_holders, storage)
    with pytest.raises(IndexError):
        native.hand_out((None,), [None], (0,), [None], (1,), None)
    assert native.hand_out((None,), [None], (0,), [None], (0,), None) == [0]


def _watched(lowest: list[int], *, again: bool, held: bool) -> tuple[Tensor, Any, Any]:
    """A tensor, a watch of its storage, and what another thread has while it lists all objects, or None."""
    first = torch.zeros(4, device="cpu")
    storage = first.untyped_storage()
    aliases = (first, raw_use_count) if again else ()
    watch = native.StorageWatch(count_holders, storage, storage._cdata, *aliases)
    other = [first.view(-1), first.untyped_storage()] if held else None
    watch.settle(lowest)
    return first, watch, other


@pytest.mark.parametrize("again", [False, True])
def test_who_has_it_while_it_is_counted_does_not_hide_a_later_user(again: bool) -> None:
    """A thread that lists all objects, as a profiler does, has them for a moment."""
    lowest = [sys.maxsize] * 4
    for _ in range(2):
        first, watch, _ = _watched(lowest, again=again, held=False)
        assert watch() is None
    first, watch, other = _watched(lowest, again=again, held=True)
    assert watch() is not None
    user = first.view(-1)
    del other
    assert watch() is not None
    del user
    assert watch() is None
    for wrong in ([1, 2, 3], (1, 2, 3, 4)):
        with pytest.raises(TypeError):
            watch.settle(wrong)


def test_an_alias_that_another_thread_has_for_a_moment_hides_no_other_one() -> None:
    """What is handed out while it has the alias that is kept apart may be saved for a backward pass."""
    shared = SharedStorage(lambda: torch.zeros(4, device="cpu"), again="apart")
    shared.renewed()
    other = _handed_out(shared)  # it is known to be with nobody else
    (second,) = _handed_out(shared)
    assert second is not other[0]
    saved = second.requires_grad_() ** 2
    del second, other
    assert shared.held is not None
    assert shared.held() is not None
    del saved
    assert shared.held() is None


def _handed_out(shared: SharedStorage) -> list[Any]:
    values = [None]
    assert native.hand_out((shared,), [shared.held], (0,), values, (0,), None) == []
    return values


def test_gradients_that_another_thread_has_while_they_are_counted_are_touched_later() -> None:
    with torch.enable_grad():
        parameter, first = torch.ones(4, requires_grad=True), torch.ones(4)
        storage = first.untyped_storage()
        watch = native.StorageWatch(count_holders, storage, storage._cdata)
        watch.settle()
        parameter.grad = first.data
        counts = native.gradient_counts(parameter, raw_use_count)
        for hold in (lambda: parameter.grad, lambda: first.untyped_storage(), lambda: first.data):
            other = hold()
            untouched = native.Untouched((parameter,), (watch,), raw_use_count, counts)
            assert not untouched((parameter,))
            del other
            assert untouched((parameter,))
            user = hold()
            assert not untouched((parameter,))
            del user


def test_untouched_gradients_are_seen_to_be_touched() -> None:
    """One that somebody holds counts as touched, and no more once it is let go."""
    assert tensor_reads.counts_holders(), "else it is as slow as without"
    with torch.enable_grad():
        parameters = tuple(torch.ones(4, 4, device=DEVICE, requires_grad=True) for _ in range(3))
        firsts = [torch.ones(4, 4, device=DEVICE) for _ in parameters]
        storages = [first.untyped_storage() for first in firsts]
        watches = tuple(native.StorageWatch(count_holders, storage, storage._cdata) for storage in storages)
        for parameter, first, watch in zip(parameters, firsts, watches, strict=True):
            watch.settle()
            parameter.grad = first.data
        counts = native.gradient_counts(parameters[0], raw_use_count)
        untouched = native.Untouched(parameters, watches, raw_use_count, counts)
        assert untouched(parameters)
        middle = parameters[1]
        assert middle.grad is not None
        middle.grad.mul_(2)
        assert untouched(parameters), "a write gives it to nobody"
        kept: Any
        for hold in (
            lambda: middle.grad, lambda: middle.grad[0], lambda: middle.grad.data,
            lambda: middle * middle.grad, lambda: [parameter.grad for parameter in parameters],
        ):  # fmt: skip
            kept = hold()
            assert not untouched(parameters)
            del kept
            assert untouched(parameters)
        assert not untouched(parameters[:2])
        assert not untouched((*parameters[:2], torch.ones(1)))
        assert not untouched((*parameters[:2], None))
        middle.grad = torch.ones(4, 4, device=DEVICE)
        assert not untouched(parameters)
    with pytest.raises(ValueError, match="no gradient"):
        native.Untouched((torch.ones(1),), watches[:1], raw_use_count, counts)
    with pytest.raises(TypeError):
        untouched(1)
