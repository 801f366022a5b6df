"""Profile: timed blocks of the log are ranges in ``torch.profiler`` traces.

Beside ``record_function``, which is public, one needs to know cheaply whether a profiler runs at all.
"""

from __future__ import annotations

import torch.profiler

from capture._events import Trace
from capture._torch_private import is_profiling

TRACE = Trace(is_running=is_profiling, enter=torch.profiler.record_function)
