"""An array that the body makes of a tensor, and only returns or keeps, is made anew of each replay's own memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capture import capture, config, mark_step_begin, recordings
from tests.segments.bodies import Program
from tests.segments.test_bodies import CALLS, fresh
from tests.support.device import use_device

__all__ = ["fresh"]
Make = Callable[[], Program]


@pytest.fixture(autouse=True)
def on_the_host(fresh: None) -> Iterator[None]:
    """Only tensors on the CPU lend their memory to arrays."""
    del fresh
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)
    use_device()


def draw(number: int) -> Tensor:
    return torch.randn((4, 4), generator=torch.Generator().manual_seed(number))


def bits(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.strides, value.tobytes()
    if isinstance(value, Tensor):
        return "tensor", value.dtype, value.requires_grad, bits(value.detach().numpy())
    if isinstance(value, dict):
        return [(key, bits(member)) for key, member in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [bits(member) for member in value]
    return bits(vars(value)) if hasattr(value, "__dict__") else (type(value), repr(value))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def program(body: Callable[..., Any], state: Any = None) -> Program:
    return body, lambda number: (draw(number),), state


def actions() -> Program:
    policy = net()

    @torch.no_grad()
    def get_action(x: Tensor) -> Any:
        return policy(x).argmax(-1).cpu().numpy()

    return program(get_action)


def array_alone() -> Program:
    return program(lambda x: torch.relu(x * 2).add(1).numpy())


def detached() -> Program:
    policy = net()
    return program(lambda x: policy(x).detach().cpu().numpy())


def with_its_tensor() -> Program:
    def body(x: Tensor) -> Any:
        y = torch.relu(x) * 2
        return y, y.numpy(), y[0].numpy(), y.sum()

    return program(body)


def same_array_twice() -> Program:
    def body(x: Tensor) -> Any:
        y = (torch.relu(x) * 2).numpy()
        return {"a": y, "b": [y]}

    return program(body)


def written_later() -> Program:
    def body(x: Tensor) -> Any:
        y = torch.relu(x) * 2
        array = y.numpy()
        y.add_(1)
        return array, y.sum()

    return program(body)


def of_a_step_with_numbers() -> Program:
    def body(x: Tensor) -> Any:
        y = torch.relu(x) * 2
        total = y.sum().item()
        return {"y": y.numpy(), "total": total, "last": y.mean()}

    return program(body)


def as_array() -> Program:
    return program(lambda x: np.asarray(torch.relu(x) * 2))


def view_of_the_argument() -> Program:
    def body(x: Tensor) -> Any:
        x.mul_(2)
        return x.t().numpy(), x.sum()

    return program(body)


def weights() -> Program:
    layer = nn.Linear(4, 2)

    def body(x: Tensor) -> Any:
        layer.weight.data.mul_(0.5)
        return layer(x).detach().numpy(), layer.weight.detach().numpy()

    return program(body, layer)


def helper_between() -> Program:
    policy = net()

    def to_numpy(tensor: Tensor) -> Any:
        return tensor.detach().cpu().numpy()

    def body(x: Tensor) -> Any:
        y = policy(x)
        return to_numpy(y), to_numpy(y.softmax(-1))

    return program(body)


def in_comprehensions() -> Program:
    def body(x: Tensor) -> Any:
        rows = [torch.relu(x) * 2, torch.tanh(x)]
        named = {"a": rows[0] + 1, "b": rows[1] - 1}
        return [row.numpy() for row in rows], {name: row.detach().numpy() for name, row in named.items()}

    return program(body)


def some_in_a_comprehension() -> Program:
    def body(x: Tensor) -> Any:
        rows = [torch.relu(x) * 2, torch.tanh(x), x[:2, 0] * 3]
        return [row.cpu().numpy() for row in rows if row.dim() == 2]

    return program(body)


def kept_of_a_comprehension() -> Program:
    log: list[Any] = []

    def body(x: Tensor) -> Tensor:
        rows = [torch.relu(x) * 2, torch.tanh(x)]
        log.append([row.numpy() for row in rows])
        return rows[0] + rows[1]

    return program(body, log)


def drawn() -> Program:
    policy = net()

    def body(x: Tensor) -> Any:
        with torch.no_grad():
            return torch.distributions.Categorical(logits=policy(x), validate_args=False).sample().numpy()

    return program(body)


def appended() -> Program:
    log: list[Any] = []

    def body(x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        log.append(y.detach().cpu().numpy())
        return y.sum()

    return program(body, log)


def appended_in_a_row() -> Program:
    log: dict[str, Any] = {"rows": deque(maxlen=3), "steps": 0}

    def body(x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        log["rows"].append((y.numpy(), y.sum().item()))
        log["steps"] += 1
        return y + 1

    return program(body, log)


def on_an_attribute() -> Program:
    held = SimpleNamespace(last=None)

    def body(x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        held.last = y.numpy()
        return y.sum()

    return program(body, held)


def kept_and_returned() -> Program:
    log: list[Any] = []

    def body(x: Tensor) -> Any:
        array = (torch.relu(x) * 2).numpy()
        log.append(array)
        return array

    return program(body, log)


def first_row() -> Program:
    return program(lambda x: (torch.relu(x) * 2).numpy()[0])


def number_of_an_array() -> Program:
    policy = net()

    @torch.no_grad()
    def act(x: Tensor) -> Any:
        chosen = policy(x).argmax(-1)
        return chosen.numpy()[0], chosen.numpy()[1].item(), chosen

    return program(act)


def flat() -> Program:
    policy = net()
    return program(lambda x: policy(x).cpu().data.numpy().flatten())


def several_parts() -> Program:
    def body(x: Tensor) -> Any:
        array = (torch.relu(x) * 2).numpy()
        row = array[1]
        first, second = (x > 9).long().numpy()[0], (x > 9).long().sum(1).numpy()
        return {
            "row": row,
            "rows": [row, array[1]],
            "all": array.squeeze(),
            "same": array.reshape(2, -1).astype("int64"),
            "numbers": (first, second[0].item(), second[1].item()),
            "given": x.numpy()[0].copy(),
        }

    return program(body)


def part_by_a_helper() -> Program:
    policy = net()

    def infer(x: Tensor) -> Any:
        return policy(x).detach().numpy()

    def body(x: Tensor) -> Any:
        action = infer(x)[0]
        return action, x.sum()

    return program(body)


REPLAYED: list[Make] = [
    first_row, number_of_an_array, flat, several_parts, part_by_a_helper,
    actions, array_alone, detached, with_its_tensor, same_array_twice, written_later, of_a_step_with_numbers, as_array,
    view_of_the_argument, weights, helper_between, drawn, appended, appended_in_a_row, on_an_attribute,
    kept_and_returned, in_comprehensions, some_in_a_comprehension, kept_of_a_comprehension,
]  # fmt: skip


def _scaled_later(body: Callable[[Tensor], Any], scale: Tensor) -> Program:
    """The body multiplies by 1 in its first eight calls, and by 3 from then on."""
    count = [0]

    def arguments(number: int) -> Any:
        count[0] += 1
        scale.fill_(1 if count[0] < 9 else 3)
        return (draw(number),)

    return body, arguments, scale


def copied_before_a_write() -> Program:
    scale = torch.ones(1)

    def body(x: Tensor) -> Any:
        y = torch.relu(x) * 2
        copy, number, view = y.numpy().flatten(), y.numpy()[0][0], y.numpy()[1]
        y.mul_(scale)  # by one at first
        return copy, number, view

    return _scaled_later(body, scale)


def copied_before_an_unseen_write() -> Program:
    scale = torch.ones(1)

    def body(x: Tensor) -> Any:
        y = torch.relu(x) * 2
        copy = y.numpy().copy()
        y.data[0].mul_(scale)
        return copy, y

    return _scaled_later(body, scale)


def sorted_in_place() -> Program:
    def body(x: Tensor) -> Any:
        array = (torch.relu(x) * 2).numpy()
        array.sort()
        return array[0]

    return program(body)


def by_keyword() -> Program:
    def body(x: Tensor) -> Any:
        array = (torch.relu(x) * 2).numpy()
        return array.reshape(-1, order="F"), array.astype(dtype="float64")

    return program(body)


def part_that_decides() -> Program:
    def body(x: Tensor) -> Any:
        row = (torch.relu(x) * 2).numpy()[0]
        return row if row[0] > 0 else row[1:]

    return program(body)


def part_by_a_number_of_the_call() -> Program:
    count = [0]

    def body(x: Tensor, n: int) -> Any:
        return (torch.relu(x) * 2).numpy()[n], (torch.relu(x) * 3).numpy().reshape(n + 1, -1)

    def arguments(number: int) -> Any:
        count[0] += 1
        return draw(number), count[0] % 2

    return body, arguments, None


def filtered() -> Program:
    def body(x: Tensor) -> Any:
        rows = [torch.relu(x) * 2, torch.tanh(x)]
        arrays = [array for array in [row.numpy() for row in rows] if array[0, 0] > 0]
        return arrays, [row.sum().item() for row in rows]

    return program(body)


def decides() -> Program:
    def body(x: Tensor) -> Any:
        array = (torch.relu(x) * 2).numpy()
        return array if array[0, 0] > 0 else x

    return program(body)


def on_a_new_object() -> Program:
    return program(lambda x: SimpleNamespace(array=(torch.relu(x) * 2).numpy()))


def in_a_local_list() -> Program:
    def body(x: Tensor) -> Any:
        rows: list[Any] = []
        rows.append((torch.relu(x) * 2).numpy())
        return rows, rows[0].sum() > 10

    return program(body)


def read_where_it_is_kept() -> Program:
    held = SimpleNamespace(last=np.zeros(1))

    def body(x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        held.last = y.numpy()
        return y * float(held.last[0, 0])

    return program(body, held)


OTHERS: list[Make] = [
    copied_before_a_write,
    copied_before_an_unseen_write,
    sorted_in_place,
    by_keyword,
    part_that_decides,
    part_by_a_number_of_the_call,
    filtered,
    decides,
    on_a_new_object,
    in_a_local_list,
    read_where_it_is_kept,
]


def run(make: Make, *, captured: bool, keep: bool, calls: int = CALLS) -> tuple[list[Any], list[Any], Any]:
    """The bits of each call's result, arguments and state; those of kept results after the last call; the function."""
    torch.manual_seed(5)
    function, arguments, state = make()
    function = capture(function) if captured else function
    seen, kept = [], []
    for number in range(calls):
        args = arguments(number)
        result = function(*args)
        seen.append((bits(result), bits(args), bits(state)))
        kept.append((result, args) if keep else None)
        del result
    return seen, [bits(member) for member in kept], function


def compared(make: Make, *, keep: bool) -> Any:
    expected, last, _ = run(make, captured=False, keep=keep)
    observed, kept, function = run(make, captured=True, keep=keep)
    for number, (theirs, ours) in enumerate(zip(expected, observed, strict=True)):
        assert theirs == ours, f"call {number}"
    assert last == kept
    return function


@pytest.mark.one_in(4)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("make", REPLAYED)
def test_arrays_are_as_eager_and_replay(make: Make, keep: bool) -> None:
    counters = recordings(compared(make, keep=keep))
    assert counters.replays >= CALLS - 6, str(counters)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", REPLAYED)
def test_arrays_are_verified(make: Make) -> None:
    with config.patch(verify="always"):
        assert recordings(compared(make, keep=True)).replays >= CALLS // 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", REPLAYED)
def test_arrays_are_as_eager_in_poisoned_memory(make: Make) -> None:
    with config.patch(poison=True):
        compared(make, keep=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("make", OTHERS)
def test_what_follows_from_an_array_is_as_eager(make: Make, keep: bool) -> None:
    compared(make, keep=keep)


def test_an_array_shares_the_memory_of_its_tensor() -> None:
    @capture
    def body(x: Tensor) -> Any:
        y = torch.relu(x) + 1
        return y, y.numpy()

    for number in range(6):
        y, array = body(draw(number))
        y.mul_(3)
        assert bits(y.numpy()) == bits(array)
        array[0] = 7
        assert y[0].eq(7).all()
    assert recordings(body).replays >= 3


def test_an_array_of_an_argument_is_on_the_callers_memory() -> None:
    @capture
    def body(x: Tensor) -> Any:
        x.add_(1).mul_(2)
        return x.numpy()

    for number in range(6):
        x = draw(number)
        array = body(x)
        x.zero_()
        assert not array.any()
    assert recordings(body).replays >= 3


def test_arrays_beside_results_with_a_graph() -> None:
    """Forward and backward are recorded apart, and the array is none of what autograd follows."""

    def losses(*, captured: bool) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def forward(x: Tensor) -> Any:
            y = model(x)
            return F.mse_loss(y, torch.zeros_like(y)), y, y.detach().numpy(), y.detach().argmax(-1).numpy()

        function, seen, kept = capture(forward) if captured else forward, [], []
        for number in range(20):
            loss, y, array, best = function(draw(number))
            optimizer.zero_grad()
            (loss + y.sum()).backward()
            optimizer.step()
            seen.append(bits([loss, y, array, best, [parameter.grad for parameter in model.parameters()]]))
            kept.append((array, best))
        return seen, bits(kept), function

    with torch.enable_grad():
        expected, expected_kept, _ = losses(captured=False)
        observed, kept, function = losses(captured=True)
    assert expected == observed
    assert expected_kept == kept
    assert recordings(function).replays >= 20


def test_array_in_a_call_that_raises() -> None:
    def make(log: list[Any]) -> Any:
        def body(x: Tensor, at: Tensor) -> Any:
            y = torch.relu(x) + 1
            log.append(y.numpy())
            return y[at].numpy()

        return body

    theirs, ours = list[Any](), list[Any]()
    eager, captured = make(theirs), capture(make(ours))
    for number in range(20):
        args = draw(number), torch.tensor([number % 4 if number % 7 else 9])
        results = []
        for function in (eager, captured):
            try:
                results.append(bits(function(*args)))
            except IndexError as error:
                results.append(str(error))
        assert results[0] == results[1]
        assert bits(theirs) == bits(ours)
    assert recordings(captured).replays >= 10


def test_threads_have_arrays_of_their_own() -> None:
    policy = net()

    @torch.no_grad()
    def get_action(x: Tensor) -> Any:
        return policy(x).softmax(-1).numpy()

    captured, wrong = capture(get_action), list[int]()

    def work(first: int) -> None:
        kept = [(draw(first + number), captured(draw(first + number))) for number in range(20)]
        wrong.extend(at for at, (x, array) in enumerate(kept) if bits(get_action(x)) != bits(array))

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_borrowed_results_have_no_arrays() -> None:
    """Nothing tells an array that its step is over, so the call runs eagerly."""

    @capture(outputs="borrow")
    def body(x: Tensor) -> Any:
        y = torch.relu(x) + 1
        return y, y.numpy()

    kept = []
    for number in range(8):
        mark_step_begin()
        kept.append((draw(number), body(draw(number))[1]))
    assert all(bits((torch.relu(x) + 1).numpy()) == bits(array) for x, array in kept)
    assert recordings(body).replays == 0
