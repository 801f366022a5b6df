"""``torch.compile(backend="capture")``: compared bit for bit with eager twins; replays are counted.

The backend is passed as the function that the entry point names, so that the tests need no installed package.
"""

from __future__ import annotations

import importlib
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import config, mark_step_begin, plans, recordings
from capture.integrations.compile import backend
from tests.support.compiled import MODELS, STEPS, Block, Drops, compiled, counts, made, only, replayed, train, twins
from tests.support.compiled import compiler as compiler
from tests.support.device import DEVICE, rng_state, set_rng_state
from tests.support.nets import Mlp
from tests.support.rows import fresh as fresh
from tests.support.rows import rand, same, warned

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------------- registration


def test_the_entry_point_names_the_backend() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["capture"].partition(":")
    assert getattr(importlib.import_module(module), name) is backend


def test_by_name() -> None:
    if "capture" not in entry_points(group="torch_dynamo_backends").names:
        pytest.skip("the package is not installed, or was before it had the entry point")
    assert "capture" in torch.compiler.list_backends()
    f = torch.compile(lambda x: x.sin() * 2, backend="capture")
    for seed in range(STEPS):
        same(f(rand(3, seed=seed)), rand(3, seed=seed).sin() * 2)
    replayed("inference")


# -------------------------------------------------------------------------------------------- inference and training


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str) -> None:
    make, inputs = MODELS[name]
    net, twin = twins(make)
    f = compiled(net.eval(), fullgraph=True)
    twin.eval()
    with torch.no_grad():
        for seed in range(STEPS):
            same(f(inputs(seed)), twin(inputs(seed)))
    replayed("inference")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    make, inputs = MODELS[name]
    net, twin = twins(make)
    # eager code rounds differently on a GPU
    eager = twin if DEVICE.type == "cpu" else torch.compile(twin, backend="aot_eager")
    same(train(compiled(net), net, inputs), train(eager, twin, inputs))
    replayed("forward")
    replayed("backward")
    assert only("forward").kept_outputs == 0, "saved activations stay in the pool"
    assert only("backward").rebinds == 0


def test_saved_activations_and_parameters_are_not_copied() -> None:
    net, _ = twins(Mlp)
    train(compiled(net), net, lambda seed: rand(4, 8, seed=seed))
    forward, backward = (plans(graph)[0] for graph in made())
    copied = {one.path for one in forward.placeholders if one.policy.name == "COPY"}
    assert copied == {"l_x_"}
    assert {one.path: one.policy.name for one in backward.placeholders}["t_1"] == "STATIC", "a view of a parameter"
    assert any("depth 2" in event.detail for event in only("backward").events), "it follows the forward pass"


def test_inference_mode_and_no_grad_and_grad_take_turns() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    for seed in range(STEPS):
        x = rand(4, 8, seed=seed)
        with torch.no_grad():
            same(f(x), twin(x))
        with torch.inference_mode():
            same(f(x), twin(x))
        same(f(x), twin(x))
    assert all(replays >= STEPS - 2 and not eager for _, replays, eager in counts().values()), counts()


def test_dropout_draws_as_aot_eager_does() -> None:
    """AOTAutograd turns dropout into other operators than eager's, which draw other numbers from the same seed."""
    net, twin = twins(Drops)
    left: list[tuple[list[Tensor], Tensor]] = []
    for module, by in ((net, backend), (twin, "aot_eager")):
        torch.compiler.reset()
        torch.manual_seed(7)
        losses = train(torch.compile(module, backend=by), module, lambda seed: rand(4, 8, seed=seed))
        left.append((losses, rng_state()))
        if by is backend:
            replayed("forward")
    same(*left)
    set_rng_state(left[0][1])


def test_several_backward_passes_pending() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    for step in range(STEPS):
        for module in (net, twin):
            module.zero_grad()
        for run in (f, twin):
            losses = [run(rand(4, 8, seed=3 * step + index)).square().mean() for index in range(3)]
            losses[1].backward()
            (losses[0] + losses[2]).backward()
        same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert only("backward").replays > 0


def test_a_late_backward_pass() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    pending: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS + 1):
        x = rand(4, 8, seed=step)
        pending.append((f(x).square().mean(), twin(x).square().mean()))
        if step:
            ours, theirs = pending.pop(0)
            ours.backward()
            theirs.backward()
            same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])


def test_gradients_of_inputs_in_the_middle_of_a_graph() -> None:
    """A graph whose input has a graph of its own, which the forward pass saves."""
    net, twin = twins(Mlp)
    f = compiled(net)

    def gradients(run: Any, parameters: Mlp, seed: int) -> tuple[Tensor, ...]:
        x = rand(4, 8, seed=seed).requires_grad_()
        return torch.autograd.grad(run(x.sin() * 2).square().sum(), [x, *parameters.parameters()])

    for seed in range(STEPS):
        same(gradients(f, net, seed), gradients(twin, twin, seed))
    replayed("forward")


def test_a_backward_pass_without_its_forward_pass_does_not_shift_the_steps() -> None:
    """One backward pass without a captured forward pass must not become the begin of each later step: the step would
    then end between forward and backward, and saved activations would be moved out of the pool."""
    net, twin = twins(Mlp)
    f = compiled(net)
    for step in range(2 * STEPS):
        for run, module in ((f, net), (twin, twin)):
            with config.patch(enabled=step != 0):
                loss = run(rand(4, 8, seed=step)).square().mean()
            module.zero_grad()  # between the two, so that no step ends by itself
            loss.backward()
        same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert only("forward").kept_outputs == 0
    assert only("forward").replays >= STEPS


# ------------------------------------------------------------------------------------------------- graphs and shapes


def test_graph_breaks() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin() * 2
        torch._dynamo.graph_break()
        return (y + x).cos()

    run = compiled(f)
    for seed in range(STEPS):
        same(run(rand(4, seed=seed)), f(rand(4, seed=seed)))
    assert [now[1:] for now in counts().values()] == [(STEPS - 2, 0)] * 2
    assert any(":" in name and "f" in name for name in counts()), "the part after the break names its line"


def test_graph_breaks_while_training() -> None:
    class Broken(Mlp):
        @override
        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.first(x))
            torch._dynamo.graph_break()
            return self.second(y)  # type: ignore[no-any-return]

    net, twin = twins(Broken)
    inputs = MODELS["mlp"][1]
    same(train(compiled(net), net, inputs), train(twin, twin, inputs))
    assert [now[1:] for now in counts().values()] == [(STEPS - 2, 0)] * 4, counts()


def test_dynamic_shapes_are_part_of_the_key() -> None:
    net, twin = twins(Mlp)
    f = compiled(net, dynamic=True)
    for step in range(STEPS):
        for batch in (3, 5, 300):
            x = rand(batch, 8, seed=step)
            for run, module in ((f, net), (twin, twin)):
                module.zero_grad()
                (run(x) * x.shape[0]).square().mean().backward()
            same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    replayed("forward", 3 * (STEPS - 2), 3)
    replayed("backward", 3 * (STEPS - 2), 3)


def test_more_shapes_than_recordings() -> None:
    f = compiled(lambda x: x.sin() * x.shape[0], dynamic=True, options={"max_recordings": 2})
    with warned("CG901"):
        for step in range(STEPS):
            for batch in (2, 3, 4):
                x = rand(batch, seed=step)
                same(f(x), x.sin() * batch)
    assert only().recordings == 2


def test_recompiles() -> None:
    def f(x: Tensor, flag: bool) -> Tensor:
        return x.sin() if flag else x.cos() * 2

    run = compiled(f)
    for seed in range(STEPS):
        for flag in (True, False):
            for x in (rand(4, seed=seed), rand(4, seed=seed).double()):
                same(run(x, flag), f(x, flag))
    assert len(counts()) == 4
    assert set(counts().values()) == {(1, STEPS - 2, 0)}


# -------------------------------------------------------------------------------------- mutation, aliases, kept outputs


def test_mutated_inputs_and_buffers() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Buffer(torch.zeros(4))

        @override
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            self.seen.add_(x.sum(0))
            cache[0] = x[0] * 2
            cache.mul_(1.5)
            return x + self.seen

    net, twin = twins(Counts)
    f = compiled(net)
    caches = [torch.ones(3, 4), torch.ones(3, 4)]
    for seed in range(STEPS):
        x = rand(2, 4, seed=seed)
        same(f(x, caches[0]), twin(x, caches[1]))
        same(caches[0], caches[1])
        same(net.seen, twin.seen)
    replayed("inference")


def test_aliased_outputs() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x.sin()
        return z, z[1:], z.view(-1), y, y.t(), x[0]

    run = compiled(f)
    for seed in range(STEPS):
        x, y = rand(3, 4, seed=seed), rand(2, 3, seed=seed)
        ours, theirs = run(x, y), f(x, y)
        same(ours, theirs)
        assert ours[3] is y
        for outputs in (ours, theirs):
            outputs[1].add_(1)  # the other outputs share its memory
        same(ours, theirs)
        ours[4].zero_()
        assert not y.any()


def test_kept_outputs_keep_their_values() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    kept: list[Tensor] = []
    with torch.no_grad():
        for seed in range(STEPS + 3):
            kept.append(f(rand(4, 8, seed=seed)))
            for number, output in enumerate(kept):
                same(output, twin(rand(4, 8, seed=number)))
    assert only().replays >= 3


@pytest.mark.parametrize("marks", [False, True])
def test_chains_that_fail_in_reduce_overhead(marks: bool) -> None:
    """Chains of graphs that fail or warn with ``reduce-overhead``: pytorch issues 160281, 152887, 170604."""

    def first(x: Tensor) -> Tensor:
        return x.sin() * 2

    def second(x: Tensor) -> Tensor:
        return x.cos() + 1

    f, g = compiled(first), compiled(second)
    for seed in range(STEPS):
        if marks:
            mark_step_begin()
        x = rand(4, seed=seed)
        same(g(f(x)), second(first(x)))
        same(f(f(x)), first(first(x)))
        y1 = f(x)
        y2 = f(x + 1)
        same(y1 + y2, first(x) + first(x + 1))
    assert all(replays > 0 and not eager for _, replays, eager in counts().values()), counts()


class Turned(Block):
    """A block whose first operator reads a buffer that all blocks share."""

    table: Tensor

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.table)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Turned() for _ in range(3)])
        table = nn.Buffer(torch.linspace(0.5, 1.5, 8))
        for block in self.blocks:
            block.table = table

    @override
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_compiled_one_by_one() -> None:
    net, twin = twins(Stack)
    for block in net.blocks:
        block.compile(backend=backend)
    inputs = MODELS["block"][1]
    same(train(net, net, inputs), train(twin, twin, inputs))
    parts = [recordings(graph) for graph in made()]
    assert sum(now.recordings for now in parts) == 6, "each block has its own, although Dynamo shares the graphs"
    assert sum(now.replays for now in parts) == 6 * (STEPS - 2)
    assert not any(now.eager_calls or now.rebinds or now.kept_outputs for now in parts)


def test_a_recurrence() -> None:
    f = compiled(lambda h: torch.tanh(h * 1.5 + 0.1))
    ours = theirs = rand(4)
    for _ in range(20):
        ours, theirs = f(ours), torch.tanh(theirs * 1.5 + 0.1)
    same(ours, theirs)
    assert only().recordings <= 2


def test_weights_that_change() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    with torch.no_grad():
        for seed in range(3 * STEPS):
            for module in (net, twin):
                if seed % STEPS == 1:
                    module.first.weight.mul_(1.1)
                elif seed % STEPS == 2:
                    module.second.weight.data = module.second.weight.data.clone() * 1.2
                elif seed % STEPS == 3:
                    module.second.bias = nn.Parameter(module.second.bias * 1.3)
            x = rand(4, 8, seed=seed)
            same(f(x), twin(x))
    assert all(now.eager_calls == 0 for now in map(recordings, made()))
