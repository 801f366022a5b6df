"""Kinds of state that C code keeps, or that only an import in the body leads to: a change is seen."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from capture import capture, recordings
from tests.support.device import AGAIN, DEVICE

Body = Callable[[torch.Tensor], torch.Tensor]
Made = tuple[Body, Callable[[], object]]


def factory_of_a_defaultdict() -> Made:
    values: defaultdict[str, float] = defaultdict(lambda: 2.0)

    def body(x: torch.Tensor) -> torch.Tensor:
        factor = values["absent"]
        del values["absent"]
        return x * factor

    return body, lambda: setattr(values, "default_factory", lambda: 3.0)


def window_on_bytes() -> Made:
    content = bytearray(b"abc")
    window = memoryview(content)
    return lambda x: x * window[0], lambda: content.__setitem__(0, 5)


def _module(name: str) -> Any:
    made: Any = types.ModuleType(name)
    made.factor = 2.0
    sys.modules[name] = made
    return made


def module_imported_in_the_body() -> Made:
    module = _module("capture_tests_imported")

    def body(x: torch.Tensor) -> torch.Tensor:
        import capture_tests_imported  # type: ignore[import-not-found]

        return torch.mul(x, capture_tests_imported.factor)

    return body, lambda: setattr(module, "factor", 3.0)


def module_replaced() -> Made:
    _module("capture_tests_replaced")

    def body(x: torch.Tensor) -> torch.Tensor:
        from capture_tests_replaced import factor  # type: ignore[import-not-found]

        return torch.mul(x, factor)

    def change() -> None:
        _module("capture_tests_replaced").factor = 3.0

    return body, change


def method_by_type() -> Made:
    class Holder:
        @functools.singledispatchmethod
        def factor(self, _: object) -> float:
            return 2.0

    def change() -> None:
        Holder.__dict__["factor"].register(int, lambda _, __: 3.0)

    holder = Holder()
    return lambda x: x * holder.factor(1), change


def arguments_of_an_error() -> Made:
    error = ValueError(2.0)
    return lambda x: x * error.args[0], lambda: setattr(error, "args", (3.0,))


def seed_of_a_generator() -> Made:
    generator = torch.Generator().manual_seed(3)
    return lambda x: x * generator.initial_seed(), lambda: generator.manual_seed(5)


def state_of_numpys_generator() -> Made:
    generator: Any = np.random.default_rng(3)
    return lambda x: x * (generator.bit_generator.state["state"]["state"] % 1000), lambda: generator.random()


def state_of_pythons_generator() -> Made:
    generator = random.Random(3)
    return lambda x: x * (generator.getstate()[1][1] % 1000), lambda: generator.seed(8)


def method_put_on_tensors() -> Made:
    tensors: Any = torch.Tensor
    tensors.capture_tests_scaled = lambda self: self * 2
    return lambda x: x.capture_tests_scaled(), lambda: setattr(tensors, "capture_tests_scaled", lambda self: self * 3)


KINDS = [
    factory_of_a_defaultdict, window_on_bytes, module_imported_in_the_body, module_replaced, method_by_type,
    arguments_of_an_error, seed_of_a_generator, state_of_numpys_generator, state_of_pythons_generator,
    method_put_on_tensors,
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", KINDS)
def test_a_change_is_seen(make: Callable[[], Made]) -> None:
    body, change = make()
    captured, x = capture(body), torch.ones(3, device=DEVICE)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(captured(x), body(x))
        replays, before = recordings(captured).replays, body(x)
        assert replays > 0
        change()
        assert not torch.equal(body(x), before)
        for _ in range(5):
            assert torch.equal(captured(x), body(x))
        assert recordings(captured).replays > replays


def test_types_are_asked_for_without_a_tensor() -> None:
    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float64)
        return x.to(wide) * 2 if torch.can_cast(x.dtype, wide) else x

    x = torch.ones(3, device=DEVICE)
    with torch.no_grad():
        for _ in range(5):
            assert body(x).dtype is torch.float64
    assert recordings(body).replays == 3 - AGAIN


def test_a_packed_sequence_as_a_result() -> None:
    @capture
    def body(x: torch.Tensor) -> Any:
        return torch.nn.utils.rnn.pack_padded_sequence(x * 2, torch.tensor([3]), enforce_sorted=True)

    x = torch.ones(3, 1, 1, device="cpu")
    with torch.no_grad(), torch.device("cpu"):
        for _ in range(5):
            packed = body(x)
            assert isinstance(packed, torch.nn.utils.rnn.PackedSequence)
            assert torch.equal(packed.data, torch.full((3, 1), 2.0))
