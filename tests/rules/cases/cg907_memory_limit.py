"""Cases in which CG907 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import MemoryForecast
from capture.rules.case import Case
from tests.support.samples import annotation, case, where

FIRES: list[Case] = [
    case(too_large=MemoryForecast(nbytes=3 << 30, limit=1 << 30, device="cuda:0", where=where())),
    case(annotation(fallback="error"), too_large=MemoryForecast(nbytes=5000, limit=900, device="cpu")),
]
NEAR_MISSES: list[Case] = [case()]
