"""Whatever a body writes to Python state is there after each call as in eager: replays write it, or the call is eager.

Each kind runs in two worlds, eager and captured, for eight calls. What goes eager says so.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from capture import capture, recordings
from capture.tree import thread_trees
from tests.support.world_state import digest
from tests.support.write_kinds import CONTEXTS, FORMS, PLAIN, PRELUDE, STATE, TENSORS, source_of
from tests.support.writes import x_of

_PRELUDE = compile(PRELUDE, "<prelude of writes>", "exec", dont_inherit=True)
_ALL = {**TENSORS, **{f"plain: {name}": text for name, text in PLAIN.items()}}
_TOLD = ("CG202", "CG204", "CG205", "CG401", "CG110", "CG906", "CG501")


class World:
    """A program's text, run in a namespace of its own."""

    def __init__(self, text: str, *, captured: bool) -> None:
        self.scope: dict[str, Any] = {"__name__": "user_code"}
        exec(_PRELUDE, self.scope)  # noqa: S102
        torch.manual_seed(0)
        own = self.scope["own"] = nn.Linear(4, 4)
        own.register_buffer("kept", torch.zeros(3, 4))
        own.extra = nn.Parameter(torch.ones(4))
        own.bias.requires_grad_(False)
        exec(compile(text, "<a body that writes>", "exec", dont_inherit=True), self.scope)  # noqa: S102
        self.call = self.scope["call"]
        if captured:
            self.call = capture(self.call)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    def run(self, number: int, context: str) -> Any:
        """The result of one call, and the state after it."""
        x = x_of(number)
        with torch.no_grad() if context == "no grad" else contextlib.nullcontext():
            x.requires_grad_(context == "region")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                y = self.call(x)
            given = digest(y)
            if context == "region" and y.requires_grad:
                y.sum().backward()
        drawn = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        return given, digest(x.grad), {name: digest(self.scope.get(name)) for name in STATE}, drawn

    def recordings(self) -> Any:
        """The counters of the captured body."""
        return recordings(self.call.forward if isinstance(self.call, nn.Module) else self.call)


def _first_difference(eager: Any, captured: Any, path: str) -> str | None:
    if eager == captured:
        return None
    if type(eager) is type(captured) and isinstance(eager, dict) and eager.keys() == captured.keys():
        differences = [_first_difference(eager[name], captured[name], f"{path}.{name}") for name in eager]
    elif type(eager) is type(captured) and isinstance(eager, (list, tuple)) and len(eager) == len(captured):
        pairs = enumerate(zip(eager, captured, strict=True))
        differences = [_first_difference(*pair, f"{path}[{at}]") for at, pair in pairs]
    else:
        differences = [None if eager == captured or eager != eager else f"{path}: {eager}, captured {captured}"]
    return next((difference for difference in differences if difference is not None), None)


def compare(name: str, form: str, context: str, *, returned: bool) -> None:
    """Make the same calls in both worlds, and compare them."""
    text = source_of(_ALL[name], form, context, returned=returned)
    thread_trees.forget_trees()
    eager = World(text, captured=False)
    expected = [eager.run(number, context) for number in range(8)]
    world = World(text, captured=True)
    for number in range(8):
        difference = _first_difference(expected[number], world.run(number, context), f"call {number}")
        assert difference is None, (text, difference)
    counts = world.recordings()
    if counts.eager_calls > 4 and context != "region":
        assert any(finding.code in _TOLD for finding in counts.findings), (text, counts)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", _ALL)
def test_a_function_writes(name: str) -> None:
    compare(name, "function", "no grad", returned=False)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", _ALL)
def test_what_is_given_is_kept_elsewhere_too(name: str) -> None:
    number = list(_ALL).index(name)
    compare(name, FORMS[number % len(FORMS)], CONTEXTS[number // len(FORMS) % len(CONTEXTS)], returned=True)
