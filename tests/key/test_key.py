"""The key of a call: it is the same however the call is written, and tells plain values of different types apart."""

from __future__ import annotations

import collections
import enum
import gc
import math
import struct
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings
from capture.key import signature
from capture.runtime import numbers
from tests.support.keys import A, B, C, D, E, bits, check_same, x_of
from tests.support.keys import fresh as fresh

# ------------------------------------------------------------------------------------------------- one call, one key


def spread(
    a: Tensor, /, b: Tensor, c: float = 2.0, *rest: Tensor, d: Tensor | None = None, e: int = 3, **more: Tensor
) -> Tensor:
    result = a * c + b * e
    for tensor in rest:
        result = result + tensor
    if d is not None:
        result = result - d
    for name in sorted(more):
        result = result * more[name]
    return result


@pytest.mark.parametrize(
    "calls",
    [
        [((A, B), {}), ((A,), {"b": B}), ((A, B, 2.0), {}), ((A, B), {"c": 2.0, "e": 3}), ((A,), {"d": None, "b": B})],
        [((A, B), {"d": C}), ((A,), {"d": C, "b": B, "c": 2.0})],
        [((A, B, 2.0, C, D), {}), ((A, B, 2.0, C, D), {"e": 3, "d": None})],
        [((A, B), {"p": C, "q": D}), ((A,), {"b": B, "p": C, "q": D})],
    ],
    ids=["defaults", "keyword-only", "variadic", "keywords"],
)
def test_one_call_in_many_words_is_one_key(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    captured = capture(spread)
    for _ in range(3):
        for args, kwargs in calls:
            assert bits(captured(*args, **kwargs)) == bits(spread(*args, **kwargs))
    assert (recordings(captured).observations, recordings(captured).recordings) == (1, 1)


def test_a_body_sees_the_order_of_keywords_and_dicts() -> None:
    def fold(x: Tensor, table: dict[str, Tensor], **more: Tensor) -> Tensor:
        for tensor in (*table.values(), *more.values()):
            x = x * 2 + tensor
        return x

    captured = capture(fold)
    for _ in range(4):
        for table in ({"a": A, "b": B}, {"b": B, "a": A}):
            assert bits(captured(E, table, p=C, q=D)) == bits(fold(E, table, p=C, q=D))
            assert bits(captured(E, table, q=D, p=C)) == bits(fold(E, table, q=D, p=C))


def test_other_arguments_are_other_keys() -> None:
    captured = capture(spread, max_recordings=20)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((A, B), {}),
        ((A, B, 3.0), {}),
        ((A, B, 2.0, C), {}),
        ((A, B), {"d": C}),
        ((A, B), {"e": 4}),
        ((A, B), {"p": C}),
        ((A, B), {"q": C}),
    ]
    for _ in range(3):
        for args, kwargs in calls:
            assert bits(captured(*args, **kwargs)) == bits(spread(*args, **kwargs))
    assert recordings(captured).observations == len(calls)


def test_a_method_called_through_its_class_is_the_same_call() -> None:
    class Net(nn.Module):
        @override
        @capture
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) + 1

    net, x = Net(), x_of()
    for _ in range(3):
        for call in (lambda: net(x), lambda: net.forward(x), lambda: net.forward(x=x), lambda: Net.forward(net, x)):
            assert bits(call()) == bits(torch.relu(x) + 1)
    assert recordings(net.forward).observations == 1


def test_mutable_defaults_are_shared_as_in_python() -> None:
    def count(x: Tensor, seen: list[Tensor] = [E]) -> Tensor:  # noqa: B006 - the default under test
        return x + seen[0]

    captured = capture(count)
    for _ in range(3):
        assert bits(captured(A)) == bits(A + x_of(5))
    count.__defaults__[0][0] = x_of(6)  # type: ignore[index]
    check_same(captured, lambda x: x + x_of(6), A)


# ------------------------------------------------------------------------------------------------------ plain values


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    ONE = 1


VALUES: list[Any] = [
    True, 1, 1.0, 1 + 0j, False, 0, 0.0, -0.0, None, "1", b"1", (1,), [1], (1.0,), (True,), [True], {"a": 1},
    {"a": 1.0}, {"b": 1}, Colour.RED, Colour.BLUE, Level.ONE, torch.float32, torch.float64, torch.device("cpu"),
    torch.Size([1]), range(1), slice(0, 1), slice(0, 2), ..., float("inf"), float("-inf"), float("nan"), math.pi,
    (), [], {}, ((),), 10**30, torch.relu, torch.tanh, int, complex(0.0, -0.0), complex(0.0, 0.0), frozenset([1]),
    collections.OrderedDict(a=1),
]  # fmt: skip


def test_values_are_told_apart_with_their_types() -> None:
    """``True``, ``1`` and ``1.0`` are equal in Python and different here, ``0.0`` and ``-0.0`` too."""

    @capture(max_recordings=100)
    def tell(x: Tensor, value: Any) -> tuple[Tensor, Any]:
        return torch.relu(x) + 1, value

    for _ in range(3):
        for value in VALUES:
            assert bits(tell(A, value)[1]) == bits(value), value
    assert recordings(tell).observations == len(VALUES)
    assert recordings(tell).recordings == len(VALUES)


def test_the_type_of_a_number_decides_the_dtype() -> None:
    def scale(x: Tensor, value: Any) -> Tensor:
        result: Tensor = x * value
        return result

    captured = capture(scale, max_recordings=20)
    whole = torch.arange(6)
    for _ in range(3):
        for value in (True, 1, 1.0, 2, 2.0, 1 + 0j):
            assert bits(captured(whole, value)) == bits(scale(whole, value))


def test_signed_zero_is_never_taken_for_zero() -> None:
    def divide(x: Tensor, zero: float) -> Tensor:
        return torch.ones_like(x) / torch.full_like(x, zero)

    captured = capture(divide)
    for zero in (0.0, 0.0, 0.0, -0.0, -0.0, -0.0, 0.0):
        assert bits(captured(A, zero)) == bits(divide(A, zero))


NAN = float("nan")
PAYLOAD = struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\xff")[0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("wrap", [lambda nan: nan, lambda nan: (1.0, nan), lambda nan: {"a": complex(0.0, nan)}])
@pytest.mark.parametrize("is_state", [False, True])
def test_nans_of_two_signs_are_told_apart(wrap: Callable[[float], Any], is_state: bool) -> None:
    state = types.SimpleNamespace(value=wrap(NAN))

    def of(value: Any) -> float:
        part = value[1] if isinstance(value, tuple) else value["a"].imag if isinstance(value, dict) else value
        return math.copysign(2.0, part)

    def body(x: Tensor, value: Any) -> Tensor:
        return x * of(state.value if is_state else value)

    captured = capture(body)
    for nan in (NAN, NAN, NAN, NAN, -NAN, -NAN, -NAN, NAN, PAYLOAD, PAYLOAD):
        state.value = wrap(nan)
        assert bits(captured(A, wrap(nan))) == bits(body(A, wrap(nan)))
    assert recordings(captured).replays >= 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -1e-310, math.inf, -math.inf, NAN, -NAN, PAYLOAD])
def test_the_number_of_a_part_of_a_key(value: float) -> None:
    part = signature.key_of(value, signature.Leaves())
    assert struct.pack("<d", numbers.number_of(part)) == struct.pack("<d", value)
    assert numbers.is_number(part) == (value in (1.5, -1e-310))


def test_nan_equals_itself_as_a_key() -> None:
    captured = capture(lambda x, value: x * value)
    for _ in range(5):
        check_same(captured, lambda x, value: x * value, A, float("nan"), times=1)
    assert recordings(captured).observations == 1


def test_numbers_of_a_subclass_are_values() -> None:
    class Metres(float):
        __slots__ = ()

    captured = capture(lambda x, value: x * value)
    for value in (Metres(2), Metres(2), Metres(2), Metres(3), Metres(3), 2.0, 2.0):
        check_same(captured, lambda x, value: x * value, A, value, times=1)


def test_an_argument_that_changes_in_place_is_a_new_value() -> None:
    captured = capture(lambda x, numbers, table: x * numbers[0] + table["shift"])
    numbers, table = [2.0, 1.0], {"shift": 1.0}
    for change in (None, "numbers", None, "table", None, None):
        if change == "numbers":
            numbers[0] = 5.0
        if change == "table":
            table["shift"] = 7.0
        assert bits(captured(A, numbers, table)) == bits(A * numbers[0] + table["shift"])


def test_a_callable_argument_is_known_by_identity() -> None:
    captured = capture(lambda x, act: act(x) + 1)
    for act in (torch.relu, torch.relu, torch.relu, torch.tanh, torch.tanh, torch.tanh, torch.relu):
        assert bits(captured(A, act)) == bits(act(A) + 1)


class _EqualToAll(nn.Sequential):
    """Compares equal to everything."""

    @override
    def __eq__(self, other: object) -> bool:
        return True

    @override
    def __hash__(self) -> int:
        return 1


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("kind", [nn.Sequential, _EqualToAll])
def test_parameters_die_with_a_module_that_had_a_key(kind: Any, forgets: bool) -> None:
    """The parameters are freed at once, not when the next key is made."""
    model = kind(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    key = signature.module_key(model)
    if forgets:
        signature.forget_module_structure(model)
    assert signature.module_key(model) == key
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert [reference() for reference in parameters] == [None] * 4
