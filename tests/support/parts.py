"""Which of the slow tests belong to a part, such as ``2/3``."""

from __future__ import annotations

import re
from collections.abc import Iterable


def part_of(names: Iterable[str], part: str) -> set[str]:
    """Dealt out like cards, so that shards of one test, which take alike long, go to different parts.

    Raises ``ValueError`` for what is no part.
    """
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"--part {part}: K/N is expected, such as 1/3")
    return set(sorted(names)[int(found[1]) - 1 :: int(found[2])])
