"""Events as a trace that Chrome (``chrome://tracing``) and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from capture.core.events import Event


def chrome_trace(events: Iterable[Event], *, process: int) -> str:
    """One row a function; a timed event is a bar, one that is not is a mark. Times in microseconds since the first."""
    events = sorted(events, key=lambda one: one.at)
    begin = min((one.at - one.ms / 1e3 for one in events), default=0.0)
    rows = {name: number for number, name in enumerate(dict.fromkeys(one.function for one in events), 1)}
    found: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
        for name, row in rows.items()
    ]
    for one in events:
        common = {
            "name": one.kind, "cat": "capture", "pid": process, "tid": rows[one.function],
            "args": {"function": one.function, "detail": one.detail, "bytes": one.nbytes},
        }  # fmt: skip
        begun = (one.at - begin) * 1e6 - one.ms * 1e3
        if one.ms:
            found.append({**common, "ph": "X", "ts": begun, "dur": one.ms * 1e3})
        else:
            found.append({**common, "ph": "i", "ts": begun, "s": "t"})
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}) + "\n"
