"""When CG704 speaks, and when it keeps quiet."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case, collective

FIRES: list[Case] = [case(collectives=(collective("c10d.allreduce_.default", registers_segments=True),))]
NEAR_MISSES: list[Case] = [case(collectives=(collective(),))]
