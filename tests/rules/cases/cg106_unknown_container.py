"""Cases in which CG106 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import OpaqueLeaf
from capture.rules.case import Case
from tests.support.samples import case

FIRES: list[Case] = [
    case(
        opaque=(
            OpaqueLeaf(path="pair", type="Pair", role="argument", num_tensors=2),
            OpaqueLeaf(path="0", type="Box", role="output", num_tensors=1),
            OpaqueLeaf(path="mode", type="Mode", role="argument", num_tensors=0, keyless=True),
            OpaqueLeaf(path="odd", type="list", role="argument", num_tensors=0, endless=True),
            OpaqueLeaf(path="context", type="Context", role="argument", num_tensors=0, also="CONTEXT"),
        )
    )
]
NEAR_MISSES: list[Case] = [case(opaque=(OpaqueLeaf(path="mode", type="Mode", role="argument", num_tensors=0),))]
