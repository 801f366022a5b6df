"""Recordings that a replay runs in one go, though the host reads values in the middle.

To go segment by segment is for bodies that go another way after a value: what was written by then has to be put back.
Where the body hands on what it reads, and does nothing else with it, nothing follows from the values, so that the
engine may read them on its way, and the rest of the library sees a recording without breaks, some of whose results are
numbers. Where the body goes on from a value, mostly it is the one that was recorded: the fast path runs such a
recording in one go, too. If the value is another one after all, ``branches`` goes on from there.
"""

from __future__ import annotations

from typing import Any, cast

from capture.engines.base import SegmentedRecording
from capture.observe.computed import Computed
from capture.observe.returned_value import ASKED, RETURNED, kind_of_returned
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.noted_numbers import Formula
from capture.tree.node import Node
from capture.tree.outputs import OutputPlan, ReadInLine


def read_in_line(captured: Captured, entry: Entry, node: Node) -> None:
    """Have the recording of a node run in one go, where it may."""
    is_whole = entry.region is None and not captured.is_backward and captured.sizes is None
    outputs, reads = node.outputs, node.reads
    if not reads or outputs is None or not is_whole or any(text.startswith(ASKED) for text in reads):
        return
    left, hands_on = _left(node, outputs), all(text.startswith(RETURNED) for text in reads)
    if left is None or (hands_on and not entry.goes_one_way):  # others may go on from its segments
        return
    values = cast(SegmentedRecording, node.recording).read_in_line()
    if values is None:
        return
    kinds = tuple([kind_of_returned(text) if text.startswith(RETURNED) else None for text in reads])
    formulas = tuple([which for _, which in left if isinstance(which, Formula)])
    outputs.in_line, outputs.reads = ReadInLine(values, kinds, formulas), left
    if hands_on:
        node.reads = ()


def _left(node: Node, outputs: OutputPlan) -> tuple[tuple[int, Any], ...] | None:
    """``outputs.reads``, with the number of the read for a formula that gives just that. None where a formula has other
    numbers than those that are read, or may raise: that would have to happen before anything is left."""
    computed: Computed | None = node.computed
    if computed is None:
        return outputs.reads
    if computed.asked or computed.positions or computed.given or node.placed:
        return None
    formulas = [which for _, which in outputs.reads if isinstance(which, Formula)]
    if any(part.may_raise() for formula in formulas for part in formula.parts()):
        return None
    return tuple([(at, _number_of(which)) for at, which in outputs.reads])


def _number_of(which: Any) -> Any:
    is_read = isinstance(which, Formula) and not which.operation
    return which.operands[0][1] if is_read else which
