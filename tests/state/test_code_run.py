"""Which code objects of a run count as the body's, so that guards are made for what they read."""

from __future__ import annotations

import ctypes
import functools
import gc
import linecache
import math
import types
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from capture import capture, recordings
from capture.observe import run
from capture.state.c_calls import is_called_in_foreign_code, is_foreign
from capture.state.code_run import code_run
from capture.torch_private import operator_watch
from tests.support.device import EXECUTES


def function_of(module: str, text: str, **names: Any) -> Any:
    """A function whose globals say that it belongs to that module."""
    scope: dict[str, Any] = {"__name__": module, **names}
    exec(text, scope)  # noqa: S102 - so that its globals have another module's name
    return scope["run"]


def users() -> int:
    return 1


def test_code_of_dynamo_does_not_count_but_what_it_calls_does() -> None:
    """Dynamo's own code reads counters that differ in every call: guards on them would never hold."""
    wrapper = function_of("torch._dynamo.eval_frame", "def run(f): return f()")
    with code_run() as found:
        wrapper(users)
    assert users.__code__ in found.codes
    assert wrapper.__code__ not in found.codes


def test_what_compiles_does_not_count_nor_does_what_it_calls() -> None:
    compiler = function_of("torch._inductor.compile_fx", "def run(f): return f()")
    with code_run() as found:
        compiler(users)
    assert users.__code__ not in found.codes


def test_code_of_torch_counts_as_its_callers_does() -> None:
    called = function_of("torch.nn.modules.linear", "def run(f): return f()")
    with code_run() as found:
        called(users)
    assert isinstance(users.__code__, types.CodeType)
    assert {users.__code__, called.__code__} <= set(found.codes)


def test_code_that_launches_compiled_pieces_does_not_count_but_hooks_it_calls_do() -> None:
    launcher = function_of("triton.runtime.jit", "def run(f): f(); return f()")
    with code_run() as found:
        launcher(users)
    assert users.__code__ in found.codes
    assert launcher.__code__ not in found.codes


def test_only_code_of_the_body_is_noted_in_a_watched_run() -> None:
    """Neither the code around the body nor code that torch runs only because of the watching mode is noted."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).igamma(x) + 1  # no other test calls igamma, so that torch makes its entry in this run

    noted: list[set[types.CodeType]] = []

    def run_watched(*args: Any) -> Any:
        watched = original(*args)
        noted.append(set(watched.ran.codes))
        return watched

    original = run.run_watched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_watched", run_watched)
        captured = capture(body)
        captured(torch.ones(2))
    # torch runs code of its own for a default device, and around a mode
    of_torch = ("_device.py",) if operator_watch.has_key else ("_device.py", "compiler/__init__.py", "_compile.py")
    own = [code for code in noted[0] if not code.co_filename.endswith(of_torch)]
    assert (len(noted), own) == (1, [body.__code__])


class InACycle:
    """Dies in a collection, not as its last name goes."""

    def __init__(self) -> None:
        self.itself = self


class Final(InACycle):
    def __del__(self) -> None:
        users()


def test_what_a_garbage_collection_runs_is_left_out() -> None:
    """It may come at any time, and is about objects of anybody. The code after it counts again."""
    weak, called = weakref.WeakKeyDictionary[Any, int](), list[int]()

    def body() -> int:
        gc.collect()
        return after()

    def after() -> int:
        return 1

    def gone(_: Any) -> None:
        called.append(users())

    dying = InACycle()
    weak[dying], reference = 1, weakref.ref(dying, gone)
    Final()
    del dying
    with code_run() as found:
        body()
    assert (called, len(weak), reference()) == ([1], 0, None)
    assert set(found.codes) == {body.__code__, after.__code__}


def test_a_body_that_a_finalizer_calls_is_seen() -> None:
    seen = list[set[types.CodeType]]()

    class Calls(InACycle):
        def __del__(self) -> None:
            with code_run() as found:
                users()
            seen.append(set(found.codes))

    Calls()
    gc.collect()
    assert seen == [{users.__code__}]


def test_reading_source_text_for_a_stack_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads source files through ``linecache`` when it makes fake tensors; which files it reads depends on what
    the cache has, so that it is no state of the body."""
    monkeypatch.setattr(linecache, "cache", {})

    def body(x: torch.Tensor) -> torch.Tensor:
        FakeTensorMode()
        return x * 2

    captured = capture(body)
    for number in range(5):
        linecache.cache.pop(__file__, None)
        assert torch.equal(captured(torch.full((2,), float(number))), torch.full((2,), 2.0 * number))
    # a run that only captures does not tell which members of a dict are looked up: one more may be watched
    assert recordings(captured).replays in ((3,) if EXECUTES else (2, 3)), recordings(captured)


def test_functions_in_c_are_those_of_python_and_torch_or_foreign() -> None:
    extension = types.SimpleNamespace(__self__=None, __module__="package._core", __name__="log")
    with code_run() as found:
        users()
        [2, 1].sort()
        torch.ones(2).add(1)
    assert not found.calls_foreign
    known: list[Any] = [len, math.sin, [].append, dict.fromkeys, torch.add, torch.ones(2).add]
    assert not any(map(is_foreign, known))
    assert is_foreign(extension)
    kinds = [
        type(ctypes.memmove),
        type(ctypes.CDLL(None).strlen),
        type(users),
        type(torch.ops.aten.add),
        functools.partial,
    ]
    assert [*map(is_called_in_foreign_code, kinds)] == [True, True, False, False, False]
