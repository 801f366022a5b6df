"""Cases in which CG403 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import OutputInfo
from capture.rules.case import Case
from tests.support.samples import case, tensor

FIRES: list[Case] = [
    case(
        outputs=(
            OutputInfo(path="", kind="input-view", source="x", tensor=tensor(4)),
            OutputInfo(path="1.k", kind="static-view", source="kv.0.k", tensor=tensor(4)),
            OutputInfo(path="2", kind="foreign", tensor=tensor(4)),
        )
    )
]
NEAR_MISSES: list[Case] = [
    case(
        outputs=(
            OutputInfo(path="0", kind="input", source="x"),
            OutputInfo(path="1", kind="static", source="kv"),
            OutputInfo(path="2", kind="fresh"),
        )
    )
]
