"""Events as a trace that Chrome (``chrome://tracing``) and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from capture.core.data import frozen
from capture.core.events import Event


@frozen(kw_only=True)
class TimedReplay:
    """One replay that was timed."""

    function: str
    at: float
    """When it began, in seconds of ``time.perf_counter``."""
    ms: float
    """How long it took on the host."""


def chrome_trace(events: Iterable[Event], replays: Iterable[TimedReplay] = (), *, process: int) -> str:
    """One row a function. What is timed is a bar, other events are marks; times in microseconds since the first."""
    bars: list[tuple[str, str, float, float, str, int]]
    bars = [
        (event.function, event.kind, event.at - event.ms / 1e3, event.ms, event.detail, event.nbytes)
        for event in events
    ]
    bars += [(replay.function, "replay", replay.at, replay.ms, "one of 64 is timed", 0) for replay in replays]
    bars.sort(key=lambda bar: bar[2])
    first = bars[0][2] if bars else 0.0
    rows = {name: number for number, name in enumerate(dict.fromkeys(bar[0] for bar in bars), 1)}
    trace: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
        for name, row in rows.items()
    ]
    for function, kind, begin, ms, detail, nbytes in bars:
        common = {
            "name": kind, "cat": "capture", "pid": process, "tid": rows[function], "ts": (begin - first) * 1e6,
            "args": {"function": function, "detail": detail, "bytes": nbytes},
        }  # fmt: skip
        trace.append({**common, "ph": "X", "dur": ms * 1e3} if ms else {**common, "ph": "i", "s": "t"})
    return json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}) + "\n"
