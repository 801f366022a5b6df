"""Cases in which CG110 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import Unkeyed
from capture.rules.case import Case
from tests.support.samples import argument, case, implicit, where

FIRES: list[Case] = [
    case(
        placeholders=(argument("x"), implicit("self.weight")),
        unkeyed=(
            Unkeyed(name="aten.as_strided.default", kind="beside", paths=("x",), where=where()),
            Unkeyed(name="Tensor.as_strided", kind="place", paths=("x",), where=where()),
            Unkeyed(name="Tensor.storage_offset", kind="answer", paths=("x",), where=where()),
            Unkeyed(name="Parameter._version", kind="answer", paths=("self.weight",)),
        ),
    )
]
NEAR_MISSES: list[Case] = [
    case(
        placeholders=(implicit("self.cache"), argument("kv", static=True)),
        unkeyed=(
            Unkeyed(name="Tensor.as_strided", kind="place", paths=("self.cache",)),
            Unkeyed(name="aten.as_strided.default", kind="beside", paths=("kv",)),
        ),
    )
]
