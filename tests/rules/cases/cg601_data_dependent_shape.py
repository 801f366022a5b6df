"""When CG601 speaks, and when it keeps quiet."""

from __future__ import annotations

from capture.core.facts import HostSync
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [case(host_syncs=(HostSync(op="aten.nonzero.default", where=where(), data_dependent_shape=True),))]
NEAR_MISSES: list[Case] = [case(host_syncs=(HostSync(op="aten._local_scalar_dense.default"),))]
