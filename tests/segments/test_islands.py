"""Islands: as eager in results, state, generators, effects and exceptions, while what is around them replays."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import AnnotationError, capture, config, explain, island, recordings, warmup
from tests.segments.bodies import draw
from tests.segments.bodies_of_islands import PROGRAMS
from tests.segments.bodies_of_refused_islands import EAGER
from tests.segments.test_bodies import CALLS, compared, fresh
from tests.support.device import EXECUTES
from tests.support.device import ISLANDS as REPLAYS
from tests.support.observed import bits

__all__ = ["fresh"]

ONCE_MORE = 0 if EXECUTES else 1
"""Where recording runs execute nothing, a body that reads or calls an island is watched once more before."""


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [one for one in PROGRAMS if one not in EAGER])
def test_body_is_as_eager_and_replays(name: str) -> None:
    counters = recordings(compared(PROGRAMS[name]))
    if REPLAYS or name != "island_in_one_branch":  # which no watched run has to take, where none is recorded
        assert any(one.code == "CG208" for one in counters.findings)
    if REPLAYS:
        assert counters.replays >= CALLS // 2, str(counters)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", sorted(EAGER))
def test_body_that_cannot_be_recorded_is_as_eager(name: str) -> None:
    counters = recordings(compared(PROGRAMS[name], 12))
    assert counters.replays == 0
    told = [finding for finding in counters.findings if finding.severity.name == "EAGER"]
    assert told
    if REPLAYS:
        assert any(EAGER[name] in finding.what for finding in told), told


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", [one for one in PROGRAMS if one not in EAGER])
def test_body_is_as_eager_in_poisoned_memory_and_verified(name: str) -> None:
    with config.patch(poison=True, verify="always"):
        function = compared(PROGRAMS[name], 12)
    assert not any(finding.code == "CG903" for finding in recordings(function).findings)


def twins(make: Any, calls: int = 12) -> Any:
    """Make the same calls eagerly and captured, and compare them. ``make`` gives the function and what it keeps."""
    eager, theirs = make()
    function, ours = make()
    f = capture(function)
    for number in range(calls):
        x = draw(number)
        assert bits(outcome(f, x)) == bits(outcome(eager, x)), number
        assert bits(held(ours)) == bits(held(theirs)), number
    return f


def held(kept: Any) -> Any:
    return kept if isinstance(kept, list) else [*vars(kept).values()]


def outcome(function: Any, x: Tensor) -> Any:
    try:
        return function(x)
    except (ValueError, RuntimeError, IndexError, KeyboardInterrupt) as error:
        return repr(error)


def test_text_is_printed_once_a_call_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    @island
    def note(y: Tensor) -> None:
        print("island", float(y[0, 0]))

    def body(x: Tensor) -> Tensor:
        print("begin", x.shape)
        y = x * 2
        note(y)
        print("mean", y.mean(), sep=": ", end=";\n")
        return y + 1

    f, texts = capture(body), []
    for function in (body, f):
        for number in range(8):
            function(draw(number))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert recordings(f).replays == (6 - ONCE_MORE if REPLAYS else 0)


def test_state_that_an_island_changes_later_is_seen() -> None:
    """The first calls do not show the change, so state is compared after each island and before each call."""

    class Settings:
        scale = 1.0
        ticks_so_far = 0

    def make() -> Any:
        settings = Settings()

        @island
        def tick() -> None:
            settings.ticks_so_far += 1
            if settings.ticks_so_far in (5, 6, 9):
                settings.scale += 1.0

        def body(x: Tensor) -> Tensor:
            y = x * settings.scale
            tick()
            return y + settings.scale

        return body, settings

    assert recordings(twins(make)).replays >= (2 - ONCE_MORE if REPLAYS else 0)


def test_tensor_of_state_that_an_island_replaces_later_is_seen() -> None:
    class Holder:
        weight = torch.ones(4, 4)
        ticks_so_far = 0

    def make() -> Any:
        holder = Holder()
        holder.weight = torch.ones(4, 4)

        @island
        def tick() -> None:
            holder.ticks_so_far += 1
            if holder.ticks_so_far in (5, 9):
                holder.weight = holder.weight * 2 + 1

        def body(x: Tensor) -> Tensor:
            y = x * holder.weight
            tick()
            return y + holder.weight

        return body, holder

    twins(make)


def test_tensor_that_an_island_keeps_later_stays_as_it_was() -> None:
    def make() -> Any:
        kept: list[Tensor] = []
        count = iter(range(100))

        @island
        def keep(y: Tensor) -> None:
            if next(count) > 4:
                kept.append(y)

        def body(x: Tensor) -> Tensor:
            y = x * 2
            keep(y)
            z = y + 1
            del y
            return (z * 3).exp()

        return body, kept

    twins(make)


def test_another_island_in_the_place_of_one() -> None:
    held: dict[str, Any] = {}

    def made(number: int) -> Any:
        @island
        def add(y: Tensor) -> Tensor:
            return y + number

        return add

    def body(x: Tensor) -> Tensor:
        return held["add"](x * 2) * 1  # type: ignore[no-any-return]

    f, adds = capture(body), [made(1), made(2)]
    for number in (0, 0, 0, 1, 1, 1, 0, 1):
        held["add"] = adds[number]
        x = draw(number)
        assert bits(f(x)) == bits(body(x)), number


@pytest.mark.parametrize("at", [2, 3, 5])
def test_interrupt_in_an_island_leaves_what_eager_leaves(at: int) -> None:
    def make() -> Any:
        total, log = torch.zeros(4, 4), list[Any]()

        @island
        def note(y: Tensor) -> None:
            log.append(float(y[0, 0]))
            if len(log) == at + 1:
                raise KeyboardInterrupt

        def body(x: Tensor) -> Tensor:
            total.add_(x)
            note(total)
            total.mul_(0.5)
            return total + x

        return body, [total, log]

    twins(make)


def test_islands_of_captured_functions_inside() -> None:
    def make() -> Any:
        log: list[float] = []

        @island
        def note(y: Tensor) -> None:
            log.append(float(y[0, 0]))

        @capture
        def inner(x: Tensor) -> Tensor:
            y = x * 2
            note(y)
            return y + 1 if y[1, 1] > 0 else y

        def body(x: Tensor) -> Tensor:
            y = inner(x + 1)
            note(y)
            return inner(y) if y[0, 0] > 0 else y

        return body, log

    twins(make, 20)


def test_captured_function_called_by_an_island() -> None:
    def make() -> Any:
        @capture
        def double(x: Tensor) -> Tensor:
            return x * 2

        @island
        def work(y: Tensor) -> Tensor:
            return double(double(y))

        def body(x: Tensor) -> Tensor:
            return work(x + 1) * double(x)

        return body, []

    assert recordings(twins(make)).replays == (10 - ONCE_MORE if REPLAYS else 0)


def test_looking_ahead_leaves_no_trace_in_python() -> None:
    log: list[float] = []

    @island
    def note(y: Tensor) -> None:
        log.append(float(y[0, 0]))

    def body(x: Tensor) -> Tensor:
        y = x * 2
        note(y)
        y = y + 1 if y[1, 1] > 0 else y
        return y

    explanation, f = explain(body)(draw(1)), capture(body)
    warmup(f)(draw(1))
    assert log == []
    assert ("island" in explanation.segments()) == REPLAYS
    assert (len(explanation.segments().splitlines()) == 6) == REPLAYS, explanation.segments()
    for number in range(6):
        assert bits(f(draw(number))) == bits(body(draw(number)))
    assert log[::2] == log[1::2]


def test_what_raised_is_let_go_with_its_error() -> None:
    """Eager code does so, too, without waiting for the collector, since memory of a device may be short meanwhile."""
    held: list[weakref.ref[Any]] = []
    due: list[int] = []

    class Held:
        """An object that only the body's frame refers to."""

    def hold() -> Held:
        held.append(weakref.ref(made := Held()))
        return made

    @island
    def check(y: Tensor) -> None:
        kept = hold()
        if due:
            raise ValueError(type(kept).__name__)

    def body(x: Tensor) -> Tensor:
        kept = hold() if len(due) > 1 else None
        y = x * 2
        check(y)
        if len(due) > 1:
            raise ValueError(type(kept).__name__)
        return y + 1

    f = capture(body)
    gc.collect()
    gc.disable()
    try:
        for number in range(12):
            due[:] = [1] * {1: 1, 2: 1, 6: 1, 8: 2, 9: 1}.get(number, 0)
            outcome(f, draw(number))
            assert all(reference() is None for reference in held), number
    finally:
        gc.enable()


def test_results_that_need_gradients_are_eager_and_told() -> None:
    torch.manual_seed(0)
    net, log = nn.Linear(4, 4), list[float]()

    @island
    def note(y: Tensor) -> None:
        log.append(float(y.detach().sum()))

    def body(x: Tensor) -> Tensor:
        y: Tensor = net(x).relu()
        note(y.detach())
        return y.sum()

    f = capture(body)
    with torch.enable_grad():
        for number in range(4):
            gradients = []
            for function in (f, body):
                net.zero_grad()
                function(draw(number)).backward()
                gradients.append(bits([parameter.grad for parameter in net.parameters()]))
            assert gradients[0] == gradients[1]
    assert log[::2] == log[1::2]
    assert any("gradients" in finding.what for finding in recordings(f).findings if finding.code == "CG208")


def test_what_is_no_island() -> None:
    async def later() -> None: ...

    def generator() -> Any:
        yield

    for what in (later, generator, 3, int):
        with pytest.raises(AnnotationError):
            island(what)  # type: ignore[type-var]


def test_an_island_is_the_function_elsewhere() -> None:
    @island
    def add(x: Tensor, *, number: int = 1) -> Tensor:
        """Adds."""
        return x + number

    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert float(add(torch.zeros(()), number=2)) == 2


@pytest.mark.parametrize("later", [False, True])
def test_operator_that_raises_after_an_island(later: bool) -> None:
    """The island has run: it is not run again where the body goes on from there."""

    def make() -> Any:
        total, log = torch.zeros(4, 4), list[float]()

        @island
        def note(y: Tensor) -> Tensor:
            log.append(float(y[0, 0]))
            return y * 2

        def body(x: Tensor) -> Tensor:
            total.add_(x)
            y = note(x + 1)
            at = (x[:2, :2].round().abs() * 2).long()
            z = y.reshape(-1)[:6].gather(0, at.reshape(-1)[:1])
            total.mul_(0.5)
            if later:
                note(z)
            return y + z.sum() + total

        return body, [total, log]

    twins(make, 24)
