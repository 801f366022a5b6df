"""Training steps whose parameters, gradients, hooks or flags change between calls, against an eager twin."""

from __future__ import annotations

import itertools
import random
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import CaptureWarning, capture, config, mark_step_begin, recordings, release
from capture.torch_private import capabilities
from tests.generated.runner import quickly
from tests.support.device import DEVICE, know_nothing_of_writes, refuses_kept_nodes
from tests.support.trainers import (
    STEPS,
    Body,
    Trainer,
    batches,
    bits,
    clipped_step,
    flat_step,
    gradients_step,
    pair,
    plain_step,
    run,
    zeroing_at_the_end,
    zeroing_step,
)
from tests.support.trainers import fresh as fresh


def test_a_parameter_added_to_the_optimizer_later() -> None:
    mine, step, theirs, eager = pair(plain_step)
    run(mine, step, theirs, eager, batches(6))
    for one in (mine, theirs):
        torch.manual_seed(3)
        one.model.b = nn.Linear(8, 3).to(DEVICE)
        one.optimizer.add_param_group({"params": list(one.model.b.parameters())})
    run(mine, step, theirs, eager, batches(6, seed=1))


def test_frozen_and_unfrozen_parameters() -> None:
    mine, step, theirs, eager = pair(plain_step)
    for frozen in (False, True, False):
        for one in (mine, theirs):
            next(iter(one.model.parameters())).requires_grad_(not frozen)
        run(mine, step, theirs, eager, batches(5))


def test_hooks_on_tensors_run_or_are_named() -> None:
    mine, step, theirs, eager = pair(plain_step)
    counts = [0, 0]
    for index, trained in enumerate((mine, theirs)):

        def hook(grad: Tensor, index: int = index) -> Tensor:
            counts[index] += 1
            return grad * counts[index]

        next(iter(trained.model.parameters())).register_hook(hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        run(mine, step, theirs, eager, batches(STEPS))
    assert counts[0] == counts[1]


@pytest.mark.one_in(18)
@pytest.mark.parametrize("seed", quickly(range(12), 2))
@pytest.mark.parametrize("knows", [True, False], ids=["as it is", "as with graphs"])
@pytest.mark.parametrize("body", [plain_step, clipped_step, zeroing_step, flat_step])
def test_gradients_are_true_whatever_happens_between_steps(
    body: Body, knows: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows:
        know_nothing_of_writes(monkeypatch)
    chance = random.Random(seed)
    mine, step, theirs, eager = pair(body)
    look = capture(lambda x: mine.model(x).sum(), max_recordings=3)
    kept: list[tuple[Any, Any]] = []
    sizes = itertools.cycle([1, 2, 3, 4])

    def act(name: str) -> None:
        parameters = [list(trained.model.parameters()) for trained in (mine, theirs)]
        at = chance.randrange(len(parameters[0]))
        if name == "another function":
            with torch.no_grad():
                look(torch.ones(next(sizes), 6, device=DEVICE))
        elif name == "keep":
            kept.append((parameters[0][at].grad, parameters[1][at].grad))
        elif name == "keep a view":
            kept.append(tuple(None if p[at].grad is None else p[at].grad[:1] for p in parameters))  # type: ignore[arg-type, index]
        elif name == "write":
            for p in parameters:
                if p[at].grad is not None:
                    p[at].grad.add_(1)  # type: ignore[union-attr]
        elif name == "replace":
            for p in parameters:
                p[at].grad = torch.ones_like(p[at])
        elif name == "mark":
            mark_step_begin()
        elif name == "release":
            release(step)

    actions = ["another function", "keep", "keep a view", "write", "replace", "mark", "mark", "release"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for data in batches(30, seed):
            run(mine, step, theirs, eager, [data])
            for name in chance.sample(actions, chance.choice((0, 0, 1, 2))):
                act(name)
                assert mine.values() == theirs.values(), name
                assert [bits(grad) for grad, _ in kept] == [bits(expected) for _, expected in kept], name


def _accumulate(t: Trainer, x: Tensor, y: Tensor) -> None:
    F.mse_loss(t.model(x), y).backward()


def _update(t: Trainer, x: Tensor, y: Tensor) -> None:
    t.optimizer.step()


def _clip(t: Trainer, x: Tensor, y: Tensor) -> Tensor:
    return nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)


def _zero(t: Trainer, x: Tensor, y: Tensor) -> None:
    t.model.zero_grad(set_to_none=False)


def _by_hand(t: Trainer, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        for p in t.model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("body", [_accumulate, _update, _clip, _zero, _by_hand, zeroing_at_the_end])
def test_gradients_that_come_and_go_between_steps(body: Body) -> None:
    """Whether there is a gradient decides what is accumulated, updated, clipped and zeroed."""
    mine, step, theirs, eager = pair(body, "sgd")

    def grads(*positions: int) -> None:
        for one in (mine, theirs):
            for index, p in enumerate(one.model.parameters()):
                p.grad = torch.ones_like(p) if index in positions else None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # CG204: a gradient of the caller's is set to None
        for number, positions in enumerate([(), (), (1,), (), (0, 1, 2, 3, 4, 5), (2,)]):
            for data in batches(3, seed=number):
                grads(*positions)
                run(mine, step, theirs, eager, [data])
            run(mine, step, theirs, eager, batches(3, seed=number + 50))
    assert recordings(step).replays


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", [plain_step, gradients_step])
def test_hooks_that_come_and_go_between_steps(body: Body) -> None:
    mine, step, theirs, eager = pair(body)
    run(mine, step, theirs, eager, batches(5))
    handles = [
        next(iter(trained.model.parameters())).register_hook(lambda grad: grad * 2) for trained in (mine, theirs)
    ]
    run(mine, step, theirs, eager, batches(5, seed=1))
    for handle in handles:
        handle.remove()
    run(mine, step, theirs, eager, batches(5, seed=2))
    assert recordings(step).replays >= 6


def test_training_flags_of_a_model_that_the_body_names() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).to(DEVICE)
    inner = [lambda x: model(x)]
    functions = [capture(lambda x: model(x)), capture(lambda x: inner[0](x))]
    with torch.no_grad():
        for turn in range(6):
            model.train(turn % 2 == 0)
            for f, (x, _) in itertools.product(functions, batches(4, seed=turn)):
                torch.manual_seed(turn)
                with config.patch(enabled=False):
                    right = f(x)
                torch.manual_seed(turn)
                assert bits(f(x)) == bits(right)
    assert all(recordings(f).replays >= 12 and recordings(f).recordings <= 4 for f in functions)


@refuses_kept_nodes
@pytest.mark.parametrize("optimizer", ["sgd fused", "adamw fused", "sgd momentum"])
def test_steps_count_as_writes_where_eagers_do(optimizer: str) -> None:
    """A step counts as a write to parameters exactly where eager's does. Fused optimizers' steps do not count, so a
    pending backward pass goes through, with eager's values."""
    mine, step, theirs, eager = pair(plain_step, optimizer)
    for number, data in enumerate(batches(8)):
        losses = [F.mse_loss(trained.model(data[0]), data[1]) for trained in (mine, theirs)]
        run(mine, step, theirs, eager, [data])
        errors = []
        for loss in losses:
            try:
                loss.backward()
            except RuntimeError as error:
                errors.append("modified by an inplace operation" in str(error))
        assert errors in ([], [True, True]), number
        assert mine.values() == theirs.values()


def versions(*trainers: Trainer) -> list[list[int]]:
    """Version counters of all gradients."""
    return [[p.grad._version for p in one.model.parameters() if p.grad is not None] for one in trainers]


def all_rose(before: list[list[int]], after: list[list[int]]) -> bool:
    """Whether each number rose."""
    return all(a > b for old, new in zip(before, after, strict=True) for b, a in zip(old, new, strict=True))


def test_gradients_zeroed_after_a_fused_step_say_so() -> None:
    def body(t: Trainer, x: Tensor, y: Tensor) -> None:
        t.optimizer.step()
        torch._foreach_zero_([p.grad for p in t.model.parameters() if p.grad is not None])

    mine, step, theirs, eager = pair(body, "sgd fused")
    for trained in (mine, theirs):
        _accumulate(trained, *batches(1)[0])
    for data in batches(6):
        before = versions(mine, theirs)
        run(mine, step, theirs, eager, [data])
        now = versions(mine, theirs)
        assert all_rose(before[:1], now[:1])
        assert all_rose(before, now) or DEVICE.type == "cuda", "eager's do not rise there before torch 2.13"


def test_gradients_of_frozen_parameters() -> None:
    mine, step, theirs, eager = pair(zeroing_step)
    for number, frozen in enumerate((False, True, False, True)):
        for trained in (mine, theirs):
            for p in list(trained.model.parameters())[:2]:
                p.requires_grad_(not frozen)
                p.grad = torch.ones_like(p)
        for data in batches(4, seed=number):
            before = versions(mine, theirs)
            run(mine, step, theirs, eager, [data])
            grown = versions(mine, theirs)
            assert all_rose([counts[:2] for counts in before], [counts[:2] for counts in grown])


def test_a_graph_that_saved_a_gradient_keeps_it() -> None:
    mine, step, theirs, eager = pair(plain_step)
    data = batches(3)
    factor = torch.ones((), device=DEVICE, requires_grad=True)
    step(*data[0]), eager(*data[0])
    for x, y in data[1:]:
        first, twin = next(mine.model.parameters()), next(theirs.model.parameters())
        assert first.grad is not None
        assert twin.grad is not None
        with torch.enable_grad():
            saved, right = (factor * first.grad).sum(), (factor * twin.grad).sum()
        step(x, y), eager(x, y)
        assert torch.equal(*[torch.autograd.grad(total, factor)[0] for total in (saved, right)])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("holds", ["nothing", "a gradient", "a view", "what is below", "all"])
def test_watched_steps_free_the_gradients_that_they_drop(holds: str) -> None:
    """A watched step frees dropped gradients as early as an eager step. Gradients that somebody holds keep their
    values."""
    mine, step, theirs, eager = pair(plain_step)
    data = batches(3)
    step(*data[0]), eager(*data[0])  # not by run(): it looks at values, and NumPy then keeps storages from shrinking
    gradients = [p.grad for p in mine.model.parameters() if p.grad is not None]
    alive = [weakref.ref(grad.untyped_storage()) for grad in gradients]
    kept: Any = {
        "nothing": [], "a gradient": gradients[:1], "a view": [gradients[0][:1]],
        "what is below": [gradients[0].untyped_storage()], "all": list(gradients),
    }[holds]  # fmt: skip
    if holds == "what is below":
        kept = [torch.empty(0, device=DEVICE).set_(kept[0])]
    values = [tensor.clone() for tensor in kept]
    del gradients
    before = [storage for reference in alive if (storage := reference()) is not None]
    freed: list[int] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor) -> Tensor:
            freed.extend(index for index, storage in enumerate(before) if not storage.nbytes())
            return x.clone()

        @staticmethod
        @override
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    handle = mine.model.register_forward_hook(lambda module, given, out: Probe.apply(out))  # type: ignore[no-untyped-call]
    step(*data[1]), eager(*data[1])
    handle.remove()
    assert recordings(step).observations == 2
    if capabilities.CAPABILITIES.storage_weakref:
        held = {"nothing": 0, "all": len(before)}.get(holds, 1)
        assert len(freed) == len(before) - held
    run(mine, step, theirs, eager, data[2:])
    assert all(map(torch.equal, kept, values))
