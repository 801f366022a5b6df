"""CUDA graphs for eager PyTorch that behave like eager PyTorch.

from capture import capture, mark_step_begin

class Decoder(nn.Module):
    @capture(static=["cache"])
    def forward(self, ids: Tensor, cache: Cache) -> Tensor: ...

for ids in stream:
    mark_step_begin()
    logits = decoder(ids, cache)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from capture._errors import AnnotationError as AnnotationError
from capture._errors import BorrowedOutputError as BorrowedOutputError
from capture._errors import CaptureBug as CaptureBug
from capture._errors import CaptureError as CaptureError
from capture._errors import CaptureWarning as CaptureWarning
from capture._errors import UncapturableError as UncapturableError
from capture._findings import Finding as Finding
from capture._findings import Severity as Severity
from capture._plan import CapturePlan as CapturePlan

if TYPE_CHECKING:
    from capture import _config as config
    from capture._annotate import CaptureOptions as CaptureOptions
    from capture._api import Explanation as Explanation
    from capture._api import Recordings as Recordings
    from capture._api import Warmup as Warmup
    from capture._api import explain as explain
    from capture._api import load_plans as load_plans
    from capture._api import plans as plans
    from capture._api import recordings as recordings
    from capture._api import release as release
    from capture._api import report as report
    from capture._api import reset as reset
    from capture._api import save_plans as save_plans
    from capture._api import warmup as warmup
    from capture._cases import WarmedCase as WarmedCase
    from capture._cases import WarmupReport as WarmupReport
    from capture._decorate import capture as capture
    from capture._events import Event as Event
    from capture._step import mark_step_begin as mark_step_begin
    from capture._step import step as step
    from capture._store import LoadReport as LoadReport

# Loaded on first use, so that plans and rules can be read where torch is not installed.
_HOME = {
    "CaptureOptions": "_annotate",
    "Event": "_events",
    "Explanation": "_api",
    "LoadReport": "_store",
    "Recordings": "_api",
    "WarmedCase": "_cases",
    "Warmup": "_api",
    "WarmupReport": "_cases",
    "capture": "_decorate",
    "explain": "_api",
    "load_plans": "_api",
    "mark_step_begin": "_step",
    "plans": "_api",
    "recordings": "_api",
    "release": "_api",
    "report": "_api",
    "reset": "_api",
    "save_plans": "_api",
    "step": "_step",
    "warmup": "_api",
}

__version__ = "0.1.0"
__all__ = [
    "AnnotationError", "BorrowedOutputError", "CaptureBug", "CaptureError", "CaptureOptions", "CapturePlan",
    "CaptureWarning", "Event", "Explanation", "Finding", "LoadReport", "Recordings", "Severity", "UncapturableError",
    "WarmedCase", "Warmup", "WarmupReport", "capture", "config", "explain", "load_plans", "mark_step_begin", "plans",
    "recordings", "release", "report", "reset", "save_plans", "step", "warmup",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "config":
        return importlib.import_module("capture._config")
    if name in _HOME:
        value = getattr(importlib.import_module(f"capture.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'capture' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
