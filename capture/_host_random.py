"""Host random numbers: what Python and NumPy draw from where code names no generator.

A run that only captured must leave them as they were, as it leaves torch's: what the body draws with them decides
what it does (layers that are left out, augmentation).
"""

from __future__ import annotations

import random
import sys
from typing import Any


def state() -> tuple[Any, Any]:
    """Of ``random``, and of ``numpy.random`` where that is in use."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), numpy.get_state() if numpy is not None else None


def put_back(before: tuple[Any, Any]) -> None:
    """Both are as they were."""
    own, numpys = before
    if random.getstate() != own:
        random.setstate(own)
    if numpys is not None:
        sys.modules["numpy.random"].set_state(numpys)
