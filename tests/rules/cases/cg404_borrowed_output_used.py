"""Cases in which CG404 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import BorrowedUse
from capture.rules.case import Case
from tests.support.samples import annotation, case, where

FIRES: list[Case] = [case(borrowed_use=BorrowedUse(function="model.decode", where=where(12, "return self.head(x)")))]
NEAR_MISSES: list[Case] = [case(annotation(outputs="borrow"))]
