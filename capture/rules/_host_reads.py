"""What reads a tensor's value into Python, in the words of the line that does it, and what helps there.

Stage: used by CG201. In: a ``HostSync``, and whether the body runs on an accelerator. Out: a message's parts. No torch.
An operator's name, ``aten._local_scalar_dense``, tells the user nothing; ``.item()``, ``if`` or ``Adam.step()`` does.
It is taken from the source line and from the library's function that the line called.
"""

from __future__ import annotations

import re

from capture.core.data import frozen
from capture.core.facts import HostSync
from capture.rules._rule import short_op

FUSED = frozenset({"Adagrad", "Adam", "AdamW", "SGD"})
"""Optimizers of ``torch.optim`` that take ``fused=True``, and then keep all numbers in tensors (torch 2.11 to 2.14)."""
_FUSED_ON_THE_HOST = frozenset({"Adagrad"})
"""Of these the ones for which torch has no such kernel on a GPU."""
CAPTURABLE = frozenset({"ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"})
"""Those that take ``capturable=True``, for parameters on an accelerator."""

_AFTER = "return the tensor, and {} after the call  (no cost)"
_STAY = "keep the value in a tensor and compute with that: it broadcasts like a number  (no cost)"
_BEFORE = "read it before the call and pass the number  (one recording a value)"
_WHERE = "compute both and choose on the device: torch.where(condition, a, b)  (computes both sides)"
_ASK = "ask before the call and pass the answer  (one recording an answer)"
_OUT = "move it before or after the captured function  (splits the work in two)"

_BY_LINE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (r"\breturn [\w.()\[\]]+\.item\(\)$", "`.item()`", (_AFTER.format("call .item() on it"),)),
    (r"\breturn (float|int|bool)\(.*\)$", r"`\1()`", (_AFTER.format("convert it"),)),
    (r"\.tolist\(\)", "`.tolist()`", (_AFTER.format("call .tolist() on it"),)),
    (r"\bassert\b", "`assert`", (_AFTER.format("assert on it"),)),
    (r"\b(if|elif|while|not|and|or|any|all)\b", r"`\1`", (_WHERE, _ASK)),
    (r"\bbool\(", "`bool()`", (_WHERE, _ASK)),
    (r"\.item\(\)", "`.item()`", (_STAY, _BEFORE)),
    (r"\bfloat\(", "`float()`", (_STAY, _BEFORE)),
    (r"\b(int|range)\(", r"`\1()`", (_BEFORE, _STAY)),
)
"""Patterns of a source line that reads one value, the words for it, and what helps; the first that fits counts."""

_SCALARS = frozenset({"_local_scalar_dense", "item", "is_nonzero"})
_BY_OPERATOR: dict[str, tuple[str, tuple[str, ...]]] = {
    "tolist": ("`.tolist()`", (_AFTER.format("call .tolist() on it"),)),
    "numpy": ("`.numpy()`", (_AFTER.format("convert it"),)),
    "__array__": ("NumPy", (_AFTER.format("give it to NumPy"),)),
    "__dlpack__": ("DLPack", (_AFTER.format("hand it out"),)),
    "data_ptr": ("`.data_ptr()`", (_AFTER.format("take its address"),)),
    "apply_": ("`.apply_()`", ("use operators of torch instead of Python for each element  (no cost)", _OUT)),
    "map_": ("`.map_()`", ("use operators of torch instead of Python for each element  (no cost)", _OUT)),
    "map2_": ("`.map2_()`", ("use operators of torch instead of Python for each element  (no cost)", _OUT)),
    "__repr__": ("printing", (_AFTER.format("print it"),)),
    "print": ("printing", (_AFTER.format("print it"),)),
    "__format__": ("a formatted string", (_AFTER.format("format it"),)),
    "equal": ("`torch.equal()`", ("compare on the device: (a == b).all()  (no cost)", _ASK)),
    "allclose": ("`torch.allclose()`", ("compare on the device: torch.isclose(a, b).all()  (no cost)", _ASK)),
    "_to_copy": ("a copy to the CPU", (_AFTER.format("copy it"),)),
    "copy_": ("a copy to the CPU", (_AFTER.format("copy it"),)),
}


@frozen(kw_only=True)
class HostRead:
    """The parts of a message about a read: what reads, as a subject, and what helps."""

    who: str
    fix: tuple[str, ...]


def describe(sync: HostSync, *, on_accelerator: bool) -> HostRead:
    """The words for one read of a tensor's value."""
    called = sync.through.split(".")
    if sync.through.startswith("torch.optim.") and len(called) > 2 and called[-1] == "step":
        return _optimizer(called[-2], on_accelerator=on_accelerator)
    for beginning, fix in _LIBRARY.items():
        if sync.through.startswith(beginning):
            return HostRead(who=_call_text(called), fix=fix)
    op = short_op(sync.op)
    if op not in _SCALARS:
        who, fix = _BY_OPERATOR.get(op, (f"`{op}`", (_OUT,)))
        return HostRead(who=who, fix=fix)
    if sync.through:
        return HostRead(who=_call_text(called), fix=(_OUT,))
    code = sync.where.code if sync.where is not None else ""
    for pattern, who, fix in _BY_LINE:
        match = re.search(pattern, code)
        if match is not None:
            return HostRead(who=match.expand(who), fix=fix)
    return HostRead(who="this line", fix=(_STAY, _BEFORE, _WHERE))


_LIBRARY: dict[str, tuple[str, ...]] = {
    "torch.distributions.": (
        "make the distribution with validate_args=False  (its arguments are not checked)",
        "check once, before the captured function  (no cost)",
    ),
    "torch.amp.": (
        "compute in bfloat16, which needs no scaler  (another type)",
        "capture the model instead of the whole step, and scale outside  (less is recorded)",
    ),
    "torch.nn.utils.clip_grad": ("leave error_if_nonfinite out  (no cost)",),
    "torch.nn.utils.get_total_norm": ("leave error_if_nonfinite out  (no cost)",),
}
"""What helps in functions of torch that read values, by the beginning of their names."""


def optimizer_fixes(name: str, *, on_accelerator: bool) -> tuple[str, ...]:
    """What helps where the step of an optimizer of this class cannot be recorded."""
    fix = []
    if on_accelerator and name in CAPTURABLE:
        fix.append(f"make it with capturable=True: {name}(..., capturable=True)  (no cost)")
    elif name in FUSED and not (on_accelerator and name in _FUSED_ON_THE_HOST):
        fix.append(f"make it with fused=True: {name}(..., fused=True)  (no cost)")
    fix.append(f"leave the optimizer out: call {name}.step() after the captured function  (it is launched eagerly)")
    return tuple(fix)


def _optimizer(name: str, *, on_accelerator: bool) -> HostRead:
    return HostRead(who=f"`.step()` of {name}", fix=optimizer_fixes(name, on_accelerator=on_accelerator))


def _call_text(called: list[str]) -> str:
    """How the user wrote the call of a library's function."""
    if called[-1] == "__init__":
        return f"`{called[-2]}(...)`"
    if len(called) > 1 and called[-2][:1].isupper():
        return f"`.{called[-1]}()` of {called[-2]}"
    return f"`{called[-1]}()`"
