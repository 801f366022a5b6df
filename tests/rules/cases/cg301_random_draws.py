"""Cases in which CG301 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Draw
from capture.rules.case import Case
from tests.support.samples import annotation, case, where

FIRES: list[Case] = [
    case(
        annotation(rng=rng),
        draws=(
            Draw(generator="default", device="cuda:0", op="aten.native_dropout.default", where=where()),
            Draw(generator="default", device="cuda:0", op="aten.rand.default", where=where(90)),
            Draw(generator="self.gen", device="cuda:0", op="aten.randn.generator"),
        ),
    )
    for rng in ("graphsafe", "eager", "forbid")
]
NEAR_MISSES: list[Case] = [case(annotation(rng="forbid"))]
