"""Observation: escapes, state, drift, operators that change, and what else one watched run shows."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import (
    CaptureWarning,
    Explanation,
    Finding,
    Severity,
    capture,
    explain,
    recordings,
)
from capture.observe.run import active_watch
from tests.support.device import DEVICE, EXECUTES
from tests.support.observed import bits, codes, line_of, x_of
from tests.support.observed import fresh as fresh
from tests.support.rows import noted

# ------------------------------------------------------------------------------------- escapes, state, drift, sequence


def test_a_tensor_that_escapes_to_a_list_that_only_a_method_knows() -> None:
    kept: list[Tensor] = []

    class Sink:
        def push(self, tensor: Tensor) -> None:
            kept.append(tensor)

    hidden = types.MappingProxyType({"sink": Sink()})

    def body(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        hidden["sink"].push(y)
        return y * 2 + 1

    captured = capture(body)
    got = [bits(captured(x_of(seed))) for seed in range(8)]
    assert got == [bits(torch.tanh(x_of(seed)) * 2 + 1) for seed in range(8)]
    assert [bits(tensor) for tensor in kept] == [bits(torch.tanh(x_of(seed))) for seed in range(8)]
    assert recordings(captured).replays >= 3


def test_a_tensor_appended_to_a_closures_list_is_never_lost() -> None:
    kept: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        kept.append(torch.tanh(x))
        return kept[-1] + 1

    captured = capture(body)
    got = [bits(captured(x_of(seed))) for seed in range(5)]
    assert got == [bits(torch.tanh(x_of(seed)) + 1) for seed in range(5)]
    assert [bits(tensor) for tensor in kept] == [bits(torch.tanh(x_of(seed))) for seed in range(5)]


def test_a_cycle_is_no_escape() -> None:
    def body(x: Tensor) -> Tensor:
        cycle: list[Any] = [torch.tanh(x)]
        cycle.append(cycle)
        return cycle[0] + 1  # type: ignore[no-any-return]

    captured = capture(body)
    for seed in range(5):
        assert bits(captured(x_of(seed))) == bits(torch.tanh(x_of(seed)) + 1)
    assert recordings(captured).recordings == 1


@pytest.mark.parametrize("kind", ["attribute", "closure", "global", "item"])
def test_counters_count_in_replays(kind: str) -> None:
    count = 0
    holder = types.SimpleNamespace(count=0)
    table = {"count": 0}
    scope = {"torch": torch, "COUNT": 0}
    exec("def body(x):\n    global COUNT\n    COUNT += 1\n    return x * 2 + 1", scope)  # noqa: S102 - fixed text

    def attribute(x: Tensor) -> Tensor:
        holder.count += 1
        return x * 2 + 1

    def closure(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * 2 + 1

    def item(x: Tensor) -> Tensor:
        table["count"] += 1
        return x * 2 + 1

    bodies: dict[str, Any] = {"attribute": attribute, "closure": closure, "global": scope["body"], "item": item}
    captured = capture(bodies[kind])
    for seed in range(6):
        assert bits(captured(x_of(seed))) == bits(x_of(seed) * 2 + 1)
        assert [holder.count, count, scope["COUNT"], table["count"]].count(seed + 1) == 1
    assert recordings(captured).replays == 4


def test_python_state_that_no_replay_can_put_there_is_a_finding() -> None:
    seen: list[object] = []

    def body(x: Tensor) -> Tensor:
        seen.append(object())
        return x * 2 + 1

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="CG204") as warned:
        got = [bits(captured(x_of(seed))) for seed in range(6)]
    assert got == [bits(x_of(seed) * 2 + 1) for seed in range(6)]
    assert len(warned) == 1
    assert len(set(map(id, seen))) == 6


def test_a_python_number_that_drifts_is_a_finding() -> None:
    used: list[int] = []
    hidden = types.MappingProxyType({"next": noted(itertools.count(1), used)})

    def body(x: Tensor) -> Tensor:
        return torch.relu(x) * hidden["next"]()  # here

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="CG205"):
        got = [(captured(x_of(seed)), used[-1]) for seed in range(6)]
    for seed, (result, number) in enumerate(got):
        assert bits(result) == bits(torch.relu(x_of(seed)) * number)
    assert used == [1, 2, 3, 4, 5, 6] if EXECUTES else len(used) > 6
    (finding,) = (told for told in recordings(captured).findings if told.code == "CG205")
    assert finding.where is not None
    assert finding.where.line == line_of(body, "here")[0]


def test_python_random_numbers_are_a_finding() -> None:
    states: list[Any] = []
    note = states.append

    def body(x: Tensor) -> Tensor:
        note(random.getstate())
        return torch.relu(x) * random.random()

    captured = capture(body)
    random.seed(1)
    with pytest.warns(CaptureWarning, match="CG202"):
        got = [(captured(x_of(seed)), states[-1], random.getstate()) for seed in range(6)]
    for seed, (result, before, after) in enumerate(got):
        random.setstate(before)
        assert bits(result) == bits(torch.relu(x_of(seed)) * random.random())
        assert random.getstate() == after
    assert len(states) == 6


def test_a_python_output_that_drifts_is_a_finding() -> None:
    used: list[int] = []
    hidden = types.MappingProxyType({"next": noted(itertools.count(1), used)})
    captured = capture(lambda x: (torch.relu(x) + 1, hidden["next"]()))
    with pytest.warns(CaptureWarning, match="CG205"):
        got = [(captured(x_of(seed))[1], used[-1]) for seed in range(6)]
    assert all(result == number for result, number in got)
    assert used == [1, 2, 3, 4, 5, 6] if EXECUTES else len(used) > 6


def test_another_operator_sequence_is_a_finding() -> None:
    used: list[bool] = []
    hidden = types.MappingProxyType({"turn": noted(itertools.cycle([True, False]), used)})

    def body(x: Tensor) -> Tensor:
        y = torch.relu(x) if hidden["turn"]() else torch.tanh(x)
        return y + 1

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="CG206"):
        got = [(captured(x_of(seed)), used[-1]) for seed in range(6)]
    for seed, (result, turn) in enumerate(got):
        assert bits(result) == bits((torch.relu(x_of(seed)) if turn else torch.tanh(x_of(seed))) + 1)
    assert len(used) == 6 if EXECUTES else len(used) > 6
    assert recordings(captured).replays == 0


def test_a_longer_operator_sequence_is_a_finding() -> None:
    used: list[int] = []
    hidden = types.MappingProxyType({"next": noted(itertools.count(1), used)})

    def body(x: Tensor) -> Tensor:
        for _ in range(hidden["next"]()):
            x = x + 1
        return x

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="CG206"):
        got = [(captured(x_of(seed)), used[-1]) for seed in range(6)]
    for seed, (result, number) in enumerate(got):
        expected = x_of(seed)
        for _ in range(number):
            expected = expected + 1
        assert bits(result) == bits(expected)
    assert used == [1, 2, 3, 4, 5, 6] if EXECUTES else len(used) > 6


def test_constants_on_a_default_device_without_an_index() -> None:
    def body(x: Tensor) -> Tensor:
        return x + torch.tensor([0.5]) + torch.as_tensor([1.0]) * torch.scalar_tensor(3.0)

    captured = capture(body)
    with torch.device(DEVICE.type):
        assert [bits(captured(x_of(seed))) for seed in range(4)] == [bits(body(x_of(seed))) for seed in range(4)]
    assert recordings(captured).replays >= 2


def test_constants_made_in_the_body_that_drift_are_a_finding() -> None:
    used: list[int] = []
    hidden = types.MappingProxyType({"next": noted(itertools.count(1), used)})
    captured = capture(lambda x: x + torch.tensor([float(hidden["next"]())]))
    with pytest.warns(CaptureWarning, match="CG205"):
        got = [(captured(x_of(seed)), used[-1]) for seed in range(6)]
    for seed, (result, number) in enumerate(got):
        assert bits(result) == bits(x_of(seed) + torch.tensor([float(number)]))
    assert used == [1, 2, 3, 4, 5, 6] if EXECUTES else len(used) > 6


# ------------------------------------------------------------------------------------------------------ other findings


def finding(explanation: Explanation, code: str) -> Finding:
    (found,) = (one for one in explanation.findings if one.code == code)
    return found


def test_gradients_are_recorded_apart() -> None:
    linear = nn.Linear(4, 4)
    captured = capture(lambda x: linear(x) * 2)

    def gradient(function: Callable[[Tensor], Tensor], seed: int) -> Any:
        linear.zero_grad()
        function(x_of(seed)).sum().backward()
        return bits(linear.weight.grad)

    with torch.enable_grad():
        got = [gradient(captured, seed) for seed in range(5)]
        assert got == [gradient(lambda x: linear(x) * 2, seed) for seed in range(5)]
    assert recordings(captured).recordings == 2
    for seed in range(4):
        assert bits(captured(x_of(seed))) == bits(linear(x_of(seed)) * 2)
    assert recordings(captured).recordings == 3


def test_gradients_through_a_view_of_an_input_run_eagerly_and_say_so() -> None:
    captured = capture(lambda x: x.view(-1))

    def gradient(seed: int) -> Any:
        x = x_of(seed).requires_grad_()
        captured(x).sum().backward()
        return x.grad

    with torch.enable_grad(), pytest.warns(CaptureWarning, match="CG501") as warned:
        assert all(gradient(seed) is not None for seed in range(3))
    assert len(warned) == 1


@pytest.mark.parametrize("make", [lambda: x_of(1, 4, 4).relu().to_sparse(), lambda: x_of(1, 4, 4).as_subclass(Marked)])
def test_odd_tensors_run_eagerly_and_say_so(make: Callable[[], Tensor]) -> None:
    captured = capture(lambda w, x: (w @ x) + 1)
    with pytest.warns(CaptureWarning, match="CG107"):
        got = [captured(make(), x_of(2, 4, 4)) for _ in range(4)]
    expected = (make() @ x_of(2, 4, 4)) + 1
    assert {type(result) for result in got} == {type(expected)}
    assert [bits(result.as_subclass(Tensor)) for result in got] == [bits(expected.as_subclass(Tensor))] * 4


def test_a_sparse_tensor_that_is_written_runs_eagerly() -> None:
    captured = capture(lambda x: (x.mul_(2), x.to_dense() + 1)[1])
    ours, expected = x_of(1, 4, 4).relu().to_sparse(), x_of(1, 4, 4).relu().to_sparse()
    with pytest.warns(CaptureWarning, match="CG107"):
        got = [captured(ours) for _ in range(3)]
    assert [bits(result) for result in got] == [bits(expected.mul_(2).to_dense() + 1) for _ in range(3)]


class Marked(Tensor):
    """A subclass without behaviour of its own."""


def test_notes_and_copies_of_a_recorded_call() -> None:
    table = x_of(9)

    def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(table)
        return x[1:], torch.relu(y) * torch.rand(()) + 1

    explanation = explain(capture(body, static=["y.zz"]))(x_of(1), x_of(2))
    assert explanation.outcome == "record"
    assert {"CG102", "CG104", "CG105", "CG301", "CG403"} <= set(codes(explanation))
    assert finding(explanation, "CG102").severity is Severity.COPY
    assert finding(explanation, "CG102").path == "x"
    assert finding(explanation, "CG104").path == "y.zz"
    assert finding(explanation, "CG105").path == "table"


def test_a_small_body_does_not_pay() -> None:
    assert "CG902" in codes(explain(lambda x: x + 1)(x_of(1)))
    assert "CG902" not in codes(explain(lambda x: (x + 1) * 2)(x_of(1)))


def test_a_captured_function_inside_another_is_a_note() -> None:
    inner = capture(lambda x: torch.relu(x) + 1)
    explanation = explain(lambda x: inner(x) * 2)(x_of(1))
    assert explanation.outcome == "record"
    assert "CG801" in codes(explanation)


def test_placeholders_have_the_users_names() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])

        @override
        def forward(self, x: Tensor, cache: dict[str, list[Tensor]], *rest: Tensor, **more: Tensor) -> Tensor:
            y: Tensor = self.layers[1](self.layers[0](x)) + cache["k"][1] + rest[0] + more["mask"]
            return y

    explanation = explain(Net().eval())(x_of(1), {"k": [x_of(2), x_of(3)]}, x_of(4), mask=x_of(5))
    paths = {placeholder.path for placeholder in explanation.plan.placeholders}
    arguments = {"x", "cache.k.0", "cache.k.1", "rest.0", "mask"}
    assert arguments <= paths
    assert {"self.layers[0].weight", "self.layers[0].bias", "self.layers[1].running_mean"} <= paths
    unused = next(placeholder for placeholder in explanation.facts.placeholders if placeholder.path == "cache.k.0")
    assert not unused.used


def test_a_cycle_that_the_body_made_is_looked_for_among_young_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are older than the run are in no such cycle, and it takes 0.1 s to go through them."""
    looked: list[int] = []
    collect = gc.collect

    def collected(generation: int = 2) -> int:
        looked.append(generation)
        return collect(generation)

    monkeypatch.setattr(gc, "collect", collected)

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        cycle: list[Any] = [y]
        cycle.append(cycle)
        return y * 2

    gc.disable()
    try:
        captured = capture(body)
        captured(torch.ones(3))
    finally:
        gc.enable()
    assert looked == [1]
    assert not recordings(captured).findings


def test_a_watch_is_of_its_own_thread() -> None:
    """What other threads do meanwhile is no part of the body."""
    begun, seen, go_on = threading.Event(), list[Any](), threading.Event()

    def body(x: Tensor) -> Tensor:
        begun.set()
        assert go_on.wait(20)
        return x + (active_watch() is None)

    def look() -> None:
        assert begun.wait(20)
        seen.append(active_watch())
        go_on.set()

    other = threading.Thread(target=look)
    other.start()
    result = capture(body, silence=["CG202"])(torch.zeros(1, device=DEVICE))
    other.join()
    assert seen == [None]
    assert result.item() == 0
