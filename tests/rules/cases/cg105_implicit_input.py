"""Cases in which CG105 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import argument, case, implicit, mutation

FIRES: list[Case] = [
    case(placeholders=(implicit("self.weight"), implicit("(constant)", "constant"))),
    case(placeholders=(implicit("table", "closure"), implicit("TABLE", "global"), implicit("d['t']", "item"))),
    case(placeholders=(implicit("(unknown 0)", "unknown"),)),
    case(placeholders=(implicit("self.h", "attribute", replaced=True),)),
    case(placeholders=(implicit("self.h", "attribute", replaced=True, mutation=mutation()),)),
]
NEAR_MISSES: list[Case] = [case(placeholders=(argument("x"), argument("kv", static=True)))]
