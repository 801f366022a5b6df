"""The data of a report on captured functions: counts of calls, times, recordings, findings. It is kept as JSON.

``capture.report(json="run.json")`` writes it, and ``python -m capture report run.json`` reads it on any machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capture.core.data import frozen
from capture.core.errors import CaptureError
from capture.core.findings import Finding

SCHEMA = 1
KINDS = ("replayed", "recorded", "watched", "warm-up", "measured", "eager", "inline", "refused")
"""The kinds of calls. Every call is of one kind; a page shows them in this order."""


class RunError(CaptureError):
    """A file is no report of a run, or one of another version."""


@frozen(kw_only=True)
class FindingData:
    """One finding, as text."""

    code: str
    name: str
    severity: str
    what: str
    why: str
    fix: tuple[str, ...] = ()
    where: str = ""
    file: str = ""
    line: int = 0
    """The same place, for a link; 0 where there is none."""
    count: int = 1
    """Number of paths and instances that it was found for."""


@frozen(kw_only=True)
class RecordingData:
    """One recording."""

    number: int
    parent: int
    """Number of the recording that it follows; 0 at the root of the tree."""
    operators: int
    graph_bytes: int
    size: str = ""
    """Its arguments, and what it takes of the pool and beside it."""
    output_bytes: int = 0
    working_bytes: int = 0
    """Bytes of the pool: for results, and at most while it runs."""
    guards: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    """Values that the host read between its segments: one fewer than segments. They are its branch."""
    widths: tuple[int, ...] = ()
    longest: tuple[str, ...] = ()
    """As in ``core.schedule``; empty where the engine does not know."""
    inputs: tuple[tuple[str, str, str], ...] = ()
    """Path, tensor and policy of each placeholder."""


@frozen(kw_only=True)
class EventData:
    """One event; times in milliseconds, ``at`` since the first one of the report."""

    kind: str
    detail: str
    at: float
    ms: float
    nbytes: int
    thread: int = 0


@frozen(kw_only=True)
class FunctionData:
    """One captured function; equal instances of a method are one."""

    function: str
    defined_at: str
    instances: int
    calls: Mapping[str, int]
    """Numbers by the words of ``KINDS``; their sum is the number of calls."""
    eager_ms: float | None
    """Host time of an eager call: the median of those that were timed; None if none was."""
    eager_timed: int
    replay_ms: float | None
    """Host time of a replay: the median of those that were timed last, one of 64; None if none was."""
    replays_timed: int
    pool_bytes: int
    graph_bytes: int
    counted: Mapping[str, int] = attrs.field(factory=dict)
    """Further counters that are not 0, such as rebinds and evictions."""
    paths: tuple[str, ...] = ()
    """Where the instances are in their model, as ``blocks.3``; none for functions, and for models themselves."""
    recordings: tuple[RecordingData, ...] = ()
    findings: tuple[FindingData, ...] = ()
    plans: tuple[str, ...] = ()
    events: tuple[EventData, ...] = ()

    @property
    def total(self) -> int:
        """All calls."""
        return sum(self.calls.values())

    @property
    def share(self) -> float:
        """Of calls that replayed, from 0 to 1."""
        return self.calls.get("replayed", 0) / self.total if self.total else 0.0

    @property
    def gain(self) -> float | None:
        """How many times less host time a replay takes than an eager call; None where one was not timed."""
        return self.eager_ms / self.replay_ms if self.eager_ms and self.replay_ms else None

    @property
    def saved_ms(self) -> float | None:
        """Host time that the replays saved."""
        if not self.eager_ms or not self.replay_ms:
            return None
        return self.calls.get("replayed", 0) * (self.eager_ms - self.replay_ms)


@frozen(kw_only=True)
class RunData:
    """All captured functions of one process."""

    made_with: Mapping[str, str]
    """Versions and device."""
    functions: tuple[FunctionData, ...]


def finding_data(finding: Finding) -> FindingData:
    """A finding as text."""
    return FindingData(
        code=finding.code, name=finding.name, severity=str(finding.severity), what=finding.what, why=finding.why,
        fix=tuple(finding.fix), where=str(finding.where or ""),
        file=finding.where.file if finding.where else "", line=finding.where.line if finding.where else 0,
    )  # fmt: skip


def by_cause(findings: Sequence[FindingData]) -> tuple[FindingData, ...]:
    """Findings of one rule at one place are one, most severe first."""
    order = ("error", "eager", "copy", "note")
    kept: dict[tuple[str, str], FindingData] = {}
    for finding in findings:
        key = finding.code, finding.where
        before = kept.get(key)
        kept[key] = finding if before is None else attrs.evolve(before, count=before.count + finding.count)
    return tuple(
        sorted(kept.values(), key=lambda finding: (order.index(finding.severity), finding.code, finding.where))
    )


def grouped(functions: Sequence[FunctionData]) -> tuple[FunctionData, ...]:
    """Instances of one method with the same findings and recordings are one entry: ``Block.forward``, 32 times.

    Functions that were neither called nor warmed up since they were decorated or reset are left out.
    """
    kept: dict[Any, list[FunctionData]] = {}
    for function in (each for each in functions if each.total or each.recordings or each.findings):
        causes = tuple((finding.code, finding.where) for finding in by_cause(function.findings))
        sizes = tuple(sorted(recording.operators for recording in function.recordings))
        kept.setdefault((function.function, function.defined_at, causes, sizes), []).append(function)
    return tuple(_together(alike) for alike in kept.values())


def _together(alike: Sequence[FunctionData]) -> FunctionData:
    first = alike[0]
    eager, replays = ([time for time in times if time] for times in _times(alike))
    return attrs.evolve(
        first,
        instances=sum(data.instances for data in alike),
        calls={kind: sum(data.calls.get(kind, 0) for data in alike) for kind in KINDS},
        eager_ms=sum(eager) / len(eager) if eager else None,
        eager_timed=sum(data.eager_timed for data in alike),
        replay_ms=sum(replays) / len(replays) if replays else None,
        replays_timed=sum(data.replays_timed for data in alike),
        pool_bytes=max(data.pool_bytes for data in alike),  # they share one pool
        graph_bytes=sum(data.graph_bytes for data in alike),
        counted=_sums([data.counted for data in alike]),
        paths=tuple(path for data in alike for path in data.paths),
        findings=by_cause([finding for data in alike for finding in data.findings]),
        events=tuple(sorted((event for data in alike for event in data.events), key=lambda event: event.at))[-300:],
    )


def _sums(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def paths_text(paths: Sequence[str]) -> str:
    """``blocks.0-31`` for those from ``blocks.0`` to ``blocks.31``: paths that differ in their last number are one."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for path in dict.fromkeys(paths):
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", path)
        before, number, after = match.groups() if match else (path, "", "")
        numbers.setdefault((before, after), []).extend([int(number)] if number else [])
    return ", ".join(f"{before}{_ranges(known)}{after}" for (before, after), known in numbers.items())


def _ranges(numbers: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def _times(alike: Sequence[FunctionData]) -> tuple[list[float | None], list[float | None]]:
    return [one.eager_ms for one in alike], [one.replay_ms for one in alike]


def dumps(run: RunData) -> str:
    """JSON, the same for the same run."""
    return json.dumps({"schema": SCHEMA, **attrs.asdict(run)}, indent=1, sort_keys=True) + "\n"


def loads(text: str) -> RunData:
    """Raises ``RunError`` for what ``dumps`` of this version does not write."""
    try:
        parsed = json.loads(text)
        if not isinstance(parsed, dict) or parsed.pop("schema", None) != SCHEMA:
            raise RunError(f"no report of a run, or of another version than {SCHEMA}")
        return RunData(
            made_with=dict(parsed["made_with"]),
            functions=tuple(_function(data) for data in parsed["functions"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"no report of a run: {error}") from error


def _function(parsed: Mapping[str, Any]) -> FunctionData:
    parts = dict(parsed)
    parts["recordings"] = tuple(
        RecordingData(**{
            **recording, **{name: tuple(recording[name]) for name in ("guards", "breaks", "widths", "longest")},
            "inputs": tuple((path, tensor, policy) for path, tensor, policy in recording["inputs"]),
        })
        for recording in parsed["recordings"]
    )  # fmt: skip
    parts["findings"] = tuple(FindingData(**{**data, "fix": tuple(data["fix"])}) for data in parsed["findings"])
    parts["events"] = tuple(EventData(**data) for data in parsed["events"])
    parts["plans"], parts["paths"] = tuple(parsed["plans"]), tuple(parsed["paths"])
    return FunctionData(**parts)
