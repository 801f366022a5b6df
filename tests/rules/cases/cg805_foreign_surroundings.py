"""Cases in which CG805 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [
    case(around="a transform of torch.func"),
    case(around="hooks on saved tensors, as a checkpoint sets them"),
    case(around="torch.autograd.detect_anomaly()"),
]
NEAR_MISSES: list[Case] = [case(num_ops=2)]
