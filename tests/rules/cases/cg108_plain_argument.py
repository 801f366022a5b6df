"""When CG108 speaks, and when it keeps quiet."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import argument, case, implicit

FIRES: list[Case] = [case(placeholders=(argument("x"), argument("kv", static=True)))]
NEAR_MISSES: list[Case] = [case(placeholders=(implicit("self.weight"),))]
