"""Cases in which CG207 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [case(unseen=(where(), None))]
NEAR_MISSES: list[Case] = [case(devices=("cuda:0",))]
