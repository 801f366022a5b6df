"""The arena: blocks never overlap, the tightest fit is taken, freed neighbours merge, restoring repeats a layout."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from typing_extensions import override

from capture.engines.base import Block, Geometry
from capture.engines.cpu.arena import Arena
from capture.engines.staging import over

ALIGNMENT = 64


def take(arena: Arena, nbytes: int) -> tuple[Block, torch.UntypedStorage]:
    """A block and the storage that keeps it taken."""
    block = arena.allocate(nbytes)
    storage = arena.storage(block)
    arena.track(block, storage)
    return block, storage


def fill(storage: torch.UntypedStorage, value: int) -> None:
    """Write one byte everywhere."""
    torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).fill_(value)


def layout(arena: Arena) -> list[tuple[int, int]]:
    """Taken blocks as seen from outside."""
    return sorted((block.address, block.nbytes) for block in arena.live_blocks())


def disjoint(blocks: list[Block]) -> bool:
    ordered = sorted((block.address, block.address + block.nbytes) for block in blocks)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ordered))


# ------------------------------------------------------------------------------------------------------------ single


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, 1 << 20, (1 << 20) + 1, 5 << 20])
def test_a_block_is_aligned_and_large_enough(nbytes: int) -> None:
    arena = Arena()
    block, storage = take(arena, nbytes)
    assert block.nbytes == (nbytes or ALIGNMENT)
    assert block.address % ALIGNMENT == 0
    assert block.address % ALIGNMENT == 0
    assert storage.data_ptr() == block.address
    assert storage.nbytes() == block.nbytes
    assert arena.find(block.address)
    assert arena.find(block.address + block.nbytes - 1)
    assert not arena.find(0)


def test_a_block_is_free_again_when_its_storage_dies() -> None:
    arena = Arena()
    block, storage = take(arena, 100)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (100,), (1,))
    view = tensor[50:]
    del storage, tensor
    assert arena.live_blocks() == {block}
    del view
    assert arena.live_blocks() == set()
    again, _ = take(arena, 100)
    assert again == block


def test_the_tightest_fit_is_taken() -> None:
    arena = Arena()
    taken = [take(arena, nbytes) for nbytes in (1024, 64, 256, 64, 512, 64)]
    holes = {block.nbytes: block.address for block, _ in (taken[0], taken[2], taken[4])}
    for index in (4, 2, 0):
        taken[index] = taken[5]
    got = take(arena, 200)
    assert got[0].address == holes[256]
    larger = take(arena, 500)
    assert larger[0].address == holes[512]
    last = take(arena, 600)
    assert last[0].address == holes[1024]


def test_the_rest_of_a_split_block_is_free() -> None:
    arena = Arena()
    (first, storage), fence = take(arena, 1024), take(arena, 64)
    del storage
    parts = [take(arena, 256) for _ in range(4)]
    assert [block.address - first.address for block, _ in parts] == [0, 256, 512, 768]
    assert fence[0].address == first.address + 1024


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_freed_neighbours_merge(order: tuple[int, ...]) -> None:
    arena = Arena()
    taken: dict[int, tuple[Block, torch.UntypedStorage]] = {index: take(arena, 256) for index in range(3)}
    fence = take(arena, 64)
    begin = taken[0][0].address
    for index in order:
        del taken[index]
    whole, _ = take(arena, 768)
    assert whole.address == begin
    assert fence[0].address == begin + 768


def test_a_full_segment_grows_another() -> None:
    arena = Arena()
    held = [take(arena, 300_000) for _ in range(12)]
    assert disjoint([block for block, _ in held])
    assert arena.reserved_bytes() >= 12 * 300_000
    before = arena.reserved_bytes()
    del held
    again = [take(arena, 300_000) for _ in range(12)]
    assert disjoint([block for block, _ in again])
    assert arena.reserved_bytes() == before


def test_reserved_bytes_is_the_high_water_mark() -> None:
    arena = Arena()
    assert arena.reserved_bytes() == 0
    first = take(arena, 1000)
    assert arena.reserved_bytes() == 1024
    del first
    for _ in range(10):
        take(arena, 1000)
    assert arena.reserved_bytes() == 1024
    two = take(arena, 1000), take(arena, 1000)
    assert arena.reserved_bytes() == 2048
    del two
    assert arena.reserved_bytes() == 2048


def test_memory_outlives_the_arena() -> None:
    arena = Arena()
    block, storage = take(arena, 256)
    del storage
    tensor = arena.tensor(block, Geometry(dtype=torch.float32, offset=0, shape=(4, 4), stride=(4, 1)))
    tensor.fill_(3.0)
    del arena
    gc.collect()
    second = Arena()
    taken = [take(second, 256)[1] for _ in range(50)]
    for memory in taken:
        fill(memory, 0xFF)
    assert tensor.eq(3.0).all()
    assert len(taken) == 50


# ----------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize(
    ("shape", "stride"), [((3, 4), (4, 1)), ((3, 4), (1, 3)), ((), ()), ((2, 3), (8, 2)), ((5,), (1,))]
)
def test_tensors_have_their_geometry(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    arena = Arena()
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    block = arena.allocate(span * dtype.itemsize)
    tensor = arena.tensor(block, Geometry(dtype=dtype, offset=0, shape=shape, stride=stride))
    assert (tensor.dtype, tuple(tensor.shape), tensor.stride()) == (dtype, shape, stride)
    assert tensor.data_ptr() == block.address
    assert tensor.is_leaf
    assert not tensor.requires_grad
    values = torch.arange(tensor.numel()).reshape(shape).to(dtype)
    tensor.copy_(values)
    assert torch.equal(tensor, values)


def test_two_tensors_of_a_block_are_separate_storages() -> None:
    """Each tensor that is handed out has a storage of its own, whose end the arena can see."""
    arena = Arena()
    block = arena.allocate(64)
    geometry = Geometry(dtype=torch.float32, offset=0, shape=(4,), stride=(1,))
    first, second = arena.tensor(block, geometry), arena.tensor(block, geometry)
    first.fill_(5)
    assert second.eq(5).all()
    assert first.untyped_storage() is not second.untyped_storage()
    assert not torch.is_same_size(first, torch.empty(0))


def test_views_share_one_storage() -> None:
    arena = Arena()
    block = arena.allocate(64)
    whole, part = arena.views(
        block,
        [
            Geometry(dtype=torch.float32, offset=0, shape=(4,), stride=(1,)),
            Geometry(dtype=torch.float32, offset=2, shape=(2,), stride=(1,)),
        ],
    )
    assert whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr() == block.address
    assert whole.untyped_storage() is part.untyped_storage()
    part.fill_(7)
    assert whole[2:].eq(7).all()


def test_over_looks_at_any_storage() -> None:
    base = torch.arange(12.0)
    look = over(base.untyped_storage(), Geometry(dtype=torch.float32, offset=2, shape=(2, 3), stride=(3, 1)))
    assert torch.equal(look, base[2:8].view(2, 3))
    look.zero_()
    assert base[2:8].eq(0).all()


# ---------------------------------------------------------------------------------------------- restore


def test_restore_takes_exactly_the_live_blocks() -> None:
    arena = Arena()
    held = [take(arena, nbytes) for nbytes in (64, 256, 1024, 64, 300_000, 900_000, 128)]
    kept = [held[1], held[4], held[6]]
    arena.restore(None, kept)
    assert layout(arena) == sorted((block.address, block.nbytes) for block, _ in kept)
    new = [take(arena, nbytes) for nbytes in (64, 1024, 900_000)]
    assert disjoint([block for block, _ in (*kept, *new)])
    assert {block.address for block, _ in new} == {held[0][0].address, held[2][0].address, held[5][0].address}


def test_restore_forgets_the_storages_of_before() -> None:
    """A storage that dies after a restore frees nothing that others hold now."""
    arena = Arena()
    old, storage = take(arena, 256)
    arena.restore(None, [])
    new, held = take(arena, 256)
    assert new == old
    del storage
    assert arena.live_blocks() == {new}
    del held
    assert arena.live_blocks() == set()


def test_restore_follows_the_storages_it_was_given() -> None:
    arena = Arena()
    block, storage = take(arena, 256)
    arena.restore(None, [(block, storage), (block, storage)])
    assert arena.live_blocks() == {block}
    del storage
    assert arena.live_blocks() == set()
    again, _ = take(arena, 256)
    assert again == block


# --------------------------------------------------------------------------------------------------------- poisoning


def test_poison_spares_the_living() -> None:
    arena = Arena()
    held = [take(arena, 256) for _ in range(4)]
    for _, storage in held:
        fill(storage, 1)
    live = [held[1][0], held[3][0]]
    arena.poison(live)
    for block, storage in held:
        assert set(storage.tolist()) == ({1} if block in live else {0xFF})


def test_poison_reads_as_nan_and_minus_one() -> None:
    arena = Arena()
    block = arena.allocate(64)
    arena.poison([])
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        tensor = arena.tensor(block, Geometry(dtype=dtype, offset=0, shape=(4,), stride=(1,)))
        assert all(math.isnan(value) for value in tensor.tolist())
    assert arena.tensor(block, Geometry(dtype=torch.int64, offset=0, shape=(2,), stride=(1,))).tolist() == [-1, -1]


def test_poison_of_an_empty_arena() -> None:
    arena = Arena()
    arena.poison([])
    assert arena.reserved_bytes() == 0


# -------------------------------------------------------------------------------------------------------- properties


class ArenaMachine(RuleBasedStateMachine):
    """Any order of taking, dropping and restoring, against a plain set of intervals."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena()
        self.taken: dict[int, tuple[Block, torch.UntypedStorage, int]] = {}
        self.number = 0

    @rule(target=held, nbytes=st.one_of(st.integers(0, 3000), st.integers(0, 700_000)))
    def take(self, nbytes: int) -> int:
        fits = [length for _, length in self.gaps() if length >= max(-(-nbytes // ALIGNMENT) * ALIGNMENT, ALIGNMENT)]
        gaps = dict(self.gaps())
        block, storage = take(self.arena, nbytes)
        if fits:
            assert gaps[block.address] == min(fits), "not the tightest fit"
        self.number += 1
        fill(storage, self.number % 251)
        self.taken[self.number] = (block, storage, self.number % 251)
        return self.number

    @rule(number=consumes(held))
    def drop(self, number: int) -> None:
        self.taken.pop(number, None)

    @rule(kept=st.sets(st.integers(0, 60), max_size=40))
    def restore(self, kept: set[int]) -> None:
        """Restore the arena with some blocks. It forgets the others, whether their storages live or not."""
        self.taken = {number: one for position, (number, one) in enumerate(self.taken.items()) if position in kept}
        self.arena.restore(None, [(block, storage) for block, storage, _ in self.taken.values()])

    @rule()
    def restore_the_same(self) -> None:
        before, gaps = layout(self.arena), self.gaps()
        self.arena.restore(None, [(block, storage) for block, storage, _ in self.taken.values()])
        assert layout(self.arena) == before
        assert self.gaps() == gaps

    @rule()
    def poison(self) -> None:
        self.arena.poison([block for block, _, _ in self.taken.values()])

    def gaps(self) -> list[tuple[int, int]]:
        """Free intervals, worked out from the taken ones."""
        free = []
        for segment in self.arena._segments:
            position = segment.begin
            for address, nbytes in layout(self.arena):
                if segment.begin <= address < segment.end:
                    if address > position:
                        free.append((position, address - position))
                    position = address + -(-nbytes // ALIGNMENT) * ALIGNMENT
            if position < segment.end:
                free.append((position, segment.end - position))
        return sorted(free)

    @invariant()
    def taken_blocks_are_those_whose_storage_lives(self) -> None:
        assert self.arena.live_blocks() == {block for block, _, _ in self.taken.values()}

    @invariant()
    def nothing_overlaps_and_all_lies_in_one_segment(self) -> None:
        blocks = [block for block, _, _ in self.taken.values()]
        assert disjoint(blocks)
        for block in blocks:
            homes = [
                s for s in self.arena._segments if s.begin <= block.address and block.address + block.nbytes <= s.end
            ]
            assert len(homes) == 1

    @invariant()
    def free_intervals_are_merged(self) -> None:
        self.arena.live_blocks()  # what died is given back when the arena is asked
        assert sorted(self.arena._free) == self.gaps()

    @invariant()
    def values_stay(self) -> None:
        for _, storage, value in list(self.taken.values())[-3:]:
            assert {storage[0], storage[storage.nbytes() - 1]} == {value}

    @override
    def teardown(self) -> None:
        self.taken.clear()
        assert self.arena.live_blocks() == set()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_restored_arena_allocates_as_before(sizes: list[int], data: st.DataObject) -> None:
    """Same live blocks, same requests: the same addresses, which is what lets a path be recorded again."""
    arena = Arena()
    held = [take(arena, nbytes) for nbytes in sizes]
    keep = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    kept = [taken for position, taken in enumerate(held) if position in keep]
    held.clear()

    def run() -> Iterator[int]:
        alive = []
        for nbytes in reversed(sizes):
            block, storage = take(arena, nbytes)
            alive.append(storage)
            yield block.address

    arena.restore(None, kept)
    first = list(run())
    arena.restore(None, kept)
    assert list(run()) == first
