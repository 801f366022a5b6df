"""Recordings whose engine has to learn how to follow a tensor: what the runtime makes of its answers.

The tape follows by itself; here it is made to ask first, to refuse, to fail and to be wrong, as a graph may.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from attrs import define, evolve, field
from torch import Tensor

from capture import CaptureWarning, capture, config, recordings
from capture.distributed import process_groups
from capture.engines.base import Move, Refusal
from capture.engines.cpu.tape import Tape
from tests.support.device import DEVICE
from tests.support.unguarded import set_unguarded, unguarded

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="of the tape")


class Holder:
    """Two tensors that a body reads."""

    def __init__(self) -> None:
        self.a, self.b = weight(0), weight(1)


def weight(seed: int) -> Tensor:
    return torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))


@define(eq=False)
class Engine:
    """How the tape answers. ``learned``: paths by recording."""

    refusal: Refusal | None = None
    is_wrong: bool = False
    error: Exception | None = None
    asked: list[tuple[str, ...]] = field(factory=list)
    learned: weakref.WeakKeyDictionary[Tape, set[str]] = field(factory=weakref.WeakKeyDictionary)
    follow: Callable[[Tape, Sequence[Move]], bool] = Tape.rebind

    def rebind(self, tape: Tape, moves: Sequence[Move]) -> bool:
        if not {move.path for move in moves} <= self.learned.get(tape, set()):
            return False
        if self.error is not None:
            raise self.error
        return True if self.is_wrong else self.follow(tape, moves)

    def learn(self, tape: Tape, moves: Sequence[Move]) -> Refusal | None:
        self.asked.append(tuple(move.path for move in moves))
        if self.refusal is None:
            self.learned.setdefault(tape, set()).update(move.path for move in moves)
        return self.refusal


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    found = Engine()
    monkeypatch.setattr(Tape, "rebind", lambda self, moves: found.rebind(self, moves))
    monkeypatch.setattr(Tape, "learn", lambda self, call, moves, others, generators: found.learn(self, moves))
    monkeypatch.setattr(Tape, "kernels_using", lambda self, paths: ["some_kernel"])
    return found


def run(calls: int, *names: str) -> Any:
    """Make calls, from the fourth on with other tensors in each. Every result has to be eager's."""
    holder = Holder()
    captured = capture(lambda x: torch.tanh(x @ holder.a) @ holder.b)
    kept = []
    with torch.no_grad():
        for i in range(calls):
            for name in names if i > 2 else ():
                kept.append(getattr(holder, name))
                setattr(holder, name, weight(10 + i))
            x = weight(100 + i)
            assert torch.equal(captured(x), torch.tanh(x @ holder.a) @ holder.b)
    return recordings(captured)


def kinds(now: Any, kind: str) -> int:
    return sum(event.kind == kind for event in now.events)


def test_learned_once_and_compared_once(engine: Engine) -> None:
    now = run(9, "a")
    assert (now.recordings, now.rebinds, now.eager_calls) == (1, 6, 0)
    assert (kinds(now, "calibrate"), kinds(now, "verify")) == (1, 1)
    assert engine.asked == [("holder.a",)]


@pytest.mark.parametrize("asks", ["in the first run", "in each run"])
def test_code_that_asks_for_the_number_of_an_object(asks: str) -> None:
    """What a compiler asks for in the first run is no reason to record again later. What each run asks for is."""
    holder = Holder()

    def named(parts: tuple[int, ...]) -> int:
        return len({id(part): part for part in parts})

    once = functools.cache(named)
    called: Callable[[tuple[int, ...]], int] = once if asks == "in the first run" else named
    body = capture(lambda x: torch.tanh(x @ holder.a) * called((3, 4)))
    kept = []
    with torch.no_grad():
        for i in range(9):
            if i > 3:
                kept.append(holder.a)
                holder.a = weight(10 + i)
            x = weight(100 + i)
            assert torch.equal(body(x), torch.tanh(x @ holder.a) * 2)
    now = recordings(body)
    assert (now.rebinds > 3) == (asks == "in the first run"), now


def test_several_tensors_are_learned_in_one_go(engine: Engine) -> None:
    now = run(9, "a", "b")
    assert (now.recordings, now.rebinds) == (1, 6)
    assert engine.asked == [("holder.a", "holder.b")]


def test_a_refusal_is_recorded_again_and_not_asked_again(engine: Engine) -> None:
    engine.refusal = Refusal("hidden", kernel="gather")
    now = run(8, "b")
    assert (now.rebinds, now.eager_calls) == (0, 0)
    assert now.recordings == 6
    assert engine.asked == [("holder.b",)]
    (refused,) = [finding for finding in now.findings if finding.code == "CG109"]
    assert "hidden" in refused.why
    assert "gather" in refused.why
    assert kinds(now, "miss") == 5


def test_a_refusal_of_one_tensor_leaves_the_others(engine: Engine) -> None:
    engine.refusal = Refusal("hidden", paths=("holder.b",))
    run(6, "a", "b")
    assert len(engine.asked) == 1
    engine.refusal = None
    now = run(6, "a")
    assert (now.recordings, now.rebinds) == (1, 3)


def test_what_says_nothing_about_the_body_is_tried_again(engine: Engine) -> None:
    engine.refusal = Refusal("misaligned", lasting=False)
    now = run(6, "a")
    assert len(engine.asked) == 3
    assert now.recordings == 4


def test_a_process_that_cannot_says_so_once(engine: Engine) -> None:
    engine.refusal = Refusal("no driver", environment=True)
    now = run(8, "a")
    assert [finding.code for finding in now.findings if finding.code in ("CG109", "CG804")] == ["CG804"]
    assert now.rebinds == 0


def test_a_wrong_table_gives_eagers_result_and_is_not_used_again(engine: Engine) -> None:
    engine.is_wrong = True
    now = run(9, "a")
    (wrong,) = [finding for finding in now.findings if finding.code == "CG109"]
    assert "differs from eager" in wrong.why
    assert "some_kernel" in wrong.why
    assert len(engine.asked) == 1
    assert now.recordings > 1


def test_a_driver_that_fails_costs_a_recording(engine: Engine) -> None:
    engine.error = RuntimeError("invalid value")
    now = run(8, "a")
    assert now.rebinds == 0
    assert now.recordings > 1
    assert any("invalid value" in finding.why for finding in now.findings if finding.code == "CG109")


_turns = itertools.count()


@torch.library.custom_op("capture_tests::shaky", mutates_args=())
def shaky(x: Tensor) -> Tensor:
    """Like a sum in any order: a run never gives the bits of the run before it."""
    return x * (1 + 1e-6 * (next(_turns) % 3))


@shaky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_body_that_differs_from_itself(engine: Engine, is_wrong: bool) -> None:
    """A value that is read at a wrong address is further off than two runs of the body ever are."""
    engine.is_wrong = is_wrong
    holder = Holder()
    captured = capture(lambda x: (torch.tanh(shaky(x @ holder.a)), x + 1))
    kept = []
    for i in range(12):
        x = torch.full((4, 4), i / 8)
        if i in (4, 6, 9):
            kept.append(holder.a)
            holder.a = weight(i)
        first, second = captured(x)
        assert torch.allclose(first, torch.tanh(x @ holder.a), rtol=1e-4)
        assert torch.equal(second, x + 1)
    counted = recordings(captured)
    assert (counted.recordings == 1) != is_wrong
    assert not counted.findings or is_wrong or {finding.code for finding in counted.findings} == {"CG101"}


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_wrong_value_beside_one_that_varies(verify: Literal["first", "always"]) -> None:
    """Eager itself varies in the first output. That does not excuse the second, which is wrong."""
    set_unguarded(2)

    def deep(x: Tensor) -> Tensor:
        return x * unguarded()

    @capture(verify=verify)
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return shaky(x), deep(x)

    x = torch.rand(8)
    with torch.no_grad(), config.patch(cache=False):
        for _ in range(2):
            f(x)
        set_unguarded(3)
        with pytest.warns(CaptureWarning, match=r"CG903.*'output\.1'"):
            assert torch.equal(f(x)[1], x * 3)


def test_a_body_that_communicates_is_not_compared(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run to compare with would wait for ranks that have nothing to compare."""
    monkeypatch.setattr(
        process_groups, "note_user", lambda node, facts: setattr(node, "groups", frozenset(["a group"]))
    )
    counters = run(6, "a")
    assert (engine.asked, counters.verifications, counters.rebinds) == ([], 0, 0)
    assert counters.recordings >= 2


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_a_tensor_read_through_a_copy_comes_to_lie_on_one_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph copies a place that the body gives another tensor in every call; so does the tape here."""

    def rebind(tape: Tape, moves: Sequence[Move]) -> bool:
        tape.copied_paths = frozenset(move.path for move in moves if move.path.endswith(".a"))
        copied = [
            evolve(move, tensor=move.tensor.clone()) if move.path in tape.copied_paths else move for move in moves
        ]
        return original(tape, copied)

    original = Tape.rebind
    monkeypatch.setattr(Tape, "rebind", rebind)

    def body(holder: Holder, x: Tensor) -> Tensor:
        torch.mul(holder.a, 2, out=x)
        torch.mul(x, 2, out=holder.b)
        torch.mul(holder.a, 2, out=holder.b)
        holder.a = x
        return holder.b

    eager, holder = Holder(), Holder()
    captured = capture(lambda x: body(holder, x))
    with torch.no_grad():
        for number in range(16):
            theirs, ours = weight(number), weight(number)
            if number in (8, 12):
                theirs, ours = eager.b, holder.b
            assert torch.equal(body(eager, theirs), captured(ours)), number
            assert torch.equal(eager.a, holder.a)
    assert recordings(captured).replays >= 4


@pytest.mark.parametrize("helps", [True, False])
def test_recordings_of_threads_from_before_a_tensor_moved(engine: Engine, helps: bool) -> None:
    """Each thread has a recording of its own, which is refused once: no reason to give up. Those that are made after
    that are to copy what moves often, and only they tell whether that helps."""
    engine.refusal = Refusal("misaligned", lasting=False)
    holder, lock, number = Holder(), threading.Lock(), 8
    captured = capture(lambda x: torch.tanh(x @ holder.a) @ holder.b, silence=["CG901"])
    turns = [threading.Barrier(number + 1) for _ in range(6)]
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad(), config.patch(cache=False):
                for turn in range(3):
                    expected = torch.tanh(weight(3) @ holder.a) @ holder.b
                    for _ in range(4):
                        with lock:
                            assert torch.equal(captured(weight(3)), expected)
                    turns[2 * turn].wait(20)
                    turns[2 * turn + 1].wait(20)
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)
            for turn_end in turns:
                turn_end.abort()

    threads_here = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads_here:
        thread.start()
    kept = []
    with contextlib.suppress(threading.BrokenBarrierError):
        for turn in range(3):
            turns[2 * turn].wait(20)
            kept.append(holder.a)
            holder.a = weight(10 + turn)
            if turn and helps:
                engine.refusal = None
            turns[2 * turn + 1].wait(20)
    for thread in threads_here:
        thread.join()
    assert not failed
    now = recordings(captured)
    assert (now.eager_calls == 0) == helps, now
