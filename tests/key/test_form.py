"""Alignments and strides that cannot change a result are not in the key, unless the body asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.support.device import DEVICE
from tests.support.keys import bits, x_of
from tests.support.keys import fresh as fresh


def _last(n: int) -> Tensor:
    """The last 8 elements of a row of n: for each n the dimension of size 1 has another stride, and the first element
    another alignment."""
    return x_of(n, 1, n)[:, -8:]


def _compare(body: Callable[..., Any], makers: list[Callable[[int], Tensor]], times: int = 24) -> Any:
    """Call with arguments of another form each time, and compare with eager, strides included. Gives the captured
    function."""
    mine = capture(body, max_recordings=50)
    for n in range(8, 8 + times):
        assert bits(mine(*[make(n) for make in makers])) == bits(body(*[make(n) for make in makers]))
    return mine


ELEMENTWISE: dict[str, tuple[Callable[..., Any], list[Callable[[int], Tensor]]]] = {
    "scaled": (lambda x: x * 2, [_last]),
    "chain": (lambda x: torch.where(x > 0, x.exp() - 1, x.sin()), [_last]),
    "two": (lambda x, y: x + y * 2, [_last, _last]),
    "broadcast": (lambda x, y: x * y, [_last, lambda n: x_of(n, 3, 1, 8)]),
    "views inside": (lambda x: x.view(2, 4).unsqueeze(1) * 2, [_last]),
    "a row of a table": (lambda x: torch.relu(x) + 1, [lambda n: x_of(n, 40, 5)[n]]),
    "three dimensions": (lambda x: x * 3, [lambda n: x_of(n, 1, n, 4)[:, -1:]]),
    "channels": (lambda x: x * 3, [lambda n: x_of(n, 1, 1, n, 4)[:, :, -4:]]),
    "in place": (lambda x: x.mul_(2), [_last]),
    "none of size 1": (lambda x: x - 1, [lambda n: x_of(n, n + 4)[n:]]),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_forms_of_one_kind_share_a_recording(name: str) -> None:
    mine = _compare(*ELEMENTWISE[name])
    assert recordings(mine).recordings == 1
    assert recordings(mine).replays >= 22


ONE_ELEMENT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, t: x * t,
    "matrix": lambda x, t: (x @ x.T) * t,
    "softmax": lambda x, t: torch.softmax(x / t.abs(), 0),
    "index": lambda x, t: x.index_select(0, t.reshape(1).long() * 0),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ONE_ELEMENT)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_element_lies_anywhere(name: str, shape: tuple[int, ...]) -> None:
    table, x = torch.arange(1.0, 33.0, device=DEVICE), x_of(0, 3, 4)
    mine = capture(ONE_ELEMENT[name])
    for i in range(32):
        scalar = table[i].view(shape)
        assert bits(mine(x, scalar)) == bits(ONE_ELEMENT[name](x, scalar))
    assert recordings(mine).recordings == 1


def _whole(n: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Whole numbers from somewhere in a text, as a loop cuts it."""
    return (torch.arange(800, device=DEVICE) % 7).to(dtype)[n : n + 601]


WHOLE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rows of a table": lambda table, at: table[at.long()].sum(0) @ table.T,
    "counted": lambda table, at: (table * at.sum(), (at > 3).float().mean()),
    "summed as fractions": lambda table, at: table.sum() * at.sum(dtype=torch.float32) / at.double().mean(),
    "read on the host": lambda table, at: (table[at.long()].sum(), (at == 2).sum().item()),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_may_lie_anywhere(name: str, dtype: torch.dtype) -> None:
    """As a batch of tokens is cut from a text, or one of places from a permutation."""
    body, table = WHOLE[name], x_of(0, 7, 9)
    mine = capture(body, max_recordings=50)
    for n in range(1, 25):
        assert bits(mine(table, _whole(n, dtype))) == bits(body(table, _whole(n, dtype)))
    assert recordings(mine).recordings == 1
    assert recordings(mine).replays >= 21


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_whole_numbers_seen_as_others(dtype: torch.dtype) -> None:
    """Sums of fractions are in another order where these lie otherwise."""
    raw = x_of(0, 3000).view(dtype)
    size = 4 // min(4, dtype.itemsize)

    def body(x: Tensor) -> Tensor:
        return x.view(torch.float32).sum()

    mine = capture(body, max_recordings=50)
    for n in range(1, 25):
        x = raw[n * size : (n + 1400) * size]
        assert bits(mine(x)) == bits(body(x))
    assert recordings(mine).recordings > 1


SEEN: dict[str, tuple[Callable[..., Any], list[Callable[[int], Tensor]]]] = {
    "view given back": (lambda x: (x * 2, x[:, 2:]), [_last]),
    "clone": (lambda x: x.clone(), [_last]),
    "like": (lambda x: torch.zeros_like(x) + x, [_last]),
    "another dtype": (lambda x: x.double(), [_last]),
    "strides": (lambda x: x * x.stride(0), [_last]),
    "strides at once": (lambda x: x * sum(x.stride()), [_last]),
    "sum": (lambda x: x.sum(), [lambda n: x_of(n, 800 + n)[n:]]),
    "product of matrices": (lambda x: x @ x.T, [_last]),
    "transposed": (lambda x: x.T * 2, [_last]),
    "laid out by strides": (lambda x: torch.empty_strided(x.shape, x.stride(), device=DEVICE).copy_(x) * 2, [_last]),
    "contiguous": (
        lambda x: x.contiguous(memory_format=torch.channels_last) * 2,
        [lambda n: x_of(n, 1, 2, n, 4)[:, :, -4:]],
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("name", SEEN)
def test_what_the_body_can_see_tells_calls_apart(name: str) -> None:
    _compare(*SEEN[name])


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_strides_of_another_order_are_another_key() -> None:
    """A row that is a transposed column: kernels go through its dimensions in another order."""

    def body(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    mine = capture(body)
    for y in (x_of(3, 1), torch.tensor(2.0)):
        for _ in range(3):
            for x in (x_of(1, 8, 1).t(), x_of(2, 1, 8), x_of(1, 20, 1)[:8].t(), _last(12)):
                assert bits(mine(x, y)) == bits(body(x, y))


def test_a_branch_that_sees_forms_ends_it() -> None:
    """One branch cannot see strides. The same key may reach the other one, which keeps them in its result."""
    ways = [0]

    def body(x: Tensor) -> Tensor:
        return x * 2 if ways[0] == 0 else x.clone()

    mine = capture(body, max_recordings=50)
    for n in [*range(8, 16), *range(8, 24)]:
        ways[0] = int(n % 3 == 0)
        assert bits(mine(_last(n))) == bits(body(_last(n)))


def test_forms_of_a_region() -> None:
    """Results need gradients: forward and backward are recorded apart."""
    torch.set_grad_enabled(True)
    weight, twin = (nn.Parameter(x_of(3, 1, 8)) for _ in range(2))

    def body(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight + 1

    mine = capture(body, max_recordings=50)
    for n in range(8, 24):
        got, expected = mine(_last(n), weight), body(_last(n), twin)
        assert bits(got) == bits(expected)
        got.sum().backward()
        expected.sum().backward()
    assert bits(weight.grad) == bits(twin.grad)
