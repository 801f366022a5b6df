"""Bodies in the style of libraries: no read is without a guard, and each switch shows in the call after it."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from capture import capture, config, recordings
from capture.api.decorator import captured_states
from tests.guards.library_bodies import BODIES, apart
from tests.guards.library_modules import Body
from tests.support.read_tracer import trace


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    with config.patch(cache=False), apart():
        yield


def _ready(name: str) -> tuple[Body, Any]:
    torch.manual_seed(0)
    body = BODIES[name]()
    captured = capture(body.target, max_recordings=8)
    return body, captured


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("name", "grad"),
    [
        pytest.param(name, grad, marks=pytest.mark.slow if (at % 2 == 0) == grad else ())
        for at, name in enumerate(BODIES)
        for grad in (False, True)
    ],
)
def test_no_read_without_a_guard(name: str, grad: bool) -> None:
    body, captured = _ready(name)
    with torch.set_grad_enabled(grad or name == "agent"):
        for _ in range(6):
            captured(*body.arguments)
        assert recordings(captured).replays, recordings(captured)
        tracer = trace(captured, *body.arguments)
    assert tracer.reads > 10
    assert not tracer.unguarded, "\n".join(dict.fromkeys(tracer.unguarded))


def _calls(name: str, switch: str, *, ours: bool) -> list[Any]:
    """The results of five calls before the switch and four after it."""
    torch.manual_seed(0)
    with apart(), torch.set_grad_enabled(name == "agent"):
        body = BODIES[name]()
        function = capture(body.target, max_recordings=8) if ours else body.target
        results = [_outcome(function, body) for _ in range(5)]
        body.switches[switch]()
        return [*results, *[_outcome(function, body) for _ in range(4)]]


def _outcome(function: Any, body: Body) -> Any:
    try:
        return function(*body.arguments).detach().clone()
    except (AttributeError, KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


SWITCHES = [(name, switch) for name, one in BODIES.items() for switch in one().switches]


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("name", "switch"), SWITCHES)
def test_each_switch_shows(name: str, switch: str) -> None:
    eager, mine = [
        contextvars.copy_context().run(lambda ours=ours: _calls(name, switch, ours=ours))  # type: ignore[misc]
        for ours in (False, True)
    ]
    for at, (one, other) in enumerate(zip(eager, mine, strict=True)):
        assert one == other if isinstance(one, str) else torch.equal(one, other), f"call {at}"


@pytest.mark.slow
def test_the_tracer_finds_what_no_guard_tells_of() -> None:
    """Where guards are taken away the tracer names the reads that they covered."""
    body, captured = _ready("scheduler")
    with torch.no_grad():
        for _ in range(4):
            captured(*body.arguments)
        (node,) = captured_states(captured)[0].entries()[0].nodes
        whole = node.guard.structure
        left_out = {
            ("self", "names"): "alphas of a Scheduler", ("self.config", "table"): "clip_range",
            ("self.alphas", "sequence"): "members of a list", ("self.timesteps", "table"): "members of a dict",
            ("Scheduler", "names"): "order of class Scheduler",
        }  # fmt: skip
        node.guard.structure = [
            guard_made for guard_made in whole if (guard_made.source.path, guard_made.kind) not in left_out
        ]
        assert len(node.guard.structure) <= len(whole) - len(left_out)
        missed = trace(captured, *body.arguments).unguarded
        for guard, name in left_out.items():
            assert any(name in read for read in missed), (guard, missed)
        node.guard.structure = whole
        assert not trace(captured, *body.arguments).unguarded
