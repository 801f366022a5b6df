"""Recordings that a replay runs in one go, though the host reads values in the middle.

To go segment by segment is for bodies that go another way after a value: what was written by then has to be put back.
Where the body hands on what it reads, and does nothing else with it, nothing follows from the values, so that the
engine may read them on its way, and the rest of the library sees a recording without breaks, some of whose results are
numbers. Where the body goes on from a value, mostly it is the one that was recorded: the fast path runs such a
recording in one go, too. If the value is another one after all, ``branches`` goes on from there.
"""

from __future__ import annotations

from typing import cast

from capture.engines.base import SegmentedRecording
from capture.observe.returned_value import ASKED, RETURNED, kind_of_returned
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.tree.node import Node
from capture.tree.outputs import ReadInLine


def read_in_line(captured: Captured, entry: Entry, node: Node) -> None:
    """Have the recording of a node run in one go, where it may."""
    is_whole = entry.region is None and not captured.is_backward and captured.sizes is None
    outputs, reads = node.outputs, node.reads
    if not reads or outputs is None or node.computed is not None or not is_whole:
        return
    if any(text.startswith(ASKED) for text in reads):
        return
    values = cast(SegmentedRecording, node.recording).read_in_line()
    if values is None:
        return
    kinds = tuple([kind_of_returned(text) if text.startswith(RETURNED) else None for text in reads])
    outputs.in_line = ReadInLine(values, kinds)
    if all(text.startswith(RETURNED) for text in reads) and entry.goes_one_way:
        node.reads = ()
