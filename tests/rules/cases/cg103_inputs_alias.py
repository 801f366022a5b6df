"""Cases in which CG103 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import argument, case, implicit, mutation

FIRES: list[Case] = [
    case(placeholders=(argument("a", alias_group=0), argument("b", alias_group=0))),
    case(placeholders=(argument("a", alias_group=0), argument("b", alias_group=0, mutation=mutation()))),
    case(placeholders=(argument("row", alias_group=1), argument("table", static=True, alias_group=1))),
    case(placeholders=(argument("row", alias_group=1), implicit("self.w", alias_group=1, mutation=mutation()))),
]
NEAR_MISSES: list[Case] = [
    case(placeholders=(argument("a"), argument("b", mutation=mutation()))),
    case(placeholders=(argument("a", alias_group=0), argument("b", alias_group=1))),
    case(
        placeholders=(
            argument("a", static=True, alias_group=0, mutation=mutation()),
            implicit("self.w", alias_group=0),
        )
    ),
]
