"""When CG901 speaks, and when it keeps quiet."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import annotation, case, limited

FIRES: list[Case] = [
    limited(),
    limited("error"),
    limited(path=None),
]
NEAR_MISSES: list[Case] = [case(annotation(max_recordings=1))]
