"""A padded call gives what the unpadded one gives. A size at which it would not keeps its shape, and CG602 says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, Dim, UncapturableError, capture, config, recordings
from tests.support.bucketed import assert_same, run_beside
from tests.support.device import rng_state, set_rng_state

LADDER = (4, 8)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


def refused(function: Any) -> list[str]:
    return [finding.what for finding in recordings(function).findings if finding.code == "CG602"]


def mean(x: Tensor) -> Tensor:
    return x - x.mean(0)


def length(x: Tensor) -> Tensor:
    return x * x.shape[0]


def positions(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[0], 0, -1, device=x.device)[:, None]


def last(x: Tensor) -> Tensor:
    return x[-1] * 2


def flat(x: Tensor) -> Tensor:
    return x.flatten() + 1


def size_as_a_number(x: Tensor) -> tuple[Tensor, int]:
    return x + 1, x.shape[0]


def draws_for_each_row(x: Tensor) -> Tensor:
    for _ in range(x.shape[0]):
        torch.rand(1)
    return x + 1


def odd_sizes(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] % 2 else x + 2


def gather(x: Tensor) -> Tensor:
    return x * torch.tensor(x.shape, device=x.device).sum()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (mean, "'output' of a padded call differs from the unpadded body's: it is off by up to"),
        (length, "'output' of a padded call differs"),
        (positions, "'output' of a padded call differs"),
        (last, "'output' of a padded call differs"),
        (size_as_a_number, "'output.1' of a padded call differs from the unpadded body's: 4 against 3"),
        (draws_for_each_row, "what it leaves in a generator"),
        (odd_sizes, "it is off by up to 1; the same bits are asked for"),
    ],
)
def test_bodies_that_look_at_the_padding(body: Callable[[Tensor], Any], told: str) -> None:
    f = capture(body, buckets={"x": {0: LADDER}})
    torch.manual_seed(3)
    calls = [torch.randn(3, 2) + 1 for _ in range(8)]

    def run() -> list[tuple[Tensor, Any]]:
        results = []
        for x in calls:
            state = rng_state()
            results.append((state, f(x)))
        return results

    with pytest.warns(CaptureWarning, match="CG602 bucket-not-used"):
        results = run()
    for x, (state, result) in zip(calls, results, strict=True):
        set_rng_state(state)
        assert_same(result, body(x))
    assert told in " ".join(refused(f))
    assert recordings(f).replays >= 2  # of recordings with its own shape


def test_flattened_results_are_cut_where_the_first_dimension_is_padded() -> None:
    f = capture(flat, buckets={"x": {0: LADDER}})
    run_beside(f, flat, [(torch.randn(3, 2),) for _ in range(6)])
    assert refused(f) == []
    g = capture(flat, buckets={"x": {1: LADDER}})
    with pytest.warns(CaptureWarning, match="CG602"):
        run_beside(g, flat, [(torch.randn(2, 3),) for _ in range(6)])


def test_each_size_is_compared_as_another_one_may_differ() -> None:
    f = capture(odd_sizes, buckets={"x": {0: (8,)}})
    run_beside(f, odd_sizes, [(torch.randn(6, 2),) for _ in range(5)])
    assert refused(f) == []
    with pytest.warns(CaptureWarning, match=r"(?s)CG602.*x\.0=5 to 8"):
        run_beside(f, odd_sizes, [(torch.randn(n, 2),) for n in (5, 6, 5, 6, 5, 6, 5, 6)])


def test_values_for_which_padding_does_not_show_at_first() -> None:
    def body(x: Tensor) -> Tensor:
        return x - x.amax(0)

    f = capture(body, buckets={"x": {0: (4,)}})
    run_beside(f, body, [(torch.rand(3, 2) + 1,) for _ in range(3)], keep=False)
    assert refused(f) == []
    with pytest.warns(CaptureWarning, match="CG602"):
        f(-torch.rand(3, 2) - 1)  # the fourth call is compared again
    run_beside(f, body, [(-torch.rand(3, 2) - 1,) for _ in range(5)])


def test_a_comparison_on_nothing_but_the_fill_is_none() -> None:
    f = capture(mean, buckets={"x": {0: (4,)}})
    run_beside(f, mean, [(torch.zeros(3, 2),)])
    assert recordings(f).replays == 0
    assert refused(f) == []
    with pytest.warns(CaptureWarning, match="CG602"):
        run_beside(f, mean, [(torch.randn(3, 2),) for _ in range(8)])


def test_a_matrix_product_within_a_tolerance() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    f = capture(lambda x: net(x), buckets={"x": {0: (8, 16)}}, tolerance=(1e-4, 1e-5))
    for n in (3, 5, 9, 3, 5, 9, 3, 5, 9, 16):
        x = torch.randn(n, 64)
        torch.testing.assert_close(f(x), net(x), rtol=1e-4, atol=1e-5)
    assert refused(f) == []
    assert recordings(f).recordings == 2
    g = capture(lambda x: (x + x.shape[0] * 1e-3, x * 1), buckets={"x": {0: (4,)}}, tolerance={"output.0": 2e-3})
    g(torch.randn(3, 2))
    assert refused(g) == []
    h = capture(lambda x: (x * 1, x + x.shape[0] * 1e-3), buckets={"x": {0: (4,)}}, tolerance={"output.0": 2e-3})
    with pytest.warns(CaptureWarning, match=r"CG602.*'output\.1'"):
        h(torch.randn(3, 2))


def test_branches_after_what_is_read_on_the_host() -> None:
    def body(x: Tensor) -> Tensor:
        return torch.relu(x) * 2 if bool(x.sum() > 0) else torch.tanh(x) - 1

    f = capture(body, buckets={"x": {0: LADDER}})
    signs = (1, 1, -1, -1, 1, -1, 1, 1, -1, -1, 1, -1)
    for sign in signs * 2:
        x = (torch.rand(3, 2) + 0.1) * sign
        assert_same(f(x), body(x))
    assert refused(f) == []
    assert recordings(f).replays > 12


def test_a_mask_that_is_looked_at_on_the_host() -> None:
    def body(x: Tensor, mask: Tensor) -> Tensor:
        return torch.relu(x) + 1 if bool(mask.all()) else torch.where(mask[:, None], torch.relu(x) + 1, -1.0)

    rows = Dim(LADDER)
    f = capture(body, buckets={"x": {0: rows}, "mask": {0: rows}})
    for call in range(30):
        n = (3, 5, 8)[call % 3]
        x, mask = torch.randn(n, 2), torch.ones(n, dtype=torch.bool)
        mask[0] = call % 2 == 0
        assert_same(f(x, mask), body(x, mask))
    assert refused(f) == []
    assert recordings(f).replays > 15


def test_branches_of_which_one_shows_padding() -> None:
    def body(x: Tensor) -> Tensor:
        return torch.relu(x) * 2 if bool(x[0, 0] > 0) else (x - x.mean(0)) * 2

    f = capture(body, buckets={"x": {0: LADDER}})

    def run() -> None:
        for sign in (1, 1, -1, -1, 1, -1, 1, 1, -1, -1, 1, -1):
            x = (torch.rand(3, 2) + 0.1) * sign
            assert_same(f(x), body(x))

    with pytest.warns(CaptureWarning, match="CG602.*'output' of a padded call differs"):
        run()


def test_what_reads_on_the_host_and_writes() -> None:
    def body(x: Tensor, total: Tensor) -> Tensor:
        total.add_(1)
        return torch.relu(x) * 2 if bool(x.sum() > 0) else torch.tanh(x) - 1

    f = capture(body, buckets={"x": {0: LADDER}})
    with pytest.warns(CaptureWarning, match="CG602.*reads values on the host"):
        run_beside(f, body, [((torch.rand(3, 2) + 0.1) * sign, torch.zeros(1)) for sign in (1, 1, -1, 1, -1, -1)])


def test_arguments_that_are_written_or_returned() -> None:
    def writes(x: Tensor) -> Tensor:
        return x.add_(1) * 2

    def returns(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:, 0]

    for body, told in ((writes, "the body writes 'x'"), (returns, "'output.0' lies in memory that the call was given")):
        f = capture(body, buckets={"x": {0: LADDER}})
        with pytest.warns(CaptureWarning, match="CG602"):
            run_beside(f, body, [(torch.randn(3, 2),) for _ in range(6)])
        assert told in refused(f)[0]


def test_results_that_need_gradients() -> None:
    weight = torch.randn(2, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        return torch.tanh(x * weight) * 2

    f = capture(body, buckets={"x": {0: LADDER}})

    def train() -> None:
        for _ in range(6):
            x = torch.randn(3, 2)
            ours, theirs = f(x), body(x)
            assert_same(ours.detach(), theirs.detach())
            assert torch.equal(*[torch.autograd.grad(result.sum(), weight)[0] for result in (ours, theirs)])

    with torch.enable_grad(), pytest.warns(CaptureWarning, match="CG602.*results need gradients"):
        train()
    run_beside(f, body, [(torch.randn(3, 2),) for _ in range(6)])


def test_errors_are_eagers_own() -> None:
    def body(ids: Tensor, table: Tensor) -> Tensor:
        if ids.shape[0] == 3:
            raise ValueError(f"{ids.shape[0]} are not to be had")
        return table[ids] + 1

    f = capture(body, buckets={"ids": {0: LADDER}}, fill=1)
    table = torch.randn(5, 2)
    for n in (2, 5, 2, 3, 5, 3, 2):
        ids = torch.randint(0, 5, (n,))
        if n == 3:
            with pytest.raises(ValueError, match="3 are not to be had"):
                f(ids, table)
        else:
            assert_same(f(ids, table), body(ids, table))
    if table.device.type == "cpu":
        for _ in range(5):
            with pytest.raises(IndexError) as ours:
                f(torch.tensor([1, 7]), table)
            with pytest.raises(IndexError) as theirs:
                body(torch.tensor([1, 7]), table)
            assert str(ours.value) == str(theirs.value)


def test_a_fill_that_the_body_cannot_take() -> None:
    def body(ids: Tensor, table: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, table) + 1

    f = capture(body, buckets={"ids": {0: LADDER}}, fill=99)
    table, ids = torch.randn(5, 2, device="cpu"), torch.tensor([1, 2, 3], device="cpu")
    with pytest.warns(CaptureWarning, match="CG602.*a padded call raises where the body does not: IndexError"):
        run_beside(f, body, [(ids, table)] * 6)


def test_an_error_where_the_user_asks_for_one() -> None:
    f = capture(mean, buckets={"x": {0: LADDER}}, fallback="error")
    for _ in range(2):
        with pytest.raises(UncapturableError, match="CG602"):
            f(torch.randn(3, 2))


def test_a_fill_that_raises_is_told_and_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(x: Tensor, dim: int, count: int) -> Tensor:
        raise ValueError("no fill")

    def body(x: Tensor) -> Tensor:
        return torch.relu(x) + 1

    monkeypatch.delenv("CAPTURE_STRICT", raising=False)
    f = capture(body, buckets={"x": {0: LADDER}}, fill=fill)
    with config.patch(strict=False), pytest.warns(CaptureWarning, match="CG905"):
        run_beside(f, body, [(torch.randn(3, 2),) for _ in range(6)])


def test_linked_sizes_in_attention() -> None:
    batch, width = Dim((2, 4), name="batch"), Dim((4, 8), name="length")

    def body(q: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ q.mT).masked_fill(~mask[:, None, :], float("-inf"))
        return scores.softmax(-1) @ q

    f = capture(
        body, buckets={"q": {0: batch, 1: width}, "mask": {0: batch, 1: width}},
        fill={"mask": False}, tolerance=1e-5,
    )  # fmt: skip
    for n, m in ((1, 3), (3, 5), (1, 3), (3, 5), (1, 3), (3, 5), (2, 4), (3, 4)):
        q, mask = torch.randn(n, m, 3), torch.rand(n, m) > 0.3
        mask[:, 0] = True
        # rows of padding have nothing to attend to: their NaN must not reach the real rows
        torch.testing.assert_close(f(q, mask), body(q, mask), rtol=1e-5, atol=1e-5)
    assert refused(f) == []


def test_an_operator_that_raises_and_a_body_that_catches_it() -> None:
    def body(ids: Tensor, table: Tensor) -> Tensor:
        scaled = torch.relu(table) + 1
        try:
            return torch.nn.functional.embedding(ids, scaled) * 2
        except IndexError:
            return scaled[: ids.shape[0]] * ids.shape[0]

    f = capture(body, buckets={"ids": {0: LADDER}})
    table = torch.randn(8, 2, device="cpu")
    for call in range(16):
        ids = torch.tensor([1, 2, 9 if call in (6, 7, 12) else 2], device="cpu")
        assert_same(f(ids, table), body(ids, table))
    assert refused(f) == []
    assert recordings(f).replays > 8
