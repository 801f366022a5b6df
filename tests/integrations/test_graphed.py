"""``make_graphed_callables`` on captured functions, against an eager twin."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import mark_step_begin, recordings
from capture.integrations.graphed import make_graphed_callables
from capture.tree import step
from tests.support.device import AGAIN, DEVICE, rng_state
from tests.support.graphed import STEPS, Block, bits, bodies, both, rand, same, state, train, twins
from tests.support.graphed import fresh as fresh


@pytest.mark.parametrize("marks", [False, True])
def test_a_module_replays_from_the_first_call_on(marks: bool) -> None:
    mark = mark_step_begin if marks else bool
    mark()
    mine, theirs = twins(Block)
    assert make_graphed_callables(mine, (rand(4, 6),)) is mine
    assert isinstance(mine, Block)
    before = recordings(mine)
    for number in range(STEPS):
        mark()
        both(train, mine, theirs, number)
    now = recordings(mine)
    assert (now.body_runs, now.recordings, now.eager_calls) == (before.body_runs, before.recordings, 0)
    assert now.replays - before.replays == 2 * STEPS, "forward and backward of each step"


@pytest.mark.parametrize("between", ["nothing", "eager code"])
def test_a_chain_replays_from_the_first_pass_on(between: str) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(6, 8), Block(8, 8), Block(8, 2)])

        @override
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) if between == "nothing" else block(x) * 2
            return x

    mine, theirs = twins(Chain)
    samples = ((rand(4, 6),), (rand(4, 8, grad=True),), (rand(4, 8, grad=True),))
    given = make_graphed_callables(tuple(mine.blocks), samples)
    assert type(given) is tuple
    assert all(got is expected_block for got, expected_block in zip(given, mine.blocks, strict=True))
    before = bodies(*mine.blocks)
    for number in range(STEPS):
        both(train, mine, theirs, number)
    # eager code between the blocks saves the outputs of the first two
    again = 2 * AGAIN if between == "eager code" else 0
    assert bodies(*mine.blocks) == before + again


def test_each_of_a_tuple_runs_alone() -> None:
    """Forward passes replay at once, and so does the backward pass after one of them alone."""
    mine, theirs = twins(lambda: nn.ModuleList([Block(), Block()]))
    make_graphed_callables((mine[0], mine[1]), ((rand(4, 6),), (rand(4, 6),)))
    before = bodies(*mine)
    for number in range(STEPS):
        both(lambda model, number: model[number % 2](rand(4, 6, seed=number)), mine, theirs, number)
    assert bodies(*mine) == before
    for number in range(STEPS):
        both(lambda model, number: train(model[1], number), mine, theirs, number)
    assert bodies(*mine) == before
    for number in range(STEPS):
        with torch.no_grad():
            both(lambda model, number: model[number % 2](rand(4, 6, seed=number)), mine, theirs, number)


def test_a_function_and_what_it_names() -> None:
    weight = rand(6, 3, seed=1, grad=True)
    twin_weight = weight.detach().clone().requires_grad_()

    def of(weight: Tensor) -> Callable[..., dict[str, Any]]:
        def body(x: Tensor, y: Tensor) -> dict[str, Any]:
            hidden = torch.tanh(x @ weight)
            return {"sum": hidden + y, "parts": (hidden * 2, y.detach().cos()), "three": 3}

        return body

    mine = make_graphed_callables(of(weight), (rand(4, 6, grad=True), rand(4, 3)))
    theirs = of(twin_weight)
    assert weight.grad is None
    before = bodies(mine)
    for number in range(STEPS):
        values = []
        for run, leaf in ((mine, weight), (theirs, twin_weight)):
            x, y = rand(4, 6, seed=number, grad=True), rand(4, 3, seed=number + 50)
            result = run(x, y=y)
            (result["sum"].square().mean() + result["parts"][0].square().mean()).backward()
            values.append(bits([result, x.grad, leaf.grad]))
        assert values[0] == values[1], number
    assert bodies(mine) == before


def test_results_without_gradients() -> None:
    with torch.no_grad():
        mine, theirs = twins(Block)
        f, g = make_graphed_callables((mine, torch.cos), ((rand(4, 6),), (rand(4, 6),)))
        before = bodies(f, g)
        for number in range(STEPS):
            torch.manual_seed(number)
            expected = torch.cos(theirs(rand(4, 6, seed=number)))
            torch.manual_seed(number)
            same(g(f(rand(4, 6, seed=number))), expected)
        assert bodies(f, g) == before


def test_values_that_are_no_tensors_and_nested_samples() -> None:
    def body(pair: tuple[Tensor, Tensor], scale: float, mask: Tensor | None = None) -> Tensor:
        y = torch.relu(pair[0] + pair[1]) * scale
        return y if mask is None else y * mask

    mine = make_graphed_callables(body, ((rand(3, grad=True), rand(3, seed=1)), 2.0, None))
    before = bodies(mine)
    for number in range(STEPS):
        x, y = rand(3, seed=number, grad=True), rand(3, seed=number, grad=True)
        for run, leaf in ((mine, x), (body, y)):
            run((leaf, rand(3, seed=9)), 2.0).square().mean().backward()
        same([x.grad], [y.grad])
    assert bodies(mine) == before


def test_one_tensor_as_two_samples() -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x) * y

    sample = rand(4, grad=True)
    mine = make_graphed_callables(body, (sample, sample))
    assert sample.grad is None
    before = bodies(mine)
    for number in range(STEPS):
        grads = []
        for run in (mine, body):
            x = rand(4, seed=number, grad=True)
            run(x, x).square().mean().backward()
            grads.append(bits(x.grad))
        assert grads[0] == grads[1]
    assert bodies(mine) == before


def test_autocast_with_its_cache() -> None:
    mine, theirs = twins(lambda: Block(drop=0.0))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        with torch.no_grad():
            mine.a(rand(4, 6))
        make_graphed_callables(mine, (rand(4, 6),))
        assert torch.is_autocast_enabled(DEVICE.type)
        assert torch.is_autocast_cache_enabled()
        before = bodies(mine)
        for number in range(STEPS):
            both(lambda model, number: F.mse_loss(model(rand(4, 6, seed=number)), rand(4, 6)).backward(),
                 mine, theirs, number)  # fmt: skip
        torch.clear_autocast_cache()
    for number in range(STEPS):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            both(lambda model, number: F.mse_loss(model(rand(4, 6, seed=number)), rand(4, 6)).backward(),
                 mine, theirs, number)  # fmt: skip
    assert bodies(mine) == before


class Messy(nn.Module):
    """Writes buffers, arguments, attributes and containers, and draws from two generators."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = Block(), torch.Generator(DEVICE).manual_seed(7)
        self.seen: Tensor | None = None
        self.table = {"a": torch.zeros(6, device=DEVICE)}

    @override
    def forward(self, x: Tensor, work: Tensor) -> Tensor:
        work.add_(x.detach())
        y: Tensor = self.inner(x) + torch.rand(6, generator=self.own, device=DEVICE)
        self.seen = y.detach() * 2
        self.table["a"].add_(y.detach().sum(0))
        return y + torch.rand(6, device=DEVICE)


def test_no_trace_is_left() -> None:
    mine = Messy().to(DEVICE)
    mine.inner.a.weight.grad = torch.ones(6, 6, device=DEVICE)
    calls: list[str] = []
    note = calls.append  # a builtin method, which a watched run does not take for a side effect
    mine.inner.a.weight.register_hook(lambda _: note("parameter"))
    mine.register_forward_hook(lambda *_: note("module"))
    mine.register_full_backward_hook(lambda *_: note("module"))
    sample, work = rand(4, 6, grad=True), rand(4, 6, seed=1)
    sample.register_hook(lambda _: note("sample"))
    parts = (mine.inner.a.weight, mine.inner.a.weight.grad, mine.table["a"], mine.inner.norm.running_mean)

    def all_state() -> Any:
        values = [state(mine), bits(mine.table["a"]), bits(sample), bits(work)]
        return [*values, bits(mine.own.get_state()), bits(rng_state()), bits(torch.get_rng_state())]

    before, marks = all_state(), step.steps_begun()
    make_graphed_callables(mine, (sample, work))
    assert all_state() == before
    now = (mine.inner.a.weight, mine.inner.a.weight.grad, mine.table["a"], mine.inner.norm.running_mean)
    assert all(part is part_now for part, part_now in zip(parts, now, strict=True))
    assert (mine.seen, sample.grad, work.grad, calls) == (None, None, None, [])
    assert step.steps_begun() == marks
    assert mine.inner.norm.num_batches_tracked == 0
    assert torch.is_grad_enabled()
    assert recordings(mine).recordings >= 2


def test_the_numbers_after_no_trace() -> None:
    runs = []
    for graphed in (False, True):
        torch.manual_seed(0)
        module = Messy().to(DEVICE)
        if graphed:
            make_graphed_callables(module, (rand(4, 6, grad=True), rand(4, 6)))
        results = []
        for number in range(STEPS):
            torch.manual_seed(number)
            x, work = rand(4, 6, seed=number, grad=True), rand(4, 6)
            y = module(x, work)
            y.square().mean().backward()
            assert module.seen is not None
            results.append(
                [bits(y), bits(x.grad), bits(work), bits(module.seen), bits(module.table["a"]), state(module)]
            )
        runs.append(results)
    assert runs[0] == runs[1]


def test_samples_are_not_kept() -> None:
    mine, _ = twins(Block)
    sample = rand(4, 6, grad=True)
    held = weakref.ref(sample.untyped_storage()), weakref.ref(sample)
    make_graphed_callables(mine, (sample,))
    del sample
    gc.collect()
    assert held[1]() is None
    assert held[0]() is None


def test_a_step_that_is_open_goes_on() -> None:
    """``make_graphed_callables`` in the middle of a step: outputs that the caller holds keep their values, and a
    pending backward pass gives eager's gradients."""
    mine, theirs = twins(lambda: nn.ModuleList([Block(), Block()]))
    make_graphed_callables(mine[0], (rand(4, 6),))
    losses = []
    for blocks in (mine, theirs):
        torch.manual_seed(3)
        y = blocks[0](rand(4, 6, seed=1))
        losses.append((y, y.square().mean()))
    make_graphed_callables(mine[1], (rand(4, 6, grad=True),))
    same(losses[0][0], losses[1][0])
    for _, loss in losses:
        loss.backward()
    assert state(mine) == state(theirs)
    for number in range(STEPS):
        both(lambda model, number: train(nn.Sequential(*model), number), mine, theirs, number)


def test_other_shapes_are_other_recordings() -> None:
    mine, theirs = twins(Block)
    make_graphed_callables(mine, (rand(4, 6),))
    for number in range(18):
        both(functools.partial(train, rows=(4, 3, 5)[number % 3]), mine, theirs, number)
    before = bodies(mine)
    for number in range(6):
        both(functools.partial(train, rows=(4, 3, 5)[number % 3]), mine, theirs, number)
    assert bodies(mine) == before
    assert recordings(mine).eager_calls == 0


def test_gradients_of_another_layout_are_another_recording() -> None:
    mine, theirs = twins(Block)
    make_graphed_callables(mine, (rand(4, 6),))
    before = bodies(mine)
    for number in range(STEPS):
        both(lambda model, number: model(rand(4, 6, seed=number)).sum().backward(), mine, theirs, number)
    assert bodies(mine) == before + 2


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_accumulate(to_none: bool) -> None:
    mine, theirs = twins(lambda: Block(drop=0.0))
    make_graphed_callables(mine, (rand(4, 6),))
    before, kept = bodies(mine), []

    def micro_batches(model: Any, number: int) -> Any:
        model.zero_grad(set_to_none=to_none)
        for part in range(3):
            F.mse_loss(model(rand(4, 6, seed=10 * number + part)), rand(4, 6, seed=99)).backward()
            kept.append([p.grad.clone() for p in model.parameters()])
        return [p.grad for p in model.parameters()]

    for number in range(STEPS):
        both(micro_batches, mine, theirs, number)
        same(kept[:3], kept[3:])
        kept.clear()
    assert bodies(mine) == before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_before_their_backwards(order: tuple[int, ...]) -> None:
    mine, theirs = twins(Block)
    make_graphed_callables(mine, (rand(4, 6),))

    def program(model: Any, number: int) -> Any:
        model.zero_grad()
        results = [model(rand(4, 6, seed=10 * number + index)) for index in range(3)]
        for index in order:
            results[index].square().mean().backward()
        return results

    for number in range(2 * STEPS):
        both(program, mine, theirs, number)
    assert recordings(mine).eager_calls == 0


def test_training_and_evaluation() -> None:
    """torch's function runs the other mode eagerly; here it has recordings of its own."""
    mine, theirs = twins(Block)
    make_graphed_callables(mine, (rand(4, 6),))

    def evaluate(model: Any, number: int) -> Any:
        model.eval()
        with torch.no_grad():
            y = model(rand(4, 6, seed=number))
        model.train()
        return y

    for number in range(2 * STEPS):
        both(train if number % 2 else evaluate, mine, theirs, number)
    before = bodies(mine)
    for number in range(4):
        both(train if number % 2 else evaluate, mine, theirs, number)
    assert bodies(mine) == before


def test_a_sample_in_evaluation_mode() -> None:
    mine, theirs = twins(lambda: Block().eval())
    make_graphed_callables(mine, (rand(4, 6),))
    before = bodies(mine)
    for number in range(STEPS):
        both(train, mine, theirs, number)
    assert bodies(mine) == before
    mine.train(), theirs.train()
    for number in range(STEPS):
        both(train, mine, theirs, number)


def test_parameters_and_buffers_come_go_and_move() -> None:
    mine, theirs = twins(Block)
    make_graphed_callables(mine, (rand(4, 6),))
    for number in range(3 * STEPS):
        for module in (mine, theirs):
            if number == 3:
                module.a.weight = nn.Parameter(module.a.weight.detach() * 2)
            if number == 6:
                module.a.bias.requires_grad_(False)
            if number == 9:
                module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
            if number == 12:
                module.norm = nn.BatchNorm1d(6, affine=False).to(DEVICE)
            for p in module.parameters():
                p.grad = torch.zeros_like(p)
        both(lambda model, number: model(rand(4, 6, seed=number)).square().mean().backward(), mine, theirs, number)


def test_hooks_that_are_there_before() -> None:
    mine, theirs = twins(lambda: Block(drop=0.0))
    seen: dict[int, list[Any]] = {id(mine): [], id(theirs): []}
    for net in (mine, theirs):
        notes = seen[id(net)]
        net.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        net.register_forward_hook(lambda module, args, y, notes=notes: notes.append(bits(y)))
        net.a.weight.register_hook(lambda grad, notes=notes: notes.append(bits(grad)))
    make_graphed_callables(mine, (rand(4, 6),))
    assert seen[id(mine)] == []
    for number in range(STEPS):
        both(train, mine, theirs, number)
    assert seen[id(mine)] == seen[id(theirs)]
    assert len(seen[id(mine)]) == 2 * STEPS


def test_a_buffer_that_needs_gradients() -> None:
    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((6,), 2.0, device=DEVICE, requires_grad=True))

        @override
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.scale)

    mine, theirs = Scaled(), Scaled()
    make_graphed_callables(mine, (rand(4, 6),))
    before = bodies(mine)
    for number in range(STEPS):
        for module in (mine, theirs):
            module(rand(4, 6, seed=number)).square().mean().backward()
        same([mine.scale.grad], [theirs.scale.grad])
    assert bodies(mine) == before


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int) -> None:
    """Calls of two modules in any order, with backward passes that come late, in another order, or never."""
    choose = random.Random(seed)
    mine, theirs = twins(lambda: nn.ModuleList([Block(), Block(drop=0.0)]))
    make_graphed_callables((mine[0], mine[1]), ((rand(4, 6),), (rand(4, 6, grad=True),)))
    pending: list[tuple[Tensor, Tensor]] = []
    for number in range(40):
        action = choose.choice(["call", "call", "chain", "back", "back", "drop", "zero", "rows", "eval"])
        index, rows, at = choose.randrange(2), choose.choice([2, 3]) if action == "rows" else 4, len(pending)
        at = choose.randrange(at) if at else 0
        if action == "back" and pending:
            for y in pending.pop(at):
                y.square().mean().backward()
        elif action == "drop" and pending:
            pending.pop(at)
        elif action == "zero":
            mine.zero_grad(), theirs.zero_grad()
        elif action in ("call", "chain", "rows", "eval"):
            results = []
            for modules in (mine, theirs):
                torch.manual_seed(number)
                modules.train(action != "eval")
                y = modules[index](rand(rows, 6, seed=number))
                results.append(modules[1 - index](y) if action == "chain" else y)
                modules.train()
            same(results[0], results[1])
            pending.append((results[0], results[1]))
        assert state(mine) == state(theirs), (number, action)
