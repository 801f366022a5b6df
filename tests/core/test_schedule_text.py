"""The line of a report that says how the kernels of a recording are ordered."""

from __future__ import annotations

import pytest

from capture import AnnotationError, capture
from capture.core.schedule import Schedule


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Schedule(widths=(), longest=()), ""),
        (Schedule(widths=(), longest=(), chosen="recorded: the graph is empty"), "recorded: the graph is empty"),
        (Schedule(widths=(1, 8, 2), longest=("a", "b", "c"), chosen="undecided"),
         "undecided; longest path 3 of 11 kernels, at most 8 at once"),
        (Schedule(widths=(1, 8), longest=("a", "b"), chosen="by data", chain_ms=0.1, by_data_ms=0.04),
         "by data: longest path 2 of 9 kernels, at most 8 at once, 0.040 ms instead of 0.100"),
        (Schedule(widths=(1, 8), longest=("a", "b"), chosen="recorded", chain_ms=0.1, by_data_ms=0.2),
         "recorded: longest path 2 of 9 kernels, at most 8 at once, 0.100 ms instead of 0.200"),
    ],
)  # fmt: skip
def test_the_choice_as_a_line(schedule: Schedule, text: str) -> None:
    assert schedule.text() == text


def test_a_wrong_choice_is_refused_where_it_is_written() -> None:
    with pytest.raises(AnnotationError, match="schedule='atuo' is not a choice"):
        capture(lambda x: x, schedule="atuo")  # type: ignore[call-overload]
