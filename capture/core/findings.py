"""Findings and decisions: what a rule says. Pure data, no torch.

A ``Finding`` is a remark for the user. A ``Decision`` sets one field of the plan; decisions for one field join
upwards in that field's lattice, so the order of rules cannot matter.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from typing_extensions import override

from capture.core.data import frozen
from capture.core.facts import CodeLocation

SETTLING = frozenset({"CG204", "CG205", "CG206", "CG208", "CG401"})
"""Codes of what a first call may do once, to set up state; a second call need not do it again."""


BRANCHING = frozenset({"CG201", "CG601"})
"""Codes of values that the host reads in the middle of a body, and that decide how the body goes on."""


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

    @override
    def __str__(self) -> str:
        return self.message()

    def message(self, *, function: str | None = None, now: str | None = None, also: Sequence[Finding] = ()) -> str:
        """All of it as lines, without a newline at the end.

        ``function``: the captured function's name, for findings whose place is elsewhere or unknown. ``now``: what
        happens to the call. ``also``: findings of the same rule, of which a word each is enough.
        """
        lines = [f"{self.code} {self.name}: {self.what}"]
        if also:
            lines.append(f"  also:  {_others_text(also)}")
        where = _where_text(self.where, function)
        if where:
            lines.append(f"  where: {where}")
        lines.append(f"  why:   {self.why}")
        lines += [f"{'         or ' if index else '  fix:   '}{fix}" for index, fix in enumerate(self.fix)]
        if now:
            lines.append(f"  now:   {now}")
        lines.append(f"  more:  python -m capture rule {self.code}  (docs: rules/{self.code})")
        return "\n".join(lines)


def by_cause(findings: Iterable[Finding]) -> list[tuple[Finding, tuple[Finding, ...]]]:
    """The first finding of each rule, with the others of that rule: one cause often shows at several places."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.code, []).append(finding)
    return [(first, tuple(others)) for first, *others in groups.values()]


def _where_text(where: CodeLocation | None, function: str | None) -> str:
    if where is None:
        return function or ""
    text = f"{where.function} ({where.file}:{where.line})"
    if function and not f".{function}".endswith(f".{where.function}"):
        text += f" in {function}"
    return f"{text}: `{where.code}`" if where.code else text


_MOST_OTHERS = 3  # number of findings that are named


def _about(finding: Finding) -> str:
    if finding.path:
        return repr(finding.path)
    where = finding.where
    return finding.what if where is None else f"line {where.line}" + (f" `{where.code}`" if where.code else "")


def _others_text(others: Sequence[Finding]) -> str:
    """What each of these findings is about: a path, or else a place."""
    named = [_about(one) for one in others[:_MOST_OTHERS]]
    more = len(others) - len(named)
    return f"{', '.join(named)}{f' and {more} more' if more else ''}"


@frozen(kw_only=True)
class Decision:
    """``field`` of the plan gets at least ``value``. ``field`` is ``"policy:<path>"`` or ``"outcome"``."""

    field: str
    value: Policy
    code: str
    reason: str
