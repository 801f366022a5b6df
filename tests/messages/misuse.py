"""Mistakes in options and in the use of the functions of this library, beside what the message says to write."""

from __future__ import annotations

import functools
import pickle
import threading
from typing import Any

import torch
from torch import Tensor, nn

from capture import capture, explain, recordings, warmup
from tests.messages.mistakes import calls, mistake, net, of_one


def f(x: Tensor, cache: Tensor | None = None) -> Tensor:
    return torch.relu(x) * 2


@mistake(lambda: calls(capture(f)))
def mode_of_torch_compile() -> Any:
    return capture(f, mode="reduce-overhead")  # type: ignore[call-overload]


@mistake(lambda: calls(capture(f, fallback="error")))
def fullgraph_of_torch_compile() -> Any:
    return capture(f, fullgraph=True)  # type: ignore[call-overload]


@mistake(lambda: calls(capture(f, static=["cache"])))
def misspelled_static_name() -> Any:
    return capture(f, static=["cahce"])


@mistake(lambda: calls(capture(f, static=["cache"])))
def static_that_is_a_text() -> Any:
    return capture(f, static="cache")


@mistake(lambda: calls(capture(f, static=["cache"])))
def options_without_names() -> Any:
    return capture(["cache"])  # type: ignore[call-overload]


@mistake(lambda: calls(capture(f, max_recordings=8)))
def misspelled_option() -> Any:
    return capture(f, max_recording=8)  # type: ignore[call-overload]


@mistake(lambda: calls(capture(f)))
def captured_result() -> Any:
    return capture(f(torch.randn(4, 8)))  # type: ignore[call-overload]


@mistake(lambda: calls(capture(f)))
def captured_twice() -> Any:
    return capture(capture(f))


@mistake(lambda: calls(capture(nn.Linear(8, 8))))
def captured_class() -> Any:
    return capture(nn.Linear)


def warmed_up() -> Any:
    captured = capture(f)
    with torch.no_grad():
        warmup(captured)(torch.randn(4, 8))
    return calls(captured, 3)


@mistake(warmed_up)
def warm_up_without_a_call() -> Any:
    captured = capture(f)
    warmup(captured)
    return captured


@mistake(warmed_up)
def warm_up_in_one_call() -> Any:
    return warmup(capture(f), torch.randn(4, 8))


@mistake(lambda: explain(f)(torch.randn(4, 8)).outcome)
def explain_in_one_call() -> Any:
    return explain(f, torch.randn(4, 8))


@mistake(lambda: recordings(capture(f)))
def recordings_of_what_is_not_captured() -> Any:
    return recordings(f)


@mistake(lambda: calls(capture(pickle.loads(pickle.dumps(net())))))  # noqa: S301 - a file of our own
def recordings_of_a_pickled_module() -> Any:
    return recordings(pickle.loads(pickle.dumps(calls(capture(net())))))  # noqa: S301 - a file of our own


@mistake(lambda: of_one(lambda x: torch.relu(x) * 2))
def coroutine() -> Any:
    async def answer(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    return capture(answer)


@mistake(lambda: calls(capture(net())))
def partial_of_a_captured_function() -> Any:
    captured = capture(f)
    calls(functools.partial(captured, cache=None))
    return captured


@mistake(lambda: calls(capture(net().double().float())))
def captured_before_the_model_moves() -> Any:
    model = capture(net())
    calls(model, 3)
    model.double().float()  # new memory of every parameter
    return calls(model)


class Shifted:
    """Its receiver has another name than ``self``."""

    def __init__(self) -> None:
        self.shift = torch.ones(8)

    @capture
    def moved(this, x: Tensor) -> Tensor:
        return torch.relu(x) * 2 + this.shift


@mistake(lambda: calls(capture(f)))
def receiver_with_another_name() -> Any:
    shifted = Shifted()
    calls(shifted.moved)
    return shifted.moved


@mistake(lambda: calls(capture(torch.compile(f, backend="eager"))))
def called_inside_of_torch_compile() -> Any:
    captured = capture(f)

    @torch.compile(backend="eager")
    def outer(x: Tensor) -> Tensor:
        return captured(x) + 1

    calls(outer)
    return captured


@mistake(lambda: calls(nn.DataParallel(capture(net())).module))
def data_parallel() -> Any:
    return calls(capture(nn.DataParallel(net())))


@mistake(lambda: calls(capture(f)))
def called_in_threads() -> Any:
    captured = capture(f)
    for _ in range(2):  # one after the other, as what is counted has to be the same in every run
        thread = threading.Thread(target=calls, args=(captured,))
        thread.start()
        thread.join()
    return captured
