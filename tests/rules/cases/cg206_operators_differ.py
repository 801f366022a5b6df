"""Cases in which CG206 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import SequenceChange
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [
    case(sequence_change=SequenceChange(index=3, first="aten.mul.Tensor", second="aten.add.Tensor")),
    case(sequence_change=SequenceChange(index=3, first="aten.mul.Tensor", second="", where=where())),
]
NEAR_MISSES: list[Case] = [case(runs=2, sequence=("aten.mul.Tensor",))]
