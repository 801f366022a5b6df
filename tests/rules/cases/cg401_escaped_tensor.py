"""Cases in which CG401 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Escape, OutputInfo
from capture.rules.case import Case
from tests.support.samples import case, tensor, where

FIRES: list[Case] = [case(escapes=(Escape(tensor=tensor(8, 4), op="aten.mul.Tensor", where=where()),))]
NEAR_MISSES: list[Case] = [case(outputs=(OutputInfo(path="", kind="fresh", tensor=tensor(8, 4)),))]
