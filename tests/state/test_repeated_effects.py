"""After a replay Python state is as after an eager call: each program makes ten calls captured and eagerly."""

from __future__ import annotations

import copy
import types
import warnings
from typing import Any

import pytest
import torch

from capture import CaptureWarning, capture, mark_step_begin, recordings
from tests.state.repeated_effects import KINDS
from tests.support.world_state import digest
from tests.support.writes import fresh as fresh
from tests.support.writes import x_of

CALLS = 10


class World:
    """One program, in a module of its own."""

    def __init__(self, text: str, *, captured: bool) -> None:
        self.module = types.ModuleType("user_code")
        exec(compile(text, "<a body that writes>", "exec", dont_inherit=True), self.module.__dict__)  # noqa: S102
        torch.manual_seed(0)
        self.m = self.module.__dict__["M"]()
        self.module.__dict__["m"] = self.m
        self.captured = capture(self.m) if captured else None
        self.own = set(self.module.__dict__)

    def call(self, number: int) -> Any:
        """What the call gives, and all state of the program after it."""
        scope, given = self.module.__dict__, list[Any]()
        scope["between"](number)
        mark_step_begin()
        result = self.m(x_of(number), given)
        return digest(result), digest(given), self.state()

    def state(self) -> Any:
        """Attributes of the module and of its class, and globals."""
        scope = self.module.__dict__
        own = {name: value for name, value in vars(self.m).items() if type(value) is not types.MethodType}
        kind = {name: value for name, value in vars(type(self.m)).items() if isinstance(value, int)}
        names = ("N", "S", "T", "V", "RUNS")
        left = {name: scope[name] for name in names if name in scope}
        left |= {name: vars(value) for name, value in left.items() if name == "T"}
        left |= {name: value.get() for name, value in left.items() if name == "V"}
        return digest({"self": own, "class": kind, "globals": left})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", KINDS)
def test_replays_leave_what_the_body_leaves(name: str) -> None:
    kind = KINDS[name]
    eager, captured = World(kind.text(), captured=False), World(kind.text(), captured=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for number in range(CALLS):
            assert captured.call(number) == eager.call(number), (name, number)
    counts = recordings(captured.m)
    assert counts.replays >= kind.replays, counts
    told = (
        counts.replays or counts.eager_calls == 0 or any(finding.code.startswith("CG") for finding in counts.findings)
    )
    assert told, counts


def test_a_copy_of_a_module_counts_on_its_own() -> None:
    world = World(KINDS["counter"].text(), captured=True)
    for number in range(4):
        world.call(number)
    copied = copy.deepcopy(world.m)
    for number in range(4):
        copied(x_of(number), [])
        world.call(number)
    assert (world.m.n, copied.n) == (8, 8)
