"""A bar on standard error while many cases are warmed up; one line of text where ``rich`` is missing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from capture.core import slow_calls
from capture.core.sizes import bytes_text

Update = Callable[[int, int], object]
"""Called with the number of cases done and the bytes they take by now."""


def progress(title: str, total: int, shown: bool | None) -> AbstractContextManager[Update]:
    """A bar for ``total`` cases. ``shown=None``: only if standard error is a terminal, as logs are no place for it."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if not total or sys.stderr is None or not (terminal if shown is None else shown):
        return nullcontext(lambda done, nbytes: None)
    try:
        import rich.progress as _  # noqa: F401
    except ImportError:
        shown_by = _line(title, total, terminal=terminal)
    else:
        shown_by = _bar(title, total)
    return _alone(shown_by)


@contextmanager
def _alone(shown_by: AbstractContextManager[Update]) -> Iterator[Update]:
    """Show only the bar: slow calls of the warm-up write no lines of their own meanwhile."""
    with slow_calls.quiet(), shown_by as update:
        yield update


@contextmanager
def _bar(title: str, total: int) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    begin = time.perf_counter()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[seconds]:.1f} s"),
        TextColumn("{task.fields[memory]}"),
    )
    # Drawn by whoever calls update: a thread of the bar's own would run beside recordings.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(title, total=total, seconds=0.0, memory=bytes_text(0))

        def update(done: int, nbytes: int) -> None:
            seconds = time.perf_counter() - begin
            bar.update(task, completed=done, seconds=seconds, memory=bytes_text(nbytes), refresh=True)

        yield update


@contextmanager
def _line(title: str, total: int, *, terminal: bool) -> Iterator[Update]:
    begin = time.perf_counter()
    text = ""

    def update(done: int, nbytes: int) -> None:
        nonlocal text
        new = f"{title}: {done}/{total} cases, {time.perf_counter() - begin:.1f} s, {bytes_text(nbytes)}"
        if terminal:
            _write("\r" + new.ljust(len(text)))
        text = new

    update(0, 0)
    try:
        yield update
    finally:
        _write("\n" if terminal else text + "\n")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
