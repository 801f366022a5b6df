"""Schedule: which operators of a recording need the results of which others. Plain data, for reports."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Schedule:
    """The operators of a recording in levels: each is one level below the last one whose results it needs.

    The levels say how many operators the data would let run at once. The CPU engine runs them one after another all
    the same, in the order of the body.
    """

    widths: tuple[int, ...]
    """How many operators each level has; their number is the length of the longest path."""
    longest: tuple[str, ...]
    """Names of the operators on one longest path, in order."""
