"""When CG402 speaks, and when it keeps quiet."""

from __future__ import annotations

from capture.core.facts import Effect
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [
    case(effects=(Effect(path="self.h", kind="tensor", before="None", after="f16[8]", where=where()),))
]
NEAR_MISSES: list[Case] = [case(effects=(Effect(path="self.n", kind="python", before="1", after="2"),))]
