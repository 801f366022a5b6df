"""Cases in which CG901 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import annotation, case, limited

FIRES: list[Case] = [
    limited(),
    limited("error"),
    limited(path=None),
    limited(path="scale", before="0.5", after="0.25"),
    limited(path="lr of SGD", before="0.1", after="0.05"),
    limited(path="table", before="0x7f00", after="outside the pool"),
]
NEAR_MISSES: list[Case] = [case(annotation(max_recordings=1))]
