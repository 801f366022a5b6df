"""Copies to the host of which a body only returns or keeps the result: a replay makes them as it hands out results.
Where more comes of one, the function is eager, as the host waits for the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capture import capture, config, recordings
from tests.gpu.support import DEVICE, needs_cuda, rand
from tests.runtime.test_decisions import CALLS, Step, Wrap, twins

pytestmark = [needs_cuda, pytest.mark.filterwarnings("ignore::capture.CaptureWarning")]


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False, drop_slow=False):
        yield


@dataclasses.dataclass
class Prediction:
    label: Tensor
    score: Any


class Bodies:
    """Each may change what the object has."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.total, self.buffer = torch.zeros(16, device=DEVICE), torch.zeros(16)
        self.last: Tensor | None = None

    def returned(self, x: Tensor) -> Any:
        return (x * 2).cpu()

    def by_to(self, x: Tensor) -> Any:
        return {"a": (x + 1).to("cpu"), "b": (x - 1).to(device="cpu", dtype=torch.float64), "x": x * 3}

    def as_half(self, x: Tensor) -> Any:
        return (x * 2).to("cpu", torch.bfloat16), (x * 100).to("cpu", torch.int16)

    def as_array(self, x: Tensor) -> Any:
        return (x * 2).cpu().numpy(), torch.relu(x).detach().cpu().numpy().copy()

    def kept_in_a_list(self, x: Tensor) -> Any:
        y = torch.tanh(x)
        self.seen.append(y.detach().cpu())
        return y * 2

    def arrays_in_a_list(self, x: Tensor) -> Any:
        y = torch.tanh(x)
        self.seen.append(y.cpu().numpy())
        return y * 2

    def written_afterwards(self, x: Tensor) -> Any:
        y = x * 2
        before = y.cpu()
        y.add_(1)
        self.total.add_(y)
        return before, y, self.total.cpu()

    def twice(self, x: Tensor) -> Any:
        y = (x * 2).cpu()
        return y, [y, (x * 2).cpu()]

    def an_argument(self, x: Tensor) -> Any:
        return x.cpu(), x + 1

    def strided(self, x: Tensor) -> Any:
        y = x.reshape(4, 4) * 2
        return y.t().cpu(), y[:, 1:3].cpu(), y[::2].cpu(), y[0, 0].cpu(), y[:0].cpu(), y.expand(2, 4, 4).cpu()

    def in_an_object(self, x: Tensor) -> Any:
        return Prediction(x.argmax().cpu(), x.max().cpu())

    def as_both(self, x: Tensor) -> Any:
        y = (x * 2).cpu()
        return y, y.numpy()

    def pinned(self, x: Tensor) -> Any:
        y = (x * 2).to("cpu", non_blocking=True)
        return y

    def dropped(self, x: Tensor) -> Any:
        y = x * 2
        y.cpu()
        return y + 1

    def with_draws(self, x: Tensor) -> Any:
        y = torch.dropout(x, 0.5, train=True)
        self.seen.append(y.cpu())
        return torch.rand(4, device=DEVICE).cpu(), y

    def beside_a_read(self, x: Tensor) -> Any:
        y = x * 2
        before = y.cpu()
        if y.sum() > 0:
            return before, (y + 1).cpu()
        self.seen.append((y - 1).cpu())
        return before, y

    def computed_with(self, x: Tensor) -> Any:
        y = (x * 2).cpu()
        return y + 1

    def viewed(self, x: Tensor) -> Any:
        return (x * 2).cpu()[:3]

    def branched_on(self, x: Tensor) -> Any:
        y = (x * 2).cpu()
        return x + 1 if y[0] > 0 else x - 1

    def as_numbers(self, x: Tensor) -> Any:
        return (x * 2).cpu().tolist(), x.sum().cpu().item()

    def array_computed_with(self, x: Tensor) -> Any:
        y = (x * 2).cpu().numpy()
        return float(np.sqrt(np.abs(y)).sum()), x + 1

    def back_again(self, x: Tensor) -> Any:
        return (x * 2).cpu().to(DEVICE) + 1

    def into_a_buffer(self, x: Tensor) -> Any:
        self.buffer.copy_(x * 2)
        return x + 1

    def read_in_the_next_call(self, x: Tensor) -> Any:
        total = self.last + 1 if self.last is not None else torch.zeros(16)
        self.last = (x * 2).cpu()
        return total, x + 1


GOOD = [
    "returned", "by_to", "as_half", "as_array", "kept_in_a_list", "arrays_in_a_list", "written_afterwards", "twice",
    "an_argument", "strided", "in_an_object", "pinned", "dropped", "with_draws", "beside_a_read",
]  # fmt: skip
BAD = [

    "as_both",
    "computed_with", "viewed", "branched_on", "as_numbers", "array_computed_with", "back_again", "into_a_buffer",
    "read_in_the_next_call",
]  # fmt: skip


def plain(value: Any) -> Any:
    """With tensors in place of arrays, which are compared bit by bit."""
    if isinstance(value, np.ndarray):
        return "array", value.flags.writeable, torch.from_numpy(value.copy())
    if isinstance(value, Prediction):
        return plain([value.label, value.score])
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def program_of(name: str) -> Callable[[Wrap], Step]:
    def program(wrap: Wrap) -> Step:
        bodies = Bodies()
        f = wrap(getattr(bodies, name))

        def step(n: int) -> Any:
            result = f(rand(16, seed=n) - 0.5)
            torch.cuda.synchronize()
            return plain([result, bodies.seen[-3:], len(bodies.seen), bodies.buffer])

        return step

    return program


@pytest.mark.parametrize("name", GOOD)
def test_a_copy_that_is_returned_or_kept(name: str) -> None:
    assert twins(program_of(name)) > CALLS // 2


@pytest.mark.parametrize("name", BAD)
def test_a_copy_of_which_more_comes(name: str) -> None:
    twins(program_of(name))


def test_each_call_gives_a_copy_of_its_own() -> None:
    f = capture(lambda x: (x * 2).cpu())
    xs = [rand(16, seed=n) for n in range(12)]
    results = [f(x) for x in xs]
    assert recordings(f).replays > 6
    assert all(torch.equal(result, (x * 2).cpu()) for x, result in zip(xs, results, strict=True))
    assert all(type(result) is Tensor and result.is_cpu and not result.is_pinned() for result in results)
    assert len({result.data_ptr() for result in results}) == len(results)


def test_a_whole_step_that_logs() -> None:
    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        net = nn.Linear(8, 4, device=DEVICE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        log: dict[str, list[Any]] = {"loss": [], "out": []}

        @wrap
        def step(x: Tensor, y: Tensor) -> Any:
            optimizer.zero_grad()
            out = net(x)
            loss = nn.functional.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            log["loss"].append(loss.detach().cpu())
            log["out"].append(out.detach().cpu().numpy())
            return loss.detach(), (out - y).abs().detach().cpu().numpy() + 0

        def run(n: int) -> Any:
            with torch.enable_grad():
                given = step(rand(6, 8, seed=n), rand(6, 4, seed=n + 1))
            return plain([given, log["loss"][-2:], log["out"][-1], [*net.parameters()]])

        return run

    twins(program)


def test_a_forward_pass_that_returns_logs() -> None:
    """Of a region, whose result has a graph."""

    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        net = nn.Linear(8, 4, device=DEVICE)

        @wrap
        def forward(x: Tensor) -> Any:
            out = torch.tanh(net(x))
            return out, out.detach().cpu()

        def run(n: int) -> Any:
            with torch.enable_grad():
                out, log = forward(rand(6, 8, seed=n))
                net.zero_grad()
                out.square().mean().backward()
            return out.detach(), log, [one.grad for one in net.parameters()]

        return run

    assert twins(program) > CALLS // 2


def test_evaluation_of_a_module() -> None:
    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)).to(DEVICE).eval()
        predict = wrap(lambda x: torch.softmax(net(x), -1).cpu().numpy())
        return lambda n: plain(predict(rand(3 + n % 2, 16, seed=n)))

    assert twins(program) > CALLS // 2
