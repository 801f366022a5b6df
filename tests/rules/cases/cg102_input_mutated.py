"""Cases in which CG102 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import argument, case, implicit, mutation

FIRES: list[Case] = [case(placeholders=(argument("bias", mutation=mutation()),))]
NEAR_MISSES: list[Case] = [
    case(placeholders=(argument("kv", static=True, mutation=mutation()), implicit("self.n", mutation=mutation())))
]
