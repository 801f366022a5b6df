"""Deques of tensors, modules and objects: their members have places, as those of lists have."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.runtime.test_decisions import CALLS, Step, Wrap, _every_body_pays, pytestmark, twins  # noqa: F401

Body = Callable[[Any, Tensor], Any]


def stacked(window: Any, x: Tensor) -> Any:
    window.append(x.relu())
    return torch.stack(list(window)).mean(0)


def kept_beside(window: Any, x: Tensor) -> Any:
    y = x * 2
    window.append((x.sum(), y))
    return y


def taken_and_put(window: Any, x: Tensor) -> Any:
    window.append(window.popleft() * 0.5 + x)
    return window[0] + window[-1]


def turned(window: Any, x: Tensor) -> Any:
    window[0].add_(x)
    window.rotate(1)
    return window[0] * 2


def set_by_index(window: Any, x: Tensor) -> Any:
    window[1] = window[0] * 0.5 + x
    return window[1] + 1


def put_at_the_begin(window: Any, x: Tensor) -> Any:
    window.extendleft([x * 2, x + 1])
    return torch.stack(list(window)).sum(0)


def of_objects(window: Any, x: Tensor) -> Any:
    window.append({"v": x * 3})
    return sum(each["v"] for each in window)


def cleared_when_full(window: Any, x: Tensor) -> Any:
    window.append(x * 2)
    y = torch.stack(list(window)).sum(0)
    if len(window) == 3:
        window.clear()
    return y


def turned_round(window: Any, x: Tensor) -> Any:
    window.reverse()
    return window[0] * 2 + window[1] * x


def counted(window: Any, x: Tensor) -> Any:
    window.append(x + 1)
    return x * len(window)


def compared(window: Any, x: Tensor) -> Any:
    window.append(x.sin())
    return window[-1] + 1 if window[0] is window[-1] else window[0] * 2


def of_numbers_first(window: Any, x: Tensor) -> Any:
    """Numbers have no places, tensors have: the keys of both are equal."""
    if type(window[0]) is int:
        window.clear()
        window.extend([x * 2, x * 3])
    else:
        window.clear()
        window.extend([0, 1])
    return x + 1


def two_zeros() -> list[Any]:
    return [torch.zeros(4), torch.ones(4)]


BODIES: dict[Body, tuple[Callable[[], list[Any]], int | None]] = {
    stacked: (list, 4),
    kept_beside: (list, 10),
    taken_and_put: (two_zeros, 2),
    turned: (two_zeros, None),
    set_by_index: (two_zeros, None),
    put_at_the_begin: (list, 3),
    of_objects: (list, 3),
    cleared_when_full: (list, None),
    turned_round: (two_zeros, None),
    counted: (list, 5),
    compared: (list, 3),
    of_numbers_first: (lambda: [0, 1], None),
}


def tensors_of(window: Any) -> list[Any]:
    return [list(each.values()) if type(each) is dict else each for each in window]


@pytest.mark.parametrize("way", ["in the closure", "in a dict", "in an attribute"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_a_body_does_with_a_deque(body: Body, way: str) -> None:
    def program(wrap: Wrap) -> Step:
        members, most = BODIES[body]
        window, kept, module = deque(members(), most), dict[str, Any](), nn.Module()
        kept["window"] = module.window = window  # type: ignore[assignment]
        if way == "in the closure":
            f = wrap(lambda x: body(window, x))
        elif way == "in a dict":
            f = wrap(lambda x: body(kept["window"], x))
        else:
            f = wrap(lambda x: body(module.window, x))

        def step(n: int) -> Any:
            return f(torch.randn(4)), tensors_of(window), window.maxlen

        return step

    assert twins(program) > CALLS // 2 or body in (cleared_when_full, of_numbers_first)


@pytest.mark.parametrize("change", range(6))
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_others_change_it_between_calls(body: Body, change: int) -> None:
    def program(wrap: Wrap) -> Step:
        members, most = BODIES[body]
        kept = {"window": deque(members(), most)}
        f = wrap(lambda x: body(kept["window"], x))

        def changed(window: Any) -> None:
            if change == 0:
                window.rotate(1)
            elif change == 1:
                kept["window"] = deque(window, 2)
            elif change == 2 and window:
                window.append(window[0])
            elif change == 3:
                kept["window"] = deque(members(), most)
            elif change == 4 and window:
                window.popleft()
            elif change == 5:
                window.extend(list(window)[:1])

        def step(n: int) -> Any:
            if n % 8 == 0:
                changed(kept["window"])
            return f(torch.randn(4)), tensors_of(kept["window"]), kept["window"].maxlen

        return step

    twins(program)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("members", [5, 64, 65, 1200])
def test_a_memory_that_is_full(members: int, size: int) -> None:
    """An append is one change, though each member has another place afterwards. Of very many members they are compared
    as a whole."""

    def program(wrap: Wrap) -> Step:
        memory: deque[Tensor] = deque([torch.zeros(size) for _ in range(members)], members)

        @wrap
        def f(x: Tensor) -> Tensor:
            y = x.tanh() * 2
            memory.append(y)
            return y

        return lambda n: (f(torch.randn(4)), memory[0], memory[-1], len(memory))

    assert twins(program, 16) > 8


def test_layers_in_a_deque() -> None:
    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        layers = deque([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])

        @wrap
        def f(x: Tensor) -> Tensor:
            for layer in layers:
                x = layer(x)
            return x

        def step(n: int) -> Any:
            if n % 20 == 0:
                layers.rotate(1)
            if n == 35:
                layers[0] = nn.Sigmoid()
            return f(torch.randn(3, 4))

        return step

    assert twins(program) > CALLS // 2


def test_a_body_that_raises_leaves_what_eager_leaves() -> None:
    def program(wrap: Wrap) -> Step:
        window: deque[Tensor] = deque(two_zeros(), 2)

        @wrap
        def f(x: Tensor) -> Tensor:
            window.append(x * 2)
            window[0].add_(1)
            if x.shape[0] == 3:
                raise ValueError("three")
            return window[0] + window[1]

        def step(n: int) -> Any:
            size = 3 if n % 9 == 0 else 1
            try:
                return f(torch.randn(size)), tensors_of(window)
            except ValueError:
                return tensors_of(window)

        return step

    twins(program)


@pytest.mark.parametrize("on", [None, "cpu"])
def test_training_with_a_window_of_losses(on: str | None) -> None:
    """On a default device torch looks operators up in sets, by hashes of their own."""

    def run(wrap: Wrap) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        net, losses = nn.Linear(4, 4, device=on), deque[Tensor](maxlen=3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        @wrap
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            return torch.stack(list(losses)).mean()

        with torch.enable_grad(), torch.device(on) if on else contextlib.nullcontext():
            results = [step(torch.randn(8, 4)).clone() for _ in range(40)]
        return step, [*results, *net.parameters(), *losses]

    function, mine = run(capture)
    _, eager = run(lambda function: function)
    for ours, theirs in zip(mine, eager, strict=True):
        assert torch.equal(ours, theirs)
    assert recordings(function).replays > 20
