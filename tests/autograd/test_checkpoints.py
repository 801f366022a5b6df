"""Checkpoints inside of what is captured: forward and backward are recorded apart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from typing_extensions import override

from capture import CaptureWarning, capture, recordings
from tests.support.device import DEVICE, EXECUTES
from tests.support.regions import Block, Wrapped, both, inputs, twins
from tests.support.regions import fresh as fresh


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _by_closure(m: Any, x: Tensor) -> Tensor:
    """Tensors that the block gets beside its arguments, as layers of transformers get their masks."""
    scale = x.mean() + 1
    found: Tensor = checkpoint(lambda y: m(y) * scale, x, use_reentrant=False)
    return found


def _nested(m: Any, x: Tensor) -> Tensor:
    def outer(y: Tensor) -> Tensor:
        return torch.tanh(checkpoint(m, y, use_reentrant=False))

    found: Tensor = checkpoint(outer, x, use_reentrant=False)
    return found


BODIES: dict[str, Callable[[Any, Tensor], Any]] = {
    "one block": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "several uses": lambda m, x: checkpoint(m, checkpoint(m, x, use_reentrant=False), use_reentrant=False) + m(x),
    "keywords": lambda m, x: checkpoint(functools.partial(torch.addcmul, value=2.0), x, m(x), x, use_reentrant=False),
    "closure": _by_closure,
    "nested": _nested,
    "sequence": lambda m, x: checkpoint_sequential([m, nn.Tanh(), m], 2, x, use_reentrant=False),
    "selective": lambda m, x: checkpoint(
        m, x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy)
    ),
}


@pytest.mark.one_in(18)
@pytest.mark.filterwarnings("ignore:.*draws on an accelerator:capture.CaptureWarning")
@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("name", BODIES)
def test_a_checkpoint_inside(name: str, drop: float) -> None:
    mine, theirs = twins(lambda: Wrapped(Block(drop=drop)))
    run = capture(lambda model, x: BODIES[name](model.m[0], x))

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        y, z = run(model, x), run(model, x * 2)  # the second one before the first one's backward pass
        (y.square().sum() + z.sum()).backward()
        return [y, z, x.grad, torch.rand(3)]

    both(step, mine, theirs)
    if drop and not EXECUTES:
        return  # told, and eager
    assert recordings(run).replays >= 8
    assert not any(finding.code == "CG501" and finding.severity.name != "NOTE" for finding in _findings(run))


def test_a_checkpoint_below_a_mode_of_torch_functions() -> None:
    """A default device is such a mode."""
    mine, theirs = twins(lambda: Wrapped(Block()))
    run = capture(lambda model, x: BODIES["one block"](model.m[0], x))

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        y = run(model, x)
        y.square().sum().backward()
        return [y, x.grad]

    with DEVICE:
        both(step, mine, theirs)
    assert recordings(run).replays >= 4


def _findings(run: Any) -> Any:
    from capture.api.decorator import captured_states

    return [one for state in captured_states(run) for one in state.findings.values()]


class _Counted(nn.Module):
    """Writes state once more when the backward pass runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 6)

    @override
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(self.norm(x))
        return found


def test_a_checkpointed_block_that_writes_state_is_eager() -> None:
    mine, theirs = twins(lambda: Wrapped(_Counted()))
    run = capture(lambda model, x: checkpoint(model.m[0], x, use_reentrant=False))

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        y = run(model, inputs(number))
        y.square().sum().backward()
        return [y]

    with pytest.warns(CaptureWarning, match=r"CG501.*writes state"):
        both(step, mine, theirs)
    assert recordings(run).replays == 0


def test_a_checkpoint_that_draws_anew_is_eager() -> None:
    mine, theirs = twins(lambda: Wrapped(Block(drop=0.3)))
    run = capture(lambda model, x: checkpoint(model.m[0], x, use_reentrant=False, preserve_rng_state=False))

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        y = run(model, inputs(number))
        y.square().sum().backward()
        return [y]

    with pytest.warns(CaptureWarning, match="CG501.*hooks on saved tensors"):
        both(step, mine, theirs)
    assert recordings(run).replays == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "split",
    [
        lambda y: y.chunk(2),
        lambda y: y.unbind(-1)[:3],
        lambda y: (*y.split([1, 2, 3], -1)[1:], y.sum()),
        lambda y: torch.unsafe_split(y, 2),
    ],
    ids=["chunk", "unbind", "split", "unsafe_split"],
)
def test_results_that_one_operator_cut_from_one_tensor(split: Callable[[Tensor], Any]) -> None:
    mine, theirs = twins(lambda: Wrapped(Block()))
    run = capture(lambda model, x: split(model.m[0](x)))

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        found = run(model, x)
        weights = [0.5, 0.0, 2.0]
        used = found if number % 2 else found[:1]
        sum((one * weight).square().sum() for one, weight in zip(used, weights, strict=False)).backward()
        return [*found, x.grad]

    both(step, mine, theirs)
    assert recordings(run).replays >= 4


def test_memory_of_a_block_is_given_back() -> None:
    """The recording pins no memory for the block's inputs, which a checkpoint keeps beside the graph."""
    model = Wrapped(Block()).to(DEVICE)
    run = capture(lambda x: checkpoint(model.m[0], x + 1, use_reentrant=False))
    for number in range(6):
        run(inputs(number)).sum().backward()
    assert recordings(run).replays >= 2
