"""Whether ``torch.nn.utils.parametrize.cached()`` keeps what parametrizations give.

torch counts the blocks that are open in a variable of its module. Where that is not there, nothing is known to be kept.
"""

from __future__ import annotations

from torch.nn.utils import parametrize


def are_kept() -> bool:
    """Whether weights that parametrizations made, with their graphs, pass from one call to the next."""
    return bool(getattr(parametrize, "_cache_enabled", 0))
