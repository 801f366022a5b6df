"""Two processes under gloo agree on recording or running eagerly; nothing hangs where they cannot; values are
eager's."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from capture import CaptureWarning, capture, config, recordings, release, reset, warmup
from capture.api.decorator import captured_states
from capture.distributed import rank_agreement
from capture.engines.cpu.engine import CpuBackend, TapeRecorder
from capture.observe import run as run_module
from tests.support.collectives import collectives
from tests.support.ranks import said, two_ranks

Step = Callable[..., Tensor]


def summing() -> Any:
    """A new captured function of a tensor; its second argument is of no use but to the key."""

    def step(x: Tensor, tag: int = 0) -> Tensor:
        y = x * 1.5
        dist.all_reduce(y)
        return y + 1

    return capture(step)


def right(step: Step, number: int, *args: Any) -> None:
    """Make one call on each rank, and compare it with the value that eager gives."""
    rank = dist.get_rank()
    x = torch.full((1000,), float(number + rank))
    assert torch.equal(step(x, *args), torch.full((1000,), 1.5 * (2 * number + 1) + 1)), number


def calls(step: Step, count: int = 5) -> list[str]:
    """Make calls and compare each; gives the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        for number in range(count):
            right(step, number)
    return said(caught)


def fails_to_record(rank: int) -> None:
    """One rank's engine gives its recording up."""
    step = summing()
    original = TapeRecorder.execute

    def give_up(recorder: Any, op: Any, args: Any, kwargs: Any) -> Any:
        recorder._fail("this rank cannot")
        return original(recorder, op, args, kwargs)

    if rank == 1:
        TapeRecorder.execute = give_up  # type: ignore[method-assign, assignment]
    texts = calls(step)
    TapeRecorder.execute = original  # type: ignore[method-assign]
    assert recordings(step).recordings == recordings(step).replays == 0
    assert recordings(step).body_runs == 5
    (text,) = texts
    assert ("CG904" if rank == 1 else "CG701 ranks-disagree: rank 1 does not record this: CG904") in text
    assert "this rank cannot" in text
    assert "runs eagerly" in text


def reading(rank: int) -> Callable[[Tensor], Tensor]:
    """A body that reads a value on the host, in the first rank."""

    def step(x: Tensor) -> Tensor:
        y = x * 1.5
        dist.all_reduce(y)
        if rank == 0:
            y.sum().item()
        return y + 1

    return step


def is_eager_by_plan(rank: int) -> None:
    """One rank's body reads a value on the host."""

    step = capture(reading(rank))
    (text,) = calls(step)
    assert ("CG201" if rank == 0 else "CG701 ranks-disagree: rank 0 does not record this: CG201") in text
    assert recordings(step).recordings == 0
    assert recordings(step).body_runs == 5


def raises_where_asked(rank: int) -> None:
    """``fallback="error"`` raises in both ranks, after each ran its body once."""

    step = capture(reading(rank), fallback="error")
    for number in range(2):
        if number == 0:
            with pytest.raises(RuntimeError, match="CG201" if rank == 0 else "CG701"):
                right(step, number)
        else:
            with pytest.raises(RuntimeError, match="CG201" if rank == 0 else "CG701"):
                step(torch.ones(1000))


def other_keys(rank: int) -> None:
    """One rank meets new keys, records, forgets and goes eager while the other replays: nobody waits for anybody."""
    step = summing()
    began = time.monotonic()
    for number in range(6):
        right(step, number)
    assert recordings(step).replays == 4
    for number in range(6, 12):
        right(step, number, 7 if rank == 1 else 0)
    assert recordings(step).recordings == 1 + rank
    if rank == 1:
        reset(step)
    for number in range(12, 16):
        right(step, number)
    if rank == 0:
        release(step)
    for number in range(16, 20):
        right(step, number)
    for number in range(20, 24):
        with config.patch(enabled=rank == 0):
            right(step, number)
    assert recordings(step).findings == ()
    assert time.monotonic() - began < rank_agreement.PATIENCE / 2


def random_schedules(rank: int) -> None:
    """Each rank releases, resets and disables at random by itself; values stay right and nobody waits."""
    chosen = random.Random(rank)
    step = summing()
    began, replays, codes = time.monotonic(), 0, set[str]()
    for number in range(200):
        match chosen.randrange(20):
            case 0:
                replays += recordings(step).replays
                codes |= {finding.code for finding in recordings(step).findings}
                reset(step)
            case 1:
                release(step)
            case 2:
                with config.patch(enabled=False):
                    right(step, number)
                continue
            case 3:
                with config.patch(verify="always"):
                    right(step, number)
                continue
        right(step, number, chosen.randrange(3))
    assert replays > 60
    assert codes == set()
    assert time.monotonic() - began < 2 * rank_agreement.PATIENCE


def verifies(rank: int) -> None:
    """A replay that communicates is not run beside its body, and that is said."""

    @capture(verify="always")
    def step(x: Tensor) -> Tensor:
        y = x * 1.5
        dist.all_reduce(y)
        return y + 1

    assert calls(step, 6) == []
    assert recordings(step).verifications == 0
    assert recordings(step).replays == 4
    assert [finding.code for finding in recordings(step).findings] == ["CG703"]


def warms_up(rank: int) -> None:
    """Each warm-up runs the body once in each rank, whatever is known there already."""
    step = summing()
    if rank == 1:
        for number in range(4):
            right(step, number)
    else:
        for number in range(4):
            with config.patch(enabled=False):
                right(step, number)
    x = torch.ones(1000)
    for times in range(1, 4):
        runs = recordings(step).body_runs
        warmup(step)(x)
        assert recordings(step).body_runs == runs + 1, times
    assert torch.equal(x, torch.ones(1000))
    replays = recordings(step).replays
    calls(step)
    assert recordings(step).replays == replays + 5
    assert recordings(step).recordings == 1


def answers_late(rank: int) -> None:
    """A rank that takes too long over its recording is not waited for."""
    step = summing()
    right(step, 0)
    original, patience = CpuBackend.record, rank_agreement.PATIENCE

    def slowly(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        time.sleep(1)
        return found

    if rank == 1:
        CpuBackend.record = slowly  # type: ignore[method-assign]
    rank_agreement.PATIENCE = 0.3
    try:
        began = time.monotonic()
        texts = calls(step)
        assert time.monotonic() - began < 3
    finally:
        CpuBackend.record, rank_agreement.PATIENCE = original, patience  # type: ignore[method-assign]
    (text,) = texts
    assert "CG701" in text
    assert (
        "rank 0 does not record this: no answer within" if rank else "rank 1 does not record this: no answer"
    ) in text


def plans_from_disk(rank: int) -> None:
    """One rank has its plan from disk: its first call is a plain one, and the ranks stay in step."""
    folder = Path(f"{os.environ['STORE']}-plans-{rank}")
    with config.patch(cache=True, cache_dir=folder):
        calls(summing())
    step = summing()
    with config.patch(cache=rank == 1, cache_dir=folder):
        assert calls(step) == []
    assert recordings(step).plans_loaded == rank
    assert recordings(step).observations == 1 - rank
    assert recordings(step).recordings == 1
    assert recordings(step).replays == 3


def inlined(step: Step, *args: Any) -> Tensor:
    """The call as it is without this library."""
    with config.patch(enabled=False):
        return step(*args)


def outcome(step: Step) -> Any:
    """The value of a call, or the error."""
    try:
        return step(torch.ones(3)).tolist()
    except Exception as error:  # noqa: BLE001 - whatever torch raises
        return type(error), str(error)


def group_ends(rank: int) -> None:
    """Recordings that use a group end before it; a new one of the same name records anew."""
    group = dist.new_group([0, 1])
    step, second = summing(), summing()

    @capture
    def apart(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y, group=group)
        return y + 1

    for number in range(5):
        right(step, number)
        assert torch.equal(apart(torch.ones(3)), torch.full((3,), 5.0))
    node = captured_states(step)[0].entries()[0].nodes[0]
    assert recordings(apart).replays == 3
    dist.destroy_process_group(group)
    assert captured_states(apart)[0].entries()[0].nodes == []
    assert outcome(apart) == outcome(lambda x: inlined(apart, x))
    assert recordings(apart).replays == 3
    for number in range(5):
        right(step, number)
    assert captured_states(step)[0].entries()[0].nodes == [node]  # it uses another group
    held = second(torch.full((1000,), 2.0 + rank))
    dist.destroy_process_group()
    assert captured_states(step)[0].entries()[0].nodes == []
    with pytest.raises(ValueError, match="process group"):
        step(torch.ones(1000))
    assert torch.equal(held, torch.full((1000,), 8.5))
    del held
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}-2", rank=rank, world_size=2)
    for number in range(5):
        right(step, number)
    assert recordings(step).recordings == 2
    assert recordings(step).replays == 3 + 5 + 4


class Late(Exception):
    """Raised by a signal, as the timeout of a request is."""


def raises_in_its_recording(rank: int) -> None:
    """The body of one rank raises behind its collective, in its recording call alone: the caller gets that, the other
    rank the value, and both record later."""
    fails = [False]

    def step(x: Tensor) -> Tensor:
        y = x * 1.5
        dist.all_reduce(y)
        if rank == 1 and fails[0]:
            raise Late("in the body")
        return y + 1

    run = capture(step)
    right(run, 0)
    fails[0] = True
    if rank == 1:
        with pytest.raises(Late, match="in the body"):
            run(torch.full((1000,), 2.0))
    else:
        right(run, 1)
    fails[0] = False
    for number in range(2, 9):
        right(run, number)
    assert recordings(run).replays >= 4, recordings(run)


def is_stopped_in_its_recording(rank: int) -> None:
    """A signal's handler raises in one rank, behind its collective, in the call that records."""
    step = summing()
    right(step, 0)
    original = run_module._compare
    stopped: list[int] = []

    def ring(number: int, frame: Any) -> None:
        raise Late("by a signal")

    def interrupted(watched: Any) -> None:
        if rank == 1 and not stopped:
            stopped.append(1)
            signal.raise_signal(signal.SIGUSR1)
        original(watched)

    before = signal.signal(signal.SIGUSR1, ring)
    run_module._compare = interrupted
    try:
        if rank == 1:
            with pytest.raises(Late, match="by a signal"):
                step(torch.full((1000,), 2.0))
        else:
            right(step, 1)
    finally:
        run_module._compare = original
        signal.signal(signal.SIGUSR1, before)
    assert stopped == [1] * rank
    for number in range(2, 10):
        right(step, number)


def gives_up_alone(rank: int) -> None:
    """One rank has a new key in each call and gives up, comes back and gives up again: the other replays beside it."""
    step = summing()
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for number in range(40):
            right(step, number, number if rank == 1 else 0)
    assert recordings(step).replays >= (35 if rank == 0 else 0)
    assert rank == 0 or recordings(step).eager_calls > 10
    assert time.monotonic() - began < rank_agreement.PATIENCE


def has_other_numbers_alone(rank: int) -> None:
    """One rank has another number in each call, which is a key of its own here: looking for it in the recording would
    take runs that the other does not make."""
    for kind in (int, float):
        step = summing()
        for number in range(6):
            right(step, number, kind(number if rank == 1 else 0))


def pads_alone(rank: int) -> None:
    """One rank has ``buckets=`` and does not pad: comparing padded calls takes runs that the other does not make."""
    step: Step = capture(summing().__wrapped__, buckets={"x": {0: (4, 8)}}) if rank == 1 else summing()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        for number in range(12):
            shape = (3 + number % 4,)
            expected = torch.full(shape, 1.5 * (2 * number + 1) + 1)
            assert torch.equal(step(torch.full(shape, float(number + rank))), expected), number
    assert ["other ranks take part in the body" in text for text in said(caught)] == [True] * rank


def makes_room_alone(rank: int) -> None:
    """One rank may keep fewer recordings, so that one key drives another out there and not in the other rank."""
    step = capture(summing().__wrapped__, max_recordings=2 - rank)
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for number in range(60):
            right(step, number, number // 15 % 2)
    assert recordings(step).replays >= (45 if rank == 0 else 10), recordings(step)
    assert time.monotonic() - began < rank_agreement.PATIENCE


def reads_between_collectives(rank: int) -> None:
    """A body that communicates is not cut at what the host reads: no rank alone could go back behind a collective."""

    @capture
    def step(x: Tensor) -> Tensor:
        y = x * 1.5
        dist.all_reduce(y)
        y = y + 1 if y[0] > 4 else y - 1
        dist.all_reduce(y)
        return y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for number in range(9):
            summed = 1.5 * (2 * (number % 3) + 1)
            expected = 2 * (summed + (1 if summed > 4 else -1))
            assert torch.equal(step(torch.full((8,), float(number % 3 + rank))), torch.full((8,), expected))
    assert recordings(step).recordings == 0
    assert [finding.code for finding in recordings(step).findings] == ["CG201"]


ONE_FALLS_OUT = (raises_in_its_recording, is_stopped_in_its_recording, gives_up_alone, makes_room_alone)
SCENES = (
    collectives,
    fails_to_record, is_eager_by_plan, raises_where_asked, other_keys, random_schedules, verifies, warms_up,
    answers_late, plans_from_disk, reads_between_collectives, has_other_numbers_alone, pads_alone,
    *ONE_FALLS_OUT, group_ends,
)  # fmt: skip


def played(rank: int, scenes: Sequence[Callable[[int], None]]) -> list[str]:
    """The scenes, one after the other, in one rank."""
    with torch.no_grad():
        for scene in scenes:
            scene(rank)
            dist.barrier()
    return [scene.__name__ for scene in scenes]


@pytest.mark.slow
def test_ranks(tmp_path: Path) -> None:
    names = [scene.__name__ for scene in SCENES]
    assert two_ranks(functools.partial(played, scenes=SCENES), tmp_path, seconds=180) == [names, names]


def _dies(rank: int) -> str:
    step = summing()
    rank_agreement.PATIENCE = 1.0
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        right(step, 0)
        original = CpuBackend.record

        def die(*args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            os._exit(9)

        if rank == 1:
            CpuBackend.record = die  # type: ignore[method-assign]
        right(step, 1)
        with pytest.raises(RuntimeError, match=r"[Cc]onnection|peer|recv|timed out"):
            right(step, 2)
    return "\n".join(said(caught))


@pytest.mark.slow
def test_a_rank_that_dies_in_its_recording(tmp_path: Path) -> None:
    """The other one has its result in bounded time, and then eager's own error."""
    text, nothing = two_ranks(_dies, tmp_path, may_die=(1,))
    assert nothing is None
    assert "CG701 ranks-disagree: rank 1 does not record this: no answer within 1 seconds" in text
