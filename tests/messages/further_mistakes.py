"""Mistakes that people made who were not told of the list of forty, beside the programs that follow the messages."""

from __future__ import annotations

import random
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

import capture as library
from capture import capture, config, recordings, set_logs
from tests.messages.mistakes import calls, doubled, mistake, net, of_one, stepping

# ---------------------------------------------------------------------------------- how the library is called


def f(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


@mistake(lambda: calls(library.capture(f)))
def package_as_decorator() -> Any:
    return library(f)  # type: ignore[operator]


@mistake(lambda: calls(capture(f)))
def sample_arguments() -> Any:
    return capture(f, (torch.randn(4, 8),))  # type: ignore[call-overload]


@mistake(lambda: calls(capture(f)))
def block_of_capture() -> Any:
    x = torch.randn(4, 8)
    with capture():  # type: ignore[attr-defined]
        return torch.relu(x) * 2


def prepared(model: nn.Module) -> None:
    """Gives nothing, as what works in place often does."""
    model.eval()


@mistake(lambda: calls(capture(net().eval())))
def captured_nothing() -> Any:
    return capture(prepared(net()))  # type: ignore[call-overload, func-returns-value]


@mistake(lambda: stepping(lambda loss: loss.detach()))
def captured_optimizer() -> Any:
    return capture(torch.optim.SGD(net().parameters(), lr=0.1))  # type: ignore[call-overload]


class Scales:
    def __init__(self) -> None:
        self.scale = torch.ones(8)

    @property
    @capture
    def halves(self) -> Tensor:
        return torch.relu(self.scale) / 2


def property_of_captured() -> Any:
    scales = Scales()
    for _ in range(4):
        scales.halves
    getter: Any = vars(Scales)["halves"].fget
    return types.MethodType(getter, scales)


@mistake(property_of_captured)
def captured_property() -> Any:
    return capture(property(f))  # type: ignore[call-overload]


def silenced(*silence: str) -> Any:
    with config.patch(silence=silence):
        return doubled()


@mistake(lambda: silenced("CG201"))
def silenced_by_name() -> Any:
    return silenced("host-sync")


def logged(words: str) -> Any:
    set_logs(words)
    set_logs("")
    return doubled()


@mistake(lambda: logged("recordings"))
def misspelled_log() -> Any:
    return logged("recording")


@mistake(lambda: calls(capture(net())))
def forward_captured_and_model_called() -> Any:
    model = net()
    capture(model.forward)
    return recordings(calls(model))


@mistake(doubled)
def captured_in_every_call() -> Any:
    captured: Any = None
    with config.patch(drop_slow=True):  # as it is outside of tests
        for _ in range(24):

            def doubles(x: Tensor) -> Tensor:
                return torch.relu(x) * 2

            captured = capture(doubles)
            calls(captured, 1)
    return captured


def around_a_compiled_module() -> Any:
    compiled = torch.compile(net(), backend="eager")
    return of_one(lambda x: compiled(x))


@mistake(around_a_compiled_module)
def compiled_module_of_torch() -> Any:
    """Its parameters are reached through the compiler alone, as a ``Sequential`` is no module of the user's."""
    return calls(capture(torch.compile(net(), backend="eager")))


@mistake(around_a_compiled_module)
def recordings_of_a_compiled_module() -> Any:
    return recordings(calls(torch.compile(capture(net()), backend="eager")))


@mistake(lambda: calls(capture(torch.vmap(f))))
def inside_of_a_transform() -> Any:
    captured = capture(f)
    calls(torch.vmap(captured))
    return captured


# --------------------------------------------------------------------------------------------- what a body does


def scaled_by(number: Callable[[], Any]) -> Any:
    @capture
    def scaled(x: Tensor, scale: Any) -> Any:
        return torch.relu(x) * scale

    with torch.no_grad():
        for _ in range(8):
            scaled(torch.randn(4, 8), number())
    return scaled


@mistake(lambda: scaled_by(lambda: torch.tensor(random.random())))
def clock_in_the_body() -> Any:
    return of_one(lambda x: torch.relu(x) * time.perf_counter())


def seeded(*, inside: bool) -> Any:
    @capture
    def noisy(x: Tensor) -> Tensor:
        if inside:
            torch.manual_seed(1)
        return x * torch.rand(8)

    with torch.no_grad():
        for _ in range(8):
            torch.manual_seed(1)
            noisy(torch.randn(4, 8))
    return noisy


@mistake(lambda: seeded(inside=False))
def seed_in_the_body() -> Any:
    return seeded(inside=True)


@mistake(doubled)
def file_written_in_the_body() -> Any:
    with tempfile.TemporaryFile("w") as log:

        @capture
        def writes(x: Tensor) -> Tensor:
            log.write("called\n")
            return torch.relu(x) * 2

        return calls(writes)


def of_several(several: Callable[[], Any]) -> Any:
    @capture
    def total(parts: Any) -> Tensor:
        out = torch.zeros(4, 8)
        for part in parts:
            out = out + torch.relu(part)
        return out

    with torch.no_grad():
        for _ in range(8):
            total(several())
    return total


@mistake(lambda: of_several(lambda: [torch.randn(4, 8) for _ in range(3)]))
def argument_that_is_a_generator() -> Any:
    return of_several(lambda: (torch.randn(4, 8) for _ in range(3)))


@mistake(doubled)
def batches_taken_in_the_body() -> Any:
    batches: Iterator[Tensor] = iter([torch.randn(4, 8) for _ in range(12)])

    @capture
    def step() -> Tensor:
        return torch.relu(next(batches)) * 2

    with torch.no_grad():
        for _ in range(8):
            step()
    return step


@mistake(lambda: of_one(lambda x: sum(torch.relu(x) * (x.mean() > n / 10) for n in range(4))))
def loop_over_a_value() -> Any:
    @capture
    def repeated(x: Tensor) -> Tensor:
        for _ in range(int(x[0, 0].abs() * 1000)):
            x = torch.relu(x) * 2
        return x

    return calls(repeated, 24)


class Averaging(nn.Module):
    def __init__(self, *, in_a_tensor: bool) -> None:
        super().__init__()
        self.average: Any = torch.zeros(()) if in_a_tensor else 0.0

    @override
    @capture
    def forward(self, x: Tensor) -> Any:
        mean = x.mean() if isinstance(self.average, Tensor) else x.mean().item()
        self.average = 0.9 * self.average + 0.1 * mean
        return torch.relu(x) - self.average


@mistake(lambda: calls(Averaging(in_a_tensor=True)))
def average_kept_as_a_number() -> Any:
    return calls(Averaging(in_a_tensor=False), 24)


class Growing(nn.Module):
    """A cache of keys that gets one row in each call."""

    def __init__(self, *, rows: int) -> None:
        super().__init__()
        self.keys = torch.zeros(max(rows, 1), 8)
        self.in_place = rows > 0

    @override
    @capture
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        if self.in_place:
            self.keys.index_copy_(0, at, x)
        else:
            self.keys = torch.cat([self.keys, x])
        return torch.relu(self.keys).sum(0)


def grown(*, rows: int) -> Any:
    cache = Growing(rows=rows)
    with torch.no_grad():
        for index in range(24):
            cache(torch.randn(1, 8), torch.tensor([index]))
    return cache


@mistake(lambda: grown(rows=24))
def cache_that_grows() -> Any:
    return grown(rows=0)


def named(number: Callable[[int], str]) -> Any:
    @capture
    def tagged(x: Tensor, name: str) -> Tensor:
        return torch.relu(x) * len(name)

    with torch.no_grad():
        for index in range(24):
            tagged(torch.randn(4, 8), number(index))
    return tagged


@mistake(doubled)
def text_that_changes() -> Any:
    return named(lambda index: f"sample {index}")


@mistake(doubled)
def saved_in_the_body() -> Any:
    with tempfile.TemporaryDirectory() as folder:

        @capture
        def saves(x: Tensor) -> Tensor:
            y = torch.relu(x) * 2
            torch.save(y, f"{folder}/y.pt")
            return y

        return calls(saves)


class Tagged(Tensor):
    """A tensor with a class of its own."""


def of_kind(kind: type[Tensor]) -> Any:
    captured = capture(f)
    with torch.no_grad():
        for _ in range(8):
            captured(torch.randn(4, 8).as_subclass(kind))
    return captured


@mistake(lambda: of_kind(Tensor))
def subclass_of_tensor() -> Any:
    return of_kind(Tagged)


def attributed(*, inside: bool) -> Any:
    @capture(buckets={"x": {0: "pow2"}})
    def saliency(x: Tensor) -> Tensor:
        score = F.gelu(x).sum()
        if inside:
            score.backward()
            return score.detach()
        return torch.autograd.grad(score, x)[0]

    for _ in range(8):
        saliency(torch.randn(4, 8, requires_grad=True))
    return saliency


@mistake(lambda: attributed(inside=False))
def gradient_of_an_argument() -> Any:
    return attributed(inside=True)


def minimized(make: Callable[[Any], torch.optim.Optimizer], *, outside: bool) -> Any:
    """With the loss captured, or the whole step of an optimizer that asks for the loss several times."""
    model = nn.Linear(8, 1)
    optimizer = make(model.parameters())

    def loss_of(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    captured = capture(loss_of)

    def step(x: Tensor) -> None:
        optimizer.step(lambda: captured(x) if outside else loss_of(x))

    whole = capture(step)
    for _ in range(24):
        x = torch.randn(4, 8)
        if outside:
            step(x)
        else:
            whole(x)
    return captured if outside else whole


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=3)


@mistake(lambda: minimized(lbfgs, outside=True))
def optimizer_with_a_closure() -> Any:
    return minimized(lbfgs, outside=False)
