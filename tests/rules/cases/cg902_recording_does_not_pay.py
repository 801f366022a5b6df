"""When CG902 speaks, and when it keeps quiet."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [case(num_ops=1), case(num_ops=0)]
NEAR_MISSES: list[Case] = [case(num_ops=2), case(num_ops=0, runs=0)]
