"""A report as a few lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.sizes import bytes_text
from capture.reporting.run_data import KINDS, FunctionData, RunData, grouped, paths_text
from capture.reporting.tables import Table

_MOST_CAUSES = 3  # causes shown for one function
_MOST_RECORDINGS = 8
_NO_GAIN = """\
gain: eager calls are timed only where they happen. Call the function a few times under
`capture.config.patch(enabled=False)`, or run `capture bench SCRIPT`."""


def format_run(run: RunData) -> str:
    """A table of the functions, and below it what keeps calls from replaying and what to do first."""
    return "\n\n".join(table.text() for table in run_tables(run)) + "\n"


def run_tables(run: RunData) -> list[Table]:
    """A table of the functions, then the remarks on each."""
    functions = grouped(run.functions)
    if not functions:
        return [Table(title="no captured function was called")]
    head = ("function", "calls", "replayed", "gain", "recordings", "memory")
    tables = [Table(head=head, rows=tuple(_row(function) for function in functions))]
    if len({function.pool_bytes for function in functions if function.recordings}) == 1 and len(functions) > 1:
        pool = bytes_text(max(function.pool_bytes for function in functions))
        tables.append(Table(notes=(f"memory: all recordings share one pool of {pool}, which is in each row",)))
    for function in functions:
        remarks = [f"  {line}" for line in _remarks(function)]
        if remarks:
            tables.append(Table(title=function.function, notes=tuple(remarks)))
    if any(function.eager_ms is None and function.calls.get("replayed") for function in functions):
        tables.append(Table(notes=(_NO_GAIN,)))
    return tables


def _row(one: FunctionData) -> tuple[str, ...]:
    paths = f" ({paths_text(one.paths)})" if one.paths else ""
    name = one.function + paths + ("" if one.instances == 1 else f", {one.instances} instances")
    memory = bytes_text(one.pool_bytes + one.graph_bytes)
    gain = "" if one.gain is None else f"{one.gain:.1f} x"
    return name, str(one.total), percent(one), gain, str(len(one.recordings) * one.instances), memory


def percent(one: FunctionData) -> str:
    """The share of replays; never 100 % where a call did not replay."""
    share = 100 * one.share
    shown = round(share)
    if shown == 100 and share < 100:
        return f"{min(share, 99.99):.2f} %"
    return f"{shown} %"


def calls_text(one: FunctionData) -> str:
    """The calls by kind, those that there were."""
    return ", ".join(f"{one.calls[kind]} {kind}" for kind in KINDS if one.calls.get(kind))


def _remarks(function: FunctionData) -> Iterator[str]:
    if function.total:
        yield calls_text(function)
    if function.counted:
        yield ", ".join(f"{name}: {number}" for name, number in function.counted.items())
    if function.gain is not None:
        eager, replay = f"{function.eager_ms:.3f} ms an eager call", f"{function.replay_ms:.3f} ms a replay"
        yield f"host time: {eager} ({function.eager_timed} timed), {replay} ({function.replays_timed} timed)"
    for recording in function.recordings[:_MOST_RECORDINGS]:
        if recording.size:
            yield f"recording{recording.size}"
    if len(function.recordings) > _MOST_RECORDINGS:
        yield f"and {len(function.recordings) - _MOST_RECORDINGS} more recordings"
    causes = [finding for finding in function.findings if finding.severity in ("eager", "error")]
    for finding in causes[:_MOST_CAUSES]:
        times = f" ({finding.count} times)" if finding.count > 1 else ""
        yield f"{finding.code} {finding.name}: {finding.what}{times}"
        if finding.where:
            yield f"  where: {finding.where}"
    if len(causes) > _MOST_CAUSES:
        yield f"and {len(causes) - _MOST_CAUSES} more"
    if causes and causes[0].fix:
        yield f"do first: {causes[0].fix[0]}"
