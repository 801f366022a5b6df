"""Cases in which CG906 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import GivenUp, HostSync, Variation
from capture.rules.case import Case
from tests.support.samples import annotation, case, where

SHAPE = Variation(
    what="'ids' (3rd argument), dimension 1", change="9 values in 12 calls (17, 18, 19, ...)", about="size"
)
OTHERS = tuple(
    Variation(what=f"'{name}'", change="a new Context object in every call", about="object") for name in "abc"
)
RATE = Variation(what="'lr of SGD'", change="16 values in 16 calls (0.1, 0.09, 0.08, ...)", about="number")
READ = HostSync(op="aten._local_scalar_dense.default", where=where(7, "for _ in range(int(n)):"), is_compared=True)
ANEW = Variation(what="the function itself", change="captured anew, 17 times so far", about="function")
FIRES: list[Case] = [
    case(given_up=GivenUp(observations=8, recordings=0, drops=0, ms=12.4, variations=(RATE,), where=where())),
    case(given_up=GivenUp(observations=8, recordings=2, drops=0, ms=12.4, variations=(SHAPE,), where=where())),
    case(given_up=GivenUp(observations=1, recordings=0, drops=4, ms=3.0, variations=(SHAPE, *OTHERS))),
    case(given_up=GivenUp(observations=5, recordings=4, drops=4, ms=12.4, variations=(SHAPE,))),
    case(given_up=GivenUp(observations=0, recordings=0, drops=0, ms=0.0, variations=(SHAPE,))),
    case(given_up=GivenUp(observations=1, recordings=0, drops=3, ms=9.0, reads=(READ,), where=where())),
    case(given_up=GivenUp(observations=1, recordings=0, drops=3, ms=9.0, variations=(ANEW,))),
    case(annotation(fallback="error"), given_up=GivenUp(observations=0, recordings=0, drops=1, ms=0.0)),
]
NEAR_MISSES: list[Case] = [case()]
