"""Output as a terminal shows it."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console


def printed_by_rich(shown: Any) -> str:
    """What ``rich`` prints for a value in a wide terminal without colours."""
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=False).print(shown)
    return out.getvalue()
