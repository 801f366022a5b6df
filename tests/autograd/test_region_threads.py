"""One captured function trained in several threads at once: each call's tensors and gradients are its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.support.device import DEVICE
from tests.support.regions import Block, bits, inputs
from tests.support.regions import fresh as fresh

THREADS = 3

tells_that_it_waits = pytest.mark.filterwarnings("ignore:.*another thread runs:capture.CaptureWarning")
"""On a GPU a region with weights is recorded only while there is one thread; else its calls are eager, as is said."""


def in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    """Run ``work(number)`` in threads that begin together. Raises the first error."""
    gate, errors = threading.Barrier(count), list[BaseException]()

    def run(number: int) -> None:
        gate.wait()
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def chain(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x @ w) * 1.5
    return x


def several(x: Tensor, w: Tensor) -> dict[str, Any]:
    y = x @ w
    return {"a": torch.tanh(y), "b": [torch.sin(y), y.detach().sum()]}


def some(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w.t() + x) @ w


BODIES: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
    "one result": (chain, lambda y: y.square().sum()),
    "several results": (several, lambda y: y["a"].sum() * 3 + y["b"][0].square().sum()),
    "views of a weight": (some, lambda y: y.exp().mean()),
}


def compared(f: Callable[..., Any], body: Callable[..., Any], loss: Callable[[Any], Tensor], number: int) -> None:
    """Compare calls with tensors of this thread's own with eager ones: values and gradients."""
    for call in range(6):
        x = inputs(100 * number + call, 3, 8).requires_grad_()
        w = inputs(100 * number + call + 50, 8, 8).requires_grad_()
        y, z = body(x, w), f(x, w)
        right = torch.autograd.grad(loss(y), [x, w])
        grads = torch.autograd.grad(loss(z), [x, w], allow_unused=True)
        assert bits(loss(z)) == bits(loss(y))
        assert [bits(grad) for grad in grads] == [bits(grad) for grad in right]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", BODIES)
def test_a_function_that_is_first_called_in_all_threads_at_once(name: str) -> None:
    body, loss = BODIES[name]
    for _ in range(6):
        f = capture(body)
        in_threads(lambda number, f=f: compared(f, body, loss, number))  # type: ignore[misc]


@tells_that_it_waits
def test_a_module_whose_weights_all_threads_read() -> None:
    """Threads use ``autograd.grad``, so that none adds to a ``.grad`` that another reads."""
    for turn in range(4):
        torch.manual_seed(turn)
        module = Block().to(DEVICE)
        plain = type(module).forward
        parameters = list(module.parameters())
        right = {}
        for number in range(THREADS * 6):
            right[number] = [
                bits(grad) for grad in torch.autograd.grad(plain(module, inputs(number)).sum(), parameters)
            ]
        capture(module)

        def work(number: int, module: nn.Module = module, parameters: Any = parameters, right: Any = right) -> None:
            for call in range(6):
                at = number * 6 + call
                grads = torch.autograd.grad(module(inputs(at)).sum(), parameters, allow_unused=True)
                assert [bits(grad) for grad in grads] == right[at]

        in_threads(work)


def test_backward_passes_of_one_forward_pass_in_several_threads() -> None:
    """The graph is kept: passes through it run at once, each with gradients of its own."""
    for turn in range(6):
        f = capture(chain)
        for number in range(turn):  # not recorded, recorded, replayed
            x, w = inputs(number, 3, 8), inputs(number + 9, 8, 8).requires_grad_()
            f(x, w).sum().backward()
        x, w = inputs(1, 3, 8).requires_grad_(), inputs(2, 8, 8).requires_grad_()
        y, z = chain(x, w), f(x, w)
        grads = [inputs(30 + number, 3, 8) for number in range(THREADS)]
        right = [[bits(tensor) for tensor in torch.autograd.grad(y, [x, w], grad, retain_graph=True)] for grad in grads]

        def work(number: int, x: Any = x, w: Any = w, z: Any = z, grads: Any = grads, right: Any = right) -> None:
            for _ in range(5):
                values = torch.autograd.grad(z, [x, w], grads[number], retain_graph=True)
                assert [bits(tensor) for tensor in values] == right[number]

        in_threads(work)


def test_forward_passes_here_and_their_backward_passes_in_other_threads() -> None:
    f, equal = capture(chain), Counter[int]()
    for turn in range(4):
        calls = []
        for number in range(THREADS):
            x, w = inputs(10 * turn + number, 3, 8), inputs(number + 99, 8, 8).requires_grad_()
            right = torch.autograd.grad(chain(x, w).square().sum(), w)
            calls.append((f(x, w), w, bits(right[0])))

        def work(number: int, calls: Any = calls) -> None:
            z, w, right = calls[number]
            z.square().sum().backward()
            equal[number] += bits(w.grad) == right

        in_threads(work)
    assert equal == dict.fromkeys(range(THREADS), 4)


def test_every_thread_replays() -> None:
    f = capture(chain)

    def work(number: int) -> None:
        compared(f, chain, BODIES["one result"][1], number)

    in_threads(work)
    in_threads(work)
    assert recordings(f).eager_calls == 0


@pytest.mark.one_in(2)
@tells_that_it_waits
@pytest.mark.parametrize("hooks", [False, True])
def test_eager_code_of_another_thread_on_the_same_weights(hooks: bool) -> None:
    """The other thread sees the parameters themselves, and their hooks, while they are recorded in this one."""
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]).to(DEVICE)
    parameters, x, forward = list(net.parameters()), inputs(1, 4, 16), cast("Any", type(net)).forward

    def plain(x: Tensor) -> Tensor:
        y: Tensor = forward(net, x)
        return y

    handles = [parameter.register_hook(lambda grad: grad * 2) for parameter in parameters if hooks]
    right = [bits(grad) for grad in torch.autograd.grad(plain(x).square().sum(), parameters)]
    stop, wrong = threading.Event(), list[Any]()

    def train_eagerly() -> None:
        while not stop.is_set():
            grads = torch.autograd.grad(plain(x).square().sum(), parameters, allow_unused=True)
            wrong.extend(1 for grad, expected in zip(grads, right, strict=True) if bits(grad) != expected)

    thread = threading.Thread(target=train_eagerly, daemon=True)
    thread.start()
    try:
        for turn in range(4):
            f = capture(plain)
            for _ in range(4):
                y = inputs(turn, 2 + turn, 16)
                grads = torch.autograd.grad(f(y).square().sum(), parameters)
                again = torch.autograd.grad(plain(y).square().sum(), parameters)
                assert [bits(grad) for grad in grads] == [bits(grad) for grad in again]
            assert all(now is before for now, before in zip(net.parameters(), parameters, strict=True))
    finally:
        stop.set()
        thread.join(60)
    assert not wrong
    for handle in handles:
        handle.remove()
