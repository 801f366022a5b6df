"""Guards that fail often: a few values become part of the key; new values in every call end at the budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, config, recordings
from capture.guards.key_guards import named_guards
from capture.key.code_names import NamedSource
from tests.support.device import DEVICE


class Config:
    """An object that tests put attributes on."""

    def __init__(self, **kept: Any) -> None:
        self.__dict__.update(kept)


def helper(config: Config, x: Tensor) -> Any:
    return x * config.scale  # type: ignore[attr-defined]


class Net(nn.Module):
    """A module whose ``forward`` reads through a helper: its own code does not name the attribute."""

    def __init__(self, kept: Config) -> None:
        super().__init__()
        self.kept = kept

    @override
    def forward(self, x: Tensor) -> Any:
        return helper(self.kept, x)


@pytest.mark.parametrize("values", [(1.0, 2.0), (1.0, 2.0, 3.0), (True, 1, 1.0)])
def test_few_values_are_recorded_once_each(values: tuple[Any, ...]) -> None:
    kept, x = Config(), torch.arange(3, device=DEVICE)
    net = Net(kept)
    mine = capture(Net(kept), max_recordings=8)
    with torch.no_grad(), config.patch(cache=False):
        for turn in range(60):
            kept.scale = values[turn % len(values)]  # type: ignore[attr-defined]
            result, right = mine(x), net(x)
            assert result.dtype is right.dtype
            assert torch.equal(result, right), turn
            del result
    counted = recordings(mine)
    assert counted.recordings == len(values)
    assert counted.replays >= 60 - 4 * len(values)


def _ever_new(change: Callable[[int], object], function: Any, plain: Any) -> str:
    x = torch.ones(3, device=DEVICE)
    with (
        torch.no_grad(), config.patch(cache=False), warnings.catch_warnings(record=True) as said,
    ):  # fmt: skip
        warnings.simplefilter("always", CaptureWarning)
        for turn in range(120):
            change(turn)
            assert torch.equal(function(x), plain(x)), turn
    counted = recordings(function)
    assert counted.eager_calls > 60
    assert counted.recordings <= 2
    assert counted.observations <= 40
    (finding,) = [str(warning.message) for warning in said if "CG906" in str(warning.message)]
    return finding


def test_ever_new_values_end_eagerly_and_are_named() -> None:
    kept = Config()

    class Compared(Net):
        @override
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) if str(getattr(self.kept, "scale")) else x  # noqa: B009 - set by the test

    net = Compared(kept)
    finding = _ever_new(lambda turn: setattr(kept, "scale", 1.0 / (turn + 1)), capture(Compared(kept)), net)
    assert "self.kept.scale" in finding


def test_ever_new_objects_end_eagerly_and_are_named() -> None:
    kept = Config()

    def body(x: Tensor) -> Any:
        return x * len(kept.table)  # type: ignore[attr-defined]

    finding = _ever_new(lambda _: setattr(kept, "table", {"a": object()}), capture(body), body)
    assert "kept.table" in finding


NAMED: dict[str, Any] = {
    "config": Config(), "list": [1.0, "a"], "dict": {"a": 1.0}, "tuple": (1, 2.0), "objects": [object()] * 100,
    "function": helper, "tensor": torch.ones(2), "None": None, "number": 3.0,
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("value", NAMED.values(), ids=NAMED)
def test_c_compares_what_a_body_names(value: Any) -> None:
    """Guards on a value that a body names are all of kinds that C compares without calling Python."""
    scope = {"name": value}
    found = named_guards(value, NamedSource(lambda: scope["name"], scope, "name"))
    assert found
    assert all(one.source.kind != "call" for one in found)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("value", [[object()], {"a": [1]}, ([],), bytearray(b"a"), {1.0}])
def test_what_counts_by_content_is_left_to_the_key(value: Any) -> None:
    scope = {"name": value}
    assert named_guards(value, NamedSource(lambda: scope["name"], scope, "name")) is None
