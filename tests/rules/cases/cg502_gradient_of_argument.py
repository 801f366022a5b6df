"""Cases in which CG502 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Effect
from capture.rules.case import Case
from tests.support.samples import argument, case, implicit, where

FIRES: list[Case] = [
    case(
        placeholders=(argument("x", first_use=where()),),
        effects=(Effect(path="x.grad", kind="tensor", before="None", after="f32[8]", where=where()),),
    ),
    case(placeholders=(argument("batch[0]"), implicit("batch[0].grad", "argument"))),
]
NEAR_MISSES: list[Case] = [
    case(
        placeholders=(argument("x", static=True), implicit("x.grad", "argument")),
        effects=(Effect(path="x.grad", kind="tensor", before="None", after="f32[8]"),),
    ),
    case(
        placeholders=(argument("x"),),
        effects=(Effect(path="self.x.grad", kind="tensor", before="None", after="f32[8]"),),
    ),
    case(
        placeholders=(argument("x"),),
        effects=(Effect(path="x.grad", kind="tensor", before="None", after="f32[8]"),),
        given_gradients=frozenset({"x.grad"}),
    ),
]
