"""The fast path through a call: taken where nothing changed, left where anything did."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, config, mark_step_begin, recordings, release
from capture.runtime import dispatch as _dispatch
from capture.tree import thread_trees
from tests.support.device import use_device
from tests.support.processes import run_python


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False):
        yield


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets one entry for each call that took the general way."""
    seen: list[int] = []
    whole = _dispatch.dispatch

    def dispatch(captured: Any, values: Any, now: Any) -> Any:
        seen.append(1)
        return whole(captured, values, now)

    monkeypatch.setattr(_dispatch, "dispatch", dispatch)
    return seen


def helper_a(x: Tensor) -> Tensor:
    return x * 2


def helper_b(x: Tensor) -> Tensor:
    return x * 3


current_helper: Callable[[Tensor], Tensor] = helper_a
scale: Any = 2.5


def by_globals(x: Tensor) -> Tensor:
    y: Tensor = current_helper(x) * scale
    return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)
        self.gain: Any = 3

    @override
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.drop(self.linear(x)) * self.gain
        return h if self.training else -h


class OtherNet(Net):
    @override
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x) + 1000
        return h


def test_loops_take_the_straight_way(long_ways: list[int]) -> None:
    net = capture(Net())
    add_scaled = capture(lambda x, y, n: (x + y) * n)
    xs = [torch.randn(size, 4) for size in (1, 2, 3)]
    for _ in range(4):
        for x in xs:
            mark_step_begin()
            net(add_scaled(x, x + 1, 2))
    long_ways.clear()
    for _ in range(4):
        for x in xs:
            mark_step_begin()
            net(add_scaled(x, x + 1, 2))
    assert not long_ways


def test_what_a_body_names_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(by_globals, max_recordings=32)
    x = torch.randn(3)
    for value in (2.5, 3.5, 2.5, True, 1, 1.0, 0.0, -0.0, float("nan")):
        for helper in (helper_a, helper_b):
            monkeypatch.setattr("tests.native.test_shortcut.scale", value)
            monkeypatch.setattr("tests.native.test_shortcut.current_helper", helper)
            for _ in range(4):
                mine, theirs = captured(x), by_globals(x)
                assert mine.dtype == theirs.dtype
                assert mine.numpy(force=True).tobytes() == theirs.numpy(force=True).tobytes(), (value, helper)


@pytest.mark.parametrize("change", ["gain", "eval", "class", "weight", "child eval", "hook"])
def test_a_module_may_change(change: str) -> None:
    net = Net()
    captured = capture(net)
    x = torch.randn(2, 4)
    for _ in range(4):
        captured(x)
    if change == "gain":
        net.gain = 4
    elif change == "eval":
        net.eval()
    elif change == "class":
        del net.__dict__["forward"]
        net.__class__ = OtherNet
    elif change == "weight":
        net.linear.weight = nn.Parameter(torch.ones(4, 4))
    elif change == "child eval":
        net.drop.eval()
        net.drop.p = 1.0
    else:
        net.linear.register_forward_hook(lambda *_: torch.zeros(2, 4))
    for _ in range(4):
        mine = net(x)
        with config.patch(enabled=False):
            assert torch.equal(mine, net(x))


def test_other_values_of_other_types() -> None:
    captured = capture(lambda x, n, flag: x * n if flag is not None else x - n, max_recordings=20)
    x = torch.ones(2, dtype=torch.int64)
    for n, flag in [(2, None), (2.0, None), (2, True), (True, True), (1, True), (1000, False), (1001, None)] * 3:
        for _ in range(2):
            mine = captured(x, n, flag)
            theirs = x * n if flag is not None else x - n
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs), (n, flag)


def test_arguments_that_come_to_share_memory() -> None:
    def body(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a.add_(1)
        return a + b + c

    captured = capture(body)
    for shift in (8, 8, 8, 8, 2, 0, 8, 1):
        mine, theirs = torch.arange(40.0), torch.arange(40.0)
        result = captured(mine[:4], mine[shift : shift + 4], mine[-4:])
        assert torch.equal(result, body(theirs[:4], theirs[shift : shift + 4], theirs[-4:])), shift
        assert torch.equal(mine, theirs), shift


def test_default_devices_and_modes_are_noticed() -> None:
    captured = capture(lambda x: (x.sum(), torch.ones(2)))
    x = torch.randn(4)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            for _ in range(3):
                assert [tensor.dtype for tensor in captured(x)] == [torch.float32, dtype]
        finally:
            torch.set_default_dtype(torch.float32)
    for _ in range(3):
        with torch.device(x.device):
            assert captured(x)[1].device == x.device
    with torch.device("meta"), pytest.warns(CaptureWarning, match="CG904"):
        assert [captured(x)[1].device.type for _ in range(3)] == ["meta"] * 3
    assert captured(x)[1].device == x.device


def test_threads_have_ways_of_their_own(long_ways: list[int]) -> None:
    captured = capture(lambda x: x * 2 + 1, max_recordings=20)
    wrong: list[int] = []
    turn = threading.Barrier(3)

    def work(number: int) -> None:
        use_device()
        x = torch.full((3,), float(number))
        with torch.no_grad():
            for step in range(30):
                turn.wait(20)
                if step == 20 and number == 0:
                    long_ways.clear()
                turn.wait(20)
                wrong.extend(number for _ in range(1) if not torch.equal(captured(x), x * 2 + 1))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not long_ways


def test_a_shortcut_keeps_nothing_alive() -> None:
    net = Net()
    captured = capture(lambda x: net(x))
    x = torch.randn(1, 4)
    for _ in range(5):
        captured(x)
    assert recordings(captured).replays
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("end", ["another function", "the same", "release"])
def test_outputs_that_left_the_pool_are_their_holders_alone(end: str) -> None:
    captured, unrelated = capture(lambda x: (x * 2, x + 1)), capture(lambda x: x - 1)
    x = torch.randn(4)
    for _ in range(4):
        mark_step_begin()
        captured(x)
        unrelated(x)
    mark_step_begin()
    held = captured(x)
    right = [output.clone() for output in held]
    mark_step_begin()
    if end == "release":
        release(captured)
    else:
        (unrelated if end == "another function" else captured)(x + 1)
    assert all(torch.equal(output, expected) for output, expected in zip(held, right, strict=True))
    alive = [weakref.ref(output.untyped_storage()) for output in held]
    del held
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@pytest.mark.slow
def test_probes_of_torch_do_not_depend_on_the_default_device() -> None:
    """A program may import the library when it has chosen one; the probes must not start up a GPU, or miss it."""
    printed = set()
    for device in ("cpu", "cuda"):
        code = (
            f"import torch\nwith torch.device({device!r}):\n    from capture.torch_private import capabilities\n"
            "print(capabilities.CAPABILITIES, torch.cuda.is_initialized())"
        )
        done = run_python(code)
        assert done.returncode == 0, done.stderr
        printed.add(done.stdout.strip())
    assert len(printed) == 1, printed


class InsideOther(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    @override
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x) * 2
        return h


def test_no_shortcut_is_taken_where_another_function_is_watched() -> None:
    """Dynamo's guards, which compare a call's tensors, leave out the mode that watches."""
    outer = InsideOther()
    capture(outer.inner)
    for _ in range(5):
        outer.inner(torch.randn(2, 4))
    replays = recordings(outer.inner.forward).replays
    capture(outer)
    for _ in range(5):
        x = torch.randn(2, 4)
        assert torch.equal(outer(x), Net.forward(outer.inner, x) * 2)
    assert recordings(outer.inner.forward).replays == replays
    assert (recordings(outer.forward).recordings, recordings(outer.forward).eager_calls) == (1, 0)
