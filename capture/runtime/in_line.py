"""Recordings whose body hands on what the host reads, and does nothing else with it: one replay, without segments.

To go segment by segment is for bodies that may go another way after a value: what was written by then has to be put
back. Here nothing follows from the values, so that the engine may read them on its way, and the rest of the library
sees a recording without breaks, some of whose results are numbers.
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
    if not reads or node.computed is not None or not is_whole or not entry.goes_one_way:
        return
    if not all(text.startswith(RETURNED) and not text.startswith(ASKED) for text in reads):
        return
    values = cast(SegmentedRecording, node.recording).read_in_line()
    if values is not None and outputs is not None:
        outputs.in_line = ReadInLine(values, tuple(map(kind_of_returned, reads)))
        node.reads = ()
