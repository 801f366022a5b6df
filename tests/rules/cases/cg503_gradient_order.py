"""Cases in which CG503 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import GradientOrder
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [
    case(gradient_order=GradientOrder(shared_with="several calls of it", where=where())),
    case(gradient_order=GradientOrder(shared_with="other code")),
]
NEAR_MISSES: list[Case] = [case()]
