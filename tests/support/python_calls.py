"""The library's Python functions that a call runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import capture as library

FOLDER = Path(library.__file__).parent


def python_calls(function: Callable[[], Any], folder: Path = FOLDER) -> list[str]:
    """The library's Python functions that run, or those in a folder of it, but for the wrapper that users call."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and folder in Path(code.co_filename).parents and code.co_name != "wrapper":
            called.append(code.co_qualname)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called
