"""NumPy arrays and other values that are written in place: no replay uses what they held before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capture import CaptureWarning, capture, config, recordings
from capture.key.numpy_arrays import MOST_BYTES
from capture.tree import thread_trees
from tests.support.device import DEVICE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False):
        yield


MAKERS: dict[str, Callable[[Any], Tensor]] = {
    "from_numpy": torch.from_numpy, "tensor": torch.tensor, "as_tensor": torch.as_tensor, "asarray": torch.asarray,
    "on the device": lambda array: torch.tensor(array, device=DEVICE),
}  # fmt: skip


class Policy:
    """Holds an observation that is written anew in each step, as environments for reinforcement learning do."""

    def __init__(self) -> None:
        self.observation = np.ones(4, dtype=np.float32)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("where", ["argument", "closure", "deep"])
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_tensors_made_of_arrays(make: str, where: str) -> None:
    policy, x = Policy(), torch.zeros(4, device=DEVICE)
    array, helper = policy.observation, {"a": {"b": [policy]}}

    def body(x: Tensor, given: Any = None) -> Tensor:
        source = given if where == "argument" else array if where == "closure" else helper["a"]["b"][0].observation
        return x + MAKERS[make](source).to(x.device) * 2

    captured = capture(body)
    for step in range(8):
        array[:] = step if step > 4 else 1
        given = (array,) if where == "argument" else ()
        assert torch.equal(captured(x, *given), body(x, *given)), step


def test_the_finding_names_the_line_and_a_way_out() -> None:
    array = np.ones(3, dtype=np.float32)
    captured = capture(lambda x: x + torch.from_numpy(array).add_(1).to(x.device))
    with pytest.warns(CaptureWarning, match="CG202.*array") as caught:
        captured(torch.zeros(3, device=DEVICE))
    assert "torch.from_numpy(array) as an argument" in str(caught[0].message)


def test_a_tensor_on_an_array_is_an_argument_like_any() -> None:
    array = np.ones(3, dtype=np.float32)
    captured = capture(lambda x: x * 2)
    for step in range(6):
        array[:] = step
        assert captured(torch.from_numpy(array)).tolist() == [2.0 * step] * 3
    assert recordings(captured).replays >= 3


VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any, int], object]]] = {
    "array": (lambda: np.ones(5), lambda one: float(one[0]), lambda one, step: one.__setitem__(0, step)),
    "bytearray": (lambda: bytearray(5), lambda one: float(one[0]), lambda one, step: one.__setitem__(0, step)),
    "set": (lambda: {1}, lambda one: float(len(one)), lambda one, step: one.add(step)),
    "array of arrays": (
        lambda: (np.ones(2), {"a": np.ones(3)}),
        lambda one: float(one[1]["a"][0]),
        lambda one, step: one[1]["a"].__setitem__(0, step),
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("where", ["argument", "closure"])
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_values_that_are_written_in_place(kind: str, where: str) -> None:
    make, read, write = VALUES[kind]
    held, x = make(), torch.zeros(3, device=DEVICE)

    def body(x: Tensor, given: Any) -> Tensor:
        return x + read(held if where == "closure" else given)

    captured = capture(body)
    for step in range(9):
        if step in (4, 7):
            write(held, step + 10)
        assert torch.equal(captured(x, held if where == "argument" else None), body(x, held)), step
    assert recordings(captured).replays >= 3


UNCOMPARED: dict[str, Callable[[], Any]] = {
    "large": lambda: np.ones(MOST_BYTES),
    "masked": lambda: np.ma.masked_array(np.ones(20), mask=False),
    "objects": lambda: np.ones(20).astype(object),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", UNCOMPARED)
@pytest.mark.parametrize("where", ["argument", "closure"])
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_arrays_that_are_not_compared(kind: str, where: str) -> None:
    large, x = UNCOMPARED[kind](), torch.zeros(3, device=DEVICE)

    def body(x: Tensor, given: Any) -> Tensor:
        return x + float((large if where == "closure" else given)[7])

    captured = capture(body)
    for step in range(20):
        large[7] = step // 3
        assert torch.equal(captured(x, large if where == "argument" else None), body(x, large)), step
    assert recordings(captured).replays == 0
