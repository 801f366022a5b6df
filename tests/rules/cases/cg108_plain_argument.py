"""Cases in which CG108 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import argument, case, implicit

FIRES: list[Case] = [case(placeholders=(argument("x"), argument("kv", static=True)))]
NEAR_MISSES: list[Case] = [case(placeholders=(implicit("self.weight"),))]
