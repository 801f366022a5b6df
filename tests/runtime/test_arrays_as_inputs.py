"""NumPy arrays as arguments: where a body only makes tensors of them, their content is not in the key."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capture import capture, config, recordings
from tests.runtime import test_decisions
from tests.runtime.test_decisions import Step, Wrap
from tests.support.device import DEVICE, EXECUTES

pytestmark = [
    pytest.mark.filterwarnings("ignore::capture.CaptureWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
    pytest.mark.filterwarnings("ignore:Creating a tensor from a list"),
]
CALLS = 40
Array = Any


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False, drop_slow=False):
        yield


def told(value: Any) -> Any:
    """The value, with its arrays replaced by what can be compared."""
    if isinstance(value, np.ndarray):
        return type(value).__name__, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (list, tuple)):
        return [told(member) for member in value]
    return {name: told(member) for name, member in value.items()} if type(value) is dict else value


def twins(program: Callable[[Wrap], Step], calls: int) -> int:
    def plainly(wrap: Wrap) -> Step:
        step = program(wrap)
        return lambda n: told(step(n))

    return test_decisions.twins(plainly, calls)


def drawn(n: int, *shape: int, kind: str = "float32") -> Array:
    numbers = np.random.RandomState(n).randn(*shape) * 8
    return numbers > 0 if kind == "bool" else numbers.astype(kind)


MAKES: dict[str, Callable[[Any], Any]] = {
    "from_numpy": lambda x: torch.from_numpy(x) * 2,
    "as_tensor": lambda x: torch.as_tensor(x) * 2,
    "as_tensor of a dtype": lambda x: torch.as_tensor(x, dtype=torch.float64, device="cpu") * 2,
    "tensor": lambda x: torch.tensor(x).add_(1),
    "tensor of a dtype": lambda x: torch.tensor(x, dtype=torch.float64).add_(1),
    "Tensor": lambda x: torch.Tensor(x) * 2,
    "FloatTensor": lambda x: torch.FloatTensor(x).unsqueeze(0) * 2,
    "reshaped": lambda x: torch.FloatTensor(x.reshape(1, -1)) * 2,
    "with another dimension": lambda x: torch.from_numpy(x[None]) * 2,
    "a row": lambda x: torch.from_numpy(x[1]) * 2,
    "some rows": lambda x: torch.from_numpy(x[1:]) * 2,
    "twice": lambda x: torch.from_numpy(x) + torch.as_tensor(x[0], device="cpu"),
    "by its shape": lambda x: torch.from_numpy(x) * len(x) + x.shape[1] * x.ndim,
    "if it is one": lambda x: (torch.from_numpy(x) if isinstance(x, np.ndarray) else x) * 2,
    "of its dtype": lambda x: torch.from_numpy(x) * 2 if x.dtype == np.float32 else torch.from_numpy(x),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MAKES)
def test_content_is_no_part_of_the_key(name: str) -> None:
    def program(wrap: Wrap) -> Step:
        f = wrap(MAKES[name])
        return lambda n: f(drawn(n, 3, 4))

    assert twins(program, CALLS) > CALLS // 2


@pytest.mark.parametrize("name", ["from_numpy", "tensor of a dtype", "a row"])
def test_under_a_default_device(name: str) -> None:
    """Its mode hands each call on to the function that has torch's name, which a watched run replaces."""

    def program(wrap: Wrap) -> Step:
        f = wrap(MAKES[name])

        def step(n: int) -> Any:
            with torch.device("cpu"):
                return f(drawn(n, 3, 4))

        return step

    assert twins(program, CALLS) > CALLS // 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["float64", "int64", "int32", "uint8", "bool"])
def test_kinds_of_numbers(kind: str) -> None:
    def program(wrap: Wrap) -> Step:
        f = wrap(lambda x: torch.from_numpy(x).double() * 2)
        return lambda n: f(drawn(n, 3, 4, kind=kind))

    assert twins(program, CALLS) > CALLS // 2


def test_arrays_in_containers_by_name_and_beside_tensors() -> None:
    def program(wrap: Wrap) -> Step:
        @wrap
        def f(batch: Any, several: Any, *, scale: Tensor, bias: Any) -> Any:
            x = torch.cat([torch.as_tensor(batch["a"]), torch.as_tensor(batch["b"])], 1)
            return {
                "y": x * scale + torch.from_numpy(bias).to(DEVICE),
                "z": [torch.from_numpy(array).to(DEVICE).sum() for array in several],
            }

        return lambda n: f(
            {"a": drawn(n, 2, 3), "b": drawn(n + 1, 2, 1)}, [drawn(n, 2), drawn(n, 3)], scale=torch.randn(4),
            bias=drawn(n, 4),
        )  # fmt: skip

    assert twins(program, CALLS) > CALLS // 2


def test_whole_update_of_arrays() -> None:
    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

        @wrap
        def update(x: Array, y: Array) -> float:
            loss = F.mse_loss(net(torch.from_numpy(x).to(DEVICE)), torch.as_tensor(y, dtype=torch.float32))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        def step(n: int) -> Any:
            with torch.enable_grad():
                loss = update(drawn(n, 8, 4), drawn(n, 8, 1, kind="float64"))
            return loss, net.state_dict(), optimizer.state_dict()

        return step

    assert twins(program, CALLS) > CALLS // 2


def test_array_is_written_through_the_tensor() -> None:
    def program(wrap: Wrap) -> Step:
        @wrap
        def f(x: Array) -> Tensor:
            t = torch.from_numpy(x)
            t.mul_(0.5)
            t[0] += 1
            return t.sum()

        def step(n: int) -> Any:
            x = drawn(n, 5)
            return f(x), x.copy()

        return step

    assert twins(program, CALLS) > CALLS // 2


def test_result_that_lies_on_the_array_sees_later_writes() -> None:
    def program(wrap: Wrap) -> Step:
        kept: list[Any] = []
        f = wrap(lambda x: (torch.from_numpy(x), torch.from_numpy(x)[1:], torch.from_numpy(x) + 1))

        def step(n: int) -> Any:
            x = drawn(n, 4)
            kept.append(f(x))
            x[:] = n
            return [[tensor.clone() for tensor in results] for results in kept[-3:]]

        return step

    twins(program, CALLS)


def test_one_array_that_its_owner_writes_between_calls() -> None:
    def program(wrap: Wrap) -> Step:
        x = drawn(0, 3, 4)
        f = wrap(lambda x: torch.tanh(torch.from_numpy(x)))

        def step(n: int) -> Any:
            x[n % 3] += 1
            return f(x)

        return step

    assert twins(program, CALLS) > CALLS // 2


def other_forms(n: int) -> Any:
    x = drawn(n, 4, 4)
    read_only = drawn(n, 4, 4)
    read_only.flags.writeable = False
    forms = [x, x.T, x[::2], x[::-1], x.astype(">f4"), torch.from_numpy(x), x.astype("float16"), read_only, x[:0], x[0],
             x.view(np.recarray), np.asfortranarray(x), x, x.astype(object), None, np.ma.masked_array(x)]  # fmt: skip
    return forms[n // 2 % len(forms)]


def test_other_forms_come_in_between() -> None:
    def program(wrap: Wrap) -> Step:
        f = wrap(lambda x: torch.from_numpy(x) * 2 if isinstance(x, np.ndarray) and x.dtype == "<f4" else 0)

        def step(n: int) -> Any:
            try:
                return f(other_forms(n))
            except ValueError as error:
                return str(error)

        return step

    twins(program, 70)


def test_one_array_in_two_places_and_arrays_that_overlap() -> None:
    def program(wrap: Wrap) -> Step:
        @wrap
        def f(x: Array, y: Array) -> Tensor:
            t = torch.from_numpy(x).add_(1)
            return t[:2] + torch.from_numpy(y)[:2]

        def step(n: int) -> Any:
            x = drawn(n, 6)
            y = [drawn(n + 1, 6), x, x[1:]][n // 5 % 3]
            return f(x, y), x.copy(), y.copy()

        return step

    twins(program, 60)


def test_array_on_which_a_tensor_of_the_body_lies() -> None:
    def program(wrap: Wrap) -> Step:
        x = drawn(0, 4)
        held = torch.from_numpy(x)

        @wrap
        def f(given: Array) -> Tensor:
            held.add_(1)
            return torch.from_numpy(given) * 2 + held

        return lambda n: (f(x if n % 3 else drawn(n, 4)), x.copy())

    twins(program, 60)


def test_checks_of_a_distribution() -> None:
    """An array with NaN comes after it, of which the check raises. torch turns the checks off where it compiles."""

    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        mean = nn.Linear(4, 2)

        @wrap
        def act(x: Array) -> Any:
            with torch.no_grad():
                found = mean(torch.as_tensor(x)[None])
                normal = torch.distributions.Normal(found, found.exp(), validate_args=True)
                action = normal.sample()
            return action.cpu().numpy()[0], normal.log_prob(action)

        def step(n: int) -> Any:
            x = drawn(n, 4)
            x[0] = math.nan if n in (20, 25) else x[0]
            return act(x)

        return step

    assert twins(program, CALLS) > CALLS // 2 or not EXECUTES


@pytest.mark.parametrize("use", ["tensors", "one branch reads"])
def test_branches_by_values_of_tensors(use: str) -> None:
    """What an array is for is looked at in each of them."""

    def program(wrap: Wrap) -> Step:
        @wrap
        def f(x: Array) -> Tensor:
            y = torch.from_numpy(x) * 2
            if torch.rand(1) > 0.6:
                return y * float(x[1]) if use != "tensors" else y * torch.from_numpy(x)
            return torch.relu(y)

        return lambda n: f(drawn(n, 4))

    assert twins(program, CALLS) > CALLS // 4 or not EXECUTES


# ------------------------------------------------------------------------------------------- where more comes of arrays


def reads(state: dict[str, Any]) -> dict[str, Callable[[Any], Any]]:
    def keep(x: Array) -> Any:
        state["last"] = x
        return torch.from_numpy(x) * 2

    def append(x: Array) -> Any:
        state.setdefault("all", []).append(x[1:])
        return torch.from_numpy(x) * 2

    def write(x: Array) -> Any:
        x[0] += 1
        return torch.from_numpy(x) * 2

    return {
        "compared": lambda x: torch.from_numpy(x) * (2 if x[0] > 0 else 3),
        "summed": lambda x: torch.from_numpy(x) * float(x.sum()),
        "computed": lambda x: torch.from_numpy((x - 1) / 2),
        "computed in place": lambda x: torch.from_numpy(np.add(x, 1, out=x)),
        "converted": lambda x: torch.from_numpy(x.astype(np.float64)),
        "copied": lambda x: torch.from_numpy(x.copy()),
        "by a function": lambda x: torch.from_numpy(np.clip(x, -1, 1)),
        "stacked": lambda x: torch.from_numpy(np.stack([x, x])),
        "asarray": lambda x: torch.from_numpy(x) * (2 if np.asarray(x)[0] > 0 else 3),
        "memoryview": lambda x: torch.from_numpy(x) * (2 if memoryview(x)[0] > 0 else 3),
        "bytes": lambda x: torch.from_numpy(x) * (2 if bytes(x)[3] > 100 else 3),
        "list": lambda x: torch.tensor(list(x)),
        "tolist": lambda x: torch.tensor(x.tolist()),
        "numbers": lambda x: torch.tensor([float(number) for number in x]),
        "in a list": lambda x: torch.FloatTensor([x, x]),
        "maximum": lambda x: torch.from_numpy(x)[int(np.argmax(x))],
        "any": lambda x: torch.from_numpy(x) if (x > 5).any() else torch.from_numpy(x) * 2,
        "text": lambda x: (torch.from_numpy(x) * 2, str(x)),
        "equal": lambda x: torch.from_numpy(x) * (1 if np.array_equal(x, x) and x[2] > 0 else 2),
        "index": lambda x: torch.arange(10.0)[np.abs(x).astype(np.int64) % 10],
        "returned": lambda x: (torch.from_numpy(x) * 2, x),
        "part returned": lambda x: (torch.from_numpy(x) * 2, x[1:]),
        "kept": keep,
        "appended": append,
        "written": write,
        "unbound": lambda x: torch.from_numpy(x) * float(np.ndarray.sum(x)),
    }


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", reads({}))
def test_content_that_python_reads_is_never_taken_for_another(name: str) -> None:
    def program(wrap: Wrap) -> Step:
        own = drawn(3, 4)
        state: dict[str, Any] = {"own": own}
        f = wrap(reads(state)[name])

        def step(n: int) -> Any:
            x = own if n % 7 == 0 else drawn(n, 4)
            return f(x), x.copy(), [array.copy() for array in state.get("all", [])], state.get("last") is x

        return step

    twins(program, CALLS)


def test_value_of_a_tensor_after_which_an_array_is_read() -> None:
    def program(wrap: Wrap) -> Step:
        @wrap
        def f(x: Array) -> Tensor:
            y = torch.from_numpy(x) * 2
            return y * float(x[1]) if y[0] > 100 else y

        def step(n: int) -> Any:
            x = drawn(n, 4)
            x[0] = 1000 if n > 12 and n % 3 else 0
            return f(x)

        return step

    twins(program, 50)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use", ["read", "kept", "read on a guard"])
def test_state_after_which_arrays_are_read(use: str) -> None:
    def program(wrap: Wrap) -> Step:
        mode, kept, held = {"use": ""}, dict[str, Any](), SimpleNamespace(use="")

        @wrap
        def f(x: Array) -> Tensor:
            y = torch.from_numpy(x) * 2
            if mode["use"] == "read" and x[0] > 0:
                y = y + 1
            elif held.use == "read on a guard":
                y = y * float(x[0])
            elif mode["use"] == "kept":
                kept["last"] = x
            return y

        def step(n: int) -> Any:
            mode["use"] = held.use = use if 15 < n < 30 else ""
            x = drawn(n, 4)
            return f(x), kept.get("last") is x

        return step

    assert twins(program, 60) > 5


def test_array_while_another_thread_runs() -> None:
    """Whether the content matters is tried out with other content, which the other thread would see."""
    is_over, seen = threading.Event(), set[float]()
    x = np.full(4, 2.0, np.float32)

    def look() -> None:
        while not is_over.is_set():
            seen.add(float(x[0]))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        f = capture(lambda x: torch.from_numpy(x) * 2)
        for n in range(20):
            x[1] = n
            assert torch.equal(f(x), torch.from_numpy(x) * 2)
    finally:
        is_over.set()
        thread.join()
    assert seen == {2.0}


def test_counter_and_array_together() -> None:
    def program(wrap: Wrap) -> Step:
        own = {"n": 0}

        @wrap
        def f(x: Array) -> Tensor:
            own["n"] += 1
            y = torch.from_numpy(x) * 2
            return y + 1 if own["n"] % 4 == 0 else y

        return lambda n: (f(drawn(n, 4)), dict(own))

    twins(program, 60)


def test_body_gets_the_callers_own_array_where_it_runs_eagerly() -> None:
    seen: list[Any] = []

    @capture
    def f(x: Array) -> Tensor:
        if mode:
            seen.append(x)
        return torch.from_numpy(x) * 2

    mode: list[int] = []
    for n in range(12):
        f(drawn(n, 4))
    assert recordings(f).replays > 3
    mode.append(1)
    for n in range(4):
        x = drawn(n, 4)
        f(x)
        assert seen[-1] is x


def test_calls_in_which_bodies_are_timed() -> None:
    with config.patch(drop_slow=True):
        f = capture(lambda x: torch.from_numpy(x) * 2)
        for n in range(60):
            x = drawn(n, 4)
            assert torch.equal(f(x), torch.from_numpy(x) * 2)


def test_array_where_calls_with_tensors_are_timed() -> None:
    with config.patch(drop_slow=True):
        f = capture(lambda x: torch.as_tensor(x, device="cpu") + 1)
        for n in range(80):
            x = drawn(n, 4)
            given = x if n > 10 and n % 3 == 0 else torch.from_numpy(x)
            assert torch.equal(f(given), torch.from_numpy(x) + 1)
