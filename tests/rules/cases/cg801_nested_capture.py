"""Cases in which CG801 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Inlined
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [case(inlined=(Inlined(function="model.attend", where=where()),))]
NEAR_MISSES: list[Case] = [case()]
