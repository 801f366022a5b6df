"""An operator raises in a replay: all that the body did before it is done, also in Python state, and the body may catch
the error and go on."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import define, field
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from capture.engines.cpu.segments import SegmentedTape
from tests.support.regions import bits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


@define(eq=False)
class Box:
    """All state that a body may leave behind."""

    table: Tensor = field(factory=lambda: numbers(1, 5, 3))
    sums: Tensor = field(factory=lambda: torch.zeros(3, device="cpu"))
    last: Any = None
    before: Any = None
    log: list[Any] = field(factory=list)
    named: dict[str, Any] = field(factory=dict)
    generator: torch.Generator = field(factory=lambda: torch.Generator("cpu").manual_seed(3))


def attribute(box: Box, x: Tensor, at: Tensor) -> Tensor:
    box.last = torch.relu(x) * 2
    found = box.table[at]
    box.before = found + 1
    return found * 3


def written(box: Box, x: Tensor, at: Tensor) -> Tensor:
    box.sums.add_(x.sum(0))
    box.last = box.sums * 2
    found = box.table.index_select(0, at)
    box.sums.add_(1)
    box.last = found
    return found


def overwritten(box: Box, x: Tensor, at: Tensor) -> Tensor:
    """A body that overwrites, after the operator that raises, what it set before."""
    box.last = torch.tanh(x) + 1
    box.before = box.last.view(-1)[1:]
    found = functional.embedding(at, box.table)
    box.last, box.before = found, None
    return found + 0


def containers(box: Box, x: Tensor, at: Tensor) -> Tensor:
    box.named["x"] = x.exp()
    found = torch.gather(box.table, 0, at.view(-1, 1))
    box.named["found"] = found
    return found.sum()


def caught(box: Box, x: Tensor, at: Tensor) -> Tensor:
    """The body catches the error and goes on."""
    y = x.cos().mul_(2)
    box.sums.copy_(y.sum(0))
    try:
        rows = box.table[at]
    except IndexError:
        box.last = y + 1
        return y * box.sums
    box.last = rows
    return rows + y.sum()


def caught_once(box: Box, x: Tensor, at: Tensor) -> Tensor:
    """A body that catches an error in each call, of an operator on no tensor that was made before."""
    y = x.sin()
    try:
        box.table[at + 100]
    except IndexError:
        box.last = y * 2
    return box.table[at] + y.sum()


def drawn(box: Box, x: Tensor, at: Tensor) -> Tensor:
    box.last = x * torch.rand(3, device="cpu")
    box.before = torch.randn(2, generator=box.generator, device="cpu")
    found = box.table[at]
    return found + torch.rand(3, device="cpu")


def inverse(box: Box, x: Tensor, at: Tensor) -> Tensor:
    box.last = (at.float().view(-1, 1) + x[:1]).sum()
    square = torch.diag((at < 5).float()) * 2
    found: Tensor = torch.linalg.inv(square)
    box.before = found
    return found.sum() + x


def solved(box: Box, x: Tensor, at: Tensor) -> Tensor:
    """The error comes from an operator whose check makes the host read a value."""
    found: Tensor = torch.linalg.cholesky(torch.diag(1.0 - at.float()).add(torch.diag(at.float() * 2)) * 1)
    box.last = found
    return torch.cholesky_solve(x[: at.numel()], found)


def read_before(box: Box, x: Tensor, at: Tensor) -> Tensor:
    """The host reads a value, then an operator raises."""
    box.last = x + 1
    if x.sum() > 0:
        box.sums.add_(1)
    box.before = box.last * 2
    rows = box.table[at]
    box.sums.add_(2)
    return rows


def read_after(box: Box, x: Tensor, at: Tensor) -> Tensor:
    """An operator raises before the host reads a value."""
    box.last = x + 1
    box.sums.add_(torch.rand(3, device="cpu"))
    found = box.table.index_select(0, at)
    box.before = found
    return found * 2 if x.sum() > 0 else found + box.sums


def counted(box: Box, x: Tensor, at: Tensor) -> Tensor:
    """A size follows from values of a tensor."""
    rows = x[x[:, 0] > 0]
    box.last = rows.sum(0)
    found = box.table[at].sum() + rows.sum()
    box.before = found
    return found


def returned(box: Box, x: Tensor, at: Tensor) -> tuple[Tensor, float]:
    y = box.table[at] * x.mean()
    box.last = y.sum()
    return y, y.sum().item()


def asserted(box: Box, x: Tensor, at: Tensor) -> Tensor:
    box.last = x * 3
    torch._assert_async((at < 5).all())
    box.before = x * 4
    return x + 1


BODIES = [attribute, written, overwritten, containers, caught, caught_once, drawn, inverse, solved, read_before,
          read_after, counted, returned, asserted]  # fmt: skip
RAISES = {"first": {0}, "later": {2, 6, 9, 10, 13}, "often": {1, 3, 4, 5, 8, 9, 11, 14}}
TURNS = 16


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except (RuntimeError, IndexError) as error:
        return type(error), str(error)


def told(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, bits(value)
    if isinstance(value, (tuple, list)):
        return [told(member) for member in value]
    if isinstance(value, dict):
        return {name: told(member) for name, member in value.items()}
    if isinstance(value, torch.Generator):
        return bits(value.get_state())
    return value


def state_of(box: Box) -> Any:
    return {name: told(getattr(box, name)) for name in ("table", "sums", "last", "before", "log", "named", "generator")}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("raises", RAISES)
@pytest.mark.parametrize("body", BODIES)
def test_state_after_a_replay_that_raises(body: Callable[..., Any], raises: str) -> None:
    mine, theirs = Box(), Box()
    run = capture(body)
    generator = torch.get_rng_state()
    with torch.no_grad():
        for turn in range(TURNS):
            x = numbers(turn, 4, 3) + (4 if turn % 5 else -4)
            at = torch.tensor([0, 1, 7 if turn in RAISES[raises] else 3], device="cpu")
            results = []
            for function, box in ((body, theirs), (run, mine)):
                torch.set_rng_state(generator)
                results.append(told(outcome(function, box, x.clone(), at)))
                state = torch.get_rng_state()
            generator = state
            assert results[1] == results[0], f"call {turn}"
            assert state_of(mine) == state_of(theirs), f"call {turn}"
    assert not any(finding.code == "CG905" for finding in recordings(run).findings)
    if raises != "often" and body not in (caught, caught_once):  # what a body does with an error follows from values
        assert recordings(run).replays >= 3


def repeated(box: Box, x: Tensor, at: Tensor) -> Tensor:
    """The operator that raises is the one that makes the host wait for values."""
    box.sums.add_(x.sum(0))
    box.last = box.sums * 2
    rows = x[:3].repeat_interleave(5 - at, dim=0)
    box.before = rows.sum()
    return rows


@pytest.mark.parametrize("told_apart", [True, False])
def test_operators_at_a_break_that_raise(told_apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of graphs cannot tell what ran before: all that its graphs wrote is put back, and the body runs."""
    if not told_apart:
        monkeypatch.setattr(SegmentedTape, "was_stopped", lambda _: False)
    test_state_after_a_replay_that_raises(repeated, "later")


class Layers(nn.Module):
    last: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    @override
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        y = torch.relu(self.linear(x))
        self.last = y.detach() * 2
        found: Tensor = torch.tanh(self.table(at)) * y.mean()
        return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inside", [False, True], ids=["region", "whole step"])
def test_training_goes_on_after_a_replay_that_raises(inside: bool) -> None:
    torch.manual_seed(0)
    theirs = Layers().to("cpu")
    mine = copy.deepcopy(theirs)

    def step(model: Layers, x: Tensor, at: Tensor) -> Tensor:
        loss: Tensor = model(x, at).square().sum()
        loss.backward()
        return loss.detach()

    run: Any = capture(step) if inside else step
    if not inside:
        capture(mine)
    for turn in range(14):
        mark_step_begin()
        x, at = numbers(turn, 3, 4), torch.tensor([0, 9 if turn in (0, 4, 7, 8, 12) else 2], device="cpu")
        for layers in (mine, theirs):
            if turn % 3:
                layers.zero_grad()
        assert told(outcome(run, mine, x, at)) == told(outcome(step, theirs, x, at)), f"call {turn}"
        for name, tensor in theirs.named_parameters():
            assert told(mine.get_parameter(name)) == told(tensor), name
            assert told(mine.get_parameter(name).grad) == told(tensor.grad), name
        assert told(mine.last) == told(theirs.last), f"call {turn}"
    assert recordings(run if inside else mine).replays >= 3


class _Late(Exception):
    pass


def test_a_signal_in_the_middle_of_a_replay_leaves_what_eager_leaves() -> None:
    """An operator in Python is where a handler runs: the body is stopped at that operator."""

    @torch.library.custom_op("capture_tests::slow_double", mutates_args=())
    def slow_double(x: Tensor) -> Tensor:
        if box.log:
            signal.raise_signal(signal.SIGALRM)
        return x * 2

    def body(box: Box, x: Tensor) -> Tensor:
        box.last = x + 1
        box.sums.add_(x.sum(0))
        y: Tensor = slow_double(x)
        box.before = y
        return y + 1

    def ring(*_: Any) -> None:
        raise _Late

    box = Box()
    run, before = capture(body), signal.signal(signal.SIGALRM, ring)
    try:
        with torch.no_grad():
            for turn in range(6):
                run(box, numbers(turn, 2, 3))
            box.log.append(1)
            sums, x = box.sums.clone(), numbers(9, 2, 3)
            with pytest.raises(_Late):
                run(box, x)
            box.log.clear()
        assert bits(box.last) == bits(x + 1)
        assert bits(box.sums) == bits(sums + x.sum(0))
        assert bits(box.before) == bits(numbers(5, 2, 3) * 2)
    finally:
        signal.signal(signal.SIGALRM, before)
