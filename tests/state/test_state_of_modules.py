"""Effects in modules that code imports itself or names, in classes that methods name, in those of libraries, and behind
methods of C.

Each body runs eagerly and captured; what it leaves, and how often it replays, is compared.
"""

from __future__ import annotations

import contextvars
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional
from torch import Tensor

from capture import capture, recordings

functional: Any = torch.nn.functional
nn: Any = torch.nn
Put = Callable[[Any], Any]
CALLS = 8
IN_MODULE = """
v, n = None, 0
class Kept: n = 0
def put(value):
    global v, n
    v, n = value, n + 1
"""


@pytest.fixture
def state() -> Iterator[Any]:
    made: Any = types.ModuleType("kept_elsewhere")
    exec(IN_MODULE, made.__dict__)  # noqa: S102
    sys.modules[made.__name__] = made
    functional.kept_elsewhere, nn.Identity.kept_elsewhere = None, 0
    yield made
    del functional.kept_elsewhere, nn.Identity.kept_elsewhere
    del sys.modules[made.__name__]


class Count:
    n = 0


def _imports_and_sets(y: Tensor) -> None:
    import kept_elsewhere  # type: ignore[import-not-found]

    kept_elsewhere.v = y


def _imports_and_counts(y: Tensor) -> None:
    import kept_elsewhere as there

    there.n += 1


def _imports_a_name(y: Tensor) -> None:
    from kept_elsewhere import Kept

    Kept.n += 1


def _runs_its_function(y: Tensor) -> None:
    import kept_elsewhere

    kept_elsewhere.put(y)


def _counts_in_its_class(y: Tensor) -> None:
    import kept_elsewhere

    kept_elsewhere.Kept.n += 1


def _looks_it_up(y: Tensor) -> None:
    sys.modules["kept_elsewhere"].v = y  # type: ignore[attr-defined]


def _counts_in_own_module(y: Tensor) -> None:
    Count.n += 1


def _sets_in_a_library(y: Tensor) -> None:
    nn.functional.kept_elsewhere = y


def _counts_in_class_of_library(y: Tensor) -> None:
    nn.Identity.kept_elsewhere += 1


PUTS = [
    _sets_in_a_library, _counts_in_class_of_library,
    _imports_and_sets, _imports_and_counts, _imports_a_name, _runs_its_function, _counts_in_its_class, _looks_it_up,
    _counts_in_own_module,
]  # fmt: skip


def _by_function(put: Put) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        y = x * 2
        put(y)
        return y

    return body


def _by_method(put: Put) -> Callable[[Tensor], Tensor]:
    class Layer:
        step = staticmethod(put)

        def run(self, x: Tensor) -> Tensor:
            y = x * 2
            self.step(y)
            return y

    return lambda x: Layer().run(x)


def _left(state: Any) -> list[Any]:
    tensors = [None if one is None else one.tolist() for one in (state.v, functional.kept_elsewhere)]
    return [*tensors, state.n, state.Kept.n, Count.n, nn.Identity.kept_elsewhere]


def _run(body: Callable[[Tensor], Tensor], look: Callable[[], Any]) -> list[Any]:
    seen = []
    for i in range(CALLS):
        y = body(torch.arange(3.0) + i)
        seen.append((y.tolist(), look()))
    return seen


@pytest.mark.parametrize("by", [_by_function, pytest.param(_by_method, marks=pytest.mark.one_in(2))])
@pytest.mark.parametrize("put", PUTS)
def test_what_is_left_in_a_module(put: Put, by: Callable[[Put], Callable[[Tensor], Tensor]], state: Any) -> None:
    first = dict(state.__dict__)
    Count.n = 0
    eager = _run(by(put), lambda: _left(state))
    state.__dict__.update(first)
    state.Kept.n = Count.n = nn.Identity.kept_elsewhere = 0
    functional.kept_elsewhere = None
    captured = capture(by(put))
    assert _run(captured, lambda: _left(state)) == eager
    assert recordings(captured).replays >= CALLS - 4


class Plain:
    v: Any = None


def _of_a_variable() -> tuple[Put, Callable[[], Any]]:
    variable = contextvars.ContextVar[Any]("variable")
    return variable.set, variable.get


def _of_a_table() -> tuple[Put, Callable[[], Any]]:
    table: dict[str, Any] = {}
    store = table.__setitem__
    return lambda y: store("y", y), lambda: table["y"]


def _of_an_object() -> tuple[Put, Callable[[], Any]]:
    kept = Plain()
    store = kept.__setattr__
    return lambda y: store("v", y), lambda: kept.v


def _of_a_cell() -> tuple[Put, Callable[[], Any]]:
    cell = types.CellType(None)

    def put(y: Any) -> None:
        cell.cell_contents = y

    return put, lambda: cell.cell_contents


@pytest.mark.parametrize("make", [_of_a_variable, _of_a_table, _of_an_object, _of_a_cell])
def test_what_methods_of_c_keep(make: Callable[[], tuple[Put, Callable[[], Any]]]) -> None:
    put, look = make()
    eager = _run(_by_function(put), lambda: look().tolist())
    put, look = make()
    captured = capture(_by_function(put))
    assert _run(captured, lambda: look().tolist()) == eager
    assert recordings(captured).replays >= CALLS - 4
