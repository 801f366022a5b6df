"""Which memory the nodes of operators touch: their tensors, and memory that words of their parameters point at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.schedule.accesses import Lifetime, Memory, OperatorMemory, accesses
from capture.schedule.dependencies import Node, Span, dependencies

POOL = 0x7F00_0000_0000
OUTSIDE = 0x7E00_0000_0000


def memory(*lifetimes: Lifetime, block_of: Callable[[int], Span | None] = lambda _: None) -> Memory:
    return Memory([(POOL, POOL + 0x1000), (POOL + 0x9000, POOL + 0xA000)], lifetimes, block_of)


def at(begin: int, size: int = 0x100) -> Span:
    return POOL + begin, POOL + begin + size


def operator(first: int, *reads: Span, writes: tuple[Span, ...] = (), hidden: int = 0) -> OperatorMemory:
    return OperatorMemory("op", first, first + 1, reads, writes, hidden=hidden)


def test_words_in_tensors_of_the_operator_add_nothing() -> None:
    one = operator(0, at(0), writes=(at(0x100),))
    assert accesses([{POOL, POOL + 0x1FF, 3, 0}], [one], memory()) == [Node(0, one.reads, one.writes)]


def test_ranges_inside_others_are_looked_through() -> None:
    """The word is in the long range, although a short range that begins later is nearer."""
    one = operator(0, at(0, 0x800), at(0x100), at(0x300))
    assert accesses([{POOL + 0x700}], [one], memory()) == [Node(0, one.reads, ())]


def test_a_word_outside_of_the_pool_touches_its_block() -> None:
    """A word anywhere in a workspace outside of the pool touches the whole workspace."""
    block = (OUTSIDE, OUTSIDE + 0x4000)

    def block_of(word: int) -> Span | None:
        return block if block[0] <= word < block[1] else None

    nodes = accesses(
        [{OUTSIDE}, {OUTSIDE + 0x2000}, {0x7D00_0000_0000}], [operator(n) for n in range(3)], memory(block_of=block_of)
    )
    assert [node.writes for node in nodes] == [(block,), (block,), ()]
    assert dependencies(nodes).edges == ((0, 1),)


def test_a_word_of_the_pool_touches_all_between_blocks_that_outlive_the_operator() -> None:
    lives = [
        Lifetime(*at(0x000), born=0), Lifetime(*at(0x300), born=0, died=5), Lifetime(*at(0x500), born=0, died=1),
        Lifetime(*at(0x800), born=1), Lifetime(*at(0x200, 0x10), born=2),
    ]  # fmt: skip
    word = {POOL + 0x280}
    operators = [operator(number) for number in range(3)]
    nodes = accesses([(), word, ()], operators, memory(*lives))
    assert nodes[1].writes == (at(0x100, 0x200),)
    nodes = accesses([(), {POOL + 0x400}, ()], operators, memory(*lives))
    assert nodes[1].writes == (at(0x400, 0xC00),)  # blocks that died or were born in the operator are no limit


def test_a_word_in_a_live_block_of_somebody_else_touches_that() -> None:
    lives = [Lifetime(*at(0x300), born=0)]
    assert accesses([(), {POOL + 0x310}], [operator(0), operator(1)], memory(*lives))[1].writes == (at(0x300),)


def test_what_nobody_knows_is_a_barrier() -> None:
    """Barriers are: nodes of no operator, nodes whose parameters cannot be read, operators whose schema is unknown."""
    operators = [operator(0), OperatorMemory("op", 2, 3, is_barrier=True), operator(3)]
    found = accesses([(), (), (), None], operators, memory())
    assert [one.is_barrier for one in found] == [False, True, True, True]


def test_nodes_of_two_operators_are_barriers() -> None:
    operators = [OperatorMemory("outer", 0, 2), OperatorMemory("inner", 1, 2)]
    assert [one.is_barrier for one in accesses([(), ()], operators, memory())] == [False, True]


def test_hidden_memory_that_no_word_tells_of_is_a_barrier() -> None:
    assert accesses([{5}], [operator(0, hidden=1)], memory())[0].is_barrier
    found = accesses([{POOL + 5}], [operator(0, hidden=1)], memory())
    assert found[0].writes == (at(0, 0x1000),)


@given(st.data())
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_hidden_memory_is_always_covered(data: st.DataObject) -> None:
    """An allocator hands out memory at random, some only within an operator: the memory a node counts as touching
    covers it."""
    taken: dict[int, tuple[Span, int]] = {}
    lives, operators, words, wanted = [], [], [], []

    def free_span() -> Span | None:
        size = data.draw(st.sampled_from([1, 2, 4])) * 0x100
        free = [
            begin for begin in range(0, 0x1000 - size + 1, 0x100)
            if all(begin + size <= a - POOL or b - POOL <= begin for (a, b), _ in taken.values())
        ]  # fmt: skip
        return at(data.draw(st.sampled_from(free)), size) if free else None

    for number in range(data.draw(st.integers(1, 12))):
        temporary = free_span()
        operators.append(operator(number, hidden=int(temporary is not None)))
        offset = data.draw(st.integers(0, 0xFF))
        words.append({temporary[0] + offset} if temporary is not None else set())
        wanted.append(temporary)
        made = free_span()  # the temporary memory may be taken again
        if made is not None:
            taken[number] = made, number
        for name in [name for name in taken if data.draw(st.booleans())]:
            span, born = taken.pop(name)
            lives.append(Lifetime(*span, born=born, died=number + 1))
    lives += [Lifetime(*span, born=born) for span, born in taken.values()]
    for node, temporary in zip(accesses(words, operators, memory(*lives)), wanted, strict=True):
        covered = [
            written
            for written in node.writes
            if temporary and written[0] <= temporary[0] and temporary[1] <= written[1]
        ]
        assert temporary is None or covered


@pytest.mark.parametrize("word", [0, 1, 0xFFFF, 1 << 60])
def test_small_and_huge_numbers_are_no_addresses(word: int) -> None:
    found = accesses([{word}], [operator(0)], memory(block_of=lambda word: (word, word + 1)))
    assert found[0].writes == ()
