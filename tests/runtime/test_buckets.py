"""Buckets: arguments are padded to sizes that are recorded, results are cut to the sizes that eager gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import Dim, capture, config, ladder, recordings, reset, sizes_seen, warmup
from tests.support.bucketed import assert_same, run_beside

LADDER = (2, 4, 8)
MANY = (3, 3, 5, 3, 8, 6, 1, 7, 3, 2, 5, 4, 6, 3, 7, 1, 3, 9, 5, 3)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


def refused(function: Any) -> list[str]:
    """Findings that say why a size is not padded."""
    return [finding.what for finding in recordings(function).findings if finding.code == "CG602"]


def rows(x: Tensor) -> Tensor:
    return torch.relu(x) * 2 + 1


def test_rows_of_any_number_replay_with_one_recording_for_each_rung() -> None:
    f = capture(rows, buckets={"x": {0: LADDER}})
    run_beside(f, rows, [(torch.randn(n, 3),) for n in MANY], keep=False)
    counters = recordings(f)
    assert counters.recordings == len(LADDER)
    assert counters.observations == len(LADDER) + 1  # and for 9 rows, which are above the ladder
    assert counters.replays > 8
    assert refused(f) == []


def test_powers_of_two_have_no_end() -> None:
    f = capture(rows, buckets={"x": {0: "pow2"}})
    run_beside(f, rows, [(torch.randn(n, 2),) for n in (3, 3, 17, 30, 17, 30, 100, 70, 100, 70)], keep=False)
    assert recordings(f).recordings == 3


def test_two_dimensions_strides_of_results_are_eagers() -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + 1, x.mT * 2, x.mT.contiguous() - 1

    f = capture(body, buckets={"x": {0: (2, 4), 1: (4, 8)}})
    sizes = [(n, m) for n in (1, 2, 3, 4) for m in (3, 4, 5) for _ in range(4)]
    run_beside(f, body, [(torch.randn(n, m),) for n, m in sizes], keep=False)
    assert recordings(f).recordings == 4
    assert refused(f) == []


def test_a_dim_is_shared_and_sizes_that_disagree_are_not_padded() -> None:
    def body(x: Tensor, mask: Tensor) -> Tensor:
        return x * mask if x.shape == mask.shape else x.sum() + mask.sum()

    batch = Dim((4, 8), name="batch")
    f = capture(body, buckets={"x": {0: batch}, "mask": {0: batch}})
    run_beside(f, body, [(torch.randn(n), torch.ones(n)) for n in (3, 5, 3, 5, 3, 5)])
    run_beside(f, body, [(torch.randn(3), torch.ones(5)) for _ in range(4)])
    assert sizes_seen(f) == {"batch": {3: 3, 5: 3}}
    assert refused(f) == []


def test_fills() -> None:
    def body(x: Tensor) -> Tensor:
        return x.cumsum(0) if x.dtype == torch.int64 else x.cumprod(0)

    def more(x: Tensor, dim: int, count: int) -> Tensor:
        return x.new_full((*x.shape[:dim], count, *x.shape[dim + 1 :]), 5)

    for fill in (-1, "repeat", more, 0.5, True):
        f = capture(body, buckets={"x": {0: LADDER, 1: (4,)}}, fill={"x": fill})
        calls: list[Any] = [(torch.randint(1, 9, (n, 3)),) for n in (3, 5, 3, 5, 3, 5)]
        run_beside(f, body, calls)
        assert recordings(f).recordings == 2
        assert refused(f) == []


def test_negative_dimensions_none_and_what_is_no_tensor() -> None:
    def body(x: Tensor, bias: Tensor | None, scale: float = 2.0) -> Tensor:
        return x * scale if bias is None else x * scale + bias

    length = Dim((4, 8))
    f = capture(body, buckets={"x": {-1: length}, "bias": {-1: length}}, max_recordings=20)
    calls: list[Any] = [(torch.randn(2, n), b, s) for n in (3, 5) for b in (None, torch.randn(n)) for s in (1.0, 2.0)]
    run_beside(f, body, calls * 4)
    assert recordings(f).replays > 8


class Batch(NamedTuple):
    ids: Tensor
    mask: Tensor


def test_arguments_in_containers() -> None:
    def body(batch: Any, table: Tensor) -> dict[str, Any]:
        vectors = table[batch.ids] * batch.mask[..., None]
        return {"rows": vectors, "ids": batch.ids + 1, "count": 3}

    length = Dim((4, 8))
    f = capture(body, buckets={"batch.ids": {1: length}, "batch.mask": {1: length}})
    table = torch.randn(10, 3)
    ids = [torch.randint(0, 10, (2, n)) for n in (3, 4, 5, 3, 5, 3, 5, 3)]
    run_beside(f, body, [(Batch(row_ids, torch.ones(row_ids.shape)), table) for row_ids in ids])
    assert recordings(f).replays >= 4
    assert refused(f) == []


def test_keyword_arguments_by_their_own_names() -> None:
    def body(scale: float, **batch: Tensor) -> Tensor:
        return batch["ids"] * scale + batch["mask"]

    length = Dim((4, 8))
    f = capture(body, buckets={"ids": {0: length}, "mask": {0: length}})
    for n in (3, 5, 3, 5, 3, 5, 3):
        ids, mask = torch.randn(n), torch.randn(n)
        assert_same(f(2.0, ids=ids, mask=mask), body(2.0, ids=ids, mask=mask))
    assert recordings(f).replays >= 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    @override
    @capture(buckets={"x": {0: LADDER}})
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


def test_methods_have_ladders_of_their_own() -> None:
    first, second = Net(), Net()
    for net in (first, second):
        calls = [(torch.randn(n, 3),) for n in MANY[:12]]
        run_beside(net, lambda x, net=net: torch.tanh(x) * net.scale, calls, keep=False)
    assert recordings(first.forward).recordings == recordings(second.forward).recordings == len(LADDER)


def test_a_weight_that_moves_is_followed() -> None:
    net = Net()
    for step in range(12):
        x = torch.randn(3 + step % 2 * 2, 3)
        assert_same(net(x), torch.tanh(x) * net.scale)
        if step == 6:
            net.scale = nn.Parameter(torch.randn(3))
        if step == 8:
            net.scale.data = torch.randn(3)
    assert refused(net.forward) == []


def test_python_state_that_changes_is_compared_anew() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.options = {"centre": False}

        def centred(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.options["centre"] else x + 1

        @override
        def forward(self, x: Tensor) -> Tensor:
            return self.centred(x) * 2

    eager, net = Choice(), capture(Choice(), buckets={"x": {0: LADDER}})
    run_beside(net, eager, [(torch.randn(3, 2),) for _ in range(6)])
    assert refused(net) == []
    eager.options["centre"] = net.options["centre"] = True
    with pytest.warns(UserWarning, match="CG602.*'output' of a padded call differs"):
        run_beside(net, eager, [(torch.randn(n, 2),) for n in (3, 3, 3, 5, 3, 3)])


def test_a_chain_of_bucketed_functions_in_one_step() -> None:
    first, second = capture(rows, buckets={"x": {0: LADDER}}), capture(rows, buckets={"x": {0: LADDER}})
    run_beside(lambda x: second(first(x)), lambda x: rows(rows(x)), [(torch.randn(n, 3),) for n in MANY])
    assert recordings(second).replays > 4


def test_inputs_on_the_memory_of_the_last_output() -> None:
    f = capture(rows, buckets={"x": {0: LADDER}})
    x = y = torch.randn(3, 2)
    for _ in range(6):
        x, y = f(x) / 3, rows(y) / 3
        assert_same(x, y)


def test_warm_up_records_the_whole_ladder_in_one_pool() -> None:
    def body(x: Tensor, mask: Tensor) -> Tensor:
        return torch.relu(x) * mask

    batch = Dim(LADDER)
    f = capture(body, buckets={"x": {0: batch}, "mask": {0: batch}})
    report = warmup(f).cases([(torch.randn(3, 4), torch.ones(3, 1))], progress=False)
    assert report.recorded == len(report.cases) == 3
    assert [case.pool_bytes > 0 for case in report.cases] == [True, False, False]
    assert "[8, 4]" in report.cases[0].case
    calls = [(torch.randn(n, 4), torch.ones(n, 1)) for n in (3, 5, 8, 3, 5, 8, 3, 5)]
    run_beside(f, body, calls, keep=False)
    assert recordings(f).recordings == 3
    assert recordings(f).observations == 3
    assert recordings(f).replays > 4


def test_warm_up_of_one_call_and_of_powers_of_two() -> None:
    f = capture(rows, buckets={"x": {0: "pow2"}})
    warmup(f)(torch.randn(3, 2))
    assert recordings(f).recordings == 1
    assert warmup(f).cases([(torch.randn(6, 2),)], progress=False).recorded == 3  # 8, 2 and 1


def test_the_sizes_seen_make_a_ladder() -> None:
    f = capture(rows, buckets={"x": {0: (16,)}})
    for n in (1, 1, 1, 2, 9, 9, 9, 10, 16, 1):
        f(torch.randn(n, 2))
    assert sizes_seen(f) == {"x.0": {1: 4, 2: 1, 9: 3, 10: 1, 16: 1}}
    assert ladder(sizes_seen(f)["x.0"], rungs=3) == (2, 10, 16)
    reset(f)
    assert sizes_seen(f) == {"x.0": {}}


def test_verification_of_every_call() -> None:
    f = capture(rows, buckets={"x": {0: LADDER}}, verify="always")
    run_beside(f, rows, [(torch.randn(3, 2),) for _ in range(5)])
    assert recordings(f).verifications == 5
    g = capture(rows, buckets={"x": {0: LADDER}}, verify="first")
    for _ in range(5):
        x = torch.randn(3, 2)
        assert_same(g(x), rows(x))
    assert recordings(g).verifications == 2  # of calls 1 and 4, as without it
    with config.patch(verify="always"):
        for _ in range(2):
            assert_same(g(x), rows(x))
    assert recordings(g).verifications == 4


def test_poisoned_memory_and_other_modes() -> None:
    f = capture(rows, buckets={"x": {0: LADDER}})
    with config.patch(poison=True):
        run_beside(f, rows, [(torch.randn(n, 2),) for n in (3, 5, 3, 5, 3, 5)])
    with torch.inference_mode():
        run_beside(f, rows, [(torch.randn(n, 2),) for n in (3, 5, 3, 5, 3, 5)])
    run_beside(f, rows, [(torch.randn(n, 2, dtype=torch.float64),) for n in (3, 5, 3, 5, 3, 5)])
    run_beside(f, rows, [(torch.randn(2, n).T,) for n in (3, 5, 3, 5, 3, 5)])


def test_threads() -> None:
    f = capture(rows, buckets={"x": {0: LADDER}})
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            device = torch.get_default_device()
            generator = torch.Generator(device).manual_seed(seed)
            with torch.no_grad():
                for n in MANY:
                    x = torch.randn(n, 3, generator=generator)
                    assert_same(f(x), rows(x))
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
