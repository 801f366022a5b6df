"""A line on the terminal while a first call takes long: what it is doing, and for how long.

A watched run or a recording of a large model may take many seconds, in which a user sees nothing. After ``AFTER``
seconds one line says so, is written again from time to time, and stays with the total. Only where standard error is a
terminal, as a log is no place for it. No thread writes it, as that would run beside recordings: the watch calls
``tick`` at each operator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from capture.core.interrupts import let_through

AFTER = 2.0
"""Seconds that a call may take before a line is shown."""
_EVERY = 0.25  # seconds between two lines
_WORDS = {"observe": "watching the first call of", "record": "recording"}

_current: _Line | None = None
_shown_otherwise = False
"""A warm-up's progress bar is on the terminal, so no line is written."""


class _Line:
    """The line of one run."""

    def __init__(self, text: str) -> None:
        self.text, self.operators, self.width = text, 0, 0
        self.begin = time.perf_counter()
        self.next = self.begin + AFTER

    @property
    def count(self) -> str:
        """Operators so far."""
        return f"{self.operators} operator{'' if self.operators == 1 else 's'}"

    def tick(self) -> None:
        """Count one more operator."""
        self.operators += 1
        now = time.perf_counter()
        if now >= self.next:
            self.write(f"{now - self.begin:.1f} s, {self.count}")
            self.next = now + _EVERY

    def write(self, rest: str, end: str = "") -> None:
        """Write the line over the one before."""
        line = f"capture: {self.text}: {rest}"
        try:
            sys.stderr.write("\r" + line.ljust(self.width) + end)
            sys.stderr.flush()
        except (OSError, ValueError) as error:  # the terminal is closed
            let_through(error)
            self.next = float("inf")
        self.width = len(line)


def tick() -> None:
    """An operator of a watched run begins."""
    if _current is not None:
        _current.tick()


@contextmanager
def progress_line(kind: str, function: str) -> Iterator[None]:
    """A block that may take long. Recordings are made one at a time in a process, so one line is enough."""
    global _current
    if kind not in _WORDS or _current is not None or _shown_otherwise or not _is_terminal():
        yield
        return
    line = _current = _Line(f"{_WORDS[kind]} {function}")
    try:
        yield
    finally:
        _current = None
        seconds = time.perf_counter() - line.begin
        if seconds >= AFTER:
            line.write(f"took {seconds:.1f} s, {line.count}", end="\n")


@contextmanager
def quiet() -> Iterator[None]:
    """No lines in this block: something else shows how far a warm-up has come."""
    global _shown_otherwise
    before, _shown_otherwise = _shown_otherwise, True
    try:
        yield
    finally:
        _shown_otherwise = before


def _is_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
