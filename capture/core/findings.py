"""Findings and decisions: what a rule says. Pure data, no torch.

A ``Finding`` is a remark for the user. A ``Decision`` sets one field of the plan; decisions for one field join
upwards in that field's lattice, so the order of rules cannot matter.
"""

from __future__ import annotations

import enum

from attrs import frozen
from typing_extensions import override

from capture.core.facts import CodeLocation

SETTLING = frozenset({"CG204", "CG205", "CG206", "CG401"})
"""Codes of what a first call may do once, to set up state, and a second one may not."""


BRANCHING = frozenset({"CG201", "CG601"})
"""Codes of what the host reads in the middle of a body, and goes on by."""


class Severity(enum.IntEnum):
    """How much a finding costs. ``EAGER`` and above keep the call from being recorded."""

    NOTE = 0
    COPY = 1
    EAGER = 2
    ERROR = 3

    @override
    def __str__(self) -> str:
        return self.name.lower()


class Policy(enum.IntEnum):
    """How one placeholder reaches the graph, in the order in which decisions join.

    ``STATIC``: read and written where the caller keeps it, which is the same place in every call. ``BIND``: read and
    written where the caller keeps it, wherever that is: the graph is patched. ``COPY``: copied into the recording's own
    buffer before a replay. ``COPY_BACK``: and copied back afterwards. ``EAGER``: cannot be served, the call runs
    eagerly.
    """

    STATIC = 0
    BIND = 1
    COPY = 2
    COPY_BACK = 3
    EAGER = 4

    @override
    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


@frozen(kw_only=True)
class Finding:
    """One remark: stable code, severity, and the four parts of its message."""

    code: str
    name: str
    severity: Severity
    what: str
    """One lower-case clause in the user's own words; stands alone."""
    why: str
    fix: tuple[str, ...] = ()
    """Cheapest first, each with its cost."""
    where: CodeLocation | None = None
    path: str | None = None
    """The placeholder, output or attribute it is about."""


@frozen(kw_only=True)
class Decision:
    """``field`` of the plan gets at least ``value``. ``field`` is ``"policy:<path>"`` or ``"outcome"``."""

    field: str
    value: Policy
    code: str
    reason: str
