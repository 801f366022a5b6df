"""Profile: timed blocks of the log are ranges in ``torch.profiler`` traces.

Beside ``record_function``, which is public, one needs to know cheaply whether a profiler runs at all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.profiler

from capture import _torch_private
from capture._events import Trace


def always() -> bool:
    """Without the probe every range is entered: 11 us each, on blocks that take milliseconds. Replays have none."""
    return True


is_running: Callable[[], bool] = getattr(_torch_private, "is_profiling", always)

TRACE = Trace(is_running=is_running, enter=torch.profiler.record_function)
