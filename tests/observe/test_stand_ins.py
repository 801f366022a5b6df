"""Attributes of torch that are replaced while a body is watched: what is there meanwhile, and afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
import types
from typing import Any

import torch
from typing_extensions import override

from capture.observe.probes.host_reads import host_reads
from capture.torch_private.monkeypatch import made_once, num_replaced, put_again, put_back, replaced, set_aside
from tests.support.device import DEVICE
from tests.support.injection import Stopping
from tests.support.processes import run_python


class Base:
    def inherited(self) -> str:
        return "base"


class Kind(Base):
    own: Any = "own"

    @override
    def __repr__(self) -> str:
        return "plain"


class Below(Kind):
    pass


def test_attributes_of_a_class_are_there_for_a_block() -> None:
    others: dict[str, Any] = {"own": "other", "inherited": lambda _: "other", "__repr__": lambda _: "shown", "new": 1}
    made: Any = Below()
    for _ in range(3):  # what Python has cached of the class is dropped each time
        assert (made.own, made.inherited(), repr(made), hasattr(made, "new")) == ("own", "base", "plain", False)
        with replaced(Kind, others):
            assert (made.own, made.inherited(), repr(made), made.new) == ("other", "other", "shown", 1)
            with replaced(Kind, {"own": "third"}), replaced(Base, {"inherited": None}):
                assert (made.own, made.inherited()) == ("third", "other")
            assert made.own == "other"
    assert (made.own, made.inherited(), repr(made), hasattr(made, "new")) == ("own", "base", "plain", False)
    assert "inherited" not in vars(Kind)
    assert num_replaced() == 0


def test_names_of_a_module_are_there_for_a_block() -> None:
    module: Any = types.ModuleType("a_module")
    module.number = 1
    with replaced(module, {"number": 2, "more": 3}):
        assert (module.number, module.more) == (2, 3)
    assert module.number == 1
    assert not hasattr(module, "more")


def test_a_stand_in_is_made_again_for_another_original() -> None:
    module: Any = types.ModuleType("a_module")
    module.number = 1
    stand_ins = made_once(lambda name, original: (name, original))
    first = stand_ins(module, ("number",))
    assert stand_ins(module, ("number",))["number"] is first["number"]
    module.number = 2
    assert stand_ins(module, ("number",)) == {"number": ("number", 2)}


def test_a_stand_in_that_outlives_its_run_is_the_original() -> None:
    told = list[str]()

    def noted(name: str, tensor: torch.Tensor, reads: Any, args: Any, kwargs: Any) -> Any:
        told.append(name)
        return reads(tensor, *args, **kwargs)

    x = torch.ones(12, device=DEVICE)
    with host_reads(told.append, noted, lambda _: None, lambda *_: None):
        kept, numbers = torch.Tensor.tolist, x.tolist()
    assert {*told} == {"tolist"}  # on a device the copy to the host is told, too
    in_the_run = [*told]
    assert kept(x) == numbers == [1.0] * 12
    assert told == in_the_run


def test_attributes_are_set_aside_and_put_again() -> None:
    others: dict[str, Any] = {"own": "other", "inherited": lambda _: "other"}
    made: Any = Below()
    with replaced(Kind, others):
        with replaced(Kind, {"own": "third"}):
            set_aside()
            assert (made.own, made.inherited()) == ("own", "base")
            set_aside()
            put_again()
            assert (made.own, made.inherited()) == ("own", "base")  # who asked first has not ended it
            put_again()
            assert (made.own, made.inherited()) == ("third", "other")
            set_aside()
        put_again()  # what was restored meanwhile stays so
        assert (made.own, made.inherited()) == ("other", "other")
        set_aside()
    assert (made.own, made.inherited(), num_replaced()) == ("own", "base", 0)
    put_again()
    assert (made.own, made.inherited()) == ("own", "base")


def test_a_thread_that_is_stopped_here_keeps_no_lock() -> None:
    """``with`` may be left between two lines without its end, as where a signal's handler raises."""

    def replace_and_restore() -> None:
        with replaced(Kind, {"own": "other"}):
            set_aside()
            put_again()

    with Stopping(-1, KeyboardInterrupt, lines=True) as counted:
        replace_and_restore()
    for at in range(1, counted.count + 1):
        with contextlib.suppress(KeyboardInterrupt), Stopping(at, KeyboardInterrupt, lines=True):
            replace_and_restore()
        put_back()
        others = threading.Thread(target=replace_and_restore, daemon=True)
        others.start()
        others.join(timeout=5)
        assert not others.is_alive(), at
        assert (Kind.own, num_replaced()) == ("own", 0), at


COMPILED_IN_A_WATCHED_RUN = """
import threading, torch
from capture import capture, recordings
from capture.torch_private import devices

devices.has_captures = lambda: True  # as where there is a GPU: indexing is replaced, too
inner = torch.compile(lambda x: x[0].sin() * 2, backend="eager")

def body(x):
    y = inner(x) + 1
    if y.sum().item() > 0:
        y = y * 2
    return y

captured = capture(body)
with torch.device("cpu"):
    for number in (1, 2, 3, 4, 5, 6, -1, 7):
        x = torch.full((3, 4), float(number) / 9)
        assert torch.equal(captured(x), body(x))
    assert recordings(captured).replays > 2
    later = torch.compile(lambda x: x[1].cos(), backend="eager", fullgraph=True)
    assert torch.equal(later(x), x[1].cos())

beside = torch.compile(lambda x: x[2].tan(), backend="eager")
begun, done = threading.Event(), threading.Event()

def compile_beside():
    begun.wait()
    beside(torch.ones(3, 4))
    done.set()

def slow(x):
    begun.set()
    done.wait()
    return x * x.sum().item()

thread = threading.Thread(target=compile_beside)
thread.start()
captured = capture(slow)
for number in range(8):
    x = torch.full((3,), float(number))
    assert torch.equal(captured(x), slow(x)), number
thread.join()
kept = {"__getitem__", "__setitem__", "item", "new_tensor", "__bool__"} & set(vars(torch.Tensor))
assert not kept, kept
"""


def test_compilers_see_what_was_there() -> None:
    """Their tables of torch's functions are made once, whatever runs at that moment."""
    done = run_python(COMPILED_IN_A_WATCHED_RUN, env={**os.environ, "CAPTURE_CACHE": "0", "CAPTURE_DROP_SLOW": "0"})
    assert done.returncode == 0, done.stderr[-2000:]
