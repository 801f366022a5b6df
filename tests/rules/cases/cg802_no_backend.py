"""When CG802 speaks, and when it keeps quiet."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [case(backend_missing="meta")]
NEAR_MISSES: list[Case] = [case(devices=("cpu",))]
