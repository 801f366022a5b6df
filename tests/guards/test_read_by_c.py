"""What C code reads of objects, so that no name of it is in any code: a comparison, a text, what an object keeps."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture import capture, explain, recordings
from tests.guards.kinds import HEAD
from tests.support.device import DEVICE

TWO = "A, B = types.SimpleNamespace(v=1.0, w=[1.0]), types.SimpleNamespace(v=1.0, w=[1.0])\n"
FORGETFUL = """
class Kind(abc.ABC):
    answer = True
    @classmethod
    def __subclasshook__(cls, other): return cls.answer
A = Box()
isinstance(A, Kind)
Kind.answer = False
"""
CASES = {
    "equal": (TWO, "1 if A == B else 2", "A.v = 2.0"),
    "equal by a function in C": (TWO, "1 if operator.eq(A, B) else 2", "B.v = 2.0"),
    "equal to one more": (TWO, "1 if A == B else 2", "B.other = 2.0"),
    "equal to a new one": (TWO, "1 if types.SimpleNamespace(v=1.0, w=[1.0]) == B else 2", "B.w.append(2)"),
    "equal in what is kept": (TWO, "1 if A == B else 2", "A.w.append(1.0)"),
    "equal by a local name": (TWO, "(lambda mine: 1 if mine == B else 2)(A)", "A.v = 2.0"),
    "in a list": (TWO + "L = [B]", "1 if A in L else 2", "A.v = 2.0"),
    "its place": (TWO + "L = [types.SimpleNamespace(v=2.0, w=[1.0]), B, A]", "L.index(A)", "L[0].v = 1.0"),
    "in tuples": (TWO + "L = ((B,),)", "1 if (A,) in L else 2", "B.v = 2.0"),
    "in dicts": (TWO + "C, D = {'a': A}, {'a': B}", "1 if C == D else 2", "B.v = 2.0"),
    "in deques": (TWO + "C, D = collections.deque([A]), collections.deque([B])", "1 if C == D else 2", "A.v = 0"),
    "of a class of its own": (
        "class Own(types.SimpleNamespace): pass\nA, B = Own(v=1.0), Own(v=1.0)",
        "1 if A == B else 2",
        "A.v = 2.0",
    ),
    "by weak references": (
        "class Own(types.SimpleNamespace): pass\nA, B = Own(v=1.0), Own(v=1.0)\nC, D = weakref.ref(A), weakref.ref(B)",
        "1 if C == D else 2",
        "A.v = 2.0",
    ),
    "a copy": (TWO, "1 if copy.copy(A) == B else 2", "A.other = 2.0"),
    "a text": (TWO, "len(f'{A}')", "A.v = 2.125"),
    "repr": (TWO, "len(repr([A]))", "A.other = 2"),
    "pickled": ("import pickle\nA = Box(v=1.0)", "len(pickle.dumps(A))", "A.other = 2"),
    "equal cells": (
        TWO + "def made(v):\n    return lambda: v\nC, D = made(A), made(B)",
        "1 if C.__closure__[0] == D.__closure__[0] else 2",
        "A.v = 2.0",
    ),
    "a cell": (
        "def made(v):\n    return lambda: v\nC = made(2.0)",
        "C.__closure__[0].cell_contents",
        "C.__closure__[0].cell_contents = 3.0",
    ),
    "defaults": ("def other(v=1.0): pass", "other.__defaults__[0]", "other.__defaults__ = (2.0,)"),
    "notes of an error": ("E = ValueError()", "len(getattr(E, '__notes__', ()))", "E.add_note('one')"),
    "forgotten by an abstract class": (
        FORGETFUL,
        "1 if isinstance(A, Kind) else 2",
        "Kind._abc_caches_clear()",
    ),
    "a queue": ("import queue\nQ = queue.SimpleQueue()\nQ.put(1)", "Q.qsize()", "Q.put(2)"),
}


def _module(setup: str, expression: str) -> Any:
    made: Any = types.ModuleType("read_by_c")
    sys.modules[made.__name__] = made
    source = f"{HEAD}\n{setup}\ndef body(x):\n    return x * ({expression})\n"
    exec(compile(source, "<read_by_c>", "exec"), vars(made))  # noqa: S102 - the sources above
    return made


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    setup, expression, change = CASES[name]
    module, x = _module(setup, expression), torch.ones(3, device=DEVICE)
    captured = capture(module.body)
    with torch.no_grad():
        before = module.body(x)
        for _ in range(5):
            assert torch.equal(captured(x), before)
        replays = recordings(captured).replays
        assert replays
        exec(change, vars(module))  # noqa: S102 - the sources above
        assert not torch.equal(module.body(x), before)
        for _ in range(5):
            assert torch.equal(captured(x), module.body(x))
    assert recordings(captured).replays > replays


def _local_name(settings: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def body(x: torch.Tensor) -> torch.Tensor:
        mine = settings
        if mine is None or mine.scale < 0:
            return x
        scaled: torch.Tensor = x * mine.scale
        return scaled

    return body


def test_an_attribute_that_no_code_looks_up_may_change() -> None:
    settings = types.SimpleNamespace(scale=2.0, step=0)
    captured, x = capture(_local_name(settings)), torch.ones(3, device=DEVICE)
    with torch.no_grad():
        for step in range(20):
            settings.step = step
            assert captured(x)[0].item() == 2.0
    assert recordings(captured).replays >= 15


def test_what_methods_in_c_keep_needs_no_guard() -> None:
    """Classes that torch makes in C have very many, and what one keeps cannot be replaced."""
    kind = type(torch.Tag.core)
    f = capture(lambda x: x * len([name for name in vars(kind) if name != "v"]))
    with torch.no_grad():
        for _ in range(6):
            f(torch.ones(3))
    assert recordings(f).replays
    guards = explain(f)(torch.ones(3)).guards
    assert guards
    assert not [guard for guard in guards if "keeps" in guard]
