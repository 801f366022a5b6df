"""Which words of two captures are addresses of which tensor: the pure part of rebinding."""

from __future__ import annotations

from attrs import evolve

from capture.backends.cuda.words import NodeWords, Places, Span, Unlike, Word, explain

A = Span("a", 0x1000, 0x100, 0x9000)
B = Span("b", 0x1100, 0x100, 0x5000)
STILL = Span("still", 0x3000, 0x100, 0x3000)


def kernel(*words: int, same: str = "f", closed: str | None = None) -> NodeWords:
    return NodeWords("kernel", (same,), words, closed=closed)


def explained(
    recorded: list[NodeWords], again: list[NodeWords], spans: tuple[Span, ...] = (A, B, STILL)
) -> list[Word] | Unlike:
    """The recording's own memory begins with 7."""
    return explain(recorded, again, spans, lambda old, new: old >> 12 == new >> 12 == 7)


def test_words_follow_their_tensors_with_their_offsets() -> None:
    recorded = [kernel(0x1000, 5, 0x1180), kernel(0x3000), kernel(0x10FF)]
    again = [kernel(0x9000, 5, 0x5080), kernel(0x3000), kernel(0x90FF)]
    assert explained(recorded, again) == [Word(0, 0, "a", 0), Word(0, 2, "b", 0x80), Word(2, 0, "a", 0xFF)]


def test_a_look_alike_that_stays_is_no_address() -> None:
    assert explained([kernel(0x1000, 0x1004)], [kernel(0x9000, 0x1004)]) == [Word(0, 0, "a", 0)]


def test_one_byte_past_a_tensor_is_not_its_own() -> None:
    found = explained([kernel(0x1200)], [kernel(0x5100)])
    assert isinstance(found, Unlike)
    assert found.node == 0


def test_another_offset_is_not_explained() -> None:
    found = explained([kernel(0, 0x1010)], [kernel(0, 0x9020)])
    assert isinstance(found, Unlike)
    assert "0x1010" in found.reason


def test_own_memory_may_be_elsewhere() -> None:
    assert explained([kernel(0x7000, 0x1000)], [kernel(0x7100, 0x9000)]) == [Word(0, 1, "a", 0)]


def test_what_nobody_filled_may_differ_unless_it_is_an_address_in_both() -> None:
    recorded = kernel(0x1000, 123)
    for other in (456, 0x9004):
        assert explained([recorded], [kernel(0x9000, other)]) == [Word(0, 0, "a", 0)]
    assert explained([kernel(0x1000, 0x1004)], [kernel(0x9000, 456)]) == [Word(0, 0, "a", 0)]
    assert isinstance(explained([kernel(0x1000, 0x1004)], [kernel(0x9000, 0x5004)]), Unlike)
    assert isinstance(explained([kernel(0x1000, 0x3004)], [kernel(0x9000, 0x9004)]), Unlike)


def test_where_every_byte_was_written_none_may_differ() -> None:
    recorded, again = (
        NodeWords("kernel", (), (first, last), filled=True) for first, last in ((0x1000, 1), (0x9000, 2))
    )
    assert isinstance(explained([recorded], [again]), Unlike)


def test_what_lies_beside_a_tensor_and_moved_with_it_is_an_address() -> None:
    assert isinstance(explained([kernel(0x1FFF)], [kernel(0x9FFF)]), Unlike)


def test_other_nodes_are_not_compared() -> None:
    assert isinstance(explained([kernel(1)], [kernel(1), kernel(2)]), Unlike)
    assert isinstance(explained([kernel(1)], [kernel(1, same="g")]), Unlike)
    assert isinstance(explained([kernel(1)], [kernel(1, 2)]), Unlike)
    assert isinstance(explained([kernel(1)], [NodeWords("memset", ("f",), (1,))]), Unlike)


def test_a_node_that_nobody_can_read_stops_everything() -> None:
    found = explained([kernel(0x1000), kernel(closed="from the host")], [kernel(0x9000), kernel()])
    assert found == Unlike("from the host", 1)


def test_tensors_that_share_memory_and_moved_together_are_not_told_apart() -> None:
    inside = Span("inside", 0x1040, 0x20, 0x9040)
    assert isinstance(explained([kernel(0x1050)], [kernel(0x9050)], (A, inside)), Unlike)
    assert explained([kernel(0x1000)], [kernel(0x9000)], (A, inside)) == [Word(0, 0, "a", 0)]
    tied = [evolve(one, tied=True) for one in (A, inside)]
    both = [Word(0, 0, "a", 0x50), Word(0, 0, "inside", 0x10)]
    found = explained([kernel(0x1050)], [kernel(0x9050)], tuple(tied))
    assert isinstance(found, list)
    assert sorted(found, key=str) == sorted(both, key=str)
    elsewhere = Span("inside", 0x1040, 0x20, 0xA000)
    assert explained([kernel(0x1050)], [kernel(0xA010)], (A, elsewhere)) == [Word(0, 0, "inside", 0x10)]


def test_places_finds_all_spans_around_a_value() -> None:
    places = Places([Span("long", 0, 1000, 0), Span("short", 10, 5, 0), Span("late", 500, 10, 0)])
    assert {one.path for one in places.find(12)} == {"long", "short"}
    assert {one.path for one in places.find(505)} == {"long", "late"}
    assert {one.path for one in places.find(999)} == {"long"}
    assert places.find(1000) == []
    assert Places([]).find(1) == []


def test_empty_tensors_have_no_words() -> None:
    assert explained([kernel(0x1000)], [kernel(0x2000)], (Span("e", 0x1000, 0, 0x2000),)) == []
