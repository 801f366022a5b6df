"""Cases in which CG704 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case, collective

FIRES: list[Case] = [case(collectives=(collective("c10d.allreduce_.default", registers_segments=True),))]
NEAR_MISSES: list[Case] = [case(collectives=(collective(),))]
