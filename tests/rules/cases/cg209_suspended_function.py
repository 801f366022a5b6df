"""Cases in which CG209 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [case(suspends="a generator"), case(suspends="a coroutine")]
NEAR_MISSES: list[Case] = [case(num_ops=2)]
