"""Cases in which CG601 fires, and near misses in which it does not."""

from __future__ import annotations

from attrs import evolve

from capture.core.facts import HostSync
from capture.rules.case import Case
from tests.support.samples import case, where

NONZERO = HostSync(op="aten.nonzero.default", where=where(), data_dependent_shape=True)
FIRES: list[Case] = [
    case(host_syncs=(NONZERO,)),
    case(host_syncs=(evolve(NONZERO, is_compared=True),)),
    case(
        host_syncs=(evolve(NONZERO, is_compared=True),),
        unsteady_reads="what it reads is another value in call after call: 8 branches led to 3 replays",
    ),
]
NEAR_MISSES: list[Case] = [case(host_syncs=(HostSync(op="aten._local_scalar_dense.default"),))]
