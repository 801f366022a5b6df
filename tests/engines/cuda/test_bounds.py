"""Which ranges of addresses hold a value, found by bisection."""

from __future__ import annotations

from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from capture.engines.cuda.pool import bounds_of

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=8)


@given(SPANS)
def test_an_address_lies_within_if_the_number_of_bounds_before_it_is_odd(found: list[tuple[int, int]]) -> None:
    spans = [(begin, begin + size) for begin, size in found]
    bounds = bounds_of(spans)
    for address in range(75):
        inside = any(begin <= address < end for begin, end in spans)
        assert (bisect_right(bounds, address) & 1 == 1) is inside
