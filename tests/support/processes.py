"""Processes that a test starts."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_path(first: Path = ROOT) -> str:
    """``PYTHONPATH`` of a process that has this checkout, or another folder, in front of what this one was given."""
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])
