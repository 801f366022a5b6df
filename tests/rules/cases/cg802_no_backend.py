"""Cases in which CG802 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [case(backend_missing="meta")]
NEAR_MISSES: list[Case] = [case(devices=("cpu",))]
