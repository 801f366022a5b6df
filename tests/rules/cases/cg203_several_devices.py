"""Cases in which CG203 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [case(devices=("cpu", "cuda:1", "cuda:0"))]
NEAR_MISSES: list[Case] = [case(devices=("cpu", "cuda:0", "meta"))]
