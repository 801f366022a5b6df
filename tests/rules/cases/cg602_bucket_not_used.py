"""Cases in which CG602 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.buckets import BucketedArgument, Buckets, Symbol
from capture.core.facts import BucketRefusal
from capture.rules.case import Case
from tests.support.samples import annotation, case

_SIZES = "batch=3 to 4"
FIRES: list[Case] = [
    case(bucket=BucketRefusal(kind="differs", path="output.0", sizes=_SIZES, detail="it is off by up to 0.25")),
    case(bucket=BucketRefusal(kind="raises", sizes=_SIZES, detail="IndexError: index out of range in self")),
    case(bucket=BucketRefusal(kind="writes", path="ids", sizes=_SIZES)),
    case(bucket=BucketRefusal(kind="aliases", path="output", sizes=_SIZES)),
    case(bucket=BucketRefusal(kind="reads", sizes=_SIZES)),
    case(bucket=BucketRefusal(kind="gradients", sizes=_SIZES)),
    case(bucket=BucketRefusal(kind="communicates", sizes=_SIZES)),
]
NEAR_MISSES: list[Case] = [
    case(annotation(buckets=Buckets((Symbol("x.0", (4,)),), (BucketedArgument("x", ((0, 0),), 0),)))),
]
