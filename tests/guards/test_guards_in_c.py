"""What a replay relies on is compared in C: however much a body can read, a replay runs next to no Python for it."""

from __future__ import annotations

import abc
import dataclasses
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from tests.support.device import DEVICE, EXECUTES
from tests.support.python_calls import FOLDER, python_calls

MANY = 40
FIELDS = [(f"part{n}", int | None if n % 2 else tuple[int, ...]) for n in range(MANY)]
Settings = dataclasses.make_dataclass("Settings", FIELDS, namespace={"__module__": __name__})
SETTINGS = Settings(*range(MANY))


def _functions() -> tuple[Callable[[Tensor], Tensor], ...]:
    return tuple(types.FunctionType((lambda x: x + 1).__code__, globals(), f"add{n}") for n in range(MANY))


def _abstract() -> tuple[type, ...]:
    return tuple(abc.ABCMeta(f"Kind{n}", (abc.ABC,), {}) for n in range(MANY))


HELPERS, KINDS = _functions(), _abstract()


def annotated(x: Tensor) -> Tensor:
    return x * len([part for part in dataclasses.fields(SETTINGS) if getattr(SETTINGS, part.name) and part.type])


def named(x: Tensor) -> Tensor:
    for helper in HELPERS:
        x = helper(x) if helper.__name__ != "add0" else x
    return x


def of_kinds(x: Tensor) -> Tensor:
    return x * sum(isinstance(x, kind) for kind in KINDS) + len([kind.__name__ for kind in KINDS])


@pytest.mark.skipif(not EXECUTES, reason="nothing is replayed")
@pytest.mark.parametrize("body", [annotated, named, of_kinds])
def test_a_replay_asks_no_object_in_python(body: Callable[[Tensor], Tensor]) -> None:
    captured, x = capture(body), torch.ones(3, device=DEVICE)
    for _ in range(6):
        assert torch.equal(captured(x), body(x))
    before = recordings(captured).replays
    assert python_calls(lambda: captured(x), FOLDER / "guards") == []
    assert recordings(captured).replays == before + 1
