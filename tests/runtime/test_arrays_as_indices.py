"""NumPy arrays as indices of tensors, and beside numbers that the host reads, as in the updates of policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.runtime.test_arrays_as_inputs import CALLS, _every_body_pays, drawn, pytestmark, twins  # noqa: F401
from tests.runtime.test_decisions import Step, Wrap
from tests.support.device import DEVICE

Array = Any


def put(x: Tensor, at: Array) -> Tensor:
    y = x.clone()
    y[at] = 1.0
    y[at[:2], 0] -= 2
    return y


USES: dict[str, Callable[[Tensor, Array], Any]] = {
    "index": lambda x, at: x[at] * 2,
    "of a parameter": lambda x, at: nn.Parameter(x)[at] * 2,
    "part of one": lambda x, at: x[at[1:4]] + x[at[:3]],
    "in two dimensions": lambda x, at: x[at.reshape(2, -1)] + x[at.reshape(-1, 2), 0].sum(),
    "of 32 bits": lambda x, at: x[at.astype("int32")] * 2,
    "second of two": lambda x, at: x[:, at % 3],
    "two": lambda x, at: (x @ x.T)[at, at] + x[at, 0],
    "in a list": lambda x, at: (x @ x.T)[[at, at]],
    "put": put,
    "as a tensor, too": lambda x, at: x[at] + torch.from_numpy(at).to(DEVICE)[:, None],
    "sorted": lambda x, at: x[np.sort(at)],
    "by one number": lambda x, at: x[at[0]] * 2,
    "by one number, as an array": lambda x, at: x[at[0, ...]] * 2,
    "in a loop": lambda x, at: torch.stack([x[one] for one in at]),
    "where it is large": lambda x, at: x[at > 4].sum(),
    "after a look": lambda x, at: x[at] if at[0] > 4 else x[at] * 2,
}
REPLAYED = frozenset(["index", "of a parameter", "part of one", "two", "put", "as a tensor, too"])


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.one_in(5)
@pytest.mark.parametrize("size", [6, 40], ids=["few", "many"])
@pytest.mark.parametrize("name", USES)
def test_index(name: str, size: int) -> None:
    """Of fewer than 32 members torch looks whether they are indices themselves, so it asks for each."""

    def program(wrap: Wrap) -> Step:
        f = wrap(USES[name])
        return lambda n: f(torch.randn(50, 3, device=DEVICE), np.random.RandomState(n).permutation(50)[:size])

    replays = twins(program, CALLS)
    assert replays > CALLS // 2 or name not in REPLAYED


def test_mask() -> None:
    def program(wrap: Wrap) -> Step:
        f = wrap(lambda x, mask: x[mask].sum())
        return lambda n: f(torch.randn(6, device=DEVICE), drawn(n // 3, 6, kind="bool"))

    twins(program, CALLS)


def appended(x: Array) -> Any:
    values = []
    y = torch.as_tensor(x) * 2
    values.append(y.mean().item())
    values += [y.max().item() * 2]
    return values, y


def compared(x: Array) -> Any:
    y = torch.as_tensor(x) * 2
    values = [number := y.mean().item()]
    return (values, y) if number > 0 else (values, y * x[0])


def computed(x: Array) -> Any:
    y = torch.as_tensor(x) * 2
    return y * y.mean().item(), [y.sum().item()]


@pytest.mark.parametrize("body", [appended, compared, computed])
def test_numbers_that_are_read(body: Any) -> None:
    """What comes of them is found out after arrays are inputs, and before a recording is made."""

    def program(wrap: Wrap) -> Step:
        f = wrap(body)
        return lambda n: f(drawn(n, 5))

    assert twins(program, CALLS) > CALLS // 2 or body is not appended


@pytest.mark.parametrize("size", [8, 40], ids=["few", "many"])
def test_update_of_a_policy_by_parts_of_a_batch(size: int) -> None:
    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        net = nn.Linear(4, 2).to(DEVICE)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

        @wrap
        def update(x: Tensor, advantages: Tensor, at: Array) -> Any:
            clipped = []
            ratio = net(x[at]).exp()
            with torch.no_grad():
                clipped += [((ratio - 1).abs() > 0.2).float().mean().item()]
            loss = (ratio * advantages[at][:, None]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach(), clipped

        def step(n: int) -> Any:
            at = np.random.RandomState(n).permutation(50)[:size]
            with torch.enable_grad():
                found = update(torch.randn(50, 4, device=DEVICE), torch.randn(50, device=DEVICE), at)
            return found, net.state_dict(), optimizer.state_dict()

        return step

    assert twins(program, CALLS) > CALLS // 2
