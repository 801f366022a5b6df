"""Cases in which CG107 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import SubclassLeaf
from capture.rules.case import Case
from tests.support.samples import argument, case, where

FIRES: list[Case] = [
    case(subclasses=(SubclassLeaf(path="weight", type="sparse_coo tensor"),)),
    case(subclasses=(SubclassLeaf(path="x", type="Tagged"), SubclassLeaf(path="output", type="Tagged"))),
    case(subclasses=(SubclassLeaf(path="output.0", type="NestedTensor"),)),
    case(subclasses=(SubclassLeaf(path="", type="sparse_coo tensor", where=where()),)),
]
NEAR_MISSES: list[Case] = [case(placeholders=(argument("weight"),))]
