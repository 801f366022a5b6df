"""A body that gives a tensor of its own more memory, as ``out=`` with an empty tensor and ``resize_`` do, runs as eager
runs it, in the run that records as well."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capture import capture
from tests.support.observed import bits, fresh, x_of

__all__ = ["fresh"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::capture.CaptureWarning"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]

Results = tuple[Tensor, ...]


def empty_and_out(x: Tensor) -> Results:
    first, second = torch.empty(0), torch.empty(0)
    torch.add(x, 1, out=first)
    torch.cat([x, x, x], out=second)
    return first, second * 2


def out_twice(x: Tensor) -> Results:
    out = torch.empty(0)
    torch.mm(x, x.t(), out=out)
    kept = out.clone()
    torch.cat([x, x, x, x], out=out)
    return kept, out


def several_outs(x: Tensor) -> Results:
    values, places = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.sort(x.repeat(5, 5), out=(values, places))
    return values, places


def resized(x: Tensor) -> Results:
    made = x * 2
    made.resize_(40)[12:] = 3
    return (made,)


def resized_with_views(x: Tensor) -> Results:
    made = x * 2
    view, row = made.view(-1), made[1]
    made.resize_(7, 9).fill_(4)
    row.add_(1)
    return made, view, row


def resized_as_another(x: Tensor) -> Results:
    made = x.sum(0)
    made.resize_as_(x.repeat(3, 3)).copy_(x.repeat(3, 3))
    return (made,)


def after_a_read(x: Tensor) -> Results:
    out = torch.empty(0)
    torch.cat([x] * (5 if x.sum().item() > -1000 else 7), out=out)
    return (out,)


def in_inference_mode(x: Tensor) -> Results:
    with torch.inference_mode():
        out = torch.empty(0)
        torch.cat([x, x, x], out=out)
        view = out[:2]
        out.resize_(20, 20).fill_(1)
    return out, view


def in_a_helper_that_draws(x: Tensor) -> Results:
    out = torch.empty(0)
    torch.rand(30, out=out)
    return out, torch.rand(2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "body",
    [empty_and_out, out_twice, several_outs, resized, resized_with_views, resized_as_another, after_a_read,
     in_inference_mode, in_a_helper_that_draws],
)  # fmt: skip
def test_a_tensor_gets_more_memory(body: Callable[[Tensor], Results]) -> None:
    captured = capture(body)
    for seed in range(5):
        torch.manual_seed(seed)
        expected = [*body(x_of(seed)), torch.rand(1)]
        torch.manual_seed(seed)
        assert bits([*captured(x_of(seed)), torch.rand(1)]) == bits(expected)


def test_a_dead_proxy_in_the_process() -> None:
    """All tensors are looked for, and a weak proxy whose object is gone raises where its class is asked for."""

    class Gone:
        pass

    gone = Gone()
    proxy = weakref.proxy(gone)
    del gone
    captured = capture(resized)
    for seed in range(5):
        assert bits([*captured(x_of(seed))]) == bits([*resized(x_of(seed))])
    with pytest.raises(ReferenceError):
        proxy.part


def test_gradients_beside_it() -> None:
    def body(x: Tensor) -> Tensor:
        out = torch.empty(0)
        torch.cat([x.detach(), x.detach(), x.detach()], out=out)
        return (x * out[:3]).sum() + out.mean()

    captured = capture(body)
    with torch.enable_grad():
        for seed in range(5):
            one, other = x_of(seed).requires_grad_(), x_of(seed).requires_grad_()
            body(one).backward()
            captured(other).backward()
            assert bits(other.grad) == bits(one.grad)


def test_an_error_of_the_body_stays_one() -> None:
    """Memory that is not torch's own, as an array's, cannot be resized in eager either."""

    def body(x: Tensor) -> Tensor:
        lent = torch.frombuffer(bytearray(16), dtype=torch.float32)
        return lent.resize_(40) * x.sum()

    captured = capture(body)
    for seed in range(4):
        with pytest.raises(RuntimeError, match="not resizable"):
            captured(x_of(seed))
