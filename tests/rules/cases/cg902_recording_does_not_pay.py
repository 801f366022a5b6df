"""Cases in which CG902 fires, and near misses in which it does not."""

from __future__ import annotations

from attrs import evolve

from capture.core.facts import SlowReplay
from capture.rules.case import Case
from tests.support.samples import annotation, case, where

SLOW = SlowReplay(replay=61.2, body=15.0, where=where(), operators=7)
FIRES: list[Case] = [
    case(num_ops=1),
    case(num_ops=0),
    case(slow_replay=SLOW),
    case(annotation(fallback="error"), slow_replay=SLOW),
    case(slow_replay=evolve(SLOW, optimizers=("Adam", "NAdam"), breaks=2)),
    case(slow_replay=evolve(SLOW, operators=1, breaks=1)),
]
NEAR_MISSES: list[Case] = [case(num_ops=2), case(num_ops=0, runs=0)]
