"""Cases in which CG101 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Moved
from capture.rules.case import Case
from tests.support.samples import argument, case, implicit, tensor, where

FIRES: list[Case] = [
    case(
        placeholders=(argument("kv.0.k", static=True, tensor=tensor(8, 4096, 128)), implicit("self.table")),
        moved=(
            Moved(path="kv.0.k", before_addr=0x7F00, after_addr=0x8F00, where=where()),
            Moved(path="self.table", before_addr=0x100, after_addr=0x200),
        ),
    )
]
NEAR_MISSES: list[Case] = [case(placeholders=(argument("kv.0.k", static=True),))]
