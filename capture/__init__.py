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
import sys
import types
from typing import TYPE_CHECKING, Any, NoReturn

from capture.core.errors import AnnotationError as AnnotationError
from capture.core.errors import BorrowedOutputError as BorrowedOutputError
from capture.core.errors import CaptureBug as CaptureBug
from capture.core.errors import CaptureError as CaptureError
from capture.core.errors import CaptureWarning as CaptureWarning
from capture.core.errors import UncapturableError as UncapturableError
from capture.core.findings import Finding as Finding
from capture.core.findings import Severity as Severity
from capture.core.plan import CapturePlan as CapturePlan
from capture.core.version import VERSION

if TYPE_CHECKING:
    from capture.api.containers import register_container as register_container
    from capture.api.decorator import capture as capture
    from capture.api.inspect import Explanation as Explanation
    from capture.api.inspect import Recordings as Recordings
    from capture.api.inspect import Warmup as Warmup
    from capture.api.inspect import explain as explain
    from capture.api.inspect import load_plans as load_plans
    from capture.api.inspect import plans as plans
    from capture.api.inspect import recordings as recordings
    from capture.api.inspect import release as release
    from capture.api.inspect import reset as reset
    from capture.api.inspect import save_plans as save_plans
    from capture.api.inspect import sizes_seen as sizes_seen
    from capture.api.inspect import warmup as warmup
    from capture.api.island import island as island
    from capture.api.memory_snapshot import memory_snapshot as memory_snapshot
    from capture.api.report import Report as Report
    from capture.api.report import report as report
    from capture.api.report import trace as trace
    from capture.api.warmup import RecordingSize as RecordingSize
    from capture.api.warmup import WarmedCase as WarmedCase
    from capture.api.warmup import WarmupReport as WarmupReport
    from capture.core import config as config
    from capture.core.buckets import Dim as Dim
    from capture.core.buckets import ladder as ladder
    from capture.core.events import Event as Event
    from capture.core.events import set_logs as set_logs
    from capture.core.options import CaptureOptions as CaptureOptions
    from capture.plan_cache.store import LoadReport as LoadReport
    from capture.tree.step import mark_step_begin as mark_step_begin
    from capture.tree.step import step as step

# Loaded on first use, so that plans and rules can be read where torch is not installed.
_HOME = {
    "CaptureOptions": "core.options",
    "Dim": "core.buckets",
    "Event": "core.events",
    "Explanation": "api.inspect",
    "LoadReport": "plan_cache.store",
    "Recordings": "api.inspect",
    "Report": "api.report",
    "WarmedCase": "api.warmup",
    "Warmup": "api.inspect",
    "RecordingSize": "api.warmup",
    "WarmupReport": "api.warmup",
    "capture": "api.decorator",
    "explain": "api.inspect",
    "island": "api.island",
    "ladder": "core.buckets",
    "load_plans": "api.inspect",
    "mark_step_begin": "tree.step",
    "memory_snapshot": "api.memory_snapshot",
    "plans": "api.inspect",
    "recordings": "api.inspect",
    "register_container": "api.containers",
    "release": "api.inspect",
    "report": "api.report",
    "reset": "api.inspect",
    "save_plans": "api.inspect",
    "set_logs": "core.events",
    "sizes_seen": "api.inspect",
    "step": "tree.step",
    "trace": "api.report",
    "warmup": "api.inspect",
}

__version__ = VERSION
__all__ = [
    "AnnotationError", "BorrowedOutputError", "CaptureBug", "CaptureError", "CaptureOptions", "CapturePlan",
    "CaptureWarning", "Dim", "Event", "Explanation", "Finding", "LoadReport", "RecordingSize", "Recordings", "Report",
    "Severity", "UncapturableError", "WarmedCase", "Warmup", "WarmupReport", "capture", "config", "explain",
    "island", "ladder", "load_plans", "mark_step_begin", "memory_snapshot", "plans", "recordings", "register_container",
    "release", "report", "reset", "save_plans", "set_logs", "sizes_seen", "step", "trace", "warmup",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "config":
        return importlib.import_module("capture.core.config")
    if name in _HOME:
        value = getattr(importlib.import_module(f"capture.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'capture' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """The class of this module. It tells those who write ``@capture`` after ``import capture`` what to write."""

    def __call__(self, *_: object, **options: object) -> NoReturn:
        raise AnnotationError(
            "capture is the package here, not the decorator of that name: from capture import capture, or write "
            "capture.capture"
        )


sys.modules[__name__].__class__ = _Package
