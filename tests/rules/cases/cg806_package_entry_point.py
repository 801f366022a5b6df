"""Cases in which CG806 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import PackageRunner
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [
    case(runners=(PackageRunner(entry=entry, where=where(12, "return self.package(x)")),))
    for entry in ("threaded", "unknown")
]
NEAR_MISSES: list[Case] = [case(devices=("cuda:0",))]
