"""Cases in which CG210 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import AlteredOperator
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [
    case(altered=(AlteredOperator(what="the gradient of `prod`", where=where()),)),
    case(altered=(AlteredOperator(what="`(b, n, m) @ (1, m, p)`"), AlteredOperator(what="the gradient of `prod`"))),
]
NEAR_MISSES: list[Case] = [case(sequence=("aten.cumprod.default",))]
