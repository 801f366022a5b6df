"""Each body gives what eager gives, call after call: results, exceptions, arguments, state, generators. It replays."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, config, recordings
from capture.tree import thread_trees
from tests.segments.bodies import PROGRAMS, UNSTEADY, Program
from tests.support.device import EXECUTES, rng_state, set_rng_state, use_device
from tests.support.observed import bits

CALLS = 40
MOVES = {"buffer_replaced"}
"""Their state is a new tensor after each call."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Begin without gradients, plans on disk and the tree of another test."""
    thread_trees.forget_trees()
    use_device()
    with torch.no_grad(), config.patch(cache=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def state_of(kept: Any) -> Any:
    if isinstance(kept, nn.Module):
        gradients = [parameter.grad for parameter in kept.parameters()]
        return bits([*kept.state_dict().values(), *[gradient for gradient in gradients if gradient is not None]])
    if isinstance(kept, torch.Generator):
        return bits(kept.get_state())
    return bits(kept if isinstance(kept, (list, dict)) else [*vars(kept).values()] if kept is not None else [])


def outcome(function: Any, args: tuple[Any, ...]) -> Any:
    try:
        result = function(*args)
    except ValueError as error:
        return str(error)
    places = [at for at, arg in enumerate(args) if arg is result]
    return bits(result), places


def run(program: Program, calls: int = CALLS, *, captured: bool) -> tuple[list[Any], Any]:
    function, arguments, kept = program
    function = capture(function) if captured else function
    calls_seen = []
    for number in range(calls):
        args = arguments(number)
        result = outcome(function, args)
        calls_seen.append(
            (result, bits([arg for arg in args if isinstance(arg, Tensor)]), state_of(kept), bits(rng_state()))
        )
    return calls_seen, function


def both(name: str, calls: int = CALLS) -> Any:
    """Run the program eagerly and captured, and compare call by call. Gives the captured function."""
    return compared(PROGRAMS[name], calls)


def compared(make: Callable[[], Program], calls: int = CALLS) -> Any:
    """Compare calls of a program that is not in the table with eager ones, as ``both`` does."""
    set_rng_state(torch.Generator(rng_device()).manual_seed(5).get_state())
    expected, _ = run(make(), calls, captured=False)
    set_rng_state(torch.Generator(rng_device()).manual_seed(5).get_state())
    observed, function = run(make(), calls, captured=True)
    for number, (theirs, ours) in enumerate(zip(expected, observed, strict=True)):
        for what, eager_part, captured_part in zip(
            ("result", "arguments", "state", "generator"), theirs, ours, strict=True
        ):
            assert eager_part == captured_part, f"call {number}: {what}"
    return function


def rng_device() -> torch.device:
    return torch.empty(0).device


def says_that_it_gave_up(counters: Any) -> None:
    """A finding says that the function reads other values in each call. Where recording executes nothing, recordings
    fail before that."""
    told = [(finding.code, finding.severity.name) for finding in counters.findings]
    assert ("CG201", "EAGER") in told or (not EXECUTES and "CG906" in dict(told)), told


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", [one for one in PROGRAMS if one not in UNSTEADY])
def test_body_is_as_eager_and_replays(name: str) -> None:
    counters = recordings(both(name))
    if name in MOVES and not EXECUTES:  # recordings with breaks are bound to no other address there
        assert counters.eager_calls >= CALLS // 2, str(counters)
    else:
        assert counters.replays >= CALLS // 2, str(counters)


@pytest.mark.parametrize("name", sorted(UNSTEADY))
def test_body_that_never_repeats_is_as_eager(name: str) -> None:
    counters = recordings(both(name))
    assert counters.recordings <= 10
    says_that_it_gave_up(counters)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_body_is_as_eager_in_poisoned_memory(name: str) -> None:
    with config.patch(poison=True):
        both(name, 24)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_body_is_verified(name: str) -> None:
    with config.patch(verify="always"):
        function = both(name, 16)
    assert not any(finding.code == "CG903" for finding in recordings(function).findings)
