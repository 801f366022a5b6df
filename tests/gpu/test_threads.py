"""Threads: calls at the same time, and work of other threads during a recording."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from capture import capture, config, recordings
from capture.runtime import training_region
from tests.gpu.support import DEVICE, eager, healthy, may_fall_back, needs_cuda, rand, same

pytestmark = needs_cuda


def in_threads(work: Callable[[int], None], number: int = 3) -> None:
    """Run ``work(0)``, ``work(1)`` ... at once; the first error is raised here."""
    barrier = threading.Barrier(number)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            with torch.no_grad(), config.patch(cache=False):
                barrier.wait(timeout=60)
                work(index)
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("own_streams", [False, True], ids=["one stream", "own streams"])
def test_row_164_threads_at_once(own_streams: bool) -> None:
    """Three threads call two functions at once, fifty times each: right results, each from its own recordings."""
    weight = rand(64, 64)

    @capture
    def f(x: Tensor) -> Tensor:
        return torch.tanh(x @ weight) + x

    @capture
    def g(x: Tensor) -> Tensor:
        return x.softmax(0) * 2

    inputs = [[rand(64, 64, seed=1000 * n + i) for i in range(50)] for n in range(3)]
    expected = [[eager(g, eager(f, x)) for x in xs] for xs in inputs]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            found = [g(f(x)) for x in inputs[index]]
            stream.synchronize()
            same(found, expected[index])

    in_threads(work)
    assert recordings(f).replays > 100


@pytest.mark.filterwarnings("ignore:called a synchronizing CUDA operation")  # torch's debug mode is process-wide
@pytest.mark.parametrize("what", ["allocate", "new streams", "synchronize a stream", "synchronize", "pin", "copy"])
def test_other_thread_works_while_we_record(what: str) -> None:
    """A thread that allocates, waits and copies all the time, while many functions are recorded: nobody fails."""
    stop = threading.Event()
    values = torch.ones(1 << 16)

    def once(stream: torch.cuda.Stream) -> None:
        if what == "allocate":
            kept = [torch.empty((3 << 20) + 4096 * i, device=DEVICE) for i in range(8)]
            del kept
            torch.cuda.empty_cache()
        elif what == "new streams":
            torch.cuda.Stream().synchronize()
            torch.cuda.Event().record(stream)
        elif what == "synchronize a stream":
            (torch.ones(1 << 16, device=DEVICE) * 2).sum()
            stream.synchronize()
        elif what == "synchronize":
            torch.cuda.synchronize()
        elif what == "pin":
            values.pin_memory()
        else:
            assert (values.to(DEVICE) * 2).sum().item() == 2 << 16

    def work_beside() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                once(stream)

    def record() -> None:
        try:
            for n in range(12):
                f = capture(lambda x, n=n: torch.tanh(x * n) + x.sum())
                for i in range(3):
                    x = rand(64, 64, seed=i)
                    same(f(x), eager(f, x))
                assert recordings(f).recordings == 1
        finally:
            stop.set()

    in_threads(lambda index: work_beside() if index else record(), 2)
    healthy()


@may_fall_back
def test_nothing_of_the_process_changes_beside_others() -> None:
    """What waits inside is eager, and no later call of its solver fails; what does not is recorded."""
    stop, seen, filters = threading.Event(), set[tuple[int, bool]](), list(warnings.filters)
    sizes = rand(6, 8, 8)
    solve, plain = capture(lambda x: torch.linalg.eigh(x @ x.mT)[0] + 1), capture(lambda x: torch.tanh(x @ x.mT) + 1)

    def look() -> None:
        while not stop.is_set():
            seen.add((torch.cuda.get_sync_debug_mode(), list(warnings.filters) == filters))
            stop.wait(1e-4)

    def work(index: int) -> None:
        if index:
            return look()
        try:
            for x in sizes:
                same(solve(x), eager(solve, x))
                same(plain(x), eager(plain, x))
        finally:
            stop.set()

    in_threads(work, 2)
    assert seen == {(0, True)}
    assert (recordings(solve).recordings, recordings(plain).recordings) == (0, 1)
    healthy()


@may_fall_back
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_waits_are_looked_for_where_no_thread_minds() -> None:
    """The debug mode and the filters are the user's again, whether the body raises or not."""
    inputs = [rand(8, 8, seed=seed) for seed in range(3)]
    capture(lambda x: x + 1)(inputs[0])  # the filter of the mode's warnings is there from the first watch on
    for mode in (0, 1):
        torch.cuda.set_sync_debug_mode(mode)
        filters = list(warnings.filters)
        try:
            f = capture(lambda x: torch.linalg.eigh(x @ x.mT)[0] + 1)
            for x in inputs:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    f(x)
                said = any("synchronizing" in str(one.message) for one in caught)
                assert said == bool(mode)
            assert torch.cuda.get_sync_debug_mode() == mode
            assert list(warnings.filters) == filters
            assert recordings(f).recordings == 0
        finally:
            torch.cuda.set_sync_debug_mode(0)


def test_draws_of_replays_beside_captures_of_other_threads() -> None:
    """Each thread has a generator and a stream of its own. No replay waits for a stream that is captured, and none
    reads the offset that the begin of a capture writes."""
    stop = threading.Event()

    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return torch.empty_like(x).normal_(generator=generator) + x

    def record(generator: torch.Generator) -> None:
        for number in range(10):

            def slow(x: Tensor, generator: torch.Generator, number: int = number) -> Tensor:
                y = noisy(x, generator)
                time.sleep(0.02)
                return y * number

            f = capture(slow)
            for seed in range(3):
                f(rand(64, 64, seed=seed), generator)
            assert recordings(f).recordings == 1

    def work(index: int) -> None:
        ours, eagers = (torch.Generator(DEVICE).manual_seed(index) for _ in range(2))
        with torch.cuda.stream(torch.cuda.Stream()):
            if not index:
                try:
                    return record(ours)
                finally:
                    stop.set()
            f, x = capture(noisy), rand(64, 64)
            while not stop.is_set():
                same(f(x, ours), noisy(x, eagers))
            assert ours.get_offset() == eagers.get_offset()
            assert recordings(f).replays > 20

    in_threads(work, 3)
    healthy()


def test_regions_are_recorded_beside_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads train through one module, each with its own inputs; each gets its own gradients, as eager gives."""
    monkeypatch.setattr(training_region, "graphs_compiled", lambda: 0)  # by other tests of this process
    torch.manual_seed(0)
    layers = [nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)]
    module = nn.Sequential(*layers).to(DEVICE)
    twin, weights = copy.deepcopy(module), list(module.parameters())
    capture(module)
    inputs = [[rand(8, 32, seed=1000 * n + i) for i in range(40)] for n in range(3)]

    def gradients(of: nn.Module, x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(of(x).square().mean(), list(of.parameters())))

    def work(index: int) -> None:
        with torch.enable_grad():
            for x in inputs[index]:
                found = gradients(module, x)
                assert all(now is before for now, before in zip(module.parameters(), weights, strict=True))
                same(found, gradients(twin, x))

    in_threads(work)
    assert recordings(module).replays > 60
    healthy()
