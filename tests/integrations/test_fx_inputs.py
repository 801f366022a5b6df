"""``capture_graph_module``: inputs, attributes and submodules of graph modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from typing_extensions import override

from capture import plans
from capture.integrations.fx import CapturedGraph, capture_graph_module
from tests.support.device import DEVICE
from tests.support.graph_modules import (
    ALL_REPLAYED,
    STEPS,
    TRACERS,
    Graph,
    Reads,
    batch,
    built,
    counts,
    item,
    like,
    traced,
)
from tests.support.nets import Mlp
from tests.support.rows import fresh as fresh
from tests.support.rows import rand, same

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
    """Dynamo's graphs take sizes as inputs, and its example inputs are fake tensors and ``SymInt``."""
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
    """Stands for a process group: an object that compares by identity alone."""

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
    assert all(now.recordings <= 2 for now in captured.recordings())  # a second one where a result lived on


def test_opaque_inputs_of_a_recorded_operator() -> None:
    """Opaque inputs are compared by identity: each has a recording."""

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
    """A collective is recorded in the piece that also has its wait."""
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
                result, given = captured(rand(4, seed=seed), name, mesh)
                same(result, rand(4, seed=seed).sin() * 2)
                assert given is mesh
                del result
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
    assert {placeholder.path: placeholder.policy.name for placeholder in plan.placeholders} == {
        "x": "COPY_BACK",
        "cache": "STATIC",
    }


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
        del ours
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
    with_default = capture_graph_module(plain, [rand(4)])
    for seed in range(STEPS):
        same(with_default(x=rand(4, seed=seed)), rand(4, seed=seed) * 2.0)


def test_wrong_inputs_raise_as_in_the_module() -> None:
    gm = torch.export.export(Mlp(), batch(0)).module()
    captured = capture_graph_module(gm, batch(0))
    for wrong in ((), (rand(4, 9),), (rand(4, 8), rand(1))):
        with pytest.raises(Exception) as theirs:  # noqa: PT011 - any error, compared below
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
            for graph in (gm, twin):
                graph.train(mode)
            like(captured, twin, batch)
        for graph in (gm, twin):
            graph.register_forward_hook(hook)
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
    """Submodules whose names ``split_module`` would make equal."""

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
    """A graph that returns inputs, parameters and constants beside a computed result."""
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
        outputs = captured(x, unused)
        assert list(outputs) == ["x", "kept", "y", "one", "none", "u"]
        assert outputs["x"] is x
        assert outputs["u"] is unused
        assert outputs["kept"] is weight
        assert (outputs["one"], outputs["none"]) == (1, None)
        same(outputs["y"], x.sin())
        del outputs
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
