"""Cases in which CG701 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Dissent
from capture.rules.case import Case
from tests.support.samples import case, collective

FIRES: list[Case] = [
    case(dissent=Dissent(rank=3, reason="CG201 a tensor's value is read as a Python number or bool")),
    case(dissent=Dissent(rank=-1, reason="the store of the process group cannot be reached (Broken pipe)")),
]
NEAR_MISSES: list[Case] = [case(collectives=(collective(),))]
