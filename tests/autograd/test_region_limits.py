"""Bodies that cannot be a region run eagerly with a finding; random orders of passes; checkpoints; saved tensors."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from capture import (
    CaptureWarning,
    capture,
    config,
    mark_step_begin,
    recordings,
)
from capture.tree import thread_trees
from tests.generated.runner import quickly
from tests.support.device import DEVICE
from tests.support.regions import (
    EAGER,
    STEPS,
    Block,
    Wrapped,
    bits,
    both,
    captured_twins,
    forward_and_back,
    inputs,
    replayed,
    twins,
)
from tests.support.regions import fresh as fresh


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", EAGER)
def test_what_cannot_be_cut_off_runs_eagerly(name: str) -> None:
    mine, theirs = twins(lambda: Wrapped(Block(drop=0.2)))
    run = capture(lambda model, x: EAGER[name](model.m[0], x))

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        out = run(model, x)
        out = out if isinstance(out, tuple) else (out,)
        sum(one.square().sum() for one in out).backward()
        return [*out, x.grad]

    with pytest.warns(CaptureWarning, match="CG501"):
        both(step, mine, theirs)
    assert recordings(run).replays == 0


def test_an_argument_that_needs_gradients_and_is_written() -> None:
    run = capture(lambda x: x.mul_(2).tanh())

    def step(f: Callable[[Tensor], Tensor], number: int) -> list[Any]:
        leaf = inputs(number).requires_grad_()
        x = leaf * 1
        y = f(x)
        (y.sum() + x.sum()).backward()
        return [bits(y), bits(x), bits(leaf.grad)]

    with pytest.warns(CaptureWarning, match="CG501.*x is written"):
        assert all(step(lambda x: x.mul_(2).tanh(), number) == step(run, number) for number in range(5))
    assert recordings(run).replays == 0


def test_state_left_with_a_graph() -> None:
    class Net(Block):
        last: Any = None

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last * 2  # type: ignore[no-any-return]

    mine, theirs = captured_twins(Net)

    def step(model: Any, number: int) -> Any:
        model.zero_grad()
        y = model.m[0](inputs(number))
        (y.sum() + model.m[0].last.square().sum()).backward()
        return [y]

    both(step, mine, theirs)
    replayed(mine)


def test_a_closure_tensor_with_a_graph_of_its_own() -> None:
    logs = []
    for enabled in (False, True):
        torch.manual_seed(0)
        base = torch.randn(6, 6, device=DEVICE, requires_grad=True)
        held: dict[str, Any] = {}
        log = []

        def body(x: Tensor) -> Tensor:
            return torch.tanh(x @ held["w"])  # noqa: B023

        f = capture(body) if enabled else body
        for number in range(12):
            base.grad = None
            held["w"] = base * number if number not in (3, 7) else base.detach().requires_grad_()
            f(inputs(number)).sum().backward()
            log += [bits(base.grad), bits(held["w"].grad) if number in (3, 7) else None]
        logs.append(log)
    assert logs[0] == logs[1]
    assert recordings(f).replays >= 8


def test_regions_die_with_their_modules() -> None:
    def run() -> list[Any]:
        import weakref

        mine, _ = captured_twins(Block)
        for number in range(6):
            mine.m[0](inputs(number)).sum().backward()
        replayed(mine)
        return [weakref.ref(mine.m[0].a.weight), weakref.ref(mine.m[0])]

    references = run()
    gc.collect()
    for tree in thread_trees.trees_here().values():
        tree.sweep()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_nothing_is_kept_after_a_step() -> None:
    """Tensors that autograd saved are freed with the backward pass, as in eager."""
    mine, _ = captured_twins(Block)
    for number in range(8):
        mine.m[0](inputs(number)).sum().backward()
        mine.zero_grad()
    tree = next(iter(thread_trees.trees_here().values()))
    assert not tree.live_blocks()


class Play:
    """A random program over four regions: actions of a training loop in any order. Its choices depend on ``seed``
    alone."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.random = model, random.Random(seed)
        self.pending: list[tuple[Tensor, list[Tensor]]] = []
        self.kept: list[tuple[Any, Any]] = []
        self.values: list[Tensor] = [inputs(seed)]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def act(self, number: int) -> list[Any]:
        """Do one action, and give what it computed."""
        choices = ["forward"] * 5 + ["chain"] * 2 + ["backward"] * 5
        choices += ["drop", "zero", "step", "keep", "grad", "eval", "mark"]
        action = self.random.choice(choices)
        result: list[Any] = getattr(self, action)(number)
        return [*result, *[(bits(one), bits(copied)) for one, copied in self.kept]]

    def block(self) -> Any:
        return self.random.choice(list(self.model.m))

    def forward(self, number: int) -> list[Any]:
        x = self.random.choice([inputs(number), self.values[-1].detach(), inputs(number).requires_grad_()])
        y = self.block()(x)
        self.values = [*self.values[-3:], y]
        self.pending.append((y.square().mean(), [x]))
        return [bits(y)]

    def chain(self, number: int) -> list[Any]:
        x = inputs(number).requires_grad_(self.random.random() < 0.5)
        y = x
        for _ in range(self.random.randint(2, 3)):
            y = self.block()(y)
        self.pending.append((y.sum() * 0.1, [x]))
        return [bits(y)]

    def backward(self, number: int) -> list[Any]:
        if not self.pending:
            return []
        index = self.random.randrange(len(self.pending))
        loss, leaves = self.pending[index]
        retain = self.random.random() < 0.3
        if not retain:
            del self.pending[index]
        try:
            loss.backward(retain_graph=retain)
        except RuntimeError as error:  # torch's error: parameters were written between the two passes
            return [type(error).__name__, "modified by an inplace operation" in str(error)]
        return [bits(loss), *[bits(leaf.grad) for leaf in leaves if leaf.is_leaf]]

    def grad(self, number: int) -> list[Any]:
        block = self.block()
        y = block(inputs(number))
        found = torch.autograd.grad(y.sum(), [block.a.weight, block.b.bias])
        self.kept = [*self.kept[-3:], *((one, one.clone()) for one in found)]
        return list(map(bits, found))

    def drop(self, number: int) -> list[Any]:
        self.pending = self.pending[len(self.pending) // 2 :]
        return []

    def zero(self, number: int) -> list[Any]:
        self.model.zero_grad(set_to_none=self.random.random() < 0.5)
        return []

    def step(self, number: int) -> list[Any]:
        if self.random.random() < 0.8:
            self.pending.clear()
        self.optimizer.step()
        return []

    def keep(self, number: int) -> list[Any]:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if grads:
            one = self.random.choice(grads)
            self.model.zero_grad()
            self.kept = [*self.kept[-3:], (one, one.clone())]
        return []

    def eval(self, number: int) -> list[Any]:
        with torch.no_grad():
            return [bits(self.block()(inputs(number)))]

    def mark(self, number: int) -> list[Any]:
        if self.random.random() < 0.2:
            mark_step_begin()
        return []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("poison", [False, True], ids=["plain", "poisoned"])
@pytest.mark.parametrize("seed", quickly(range(30), 1))
def test_random_programs(seed: int, poison: bool) -> None:
    makers = (Block, lambda: Block(drop=0.2), Block, lambda: Block(drop=0.2))
    mine, theirs = captured_twins(*makers, outputs=("preserve", "clone")[seed % 5 == 4])
    plays = {id(model): Play(model, seed) for model in (mine, theirs)}
    with config.patch(poison=poison), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # CG901: more places in the tree than recordings
        both(lambda model, number: (plays[id(model)].act(number),), mine, theirs, 80)
    replayed(mine, 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_region(reentrant: bool) -> None:
    """A checkpoint without ``use_reentrant`` puts hooks on saved tensors, which must see what eager saves: functions
    run inline under them, with a finding."""
    mine, theirs = captured_twins(lambda: Block(drop=0.3))

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        y: Tensor = checkpoint(model.m[0], x, use_reentrant=reentrant)
        y.square().mean().backward()
        return y

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        both(step, mine, theirs)
    assert ["CG805" in str(warning.message) for warning in caught] == ([] if reentrant else [True])
    counts = recordings(mine.m[0])
    assert (bool(counts.replays), counts.eager_calls) == ((True, 0) if reentrant else (False, 2 * STEPS))


def test_hooks_on_saved_tensors_see_what_eager_saves() -> None:
    mine, theirs = captured_twins(Block)
    seen: dict[int, list[Any]] = {id(mine): [], id(theirs): []}

    def step(model: Any, number: int) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            seen[id(model)].append(tuple(tensor.shape))
            return tensor * 2 if tensor.dim() == 2 else tensor

        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y: Tensor = model.m[0](inputs(number))
        y.square().mean().backward()
        return y

    both(forward_and_back, mine, theirs)
    with pytest.warns(CaptureWarning, match="CG805"):
        both(step, mine, theirs)
    assert seen[id(mine)] == seen[id(theirs)]


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_weight_whose_cast_autocast_has_cached() -> None:
    """Autocast's cache has a weak reference to the weight, and torch swaps no such tensor: the cache is emptied
    first."""
    mine, theirs = captured_twins(lambda: nn.Linear(6, 6))

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            with config.patch(enabled=False):
                model.m[0](inputs(number))
            y: Tensor = model.m[0](inputs(number + 100)).float()
        y.square().mean().backward()
        return y

    both(step, mine, theirs)
    replayed(mine)


def test_what_autograd_saved_may_be_kept() -> None:
    """``grad_fn.saved_tensors`` gives tensors that a region saves between its passes: whoever keeps them keeps their
    values, and without holders the same objects serve again."""
    module = capture(Block()).to(DEVICE)
    held: list[tuple[Any, list[Any]]] = []
    for number in range(14):
        mark_step_begin()
        y = module(inputs(number))
        if number % 3 == 1:
            saved = y.grad_fn.saved_tensors
            held.append((saved, [bits(tensor) for tensor in saved]))
        if number % 4 != 2:
            y.square().sum().backward()
        for kept, values in held:
            assert [bits(tensor) for tensor in kept] == values
        if number == 9:
            held.clear()
    assert recordings(module).replays >= 10


def test_a_parameter_unfrozen_before_the_recording() -> None:
    """The run that first shows that gradients are needed has saved an input in the pool, so it does not become a
    recording."""
    logs = []
    for enabled in (False, True):
        torch.manual_seed(0)
        holder = nn.Linear(6, 6, bias=False, device=DEVICE).requires_grad_(False)

        def body(x: Tensor) -> Tensor:
            return torch.tanh(x @ holder.weight.t())  # noqa: B023

        f = capture(body) if enabled else body
        f(inputs(0))
        holder.requires_grad_(True)
        results = [f(inputs(number)) for number in range(4)]
        log = []
        for y in results:
            holder.weight.grad = None
            y.square().mean().backward()
            log.append(bits(holder.weight.grad))
        logs.append(log)
    assert logs[0] == logs[1]


def test_memory_of_a_parameter_replaced_before_the_backward() -> None:
    """A view that the graph saved keeps its memory when ``.data`` of the parameter is set."""
    mine, theirs = twins(lambda: Wrapped(nn.Linear(6, 6), nn.Linear(6, 6)))
    capture(mine.m[0])

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        y = torch.tanh(model.m[0](x))
        model.m[0].weight.data = inputs(number + 9, 6, 6)
        y.square().mean().backward()
        return [y, x.grad]

    both(step, mine, theirs)
    assert recordings(mine.m[0]).replays >= STEPS


def test_gradients_switched_on_inside_alone() -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 1)

        @override
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(torch.tanh(self.net(x)).sum(), x, create_graph=True)
            return force, x.detach() * 2 + self.net.bias

    mine, theirs = captured_twins(Forces)
    for number in range(STEPS):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", CaptureWarning)
            right, results = theirs.m[0](inputs(number)), mine.m[0](inputs(number))
        assert [bits(tensor) for tensor in results] == [bits(tensor) for tensor in right]
        assert (
            [tensor.requires_grad for tensor in results] == [True, False] == [tensor.requires_grad for tensor in right]
        )
    assert any("inside alone" in finding.what for finding in recordings(mine.m[0]).findings)
