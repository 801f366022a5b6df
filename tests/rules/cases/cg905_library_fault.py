"""When CG905 speaks, and when it keeps quiet."""

from __future__ import annotations

from capture.core.facts import Fault
from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [
    case(fault=Fault(kind="RecursionError", message="maximum recursion depth exceeded", place="key/signature.py:224"))
]
NEAR_MISSES: list[Case] = [case()]
