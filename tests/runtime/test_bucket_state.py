"""Padded calls of bodies that write: a paged cache, counters, state of Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, Dim, capture, config, recordings
from tests.support.bucketed import assert_same, run_beside


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


def refused(function: object) -> list[str]:
    return [finding.what for finding in recordings(function).findings if finding.code == "CG602"]


class Cache:
    """Slots for keys. Slot 0 belongs to nobody: a row without a slot (-1) writes there what is there already."""

    def __init__(self) -> None:
        self.keys = torch.zeros(16, 3)


def attend(cache: Cache, q: Tensor, slot_mapping: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
    at = slot_mapping.clamp(min=0)
    rows = torch.where((slot_mapping >= 0)[:, None], q, cache.keys[at])
    cache.keys.index_put_((at,), rows)
    scores = (cache.keys[slots] * q[:, None]).sum(-1)
    seen = torch.arange(slots.shape[1], device=q.device) < lengths[:, None]
    return scores.masked_fill(~seen, float("-inf")).amax(-1)


BATCH = Dim((2, 4, 8), name="batch")
ARGUMENTS = {"q": {0: BATCH}, "slot_mapping": {0: BATCH}, "slots": {0: BATCH}, "lengths": {0: BATCH}}


def step(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order = torch.randperm(15)[:n] + 1
    return torch.randn(n, 3), order, torch.randint(1, 16, (n, 4)), torch.randint(1, 5, (n,))


def test_a_paged_cache_is_as_eager_leaves_it_after_each_call() -> None:
    ours, theirs = Cache(), Cache()
    f = capture(attend, buckets=ARGUMENTS, fill={"slot_mapping": -1, "lengths": 1}, static=["cache"])
    for n in (3, 5, 3, 1, 7, 5, 3, 8, 6, 1, 3, 5, 7, 2, 3, 1):
        arguments = step(n)
        assert_same(f(ours, *arguments), attend(theirs, *arguments))
        assert torch.equal(ours.keys, theirs.keys)
    assert refused(f) == []
    assert recordings(f).recordings == 3
    assert recordings(f).replays > 6


def test_a_fill_that_is_written_is_found() -> None:
    ours, theirs = Cache(), Cache()
    f = capture(attend, buckets=ARGUMENTS, fill={"slot_mapping": 15, "q": 1, "lengths": 1}, static=["cache"])

    def run() -> None:
        for n in (3, 5, 3, 3, 5, 5, 3):
            arguments = step(n)
            arguments[1].clamp_(max=14)
            assert_same(f(ours, *arguments), attend(theirs, *arguments))
            assert torch.equal(ours.keys, theirs.keys)

    with pytest.warns(CaptureWarning, match="CG602.* of a padded call differs"):
        run()


class Counter(nn.Module):
    steps: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("rows", torch.zeros(1))
        self.last: Tensor | None = None
        self.counts_rows = self.keeps = False

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.counts_rows:
            self.rows += x.shape[0]
        y = torch.relu(x) + self.steps
        if self.keeps:
            self.last = y
        return y * 2


@pytest.mark.parametrize(("counts_rows", "keeps"), [(False, False), (True, False), (False, True)])
def test_state_of_a_module(counts_rows: bool, keeps: bool) -> None:
    eager, net = Counter(), capture(Counter(), buckets={"x": {0: (4, 8)}})
    for module in (eager, net):
        module.counts_rows, module.keeps = counts_rows, keeps

    def run() -> None:
        for n in (3, 5, 3, 5, 3, 5, 3, 5, 8, 4):
            x = torch.randn(n, 2)
            assert_same(net(x), eager(x))
            assert torch.equal(net.steps, eager.steps)
            assert torch.equal(net.rows, eager.rows)
            assert (net.last is None) == (eager.last is None)
            if eager.last is not None:
                assert_same(net.last, eager.last)

    if not (counts_rows or keeps):
        run()
        assert refused(net) == []
        return
    with pytest.warns(CaptureWarning, match=r"CG602.*'self\.(rows|last)' of a padded call differs"):
        run()


def test_arguments_on_the_memory_of_what_is_written() -> None:
    def body(table: Tensor, x: Tensor) -> Tensor:
        table.add_(1)
        return torch.relu(x) * 2

    f = capture(body, buckets={"x": {0: (4,)}}, static=["table"])
    ours, theirs = torch.randn(6, 2), torch.empty(6, 2)
    theirs.copy_(ours)

    def run() -> None:
        for call in range(12):
            x = torch.randn(3, 2) if call % 3 else None
            result, expected = (f(ours, ours[:3] if x is None else x), body(theirs, theirs[:3] if x is None else x))
            assert_same(result, expected)
            assert torch.equal(ours, theirs)

    with pytest.warns(CaptureWarning, match="CG103"):
        run()
    assert recordings(f).replays >= 3


def test_an_argument_that_is_written_and_is_not_padded() -> None:
    def body(x: Tensor, total: Tensor) -> Tensor:
        total.add_(1)
        return x * 2 + total

    f = capture(body, buckets={"x": {0: (4, 8)}})
    run_beside(f, body, [(torch.randn(n, 2), torch.randn(2)) for n in (3, 5) * 5], keep=False)
    assert refused(f) == []
    assert recordings(f).recordings == 2


def test_an_error_after_a_write_happens_once() -> None:
    def body(table: Tensor, ids: Tensor) -> Tensor:
        table.add_(1)
        return torch.nn.functional.embedding(ids, table) + 1

    f = capture(body, buckets={"ids": {0: (4,)}}, static=["table"])
    ours = torch.zeros(5, 2, device="cpu")
    for _ in range(6):
        f(ours, torch.tensor([1, 2, 3], device="cpu"))
    with pytest.raises(IndexError):
        f(ours, torch.tensor([1, 2, 9], device="cpu"))
    assert float(ours[0, 0]) == 7
    f(ours, torch.tensor([1, 2, 3], device="cpu"))
    assert float(ours[0, 0]) == 8


class Sized(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.count, self.seen, self.sizes = kind, 0, list[int](), dict[str, int]()

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counts rows":
            self.count += x.shape[0]
        if self.kind == "counts calls":
            self.count += 1
        if self.kind == "sets":
            self.sizes["last"] = x.shape[0]
        if self.kind == "appends":
            self.seen.append(x.shape[0])
        return torch.relu(x) * 2 + 1


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("kind", ["counts rows", "counts calls", "sets", "appends"])
def test_plain_values_that_the_body_leaves(kind: str) -> None:
    eager, net = Sized(kind), capture(Sized(kind), buckets={"x": {0: (4, 8)}})
    for n in (3, 3, 5, 3, 3, 5, 3, 4, 3, 3, 5, 8, 3, 5, 3):
        x = torch.randn(n, 2)
        assert_same(net(x), eager(x))
        assert (net.count, net.seen, net.sizes) == (eager.count, eager.seen, eager.sizes)
