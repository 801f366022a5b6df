"""What a run came to, in a few lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from capture.reporting.run_data import KINDS, FunctionData, RunData, grouped
from capture.reporting.text import format_table

_MOST_CAUSES = 3  # of one function
_MOST_RECORDINGS = 8


def size(nbytes: int) -> str:
    """Bytes for readers, in powers of 1024."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def format_run(run: RunData) -> str:
    """A table of the functions, and below it what keeps calls from replaying and what to do first."""
    functions = grouped(run.functions)
    if not functions:
        return "no captured function was called\n"
    rows: list[tuple[str, ...]] = [("function", "calls", "replayed", "gain", "recordings", "memory")]
    rows += [_row(one) for one in functions]
    lines = [format_table(rows)]
    for one in functions:
        told = list(_rest(one))
        lines += [f"\n{one.function}", *[f"  {line}" for line in told]] if told else []
    if any(one.gain is None and one.calls.get("replayed") for one in functions):
        lines.append(
            "\ngain: eager calls are timed only where they happen. Call the function a few times under\n"
            "`capture.config.patch(enabled=False)`, or run `capture bench SCRIPT`."
        )
    return "\n".join(lines) + "\n"


def _row(one: FunctionData) -> tuple[str, ...]:
    name = one.function if one.instances == 1 else f"{one.function}, {one.instances} instances"
    memory = size(one.pool_bytes + one.graph_bytes)
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


def _rest(one: FunctionData) -> Iterator[str]:
    if one.total:
        yield calls_text(one)
    if one.gain is not None:
        eager, replay = f"{one.eager_ms:.3f} ms an eager call", f"{one.replay_ms:.3f} ms a replay"
        yield f"host time: {eager} ({one.eager_timed} timed), {replay} ({one.replays_timed} timed)"
    for recording in one.recordings[:_MOST_RECORDINGS]:
        if recording.size:
            yield f"recording{recording.size}"
    if len(one.recordings) > _MOST_RECORDINGS:
        yield f"and {len(one.recordings) - _MOST_RECORDINGS} more recordings"
    causes = [finding for finding in one.findings if finding.severity in ("eager", "error")]
    for finding in causes[:_MOST_CAUSES]:
        times = f" ({finding.count} times)" if finding.count > 1 else ""
        yield f"{finding.code} {finding.name}: {finding.what}{times}"
        if finding.where:
            yield f"  where: {finding.where}"
    if len(causes) > _MOST_CAUSES:
        yield f"and {len(causes) - _MOST_CAUSES} more"
    if causes and causes[0].fix:
        yield f"do first: {causes[0].fix[0]}"
