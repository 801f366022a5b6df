"""Annotations and facts for tests without torch, and the comparison with golden files."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from capture.core.facts import (
    CodeLocation,
    Collective,
    Effect,
    Facts,
    LimitReached,
    Moved,
    Mutation,
    OutputInfo,
    PlaceholderInfo,
    TensorInfo,
)
from capture.core.options import Annotation
from capture.rules.case import Case

GOLDEN = Path(__file__).parents[1] / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare with ``tests/golden/<name>``, or write it if ``CAPTURE_UPDATE_GOLDEN=1``."""
    path = GOLDEN / name
    if os.environ.get("CAPTURE_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{name} is missing: run with CAPTURE_UPDATE_GOLDEN=1 and read it"
    assert text == path.read_text(encoding="utf-8")


def where(line: int = 88, code: str = "y = self.attend(x, kv)", function: str = "Decoder.step") -> CodeLocation:
    return CodeLocation(file="model.py", line=line, function=function, code=code)


def tensor(*shape: int, dtype: str = "f16", device: str = "cuda:0") -> TensorInfo:
    """A contiguous tensor with two bytes an element."""
    stride = tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))
    return TensorInfo(dtype=dtype, shape=shape, stride=stride, device=device, nbytes=2 * math.prod(shape))


def argument(path: str, **fields: Any) -> PlaceholderInfo:
    """A used argument of f16[8, 512]; ``fields`` change any of it."""
    usual: dict[str, Any] = {"kind": "argument", "owner": "argument", "tensor": tensor(8, 512), "first_use": where()}
    return PlaceholderInfo(path=path, **usual | fields)


def implicit(path: str, owner: str = "parameter", **fields: Any) -> PlaceholderInfo:
    return argument(path, **{"kind": "implicit", "owner": owner, "static": True} | fields)


def mutation(op: str = "aten.add_.Tensor", line: int = 91) -> Mutation:
    return Mutation(evidence="schema", op=op, where=where(line, "kv.k.add_(k)"))


def collective(op: str = "c10d.allreduce_.default", **fields: Any) -> Collective:
    usual: dict[str, Any] = {"group": "0", "all_wait": True, "where": where(94, "dist.all_reduce(y)")}
    return Collective(op=op, **usual | fields)


def annotation(**fields: Any) -> Annotation:
    usual: dict[str, Any] = {"function": "Decoder.step", "defined_at": where(80, "def step(self, ids, kv):")}
    return Annotation(**usual | fields)


def case(declared: Annotation | None = None, **fields: Any) -> Case:
    """Facts with enough operators to pay; ``fields`` are those of ``Facts``."""
    usual: dict[str, Any] = {"function": "Decoder.step", "num_ops": 12, "defined_at": where(80, "")}
    return Case(annotation=declared or annotation(), facts=Facts(**usual | fields))


def decoder() -> Case:
    """One step of a decoder with a static cache, as a user's job would show it at its third call."""
    return case(
        annotation(static=("kv",), parameters=("self", "ids", "kv", "bias")),
        runs=2,
        placeholders=(
            argument("ids", tensor=tensor(8, 1, dtype="i64")),
            argument("kv.0.k", static=True, tensor=tensor(8, 4096, 128), mutation=mutation()),
            argument("bias", tensor=tensor(8, 1), mutation=mutation("aten.mul_.Tensor", 95)),
            implicit("self.embed.weight", tensor=tensor(50000, 512)),
            implicit("self.hidden", "attribute", replaced=True, alias_group=None),
        ),
        outputs=(
            OutputInfo(path="0", kind="fresh", tensor=tensor(8, 50000)),
            OutputInfo(path="1", kind="static-view", source="kv.0.k", tensor=tensor(8, 1, 128)),
            OutputInfo(path="2", kind="python", value="True"),
        ),
        effects=(Effect(path="self.hidden", kind="tensor", before="f16[8, 512]", after="f16[8, 512]", where=where()),),
        devices=("cuda:0",),
        moved=(Moved(path="kv.0.k", before_addr=0x7F0000000000, after_addr=0x7F0000800000, where=where()),),
        sequence=("aten.embedding.default", "aten.add_.Tensor", "aten.mm.default"),
        num_ops=3,
    )


def limited(
    fallback: str = "eager", path: str | None = "ids", before: str = "i64[8, 1]", after: str = "i64[9, 1]"
) -> Case:
    """The call that asks for a sixth recording, because of ``path`` if it is known."""
    reached = LimitReached(
        num_recordings=5, difference=f"{path or 'it'} changed", path=path, before=before, after=after, where=where()
    )
    return case(annotation(fallback=fallback), limit=reached)
