"""Cases in which CG402 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Effect
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [
    case(
        effects=(
            Effect(path="self.h", kind="tensor", before="None", after="f16[8]", where=where()),
            Effect(path="self.mode", kind="value", before="'a'", after="'b'"),
            Effect(path="self.calls", kind="count", before="a number", after="+1"),
            Effect(path="self.log", kind="members", before="members", after="+1 members"),
        )
    )
]
NEAR_MISSES: list[Case] = [case(effects=(Effect(path="self.n", kind="python", before="A object", after="A object"),))]
