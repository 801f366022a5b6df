"""Cases in which CG905 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Fault
from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [
    case(fault=Fault(kind="RecursionError", message="maximum recursion depth exceeded", place="key/signature.py:224"))
]
NEAR_MISSES: list[Case] = [case()]
