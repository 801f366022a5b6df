"""Cases in which CG104 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [
    case(unmatched_static=("cache.keys",), known_paths=("x", "cache.key")),
    case(unmatched_static=("cache",)),
]
NEAR_MISSES: list[Case] = [case(known_paths=("x", "cache.key"))]
