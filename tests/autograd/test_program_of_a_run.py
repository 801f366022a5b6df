"""Which graph a region's backward pass runs through: that of the run that gave the result."""

from __future__ import annotations

import types
from typing import Any

import pytest

from capture.autograd.saved_graph import SavedGraph
from capture.runtime import training_region
from capture.runtime.training_region import Region


class Pool:
    """Takes weak references."""


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_run_that_was_not_recorded_has_its_own_graph(is_recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph may be another one of the same form: an activation was exchanged, and the run is not as planned. A call
    that was replayed has the graph of its recording, for which the backward pass was recorded."""
    own, recorded, pool = SavedGraph(is_recorded=is_recorded), SavedGraph(is_recorded=True), Pool()
    assert own.form == recorded.form

    class Backward:
        was_called = True

        def __call__(self, program: SavedGraph, *_: object) -> SavedGraph:
            return program

    def plainly(program: SavedGraph, *_: object, **__: object) -> SavedGraph:
        return program

    region: Any = types.SimpleNamespace(
        _retired=False, _hands_on=False, _found=None, _backend=None, _forms={own.form},
        _captured=types.SimpleNamespace(pool=types.SimpleNamespace(number=0)),
        _recorded={pool: {own.form: recorded}}, _backwards={(own.form, (False, False)): Backward()},
    )  # fmt: skip
    monkeypatch.setattr(training_region, "tree_for", lambda *_: types.SimpleNamespace(pool=pool))
    monkeypatch.setattr(training_region, "_run_plainly", plainly)
    monkeypatch.setattr(training_region, "_Found", lambda *_: None)
    used = Region.gradients(region, own, (), (), at_home=True)
    assert used is (recorded if is_recorded else own)  # type: ignore[comparison-overlap]
