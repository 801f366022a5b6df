"""Cases in which CG702 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case, collective

FIRES: list[Case] = [
    case(collectives=(collective(), collective("c10d.send.default", obstacle="sends between two ranks"))),
    case(collectives=(collective("output.1", where=None, obstacle="is handed out unfinished"),)),
]
NEAR_MISSES: list[Case] = [case(collectives=(collective(),))]
