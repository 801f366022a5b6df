"""Tensors in Python state that the body replaces in each call, as a hidden state: inputs, after a few calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.runtime.test_decisions import CALLS, Step, Wrap, _every_body_pays, pytestmark, twins  # noqa: F401
from tests.support.device import DEVICE

Body = Callable[[Any, Tensor], Any]


class Plain:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.h, self.mean, self.calls = torch.zeros(4), torch.ones(4), 0
        self.last: Any = None


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h, self.mean, self.calls = torch.zeros(4), torch.ones(4), 0
        self.last: Any = None


class Slotted:
    __slots__ = ("__weakref__", "calls", "h", "last", "mean")

    def __init__(self) -> None:
        self.h, self.mean, self.calls = torch.zeros(4), torch.ones(4), 0
        self.last: Any = None


def recurrent(own: Any, x: Tensor) -> Any:
    own.h = torch.tanh(x + own.h * 0.5)
    return own.h * 2


def handed_out(own: Any, x: Tensor) -> Any:
    own.h = torch.tanh(x + own.h * 0.5)
    return own.h


def given_away(own: Any, x: Tensor) -> Any:
    before, own.h = own.h, x * 0.5 + own.mean
    own.mean = own.mean * 0.9 + x * 0.1
    return before


def running(own: Any, x: Tensor) -> Any:
    own.calls += 1
    own.mean = own.mean * 0.9 + x * 0.1
    own.h = own.h * 0.9 + (x - own.mean).square() * 0.1
    return (x - own.mean) / (own.h + 1).sqrt()


def swapped(own: Any, x: Tensor) -> Any:
    own.h, own.mean = own.mean, own.h + x
    return own.h + own.mean


def the_argument(own: Any, x: Tensor) -> Any:
    y = own.h + x
    own.h = x
    return y


def written_and_replaced(own: Any, x: Tensor) -> Any:
    own.h.add_(x)
    y = own.h * 2
    own.h = own.h.clone()
    return y


def a_view(own: Any, x: Tensor) -> Any:
    both = torch.cat([own.h, x])
    own.h = both[2:6]
    return both.sum()


def two_names(own: Any, x: Tensor) -> Any:
    own.h = own.last = torch.tanh(own.h + x)
    return own.h + (0 if own.last is own.h else 1)


def now_and_then(own: Any, x: Tensor) -> Any:
    if own.calls % 3 == 0:
        own.h = own.h + x
    own.calls += 1
    return own.h * 2


def drawn(own: Any, x: Tensor) -> Any:
    own.h = nn.functional.dropout(own.h + x, 0.5) + torch.rand(4)
    return own.h * 3


BODIES = (
    recurrent, handed_out, given_away, running, swapped, the_argument, written_and_replaced, a_view, two_names,
    now_and_then, drawn,
)  # fmt: skip


def state_of(own: Any) -> Any:
    return [getattr(own, name) for name in ("h", "mean", "calls", "last")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [Plain, Module, Slotted])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_equal_to_eager(body: Body, kind: Any) -> None:
    def program(wrap: Wrap) -> Step:
        own, others = kind(), list[Any]()
        f = wrap(lambda x: body(own, x))

        def step(n: int) -> Any:
            x = torch.randn(4)
            if n % 17 == 0:
                own.h = torch.full((4,), float(n))
            if n % 23 == 0:
                own.h.mul_(0.5)
            if n == 40:
                own.mean = own.h
            result = f(x)
            others.append(result)
            return result, state_of(own), others[-3:]

        return step

    twins(program)


@pytest.mark.parametrize("where", ["closure", "dict"])
def test_in_other_places(where: str) -> None:
    def program(wrap: Wrap) -> Step:
        h, kept = torch.zeros(4), {"h": torch.zeros(4)}

        def by_closure(x: Tensor) -> Tensor:
            nonlocal h
            h = torch.tanh(h + x)
            return h * 2

        def by_dict(x: Tensor) -> Tensor:
            kept["h"] = torch.tanh(kept["h"] + x)
            return kept["h"] * 2

        f = wrap({"closure": by_closure, "dict": by_dict}[where])

        def step(n: int) -> Any:
            nonlocal h
            if n == 30:
                h = kept["h"] = torch.ones(4)
            return f(torch.randn(4)), h, kept["h"]

        return step

    assert twins(program) > CALLS // 2


OWN: Any = torch.zeros(4)


def by_own_global(x: Tensor) -> Tensor:
    global OWN
    OWN = torch.tanh(OWN + x)
    found: Tensor = OWN * 2
    return found


def test_in_a_global() -> None:
    made, plain = capture(by_own_global), torch.zeros(4)
    for n in range(40):
        if n == 25:
            globals()["OWN"] = plain = torch.ones(4)
        x = torch.randn(4)
        plain = torch.tanh(plain + x)
        assert torch.equal(made(x), plain * 2)
        assert torch.equal(OWN, plain)
    assert recordings(made).replays > 20


@pytest.mark.parametrize("other", ["shape", "dtype", "none", "strided", "needs gradients"])
def test_another_kind_of_tensor_comes_there(other: str) -> None:
    def program(wrap: Wrap) -> Step:
        own: Any = Plain()

        def body(x: Tensor) -> Any:
            before = own.h
            own.h = torch.tanh(x) if before is None else torch.tanh(before + x)
            return own.h * 2

        f = wrap(body)

        def step(n: int) -> Any:
            if n in (25, 45):
                own.h = {
                    "shape": torch.zeros(3, 4), "dtype": torch.zeros(4, dtype=torch.float64), "none": None,
                    "strided": torch.zeros(4, 2)[:, 0], "needs gradients": torch.zeros(4, requires_grad=True),
                }[other]  # fmt: skip
            if n == 50:
                own.h = torch.zeros(4)
            return f(torch.randn(4)), own.h

        return step

    assert twins(program) > CALLS // 3


def test_it_is_an_input_after_a_few_calls() -> None:
    """On an engine that reads arguments where they lie; else, or where it is large, it is bound in each call."""

    def made(own: Any) -> Callable[[Tensor], Any]:
        return capture(lambda x: recurrent(own, x))

    for size, moves in ((4, 10), (1 << 19, 30)):
        own = Plain()
        own.h, x = torch.zeros(size, device=DEVICE), torch.ones(size, device=DEVICE)
        f = made(own)
        for _ in range(40):
            f(x)
        now = recordings(f)
        assert not now.eager_calls
        assert now.replays > 30
        if DEVICE.type == "cpu":
            assert (now.rebinds < moves) == (size == 4)
