"""A recording that is not used gives its place to one that is."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, capture, config, mark_step_begin, plans, recordings, report, warmup
from capture.api.decorator import captured_state
from capture.api.decorator import captured_states as all_of
from capture.core.findings import Policy
from capture.runtime import record
from capture.runtime.eviction import LEAST
from capture.tree import thread_trees
from capture.tree.tree import Tree
from tests.support.device import AGAIN, DEVICE, OWN_MEMORY

SCALE = 1000 if OWN_MEMORY else 1
"""Factor for sizes in tests that count bytes: a device's allocator takes at least 2 MiB at once."""

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs take memory of the pool, though they are small."""
    monkeypatch.setattr(record, "MOST_OWNED", 0)
    thread_trees.forget_trees()
    with config.patch(cache=False), torch.no_grad():
        yield


def body(x: Tensor) -> Tensor:
    return torch.tanh(x) * 1.5 + 1


def of(size: int) -> Tensor:
    return torch.full((size, 3), 0.1 * size)


def check(function: Callable[[Tensor], Tensor], size: int) -> None:
    assert torch.equal(function(of(size)), body(of(size)))


def share_of_last(function: Any, sizes: list[int], last: int) -> float:
    """The share of replays among the last ``last`` calls."""
    for size in sizes[:-last]:
        check(function, size)
    before = recordings(function).replays
    for size in sizes[-last:]:
        check(function, size)
    return (recordings(function).replays - before) / last


def test_a_hot_shape_displaces_cold_ones() -> None:
    captured = capture(body)
    start = [size for size in range(1, 6) for _ in range(3)]
    assert share_of_last(captured, [*start, *[64] * 60], 40) == 1.0
    assert recordings(captured).recordings == 6
    assert recordings(captured).evictions == 1


def test_several_hot_shapes_displace_as_many_cold_ones() -> None:
    captured = capture(body)
    start = [size for size in range(1, 6) for _ in range(3)]
    hot = [40 + index % 4 for index in range(160)]
    assert share_of_last(captured, [*start, *hot], 60) == 1.0
    assert recordings(captured).evictions == 4


def test_the_one_not_used_for_longest_goes() -> None:
    captured = capture(body, max_recordings=3)
    for size in (1, 1, 2, 2, 3, 3, 1, 3):
        check(captured, size)
    for _ in range(LEAST + 3):
        check(captured, 9)
    before = recordings(captured).replays
    for size in (1, 3, 9):
        check(captured, size)
    assert recordings(captured).replays == before + 3
    check(captured, 2)
    assert recordings(captured).replays == before + 3


def test_shapes_in_turn_do_not_displace_each_other() -> None:
    captured = capture(body)
    sizes = [1 + index % 6 for index in range(300)]
    assert share_of_last(captured, sizes, 60) == pytest.approx(5 / 6)
    assert recordings(captured).recordings == 5
    assert recordings(captured).evictions == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(3))
def test_a_long_tail_does_not_displace_hot_shapes(seed: int) -> None:
    draw, captured = random.Random(seed), capture(body)
    hot = [100, 101, 102, 103]
    sizes = [draw.choice(hot) if draw.random() < 0.9 else draw.randrange(1, 90) for _ in range(400)]
    assert share_of_last(captured, sizes, 200) > 0.8
    assert recordings(captured).recordings < 20


def test_a_shape_that_comes_back_is_recorded_from_its_plan() -> None:
    captured = capture(body, max_recordings=1)
    for size in (1, 1, *[2] * (LEAST + 3), *[1] * (LEAST + 2)):
        check(captured, size)
    counters = recordings(captured)
    assert (counters.observations, counters.recordings, counters.evictions) == (2, 3, 2)


def test_outputs_of_an_evicted_recording_keep_their_values() -> None:
    captured = capture(body, max_recordings=1)
    check(captured, 1)
    check(captured, 1)
    kept = captured(of(1))
    shared = torch.utils.dlpack.from_dlpack(kept)
    for _ in range(LEAST + 4):
        check(captured, 2)
    assert recordings(captured).evictions == 1
    assert torch.equal(kept, body(of(1)))
    assert (shared.data_ptr(), shared.tolist()) == (kept.data_ptr(), kept.tolist())


def test_nothing_is_kept_of_shapes_that_were_displaced() -> None:
    """The fast paths of such calls go, too."""
    function = capture(lambda x: torch.relu(x) * 2, max_recordings=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for size in range(1, 16):
            for _ in range(24):
                function(torch.ones(size))
    assert recordings(function).evictions > 5
    assert len(captured_state(function).fast_paths._by_shapes) <= 4  # type: ignore[attr-defined]


def test_what_follows_on_an_evicted_recording_goes_with_it() -> None:
    first, second = capture(body, max_recordings=1), capture(lambda y: y - 1)

    def chain(size: int) -> None:
        mark_step_begin()
        y = first(of(size))
        assert torch.equal(second(y), body(of(size)) - 1)

    for size in (1, 1, 1, *[2] * (LEAST + 4), *[1] * 3, *[2] * 3):
        chain(size)
    (tree,) = thread_trees.trees_here().values()
    logs = [node.log for nodes in tree.root.children.values() for node in nodes]
    assert sum(log is not None and log.counters.evictions == 1 for log in logs) == 1, "one recording of the first"
    assert recordings(first).evictions == 1


def test_training_blocks_are_displaced_as_well() -> None:
    torch.manual_seed(0)
    mine, theirs = nn.Linear(3, 3), nn.Linear(3, 3)
    theirs.load_state_dict(mine.state_dict())
    captured = capture(mine, max_recordings=2)
    for size in (1, 1, 1, 2, 2, 2, *[7] * 20, *[1] * 20):
        with torch.enable_grad():
            captured(of(size)).square().sum().backward()
            theirs(of(size)).square().sum().backward()
        for parameter, twin in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(parameter.grad, twin.grad)  # type: ignore[arg-type]
            parameter.grad = twin.grad = None
    assert recordings(captured).evictions >= 2
    assert recordings(captured).replays >= 20


def bytes_here() -> int:
    return sum(tree.pool.reserved_bytes() for tree in thread_trees.trees_here().values())


def test_the_bound_on_memory_holds_at_the_end_of_each_call() -> None:
    captured, kept, draw = capture(body, max_recordings=64), [], random.Random(0)
    limit = 40_000 * SCALE
    with config.patch(memory_limit=limit):
        for number in range(200):
            size = 50 * SCALE * (1 if number % 2 else draw.randrange(2, 30))
            result = captured(of(size))
            if number % 7 == 0:
                kept.append((result, size))
            assert bytes_here() <= limit
    assert all(torch.equal(result, body(of(size))) for result, size in kept)
    if not AGAIN:  # a tape that has to write elsewhere takes more than was foreseen
        assert recordings(captured).evictions > 0
    assert recordings(captured).replays > 60


def test_the_bound_on_all_recordings() -> None:
    functions = [capture(lambda x, k=k: torch.sin(x) * k) for k in range(6)]
    with config.patch(max_recordings=4):
        for _ in range(4):
            for k, function in enumerate(functions):
                mark_step_begin()
                assert torch.equal(function(of(3)), torch.sin(of(3)) * k)
        (tree,) = thread_trees.trees_here().values()
        assert sum(len(nodes) for nodes in tree.root.children.values()) <= 4
    assert sum(recordings(function).evictions for function in functions) > 0


def test_the_bound_is_on_all_threads() -> None:
    """The one not used for longest goes, whichever thread made it; another thread drops its own at its next call."""
    hot, cold = capture(lambda x: torch.sin(x) + 1, name="hot"), capture(lambda x: torch.cos(x) + 1, name="cold")
    there, may_go_on, reported = threading.Event(), threading.Event(), list[Any]()
    x = torch.full((2, 3), 0.2, device=DEVICE)

    def work() -> None:
        with torch.no_grad(), config.patch(cache=False, max_recordings=4):
            for _ in range(3):
                for f in (cold, hot):
                    mark_step_begin()
                    f(x)
            reported.append(_tree())
            there.set()
            may_go_on.wait(60)
            reported.append([cold(x), hot(x), len(_tree().recordings()), _tree().buried])

    with config.patch(cache=False, max_recordings=4):
        thread = threading.Thread(target=work)
        thread.start()
        assert there.wait(60)
        for number in range(3):
            f = capture(lambda x, k=number: x * k)
            for _ in range(3):
                mark_step_begin()
                f(x)
            assert len(reported[0].recordings()) + len(_tree().recordings()) <= 4
            reported.append(f)
        assert [node.function.annotation.function for node in reported[0].buried] == ["cold"]
        may_go_on.set()
        thread.join()
    assert torch.equal(reported[-1][0], torch.cos(x) + 1)
    assert torch.equal(reported[-1][1], torch.sin(x) + 1)
    assert reported[-1][3] == []
    assert reported[-1][2] + len(_tree().recordings()) <= 4


def _tree() -> Tree:
    (tree,) = thread_trees.trees_here().values()
    return tree


def test_a_chain_goes_from_its_end() -> None:
    first, second, third = (capture(lambda x, k=k: torch.tanh(x) + k) for k in range(3))
    with config.patch(max_recordings=2):
        for _ in range(6):
            mark_step_begin()
            y = third(second(first(of(2))))
            assert torch.equal(y, torch.tanh(torch.tanh(torch.tanh(of(2)) + 0) + 1) + 2)
            del y
    assert recordings(first).eager_calls == 0


def deep(x: Tensor) -> Tensor:
    """Several intermediate results are alive at once; the first one is needed until the end."""
    y = torch.tanh(x)
    return (y + 1) * (y - 1) + y.exp()


def test_a_recording_that_would_be_too_large_is_not_made() -> None:
    captured, large = capture(deep), 20_000 * SCALE
    with config.patch(memory_limit=100_000 * SCALE):
        for number in range(60):
            x = of(40 * SCALE if number % 3 else large)
            assert torch.equal(captured(x), deep(x))
            assert bytes_here() <= 100_000 * SCALE
    counters = recordings(captured)
    assert counters.recordings == 1
    assert counters.evictions == 0
    assert counters.replays >= 30
    assert [finding.code for finding in counters.findings] == ["CG907"]
    with config.patch(memory_limit=10_000_000 * SCALE):
        for _ in range(3):
            assert torch.equal(captured(of(large)), deep(of(large)))
    assert recordings(captured).recordings == 2


def test_a_recording_that_turns_out_too_large_goes_once() -> None:
    """Its plan came from elsewhere, so that no run was watched, and nothing was foreseen."""
    captured = capture(deep)
    with config.patch(memory_limit=100_000, skip_warmup=True):
        for _ in range(30):
            assert torch.equal(captured(of(20_000)), deep(of(20_000)))
            assert bytes_here() <= 100_000
    assert recordings(captured).recordings <= 2
    assert recordings(captured).replays == 0


def test_a_warm_up_that_would_be_too_large_is_skipped() -> None:
    captured = capture(deep)
    with config.patch(memory_limit=100_000 * SCALE):
        told = warmup(captured).cases([(of(20_000 * SCALE),), (of(40 * SCALE),)])
    assert [case.code for case in told.cases] == ["CG907", None]
    assert bytes_here() <= 100_000 * SCALE


def test_the_forecast_is_close_to_what_a_recording_takes() -> None:
    """On a device the tensors have more than 10 MiB: for such sizes its allocator takes no more than was asked for."""
    large, square = (300, 300) if SCALE == 1 else (1 << 20, 1 << 13)
    attention: Callable[[Tensor], Tensor] = lambda x: torch.softmax(x @ x.t(), -1) @ x  # noqa: E731
    for function, size in ((deep, large), (body, large), (attention, square)):
        thread_trees.forget_trees()
        captured = capture(function)
        for _ in range(2):
            captured(of(size))
        (entry,) = next(iter(all_of(captured))).entries()
        # large arguments are bound, not copied
        copied = [placeholder for placeholder in plans(captured)[0].placeholders if placeholder.policy == Policy.COPY]
        taken = bytes_here() - len(copied) * of(size).nbytes
        assert 0.9 * taken <= entry.needs <= 1.5 * taken


def test_what_each_recording_takes_is_shown() -> None:
    captured = capture(body)
    for size in (300, 600):
        for _ in range(3):
            captured(of(size))
    small, large = sorted(recordings(captured).sizes, key=lambda recording: recording.output_bytes)
    assert (small.output_bytes, large.output_bytes) == (of(300).nbytes, of(600).nbytes)
    assert small.arguments == f"x: float32[300, 3] {of(1).device}"
    assert small.working_bytes >= small.output_bytes
    assert small.unused_for > large.unused_for
    assert str(small) in report()
    kept = [captured(of(300)) for _ in range(3)]
    assert kept
    output_bytes = {recording.output_bytes for recording in recordings(captured).sizes}
    assert output_bytes == {0, of(600).nbytes}  # the kept output is the caller's now
