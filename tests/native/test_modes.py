"""Modes and switches, as the C module compares them."""

from __future__ import annotations

import copy
import enum
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from capture import capture, recordings
from capture.native import native
from capture.torch_private import setter_calls, switches
from tests.support.device import DEVICE
from tests.support.fast_paths import fresh as fresh
from tests.support.fast_paths import goes_straight, scaled, tensors
from tests.support.fast_paths import way as way


def test_switches_of_the_backends_are_looked_at() -> None:
    mine = capture(lambda x: x @ x)
    x = torch.randn(4, 4, device=DEVICE)
    for _ in range(4):
        mine(x)
    assert goes_straight(mine, x)
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(not before)
    try:
        assert not goes_straight(mine, x)
    finally:
        torch.backends.cuda.enable_flash_sdp(before)
    assert goes_straight(mine, x)
    backends: Any = torch.backends
    matmul = backends.cuda.matmul if DEVICE.type == "cuda" else backends.mkldnn.matmul
    old = matmul.fp32_precision
    matmul.fp32_precision = "ieee" if old == "tf32" else "tf32"
    try:
        assert not goes_straight(mine, x)
    finally:
        matmul.fp32_precision = old


def test_dispatch_keys_of_the_thread_are_compared() -> None:
    """Below autograd torch calls other kernels for the same tensors."""
    x, y = tensors(0)
    mine = capture(scaled)
    for _ in range(4):
        mine(x, y)
    assert goes_straight(mine, x, y)
    with torch._C._AutoDispatchBelowAutograd():
        assert not goes_straight(mine, x, y)
        assert torch.equal(mine(x, y), scaled(x, y))
    assert goes_straight(mine, x, y)


def test_modes_hold_while_functions_give_the_same() -> None:
    given: list[Any] = [1, "a", None]
    modes = native.Modes(tuple((given.__getitem__, (at,), value) for at, value in enumerate(given)))
    assert modes()
    given[1] = str(b"a", "ascii")  # an equal one
    assert modes()
    given[0] = True
    assert not modes()
    given[0] = 1
    given.pop()
    assert not modes(), "what raises has changed"


class Backend(enum.Enum):
    DEFAULT = 0
    OTHER = 1


@pytest.mark.parametrize(
    ("value", "other"),
    [([1, 2], [1, 3]), ((True, False), (True, True)), (Backend.DEFAULT, Backend.OTHER), ("none", "tf32"), (0.0, -0.0)],
)
def test_what_torch_makes_anew_in_each_call_is_compared_by_value(value: Any, other: Any) -> None:
    """A list, a tuple, an enumeration, a text."""
    given = [value]
    modes = native.Modes(((lambda: copy.deepcopy(given[0]), (), copy.deepcopy(value)),))
    assert modes()
    given[0] = other
    assert not modes()


def test_every_switch_is_seen_in_c_and_has_a_price() -> None:
    modes = switches.modes_like_now([])
    assert modes()
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(not before)
    try:
        assert not modes()
    finally:
        torch.backends.cuda.enable_flash_sdp(before)
    assert modes()
    assert all(switch.nanoseconds > 0 for switch in switches.SWITCHES)


def test_slow_switches_are_seen_whoever_set_them() -> None:
    modes = switches.modes_like_now([])
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert not modes()
    assert modes(), "set back to what it was"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    try:
        assert not modes()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = precision  # type: ignore[attr-defined]
    assert modes()


def test_slow_modes_are_compared_once_after_each_change() -> None:
    asked: list[int] = []
    changes = setter_calls.SetterCalls()

    def read() -> bool:
        asked.append(0)
        return len(asked) > 9

    slow = native.Modes(((read, (), False),))
    modes = native.Modes((), (slow, changes, "count", changes.count))
    assert [modes() for _ in range(3)] == [True] * 3
    assert asked == []
    changes.increment()
    assert [modes() for _ in range(3)] == [True] * 3
    assert len(asked) == 1
    asked += [0] * 9
    changes.increment()
    assert not modes()
    with pytest.raises(ValueError, match="in a slot"):
        native.Modes((), (slow, object(), "count", 0))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.backends.cuda.preferred_linalg_library("default"),
        lambda: torch.set_float32_matmul_precision(torch.get_float32_matmul_precision()),
        lambda: setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", torch.backends.cuda.matmul.allow_tf32),
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "ieee"),  # type: ignore[attr-defined]
    ],
)
def test_functions_that_set_a_switch_are_noticed(change: Callable[[], object]) -> None:
    assert setter_calls.notices_setters()
    before = setter_calls.SETTER_CALLS.count
    with torch.enable_grad(), torch.no_grad():
        assert setter_calls.SETTER_CALLS.count == before, "modes of a thread come and go in every call"
    change()
    assert setter_calls.SETTER_CALLS.count >= before + 2


def test_dispatch_keys_are_compared_in_a_thread_that_read_no_modes_before() -> None:
    done: list[bool] = []

    def work() -> None:
        test_dispatch_keys_of_the_thread_are_compared()
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done


def test_a_device_context_between_calls(way: str) -> None:
    """A default device is a function mode: calls in it and after it replay, each in its own mode."""
    mine, x = capture(lambda x: x * 2 + torch.ones(4, device=DEVICE)), torch.randn(4, device=DEVICE)
    for _ in range(2):
        for _ in range(3):
            assert torch.equal(mine(x), x * 2 + 1)
        with torch.device("cpu"):
            for _ in range(3):
                assert torch.equal(mine(x), x * 2 + 1)
    assert recordings(mine).eager_calls == 0


def test_a_device_context_inside_a_default_device() -> None:
    """Two such modes are not compared in C. After the block calls take the fast way again, and so do new functions."""
    before, x = torch.get_default_device(), torch.randn(4, device=DEVICE)
    torch.set_default_device(DEVICE)
    try:
        mine, other = capture(lambda x: x * 2), capture(lambda x: x * 3)
        with torch.no_grad():
            with torch.device("cpu"):
                for _ in range(4):
                    assert torch.equal(mine(x), x * 2)
            with torch.device(DEVICE):
                for _ in range(4):
                    assert torch.equal(mine(x), x * 2)
            for function, factor in ((mine, 2), (other, 3)):
                for _ in range(4):
                    assert torch.equal(function(x), x * factor)
                assert goes_straight(function, x)
    finally:
        torch.set_default_device(before if DEVICE.type != "cpu" else None)


def test_a_thread_that_comes_after_another_one_is_not_taken_for_it() -> None:
    """The system gives the same number to threads that follow each other."""
    modes: list[Any] = []
    numbers = []

    def work() -> None:
        modes.append(native.Modes(()))
        numbers.append((threading.get_ident(), [compared() for compared in modes]))

    for _ in range(4):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [results for _, results in numbers] == [[*[False] * count, True] for count in range(4)]
