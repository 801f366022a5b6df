"""``capture_graph_module``: a graph of ``torch.fx``, cut where no recording can hold a node; each piece is a captured
function.

In: a graph module, from whichever tracer. Out: a callable that returns what the graph module returns. Code between the
captured pieces is the module's own, on the module's own attributes.
"""

from __future__ import annotations

import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve, field
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module
from typing_extensions import override

from capture.api import inspect as _inspect
from capture.api.decorator import capture, captured_state
from capture.api.inspect import Recordings
from capture.core.data import define, frozen
from capture.core.errors import AnnotationError, CaptureWarning, UncapturableError
from capture.core.findings import Finding, Severity
from capture.core.options import annotate
from capture.integrations._partition import (
    NO_WORK,
    Graph,
    GraphInfo,
    Never,
    Node,
    Partition,
    attribute,
    joined,
    partitions,
)
from capture.observe import source_location

_INPUT, _TARGET = "capture_input", "capture_target"
"""Where a copy of a node keeps the node's former operation and target."""


@frozen
class Piece:
    """Consecutive operators of a graph."""

    name: str
    operators: int
    """Number of nodes that call something."""
    reason: str | None = None
    """Why it is not captured; None where it is."""
    function: Callable[..., Any] | None = None
    """The captured function, for ``plans``, ``explain`` and the others; None where it is not captured."""

    @property
    def captured(self) -> bool:
        """Whether it is recorded and replayed."""
        return self.function is not None


@define(eq=False)
class CapturedGraph:
    """A graph module whose pieces are captured. A context manager: leaving it releases."""

    module: Graph
    pieces: tuple[Piece, ...]
    """The pieces, in the order in which they run."""
    findings: tuple[Finding, ...] = ()
    """One finding where no piece can be captured; else empty."""
    _run: Callable[..., Any] = field(kw_only=True)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """What ``module(*inputs)`` gives, bit for bit; inputs that the graph writes are written."""
        return self._run(*inputs, **keywords)

    def recordings(self) -> tuple[Recordings, ...]:
        """Counters and findings of the captured pieces, in order."""
        return tuple(_inspect.recordings(piece.function) for piece in self.pieces if piece.captured)

    def release(self) -> None:
        """Destroy all recordings now, as before a process group goes. Later calls run the plain module."""
        self._run = self.module
        for piece in self.pieces:
            if piece.captured:
                _inspect.release(piece.function)

    def __enter__(self) -> CapturedGraph:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def capture_graph_module(
    gm: Graph,
    example_inputs: Sequence[Any],
    static_input_indices: Sequence[int] = (),
    *,
    never: Never | None = None,
    **options: Any,
) -> CapturedGraph:
    """Cut a graph where no recording can hold it, and capture the pieces.

    Args:
        gm: from ``symbolic_trace``, ``make_fx``, ``torch.export``, or a forward, backward or joint graph of
            AOTAutograd. Nothing of it changes; its parameters, buffers and submodules are looked up at each call.
        example_inputs: inputs such as those of a call, fake tensors and ``SymInt`` included. Only their dtypes and
            devices are used, where the nodes do not name their own; nothing runs.
        static_input_indices: positions of inputs that keep their address, as in ``capture(static=...)``. Default:
            none. Parameters and buffers that the graph names are known to.
        never: called for each node that calls something; gives the reason why it is no part of a recording, or None.
        options: those of ``capture`` but ``static``, for every piece; ``name`` stands before the names of the pieces.

    Raises:
        AnnotationError: ``gm`` is no graph module or its ``forward`` was replaced, an unknown option or choice, a
            position that is no input's, or ``never`` gave something else than a reason.
        UncapturableError: nothing can be captured, and ``fallback="error"``.
    """
    _check(gm, options)
    title = str(options.pop("name", None) or type(gm).__name__)
    info = GraphInfo.at(gm, example_inputs)
    static = _static_inputs(gm, static_input_indices)
    cut = partitions(info, never)
    if any(not run.reasons for run in cut):
        return _assembled(gm, title, cut, static, options)
    rest = joined(cut)
    findings = () if rest.reason == NO_WORK else (_finding(title, rest, options.get("fallback")),)
    return CapturedGraph(gm, (Piece(title, len(rest.nodes), rest.reason),), findings, run=gm)


def _check(gm: Graph, options: dict[str, Any]) -> None:
    if not isinstance(gm, Graph):
        raise AnnotationError(f"capture_graph_module takes a torch.fx.GraphModule, got {type(gm).__qualname__}")
    if "forward" in gm.__dict__:
        raise AnnotationError("forward of this graph module was replaced: its graph is not what it runs")
    if "static" in options:
        raise AnnotationError("static= has no meaning for a graph module: give static_input_indices=, by position")
    annotate("graph", (), options)


def _static_inputs(gm: Graph, positions: Sequence[int]) -> frozenset[str]:
    given = _inputs_of(gm.graph)
    for position in positions:
        if position not in range(len(given)) or isinstance(position, bool):
            raise AnnotationError(f"static_input_indices: {position!r} is no position of the {len(given)} inputs")
    return frozenset(given[position].name for position in positions)


def _finding(title: str, rest: Partition, fallback: str | None) -> Finding:
    """The finding that all of a graph runs eagerly, with the reason."""
    finding = Finding(
        code="CG202",
        name="host-work",
        severity=Severity.EAGER,
        what=f"no operator of the graph can be recorded: {rest.reason}",
        why="a replay runs device work only, and decides nothing on the host",
        fix=("call the graph module itself  (no cost)", "use operators that stay on the device  (no cost)"),
    )
    if fallback == "error":
        raise UncapturableError(finding.message(function=title), (finding,))
    text = finding.message(function=title, now="runs eagerly")
    warnings.warn(text, CaptureWarning, stacklevel=source_location.stack_level())
    return finding


def _assembled(
    gm: Graph, title: str, cut: Sequence[Partition], static: frozenset[str], options: dict[str, Any]
) -> CapturedGraph:
    """The module with a ``forward`` that calls the pieces, each a function that is captured where a recording can hold
    it."""
    split, results = _split(gm, {node: number for number, run in enumerate(cut) for node in run.nodes})
    pieces: list[Piece] = []
    functions: dict[str, Callable[..., Any]] = {}
    for call in [node for node in split.graph.nodes if node.op == "call_module"]:
        run, name = cut[len(pieces)], f"{title} [{len(pieces)}]"
        graph: Any = split.get_submodule(str(call.target)).graph
        _read_inside(graph, call)
        inputs: dict[str, Any] = dict(zip([node.name for node in _inputs_of(graph)], call.args, strict=True))
        function = body = _body(gm, graph, list(inputs))
        if not run.reasons:
            lasting = [name for name, given in inputs.items() if given.meta.get(_INPUT) in static]
            function = _captured(body, {**options, "static": lasting, "name": name})
        call.target = f"captured_piece_{len(pieces)}"
        functions[call.target] = function
        pieces.append(Piece(name, len(run.nodes), run.reason, None if run.reasons else function))
    outer = _coded(_outer(gm, split, results))
    return CapturedGraph(gm, tuple(pieces), run=_over(gm, type(outer).forward, functions))


def _captured(body: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    function: Callable[..., Any] = capture(body, **options)
    state = captured_state(function)
    state.keeps_plans = False  # plans are found again by the source of a function, which this one lacks
    state.annotation = evolve(state.annotation, defined_at=None)  # the code is generated here; no user wrote it
    return function


def _read_inside(graph: torch.fx.Graph, call: Node) -> None:
    """Let a piece read parameters and buffers from the module instead of being given them: what it is given may be
    what a submodule inside it writes, and then the two would not be told apart."""
    inputs = _inputs_of(graph)
    with graph.inserting_after(inputs[-1] if inputs else None):
        for node, argument in zip(inputs, call.args, strict=True):
            if isinstance(argument, Node) and argument.op == "get_attr":
                read = graph.create_node("get_attr", str(argument.target))
                read.meta = dict(argument.meta)
                node.replace_all_uses_with(read)
                graph.erase_node(node)
    read_here = [argument for argument in call.args if isinstance(argument, Node) and argument.op == "get_attr"]
    call.args = tuple(argument for argument in call.args if argument not in read_here)
    for argument in read_here:
        if not argument.users:
            call.graph.erase_node(argument)


def _inputs_of(graph: torch.fx.Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _split(gm: Graph, numbers: dict[Node, int]) -> tuple[Graph, list[Node]]:
    """The graph cut by these numbers: a graph that calls ``submod_<number>``, which gives the nodes listed.

    ``split_module`` marks the nodes that it reads, gives submodules of one name in two folders the same one, and wants
    all that is returned to come from a piece or an input: it gets a copy that it may change.
    """
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    graph.graph_copy(gm.graph, copies)
    for node, made in copies.items():
        made.meta = {key: value for key, value in node.meta.items() if key != "example_value"}
        made.meta |= {_INPUT: node.name} if node.op == "placeholder" else {_TARGET: node.target}
    results = [node for node in _output_of(gm).all_input_nodes if node.op != "get_attr"]
    graph.output(tuple(copies[node] for node in results))
    parts = {copies[node]: number for node, number in numbers.items()}
    split = split_module(_coded(graph, gm), gm, parts.__getitem__, keep_original_order=True)
    return split, results


def _outer(gm: Graph, split: Graph, results: Sequence[Node]) -> torch.fx.Graph:
    """The graph of ``split``, with the inputs and outputs of the module in their own structure."""
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    results_of_copy: Any = graph.graph_copy(split.graph, copies)
    output = _output_of(gm)
    outer_values = dict(zip(results, results_of_copy, strict=True))
    for node in output.all_input_nodes:
        if node.op == "get_attr":
            outer_values[node] = graph.create_node("get_attr", str(node.target))
    graph.output(map_arg(output.args[0], outer_values.__getitem__))
    graph.set_codegen(gm.graph._codegen)
    return graph


def _output_of(gm: Graph) -> Node:
    outputs: list[Node] = [node for node in gm.graph.nodes if node.op == "output"]
    return outputs[-1]


def _coded(graph: torch.fx.Graph, real: torch.nn.Module | None = None) -> Graph:
    """A module for the code of a graph alone: it has nothing of what the code names, but modules where ``real`` has."""
    named = [node for node in graph.nodes if node.op in ("get_attr", "call_module")]
    stubs = {str(node.target): torch.nn.Module() if node.op == "call_module" else None for node in named}
    for name in stubs:
        if real is not None and isinstance(attribute(real, name), torch.nn.Module):
            stubs[name] = torch.nn.Module()
    return Graph(stubs, graph)


def _body(gm: Graph, graph: torch.fx.Graph, inputs: list[str]) -> Callable[..., Any]:
    """The code of a piece as a function, which finds what it names in the module as it is then."""
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            node.target = node.meta[_TARGET]
    part = _coded(graph)
    forward, module = type(part).forward, _Attributes(gm)
    names = any(node.op in ("call_module", "get_attr") for node in graph.nodes)

    def of_module(*values: Any) -> Any:
        return forward(module, *values)

    def of_inputs(*values: Any) -> Any:
        return forward(part, *values)

    body: Any = of_module if names else of_inputs
    kind = inspect.Parameter.POSITIONAL_ONLY
    body.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in inputs])
    _name_lines(body, part)
    return body  # type: ignore[no-any-return]


class _Attributes(torch.nn.Module):
    """A graph module's parameters, buffers and submodules, as they are at any time, without its graph: that leads back
    to the module, and what is known of a module while it lives would keep it alive."""

    def __init__(self, gm: Graph) -> None:
        super().__init__()
        shared = {name: gm.__dict__[name] for name in ("_parameters", "_buffers", "_modules")}
        self.__dict__.update(shared, _others=weakref.ref(gm))

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._others(), name)


def _name_lines(body: Callable[..., Any], part: Graph) -> None:
    """Have messages about the generated code name the user's lines, where tracing kept them."""
    if not any(node.stack_trace for node in part.graph.nodes):
        return
    from capture.torch_private import compiler_backend as private

    file, lines = private.lines_of(part)
    source_location.note_generated(
        file, {line: (place.file, place.line, place.function) for line, place in lines.items()}
    )
    weakref.finalize(body, source_location.forget_generated, file).atexit = False


def _over(gm: Graph, forward: Any, functions: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The module with another ``forward``: its attributes and hooks are the very ones of ``gm``, at any time."""
    kind = type(gm)
    own = {name: staticmethod(function) for name, function in functions.items()}
    running = types.new_class(kind.__name__, (kind,), exec_body=lambda space: space.update(own, forward=forward))
    shell: Any = object.__new__(running)
    object.__setattr__(shell, "__dict__", gm.__dict__)
    return shell  # type: ignore[no-any-return]
