"""Cases in which CG903 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Verification
from capture.rules.case import Case
from tests.support.samples import annotation, case

FIRES: list[Case] = [case(verification=Verification(path="output.0", deterministic=same)) for same in (True, False)]
NEAR_MISSES: list[Case] = [case(annotation(verify="always"))]
