"""Which ranges of addresses hold a value: what C finds by bisection, beside a look at each range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.engines.cuda.pool import bounds_of
from capture.native import native

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=8)


@given(SPANS)
def test_an_address_lies_within_some_range(found: list[tuple[int, int]]) -> None:
    spans = [(begin, begin + size) for begin, size in found]
    ranges = native.AddressRanges(bounds_of(spans))
    for address in range(75):
        assert ranges.holds(address) is any(begin <= address < end for begin, end in spans)


def test_the_largest_address_and_what_is_none() -> None:
    ranges = native.AddressRanges([2**64 - 2, 2**64 - 1])
    assert ranges.holds(2**64 - 2)
    assert not ranges.holds(2**64 - 1)
    for wrong in (-1, 2**64, "1"):
        with pytest.raises((OverflowError, TypeError)):
            ranges.holds(wrong)
        with pytest.raises((OverflowError, TypeError)):
            native.AddressRanges([wrong])
