"""``capture_graph_module``: compared bit for bit with a twin of the graph module; replays are counted."""

from __future__ import annotations

import copy
import gc
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import aot_function  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from typing_extensions import override

from capture import UncapturableError, capture, plans, recordings
from capture._errors import AnnotationError
from capture.integrations.fx import CapturedGraph, capture_graph_module
from tests.device import DEVICE, EXECUTES
from tests.nets import Mlp
from tests.rows import fresh as fresh
from tests.rows import rand, same, warned

STEPS = 5  # watched, recorded, three replays
Graph = torch.fx.GraphModule
Inputs = Callable[[int], tuple[Any, ...]]


def traced(function: Any) -> Graph:
    return torch.fx.symbolic_trace(function)


def built(fill: Callable[[torch.fx.Graph], Any], root: Any = None) -> Graph:
    """A graph made by hand; ``fill`` gives what it returns."""
    graph = torch.fx.Graph()
    graph.output(fill(graph))
    return Graph({} if root is None else root, graph)


def equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    same(*(list(one.items()) if isinstance(one, dict) else one for one in (found, expected)))


def like(captured: CapturedGraph, twin: Any, inputs: Inputs, steps: int = STEPS) -> None:
    """Outputs, and what is written into inputs, equal the twin's in every call."""
    for seed in range(steps):
        ours, theirs = inputs(seed), inputs(seed)
        equal(captured(*ours), twin(*theirs))
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one, Tensor):
                same(one, other)


def counts(captured: CapturedGraph) -> list[tuple[int, int, int]]:
    """Recordings, replays and eager calls of each captured piece."""
    return [(now.recordings, now.replays, now.eager_calls) for now in captured.recordings()]


ALL_REPLAYED = (1, STEPS - 2, 0)


class Norms(nn.Module):
    """Buffers that are written, a parameter of its own, results in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.scale = nn.Parameter(torch.ones(8) * 1.5)

    @override
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.inner(x) * self.scale
        return {"y": y, "sum": y.sum(0)}


class Reads(nn.Module):
    """A number that the host reads stands between two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        found = torch.nonzero(y > 0)
        return self.second(y).sin() + found.sum() * 0  # type: ignore[no-any-return]


TRACERS: dict[str, Callable[[nn.Module, tuple[Any, ...]], Graph]] = {
    "symbolic_trace": lambda net, inputs: traced(net),
    "export": lambda net, inputs: torch.export.export(net, inputs).module(),
    "export.graph_module": lambda net, inputs: torch.export.export(net, inputs).graph_module,
    "make_fx": lambda net, inputs: make_fx(net)(*inputs),
}


def batch(seed: int) -> tuple[Any, ...]:
    return (rand(4, 8, seed=seed),)


# ---------------------------------------------------------------------------------------------------------- tracers


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("tracer", ["symbolic_trace", "export", "make_fx"])
@pytest.mark.parametrize("model", [Mlp, Norms, Reads])
def test_graphs_of_tracers(model: type[nn.Module], tracer: str, grad: bool) -> None:
    torch.manual_seed(0)
    net = model()
    with torch.no_grad():
        gm, twin = (TRACERS[tracer](copy.deepcopy(net), batch(0)) for _ in range(2))
    captured = capture_graph_module(gm, batch(0))
    with torch.set_grad_enabled(grad):
        like(captured, twin, batch)
    same(list(gm.state_dict().values()), list(twin.state_dict().values()))
    for now in captured.recordings():
        assert (now.recordings, now.eager_calls) == (1, 0) or model is Reads
        assert now.replays >= STEPS - 3 or model is Reads
    assert [piece.captured for piece in captured.pieces] == ([True, False, True] if model is Reads else [True])
    assert counts(captured)[0][1] >= STEPS - 3


def test_the_graph_module_of_an_exported_program() -> None:
    """Parameters are inputs there, and keep their address."""
    net = Mlp()
    program = torch.export.export(net, batch(0))
    parameters = list(net.parameters())
    captured = capture_graph_module(program.graph_module, [*parameters, *batch(0)], range(len(parameters)))
    with torch.no_grad():
        like(captured, lambda *values: (net(values[-1]),), lambda seed: (*parameters, *batch(seed)))
    assert counts(captured) == [ALL_REPLAYED]
    (plan,) = plans(captured.pieces[0].function)
    assert sorted(one.policy.name for one in plan.placeholders) == ["COPY"] + ["STATIC"] * 4


def test_training() -> None:
    torch.manual_seed(0)
    net = Reads()
    twin = copy.deepcopy(net)
    gm = traced(net)
    captured = capture_graph_module(gm, batch(0))
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (gm, twin))
    for seed in range(STEPS + 2):
        losses = []
        for run, optimizer in ((captured, ours), (twin, theirs)):
            optimizer.zero_grad()
            loss = run(*batch(seed)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
        same(*losses)
        same(list(gm.state_dict().values()), list(twin.state_dict().values()))
    assert captured.recordings()[0].replays > 1


def test_forward_and_backward_graphs() -> None:
    """As AOTAutograd hands them out."""
    made: list[CapturedGraph] = []

    def compiler(gm: Graph, inputs: Sequence[Any]) -> Any:
        made.append(capture_graph_module(gm, inputs))
        return made[-1]

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w).sin() * x

    run = aot_function(f, fw_compiler=compiler, bw_compiler=compiler)
    for seed in range(STEPS + 1):
        found = []
        for one in (run, f):
            x, w = rand(4, 4, seed=seed).requires_grad_(), rand(4, 4, seed=seed + 9).requires_grad_()
            y = one(x, w)
            y.sum().backward()
            found.append([y, x.grad, w.grad])
        same(*found)
    assert len(made) == 2
    assert all(now.replays >= STEPS - 3 and not now.eager_calls for one in made for now in one.recordings())


def test_a_joint_graph() -> None:
    def joint(primals: list[Tensor], tangents: list[Tensor]) -> Any:
        x, w = (one.detach().requires_grad_() for one in primals)
        y = (x @ w).sin()
        return [y.detach()], torch.autograd.grad([y], [x, w], tangents)

    def inputs(seed: int) -> tuple[Any, ...]:
        return [rand(3, 4, seed=seed), rand(4, 4, seed=seed + 20)], [rand(3, 4, seed=seed + 40)]

    gm = make_fx(joint)(*inputs(0))
    captured = capture_graph_module(gm, inputs(0))
    like(captured, make_fx(joint)(*inputs(0)), inputs)
    assert counts(captured) == [ALL_REPLAYED]


# ------------------------------------------------------------------------------------------------------------- cuts


@torch.fx.wrap
def of_python(x: Tensor) -> Tensor:
    return x * 2


def item(x: Tensor) -> Tensor:
    y = x.sin() * 2
    return y + x.abs().max().round().item()


def mask(x: Tensor) -> Tensor:
    y = x.sin() * 2
    return y[(y > 0) & (x > 0)].sum() + y.cos()


@torch.fx.wrap
def assign(y: Tensor, where: Tensor) -> None:
    """Stands in for the operator, which a tracer does not see."""
    y[where] = 0


def assigned(x: Tensor) -> Tensor:
    y = x.sin() * 2
    assign(y, y > 0.1)
    return y.cos()


def where(x: Tensor) -> Tensor:
    y = x.sin() * 2
    return torch.where(y > 0)[0].sum() + y.cos()


def converted(x: Tensor) -> Tensor:
    y = x.sin() * 2
    return of_python(y) + y.cos()


def mover(x: Tensor) -> Any:
    y = x.sin() * 2
    return y.to("meta").shape[0] + y.cos()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (item, "item reads tensor values on the host"),
        (mask, "the shape of what getitem works on follows from the values of a mask"),
        (assigned, "the shape of what setitem works on follows from the values of a mask"),
        (where, "the shape of where's result follows from values"),
        (converted, "of_python is a Python function, no operator"),
        (mover, "to copies to meta, beside "),
    ],
)
def test_cuts(function: Any, reason: str) -> None:
    gm = traced(function)
    for node in gm.graph.nodes:
        if node.target is assign:
            node.target, node.args = operator.setitem, (*node.args, 0)
    gm.recompile()
    captured = capture_graph_module(gm, batch(0))
    assert [piece.captured for piece in captured.pieces] == [True, False, True]
    assert str(captured.pieces[1].reason).startswith(reason)
    assert sum(piece.operators for piece in captured.pieces) == sum(
        node.op.startswith("call") for node in captured.module.graph.nodes
    )
    like(captured, function, batch)
    assert counts(captured)[0] == ALL_REPLAYED


def test_cuts_of_aten_graphs() -> None:
    def f(x: Tensor) -> Any:
        y = x.sin() * 2
        return y[y > 0].sum(), torch.nonzero(y), (y.sum().round() * 0).item() + y.cos()

    gm = make_fx(f, tracing_mode="symbolic")(*batch(0))
    captured = capture_graph_module(gm, batch(0))
    reasons = [piece.reason for piece in captured.pieces if not piece.captured]
    assert [str(reason).partition(" ")[0] for reason in reasons] == ["the", "the", "aten._local_scalar_dense.default"]
    like(captured, f, batch)


def test_higher_order_operators() -> None:
    class Branches(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            y = x.sin() * 2
            y = torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,))
            return torch.mul(y.cos(), 3)

    gm = torch.export.export(Branches(), batch(0)).module()
    captured = capture_graph_module(gm, batch(0))
    assert [piece.captured for piece in captured.pieces] == [True, False, True]
    assert captured.pieces[1].reason == "cond is a higher-order operator, which runs whole"
    like(captured, Branches(), batch)
    assert counts(captured) == [ALL_REPLAYED] * 2


def test_devices() -> None:
    """By fake tensors, as a compiler hands them out: nothing runs."""
    with FakeTensorMode():
        on_device, on_cpu = torch.empty(4, device="cuda"), torch.empty(4, device="cpu")

    def f(x: Tensor, y: Tensor) -> Any:
        z = x.sin() * 2
        return z.cpu(), torch.add(x, y), torch.cos(y), z.to("cuda").cos(), z.to(torch.float16).cos()

    captured = capture_graph_module(traced(f), [on_device, on_cpu])
    assert [piece.captured for piece in captured.pieces] == [True, False, True]
    assert str(captured.pieces[1].reason).split("; ") == [
        "cpu copies to cpu, beside cuda:0",
        "add works on several devices: cpu, cuda:0",
        "cos works on cpu, beside cuda:0",
    ]


def test_checks_of_an_exported_module_are_no_piece() -> None:
    class Modes(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = x.sin() * 2
            return y.cos() * x

    gm = torch.export.export(Modes(), batch(0)).module()
    captured = capture_graph_module(gm, batch(0))
    assert [piece.captured for piece in captured.pieces] == [False, True]
    assert captured.pieces[0].operators == 2
    like(captured, Modes(), batch)
    assert counts(captured) == [ALL_REPLAYED]


def test_never() -> None:
    def never(node: torch.fx.Node) -> str | None:
        return "an all-reduce of ours" if node.target is torch.tanh else None

    def f(x: Tensor) -> Tensor:
        return torch.tanh(x.sin() * 2).cos() * 2

    captured = capture_graph_module(traced(f), batch(0), never=never)
    assert [piece.reason for piece in captured.pieces] == [None, "an all-reduce of ours", None]
    like(captured, f, batch)
    assert counts(captured) == [ALL_REPLAYED] * 2
    for answer in (True, ""):
        with pytest.raises(AnnotationError, match="never= gives a reason"):
            capture_graph_module(traced(f), batch(0), never=lambda node, answer=answer: answer)  # type: ignore[misc]


def test_what_is_missed_runs_eagerly() -> None:
    """A submodule that reads a value is no node of the graph."""

    class Leaf(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum().item() > 0 else x * 3

    class Tracer(torch.fx.Tracer):
        @override
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Leaf)

    net = nn.Sequential(Leaf())
    captured = capture_graph_module(Graph(net, Tracer().trace(net)), batch(0))
    if EXECUTES:
        with warned("CG201", most=3):
            like(captured, net, batch)
        assert counts(captured)[0][0] == 0


def test_writes_keep_their_order() -> None:
    """Nothing but its place says that the second piece comes after the write."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        z = y.sin().sum().round().item()
        x.mul_(3)
        of_python(x)
        return x + y + z

    captured = capture_graph_module(traced(f), [rand(4), rand(4)])
    like(captured, f, lambda seed: (rand(4, seed=seed), rand(4, seed=seed + 9)))
    assert len(captured.pieces) == 5


# ----------------------------------------------------------------------------------------------------------- inputs


def test_numbers_are_in_the_key() -> None:
    captured = capture_graph_module(traced(lambda x, n: (x * n).sin()), [rand(4), 2])
    for n in (2, 3, 2.0):
        for seed in range(STEPS):
            same(captured(rand(4, seed=seed), n), (rand(4, seed=seed) * n).sin())
    assert counts(captured) == [(3, 3 * (STEPS - 2), 0)]


def test_symbolic_sizes() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.reshape(x.shape[0] * x.shape[1]).sin()
        return torch.zeros(x.shape[0] + 1, device=x.device).sum() + y * x.shape[1]

    gm = make_fx(f, tracing_mode="symbolic")(rand(4, 8))
    captured = capture_graph_module(gm, [rand(4, 8)])
    assert len(captured.pieces) == 1
    for rows in (4, 6):
        for seed in range(STEPS):
            same(captured(rand(rows, 8, seed=seed)), f(rand(rows, 8, seed=seed)))
    assert counts(captured) == [(2, 2 * (STEPS - 2), 0)]


def test_symbolic_inputs_of_dynamo() -> None:
    """Sizes are inputs, and example inputs fake tensors and ``SymInt``."""
    made: list[CapturedGraph] = []

    def backend(gm: Graph, inputs: Sequence[Any]) -> Any:
        made.append(capture_graph_module(gm, inputs))
        return made[-1]

    def f(x: Tensor) -> Tensor:
        return torch.sin(x) * x.shape[0]

    torch.compiler.reset()
    run = torch.compile(f, backend=backend, dynamic=True)
    for rows in (4, 6):
        for seed in range(STEPS):
            same(run(rand(rows, 8, seed=seed)), f(rand(rows, 8, seed=seed)))
    torch.compiler.reset()
    assert len(made) == 1
    assert counts(made[0])[0][0] == 2


def test_generators() -> None:
    def fill(graph: torch.fx.Graph) -> Any:
        x, generator = graph.placeholder("x"), graph.placeholder("generator")
        drawn = graph.call_function(torch.ops.aten.bernoulli.default, (x,), {"generator": generator})
        return graph.call_function(torch.ops.aten.mul.Tensor, (drawn, 2))

    ours, theirs = torch.Generator(DEVICE).manual_seed(3), torch.Generator(DEVICE).manual_seed(3)
    captured = capture_graph_module(built(fill), [rand(6), ours])
    for seed in range(STEPS):
        x = rand(6, seed=seed) + 0.5
        same(captured(x, ours), torch.bernoulli(x, generator=theirs) * 2)
        same(ours.get_state(), theirs.get_state())
    assert counts(captured) == [ALL_REPLAYED]


class Mesh:
    """Stands for a process group: no value to compare."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


@torch.fx.wrap
def reduced(x: Tensor, mesh: Mesh) -> Tensor:
    return x * mesh.factor


def test_opaque_inputs() -> None:
    def f(x: Tensor, mesh: Mesh) -> Any:
        return reduced(x.sin() * 2, mesh).cos() * 2, mesh

    captured = capture_graph_module(traced(f), [rand(4), Mesh(2.0)])
    assert [piece.captured for piece in captured.pieces] == [True, False, True]
    for mesh in (Mesh(2.0), Mesh(3.0)):
        for seed in range(STEPS):
            ours, theirs = captured(rand(4, seed=seed), mesh), f(rand(4, seed=seed), mesh)
            same(ours[0], theirs[0])
            assert ours[1] is mesh
    assert [now.recordings for now in captured.recordings()] == [1, 1]


def test_opaque_inputs_of_a_recorded_operator() -> None:
    """Told apart by identity: each has a recording."""

    class Leaf(nn.Module):
        @override
        def forward(self, x: Tensor, mesh: Mesh) -> Tensor:
            return x.sin() * mesh.factor

    def fill(graph: torch.fx.Graph) -> Any:
        return graph.call_module("leaf", (graph.placeholder("x"), graph.placeholder("mesh")))

    captured = capture_graph_module(built(fill, nn.ModuleDict({"leaf": Leaf()})), [rand(4), Mesh(2.0)])
    for mesh in (Mesh(2.0), Mesh(3.0)):
        for seed in range(STEPS):
            same(captured(rand(4, seed=seed), mesh), rand(4, seed=seed).sin() * mesh.factor)
    assert counts(captured) == [(2, 2 * (STEPS - 2), 0)]


@pytest.mark.skipif(not torch.distributed.is_available() or DEVICE.type != "cpu", reason="a group on the CPU")
def test_groups_and_meshes() -> None:
    """A collective is part of a recording, where its wait is."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        name = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]

        def fill(graph: torch.fx.Graph) -> Any:
            x, group, mesh = map(graph.placeholder, ("x", "group", "mesh"))
            y = graph.call_function(torch.ops.aten.sin.default, (x,))
            y = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (y, "sum", group))
            y = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (y,))
            return graph.call_function(torch.ops.aten.mul.Tensor, (y, 2)), mesh

        with capture_graph_module(built(fill), [rand(4), name, mesh]) as captured:
            assert [piece.captured for piece in captured.pieces] == [True]
            for seed in range(STEPS):
                found, given = captured(rand(4, seed=seed), name, mesh)
                same(found, rand(4, seed=seed).sin() * 2)
                assert given is mesh
                del found
            assert counts(captured) == [ALL_REPLAYED]
    finally:
        torch.distributed.destroy_process_group()


def test_inputs_that_are_written() -> None:
    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache.select(0, 1).copy_(x)
        x.add_(1)
        return cache.sum(0) + x

    captured = capture_graph_module(traced(f), [rand(4), rand(3, 4)], [1])
    ours, theirs = torch.zeros(3, 4), torch.zeros(3, 4)
    for seed in range(STEPS):
        x, y = rand(4, seed=seed), rand(4, seed=seed)
        same(captured(x, ours), f(y, theirs))
        same([x, ours], [y, theirs])
    assert counts(captured) == [ALL_REPLAYED]
    (plan,) = plans(captured.pieces[0].function)
    assert {one.path: one.policy.name for one in plan.placeholders} == {"x": "COPY_BACK", "cache": "STATIC"}


def test_structures() -> None:
    class Nested(nn.Module):
        @override
        def forward(self, pair: tuple[Tensor, list[Tensor]], *, factor: float = 2.0) -> Any:
            return {"a": (pair[0].sin() * factor, [pair[1][0].cos()]), "b": pair[1][0]}

    def inputs(seed: int) -> tuple[Any, ...]:
        return ((rand(4, seed=seed), [rand(3, seed=seed)]),)

    gm = torch.export.export(Nested(), inputs(0)).module()
    captured = capture_graph_module(gm, inputs(0))
    for seed in range(STEPS):
        ours, theirs = captured(*inputs(seed)), Nested()(*inputs(seed))
        assert list(ours) == list(theirs)
        same(list(ours.values()), list(theirs.values()))
    assert counts(captured) == [ALL_REPLAYED]


def test_keywords_defaults_and_star_arguments() -> None:
    def f(x: Tensor, y: float = 2.0, *rest: Tensor) -> Tensor:
        return x * y + rest[0]

    gm = torch.fx.symbolic_trace(f)
    captured = capture_graph_module(gm, [rand(4)])
    for seed in range(STEPS):
        x, y = rand(4, seed=seed), rand(4, seed=seed + 1)
        same(captured(x, 3.0, y), gm(x, 3.0, y))
    plain = traced(lambda x, y=2.0: x * y)
    other = capture_graph_module(plain, [rand(4)])
    for seed in range(STEPS):
        same(other(x=rand(4, seed=seed)), rand(4, seed=seed) * 2.0)


def test_wrong_inputs_raise_as_in_the_module() -> None:
    gm = torch.export.export(Mlp(), batch(0)).module()
    captured = capture_graph_module(gm, batch(0))
    for wrong in ((), (rand(4, 9),), (rand(4, 8), rand(1))):
        with pytest.raises(Exception) as theirs:  # noqa: PT011 - whichever it is
            gm(*wrong)
        with pytest.raises(type(theirs.value)):
            captured(*wrong)


# -------------------------------------------------------------------------------------------- attributes and modules


def test_the_module_is_not_changed() -> None:
    torch.manual_seed(0)
    gm = torch.export.export(Reads(), batch(0)).module()
    assert isinstance(gm, Graph)
    code, state = gm.code, {key: value.clone() for key, value in gm.state_dict().items()}
    nodes = {node: (dict(node.meta), set(vars(node)) if hasattr(node, "__dict__") else None) for node in gm.graph.nodes}
    attributes = set(gm.__dict__)
    captured = capture_graph_module(gm, batch(0))
    with torch.no_grad():
        like(captured, gm, batch)
    assert gm.code == code
    assert gm.graph.owning_module is gm
    assert set(gm.__dict__) == attributes
    same(list(gm.state_dict().values()), list(state.values()))
    for node, (meta, own) in nodes.items():
        assert node.meta.keys() == meta.keys()
        assert not hasattr(node, "_fx_partition")
        assert own is None or set(vars(node)) == own


@pytest.mark.parametrize("tracer", ["symbolic_trace", "export"])
def test_weights_that_change(tracer: str) -> None:
    torch.manual_seed(0)
    gm = TRACERS[tracer](Mlp(), batch(0))
    captured = capture_graph_module(gm, batch(0))
    with torch.no_grad():
        for seed in range(4 * STEPS):
            if seed % STEPS == 1:
                gm.get_parameter("first.weight").mul_(1.1)
            elif seed % STEPS == 2:
                gm.get_parameter("second.weight").data = gm.get_parameter("second.weight").detach() * 1.2
            elif seed % STEPS == 3:
                gm.second.bias = nn.Parameter(gm.get_parameter("second.bias") * 1.3)  # type: ignore[union-attr]
            elif seed == 4:
                gm.load_state_dict({key: value * 1.1 for key, value in gm.state_dict().items()}, assign=True)
            same(captured(*batch(seed)), gm(*batch(seed)))
    assert counts(captured)[0][1] > STEPS
    assert counts(captured)[0][2] == 0


def test_a_submodule_that_is_replaced() -> None:
    gm = traced(Mlp())
    captured = capture_graph_module(gm, batch(0))
    with torch.no_grad():
        for seed in range(3 * STEPS):
            if seed == STEPS:
                gm.second = nn.Linear(16, 4)
            same(captured(*batch(seed)), gm(*batch(seed)))


def test_training_flags_and_hooks() -> None:
    gm = traced(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    twin = copy.deepcopy(gm)
    captured = capture_graph_module(gm, batch(0))
    calls: list[int] = []

    def hook(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        calls.append(1)
        return result * 2

    with torch.no_grad():
        for mode in (True, False):
            for one in (gm, twin):
                one.train(mode)
            like(captured, twin, batch)
        for one in (gm, twin):
            one.register_forward_hook(hook)
        like(captured, twin, batch)
    assert len(calls) == 2 * STEPS
    same(list(gm.state_dict().values()), list(twin.state_dict().values()))


def test_nested_graph_modules() -> None:
    inner, reading = traced(Mlp()), traced(item)

    def fill(graph: torch.fx.Graph) -> Any:
        y = graph.call_module("inner", (graph.placeholder("x"),))
        return graph.call_function(torch.sin, (graph.call_module("reading", (y,)),))

    gm = built(fill, nn.ModuleDict({"inner": inner, "reading": reading}))
    captured = capture_graph_module(gm, batch(0))
    assert [piece.reason for piece in captured.pieces] == [
        None, "in reading: item reads tensor values on the host", None
    ]  # fmt: skip
    with torch.no_grad():
        like(captured, gm, batch)
    assert counts(captured) == [ALL_REPLAYED] * 2


def test_modules_of_like_names() -> None:
    """``split_module`` makes one name of these."""

    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(8, 8))
            self.a_0, self.submod_0 = nn.Linear(8, 8), nn.Linear(8, 8)
            self.table = nn.Buffer(rand(8))

        @override
        def forward(self, x: Tensor) -> Tensor:
            return self.submod_0(self.a_0(self.a(x))) * self.table  # type: ignore[no-any-return]

    gm = traced(Alike())
    captured = capture_graph_module(gm, batch(0))
    with torch.no_grad():
        like(captured, gm, batch)
    again = capture_graph_module(gm, batch(0), never=lambda node: "ours" if node.target == "a_0" else None)
    with torch.no_grad():
        like(again, gm, batch)
    assert counts(again) == [ALL_REPLAYED] * 2


def test_results_that_nothing_computes() -> None:
    """Inputs, parameters and constants among what is returned."""
    weight = nn.Parameter(rand(4))

    def fill(graph: torch.fx.Graph) -> Any:
        x, unused = graph.placeholder("x"), graph.placeholder("unused")
        kept = graph.get_attr("weight")
        return {"x": x, "kept": kept, "y": graph.call_function(torch.sin, (x,)), "one": 1, "none": None, "u": unused}

    root = nn.Module()
    root.weight = weight
    captured = capture_graph_module(built(fill, root), [rand(4), rand(4)])
    for seed in range(STEPS):
        x, unused = rand(4, seed=seed), rand(4)
        found = captured(x, unused)
        assert list(found) == ["x", "kept", "y", "one", "none", "u"]
        assert found["x"] is x
        assert found["u"] is unused
        assert found["kept"] is weight
        assert (found["one"], found["none"]) == (1, None)
        same(found["y"], x.sin())
    assert counts(captured) == [ALL_REPLAYED]


def test_autocast_in_the_graph() -> None:
    made: list[CapturedGraph] = []

    def backend(gm: Graph, inputs: Sequence[Any]) -> Any:
        never = lambda node: "ours" if node.target is torch.tanh else None  # noqa: E731
        made.append(capture_graph_module(gm, inputs, never=never))
        return made[-1]

    def f(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = torch.tanh(x @ w) @ w
            with torch.no_grad():
                z = torch.tanh(y @ w)
        return z.float() @ w + y

    torch.compiler.reset()
    run = torch.compile(f, backend=backend)
    for seed in range(STEPS):
        x, w = rand(4, 4, seed=seed), rand(4, 4, seed=seed + 9)
        same(run(x, w), f(x, w))
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled(DEVICE.type)
    torch.compiler.reset()
    assert sum(now.replays for now in made[0].recordings()) > STEPS


# ------------------------------------------------------------------------------------------------- nothing to capture


def test_empty_graphs() -> None:
    assert capture_graph_module(Graph({}, torch.fx.Graph()), [])() is None
    captured = capture_graph_module(traced(lambda x: x), [rand(4)])
    x = rand(4)
    assert captured(x) is x
    assert not captured.recordings()
    assert not captured.findings


def test_views_alone() -> None:
    def f(x: Tensor) -> Any:
        return x.transpose(0, 1).unsqueeze(0), x[0], x.shape[0]

    for gm in (traced(f), make_fx(f)(rand(3, 4))):
        captured = capture_graph_module(gm, [rand(3, 4)])
        assert [piece.reason for piece in captured.pieces] == ["it has views and numbers alone: nothing to record"]
        assert not captured.findings
        x = rand(3, 4)
        y, row, rows = captured(x)
        same([y, row, rows], list(f(x)))
        x.add_(1)
        same([y, row], list(f(x))[:2])


def test_nothing_can_be_captured() -> None:
    gm = traced(lambda x: (torch.nonzero(x), x[0].item()))
    with warned("CG202"):
        captured = capture_graph_module(gm, [rand(4)])
    (piece,) = captured.pieces
    (finding,) = captured.findings
    assert not piece.captured
    assert str(piece.reason) in finding.what
    like(captured, gm, lambda seed: (rand(4, seed=seed),))
    assert captured.recordings() == ()
    with pytest.raises(UncapturableError, match="item reads tensor values"):
        capture_graph_module(gm, [rand(4)], fallback="error")


# --------------------------------------------------------------------------------------------- options and tearing down


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outpts": "clone"}, r"unknown option 'outpts'.*did you mean 'outputs'.*known: static, rng"),
        ({"outputs": "keep"}, "outputs='keep' is not a choice"),
        ({"static": ["x"]}, "static_input_indices="),
        ({"static_input_indices": [1]}, "1 is no position of the 1 inputs"),
        ({"static_input_indices": [True]}, "True is no position"),
        ({"static_input_indices": ["x"]}, "'x' is no position"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        capture_graph_module(traced(torch.nn.ReLU()), [rand(3)], **options)


def test_wrong_modules() -> None:
    with pytest.raises(AnnotationError, match=r"takes a torch\.fx\.GraphModule, got Mlp"):
        capture_graph_module(Mlp(), [rand(3)])  # type: ignore[arg-type]
    gm = traced(Mlp())
    capture(gm)
    with pytest.raises(AnnotationError, match="was replaced"):
        capture_graph_module(gm, [rand(3)])


def test_options_reach_the_pieces() -> None:
    captured = capture_graph_module(traced(item), batch(0), name="reader", verify="always", outputs="clone")
    assert [piece.name for piece in captured.pieces] == ["reader [0]", "reader [1]", "reader [2]"]
    like(captured, item, batch)
    assert recordings(captured.pieces[0].function).verifications >= STEPS - 2


def test_release() -> None:
    gm = traced(Mlp())
    with torch.no_grad(), capture_graph_module(gm, batch(0)) as captured:
        like(captured, gm, batch)
        assert captured.recordings()[0].graph_bytes == 0 or not EXECUTES
    before = counts(captured)
    with torch.no_grad():
        like(captured, gm, batch)
    assert counts(captured) == before == [ALL_REPLAYED]
    captured.release()


def test_it_goes_when_dropped() -> None:
    captured = capture_graph_module(traced(Mlp()), batch(0))
    with torch.no_grad():
        like(captured, captured.module, batch)
    gone: list[weakref.ref[Any]] = [weakref.ref(captured), weakref.ref(captured.module)]
    gone.append(weakref.ref(captured.pieces[0].function))
    del captured
    gc.collect()
    gc.collect()  # what the captured function held went in the first
    assert not any(one() is not None for one in gone)


def test_chains_and_kept_results() -> None:
    def f(x: Tensor) -> Tensor:
        return of_python(torch.tanh(x * 1.5)).cos() * 0.9

    captured = capture_graph_module(traced(f), [rand(4)])
    ours = theirs = rand(4)
    kept = []
    for _ in range(20):
        ours, theirs = captured(ours), f(theirs)
        kept.append((ours, theirs))
    for one, other in kept:
        same(one, other)
    assert all(now.eager_calls == 0 and now.replays > 5 for now in captured.recordings())


def test_two_graphs_do_not_share_plans() -> None:
    """Same name, same inputs, other code."""
    first = capture_graph_module(traced(lambda x: x.sin() * 2), [rand(4)], name="f")
    second = capture_graph_module(traced(lambda x: x.cos() + 2), [rand(4)], name="f")
    like(first, lambda x: x.sin() * 2, lambda seed: (rand(4, seed=seed),))
    like(second, lambda x: x.cos() + 2, lambda seed: (rand(4, seed=seed),))


# ------------------------------------------------------------------------------------------------------ random graphs

UNARY = [torch.sin, torch.relu, torch.tanh, of_python, "abs", "contiguous", "t", "round"]
BINARY = [torch.add, torch.mul, operator.sub, torch.maximum]
IN_PLACE = ["add_", "mul_", "relu_"]


@st.composite
def random_graphs(draw: Any) -> Graph:
    graph = torch.fx.Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["unary", "binary", "in place", "mask", "item"]))
        one, other = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        if kind == "unary":
            target = draw(st.sampled_from(UNARY))
            make = graph.call_method if isinstance(target, str) else graph.call_function
            values.append(make(target, (one,)))
        elif kind == "binary":
            values.append(graph.call_function(draw(st.sampled_from(BINARY)), (one, other)))
        elif kind == "in place":
            name = draw(st.sampled_from(IN_PLACE))
            graph.call_method(name, (one,) if name == "relu_" else (one, 2))
        elif kind == "mask":
            found = graph.call_function(operator.getitem, (one, graph.call_function(operator.gt, (one, 0))))
            values.append(graph.call_function(torch.add, (other, graph.call_method("sum", (found,)))))
        else:
            number = graph.call_method("item", (graph.call_method("amax", (graph.call_method("sign", (one,)),)),))
            values.append(graph.call_function(torch.mul, (other, number)))
    graph.output(tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))))
    return Graph({}, graph)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(random_graphs())
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_random_graphs(gm: Graph) -> None:
    captured = capture_graph_module(gm, [rand(3, 3), rand(3, 3)])
    like(captured, gm, lambda seed: (rand(3, 3, seed=seed), rand(3, 3, seed=seed + 50)), STEPS + 1)
    captured.release()
