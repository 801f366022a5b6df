"""The child of a fork, made at any moment by any thread, works wherever the same program without this library would."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from capture import capture, config, recordings
from capture.api.decorator import captured_state
from capture.core import forks
from capture.engines.cpu.engine import CpuBackend
from capture.engines.cpu.tape import Tape
from capture.observe.capture_lock import capture_lock
from capture.torch_private import devices
from capture.tree import thread_trees
from tests.support.processes import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
PATIENCE = 20.0  # seconds


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference on the CPU, which children can use beside any device; no plans on disk, no tree of another test. What
    engines have changed for good by then counts as there before. Garbage of other tests goes in this process: torch
    ends a child that collects a pinned tensor or an event of its parent (``tests/gpu/test_forks.py``)."""
    thread_trees.forget_trees()
    gc.collect()
    before.clear()
    before.update(attributes())
    with torch.no_grad(), torch.device("cpu"), config.patch(cache=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer interpreters warn of forks beside threads
        yield


def in_fork(run: Callable[[], Any]) -> Any:
    """What a function gives in a child process; its exception, or ``hangs``."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                result = run()
            except BaseException as error:  # noqa: BLE001 - the child ends here
                result = repr(error)
            os.write(writing, pickle.dumps(result))
        finally:
            os._exit(0)  # whatever it raised: no child goes on in pytest
    os.close(writing)
    until = time.monotonic() + PATIENCE
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hangs"
        time.sleep(0.002)
    with os.fdopen(reading, "rb") as told:
        return pickle.loads(told.read() or pickle.dumps("died"))  # noqa: S301 - of a child of its own


def body(x: Tensor) -> Tensor:
    for _ in range(30):
        x = torch.tanh(x) * 1.5 + 1
    return x


HOLDERS: list[Any] = [
    torch.Tensor, torch.UntypedStorage, nn.Module, torch.autograd, torch.autograd.graph.saved_tensors_hooks, torch,
]  # fmt: skip


_PYTHONS = ("__dict__", "__slotnames__")
"""Python's own changes: a getter that is another object in each look, and what ``copy`` notes on a class at its first
copy."""


def attributes() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for number, holder in enumerate(HOLDERS):
        values |= {f"{number} {name}": value for name, value in holder.__dict__.items() if name not in _PYTHONS}
    return values


before: dict[str, Any] = {}
"""The attributes at the begin of the test."""


def stand_ins() -> list[str]:
    """Names of attributes that are not as they were at the begin of the test, of the classes and modules that a watch
    changes."""
    now = attributes()
    return [name for name in before.keys() | now.keys() if before.get(name) is not now.get(name)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.h = nn.Linear(4, 4), torch.zeros(2, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(self.linear(x) + self.h)
        return self.h * 2


def works(recorded: Any, new: Any) -> Callable[[], Any]:
    """Old recordings, new shapes, a new function, state and training, all equal to eager in a child."""

    def run() -> Any:
        results: list[Any] = [stand_ins()[:3]]
        for f in (recorded, new):
            for size in (3, 4):
                x = torch.randn(size)
                results.append(all(torch.equal(f(x), body(x)) for _ in range(4)))
        ours, eager = Net(), Net()
        eager.load_state_dict(ours.state_dict())
        model = capture(ours)
        x = torch.ones(2, 4)
        results += [torch.equal(model(x), eager(x)) and torch.equal(ours.h, eager.h) for _ in range(4)]
        with torch.enable_grad():
            model.zero_grad()
            layer, twin = nn.Linear(3, 3), nn.Linear(3, 3)
            twin.load_state_dict(layer.state_dict())
            expected = trained(twin, lambda x: twin(x).relu().sum())
            results.append(trained(layer, capture(lambda x: layer(x).relu().sum(), name="g")) == expected)
            results.append(isinstance(expected, list) or "fork-based" in expected)
        return results

    return run


def trained(layer: nn.Linear, loss: Callable[[Tensor], Tensor]) -> list[list[float]] | str:
    """Gradients after some steps. torch refuses a backward pass in a child whose parent has gone back on a GPU."""
    try:
        for _ in range(4):
            layer.zero_grad()
            loss(torch.ones(2, 3)).backward()
    except RuntimeError as error:
        return str(error)
    return [parameter.grad.tolist() for parameter in layer.parameters() if parameter.grad is not None]


def fine(results: Any) -> bool:
    return isinstance(results, list) and results[0] == [] and all(result is True for result in results[1:])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", ["watch", "record", "train"])
def test_while_another_thread_watches_and_records(mode: str) -> None:
    """Children are made at several moments. What torch imports at its first use is imported before: a child made during
    an import hangs in any program."""
    recorded = capture(body, name="known")
    assert fine(works(recorded, capture(body, name="first"))())
    stop = threading.Event()

    def work() -> None:
        number, layer = 0, nn.Linear(5, 5)
        with torch.set_grad_enabled(mode == "train"), config.patch(cache=False):
            while not stop.is_set():
                number += 1
                inner = body if mode != "train" else (lambda x: body(layer(x)).sum())
                f = capture(inner, name=f"f{number}")
                for _ in range(1 if mode == "watch" else 3):
                    result = f(torch.ones(5))
                    if mode == "train":
                        result.backward()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for number in range(3):
            time.sleep(0.007 * number)
            told = in_fork(works(recorded, capture(body, name=f"new{number}")))
            assert fine(told), (number, told)
    finally:
        stop.set()
        thread.join()
    assert stand_ins() == []
    x = torch.ones(3)
    assert torch.equal(recorded(x), body(x))


class Stop:
    """Runs a function in the middle of a body of another thread, where that is watched or recorded."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run, self.found = run, list[Any]()

    def __call__(self, x: Tensor) -> Tensor:
        inside, over = threading.Event(), threading.Event()

        def paused(x: Tensor) -> Tensor:
            y = body(x)
            inside.set()
            over.wait(PATIENCE)
            return y + 1

        f = capture(paused, name="paused")

        def work() -> None:
            with torch.no_grad(), config.patch(cache=False):
                for _ in range(2):
                    f(x)

        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(2):
            inside.wait(PATIENCE)
            inside.clear()
            self.found.append(self.run())
            over.set()
            time.sleep(0.05)
            over.clear()
        over.set()
        thread.join()
        return x


@pytest.mark.filterwarnings("ignore:CG202")  # what wakes the thread of the test is eager
def test_in_the_middle_of_a_body_of_another_thread() -> None:
    """The moments at which a child would wait for a lock for ever, or run behind stand-ins."""
    recorded = capture(body, name="known")
    for _ in range(4):
        recorded(torch.ones(3))
    stop = Stop(lambda: in_fork(works(recorded, capture(body, name="new"))))
    stop(torch.ones(7))
    assert all(map(fine, stop.found)), stop.found
    assert len(stop.found) == 2


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_a_body_that_forks() -> None:
    """The parent's call and what the child does equal eager's; no replay leaves the child out."""
    children: list[Any] = []

    def forking(x: Tensor) -> Tensor:
        y = body(x)
        children.append(in_fork(lambda: (body(y).tolist(), stand_ins()[:3])))
        return y + 1

    f, x = capture(forking, name="f"), torch.ones(3)
    for number in range(1, 5):
        assert torch.equal(f(x), body(x) + 1)
        assert len(children) == number
    assert all(child == (body(body(x)).tolist(), []) for child in children), children
    assert recordings(f).replays == 0


def use_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch look as in a process that has used a GPU: it reports waits, and raises in a child if asked to."""
    parent = os.getpid()

    def set_mode(mode: int) -> None:
        if os.getpid() != parent:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(devices, "may_wait", lambda: os.getpid() == parent)
    monkeypatch.setattr(devices, "wait_debug_mode", lambda: 0)
    monkeypatch.setattr(devices, "set_wait_debug_mode", set_mode)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("beside_a_device", [False, True])
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_a_child_goes_on_in_the_body(monkeypatch: pytest.MonkeyPatch, beside_a_device: bool) -> None:
    """The child returns from the call that forked as from an eager one, and records anew."""
    if beside_a_device:
        use_a_device(monkeypatch)

    def going_on(x: Tensor) -> Any:
        y = body(x)
        return y + 1 if os.fork() else y * 0

    f, x = capture(going_on, name="f"), torch.ones(3)
    reading, writing = os.pipe()
    parent = os.getpid()
    for _ in range(3):
        try:
            result = f(x)
            if os.getpid() != parent:
                recorded = capture(body, name="known")
                told = [torch.equal(recorded(x), body(x)) for _ in range(4)] + [stand_ins() == [], not result.any()]
                os.write(writing, b"1" if all(told) else b"0")
        except BaseException:
            if os.getpid() == parent:
                raise
            os.write(writing, traceback.format_exc().encode())
        finally:
            if os.getpid() != parent:
                os._exit(0)
        assert torch.equal(result, body(x) + 1)
    for _ in range(3):
        os.wait()
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        assert answers.read() == b"111"


def test_the_child_writes_no_memory_of_its_parent() -> None:
    """Outputs, state and recordings of both go different ways."""
    ours, eager = Net(), Net()
    eager.load_state_dict(ours.state_dict())
    model, x = capture(ours), torch.ones(2, 4)
    kept = [model(x) for _ in range(4)]
    expected = [eager(x) for _ in range(4)]
    assert fine([[], in_fork(lambda: all(not model(x * n).isnan().any() for n in range(5)))])
    assert all(map(torch.equal, kept, expected))
    assert torch.equal(model(x), eager(x))
    assert torch.equal(ours.h, eager.h)


class Squares(Dataset[Tensor]):
    """Calls a captured function in workers."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        self.f = f

    def __len__(self) -> int:
        return 12

    @override
    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.f(torch.full((3,), float(index)))


def test_workers_of_a_data_loader() -> None:
    f = capture(body, name="f")
    for _ in range(4):
        f(torch.ones(3))
    for _ in range(2):
        loader = DataLoader(Squares(f), batch_size=3, num_workers=2, multiprocessing_context="fork")
        squares = torch.cat(list(loader))
        assert torch.equal(squares, torch.stack([body(torch.full((3,), float(n))) for n in range(12)]))


def _task(number: int) -> list[float]:
    with torch.no_grad():
        result: list[float] = _captured(torch.full((3,), float(number))).tolist()
        return result


_captured = capture(body, name="in_a_pool")


def make_pools(*, from_thread: bool) -> None:
    """Made by the main thread or by another one, before and after the parent recorded."""
    expected = [body(torch.full((3,), float(number))).tolist() for number in range(8)]
    results: list[Any] = []

    def run() -> None:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            results.append(pool.map_async(_task, range(8)).get(PATIENCE * 2))

    for _ in range(2):
        if from_thread:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
        for _ in range(3):
            _task(1)
    assert results == [expected] * 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("from_thread", [False, True])
def test_pools_of_processes(from_thread: bool) -> None:
    """In a process of its own: threads that other tests left may hold locks of torch's or of C libraries when a child
    is made, which hangs then, with a captured function or without."""
    program = f"from tests.runtime.test_forks import make_pools; make_pools(from_thread={from_thread})"
    done = run_python(program, timeout=PATIENCE * 8)
    assert done.returncode == 0, done.stderr


def test_forks_of_forks() -> None:
    f = capture(body, name="f")
    for _ in range(4):
        f(torch.ones(3))

    def grandchild() -> Any:
        f(torch.ones(4))
        return in_fork(works(f, capture(body, name="new")))

    assert fine(in_fork(grandchild))


def test_a_lock_of_this_thread_stays_its_own() -> None:
    def run() -> Any:
        owned = capture_lock._is_owned()
        capture_lock.release()
        return owned and capture_lock.acquire(timeout=1)

    with capture_lock:
        assert in_fork(run) is True
    lock = threading.RLock()
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    assert not lock.acquire(timeout=0.01)
    forks.free(lock)
    assert lock.acquire(timeout=0.01)


def module_locks() -> dict[str, Any]:
    """All locks that modules of the library keep."""
    kinds = (type(threading.Lock()), type(threading.RLock()))
    return {
        f"{name}.{key}": value for name, module in sorted(sys.modules.items()) if name.startswith("capture.")
        for key, value in vars(module).items() if isinstance(value, kinds)
    }  # fmt: skip


def test_locks_of_other_threads_are_free_in_the_child() -> None:
    held, over = threading.Event(), threading.Event()

    def holds() -> None:
        with contextlib.ExitStack() as all_locks:
            for lock in module_locks().values():
                all_locks.enter_context(lock)
            held.set()
            over.wait(PATIENCE)

    def run() -> list[str]:
        return [name for name, lock in module_locks().items() if not lock.acquire(timeout=0.1)]

    thread = threading.Thread(target=holds)
    thread.start()
    assert held.wait(PATIENCE)
    try:
        assert len(module_locks()) >= 4
        assert in_fork(run) == []
    finally:
        over.set()
        thread.join()


def test_a_thread_that_is_interrupted_by_its_own_code_takes_no_lock_from_itself() -> None:
    """Finalizers and signal handlers call captured functions anywhere."""
    for name, lock in module_locks().items():
        with lock:
            again = lock.acquire(timeout=0.1)
        assert again, name
        lock.release()


def test_one_step_that_fails_leaves_the_others() -> None:
    ran: list[int] = []

    def fails() -> None:
        ran.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forks._call_each([fails, lambda: ran.append(2), fails, lambda: ran.append(3)])
    assert ran == [1, 2, 1, 3]


def test_threads_of_the_parent_are_left_to_it() -> None:
    """What they recorded takes nothing in the child, and is there in the parent as before."""
    f, ready, over = capture(body, name="f"), threading.Event(), threading.Event()
    agreed: list[bool] = []

    def work() -> None:
        with torch.no_grad(), config.patch(cache=False):
            for _ in range(4):
                f(torch.ones(9))
            ready.set()
            over.wait(PATIENCE)
            replays = recordings(f).replays
            agreed.append(torch.equal(f(torch.ones(9)), body(torch.ones(9))) and recordings(f).replays > replays)

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(PATIENCE)
    try:
        assert in_fork(lambda: recordings(f).pool_bytes) == 0
        assert fine(in_fork(works(f, capture(body, name="new"))))
    finally:
        over.set()
        thread.join()
    assert agreed == [True]


def test_what_lies_on_devices_is_left_to_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and pools of all threads: nothing of them is released in a child, also not where the function dies or the
    interpreter ends."""
    released: list[str] = []
    f, ready, over = capture(body, name="f"), threading.Event(), threading.Event()

    def work() -> None:
        with torch.no_grad(), config.patch(cache=False):
            for _ in range(4):
                f(torch.ones(9))
            ready.set()
            over.wait(PATIENCE)

    for _ in range(4):
        f(torch.ones(5))
    tapes = [weakref.ref(entry.nodes[0].recording) for entry in captured_state(f).entries()]
    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(PATIENCE)
    tapes += [weakref.ref(entry.nodes[-1].recording) for entry in captured_state(f).entries()]
    monkeypatch.setattr(CpuBackend, "has_own_memory", True)
    monkeypatch.setattr(Tape, "release", lambda _: released.append("released"))

    def run() -> Any:
        nonlocal f
        alive = [tape() is not None for tape in tapes]
        equal = torch.equal(f(torch.ones(5)), body(torch.ones(5)))
        f = capture(body, name="another")
        gc.collect()
        return alive, equal, [tape() is not None for tape in tapes], released

    try:
        assert in_fork(run) == ([True] * 3, True, [True] * 3, [])
    finally:
        over.set()
        thread.join()
