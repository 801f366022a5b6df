"""The lines of the user's code that wrote a place; messages about effects name them."""

from __future__ import annotations

import warnings
from typing import Any

from capture.core.facts import CodeLocation, Effect
from capture.observe import source_location
from capture.observe.host_draws import line_of
from capture.state.code_run import CodeRun
from capture.state.snapshot import Change
from capture.state.source import Source


def line_that_wrote(ran: CodeRun | None, change: Change) -> CodeLocation | None:
    """The first line of the user's that sets the name; else the first that mentions it or the object that holds it."""
    if ran is None:
        return None
    names = _names(change.source)
    for code in ran.codes if names else ():
        if not (names[0] in code.co_names or names[0] in code.co_freevars or names[0] in code.co_cellvars):
            continue
        line = source_location.lines_of_names(code).set.get(names[0])
        if line is not None and source_location.is_users(code.co_filename):
            return source_location.of_line(code, line)
    for name in names:
        place = line_of(ran, (name,))
        if place is not None:
            return place
    return None


def _names(source: Source) -> list[str]:
    """Names on the way to a place, the nearest first."""
    texts: list[Any] = [source.path.rpartition(":")[2] if one.kind == "closure" else one.name for one in source.chain()]
    return [text for text in texts if type(text) is str] + [
        one for one in source.path.split(".")[::-1] if one.isidentifier()
    ]


_SHOWS_WARNINGS: Any = getattr(getattr(warnings, "_showwarnmsg", None), "__code__", None)
"""What C and Python run for each warning that the filters let through. Without it replays do not show a warning again
where the filters would."""


def left_by_calls(ran: CodeRun) -> list[Effect]:
    """What functions in C left behind, by the user's line where that is one. A warning that was shown is one: most are
    shown once, and a run in which none is follows."""
    effects: dict[str, Effect] = {}
    if _SHOWS_WARNINGS in ran.codes:
        where = line_of(ran, ("warn", "warn_explicit"))
        effects["warn()"] = Effect(path="warn()", kind="call", before="", after="", where=where)
    for (what, place), code, line in ran.calls:
        own = source_location.of_line(code, line) if source_location.is_users(code.co_filename) else None
        where = place if place is not None else own
        effects.setdefault(what, Effect(path=what, kind="call", before="", after="", where=where))
    return list(effects.values())
