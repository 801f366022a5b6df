"""Fault: an error inside this library, described in words, with its traceback in the log."""

from __future__ import annotations

import traceback
from pathlib import Path

from capture.core.events import logger
from capture.core.facts import Fault
from capture.core.interrupts import let_through
from capture.rules.compile_plan import compile_plan
from capture.runtime.captured import Captured

_ROOT = Path(__file__).parents[1]
_TEXT = 200  # characters of a message


def describe(error: BaseException) -> Fault:
    """An error of this library's own code."""
    return Fault(kind=type(error).__qualname__, message=_message(error), place=_place(error))


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as error:  # noqa: BLE001 - a class of the user's may do anything
        let_through(error)
        text = ""
    return text.partition("\n")[0][:_TEXT] or "no message"


def _place(error: BaseException) -> str:
    """The innermost line of this library's code: the error may come from other code that it called."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if _ROOT in Path(frame.filename).parents]
    if not ours:
        return "an unknown place"
    return f"{Path(ours[-1].filename).relative_to(_ROOT).as_posix()}:{ours[-1].lineno}"


def is_ours(error: BaseException) -> bool:
    """Whether the line that raised it is one of this library's own."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _ROOT in Path(frames[-1].filename).parents


def tell(captured: Captured, error: BaseException) -> None:
    """Report once an error after which the call went on as if it had not happened."""
    log(captured, error)
    captured.report(compile_plan(captured.annotation, captured.bare_facts(fault=describe(error))))


def log(captured: Captured, error: BaseException) -> None:
    """Write an error to the log; with its traceback, if it is the first of its kind."""
    found = describe(error)
    text = f"{found.kind} at {found.place}: {found.message}"
    captured.log.add("error", text)
    if ("CG905", f"{found.kind} at {found.place}") not in captured.findings:
        logger.warning("%s: %s", captured.annotation.function, text, exc_info=error)
