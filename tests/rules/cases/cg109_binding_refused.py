"""Cases in which CG109 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Moved, Unbound
from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [
    case(
        unbound=(
            Unbound(path="self.w", reason="a parameter changed for no known reason", kernel="gemm"),
            Unbound(path="cache", reason="no parameter of a kernel holds its address"),
        )
    )
]
NEAR_MISSES: list[Case] = [case(moved=(Moved(path="self.w", before_addr=1, after_addr=2),))]
