"""Schedule: which operators of a recording need the results of which others. Plain data, for reports."""

from __future__ import annotations

from capture.core.data import frozen


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
    chosen: str = ""
    """The order in which replays run: ``recorded``, one after another as captured, or ``by data``; ``undecided`` until
    both were timed; empty if no other order was looked for. A text after a colon says why there is no choice."""
    chain_ms: float | None = None
    """Milliseconds of a replay on the device, as recorded. None where it was not timed."""
    by_data_ms: float | None = None
    """Milliseconds of a replay with the dependencies of the data alone. None where it was not timed."""

    def text(self) -> str:
        """One line: ``"by data: longest path 12 of 97 kernels, at most 8 at once, 0.042 ms instead of 0.101"``."""
        if not self.widths:
            return self.chosen
        shape = f"longest path {len(self.widths)} of {sum(self.widths)} kernels, at most {max(self.widths)} at once"
        if self.chain_ms is None or self.by_data_ms is None:
            return f"{self.chosen}; {shape}"
        both = (self.by_data_ms, self.chain_ms) if self.chosen == "by data" else (self.chain_ms, self.by_data_ms)
        return f"{self.chosen}: {shape}, {both[0]:.3f} ms instead of {both[1]:.3f}"
