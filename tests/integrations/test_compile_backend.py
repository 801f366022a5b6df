"""``torch.compile(backend="capture")``: compared bit for bit with eager twins; replays are counted.

The backend is given as the function that the entry point names, so that a tree that is not installed is tested too.
"""

from __future__ import annotations

import copy
import gc
import importlib
import threading
import tomllib
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import (
    CaptureWarning,
    _torch_private_compile,
    capture,
    config,
    explain,
    mark_step_begin,
    plans,
    recordings,
    release,
    report,
)
from capture.integrations.compile import _Compiled, backend, graphs
from tests.device import DEVICE, EXECUTES, rng_state, set_rng_state
from tests.nets import Mlp
from tests.rows import fresh as fresh
from tests.rows import rand, same, warned

ROOT = Path(__file__).resolve().parents[1]
STEPS = 5  # watched, recorded, three replays


M = TypeVar("M", bound=nn.Module)
_before: set[Any] = set()


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """A compiler that knows nothing. Dynamo keeps what comes before a graph break in a module's globals for long."""
    torch.compiler.reset()
    gc.collect()
    _before.update(graphs())
    yield
    _before.clear()
    torch.compiler.reset()


def made(name: str = "") -> list[Any]:
    """Graphs of this test."""
    return [graph for graph in graphs(name) if graph not in _before]


def compiled(target: Any, **options: Any) -> Any:
    return torch.compile(target, backend=backend, **options)


def counts(name: str = "") -> dict[str, tuple[int, int, int]]:
    """Recordings, replays and eager calls, by the name of the graph."""
    return {g.__name__: (n.recordings, n.replays, n.eager_calls) for g in made(name) for n in [recordings(g)]}


def only(name: str = "") -> Any:
    """Counters of the one graph whose name ends so."""
    found = [graph for graph in made() if graph.__name__.endswith(name)]
    assert len(found) == 1, [graph.__name__ for graph in made()]
    return recordings(found[0])


def replayed(part: str, replays: int = STEPS - 2, recorded: int = 1) -> None:
    """The one graph of this part was recorded and replayed so often, and never ran eagerly."""
    now = only(part)
    assert (now.recordings, now.replays, now.eager_calls) == (recorded, replays, 0)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class ConvNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))  # type: ignore[no-any-return]


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.relu(self.first(x)), 0.3, training=True)


def ids(seed: int) -> Tensor:
    return torch.randint(0, 10, (3, 4), generator=torch.Generator(DEVICE).manual_seed(seed))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (Mlp, lambda seed: rand(4, 8, seed=seed)),
    "block": (Block, lambda seed: rand(2, 5, 8, seed=seed)),
    "conv": (ConvNorm, lambda seed: rand(2, 2, 6, 6, seed=seed)),
    "words": (Words, ids),
}


def twins(make: Callable[[], M]) -> tuple[M, M]:
    torch.manual_seed(0)
    net = make()
    return net, copy.deepcopy(net)


def train(net: Any, parameters: nn.Module, inputs: Callable[[int], Tensor], steps: int = STEPS) -> list[Tensor]:
    """Losses and, last, the state."""
    optimizer = torch.optim.SGD(parameters.parameters(), lr=0.1, momentum=0.9)
    left = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        left.append(loss.detach().clone())
    return [*left, *parameters.state_dict().values()]


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


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    make, inputs = MODELS[name]
    net, twin = twins(make)
    eager = twin if DEVICE.type == "cpu" else torch.compile(twin, backend="aot_eager")  # which rounds differently there
    same(train(compiled(net), net, inputs), train(eager, twin, inputs))
    replayed("forward")
    replayed("backward")
    assert only("forward").evacuations == 0, "saved activations stay in the pool"
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
    """AOTAutograd makes other operators of a dropout than eager runs, so that it draws other numbers from one seed."""
    net, twin = twins(Drops)
    left: list[tuple[list[Tensor], Tensor]] = []
    for one, by in ((net, backend), (twin, "aot_eager")):
        torch.compiler.reset()
        torch.manual_seed(7)
        losses = train(torch.compile(one, backend=by), one, lambda seed: rand(4, 8, seed=seed))
        left.append((losses, rng_state()))
        if by is backend:
            replayed("forward")
    same(*left)
    set_rng_state(left[0][1])


def test_several_backward_passes_pending() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    for step in range(STEPS):
        for one in (net, twin):
            one.zero_grad()
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
    """What the forward pass saves is then a tensor with a graph of its own."""
    net, twin = twins(Mlp)
    f = compiled(net)

    def gradients(run: Any, parameters: Mlp, seed: int) -> tuple[Tensor, ...]:
        x = rand(4, 8, seed=seed).requires_grad_()
        return torch.autograd.grad(run(x.sin() * 2).square().sum(), [x, *parameters.parameters()])

    for seed in range(STEPS):
        same(gradients(f, net, seed), gradients(twin, twin, seed))
    replayed("forward")


def test_a_backward_pass_without_its_forward_pass_does_not_shift_the_steps() -> None:
    """Else every step to come would begin with it and end before it, and move the saved activations out."""
    net, twin = twins(Mlp)
    f = compiled(net)
    for step in range(2 * STEPS):
        for run, one in ((f, net), (twin, twin)):
            with config.patch(enabled=step != 0):
                loss = run(rand(4, 8, seed=step)).square().mean()
            one.zero_grad()  # between the two, so that no step ends by itself
            loss.backward()
        same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert only("forward").evacuations == 0
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
            for run, one in ((f, net), (twin, twin)):
                one.zero_grad()
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
        for found in (ours, theirs):
            found[1].add_(1)  # seen through the others
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
            for number, one in enumerate(kept):
                same(one, twin(rand(4, 8, seed=number)))
    assert only().replays >= 3


@pytest.mark.parametrize("marks", [False, True])
def test_chains_that_fail_in_reduce_overhead(marks: bool) -> None:
    """pytorch issues 160281, 152887, 170604."""

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
    """Reads a buffer that all blocks share before anything else."""

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
    assert not any(now.eager_calls or now.rebinds or now.evacuations for now in parts)


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
            for one in (net, twin):
                if seed % STEPS == 1:
                    one.first.weight.mul_(1.1)
                elif seed % STEPS == 2:
                    one.second.weight.data = one.second.weight.data.clone() * 1.2
                elif seed % STEPS == 3:
                    one.second.bias = nn.Parameter(one.second.bias * 1.3)
            x = rand(4, 8, seed=seed)
            same(f(x), twin(x))
    assert all(now.eager_calls == 0 for now in map(recordings, made()))


# ---------------------------------------------------------------------------------------------- options and findings


def test_options_are_those_of_the_decorator() -> None:
    f = compiled(lambda x: x.sin(), options={"outputs": "clone", "verify": "always", "name": "wave"})
    for seed in range(STEPS):
        same(f(rand(4, seed=seed)), rand(4, seed=seed).sin())
    now = recordings(made("wave")[0])
    assert now.function.startswith("wave [")
    assert now.verifications >= STEPS - 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"outpts": "clone"}}, r"unknown option 'outpts'.*did you mean 'outputs'.*known: static, rng"),
        ({"options": {"outputs": "keep"}}, "outputs='keep' is not a choice"),
        ({"options": {"static": ["x"]}}, "mark_static_address"),
        ({"mode": "max-autotune"}, r"does not take mode=.*options="),
    ],
)
def test_unknown_options(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"(?s)AnnotationError: .*{message}"):
        compiled(lambda x: x.sin(), **settings)(rand(3))


def test_findings_name_the_users_line() -> None:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        return nn.functional.dropout(y, training=True)  # the line

    run = compiled(f, options={"rng": "eager"})
    with pytest.warns(CaptureWarning, match="CG301"):
        run(rand(4))
    where = next(one.where for one in only().findings if one.code == "CG301")
    assert where.file == __file__
    assert where.code.endswith("# the line")


def test_names_in_reports_and_plans() -> None:
    net, _ = twins(Mlp)
    train(compiled(net), net, MODELS["mlp"][1])
    table = report()
    for part in ("Mlp.forward [0/0] forward", "Mlp.forward [0/0] backward"):
        assert part in table
    paths = [one.path for one in plans(made()[0])[0].placeholders]
    assert paths == [
        "l_self_modules_first_parameters_weight_", "l_self_modules_first_parameters_bias_", "l_x_",
        "l_self_modules_second_parameters_weight_", "l_self_modules_second_parameters_bias_",
    ]  # fmt: skip
    backward = [one.path for one in plans(made()[1])[0].placeholders]
    assert "l_x_" in backward
    assert "tangents_1" in backward


def test_explain_and_release() -> None:
    f = compiled(lambda x: x.sin() * 2)
    for seed in range(STEPS):
        f(rand(4, seed=seed))
    (graph,) = made()
    assert explain(graph)(rand(4)).outcome == "record"
    release(graph)
    same(f(rand(4)), rand(4).sin() * 2)
    assert recordings(graph).recordings == 2


def test_graphs_go_with_what_was_compiled() -> None:
    f = compiled(lambda x: x.sin())
    f(rand(4))
    assert len(made()) == 1
    del f
    torch.compiler.reset()
    gc.collect()
    assert made() == []


# -------------------------------------------------------------------------------------------- captured and compiled


def test_a_captured_function_that_calls_a_compiled_one() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)

    @capture
    def step(x: Tensor) -> Tensor:
        return f(x).sin()  # type: ignore[no-any-return]

    with torch.no_grad():
        for seed in range(STEPS + 2):  # the compiler's own state changes in the first calls
            same(step(rand(4, 8, seed=seed)), twin(rand(4, 8, seed=seed)).sin())
    assert recordings(step).replays > 1
    assert only().recordings == 0


def test_a_compiled_function_around_a_captured_one() -> None:
    net, twin = twins(Mlp)
    capture(net)
    f = compiled(lambda x: net(x).sin(), fullgraph=True)
    with torch.no_grad():
        for seed in range(STEPS):
            same(f(rand(4, 8, seed=seed)), twin(rand(4, 8, seed=seed)).sin())
    replayed("inference")
    assert recordings(net).recordings == 0


# ------------------------------------------------------------------------------------- generators, operators of graphs


def test_a_generator_that_is_an_input() -> None:
    """As AOTAutograd passes them to ``graphsafe_run_with_rng_state``."""
    graph = torch.fx.Graph()
    given, generator = graph.placeholder("x"), graph.placeholder("fwd_rng_state_0")
    drawn = graph.call_function(torch.ops.aten.bernoulli.default, (given,), {"generator": generator})
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (drawn, 2)),))
    module = torch.fx.GraphModule({}, graph)
    run = _Compiled("drawn", {}, {}, None).inference(module, [])
    ours, theirs = torch.Generator(DEVICE).manual_seed(3), torch.Generator(DEVICE).manual_seed(3)
    for seed in range(STEPS):
        x = rand(6, seed=seed) + 0.5
        same(run([x, ours]), (torch.bernoulli(x, generator=theirs) * 2,))
        same(ours.get_state(), theirs.get_state())
    replayed("inference")


@pytest.mark.skipif(not EXECUTES, reason="a stand-in for what torch has on CUDA alone")
def test_a_generator_lent_to_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU engine cannot hold it and says so; a CUDA graph reads the generator it was lent."""
    operator = torch.ops.higher_order.graphsafe_run_with_rng_state
    default = torch.default_generator

    def kernel(op: Any, *args: Any, rng_state: torch.Generator) -> Any:
        saved = default.get_state()
        default.set_state(rng_state.get_state())
        result = op(*args)
        rng_state.set_state(default.get_state())
        default.set_state(saved)
        return result

    for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.BackendSelect):
        monkeypatch.setitem(operator.py_kernels, key, kernel)
    monkeypatch.setattr(operator, "_dispatch_cache", {})

    @capture
    def f(x: Tensor, generator: torch.Generator) -> Any:
        return operator(torch.ops.aten.bernoulli.default, x, rng_state=generator) * 2

    ours, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    before = default.get_state()
    with warned("CG904"):
        for seed in range(STEPS):
            x = rand(6, seed=seed) + 0.5
            same(f(x, ours), torch.bernoulli(x, generator=theirs) * 2)
            same(ours.get_state(), theirs.get_state())
    same(default.get_state(), before)
    assert recordings(f).recordings == 0
    assert explain(f)(rand(6) + 0.5, ours).facts.draws


@pytest.mark.skipif(not EXECUTES, reason="on CUDA the partitioner keeps generators instead of states")
def test_dropout_under_a_checkpoint_runs_eagerly() -> None:
    """The CPU's generator is set back for the recomputation, which a replay would not do."""

    class Checkpointed(Drops):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    net, twin = twins(Checkpointed)
    left = []
    for one, by in ((net, backend), (twin, "aot_eager")):
        torch.compiler.reset()
        torch.manual_seed(7)
        run = torch.compile(one, backend=by)
        if by is not backend:
            left.append(train(run, one, MODELS["mlp"][1]))
            continue
        with warned("CG403", most=2):
            left.append(train(run, one, MODELS["mlp"][1]))
    same(*left)


def test_a_custom_operator_that_writes() -> None:
    """Stays in the graph as ``auto_functionalized``, which is looked into."""

    @torch.library.custom_op("capture_tests::double_", mutates_args={"x"})
    def double_(x: Tensor) -> None:
        x.mul_(2)

    def f(x: Tensor) -> Tensor:
        y = x + 1
        double_(y)
        return y.sin()

    run = compiled(f, fullgraph=True)
    for seed in range(STEPS + 1):
        same(run(rand(4, seed=seed)), f(rand(4, seed=seed)))
    assert only().eager_calls == 0
    assert only().replays >= STEPS - 2


@pytest.mark.skipif(not EXECUTES, reason="which branch is taken is read on the host")
def test_a_branch_in_the_graph_runs_eagerly() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))  # type: ignore[no-any-return]

    run = compiled(f)
    with warned("CG202", most=2):
        for seed in range(STEPS):
            x = rand(3, seed=seed)
            same(run(x), x.sin() if x.sum() > 0 else x.cos())
    assert only("inference").recordings == 0


def test_a_region_that_is_compiled_once() -> None:
    """Stays in the graph as ``invoke_subgraph``, which is looked into."""

    @torch.compiler.nested_compile_region
    def twice(x: Tensor) -> Tensor:
        return x.sin() * 2

    run = compiled(lambda x: twice(twice(x)))
    for seed in range(STEPS):
        x = rand(4, seed=seed)
        same(run(x), (x.sin() * 2).sin() * 2)
    replayed("inference")


def test_a_compiled_optimizer() -> None:
    """Its parameters and its state are known to keep their address, and written there. Dynamo takes another
    implementation than eager (``foreach``), which may round otherwise: compared with ``aot_eager``."""
    net, twin = twins(Mlp)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (net, twin))
    step, other = compiled(lambda: ours.step()), torch.compile(lambda: theirs.step(), backend="aot_eager")
    for seed in range(STEPS + 1):
        for one, optimizer, run in ((net, ours, step), (twin, theirs, other)):
            optimizer.zero_grad()
            one(rand(4, 8, seed=seed)).square().mean().backward()
            run()
        same([*net.parameters()], [*twin.parameters()])
    assert made()
    assert all(now.eager_calls == 0 and now.evacuations == 0 for now in map(recordings, made()))
    assert sum(now.replays for now in map(recordings, made())) >= STEPS - 2


def test_retained_graphs_and_accumulated_gradients() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    for step in range(STEPS):
        for run, one in ((f, net), (twin, twin)):
            one.zero_grad()
            for index in range(2):
                loss = run(rand(4, 8, seed=2 * step + index)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
        same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert only("backward").eager_calls == 0


def test_gradients_of_gradients_are_refused_as_by_aot_eager() -> None:
    net, _ = twins(Mlp)
    x = rand(4, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(net)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_autocast() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    for seed in range(STEPS):
        x = rand(4, 8, seed=seed)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            ours, theirs = f(x), twin(x)
        same(ours, theirs)
        (ours.float().sum() + 0).backward()
        (theirs.float().sum() + 0).backward()
        same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    replayed("forward")


def test_threads_share_a_graph() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    f(rand(4, 8)).sum().backward()
    wrong: list[int] = []

    def work(thread: int) -> None:
        if DEVICE.type == "cuda":
            torch.set_default_device(DEVICE)  # the compiler guards on it
        for step in range(STEPS + 3):
            x = rand(4, 8, seed=100 * thread + step)
            ours = torch.autograd.grad(f(x).square().mean(), list(net.parameters()))
            theirs = torch.autograd.grad(twin(x).square().mean(), list(twin.parameters()))
            if not all(map(torch.equal, ours, theirs)):
                wrong.append(thread)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert only("forward").replays > 0


def test_a_tensor_marked_as_static() -> None:
    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache[1] = x
        return cache.sum(0)

    ours, theirs = torch.zeros(3, 4), torch.zeros(3, 4)
    torch._dynamo.mark_static_address(ours)
    run = compiled(f)
    for seed in range(STEPS):
        same(run(rand(4, seed=seed), ours), f(rand(4, seed=seed), theirs))
        same(ours, theirs)
    policies = {one.path: one.policy.name for one in plans(made()[0])[0].placeholders}
    assert policies == {"l_x_": "COPY", "l_cache_": "STATIC"}


def test_without_aot_autograds_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stated fallbacks of what is private in torch."""
    for name in ("_aot_autograd", "_CompileContext", "_TracingContext", "_Translator"):
        monkeypatch.setattr(_torch_private_compile, name, None)
    net, twin = twins(Mlp)
    inputs = MODELS["mlp"][1]
    same(train(compiled(net), net, inputs), train(twin, twin, inputs))
    assert {now[1:] for now in counts().values()} == {(STEPS - 2, 0)}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(DEVICE)


@pytest.mark.parametrize("compiled_before", [True, False])
def test_training_through_compiled_code(compiled_before: bool) -> None:
    """Its backward pass writes into what it saved, which torch lets no second one read."""
    net, x = _net(), torch.randn(4, 8, device=DEVICE)
    compiled: Any = torch.compile(net, backend="aot_eager")
    if compiled_before:
        compiled(x).sum().backward()
    body: Any = lambda x: compiled(x).square()  # noqa: E731
    captured: Any = capture(body)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        for number in range(8):
            mark_step_begin()
            given = x * number
            net.zero_grad()
            captured(given).sum().backward()
            found = [p.grad for p in net.parameters()]
            net.zero_grad()
            net(given).square().sum().backward()
            for one, parameter in zip(found, net.parameters(), strict=True):
                assert one is not None
                assert parameter.grad is not None
                assert torch.equal(one, parameter.grad)
        assert recordings(captured).replays >= 6
        loss = captured(x).sum()
        with pytest.raises(RuntimeError, match="donated"):
            loss.backward(retain_graph=True)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_function_is_compiled_once(autocast: bool) -> None:
    """A watched run leaves what it is guarded by as it is, but for autocast's cache where that is in use."""
    count = [0]

    def counting(graph: Any, inputs: Any) -> Any:
        count[0] += 1
        return graph

    def twice(x: Tensor) -> Tensor:
        return x.sin() * 2

    compiled: Any = torch.compile(twice, backend=counting)
    x = torch.randn(4, device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE.type, enabled=autocast):
        expected = compiled(x)
        body: Any = lambda x: compiled(x)  # noqa: E731
        captured: Any = capture(body)
        for _ in range(5):
            assert torch.equal(captured(x), expected)
    assert count[0] <= 1 + autocast
    assert recordings(captured).replays >= 2
