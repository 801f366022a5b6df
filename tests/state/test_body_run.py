"""After a run of the body is undone the call keeps nothing of it, and its result is freed."""

from __future__ import annotations

import inspect
import weakref

import torch

from capture.core.options import Annotation
from capture.key.signature import make_binder
from capture.observe.dispatch_mode import ObserveMode
from capture.observe.run import run_watched, undo
from capture.state import body_run
from capture.state.body_run import BodyRun
from capture.state.call import Call


def test_an_undone_run_counts_as_not_run_and_its_result_dies() -> None:
    run = BodyRun()
    body_run.during(run, _undone, (run,))
    assert body_run.current() is None


def _undone(run: BodyRun) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(4)
    binder = make_binder(inspect.signature(double))
    annotation = Annotation(function="double")
    call = Call(annotation=annotation, function=double, receiver=None, binder=binder, values=(x,), leaves=[x])
    watched = run_watched(call, ObserveMode(undo=True))
    assert (run.runs, run.has_ended) == (1, True)
    result = weakref.ref(watched.result.untyped_storage())
    undo(watched)
    watched.forget()
    call.forget_run()
    assert (run.runs, run.has_ended, run.result, run.watched) == (0, False, None, None)
    assert result() is None
