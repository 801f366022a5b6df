"""``capture_graph_module``: nothing to capture, options, tearing down, and random graphs."""

from __future__ import annotations

import gc
import operator
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from capture import UncapturableError, capture, recordings
from capture.core.errors import AnnotationError
from capture.integrations.fx import capture_graph_module
from tests.support.device import EXECUTES
from tests.support.graph_modules import ALL_REPLAYED, STEPS, Graph, batch, counts, item, like, of_python, traced
from tests.support.nets import Mlp
from tests.support.rows import fresh as fresh
from tests.support.rows import rand, same, warned

torch.fx.wrap("of_python")

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
    assert not any(reference() is not None for reference in gone)


def test_chains_and_kept_results() -> None:
    def f(x: Tensor) -> Tensor:
        return of_python(torch.tanh(x * 1.5)).cos() * 0.9

    captured = capture_graph_module(traced(f), [rand(4)])
    ours = theirs = rand(4)
    kept = []
    for _ in range(20):
        ours, theirs = captured(ours), f(theirs)
        kept.append((ours, theirs))
    for mine, expected in kept:
        same(mine, expected)
    assert all(now.eager_calls == 0 and now.replays > 5 for now in captured.recordings())


def test_two_graphs_do_not_share_plans() -> None:
    """Two graphs with the same name and inputs and different operators."""
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
        first, second = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        if kind == "unary":
            target = draw(st.sampled_from(UNARY))
            make = graph.call_method if isinstance(target, str) else graph.call_function
            values.append(make(target, (first,)))
        elif kind == "binary":
            values.append(graph.call_function(draw(st.sampled_from(BINARY)), (first, second)))
        elif kind == "in place":
            name = draw(st.sampled_from(IN_PLACE))
            graph.call_method(name, (first,) if name == "relu_" else (first, 2))
        elif kind == "mask":
            selected = graph.call_function(operator.getitem, (first, graph.call_function(operator.gt, (first, 0))))
            values.append(graph.call_function(torch.add, (second, graph.call_method("sum", (selected,)))))
        else:
            number = graph.call_method("item", (graph.call_method("amax", (graph.call_method("sign", (first,)),)),))
            values.append(graph.call_function(torch.mul, (second, number)))
    graph.output(tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))))
    return Graph({}, graph)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(random_graphs())
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_random_graphs(gm: Graph) -> None:
    captured = capture_graph_module(gm, [rand(3, 3), rand(3, 3)])
    like(captured, gm, lambda seed: (rand(3, 3, seed=seed), rand(3, 3, seed=seed + 50)), STEPS + 1)
    captured.release()
