"""A body that waits for another thread, which comes to a captured call meanwhile: neither waits for ever."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings, warmup
from capture.observe import capture_lock
from capture.observe.capture_lock import BusyError, locked
from capture.tree import thread_trees
from tests.support.device import DEVICE

PATIENCE = 30.0  # seconds
pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # some of the bodies run eagerly


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference, no plans on disk, no tree of another test."""
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False):
        yield


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """What each thread's work gives."""
    with ThreadPoolExecutor(count) as pool:
        return [result.result(PATIENCE * 2) for result in [pool.submit(work, number) for number in range(count)]]


def part(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2 + 1


@pytest.mark.slow
def test_two_bodies_that_meet_at_a_barrier() -> None:
    barrier = threading.Barrier(2)

    def meets(x: Tensor) -> Tensor:
        y = x * 2
        barrier.wait(PATIENCE)
        return y + 1

    f = capture(meets)

    def work(number: int) -> list[Tensor]:
        with torch.no_grad():
            return [f(torch.full((3,), float(number + k), device=DEVICE)) for k in range(5)]

    for number, results in enumerate(in_threads(work, 2)):
        assert all(
            torch.equal(y, torch.full((3,), (number + k) * 2.0 + 1, device=DEVICE)) for k, y in enumerate(results)
        )


def test_a_captured_function_in_threads_of_the_body() -> None:
    """Its first calls come while the body around it is watched, and recorded."""
    inner = capture(part, name="part")
    with ThreadPoolExecutor(2) as pool:
        f = capture(lambda x: torch.cat(list(pool.map(torch.no_grad()(inner), x.chunk(2)))), name="all parts")
        for k in range(6):
            x = torch.full((4,), float(k), device=DEVICE)
            assert torch.equal(f(x), part(x))


def test_a_body_that_waits_for_what_another_thread_puts_in_a_queue() -> None:
    made: queue.Queue[Tensor] = queue.Queue()
    stages = [capture(lambda x: made.get(timeout=PATIENCE) + x, name="takes"), capture(part, name="makes")]

    def takes(k: int) -> Tensor:
        with torch.no_grad():
            return stages[0](torch.full((3,), float(k), device=DEVICE))  # type: ignore[no-any-return]

    for k in range(6):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(takes, k)
            time.sleep(0.02)
            made.put(stages[1](torch.full((3,), 1.0 + k, device=DEVICE)).clone())
            assert torch.equal(waiting.result(PATIENCE), part(torch.full((3,), 1.0 + k, device=DEVICE)) + k)


def sets(event: threading.Event, _: Any) -> None:
    event.set()


def puts(_: Any, items: queue.Queue[int]) -> None:
    items.put(1)


@pytest.mark.parametrize("wakes", [sets, puts])
def test_a_body_that_wakes_another_thread_does_so_in_every_call(wakes: Callable[[Any, Any], None]) -> None:
    """The thread waits already when the call comes."""
    event, items, over, woken = threading.Event(), queue.Queue[int](), threading.Event(), queue.SimpleQueue[int]()

    def body(x: Tensor) -> Tensor:
        wakes(event, items)
        return x * 2 + 1

    def waits() -> None:
        while not over.is_set():
            if wakes is sets:
                event.wait()
                time.sleep(0.01)  # the event stays set until the call is over
                event.clear()
            else:
                items.get()
            woken.put(1)

    f, thread = capture(body), threading.Thread(target=waits, daemon=True)
    thread.start()
    for k in range(8):
        time.sleep(0.03)
        assert torch.equal(f(torch.full((3,), float(k), device=DEVICE)), torch.full((3,), k * 2.0 + 1, device=DEVICE))
        assert woken.get(timeout=PATIENCE / 6)
    over.set()
    event.set()
    items.put(1)
    thread.join(PATIENCE)


def test_a_holder_that_goes_on_is_waited_for() -> None:
    """And one that stands still is not: the wait ends long before ``PATIENCE``."""
    begun, over = threading.Event(), threading.Event()

    def busy(seconds: float) -> None:
        until = time.monotonic() + seconds
        begun.set()
        while time.monotonic() < until:
            sum(range(2000))

    def still(_: float) -> None:
        begun.set()
        over.wait(PATIENCE)

    for hold, seconds in ((busy, 0.8), (still, 0.0)):
        begun.clear()
        over.clear()
        holder = threading.Thread(target=locked, args=(hold, seconds))
        holder.start()
        assert begun.wait(PATIENCE)
        before = time.monotonic()
        if hold is busy:
            assert locked(max, 1, 2) == 2
        else:
            with pytest.raises(BusyError):
                locked(max, 1, 2)
            assert time.monotonic() - before < capture_lock.PATIENCE / 2
        over.set()
        holder.join(PATIENCE)
    assert locked(max, 1, 2) == 2


def test_a_warm_up_waits_for_its_turn() -> None:
    """Beside a body that does nothing for a while, as it waits for a file or a device."""
    inside = threading.Event()

    def waits(x: Tensor) -> Tensor:
        inside.set()
        time.sleep(0.8)
        return x + 1

    slow, f = capture(waits), capture(part, name="part")
    thread = threading.Thread(target=torch.no_grad()(slow), args=(torch.ones(3),))
    thread.start()
    assert inside.wait(PATIENCE)
    warmup(f)(torch.ones(3))
    assert recordings(f).recordings == 1
    thread.join(PATIENCE)
