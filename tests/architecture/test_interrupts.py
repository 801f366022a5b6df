"""What a signal's handler raises, as a timeout does, comes out of each call: nothing takes it for an answer."""

from __future__ import annotations

import ast
from pathlib import Path

import capture

PACKAGE = Path(capture.__file__).parent
KINDS = {"Exception", "BaseException", "RuntimeError", "OSError", "MemoryError", "TimeoutError"}
"""Kinds that timeouts and interrupts are of. Handlers raise others, too, but none that mean that time is over."""
LOOKS = {"is_interrupt", "let_through"}
KEPT = {
    "capture/__main__.py": "a program of its own",
    "capture/api/environment.py": "a report of the machine",
    "capture/testing/equality.py": "the exception is what is compared",
    "capture/core/forks.py": "raised at the end, when all handlers ran",
    "capture/observe/islands.py": "raised again where it stands",
    "capture/observe/run.py": "raised again once the run is settled",
    "capture/observe/run_notes.py": "raised again at the end of the run",
    "capture/observe/dispatch_mode.py": "raised again at the end of the run",
    "capture/runtime/replay.py": "raised again once the replay is settled",
    "capture/runtime/training_region.py": "its own function looks at the error",
}
"""Files whose handlers keep the exception, and raise it later."""


def _kinds(caught: ast.expr | None) -> set[str]:
    if caught is None:
        return {"BaseException"}
    if isinstance(caught, ast.Tuple):
        return set().union(*map(_kinds, caught.elts))
    return {ast.unparse(caught)}


def _lets_through(handler: ast.ExceptHandler) -> bool:
    parts = [part for statement in handler.body for part in ast.walk(statement)]
    if any(isinstance(part, ast.Call) and ast.unparse(part.func) in LOOKS for part in parts):
        return True
    return isinstance(handler.body[-1], ast.Raise) and not any(isinstance(part, ast.Return) for part in parts)


def _swallowing(source: str) -> list[int]:
    """Lines of handlers and of ``contextlib.suppress`` that may take an interrupt for something else."""
    parts = list(ast.walk(ast.parse(source)))
    handlers = [part for part in parts if isinstance(part, ast.ExceptHandler) and _kinds(part.type) & KINDS]
    suppressed = [
        part for part in parts
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "contextlib.suppress"
        and {ast.unparse(kind) for kind in part.args} & KINDS
    ]  # fmt: skip
    return [handler.lineno for handler in handlers if not _lets_through(handler)] + [one.lineno for one in suppressed]


def test_interrupts_are_let_through() -> None:
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE.parent))
        if name not in KEPT and (lines := _swallowing(file.read_text(encoding="utf-8"))):
            found[name] = lines
    assert not found


def test_what_swallows_is_found() -> None:
    swallowing = (
        "try:\n    f()\nexcept (OSError, ValueError):\n    pass\nwith contextlib.suppress(RuntimeError):\n    f()\n"
    )
    assert _swallowing(swallowing) == [3, 5]
    assert not _swallowing(
        "try:\n    f()\nexcept OSError as error:\n    let_through(error)\nexcept KeyError:\n    pass\n"
    )
