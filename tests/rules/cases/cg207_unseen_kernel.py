"""When CG207 speaks, and when it keeps quiet."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [case(unseen=(where(), None))]
NEAR_MISSES: list[Case] = [case(devices=("cuda:0",))]
