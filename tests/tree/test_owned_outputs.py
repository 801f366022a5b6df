"""The memory of an output never moves: what has its address reads right values for as long as with eager's output."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack
from typing_extensions import override

from capture import capture, config, mark_step_begin, recordings
from capture.tree import thread_trees
from tests.support.device import DEVICE, know_nothing_of_writes

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="NumPy reads the host's memory; see tests/gpu")
CALLS = 8


@pytest.fixture(autouse=True, params=["tape", "graph"])
def fresh(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "graph":
        know_nothing_of_writes(monkeypatch)
    thread_trees.forget_trees()
    with config.patch(cache=False, poison=request.param == "graph"):
        yield
    gc.collect()


def of(number: int, *shape: int) -> Tensor:
    return torch.full(shape or (2, 3), float(number + 1))


TAKEN: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda y: y.numpy(),
    "asarray": np.asarray,
    "numpy of a view": lambda y: y[1:].numpy(),
    "numpy of a transposed view": lambda y: y.t().numpy(),
    "numpy of another dtype": lambda y: y.view(torch.int32).numpy(),
    "memoryview": lambda y: np.asarray(y.numpy().data),
    "numpy's own view": lambda y: y.numpy()[0, 1:],
    "dlpack": lambda y: from_dlpack(y).numpy(),
    "numpy over dlpack": np.from_dlpack,
    "detach": lambda y: y.detach().numpy(),
    "a new tensor over NumPy's": lambda y: torch.from_numpy(y.numpy()),
    "storage": lambda y: torch.empty(0).set_(y.untyped_storage(), 0, y.shape, y.stride()).numpy(),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("how", TAKEN)
def test_what_has_the_memory_of_an_output_keeps_its_values(how: str, marked: bool) -> None:
    captured = capture(lambda x: torch.relu(x) * 2 + 1)
    kept, expected = [], []
    with torch.no_grad():
        for number in range(CALLS):
            if marked:
                mark_step_begin()
            kept.append(TAKEN[how](captured(of(number))))
            expected.append(TAKEN[how](torch.relu(of(number)) * 2 + 1))
            for mine, theirs in zip(kept, expected, strict=True):
                assert np.asarray(mine).tolist() == np.asarray(theirs).tolist()
    assert recordings(captured).recordings <= 2
    assert recordings(captured).replays >= CALLS - 3
    assert recordings(captured).eager_calls == 0


def test_writes_through_numpy_are_seen_by_the_tensor_and_by_no_other() -> None:
    captured = capture(lambda x: x * 2)
    kept = []
    with torch.no_grad():
        for number in range(CALLS):
            y = captured(of(number))
            array = y.numpy()
            array += number
            kept.append((y, array))
            for at, (tensor, shared) in enumerate(kept):
                assert tensor.tolist() == shared.tolist() == (of(at) * 2 + at).tolist()


def test_arrays_outlive_the_function() -> None:
    captured = capture(lambda x: x * 2)
    kept = []
    with torch.no_grad():
        kept += [captured(of(number, 1000)).numpy() for number in range(4)]
        del captured
        gc.collect()
        later = capture(lambda x: x - 1)
        for number in range(4):
            later(of(number, 1000))
    for number, array in enumerate(kept):
        assert (array == (number + 1) * 2).all()
        array += 1


def test_an_address_stays_right_as_long_as_the_tensor_is_there() -> None:
    import ctypes

    captured = capture(lambda x: x * 3)
    kept = []
    with torch.no_grad():
        for number in range(CALLS):
            y = captured(of(number, 4))
            kept.append((y, y.data_ptr()))
            for at, (tensor, address) in enumerate(kept):
                assert tensor.data_ptr() == address
                assert list((ctypes.c_float * 4).from_address(address)) == [3.0 * (at + 1)] * 4


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.last: Any = None
        self.table: dict[str, Any] = {}

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.last = torch.tanh(y.detach())
        self.table["y"] = y.detach() * 2
        return y + 1


def test_arrays_of_effects_and_of_gradients_keep_their_values() -> None:
    torch.manual_seed(0)
    arrays = []
    for captures in (False, True):
        torch.manual_seed(1)
        net = Remembers()
        run = capture(net) if captures else net
        kept: list[Any] = []
        for number in range(CALLS):
            net.zero_grad()
            loss = run(of(number)).square().mean()
            loss.backward()
            assert net.linear.weight.grad is not None
            kept += [net.last.numpy(), net.table["y"].numpy(), net.linear.weight.grad.numpy()]
            kept.append(loss.detach().numpy())
        arrays.append([array.tolist() for array in kept])
    assert arrays[0] == arrays[1]


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradient_arrays_of_accumulating_blocks(accumulates: bool) -> None:
    arrays = []
    for captures in (False, True):
        torch.manual_seed(1)
        block = nn.Linear(3, 3)
        run = capture(block, gradients="accumulate" if accumulates else "autograd") if captures else block
        kept: list[Any] = []
        for number in range(CALLS):
            block.zero_grad(set_to_none=number % 3 != 2)
            run(of(number)).sum().backward()
            assert block.weight.grad is not None
            kept.append(block.weight.grad.numpy() if number % 2 else block.weight.grad.numpy().copy())
        arrays.append([array.tolist() for array in kept])
    assert arrays[0] == arrays[1]


def test_a_kept_output_costs_others_at_most_one_recording() -> None:
    functions = [capture(lambda x, k=k: torch.sin(x * k) + 1, name=f"f{k}") for k in range(5)]
    with torch.no_grad():
        for function in functions:
            for number in range(3):
                mark_step_begin()
                function(of(number))
        mark_step_begin()
        kept = [functions[0](of(7)).numpy()]
        for number in range(CALLS):
            for k, function in enumerate(functions):
                mark_step_begin()
                assert torch.equal(function(of(number)), torch.sin(of(number) * k) + 1)
    assert kept[0].tolist() == (torch.sin(of(7) * 0) + 1).tolist()
    assert all(recordings(function).recordings <= 2 for function in functions)
    assert sum(recordings(function).eager_calls for function in functions) == 0


def test_a_recurrence_costs_at_most_one_recording() -> None:
    step = capture(lambda h, x: torch.tanh(h + x))
    with torch.no_grad():
        h = expected = of(0)
        states = []
        for number in range(50):
            h, expected = step(h, of(number)), torch.tanh(expected + of(number))
            states.append((h.numpy(), expected.numpy()))
    assert all((mine == theirs).all() for mine, theirs in states)
    assert recordings(step).recordings <= 3


def test_many_kept_arrays_take_their_own_memory_alone() -> None:
    captured = capture(lambda x: x * 2)
    with torch.no_grad():
        kept = [captured(of(number % 7, 64)).numpy() for number in range(2000)]
    assert all((array == (number % 7 + 1) * 2).all() for number, array in enumerate(kept))
    assert recordings(captured).pool_bytes < 4096
    assert len({array.ctypes.data for array in kept}) == len(kept)


def test_outputs_that_die_in_time_cost_nothing() -> None:
    captured = capture(lambda x: torch.relu(x) * 2)
    with torch.no_grad():
        at = {captured(of(number)).data_ptr() for number in range(CALLS)}
    assert recordings(captured).recordings == 1
    assert recordings(captured).kept_outputs == 0
    assert len(at) <= 2  # the watched run's, and the pool's


def test_kept_outputs_of_shapes_that_come_and_go() -> None:
    captured = capture(lambda x: torch.cumsum(x, 0) + 1, max_recordings=64)
    kept = []
    with torch.no_grad():
        for number in range(120):
            x = of(number, number % 12 + 1)
            kept.append((captured(x).numpy(), (torch.cumsum(x, 0) + 1).numpy()))
    assert all((mine == theirs).all() for mine, theirs in kept)
    assert recordings(captured).replays >= 80


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_owned_outputs_are_as_eagers(mode: Callable[[], Any]) -> None:
    """Flags, layout, version counters shared by views, and what is on one storage."""

    def body(x: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2).t()
        return y, y[1:], x.to(torch.complex64).conj(), x.sum(), (x + 1).to(torch.bfloat16)

    captured, kept = capture(body), []
    with mode():
        for number in range(CALLS):
            mine, theirs = captured(of(number)), body(of(number))
            kept.append((mine, theirs))
            for output, expected in zip(mine, theirs, strict=True):
                assert (
                    output.stride(),
                    output.dtype,
                    output.is_conj(),
                    output.is_inference(),
                    output.requires_grad,
                ) == (
                    (
                        expected.stride(),
                        expected.dtype,
                        expected.is_conj(),
                        expected.is_inference(),
                        expected.requires_grad,
                    )
                )
            assert mine[0].untyped_storage().data_ptr() == mine[1].untyped_storage().data_ptr()
            mine[1].add_(1)
            theirs[1].add_(1)
        for mine, theirs in kept:
            assert all(torch.equal(output, expected) for output, expected in zip(mine, theirs, strict=True))


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, held: Any) -> None:
        self.me, self.held = self, held


@pytest.mark.one_in(2)
def test_memory_that_becomes_free_while_a_recording_is_made_is_no_longer_known_as_anothers() -> None:
    """Memory that was in use when a recording began may belong to the recording by its end."""

    def collecting(x: Tensor) -> Tensor:
        a = x + 1
        gc.collect()
        b = a * 3
        return (b + a - 1) * 2 - 4

    first, second = capture(lambda x: x * 2), capture(collecting)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            first(of(0))
            garbage = Cycle(first(of(1)))
            second(of(2))
            del garbage
            second(of(3))  # recorded, with the output above in the pool until it is collected
            kept = first(of(4))  # lies where that one did
            first(of(5))
            for number in range(CALLS):
                assert torch.equal(second(of(number)), collecting(of(number)))
                assert torch.equal(kept, of(4) * 2)
    finally:
        gc.enable()
    assert recordings(second).replays >= CALLS - 1
