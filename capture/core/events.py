"""Events: what happened to one captured function, timed and counted.

Every warm-up, observation, recording, checkpoint, miss, rebind and fallback is an ``Event``; replays and outputs that
leave the pool are only counted, since a record of each would cost more than they do. ``CAPTURE_LOGS`` prints events
as they happen, in the grammar of ``TORCH_LOGS``: ``CAPTURE_LOGS="recordings,+runtime,-plans"``. While a profiler
runs, what is timed is also a range ``capture::<kind> <function>`` in its trace (``use_profiler``).
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from attrs import field, fields
from typing_extensions import override

from capture.core import slow_calls
from capture.core.data import define, frozen
from capture.core.options import suggestion
from capture.native import seen

EventKind = Literal[
    "observe", "warm-up", "plan", "plan-loaded", "plan-stale", "record", "create", "instantiate", "checkpoint",
    "restore", "miss", "rebind", "calibrate", "eager", "measure", "fallback", "verify", "drop", "step", "error",
]  # fmt: skip

_ARTEFACTS: dict[str, tuple[str, ...]] = {
    "runtime": ("observe", "warm-up", "checkpoint", "restore", "miss", "drop", "measure", "step", "error"),
    "recordings": ("record", "create", "instantiate", "rebind", "calibrate", "verify"),
    "skips": ("eager", "fallback"),
    "plans": ("plan", "plan-loaded", "plan-stale"),
}
_EVENTS_KEPT = 128  # of one function; enough for a report, bounded for a server that runs for weeks

_TIMES_KEPT = 32

logger = logging.getLogger("capture")


@frozen(kw_only=True)
class Event:
    """One thing that happened to a captured function."""

    kind: EventKind
    function: str
    """Its qualified name, or what ``name=`` says."""
    detail: str = ""
    at: float = 0.0
    """When it was over, in seconds of ``time.perf_counter``."""
    ms: float = 0.0
    """How long it took; 0 for what is not timed."""
    nbytes: int = 0
    """Memory it is about: the pool's size after ``record``, a graph's after ``instantiate``; 0 where there is none."""


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


@seen
@define
class Counters:
    """Totals of one captured function, over all threads. A backward pass that is recorded apart counts as a call.

    Fields and their meaning are listed here alone: ``Recordings`` gets the same fields from here.
    """

    observations: int = 0
    """Eager runs that were watched."""
    recordings: int = 0
    replays: int = 0
    rebinds: int = 0
    """Times that a recording was pointed at a tensor's new address."""
    eager_calls: int = 0
    """Calls that ran eagerly because they are not to be recorded; also a watched run after which that was decided."""
    watched_calls: int = 0
    """Watched eager runs after which a recording is to be made."""
    recorded_calls: int = 0
    """Calls in which a recording was made or tried."""
    warm_up_calls: int = 0
    """Calls that ran eagerly before a recording, as ``warmup=`` asks or a step needs it."""
    measured_calls: int = 0
    """Calls whose body ran in place of a replay, to learn which of the two is faster."""
    inline_calls: int = 0
    """Calls inside of another capture, or while capturing was off."""
    refused_calls: int = 0
    """Calls that raised ``UncapturableError``, as ``fallback="error"`` asks."""
    checkpoints: int = 0
    """Times that the pool was put back to where a recording was to begin."""
    misses: int = 0
    """Calls with a known key that no recording fitted."""
    kept_outputs: int = 0
    """Outputs that were still used when their memory was needed: they have fresh memory in every call since."""
    evictions: int = 0
    """Recordings that gave their place to one that is used more."""
    verifications: int = 0
    """Replays that were compared with the body."""
    body_runs: int = 0
    """Times that the body's Python ran: eagerly, watched, recorded or compared with."""
    plans_loaded: int = 0
    """Plans of other processes that were used."""
    plans_stale: int = 0
    """Plans of other processes that did not fit any more."""

    def items(self) -> dict[str, int]:
        """Totals by name."""
        return {one.name: getattr(self, one.name) for one in fields(Counters)}

    def calls(self) -> dict[str, int]:
        """Calls by kind. Each call is of one kind; one that raises is of the kind that it was when it raised."""
        return {
            "replayed": self.replays, "recorded": self.recorded_calls, "watched": self.watched_calls,
            "warm-up": self.warm_up_calls, "measured": self.measured_calls, "eager": self.eager_calls,
            "inline": self.inline_calls, "refused": self.refused_calls,
        }  # fmt: skip

    def text(self) -> str:
        """One line: the calls by kind, which add up, and the recordings that were made."""
        calls = {kind: number for kind, number in self.calls().items() if number}
        parts = f": {', '.join(f'{number} {kind}' for kind, number in calls.items())}" if calls else ""
        made = [_counted(self.recordings, "recording")] + [_counted(self.rebinds, "rebind")] * bool(self.rebinds)
        return f"{_counted(sum(calls.values()), 'call')}{parts}; {', '.join(made)}"

    @classmethod
    def total(cls, parts: Iterable[Counters]) -> Counters:
        """The counters of several functions, added up."""
        found = [part.items() for part in parts]
        return Counters(**{one.name: sum(part[one.name] for part in found) for one in fields(Counters)})


@define
class Timed:
    """Fields of an event that its block may set while it runs."""

    detail: str = ""
    nbytes: int = 0


@frozen(kw_only=True)
class Profiler:
    """How to reach a profiler. ``enter(name)`` is called only while ``is_running()``."""

    is_running: Callable[[], bool]
    enter: Callable[[str], AbstractContextManager[object]]


_profiler = Profiler(is_running=bool, enter=nullcontext)  # bool() is False: no profiler is known yet


def use_profiler(trace: Profiler) -> None:
    """From now on timed blocks are ranges in this profiler's trace, too. It is passed in, as this module does not
    import torch."""
    global _profiler
    _profiler = trace


@define
class Log:
    """Events and counters of one captured function."""

    function: str
    counters: Counters = field(factory=Counters)
    events: deque[Event] = field(factory=lambda: deque(maxlen=_EVENTS_KEPT))
    eager_ms: deque[float] = field(factory=lambda: deque(maxlen=_TIMES_KEPT))
    """Host time of eager calls that were timed, the last ones."""

    def add(self, kind: EventKind, detail: str = "", *, ms: float = 0.0, nbytes: int = 0) -> None:
        """Note an event and print it if ``CAPTURE_LOGS`` asks for its kind."""
        event = Event(kind=kind, function=self.function, detail=detail, at=time.perf_counter(), ms=ms, nbytes=nbytes)
        self.events.append(event)
        for listener in _listeners:
            listener(self, event)
        level = _levels.get(kind)
        if level is not None:
            size = f", {nbytes} bytes" if nbytes else ""
            logger.log(level, "%s %s: %s (%.2f ms%s)", kind, self.function, detail, ms, size)

    @contextmanager
    def timed(self, kind: EventKind, detail: str = "", *, nbytes: int = 0) -> Iterator[Timed]:
        """Note an event that lasts as long as the block, also when the block raises; a range in a profiler's trace.

        The block may set ``detail`` and ``nbytes`` on what it is given, where it learns them only at its end.
        """
        timed = Timed(detail, nbytes)
        begin = time.perf_counter()
        try:
            with self.range(kind), self.progress_line(kind):
                yield timed
        finally:
            self.add(kind, timed.detail, ms=(time.perf_counter() - begin) * 1e3, nbytes=timed.nbytes)

    def progress_line(self, kind: EventKind) -> AbstractContextManager[object]:
        """Show a line on the terminal while the block takes long; the block adds its event itself."""
        return slow_calls.progress_line(kind, self.function)

    def range(self, kind: EventKind | Literal["replay"]) -> AbstractContextManager[object]:
        """A range in a profiler's trace, without an event; nothing while no profiler runs."""
        return _profiler.enter(self.range_name(kind)) if _profiler.is_running() else nullcontext()

    def range_name(self, kind: EventKind | Literal["replay"]) -> str:
        """How a profiler's trace names this function's ranges."""
        return f"capture::{kind} {self.function}"


_listeners: tuple[Callable[[Log, Event], None], ...] = ()


@contextmanager
def listening(listener: Callable[[Log, Event], None]) -> Iterator[None]:
    """Tell ``listener`` of every event in this process, of all functions and threads, while the block runs."""
    global _listeners
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        _listeners = tuple(one for one in _listeners if one is not listener)


def parse_logs(text: str) -> dict[str, int]:
    """``CAPTURE_LOGS`` -> level per event kind. Raises ``ValueError`` naming the known words."""
    levels: dict[str, int] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        sign, name = (word[0], word[1:]) if word[0] in "+-" else ("", word)
        names = tuple(_ARTEFACTS) if name == "all" else (name,)
        for artefact in names:
            if artefact not in _ARTEFACTS:
                words = ("all", *_ARTEFACTS)
                raise ValueError(f"unknown word {name!r}{suggestion(name, words)}; known: {', '.join(words)}")
            for kind in _ARTEFACTS[artefact]:
                if sign == "-":
                    levels.pop(kind, None)
                else:
                    levels[kind] = logging.DEBUG if sign == "+" else logging.INFO
    return levels


class _Lines(logging.Formatter):
    """A line with the time and, where there are several, the rank: ``[capture 12:30:01.250 rank 1] record f: ...``."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK", "")
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        place = f" rank {rank}" if rank else ""
        return f"[capture {clock}.{record.msecs:03.0f}{place}] {super().format(record)}"


_handler: logging.Handler | None = None


def set_logs(words: str) -> None:
    """Print events as they happen, as ``CAPTURE_LOGS`` does: ``set_logs("recordings,+runtime,-plans")``; ``""`` stops.

    Lines go to the logger ``capture`` of the standard library. If an application has handlers, for it or for the root
    logger, they get them; else they are written to standard error. Raises ``ValueError`` for an unknown word.
    """
    global _levels, _handler
    levels = parse_logs(words)
    if _handler is not None:
        logger.removeHandler(_handler)
        _handler = None
    if levels:
        if not logger.hasHandlers():
            _handler = _Standard()
            _handler.setFormatter(_Lines())
            logger.addHandler(_handler)
        logger.setLevel(min(levels.values()))
    _levels = levels


class _Standard(logging.StreamHandler[Any]):
    """Writes to standard error, unless the application has set up handlers of its own since: no line is written
    twice."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and len(logger.handlers) == 1:
            super().emit(record)


_levels: dict[str, int] = {}


def _set_up() -> None:
    try:
        set_logs(os.environ.get("CAPTURE_LOGS", ""))
    except ValueError as error:
        logger.warning("CAPTURE_LOGS: %s", error)


_set_up()
