"""Which words of two captures are addresses of which tensor: the pure part of rebinding."""

from __future__ import annotations

from attrs import evolve

from capture.engines.cuda.address_inference import (
    AddressWord,
    CaptureDifference,
    NodeParameters,
    RangeIndex,
    TensorRange,
    infer_addresses,
)

A = TensorRange("a", 0x1000, 0x100, 0x9000)
B = TensorRange("b", 0x1100, 0x100, 0x5000)
STILL = TensorRange("still", 0x3000, 0x100, 0x3000)


def kernel(*words: int, same: str = "f", closed: str | None = None) -> NodeParameters:
    return NodeParameters("kernel", (same,), words, closed=closed)


def explained(
    recorded: list[NodeParameters], again: list[NodeParameters], spans: tuple[TensorRange, ...] = (A, B, STILL)
) -> list[AddressWord] | CaptureDifference:
    """Infer the addresses. Addresses of the recording's own pool are those that begin with 7."""
    return infer_addresses(recorded, again, spans, lambda old, new: old >> 12 == new >> 12 == 7)


def test_words_follow_their_tensors_with_their_offsets() -> None:
    recorded = [kernel(0x1000, 5, 0x1180), kernel(0x3000), kernel(0x10FF)]
    again = [kernel(0x9000, 5, 0x5080), kernel(0x3000), kernel(0x90FF)]
    assert explained(recorded, again) == [
        AddressWord(0, 0, "a", 0),
        AddressWord(0, 2, "b", 0x80),
        AddressWord(2, 0, "a", 0xFF),
    ]


def test_a_look_alike_that_stays_is_no_address() -> None:
    assert explained([kernel(0x1000, 0x1004)], [kernel(0x9000, 0x1004)]) == [AddressWord(0, 0, "a", 0)]


def test_one_byte_past_a_tensor_is_not_its_own() -> None:
    found = explained([kernel(0x1200)], [kernel(0x5100)])
    assert isinstance(found, CaptureDifference)
    assert found.node == 0


def test_another_offset_is_not_explained() -> None:
    found = explained([kernel(0, 0x1010)], [kernel(0, 0x9020)])
    assert isinstance(found, CaptureDifference)
    assert "0x1010" in found.reason


def test_own_memory_may_be_elsewhere() -> None:
    assert explained([kernel(0x7000, 0x1000)], [kernel(0x7100, 0x9000)]) == [AddressWord(0, 1, "a", 0)]


def test_what_nobody_filled_may_differ_unless_it_is_an_address_in_both() -> None:
    recorded = kernel(0x1000, 123)
    for other in (456, 0x9004):
        assert explained([recorded], [kernel(0x9000, other)]) == [AddressWord(0, 0, "a", 0)]
    assert explained([kernel(0x1000, 0x1004)], [kernel(0x9000, 456)]) == [AddressWord(0, 0, "a", 0)]
    assert isinstance(explained([kernel(0x1000, 0x1004)], [kernel(0x9000, 0x5004)]), CaptureDifference)
    assert isinstance(explained([kernel(0x1000, 0x3004)], [kernel(0x9000, 0x9004)]), CaptureDifference)


def test_where_every_byte_was_written_none_may_differ() -> None:
    recorded, again = (
        NodeParameters("kernel", (), (first, last), filled=True) for first, last in ((0x1000, 1), (0x9000, 2))
    )
    assert isinstance(explained([recorded], [again]), CaptureDifference)


def test_what_lies_beside_a_tensor_and_moved_with_it_is_an_address() -> None:
    assert isinstance(explained([kernel(0x1FFF)], [kernel(0x9FFF)]), CaptureDifference)


def test_a_gap_that_held_the_stack_may_differ_by_as_much_as_a_tensor_moved() -> None:
    """cuBLAS on an H200: a table moved by 512 bytes, and a gap held an address of the stack 512 bytes deeper."""
    stack = 0x7FFF67763AB4
    recorded, again = [kernel(0x1000, stack)], [kernel(0x9000, stack + 0x8000)]
    assert explained(recorded, again) == [AddressWord(0, 0, "a", 0)]
    large = TensorRange("large", stack - (1 << 41), 1 << 41, stack - (1 << 41) + 0x8000)  # of which it may be the end
    found = explained(recorded, again, (A, large))
    assert isinstance(found, CaptureDifference)
    assert "word 1" in found.reason


def test_other_nodes_are_not_compared() -> None:
    assert isinstance(explained([kernel(1)], [kernel(1), kernel(2)]), CaptureDifference)
    assert isinstance(explained([kernel(1)], [kernel(1, same="g")]), CaptureDifference)
    assert isinstance(explained([kernel(1)], [kernel(1, 2)]), CaptureDifference)
    assert isinstance(explained([kernel(1)], [NodeParameters("memset", ("f",), (1,))]), CaptureDifference)


def test_a_node_that_nobody_can_read_stops_everything() -> None:
    found = explained([kernel(0x1000), kernel(closed="from the host")], [kernel(0x9000), kernel()])
    assert found == CaptureDifference("from the host", 1)


def test_tensors_that_share_memory_and_moved_together_are_not_told_apart() -> None:
    inside = TensorRange("inside", 0x1040, 0x20, 0x9040)
    assert isinstance(explained([kernel(0x1050)], [kernel(0x9050)], (A, inside)), CaptureDifference)
    assert explained([kernel(0x1000)], [kernel(0x9000)], (A, inside)) == [AddressWord(0, 0, "a", 0)]
    tied = [evolve(span, tied=True) for span in (A, inside)]
    of_each = [AddressWord(0, 0, "a", 0x50), AddressWord(0, 0, "inside", 0x10)]
    words = explained([kernel(0x1050)], [kernel(0x9050)], tuple(tied))
    assert isinstance(words, list)
    assert sorted(words, key=str) == sorted(of_each, key=str)
    elsewhere = TensorRange("inside", 0x1040, 0x20, 0xA000)
    assert explained([kernel(0x1050)], [kernel(0xA010)], (A, elsewhere)) == [AddressWord(0, 0, "inside", 0x10)]


def test_places_finds_all_spans_around_a_value() -> None:
    places = RangeIndex(
        [TensorRange("long", 0, 1000, 0), TensorRange("short", 10, 5, 0), TensorRange("late", 500, 10, 0)]
    )
    assert {span.path for span in places.find(12)} == {"long", "short"}
    assert {span.path for span in places.find(505)} == {"long", "late"}
    assert {span.path for span in places.find(999)} == {"long"}
    assert places.find(1000) == []
    assert RangeIndex([]).find(1) == []


def test_empty_tensors_have_no_words() -> None:
    assert explained([kernel(0x1000)], [kernel(0x2000)], (TensorRange("e", 0x1000, 0, 0x2000),)) == []
