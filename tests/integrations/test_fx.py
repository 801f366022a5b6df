"""``capture_graph_module``: graphs of every tracer, and where they are cut, compared bit for bit with a twin."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from functorch.compile import aot_function  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from typing_extensions import override

from capture import plans
from capture.core.errors import AnnotationError
from capture.integrations.fx import CapturedGraph, capture_graph_module
from tests.support.device import EXECUTES
from tests.support.graph_modules import (
    ALL_REPLAYED,
    STEPS,
    TRACERS,
    Graph,
    Reads,
    batch,
    counts,
    item,
    like,
    of_python,
    traced,
)
from tests.support.nets import Mlp
from tests.support.rows import fresh as fresh
from tests.support.rows import rand, same

torch.fx.wrap("of_python")


class Norms(nn.Module):
    """Writes buffers, has a parameter of its own, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.scale = nn.Parameter(torch.ones(8) * 1.5)

    @override
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.inner(x) * self.scale
        return {"y": y, "sum": y.sum(0)}


@pytest.mark.one_in(3)
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
    """An exported program has its parameters as inputs; they are static."""
    net = Mlp()
    program = torch.export.export(net, batch(0))
    parameters = list(net.parameters())
    captured = capture_graph_module(program.graph_module, [*parameters, *batch(0)], range(len(parameters)))
    with torch.no_grad():
        like(captured, lambda *values: (net(values[-1]),), lambda seed: (*parameters, *batch(seed)))
    assert counts(captured) == [ALL_REPLAYED]
    (plan,) = plans(captured.pieces[0].function)
    assert sorted(placeholder.policy.name for placeholder in plan.placeholders) == ["COPY"] + ["STATIC"] * 4


def test_training() -> None:
    torch.manual_seed(0)
    net = Reads()
    twin = copy.deepcopy(net)
    gm = traced(net)
    captured = capture_graph_module(gm, batch(0))
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (gm, twin))
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
    """Forward and backward graphs as AOTAutograd passes them to a backend."""
    made: list[CapturedGraph] = []

    def compiler(gm: Graph, inputs: Sequence[Any]) -> Any:
        made.append(capture_graph_module(gm, inputs))
        return made[-1]

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w).sin() * x

    run = aot_function(f, fw_compiler=compiler, bw_compiler=compiler)
    for seed in range(STEPS + 1):
        results = []
        for function in (run, f):
            x, w = rand(4, 4, seed=seed).requires_grad_(), rand(4, 4, seed=seed + 9).requires_grad_()
            y = function(x, w)
            y.sum().backward()
            results.append([y, x.grad, w.grad])
        same(*results)
    assert len(made) == 2
    assert all(now.replays >= STEPS - 3 and not now.eager_calls for graph in made for now in graph.recordings())


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
    """The device is found from fake tensors, as a compiler passes them; nothing runs."""
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


def test_what_is_missed_has_a_recording_for_each_answer() -> None:
    """A read inside of a submodule is no node of the graph, so it is found when the piece runs."""

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
    like(captured, net, batch, 24)
    ((recorded, replays, _),) = counts(captured)
    assert recorded >= 2
    assert replays >= 12 or not EXECUTES  # elsewhere each proof of an answer is a call that replays nothing


def test_writes_keep_their_order() -> None:
    """Only its place in the graph says that the second piece comes after the write."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        z = y.sin().sum().round().item()
        x.mul_(3)
        of_python(x)
        return x + y + z

    captured = capture_graph_module(traced(f), [rand(4), rand(4)])
    like(captured, f, lambda seed: (rand(4, seed=seed), rand(4, seed=seed + 9)))
    assert len(captured.pieces) == 5
