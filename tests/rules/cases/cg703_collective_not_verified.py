"""Cases in which CG703 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import annotation, case, collective

FIRES: list[Case] = [
    case(annotation(verify="always"), collectives=(collective(), collective("c10d.broadcast_.default")))
]
NEAR_MISSES: list[Case] = [case(annotation(verify="first")), case(collectives=(collective(),))]
