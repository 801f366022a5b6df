"""Where nothing follows from what the host reads, a replay is one run, which no code of Python interrupts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from capture import capture, config, recordings
from capture.engines.undo import KeptMemory
from capture.runtime import branches, dispatch
from tests.segments.test_bodies import fresh
from tests.support.device import AGAIN, DEVICE
from tests.support.observed import bits
from tests.support.python_calls import python_calls

__all__ = ["fresh"]
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="a signal may come between two graphs")


def looked_up(function: Callable[..., Any], table: Tensor, out_of_range: Collection[int]) -> list[Any]:
    """What nine calls give or raise, and what they leave in their argument. In some an index is out of range."""
    found, x = list[Any](), torch.arange(4.0)
    for call in range(9):
        try:
            result = function(x, torch.tensor([1, 9 if call in out_of_range else call % 5]), table)
        except IndexError as error:
            result = str(error)
        found.append((result, x.clone()))
    return found


def alone(x: Tensor) -> Any:
    return (x * 2).sum().item()


def of_kinds(x: Tensor) -> Any:
    return float(x.sum()), [bool((x > 1).any()), int((x > 0).sum())], x * 2


def listed(x: Tensor) -> Any:
    return x.topk(2).indices.tolist(), x.sum().item()


def _pair(x: Tensor) -> Any:
    return x.sum().item(), x.max().item()


def together(x: Tensor) -> Any:
    """Formulas that raise for no numbers."""
    pair = _pair(x)
    x.mul_(2)
    return pair[0] * 2 + pair[1], -pair[0], pair[1], x + 1


def divided(x: Tensor) -> Any:
    """One that raises for some: it is computed before anything is written after the last read."""
    pair = _pair(x)
    x.mul_(2)
    return pair[0] / pair[1], x + 1


def around_writes(x: Tensor) -> Any:
    before = x.sum().item()
    x.mul_(2)
    between = x.sum().item()
    x.add_(1)
    return before, between, x.sum().item()


def drawn(x: Tensor) -> Any:
    y = functional.dropout(x, 0.5)
    first = y.sum().item()
    return first, torch.rand(3), (y * torch.randn(6)).sum().item()


@pytest.mark.parametrize(
    ("body", "more"),
    [(alone, []), (of_kinds, []), (listed, ["flat_list", "computed", "computed"]), (around_writes, []), (drawn, [])],
)
def test_a_replay_takes_no_python(body: Callable[..., Any], more: list[str]) -> None:
    f, generator = capture(body), torch.Generator().manual_seed(0)
    inputs = [torch.randn(6, generator=generator) for _ in range(8)]
    found, expected = list[Any](), list[Any]()
    for function, into in ((f, found), (body, expected)):
        torch.manual_seed(1)
        for x in inputs:
            given = x.clone()
            into.append((function(given), given))
    assert bits(found) == bits(expected)
    assert recordings(f).replays >= 6 - AGAIN
    if AGAIN:
        return  # copies of the results that the caller keeps are made in Python
    assert python_calls(lambda: f(inputs[0].clone())) == more


@pytest.mark.parametrize("body", [together, divided])
def test_what_is_computed_of_numbers(body: Callable[..., Any]) -> None:
    f, found, expected = capture(body), list[Any](), list[Any]()
    for function, into in ((f, found), (body, expected)):
        for call in range(10):
            x = torch.tensor([1.0, 2.0, -3.0]) * (call % 7)
            try:
                into.append((function(x), x))
            except ZeroDivisionError as error:
                into.append((str(error), x))
    assert bits(found) == bits(expected)
    assert recordings(f).replays >= 5 - AGAIN
    if body is together:
        assert not any("Walk" in call for call in python_calls(lambda: f(torch.ones(3))))


def test_a_training_step_copies_nothing_for_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(decorate: Callable[[Any], Any]) -> tuple[list[float], Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return float(loss)

        function, x = decorate(step), torch.randn(3, 4)
        with torch.enable_grad():
            return [function(x) for _ in range(8)], [*model.parameters()], function

    def fail(_: Any) -> None:
        raise AssertionError("memory was kept")

    expected, parameters, _ = steps(lambda step: step)
    monkeypatch.setattr(KeptMemory, "keep", fail)
    found, ours, function = steps(capture)
    assert bits((found, ours)) == bits((expected, parameters))
    assert recordings(function).replays == 5


def test_a_training_step_that_checks_its_loss() -> None:
    def steps(decorate: Callable[[Any], Any]) -> tuple[list[Any], Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), list[Any]()

        def step(x: Tensor) -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if not torch.isfinite(loss):
                raise ValueError("no number")
            optimizer.step()
            return float(loss)

        function, x = decorate(step), torch.randn(3, 4)
        for call in range(14):
            with torch.enable_grad():
                try:
                    found.append(function(x / (call not in (6, 8, 9, 12))))
                except ValueError as error:
                    found.append(str(error))
            found.append([parameter.detach().clone() for parameter in model.parameters()])
        return found, [parameter.grad for parameter in model.parameters()], function

    (expected, theirs, _), (found, ours, function) = steps(lambda step: step), steps(capture)
    assert bits((found, ours)) == bits((expected, theirs))
    assert recordings(function).replays >= 5
    with torch.enable_grad():
        calls = python_calls(lambda: function(torch.ones(3, 4)))
    assert not any("Walk" in call for call in calls)


def caught(x: Tensor, at: Tensor, table: Tensor) -> Any:
    total = x.sum().item()
    x.add_(1)
    try:
        y = table[at]
    except IndexError:
        y = table * 2
    return total, y, x.sum().item()


def raised(x: Tensor, at: Tensor, table: Tensor) -> Any:
    total = x.sum().item()
    x.add_(1)
    y = table[at]
    return total, y.sum().item()


@pytest.mark.parametrize("body", [caught, raised])
def test_an_operator_raises_between_reads(body: Callable[..., Any]) -> None:
    """What was read before is that of the call, and what was written stays."""
    f, table = capture(body), torch.arange(6.0)
    assert bits(looked_up(f, table, {6})) == bits(looked_up(body, table, {6}))
    assert recordings(f).replays >= 5


def some_compared(x: Tensor) -> Any:
    total = x.sum().item()
    x.add_(1)
    return (total, x * 2) if x[0] > 0 else (total, x * 3)


def test_a_value_that_is_compared_ends_a_segment() -> None:
    """All that was written by then is put back where no recording goes on."""
    f, found, expected = capture(some_compared), list[Any](), list[Any]()
    for function, into in ((f, found), (some_compared, expected)):
        for sign in (1, 1, 1, 1, -1, -1, 1, -1, 1):
            x = torch.full((3,), 2.0 * sign)
            into.append((function(x), x))
    assert bits(found) == bits(expected)
    assert recordings(f).recordings == 2 + AGAIN


@pytest.mark.parametrize("verify", ["always", "first"])
def test_such_replays_are_verified(verify: Any) -> None:
    f, x = capture(around_writes, verify=verify), torch.ones(3)
    with config.patch(strict=True):
        found = [f(x) for _ in range(6)]
    y = torch.ones(3)
    assert bits(found) == bits([around_writes(y) for _ in range(6)])


def two_ways(x: Tensor) -> Any:
    total, y = x.sum().item(), x * 2
    if y.sum() > 0:
        return total, y, y.sqrt()
    return total, y, [y - 1, y.sum().item()]


def counted(x: Tensor) -> Any:
    most = int(x.abs().max())
    return x * most


def not_a_number(x: Tensor) -> Any:
    return x * 2 if x.log().sum() > 0 else x - 1


def after_all(x: Tensor) -> Any:
    y = x * 2
    if bool((x > 0).all()):
        y = y + 1
    y += torch.rand(3)
    return y.max().item(), y


@pytest.mark.parametrize("body", [two_ways, counted, not_a_number, after_all])
def test_a_value_that_comes_again_takes_no_python(body: Callable[..., Any]) -> None:
    """Any other value has the call go on segment by segment, from where it was read."""
    f, found, expected = capture(body), list[Any](), list[Any]()
    signs = [1, 1, 1, 1, -1, -1, -1, 1, -1, 1, 1, -1, 2, 1, -1]
    for function, into in ((f, found), (body, expected)):
        torch.manual_seed(0)
        into += [function(torch.tensor([1.0, 2.0, 3.0]) * sign) for sign in signs]
    assert bits(found) == bits(expected)
    assert recordings(f).replays >= 8 - AGAIN
    f(torch.tensor([1.0, 2.0, 3.0]))
    calls = python_calls(lambda: f(torch.tensor([1.0, 2.0, 3.0])))
    assert not any("Walk" in call or "replay" in call for call in calls)


def test_replays_without_python_count() -> None:
    """The values of this body come again, though not all of them."""
    f, found, expected = capture(counted), list[Any](), list[Any]()
    for function, into in ((f, found), (counted, expected)):
        for value in [1.0] * 200 + [float(value) for value in range(2, 8)] * 2 + [1.0] * 4:
            into.append(function(torch.tensor([1.0, 0.5]) * value))
    assert bits(found) == bits(expected)
    before = recordings(f).replays
    f(torch.ones(2))
    assert recordings(f).replays == before + 1


def caught_behind_a_branch(x: Tensor, at: Tensor, table: Tensor) -> Any:
    total = x.sum().item()
    y = x * 2
    if y.sum() > 0:
        y = y + 1
    try:
        y = table[at] + y[:2]
    except IndexError:
        y.add_(table[:4])
        x.add_(1)
    return total, y, x.sum().item()


def raised_before_a_branch(x: Tensor, at: Tensor, table: Tensor) -> Any:
    y = table[at]
    if y.sum() > 0:
        x.add_(1)
    return y, x.sum().item()


@pytest.mark.parametrize("body", [caught_behind_a_branch, raised_before_a_branch])
def test_an_operator_raises_beside_a_branch(body: Callable[..., Any]) -> None:
    f, table = capture(body), torch.arange(1.0, 7.0)
    assert bits(looked_up(f, table, {5, 7})) == bits(looked_up(body, table, {5, 7}))
    assert recordings(f).replays >= 3


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.last = torch.zeros(3), torch.zeros(2, dtype=torch.int32)

    @override
    def forward(self, x: Tensor) -> Any:
        self.seen.add_(x)
        self.last.add_(1)
        total = self.seen.sum().item()
        if x.sum() > 0:
            return total, self.seen * 2
        self.seen.mul_(0.5)
        return total, self.last + 1

    def state(self) -> Any:
        return self.seen.clone(), self.last.clone()


class Keeping(Counting):
    """Python sets its attribute after each replay."""

    latest = torch.zeros(3)

    @override
    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        self.latest = found[1] * 3
        return found

    @override
    def state(self) -> Any:
        return *super().state(), self.latest.clone()


@pytest.mark.parametrize("kind", [Counting, Keeping])
def test_what_was_written_before_another_value_is_kept(kind: type[Counting]) -> None:
    """In each replay, as the call may stop there; also where the memory lies elsewhere from some call on."""
    mine, theirs = kind(), kind()
    run = capture(mine)
    with torch.no_grad():
        for call, sign in enumerate([1, 1, 1, 1, 1, -1, -1, 1, -1, 1, 1, 1, -1, 1, 0, 1, 0, 0, 1]):
            if call == 9:
                mine.seen, theirs.seen = torch.ones(3), torch.ones(3)
            x = torch.tensor([1.0, 2.0, 3.0]) * sign
            assert bits((run(x), mine.state())) == bits((theirs(x), theirs.state())), call
        assert recordings(mine).replays >= 9
        for _ in range(3):
            run(torch.ones(3))
        calls = python_calls(lambda: run(torch.ones(3)))
    assert not any("Walk" in call for call in calls)
    assert kind is Keeping or not any("replay" in call for call in calls)


@pytest.mark.parametrize("kind", [Counting, Keeping])
@pytest.mark.parametrize("place", ["raised", "_follow", "_Walk.__init__", "_Walk.walk"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_call_that_is_stopped_at_another_value_has_not_happened(
    kind: type[Counting], place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is Keeping and place == "raised":
        pytest.skip("Python runs it")
    owner, name = branches._Walk if "Walk" in place else dispatch._GoesOn, place.rpartition(".")[2]
    known, stops = getattr(owner, name), list[bool]()

    def stop(*args: Any, **kwargs: Any) -> Any:
        if stops and stops.pop():
            raise error("stop")
        return known(*args, **kwargs)

    monkeypatch.setattr(owner, name, stop)
    mine, theirs, x = kind(), kind(), torch.ones(3)
    run = capture(mine)
    with torch.no_grad():
        for sign in (1, 1, 1, -1, -1, -1, 1, 1, 1):
            assert bits(run(x * sign)) == bits(theirs(x * sign))
        stops.append(True)
        if error is RuntimeError and "Walk" in place:  # one of the library's own: the call goes the general way
            assert bits(run(-x)) == bits(theirs(-x))
        else:
            with pytest.raises(error, match="stop"):
                run(-x)
        assert not stops
        assert bits(mine.state()) == bits(theirs.state())
        assert bits((run(x), mine.state())) == bits((theirs(x), theirs.state()))
