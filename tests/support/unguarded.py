"""A number that no guard tells of, for tests of replays that are wrong: the size of a file."""

from __future__ import annotations

import os
import tempfile

_FILE = tempfile.NamedTemporaryFile()  # noqa: SIM115 - there until the process ends
_PATH = _FILE.name


def unguarded() -> float:
    """The number."""
    return float(os.stat(_PATH).st_size)


def set_unguarded(number: int) -> None:
    """Gives it another value."""
    os.truncate(_PATH, number)
