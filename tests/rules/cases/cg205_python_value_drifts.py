"""Cases in which CG205 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Drift
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [case(drifts=(Drift(path="aten.mul.Tensor argument 1", first="0.5", second="0.6", where=where()),))]
NEAR_MISSES: list[Case] = [case(runs=2)]
