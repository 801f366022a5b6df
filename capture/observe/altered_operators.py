"""Operators that torch calls in the place of others where a watch is a dispatch mode.

Some composite operators ask whether a mode is on, and then compute the same values in another way, to other last bits.
A watch is a mode where it has no key (``torch_private.operator_watch``), so recordings of such runs hold what they
called then. A watch sees only what a composite operator calls: that one is told by the order of it. A body that calls
the same operators in the same order itself is told of, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capture.core.facts import AlteredOperator
from capture.observe.trace import RunTrace

_CALLED: dict[str, tuple[str, ...]] = {
    "singular values without vectors, as in `svdvals`, `cond` and nuclear norms": ("_linalg_svd",),
    "eigenvalues without vectors, as in `eigvalsh`": ("_linalg_eigh",),
    "the gradient of `prod`": ("ones", "slice", "cat", "cumprod"),
    "the gradient of `cumprod`": ("eq", "ones", "expand", "slice", "cumprod"),
    "`(b, n, m) @ (1, m, p)`": ("squeeze", "view", "mm", "_unsafe_view"),
}
"""What is computed in another way, and what torch calls for it. A list, as each is a branch of its own in torch; torch
2.13 and newer need none of it."""


def altered_operators(trace: RunTrace) -> Iterator[AlteredOperator]:
    """Those of a run that was watched by a mode, each kind once, with the line where it came first."""
    names = [name.removeprefix("aten.").partition(".")[0] for name in trace.sequence]
    for what, called in _CALLED.items():
        at = _first(names, called)
        if at is not None:
            yield AlteredOperator(what=what, where=trace.lines[at])


def _first(names: Sequence[str], called: tuple[str, ...]) -> int | None:
    for at, name in enumerate(names):
        if name == called[0] and tuple(names[at : at + len(called)]) == called:
            return at
    return None
