"""Arrays, texts, lists and sizes that the host reads: as eager, call after call, and replayed where they come again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from capture.observe import host_values
from tests.segments.bodies import Program, draw
from tests.segments.bodies_of_reads import EAGER, PROGRAMS, UNSTEADY, names
from tests.segments.test_bodies import CALLS, compared, fresh
from tests.support.device import DEVICE
from tests.support.observed import bits

__all__ = ["fresh"]

OF_THE_HOST = {
    "array", "as_array", "argmax_of_array", "array_of_flags", "array_detached", "array_of_all_values",
    "array_read_late", "array_of_what_was_written_before", "array_gone_before_a_write", "array_to_tensor", "long_list",
    "long_flat_list", "listed_after_a_write", "text", "text_decides", "padded", "array_and_state", "text_and_draws",
    "list_and_exception", "formatted", "array_returned",
}  # fmt: skip
"""Replayed where tensors lie in the host's memory; eager and told on a device."""


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", names())
def test_body_is_as_eager_and_replays(name: str) -> None:
    counters = recordings(compared(PROGRAMS[name]))
    if DEVICE.type == "cpu" or name not in OF_THE_HOST:
        assert counters.replays >= CALLS // 2, str(counters)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted(EAGER | UNSTEADY))
def test_body_that_cannot_be_recorded_is_as_eager(name: str) -> None:
    counters = recordings(compared(PROGRAMS[name]))
    assert counters.replays < CALLS // 2
    assert any(finding.severity.name == "EAGER" for finding in counters.findings)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", sorted(OF_THE_HOST))
def test_body_is_as_eager_in_poisoned_memory(name: str) -> None:
    with config.patch(poison=True, verify="always"):
        function = compared(PROGRAMS[name], 12)
    assert not any(finding.code == "CG903" for finding in recordings(function).findings)


def made_of_an_array(x: Tensor) -> Any:
    return x * 2, x[0, :2].sign().cpu().numpy() + 1


def made_of_a_list(x: Tensor) -> Any:
    return {"y": x * 2, "seen": set(x[0, :2].sign().tolist())}


@pytest.mark.parametrize("body", [made_of_an_array, made_of_a_list])
def test_each_call_has_its_own_objects(body: Callable[..., Any]) -> None:
    """A caller may change what it was given: no later call sees it."""
    f, kept = capture(body), []
    for _ in range(6):
        result, expected = (
            list(given.values()) if isinstance(given, dict) else given for given in (f(draw(1)), body(draw(1)))
        )
        assert bits(result[0]) == bits(expected[0])
        assert repr(result[1]) == repr(expected[1])
        kept.append(result[1])
        result[1].add(9) if isinstance(result[1], set) else result[1].fill(9)
    assert len({id(made) for made in kept}) == 6


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("told", "whole"),
    [
        ("True", True), ("-3", True), ("1.0", True), ("-0.0", True), ("0.5", False), ("1e-05", False), ("nan", False),
        ("'tensor([1., 0.])'", True), ("'tensor([1.5000])'", False), ("torch.int64[3] 0a1b", True),
        ("torch.float32[3] with fractions 0a1b", False), ("[('torch.float32', (2, 4))]", True),
    ],
)  # fmt: skip
def test_values_with_fractions_are_not_expected_again(told: str, whole: bool) -> None:
    assert host_values.is_whole(told) is whole


def program(body: Callable[..., Any]) -> Callable[[], Program]:
    return lambda: (body, lambda number: (draw(number),), None)


def test_settings_of_texts_are_followed() -> None:
    """A text follows from what it is printed with, too: it is made anew in each replay."""

    def body(x: Tensor) -> Tensor:
        return x + len(repr(torch.arange(3, device=x.device) / 3))

    f, x = capture(body), draw(1)
    for precision in (4, 4, 4, 4, 2, 2, 4):
        torch.set_printoptions(precision=precision)
        try:
            assert bits(f(x)) == bits(body(x))
        finally:
            torch.set_printoptions(profile="default")


def test_a_first_call_that_reads_is_followed_by_replays() -> None:
    """It sets up what no guard sees. Later runs read nothing, and one of them is enough to record that."""
    made: list[float] = []

    @functools.lru_cache
    def scale(x: Tensor) -> float:
        made.append(x.sum().item())
        return 2.0

    x = torch.ones(3)

    @capture
    def body(y: Tensor) -> Tensor:
        return torch.relu(y) * scale(x)

    for number in range(10):
        y = torch.full((3,), float(number))
        assert torch.equal(body(y), torch.relu(y) * 2)
    assert made == [3.0]
    assert recordings(body).replays >= 6, recordings(body)
