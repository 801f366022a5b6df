"""Cases in which CG904 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [case(refused="aten.resize_.default changes the shape of a tensor in place")]
NEAR_MISSES: list[Case] = [case()]
