"""Reports on captured functions: text for a terminal, an HTML page, JSON, and a trace."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from capture.api import warmup as _warmup
from capture.api.decorator import all_states
from capture.api.module_paths import module_paths
from capture.core.version import VERSION
from capture.engines.base import Recording
from capture.guards.guard import text_of
from capture.reporting import text
from capture.reporting.html import html_page
from capture.reporting.run_data import EventData, FunctionData, RecordingData, RunData, by_cause, dumps, finding_data
from capture.reporting.summary import format_run, run_tables
from capture.reporting.tables import rich_group
from capture.reporting.timeline import TimedReplay, chrome_trace
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.tree.node import Node

_EVENTS = 300  # events of one function in a report, the last ones
_PLANS = 8  # plans of one function
_LONGEST = 200  # operators of the longest path that are named
_COUNTED = ("rebinds", "evictions", "kept_outputs", "misses", "verifications", "plans_loaded", "plans_stale")


class Report(str):
    """The text of a report. In a notebook it is the HTML page, and ``rich.print`` shows it as a table."""

    __slots__ = ("data",)
    data: RunData

    @override
    def __repr__(self) -> str:
        return str(self)

    def __rich__(self) -> Any:
        return rich_group(run_tables(self.data))

    def _repr_html_(self) -> str:
        page = html_page(self.data).replace("&", "&amp;").replace('"', "&quot;")
        return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:0"></iframe>'


def report(html: str | os.PathLike[str] | None = None, json: str | os.PathLike[str] | None = None) -> Report:
    """A report on all captured functions: how many calls were replayed, the gain, memory, and why others were not.

    The gain is host time: the median of the last eager calls that were timed, over that of replays. An
    eager call is timed where it happens: where a call cannot be recorded, or under ``config.patch(enabled=False)``. Of
    replays on the fast path the eighth is timed, and then one of 64. What a GPU does meanwhile is in neither.

    Args:
        html: write a page there that shows the same and more. One file, which needs no network.
        json: write what the page is made of there; ``python -m capture report FILE`` reads it.

    Raises ``OSError`` where a file cannot be written.
    """
    data = collect()
    if html is not None:
        Path(html).write_text(html_page(data), encoding="utf-8")
    if json is not None:
        Path(json).write_text(dumps(data), encoding="utf-8")
    made = Report(format_run(data))
    made.data = data
    return made


def trace(path: str | os.PathLike[str]) -> int:
    """Write the events of all captured functions as a trace for Perfetto or ``chrome://tracing``; gives their number.

    Warm-ups, watched runs, recordings, misses and drops: the last 128 of each function. Of replays those on the fast
    path that were timed, one of 64 and the last 16 of each kind of call, as noting all would take longer than they do.
    All replays are in the trace of ``torch.profiler``, as ranges ``capture::replay <function>``.

    Raises ``OSError`` where the file cannot be written.
    """
    events = [event for captured in all_states() for event in captured.log.events]
    replays = [
        TimedReplay(function=captured.log.function, at=begin / 1e9, ms=length / 1e6)
        for captured in all_states()
        for begin, length in captured.fast_paths.times()
    ]
    Path(path).write_text(chrome_trace(events, replays, process=os.getpid()), encoding="utf-8")
    return len(events) + len(replays)


def collect() -> RunData:
    """The data of a report, of all captured functions that are alive."""
    states = all_states()
    begin = min((event.at - event.ms / 1e3 for state in states for event in state.log.events), default=0.0)
    made_with = {"torch-capture": VERSION, "torch": torch.__version__, "Python": platform.python_version()}
    if torch.accelerator.is_available():
        made_with["device"] = torch.get_device_module().get_device_name()
    paths = module_paths([state.receiver for state in states])
    return RunData(
        made_with=made_with,
        functions=tuple(_function(state, begin, path) for state, path in zip(states, paths, strict=True)),
    )


def _function(captured: Captured, begin: float, path: str) -> FunctionData:
    log, entries = captured.log, captured.entries()
    pool_bytes, graph_bytes = _warmup.memory_of([captured])
    replays = [length / 1e6 for _, length in captured.fast_paths.times()]
    place = captured.annotation.defined_at
    plans = [text.format_plan(entry.plan) for entry in entries if entry.plan is not None]
    events = list(log.events)[-_EVENTS:]
    counted = {name.replace("_", " "): number for name in _COUNTED if (number := getattr(log.counters, name))}
    return FunctionData(
        function=captured.annotation.function, defined_at=f"{place.file}:{place.line}" if place is not None else "",
        instances=1, calls=log.counters.calls(), eager_ms=_median(log.eager_ms), eager_timed=len(log.eager_ms),
        replay_ms=_median(replays), replays_timed=len(replays), pool_bytes=pool_bytes,
        graph_bytes=graph_bytes, counted=counted, paths=(path,) if path else (), recordings=tuple(_recordings(entries)),
        findings=by_cause([finding_data(finding) for finding in captured.findings.values()]),
        plans=tuple(plans[:_PLANS]),
        events=tuple(
            EventData(
                kind=event.kind, detail=event.detail, at=(event.at - begin) * 1e3, ms=event.ms, nbytes=event.nbytes
            )
            for event in events
        ),
    )  # fmt: skip


def _median(times: Sequence[float]) -> float | None:
    return statistics.median(times) if times else None


def _recordings(entries: Sequence[Entry]) -> list[RecordingData]:
    pairs = [(entry, node) for entry in entries for node in list(entry.nodes)]
    pairs.sort(key=lambda pair: pair[1].number)
    alive = [(entry, node, node.recording) for entry, node in pairs]
    return [_recording(entry, node, recording) for entry, node, recording in alive if recording is not None]


def _recording(entry: Entry, node: Node, recording: Recording) -> RecordingData:
    plan, parent = entry.plan, node.parent
    schedule, size = recording.schedule(), _warmup.size_of(entry, node, recording)
    inputs = (
        [(placeholder.path, str(placeholder.tensor), str(placeholder.policy)) for placeholder in plan.placeholders]
        if plan is not None
        else []
    )
    return RecordingData(
        number=node.number, parent=parent.number if parent is not None and parent.recording is not None else 0,
        operators=recording.num_ops, graph_bytes=recording.graph_bytes,
        size=str(size), output_bytes=size.output_bytes, working_bytes=size.working_bytes,
        widths=schedule.widths if schedule is not None else (),
        longest=schedule.longest[:_LONGEST] if schedule is not None else (),
        guards=tuple(text_of(guard) for guard in node.guard.guards()) if node.guard is not None else (),
        breaks=tuple(recording.reads), inputs=tuple(inputs),
    )  # fmt: skip
