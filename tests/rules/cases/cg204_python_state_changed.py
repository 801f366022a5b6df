"""Cases in which CG204 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Effect
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [
    case(
        effects=(
            Effect(path="self.last", kind="python", before="Stats object", after="Stats object", where=where()),
            Effect(path="self.seen", kind="container", before="list of 1", after="list of 2"),
        )
    )
]
NEAR_MISSES: list[Case] = [case(effects=(Effect(path="self.h", kind="tensor", before="None", after="f16[8]"),))]
