"""A checkpointed block that runs again in the backward pass reads the values that are there then, as in eager."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from typing_extensions import override

from capture import CaptureWarning, capture, mark_step_begin, recordings
from tests.support.device import EXECUTES
from tests.support.regions import Block, Wrapped, bits, both, inputs, twins
from tests.support.regions import fresh as fresh


class Scaled(nn.Module):
    """A block that reads weights, a buffer and Python values."""

    table: Tensor

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.block, self.linear = Block(drop=drop), nn.Linear(6, 6)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 6))
        self.scale, self.turns = 2.0, 1

    @override
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.turns):
            x = torch.tanh(self.linear(self.block(x) * self.table) * self.scale)
        return x.exp()


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _nested(m: Any, x: Tensor) -> Tensor:
    def outer(y: Tensor) -> Tensor:
        return torch.tanh(checkpoint(m, y, use_reentrant=False))

    found: Tensor = checkpoint(outer, x, use_reentrant=False)
    return found


def _by_closure(m: Any, x: Tensor) -> Tensor:
    h, scale = m(x), x.mean() + 1
    found: Tensor = checkpoint(lambda: m(h) * scale, use_reentrant=False) + h.detach()
    return found


def _to_the_end(m: Any, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(m, x, use_reentrant=False, early_stop=False)
    return found


BODIES: dict[str, Callable[[Any, Tensor], Any]] = {
    "one block": lambda m, x: checkpoint(m, x, use_reentrant=False) * 2,
    "a block of a block": lambda m, x: checkpoint(m, checkpoint(m, m(x), use_reentrant=False), use_reentrant=False),
    "nested": _nested,
    "closure": _by_closure,
    "to the end": _to_the_end,
    "selective": lambda m, x: checkpoint(
        m, x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy)
    ),
    "a weight given": lambda m, x: checkpoint(lambda y, w: y @ w, m.linear(x), m.linear.weight, use_reentrant=False),
}


def _halve(m: Any) -> None:
    with torch.no_grad():
        for parameter in m.parameters():
            parameter.mul_(0.5)


def _halve_data(m: Any) -> None:
    for parameter in m.parameters():
        parameter.data.mul_(0.5)


def _replace(m: Any) -> None:
    m.linear.weight = nn.Parameter(m.linear.weight.detach() * 0.5)


def _load(m: Any) -> None:
    m.load_state_dict({name: value * 0.5 for name, value in m.state_dict().items()})


def _scale(m: Any) -> None:
    m.scale = 3.0 if m.scale == 2.0 else 2.0


def _step(m: Any) -> None:
    torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.0).step()


WRITES: dict[str, Callable[[Any], None]] = {
    "weights": _halve,
    "data of weights": _halve_data,
    "a replaced weight": _replace,
    "loaded": _load,
    "a buffer": lambda m: m.table.mul_(0.9),
    "an attribute": _scale,
    "an optimizer's step": _step,
}


def _outcome(loss: Tensor) -> str | None:
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)[:60]
    return None


def _written_between(run: Any, write: Callable[[Any], None], model: Any, number: int) -> list[Any]:
    """Losses, gradients and errors of one backward pass without a write before it, then of two losses with writes
    before the first or the second."""
    m = model.m[0]
    model.zero_grad()
    x = inputs(number).requires_grad_()
    run(m, x).square().sum().backward()
    first, second = run(m, x), run(m, x * 2)
    losses = [first.square().sum(), second.sum()]
    if number % 3 == 2:
        write(m)
    told = [_outcome(losses[0])]
    if number % 4 == 3:
        write(m)
    told.append(_outcome(losses[1]))
    if told != [None, None]:  # what was added to gradients before the error may differ: docs/training.md
        model.zero_grad()
        x.grad = None
    return [first, second, *told, x.grad, torch.rand(3)]


CASES = [("one block", write) for write in WRITES] + [(name, "weights") for name in BODIES if name != "one block"]
CASES += [("closure", "a replaced weight"), ("closure", "an attribute"), ("a block of a block", "a buffer")]


@pytest.mark.one_in(18)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize(("name", "write"), CASES)
def test_what_changes_before_the_backward_pass(name: str, write: str) -> None:
    mine, theirs = twins(lambda: Wrapped(Scaled()))
    run = capture(BODIES[name])
    both(functools.partial(_written_between, run, WRITES[write]), mine, theirs, 9)
    assert recordings(run).replays >= 5


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["one block", "a block of a block", "nested"])
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_blocks_that_draw(name: str) -> None:
    mine, theirs = twins(lambda: Wrapped(Scaled(0.4)))
    run = capture(lambda m, x: BODIES[name](m, x + torch.rand(6)))
    both(functools.partial(_written_between, run, _halve), mine, theirs, 12)
    if EXECUTES and name != "a block of a block":  # which also draws between two blocks
        assert recordings(run).replays >= 5


def test_draws_between_blocks_that_draw_are_eager() -> None:
    mine, theirs = twins(lambda: Wrapped(Block(drop=0.3)))

    @capture
    def run(m: Any, x: Tensor) -> Tensor:
        y = checkpoint(m, x, use_reentrant=False)
        found: Tensor = checkpoint(m, y + torch.rand(6), use_reentrant=False)
        return found

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        y = run(model.m[0], inputs(number))
        y.square().sum().backward()
        return [y, torch.rand(2)]

    with pytest.warns(CaptureWarning, match=r"CG501.*(draws between|draws on an acc)"):
        both(step, mine, theirs)
    assert recordings(run).replays == 0


def test_a_block_whose_closure_changes_is_eager() -> None:
    """Each checkpoint's closure reads the loop's variable, so eager runs the last block again for all of them."""
    mine, theirs = twins(lambda: Wrapped(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)))

    @capture
    def run(model: Any, x: Tensor) -> Tensor:
        for one in model.m:
            x = checkpoint(lambda y: torch.tanh(one(y)), x, use_reentrant=False)  # noqa: B023 - the mistake that is tested
        return x

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        y = run(model, inputs(number))
        y.square().sum().backward()
        return [y]

    with pytest.warns(CaptureWarning, match=r"CG501.*replaced later"):
        both(step, mine, theirs)


def test_an_argument_that_a_closure_reads() -> None:
    """Autograd checks what a block is given for writes, and does not check what its closure reads."""
    mine, theirs = twins(lambda: Wrapped(Block()))
    run = capture(lambda m, x, mask: checkpoint(lambda y: m(y) * mask, x * 1, use_reentrant=False))

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        x, mask = inputs(number), inputs(number + 50)
        y = run(model.m[0], x, mask)
        z = y.exp()
        if number % 3 == 2:
            mask.mul_(0.5)
        if number % 4 == 3:
            x.mul_(0.5)
        return [y, _outcome(z.sum())]

    both(step, mine, theirs, 12)
    assert recordings(run).replays >= 5


def test_other_tensors_than_in_the_forward_pass() -> None:
    """The block saves another number of tensors when it runs again: torch's own error comes out."""
    mine, theirs = twins(lambda: Wrapped(Scaled()))
    run = capture(BODIES["one block"])

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        m, m.turns = model.m[0], 2
        loss = run(m, inputs(number)).sum()
        m.turns = 1 if number % 3 == 2 else 2
        return [_outcome(loss)]

    both(step, mine, theirs, 9)
    assert recordings(run).replays >= 4


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["one block", "nested", "selective", "closure"])
def test_a_second_backward_pass(name: str) -> None:
    mine, theirs = twins(lambda: Wrapped(Scaled()))
    run = capture(BODIES[name])

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        loss = run(model.m[0], inputs(number).requires_grad_()).sum()
        told: list[str | None] = []
        for keeps in (number % 2 == 0, False):
            try:
                loss.backward(retain_graph=keeps)
                told.append(None)
            except RuntimeError as error:
                told.append(str(error)[:50])
        return told

    both(step, mine, theirs, 8)
    assert recordings(run).replays >= 4


def test_gradients_of_gradients_of_a_block() -> None:
    mine, theirs = twins(lambda: Wrapped(Scaled()))
    run = capture(BODIES["one block"])

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        m, x = model.m[0], inputs(number).requires_grad_()
        y = run(m, x)
        if number < 6:
            y.sum().backward()
            return [y, x.grad]
        _halve(m)
        (force,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        force.square().sum().backward()
        return [y, force, x.grad]

    both(step, mine, theirs, 7)
    assert recordings(run).replays >= 3


def test_accumulated_gradients_of_a_block() -> None:
    mine, theirs = twins(lambda: Wrapped(Scaled()))
    run = capture(BODIES["one block"], gradients="accumulate")

    def step(model: Any, number: int) -> list[Any]:
        mark_step_begin()
        model.zero_grad()
        loss = run(model.m[0], inputs(number)).sum()
        if number % 3 == 2:
            _halve(model.m[0])
        loss.backward()
        return [loss]

    both(step, mine, theirs, 10)
    assert recordings(run).replays >= 5


def test_blocks_keep_their_inputs_alone() -> None:
    """The recording of a forward pass keeps what eager keeps, and nothing that blocks compute again."""
    model, x = nn.Sequential(nn.Linear(8, 800), nn.Tanh(), nn.Linear(800, 8)), inputs(0, 64, 8)

    def handed_out(body: Any) -> int:
        run = capture(body)
        for _ in range(6):
            run(x).sum().backward()
        assert recordings(run).replays >= 2
        y = run(x)
        return sum(one.nbytes for one in y.grad_fn.frame.inner)

    whole = handed_out(lambda x: model(x) * 2)
    parts = handed_out(lambda x: checkpoint(model, x, use_reentrant=False) * 2)
    assert parts < whole / 10


def test_threads_go_back_through_one_block() -> None:
    mine, theirs = twins(lambda: Wrapped(Scaled()))
    run = capture(BODIES["closure"])
    for number in range(4):
        run(mine.m[0], inputs(number)).sum().backward()
    mine.zero_grad()
    grads: dict[int, Any] = {}

    def train(number: int) -> None:
        x = inputs(number).requires_grad_()
        (grads[number],) = torch.autograd.grad(run(mine.m[0], x).sum(), x)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        x = inputs(number).requires_grad_()
        (wanted,) = torch.autograd.grad(BODIES["closure"](theirs.m[0], x).sum(), x)
        assert bits(grads[number]) == bits(wanted)
