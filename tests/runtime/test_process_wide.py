"""What all threads share stays as it is while one of them watches, records or replays."""

from __future__ import annotations

import _warnings
import gc
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from capture import capture, config, recordings
from capture.native import native
from capture.observe.probes import device_syncs
from capture.runtime import gradient_offload, record
from capture.torch_private import devices
from capture.torch_private.capabilities import dispatch_mode_depth
from capture.torch_private.surroundings import Surroundings
from capture.torch_private.warned import CAN_TELL, warned
from capture.tree import thread_trees
from tests.support.device import DEVICE, without_default_device


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference, no plans on disk, no tree of another test."""
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False):
        yield


def shared_state() -> tuple[Any, ...]:
    """State that all threads of the process share."""
    return (
        list(warnings.filters), warnings.showwarning, gc.isenabled(), gc.get_threshold(), sys.getswitchinterval(),
        torch.get_num_threads(), torch.is_warn_always_enabled(), signal.getsignal(signal.SIGINT), sys.excepthook,
        torch.get_deterministic_debug_mode(), sys.getrecursionlimit(),
        devices.wait_debug_mode() if devices.may_wait() else 0,
    )  # fmt: skip


def norms(x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.nn.functional.layer_norm(x.masked_fill(x > 0, 0.5).repeat(2, 1)[: x.shape[0]], x.shape[-1:])
    return x


def sums(x: Tensor) -> Tensor:
    return x.std(0) + x.cumsum(0).sum() + x.sort(0).values.prod(0)


def updates(x: Tensor) -> Tensor:
    y = x.clone()
    y.add_(1).mul_(2)
    return y @ y.T


@pytest.mark.parametrize("body", [norms, sums, updates])
def test_nothing_is_another_while_a_body_runs(body: Callable[[Tensor], Tensor]) -> None:
    """The state is compared in every call of a function of this library while the body is watched and recorded beside
    another thread."""
    stop, x = threading.Event(), torch.randn(5, 5, device=DEVICE)
    before, seen, thread = shared_state(), list[tuple[Any, ...]](), threading.get_ident()
    f, other = capture(body, name="f"), threading.Thread(target=stop.wait)
    other.start()

    def look(frame: types.FrameType, event: str, arg: object) -> None:
        if event == "call" and "capture" in frame.f_code.co_filename and threading.get_ident() == thread:
            now = shared_state()
            if now != before and not seen:
                seen.append((frame.f_code.co_qualname, now))

    try:
        for _ in range(3):
            sys.setprofile(look)
            try:
                result = f(x)
            finally:
                sys.setprofile(None)
            assert torch.equal(result, body(x))
    finally:
        stop.set()
        other.join()
    assert not seen
    assert shared_state() == before
    if devices.may_wait():  # alone it may look closer: the filter of torch's debug mode stays
        device_syncs._filter.put_first()
    before = shared_state()
    for _ in range(3):
        capture(body)(x)
        assert shared_state() == before


def test_warnings_of_other_threads_stay_warnings() -> None:
    """The other thread puts back the filters that it found, too."""
    stop, raised, before = threading.Event(), list[Warning](), list(warnings.filters)

    def warn() -> None:
        while not stop.is_set():
            try:
                with warnings.catch_warnings():
                    stop.wait(0.001)
                    warnings.warn("an ordinary one", PendingDeprecationWarning, stacklevel=1)
            except Warning as error:
                raised.append(error)

    warnings.simplefilter("ignore", PendingDeprecationWarning)
    expected = list(warnings.filters)
    threads = [threading.Thread(target=warn)]
    for thread in threads:
        thread.start()
    try:
        for number in range(15):
            f, x = capture(norms, name=f"f{number}"), torch.randn(50 + number, 40, device=DEVICE)
            for _ in range(3):
                f(x)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not raised
    assert list(warnings.filters) == expected
    warnings.filters[:] = before  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:CG202")  # what wakes the thread of the test is eager
def test_what_stands_in_for_attributes_meanwhile_changes_nothing_for_other_threads() -> None:
    """While a body is watched, torch's classes have other methods. A recording whose body reads them is replayed on."""
    entered, leave, x = threading.Event(), threading.Event(), torch.ones(4, 4, device=DEVICE)

    def waits(x: Tensor) -> Tensor:
        entered.set()
        leave.wait(20)
        return x + 1

    def asks(x: Tensor) -> Tensor:
        return x * 2 + 1 if x.stride() and Tensor.dim(x) and callable(torch.as_strided) else x

    watched, f = capture(waits, name="waits"), capture(asks, name="asks")
    for _ in range(4):
        f(x)
    before, thread = recordings(f), threading.Thread(target=watched, args=(x,))
    thread.start()
    try:
        assert entered.wait(20)
        assert native.stand_ins
        for _ in range(3):
            assert torch.equal(f(x), asks(x))
        counters = recordings(f)
    finally:
        leave.set()
        thread.join()
    assert not native.stand_ins
    assert torch.equal(f(x), asks(x))
    assert (counters.replays, counters.observations) == (before.replays + 3, 1)
    assert recordings(f).replays == before.replays + 4


@without_default_device()
def test_a_warning_in_a_trial_is_dropped_and_told() -> None:
    """Whatever the filters say, without a trace in them or in a registry."""
    assert CAN_TELL
    single, name = torch.ones(1), "__warningregistry__"
    before = dict(globals().get(name, {}))
    for action in ("error", "always", "default", "ignore"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            assert warned(torch.std, single)[1]
            assert warned(torch.std, single)[1]
            assert warned(_warnings.warn, "of C") == (None, True)
            result, objected = warned(torch.add, single, 2, alpha=3)
            assert not objected
            assert result.item() == 7
        assert not caught
    assert dict(globals().get(name, {})) == before


@without_default_device()
def test_a_call_that_warns_and_raises_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """torch prints a warning that cannot be raised as an exception is on its way."""
    fixed = torch.frombuffer(bytearray(8), dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="not resizable"):
            warned(torch.add, torch.ones(3), 1, out=fixed)
    assert not caught
    assert capfd.readouterr() == ("", "")


def test_a_python_function_that_calls_into_c() -> None:
    """The function runs with the values its module has, its defaults and its closure."""
    factor = 3

    def outer(x: Tensor, *, shift: int = 1) -> Tensor:
        _warnings.warn("of C")
        return x * factor + shift + len(_NUMBERS)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, objected = warned(outer, torch.ones(1), shift=2)
    assert objected
    assert result.item() == 8


_NUMBERS = (1, 2, 3)


def test_trials_of_other_forms_say_nothing_more() -> None:
    """``std`` of one number warns once in a watched run and once in the run that is recorded, as in eager."""

    def body(x: Tensor) -> Tensor:
        return x.std() + 1

    def said(f: Callable[[Tensor], Tensor]) -> list[int]:
        counts = []
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                f(torch.ones(1, device=DEVICE))
            counts.append(len(caught))
        return counts

    assert said(capture(body, name="f")) == said(body) == [1, 1]


@pytest.mark.parametrize("disabled", [False, True])
def test_the_collector_is_left_alone(disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that end well leave it as it was, and so does one that is stopped before the body runs."""

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    f = capture(lambda x: x + 1, name="f")
    f(torch.ones(3, device=DEVICE))
    if disabled:
        gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(gradient_offload, "park", stopped)
            with pytest.raises(KeyboardInterrupt):
                f(torch.ones(3, device=DEVICE))
            assert gc.isenabled() is not disabled
            assert not any(tree.recording for tree in thread_trees.trees_here().values())
        with monkeypatch.context() as patch:
            patch.setattr(record, "_record", stopped)
            with pytest.raises(KeyboardInterrupt):
                f(torch.ones(3, device=DEVICE))
        for _ in range(3):
            assert torch.equal(f(torch.ones(3, device=DEVICE)), torch.full((3,), 2.0, device=DEVICE))
        assert gc.isenabled() is not disabled
    finally:
        gc.enable()
    assert recordings(f).recordings >= 1


def test_garbage_is_collected_while_a_body_is_recorded() -> None:
    """Recordings of this library are collected, too: their memory is taken again only where nobody can notice."""

    def garbage() -> None:
        g = capture(lambda x: (x * 2, x + 1), name="g")
        kept = [g(torch.ones(300, device=DEVICE)) for _ in range(3)]
        cycle: list[Any] = [g, kept]
        cycle.append(cycle)

    def body(x: Tensor) -> Tensor:
        y = x * 2
        gc.collect()
        z = y + 1
        gc.collect()
        return (z * y).sum() + z

    f = capture(body, name="f")
    for number in range(4):
        garbage()
        x = torch.randn(200, device=DEVICE)
        assert torch.equal(f(x), body(x)), number
    assert recordings(f).recordings >= 1


def test_modes_that_a_signal_left_open_are_closed() -> None:
    """As if a signal came after the end of a ``with`` block and before its mode was closed."""
    around, depth = Surroundings(), dispatch_mode_depth()
    modes = [TorchDispatchMode(), TorchDispatchMode()]
    for mode in modes:
        mode.__enter__()
    assert dispatch_mode_depth() == depth + 2
    around.put_back()
    assert dispatch_mode_depth() == depth
    assert torch.ones(2).add(1).tolist() == [2, 2]
