"""A recording that follows a watched run, without a device: what it takes for the same run, in C and in Python."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from typing_extensions import override

from capture import capture
from capture.api.decorator import captured_states
from capture.engines.cuda import recorder as _recorder
from capture.engines.cuda import verifying_recorder
from capture.engines.cuda.verifying_recorder import VerifyingRecorder
from capture.native import MISS, native
from capture.observe import expectation
from capture.observe.described import DescribedRun
from capture.observe.dispatch_mode import ObserveMode
from capture.observe.facts_builder import describe
from capture.observe.operator_schema import TENSORS
from capture.observe.run import run_watched
from capture.runtime.matching import entry_of
from capture.torch_private.capabilities import HAS_METADATA_GUARD

pytestmark = pytest.mark.skipif(not HAS_METADATA_GUARD, reason="this torch has no guard that following needs")


class Pool:
    """All memory that is no input's is the pool's, but for ``foreign`` addresses."""

    device = torch.device("cpu")
    stream: Any = None
    has_outputs = False

    def __init__(self) -> None:
        self.foreign: set[int] = set()

    def find(self, address: int) -> bool:
        return address not in self.foreign

    def knows(self, address: int) -> bool:
        return False

    def is_output(self, address: int) -> bool:
        return False

    def segment_of(self, address: int) -> tuple[int, int]:
        return (address, address + 1) if self.foreign else (0, 1 << 62)


class Capturing:
    """What the driver would tell: how many nodes there are, and whether the stream is captured."""

    def __init__(self) -> None:
        self.nodes, self.on = 0, True


class Model(nn.Module):
    """Reads, views, numbers, lists of tensors, a write."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.steps: list[Callable[[Tensor], Tensor]] = []
        self.scale, self.dim = 2.0, 1

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.gelu(self.linear(x)).view(2, 2, 4).transpose(0, self.dim)
        y = torch.cat([y, y * self.scale], dim=0).mean([0, 2], keepdim=True)
        for step in self.steps:
            y = step(y)
        self.count.add_(1)
        return y.to(torch.float64)


@pytest.fixture(params=["c", "python"])
def follow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Watch a model's run; gives what makes it run again, and how much of that C looked at."""
    if request.param == "python":  # as where C leaves all operators to it
        monkeypatch.setattr(
            VerifyingRecorder, "_progress", lambda run: verifying_recorder._Progress(nodes=run._count())
        )
    driver, looks = Capturing(), list[Any]()
    for module in (verifying_recorder, _recorder):
        monkeypatch.setattr(module, "is_capturing", lambda: driver.on)
    monkeypatch.setattr(_recorder, "node_counter", lambda _: lambda: driver.nodes)
    monkeypatch.setattr(VerifyingRecorder, "made", lambda self, tensor: id(tensor) not in self._known)
    monkeypatch.setattr(VerifyingRecorder, "device_syncs", lambda _: contextlib.nullcontext())
    original = VerifyingRecorder._run_expected

    def look(run: VerifyingRecorder, op: Any, *given: Any) -> Any:
        looks.append(op)
        return original(run, op, *given)

    monkeypatch.setattr(VerifyingRecorder, "_run_expected", look)

    def start(model: nn.Module, x: Tensor) -> Any:
        captured = capture(lambda x: model(x), name="followed")
        state = captured_states(captured)[0]
        entry, leaves = entry_of(state, (x,))
        call = state.call((x,), leaves, entry)
        watched = run_watched(call, ObserveMode())
        described = describe(watched)
        described.facts = evolve(described.facts, devices=("cuda:0",))  # nothing is followed on the CPU
        expected = expectation.expected(watched, described)
        assert expected is not None

        def again(pool: Pool | None = None) -> tuple[Any, VerifyingRecorder]:
            looks.clear()
            run: Any = VerifyingRecorder(pool or Pool(), expected)  # type: ignore[arg-type]
            followed = run_watched(call, run)
            return run.confirm(followed) if run.difference is None else None, run

        again.driver, again.looks, again.expected = driver, looks, expected  # type: ignore[attr-defined]
        return again

    with torch.no_grad():
        yield start


def test_the_same_run_is_followed(follow: Any) -> None:
    again = follow(Model().eval(), torch.randn(4, 4))
    again()  # operators are noted when they are met first
    described, run = again()
    assert isinstance(described, DescribedRun), run.difference
    assert (run.difference, run.wrote) == (None, {"model.count"})
    names = again.expected.facts.sequence
    if isinstance(run._now, verifying_recorder._Progress):
        assert list(map(str, again.looks)) == list(names)
    else:  # what writes, what has arguments by name, and where memory of the pool is met first
        assert list(map(str, again.looks)) == ["aten.gelu.default", "aten.add_.Tensor", "aten._to_copy.default"]
    assert run._now.index == len(names)


CHANGES: dict[str, tuple[Callable[[Model], object], str]] = {
    "operator": (lambda m: m.steps.append(torch.relu), "other operators run"),
    "number": (lambda m: setattr(m, "scale", 2.5), "an operator gets other values"),
    "equal number of another type": (lambda m: setattr(m, "scale", 2), "an operator gets other values"),
    "dimension": (lambda m: setattr(m, "dim", 2), "an operator gets other values"),
    "parameter": (lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(4, 4))), ""),
    "memory": (lambda m: m.steps.append(lambda y: y + torch.ones(2)), "other operators run"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("change", CHANGES)
def test_another_run_is_told(follow: Any, change: str) -> None:
    model = Model().eval()
    again = follow(model, torch.randn(4, 4))
    apply, difference = CHANGES[change]
    apply(model)
    described, run = again()
    assert (run.difference or "") == difference
    assert isinstance(described, DescribedRun) == (not difference)


def test_memory_that_was_not_used_before_is_told(follow: Any) -> None:
    model, unheld, pool = Model().eval(), torch.ones(4), Pool()
    given: list[Tensor] = [model.count]
    model.steps.append(lambda y: y + given[0])
    again = follow(model, torch.randn(4, 4))
    assert again()[0] is not None
    hidden = [unheld]  # nobody is known to hold it
    model.steps[0] = lambda y: y + hidden[0]
    pool.foreign.add(unheld.data_ptr())
    assert again(pool)[1].difference == "memory is used that was not before"


@pytest.mark.parametrize("how", ["nodes", "stream"])
def test_what_the_driver_tells_stops_a_run(follow: Any, how: str) -> None:
    model = Model().eval()
    acts: list[Callable[[], object]] = [lambda: None]
    model.steps.append(lambda y: (acts[0](), y.neg())[1])
    again = follow(model, torch.randn(4, 4))
    assert again()[0] is not None
    if how == "nodes":
        acts[0] = lambda: setattr(again.driver, "nodes", again.driver.nodes + 1)
        difference = "a kernel was launched that no operator tells of"
    else:
        acts[0] = lambda: setattr(again.driver, "on", False)
        difference = "an operator runs on a stream that is not captured"
    assert again()[1].difference == difference


def test_fewer_operators_are_told(follow: Any) -> None:
    model = Model().eval()
    model.steps += [torch.relu, torch.neg]
    again = follow(model, torch.randn(4, 4))
    model.steps.pop()
    assert again()[1].difference == "other operators run"


def _c_follow(**overrides: Any) -> Any:
    run = torch.ops.aten.add.Tensor
    given: dict[str, Any] = {
        "miss": MISS, "sequence": ("add",), "scalars": ((),), "known": {}, "starts": {},
        "operators": {id(run): ("add", run, False)}, "kinds": TENSORS, "printed": frozenset({int}),
        "shapes_alone": lambda: False, "differentiates": lambda: False, "capturing": lambda: True, "count": lambda: 0,
    }  # fmt: skip
    return native.Follow(**given | overrides)


def test_c_leaves_to_python_what_is_special() -> None:
    add, x = torch.ops.aten.add.Tensor, torch.ones(3)
    home: dict[str, Any] = {"known": {id(x): "x"}}
    fits = _c_follow(**home)
    assert torch.equal(fits(add, (x, x), None), x + x)
    assert fits.index == 1
    assert fits(add, (x, x), {}) is MISS  # nothing is left in the sequence
    for overrides in (
        {}, {**home, "shapes_alone": lambda: True}, {**home, "differentiates": lambda: True}, {**home, "operators": {}},
        {**home, "capturing": lambda: False}, {**home, "count": lambda: 1}, {**home, "sequence": ("sub",)},
        {**home, "scalars": (("2=1",),)}, {**home, "scalars": ()}, {**home, "kinds": frozenset({nn.Parameter})},
    ):  # fmt: skip
        left = _c_follow(**overrides)
        assert left(add, (x, x), {}) is MISS
        assert left.index == 0
    for args, kwargs in (((x, 1), {}), ((), {}), ((x, [x]), {}), ((x, x), {"alpha": 2}), ((1, 1), {}), ((x, (x,)), {})):
        assert _c_follow(**home)(add, args, kwargs) is MISS
    inside = _c_follow()
    inside.begin, inside.end = x.data_ptr(), x.data_ptr() + 1
    assert torch.equal(inside(add, (x, x), {}), x + x)
    assert torch.equal(_c_follow(starts={x.data_ptr(): "x"})(add, (x, x), {}), x + x)
    numbers = _c_follow(**home, scalars=(("1=3",),))
    assert torch.equal(numbers(add, (x, 3), {}), x + 3)
    listed = _c_follow(**home, operators={id(add): ("add", lambda *given: given, True)}, scalars=(("1=[tensor, 4]",),))
    assert listed(add, (x, [x, 4]), {}) == (x, [x, 4])


def test_what_fails_in_c_raises() -> None:
    add, x = torch.ops.aten.add.Tensor, torch.ones(3)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    make = functools.partial(_c_follow, known={id(x): "x"})
    for name in ("shapes_alone", "differentiates", "capturing", "count"):
        with pytest.raises(ZeroDivisionError):
            make(**{name: broken})(add, (x, x), {})
    failing = make(operators={id(add): ("add", broken, True)})
    with pytest.raises(ZeroDivisionError):
        failing(add, (x, x), {})
    assert failing.index == 1  # as in Python, where the index moves before the operator runs
    wrong_parts: list[dict[str, Any]] = [{"sequence": []}, {"known": None}, {"kinds": set()}]
    for wrong in wrong_parts:
        with pytest.raises(TypeError):
            make(**wrong)
    for arguments in ((), (add, [x]), (add, (x,), None, 1)):
        with pytest.raises(TypeError):
            make()(*arguments)
    with pytest.raises(TypeError):
        make(operators={id(add): (1, 2, 3)})(add, (x, x), {})
