"""What a probe is: a question to torch that is asked once, and whose answer to any trouble is no."""

from __future__ import annotations

import functools
from collections.abc import Callable

from capture.core.events import logger
from capture.core.interrupts import let_through


def probe(find: Callable[[], bool]) -> Callable[[], bool]:
    """Ask once in a process. False is the stated fallback, which is slower and never wrong, so whatever ``find`` raises
    is False, too: torch may be another version, and other libraries replace parts of it (``torch.zeros`` that makes
    tensors on another device, for example)."""

    @functools.cache
    @functools.wraps(find)
    def found() -> bool:
        try:
            return find()
        except Exception as error:  # noqa: BLE001 - see above
            let_through(error)
            logger.info("%s.%s: no, as %s: %s", find.__module__, find.__qualname__, type(error).__name__, error)
            return False

    return found
