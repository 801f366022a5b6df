"""Tensors that a body makes of arrays that are no arguments: constants as long as nothing can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capture import capture, config, recordings
from capture.key.numpy_arrays import MOST_BYTES
from capture.tree import thread_trees
from tests.support.device import DEVICE

CALLS = 10


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    with config.patch(cache=False):
        yield


class State:
    """What one of the twins keeps."""

    def __init__(self) -> None:
        self.table = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
        self.buffer = np.zeros(4, dtype=np.float32)
        self.shared = torch.ones(4, device="cpu")
        self.view = self.shared.numpy()
        self.large = np.zeros(MOST_BYTES, dtype=np.float32)
        self.kept: list[Tensor] = []


Body = Callable[[State, Tensor], Any]


def ones() -> Any:
    return np.ones(4, dtype=np.float32)


def reused(state: State, x: Tensor) -> Tensor:
    made, total = ones(), x
    for turn in range(3):
        made[:] = turn
        total = total + torch.tensor(made).to(x.device) * x
    return total


CONSTANT: dict[str, Body] = {
    "table": lambda state, x: x + torch.tensor(state.table).to(x.device),
    "offsets": lambda state, x: x + x.new_tensor(state.table),
    "grid": lambda state, x: x + torch.tensor(np.linspace(0, 1, len(x)), dtype=torch.float, device=x.device),
    "computed": lambda state, x: x + torch.from_numpy(state.table[::-1].copy() * 2).to(x.device),
    "positions": lambda state, x: x[torch.LongTensor(np.tile(np.arange(2), 2)).to(x.device)],
    "order": lambda state, x: x.index_select(0, torch.from_numpy(np.argsort(-state.table)).to(x.device)),
    "seeded": lambda state, x: x + torch.from_numpy(np.random.RandomState(3).rand(4)).to(x.device),
    "copied and given back": lambda state, x: (torch.tensor(state.table).to(x.device), x + 1),
    "copied and written": lambda state, x: torch.tensor(state.table).to(x.device).clone().mul_(x) * 2,
    "written between tensors": reused,
}


def written_meanwhile(state: State, x: Tensor) -> Tensor:
    made = ones()
    tensor = torch.from_numpy(made)
    made[:] = 5
    result = tensor.to(x.device) * x
    made[:] = 1
    return result


def written_after(state: State, x: Tensor) -> Tensor:
    made = ones()
    tensor = torch.from_numpy(made)
    result = tensor.to(x.device) * x
    made[:] = 5
    return result + tensor.to(x.device)


def follows_a_tensor(state: State, x: Tensor) -> Tensor:
    state.shared.add_(x.cpu())
    return torch.from_numpy(state.view).to(x.device) * 2


def counts(state: State, x: Tensor) -> Tensor:
    state.buffer[0] += 1
    return torch.tensor(state.buffer).to(x.device) * x


def keeps(state: State, x: Tensor) -> Tensor:
    state.kept[:] = [torch.from_numpy(state.table)]
    return state.kept[0].to(x.device) * x


def writes(state: State, x: Tensor) -> Tensor:
    return torch.from_numpy(state.table).add_(x.cpu()).to(x.device) * 1


def of_values(state: State, x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.full(4, np.sqrt(abs(x.sum().item())), dtype=np.float32)).to(x.device)


NOT_CONSTANT: dict[str, Body] = {
    "written meanwhile": written_meanwhile,
    "written after": written_after,
    "on a tensor's memory": follows_a_tensor,
    "written in each call": counts,
    "kept": keeps,
    "written by an operator": writes,
    "given back": lambda state, x: (torch.from_numpy(state.table), x + 1),
    "part given back": lambda state, x: (torch.from_numpy(state.table)[1:], x + 1),
    "of an argument": lambda state, x: torch.from_numpy(x.cpu().numpy() * 2).to(x.device) + x,
    "of its values": of_values,
    "drawn": lambda state, x: x + torch.from_numpy(np.random.rand(4)).to(x.device),
    "large": lambda state, x: x + torch.from_numpy(state.large)[:4].to(x.device),
}


def twins(body: Body) -> int:
    """The replays. Results, what lies in the table, and the state are eager's. Others write the table once."""
    eager, own = State(), State()
    captured = capture(lambda x: body(own, x))
    for turn in range(CALLS):
        if turn == CALLS - 3:
            eager.table[1] = own.table[1] = 9
        x = torch.full((4,), turn + 1.0)
        found = []
        calls: list[tuple[State, Callable[[Tensor], Any]]] = [(eager, lambda x: body(eager, x)), (own, captured)]
        for state, call in calls:
            np.random.seed(turn)
            results = call(x)
            results = results if isinstance(results, tuple) else (results,)
            begin = state.table.ctypes.data
            inside = [begin <= one.data_ptr() < begin + state.table.nbytes for one in results]
            found.append((inside, [one.tolist() for one in results]))
        assert found[0] == found[1], turn
        assert (eager.table.tolist(), eager.buffer.tolist()) == (own.table.tolist(), own.buffer.tolist())
        assert eager.shared.tolist() == own.shared.tolist()
    return recordings(captured).replays


@pytest.mark.one_in(4)
@pytest.mark.parametrize("body", CONSTANT.values(), ids=CONSTANT)
def test_arrays_that_nothing_writes_are_constants(body: Body) -> None:
    """Tables, grids and positions that NumPy makes: recorded, and recorded anew when somebody wrote the array."""
    assert twins(body) >= CALLS // 2


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("body", NOT_CONSTANT.values(), ids=NOT_CONSTANT)
def test_arrays_that_are_written_shared_or_drawn_are_none(body: Body) -> None:
    """The numbers are eager's, and tensors that are given back share the array's memory."""
    twins(body)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("make", [lambda rate: np.full(4, rate), lambda rate: np.linspace(0, rate, 4)])
def test_arrays_of_a_number_that_changes(make: Callable[[float], Any]) -> None:
    """A number that NumPy reads is no number that only operators get."""
    captured = capture(lambda x, rate: x * rate + torch.from_numpy(make(rate)).to(x.device))
    x = torch.ones(4)
    for turn in range(CALLS):
        rate = 0.1 * (turn // 3)
        assert captured(x, rate).tolist() == (x * rate + torch.from_numpy(make(rate)).to(x.device)).tolist()


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("make", [torch.tensor, torch.from_numpy])
def test_gradients_see_what_is_written_before_the_backward_pass(make: Callable[[Any], Tensor]) -> None:
    """A tensor on the array's memory that a backward pass needs holds what the array holds by then."""

    def gradients(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(1)
        layer, table, found = nn.Linear(4, 4), ones(), []
        forward = wrap(lambda x: layer(x) * make(table).to(x.device))
        for turn in range(CALLS):
            layer.zero_grad()
            result = forward(torch.full((2, 4), turn + 1.0))
            table[:] = turn
            result.sum().backward()
            table[:] = 1
            assert layer.weight.grad is not None
            found.append(layer.weight.grad.tolist())
        return found

    if make is torch.tensor or DEVICE.type == "cpu":
        assert gradients(capture) == gradients(lambda body: body)
