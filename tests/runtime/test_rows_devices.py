"""Rows of ``docs/rows.md``: shapes, what cannot be recorded, devices, threads, backends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from capture.core.facts import Facts
from capture.core.options import annotate
from capture.engines import registry
from capture.engines.base import NOTHING_KNOWN, Input, Recorded, StateTensors
from capture.engines.cpu.arena import Arena
from capture.engines.cpu.engine import CpuBackend
from capture.observe.expectation import Expectation
from capture.rules.compile_plan import compile_plan
from capture.state.call import Call
from capture.tree.thread_trees import tree_for
from tests.support.device import AGAIN, DEVICE, EXECUTES, use_device
from tests.support.rows import counts, eager, ran, rand, roots, same, times, total, tree, warned
from tests.support.rows import fresh as fresh


@torch.library.custom_op("rows::unsafe_sin", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def unsafe_sin(x: Tensor) -> Tensor:
    return x.sin()


def test_row_153_one_recording_per_size() -> None:
    """Each distinct size has one recording, found again in any order."""

    @capture
    def f(x: Tensor) -> Tensor:
        ran("f")
        return x @ x.t()

    for i, n in enumerate((1, 2, 3, 1, 2, 3, 3, 2, 1, 1)):
        x = rand(n, 4, seed=i)
        same(f(x), x @ x.t())
    assert (total(), times("f")) == (3, 6)


def test_row_154_too_many_sizes_are_said_once() -> None:
    """Beyond the limit: eager, and one warning with advice, however many sizes and calls follow."""

    @capture(max_recordings=1)
    def f(x: Tensor) -> Tensor:
        return x * 2

    with warned("CG901"):
        for n in range(1, 21):
            for _ in range(2):
                x = rand(n, seed=n)
                same(f(x), x * 2)
    (finding,) = [finding for finding in recordings(f).findings if finding.code == "CG901"]
    assert any("max_recordings" in fix for fix in finding.fix)
    assert any("pad" in fix for fix in finding.fix)
    assert recordings(f).recordings == 1


def test_row_155_sizes_beyond_the_limit_run_eagerly() -> None:
    """There is no list of sizes to give: the first ``max_recordings`` sizes are recorded, all others run eagerly."""

    @capture(max_recordings=3)
    def f(x: Tensor) -> Tensor:
        ran("f")
        return x + 1

    with warned("CG901"):
        for _ in range(3):
            for n in range(1, 7):
                x = rand(n, n, seed=n)
                same(f(x), x + 1)
    assert recordings(f).recordings == 3
    assert times("f") == 3 * 2 + 3 * 3


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (lambda x: x * int(f"{x.max().item() * 1e6:.0f}"), "CG201"),
        (lambda x: x + float(f"{x[0]:.3f}"), "CG201"),
        (lambda x: torch.tensor(x.tolist()) + 1, "CG201"),
    ],
    ids=["item", "float", "tolist"],
)
def test_row_157_host_reads_that_never_repeat(body: Callable[[Tensor], Tensor], code: str) -> None:
    """A body that needs other values on the host in every call runs eagerly with its reason and line; values are right
    throughout."""
    f = capture(body)
    with warned(code) as messages:
        for i in range(5):
            x = rand(6, seed=i)
            same(f(x), body(x))
    assert "test_rows_devices.py" in messages[0]
    assert "lambda x:" in messages[0]
    assert total() == 0
    assert counts(f)[1:3] == (0, 0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "body",
    [
        lambda x: x * 2 if bool(x.sum() > 0) else x * 3,
        lambda x: x.nonzero(),
        lambda x: x[x > 0] * 2,
        lambda x: (x > 0).unique() + 1,
        lambda x: torch.masked_select(x, x > 0),
    ],
    ids=["bool", "nonzero", "mask", "unique", "masked_select"],
)
def test_row_157_host_reads_and_data_dependent_shapes(body: Callable[[Tensor], Tensor]) -> None:
    """A body that needs values on the host is recorded in segments; values are right throughout."""
    f = capture(body)
    for i in (0, 1, 0, 1, 0, 1, 0, 1, 0, 1):
        x = rand(6, seed=i)
        same(f(x), body(x))
    assert counts(f)[2] >= 4


def test_row_157_captured_neighbours_are_not_affected() -> None:
    """A function that cannot be recorded, between two that can: those replay, values are right."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2

    @capture
    def unfit(x: Tensor) -> Tensor:
        return x * int(f"{x.abs().max().item() * 1e6:.0f}")

    @capture
    def g(x: Tensor) -> Tensor:
        return x - 1

    with warned("CG201"):
        for i in range(8):
            mark_step_begin()
            x = rand(4, seed=i)
            a = f(x)
            b = unfit(a)
            c = g(b)
            same((a, b, c), (x * 2, eager(unfit, x * 2), eager(unfit, x * 2) - 1))
            del a, b, c
    assert recordings(f).replays == 6
    # Where unfit is watched again, to see whether it reads the same, what follows on it in that step warms up.
    assert recordings(g).replays == 6 if EXECUTES else recordings(g).replays >= 3


def test_row_158_operator_tagged_unsafe_is_named() -> None:
    """An operator tagged ``cudagraph_unsafe`` keeps the function eager; the warning names it and the line."""

    @capture
    def f(x: Tensor) -> Tensor:
        y: Tensor = unsafe_sin(x + 1)
        return y * 2

    with warned("CG202"):
        for i in range(4):
            x = rand(4, seed=i)
            same(f(x), (x + 1).sin() * 2)
    (finding,) = [finding for finding in recordings(f).findings if finding.code == "CG202"]
    assert "unsafe_sin" in finding.what
    assert finding.where is not None
    assert "unsafe_sin(x + 1)" in finding.where.code
    assert total() == 0


def test_row_160_several_accelerators_are_refused() -> None:
    """A body that works on two accelerators is not recorded; the reason names both."""
    plan = compile_plan(annotate("f", ["x"], {}), Facts(function="f", num_ops=9, devices=("cuda:0", "cuda:1")))
    assert plan.outcome == "eager"
    (finding,) = plan.findings
    assert finding.code == "CG203"
    assert "cuda:0, cuda:1" in finding.what
    beside_others = compile_plan(
        annotate("f", ["x"], {}), Facts(function="f", num_ops=9, devices=("cpu", "cuda:1", "meta"))
    )
    assert beside_others.outcome == "record"


def test_row_161_a_tree_only_where_one_is_used() -> None:
    """Decorating makes nothing; a call makes a tree for its own device and thread, no other."""
    from capture.tree import thread_trees

    @capture
    def f(x: Tensor) -> Tensor:
        return x + 1

    assert thread_trees.trees_here() == {}
    for i in range(3):
        same(f(rand(4, seed=i)), rand(4, seed=i) + 1)
    assert list(thread_trees.trees_here()) == [str(DEVICE)]
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(dict(thread_trees.trees_here())))
    thread.start()
    thread.join()
    assert seen == [{}]


def test_row_161_device_without_an_engine() -> None:
    """A call whose tensors are on a device without a backend runs eagerly, said once."""
    plan = compile_plan(annotate("f", ["x"], {}), Facts(function="f", num_ops=9, backend_missing="xpu"))
    assert plan.outcome == "eager"
    assert [finding.code for finding in plan.findings] == ["CG802"]


class Spy(CpuBackend):
    """The CPU engine under another name, with a list of what the tree asked of it."""

    name = "spy"

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.asked: list[str] = []

    @override
    def new_pool(self) -> Arena:
        self.asked.append("pool")
        return super().new_pool()

    @override
    def record(
        self,
        pool: Arena,
        call: Call,
        inputs: Sequence[Input],
        *,
        undo: bool = False,
        state: StateTensors = NOTHING_KNOWN,
        generators: Sequence[torch.Generator] = (),
        expected: Expectation | None = None,
        may_break: bool = False,
        schedule: bool = False,
    ) -> Recorded:
        self.asked.append("record")
        del expected
        return super().record(pool, call, inputs, undo=undo, state=state, generators=generators)


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test end with it."""
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(registry, "_made", {})


@pytest.mark.usefixtures("clean_registry")
def test_row_163_registration() -> None:
    """A second backend for a device type, and one that comes after the first use, are errors."""
    assert registry.backend_for(torch.device("privateuseone")) is None
    registry.register("privateuseone", Spy)
    with pytest.raises(ValueError, match="has a backend already"):
        registry.register("privateuseone", Spy)
    with pytest.raises(ValueError, match="'cpu' has a backend already"):
        registry.register("cpu", Spy)
    made = registry.backend_for(torch.device("privateuseone"))
    assert isinstance(made, Spy)
    assert registry.backend_for(torch.device("privateuseone")) is made
    with pytest.raises(ValueError, match="in use"):
        registry.register("privateuseone", Spy)


@pytest.mark.usefixtures("clean_registry")
def test_row_163_registered_backend_is_used() -> None:
    """The tree asks a registered backend for a pool, then to record; warm-ups and replays ask it nothing."""
    del registry._backends["cpu"]
    spy = Spy()
    registry.register("cpu", lambda _: spy)

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2

    asked = []
    for i in range(4):
        x = rand(4, seed=i).cpu()
        same(f(x), x * 2)
        asked.append(list(spy.asked))
    assert asked == [["pool"], ["pool", "record"], ["pool", "record"], ["pool", "record"]]
    assert len(tree_for(spy, 0).root.children) == 1
    assert recordings(f).recordings == 1


def test_row_164_three_threads() -> None:
    """Threads that call one function at once get their own results, each from a tree of its own."""
    barrier = threading.Barrier(3)
    outcomes: list[Any] = []

    @capture
    def f(x: Tensor) -> Tensor:
        return torch.tanh(x @ x) + x

    def work(number: int) -> None:
        use_device()
        barrier.wait()
        held = []
        try:
            for i in range(30):
                x = rand(8, 8, seed=number * 100 + i)
                held.append((x, f(x)))
                same(held[i // 2][1], eager(f, held[i // 2][0]))
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            outcomes.append(error)
        else:
            outcomes.append(tree())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(outcome).__name__ for outcome in outcomes] == ["Tree"] * 3, outcomes
    assert len({id(outcome) for outcome in outcomes}) == 3
    assert recordings(f).recordings <= 3 * (1 + AGAIN)
    assert roots() == []
