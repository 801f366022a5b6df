"""Other threads draw from the same generators at any time: these draws do not count for a body, and are not undone."""

from __future__ import annotations

import _thread
import contextlib
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, capture, config, plans, recordings, warmup
from capture.observe import dispatch_mode, run, run_notes
from capture.torch_private.generators import was_drawn
from capture.tree import thread_trees
from tests.support.device import DEVICE, rng_state, set_rng_state, use_device


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference, no plans on disk, no tree of another test, the generator as it was."""
    thread_trees.forget_trees()
    state = rng_state()
    with torch.no_grad(), config.patch(cache=False):
        yield
    set_rng_state(state)


def refused(error: RuntimeError) -> bool:
    """torch's own rule: while one thread captures, no other draws from the device's generator. It says so, beside this
    library as beside any capture, and nothing is drawn (``docs/limits.md``)."""
    return DEVICE.type != "cpu" and "Offset increment outside graph capture" in str(error)


@contextlib.contextmanager
def drawing(draw: Callable[[], Any], every: float = 0.0003) -> Iterator[list[Tensor]]:
    """Have another thread draw all the time. A draw may be refused while this one captures on a GPU; most draws do
    come."""
    stop, drawn, refusals = threading.Event(), list[Tensor](), list[RuntimeError]()

    def work() -> None:
        use_device()
        while not stop.is_set():
            try:
                drawn.append(draw())
            except RuntimeError as error:
                if not refused(error):
                    raise
                refusals.append(error)
            time.sleep(every)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield drawn
    finally:
        stop.set()
        thread.join()
    assert drawn or not refusals


def plain(x: Tensor) -> Tensor:
    for _ in range(20):
        x = torch.tanh(x) * 1.5 + 1
    return x


def drops(x: Tensor) -> Tensor:
    for _ in range(20):
        x = torch.tanh(x) * 1.5
    return nn.functional.dropout(x, 0.5, training=True)


def noisy(x: Tensor) -> Tensor:
    y = x + torch.rand_like(x)
    return plain(y) + torch.randn(x.shape[-1])


DRAWS: list[Callable[[], Tensor]] = [
    lambda: torch.rand(8), lambda: torch.randn(1), lambda: torch.randperm(1000), lambda: torch.rand(100_000),
    lambda: torch.empty(3).exponential_(), lambda: torch.multinomial(torch.ones(5), 3, replacement=True),
]  # fmt: skip


@pytest.mark.one_in(24)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("body", [plain, drops, noisy])
def test_bodies_are_recorded_all_the_same(body: Callable[[Tensor], Tensor], draw: Callable[[], Tensor]) -> None:
    f = capture(body, max_recordings=64, name="f")
    with drawing(draw):
        for number in range(1, 9):
            for _ in range(4):
                f(torch.ones(number, 4))
    assert not [plan.findings for plan in plans(f) if plan.outcome == "eager"]
    assert recordings(f).replays >= 8


@pytest.mark.parametrize("body", [plain, drops, noisy])
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_verification_says_nothing_wrong(body: Callable[[Tensor], Tensor]) -> None:
    f, x = capture(body, verify="first", name="f"), torch.randn(3, 4)
    with drawing(DRAWS[0]):
        for _ in range(12):
            f(x)
    assert not any(event.detail.endswith("differs") for event in recordings(f).events if event.kind == "verify")
    torch.manual_seed(3)
    expected = body(x)
    torch.manual_seed(3)
    assert torch.equal(f(x), expected)


def test_draws_of_others_are_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is undone puts the generator back, but not behind what another thread has drawn: that would draw the
    same numbers again."""
    real, drawn = run.run_watched, list[Tensor]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(4, device=DEVICE)))
        thread.start()
        thread.join()
        return result

    waiting = threading.Event()
    idle = threading.Thread(target=waiting.wait)
    idle.start()  # there are other threads
    try:
        f = capture(drops, name="f")
        with monkeypatch.context() as patch:
            patch.setattr(run, "run_watched", watched)
            warmup(f)(torch.ones(3, 4))
        assert drawn
        after = torch.rand(4)
        assert not any(torch.equal(after, numbers) for numbers in drawn)
    finally:
        waiting.set()
        idle.join()


def test_what_a_run_draws_itself_is_undone() -> None:
    """With and without other threads that do not draw."""
    f, before = capture(drops, name="f"), rng_state()
    warmup(f)(torch.ones(3, 4))
    assert torch.equal(rng_state(), before)
    waiting = threading.Event()
    idle = threading.Thread(target=waiting.wait)
    idle.start()
    try:
        g = capture(drops, name="g")
        warmup(g)(torch.ones(3, 4))
        assert torch.equal(rng_state(), before)
    finally:
        waiting.set()
        idle.join()


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x + torch.rand(4)


def sets(x: Tensor) -> Tensor:
    state = rng_state()
    y = x + torch.rand(4)
    set_rng_state(state)
    return y + torch.rand(4)


def forks(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        y = torch.rand(4)
    return x + y


def seeds_last(x: Tensor) -> Tensor:
    y = x + torch.rand(4)
    torch.seed()
    return y


@pytest.mark.one_in(4)
@pytest.mark.parametrize("body", [seeds, sets, forks, seeds_last])
@pytest.mark.parametrize("beside_others", [False, True])
def test_bodies_that_seed_are_still_found(body: Callable[[Tensor], Tensor], beside_others: bool) -> None:
    """A draw of another thread's between a body's ``set_state`` and its next draw hides the first: it leads from the
    state before to one further on. Both the watched run and the recording run would have to meet that."""
    f = capture(body, name="f")

    def call() -> None:
        for _ in range(4):
            f(torch.ones(4))

    beside = drawing(DRAWS[0], 0.005) if beside_others else contextlib.nullcontext()
    with beside, pytest.warns(CaptureWarning, match="CG202"):
        call()
    assert recordings(f).replays == 0


def test_states_by_draws() -> None:
    """``was_drawn`` finds that draws led from one state to another, also where only a cached number differs. None lead
    back, or to states of another seed."""
    generator = torch.Generator("cpu").manual_seed(11)
    states = [generator.get_state()]
    for draw in range(8):
        if draw % 3 == 0:
            torch.rand(draw * 97, generator=generator, device="cpu")
        elif draw % 3 == 1:
            torch.randn(1, generator=generator, device="cpu")
        else:
            torch.randperm(draw, generator=generator, device="cpu")
        states.append(generator.get_state())
    for first, before in enumerate(states):
        for second, after in enumerate(states):
            is_equal = torch.equal(before[:5016], after[:5016])
            assert was_drawn(before, after, 0.1) == (second >= first or is_equal)
    assert not was_drawn(states[0], torch.Generator("cpu").manual_seed(12).get_state(), 0.1)
    assert not was_drawn(states[-1], torch.Generator("cpu").manual_seed(11).get_state(), 0.1)
    earlier, later = (
        torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, low, high, 0, 0, 0, 0, 0, 0], dtype=torch.uint8, device="cpu")
        for low, high in ((8, 0), (4, 1))
    )
    assert was_drawn(earlier, later, 0)
    assert not was_drawn(later, earlier, 0)
    assert was_drawn(earlier, earlier, 0)
    assert not was_drawn(earlier, torch.zeros(16, dtype=torch.uint8, device="cpu"), 0)
    assert not was_drawn(
        torch.zeros(7, dtype=torch.uint8, device="cpu"), torch.zeros(7, dtype=torch.uint8, device="cpu"), 0
    )


def test_far_away_is_found_in_time() -> None:
    generator = torch.Generator("cpu").manual_seed(11)
    before = generator.get_state()
    torch.rand(5_000_000, generator=generator, device="cpu")
    assert was_drawn(before, generator.get_state(), 0.1)
    assert not was_drawn(before, generator.get_state(), 0)


def test_alone_nothing_is_taken_for_another_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw that no operator tells of is the body's own where there is no other thread."""
    monkeypatch.setattr(run_notes, "others_may_run", lambda: False)  # other tests may have left some
    watch = dispatch_mode.ObserveMode()
    watch.begin([])
    torch.rand(3)
    watch.end()
    assert watch.trace.work


@pytest.mark.parametrize("has_others", [False, True])
def test_an_idle_thread_of_c_drew_nothing(monkeypatch: pytest.MonkeyPatch, has_others: bool) -> None:
    """The thread is one of autograd's, in which a hook of the user's ran once: what was drawn meanwhile is the body's
    own."""
    seen, go_on, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def be_seen() -> None:
        threads.append(threading.current_thread())
        seen.set()
        go_on.wait()

    _thread.start_new_thread(be_seen, ())
    seen.wait()
    (idle,) = threads
    here = threading.current_thread()
    monkeypatch.setattr(threading, "enumerate", lambda: [here, idle])
    if not has_others:
        go_on.set()
        while idle.ident in sys._current_frames():
            time.sleep(0.001)
    watch = dispatch_mode.ObserveMode()
    watch.begin([])
    torch.rand(3)
    watch.end()
    go_on.set()
    assert bool(watch.trace.work) is not has_others


def aliased() -> Callable[[Tensor], Tensor]:
    pick = random.random
    return lambda x: x * pick()


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_other_threads_draw_from_the_hosts_generators(draw: Callable[[], float]) -> None:
    """Requests and loaders do so: no body is eager for it. A body that may draw itself still is, under whatever
    name."""
    with drawing(lambda: torch.tensor(draw())), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        f, x = capture(plain, name="f"), torch.ones(3)
        for _ in range(6):
            assert torch.equal(f(x), plain(x))
        counters = recordings(f)
        assert (counters.eager_calls, counters.findings) == (0, ())
        assert counters.replays > 2
        for body in (lambda x: x * random.random(), aliased()):
            g = capture(body, name="g")
            for _ in range(6):
                g(x)
            assert recordings(g).replays == 0
            assert "CG202" in [finding.code for finding in recordings(g).findings]
