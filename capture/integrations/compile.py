"""``torch.compile(model, backend="capture")``: graphs of Dynamo and AOTAutograd, each run as a captured function.

A graph's parameters and buffers come as arguments that keep their address; so do they, and views of them, among what
its backward pass gets. What else the backward pass gets are outputs of the forward recording, which the tree knows.
"""

from __future__ import annotations

import inspect
import itertools
import re
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from attrs import field

from capture.api.decorator import Handle, adopted, hand_back
from capture.core.data import define, frozen
from capture.core.errors import AnnotationError
from capture.core.facts import CodeLocation
from capture.core.options import annotate
from capture.key.signature import make_binder
from capture.native import MISS
from capture.observe import source_location
from capture.runtime import dispatch
from capture.runtime.captured import Captured
from capture.runtime.fast_path import Shortcuts
from capture.torch_private import compiler_backend as private
from capture.torch_private.capabilities import CAPABILITIES, dispatch_mode_depth
from capture.tree.thread_trees import ThreadState, acting_for, thread_state

Graph = torch.fx.GraphModule
Part = Literal["inference", "forward", "backward"]
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")
_numbers = itertools.count(1)
_all: weakref.WeakValueDictionary[int, Callable[..., Any]] = weakref.WeakValueDictionary()


def backend(graph: Graph, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **others: Any) -> Any:
    """What ``torch.compile`` calls for ``backend="capture"``, once a graph.

    Args:
        graph: Dynamo's graph.
        inputs: its example inputs.
        options: those of ``capture.capture`` but ``static``; ``name`` stands before the names of the graphs.
        others: nothing; ``mode=`` is Inductor's.

    Raises:
        AnnotationError: an unknown option or choice. Dynamo puts it into its own ``BackendCompilerFailed``.
    """
    if others:
        raise AnnotationError(
            f"backend='capture' does not take {', '.join(f'{name}=' for name in others)}; "
            "its settings are options={...}, those of capture.capture"
        )
    compiled = _Compiled.of(graph, inputs, dict(options or {}))
    return private.differentiate(
        graph, inputs, inference=compiled.inference, forward=compiled.forward, backward=compiled.backward
    )


def graphs(name: str = "") -> list[Callable[..., Any]]:
    """The graphs compiled so far whose names begin with this, oldest first, as captured functions: what
    ``recordings``, ``plans``, ``release`` and ``reset`` take."""
    return [_all[number] for number in sorted(_all) if _all[number].__name__.startswith(name)]


@frozen
class _Inputs:
    """The inputs of one graph."""

    names: tuple[str, ...]
    static: tuple[str, ...]
    owner: int | None
    """Position of the first that keeps its address. Dynamo runs modules of one class through one graph: each has
    recordings of its own, told apart by this tensor, as methods are by their receiver."""
    by_storage: bool
    """The owner is a view that is made anew in every call: its memory identifies it."""


@define(eq=False)
class _Compiled:
    """One graph of Dynamo's, with its forward and its backward pass."""

    title: str
    options: dict[str, Any]
    given: dict[str, bool]
    """Dynamo's names of the inputs; the value is True for parameters."""
    defined_at: CodeLocation | None
    names: dict[str, str] = field(factory=dict)
    """Dynamo's names by AOTAutograd's names of the forward pass's inputs."""
    static: dict[str, bool] = field(factory=dict)
    """Nodes of the forward pass on memory that keeps its address; True for inputs, False for views of them."""
    threads: dict[int, ThreadState] = field(factory=dict)
    """The threads in which forward passes ran."""

    @classmethod
    def of(cls, graph: Graph, inputs: Sequence[Any], options: dict[str, Any]) -> _Compiled:
        """The graph that Dynamo compiles now."""
        if "static" in options:
            raise AnnotationError(
                "static= has no meaning for backend='capture': parameters and buffers are known to keep their "
                "address; say it of other tensors with torch._dynamo.mark_static_address(tensor)"
            )
        annotate("graph", (), options)  # raises for an unknown option before anything is traced
        code = private.compiled_code()
        given = {
            node.name: isinstance(value, torch.nn.Parameter)
            for node, value in zip(_placeholders(graph), inputs, strict=True)
        }
        where = source_location.of_function(code) if code is not None else None
        name = options.pop("name", None) or _name_of(graph, code)
        return cls(f"{name} [{private.compile_id()}]", options, given, where)

    def inference(self, graph: Graph, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Compile a graph that needs no gradients."""
        del inputs
        run = _seen_first(graph, self._captured(graph, "inference", self._of_forward(graph)))
        return private.boxed(lambda values: run(*values))

    def forward(self, graph: Graph, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Compile a forward pass."""
        del inputs
        run = _seen_first(graph, self._captured(graph, "forward", self._of_forward(graph)))

        def boxed(values: list[Any]) -> Any:
            self.threads[threading.get_ident()] = thread_state()
            return run(*values)

        return private.boxed(boxed)

    def backward(self, graph: Graph, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Compile a backward pass. On an accelerator autograd runs it in a thread of its own; where forward passes ran
        in several, nothing tells which of them waits for it."""
        del inputs
        run = self._captured(graph, "backward", self._of_backward(graph))
        given = [private.value_of(node) for node in _placeholders(graph)]
        if all(value.device.type == "cpu" for value in given if isinstance(value, torch.Tensor)):
            return private.boxed(lambda values: run(*values))

        def boxed(values: list[Any]) -> Any:
            if len(self.threads) != 1:
                return run(*values)
            (there,) = self.threads.values()
            with acting_for(there):
                return run(*values)

        return private.boxed(boxed)

    def _of_forward(self, graph: Graph) -> _Inputs:
        nodes, given = _placeholders(graph), list(self.given)
        for node in nodes:
            origin = private.origin_of(node)
            name = given[origin] if origin is not None and origin < len(given) else node.name
            self.names[node.name] = node.name if name in self.names.values() else name
        static = [nodes[position] for position in private.static_inputs() if position < len(nodes)]
        self.static = dict.fromkeys(_on_memory_of(graph, static), False) | {node.name: True for node in static}
        return self._inputs(nodes)

    def _of_backward(self, graph: Graph) -> _Inputs:
        return self._inputs(_placeholders(graph))

    def _inputs(self, nodes: Sequence[torch.fx.Node]) -> _Inputs:
        static = [position for position, node in enumerate(nodes) if node.name in self.static]
        lasting = [position for position in static if self.static[nodes[position].name]]
        views = static if CAPABILITIES.storage_weakref else []
        names = tuple(self.names.get(node.name, node.name) for node in nodes)
        parameters = [position for position in lasting if self.given.get(names[position])]
        owner = next(iter([*parameters, *lasting, *views]), None)  # modules may share a buffer
        return _Inputs(names, tuple(names[position] for position in static), owner, not lasting)

    def _captured(self, graph: Graph, part: Part, inputs: _Inputs) -> Callable[..., Any]:
        options = {**self.options, "static": inputs.static}
        if part != "inference" and options.get("outputs") == "borrow":
            options["outputs"] = "preserve"  # autograd keeps what the forward pass saved
        name = f"{self.title} {part}"
        annotation = annotate(name, inputs.names, options, defined_at=self.defined_at)
        kind = inspect.Parameter.POSITIONAL_ONLY
        binder = make_binder(inspect.Signature([inspect.Parameter(name, kind) for name in inputs.names]))
        body = _body(graph)

        def make() -> Captured:
            return Captured(
                annotation, body, binder, Shortcuts(), dispatch.call,
                keeps_plans=False,  # plans are found again by the source of a function, which this one lacks
                is_backward=part == "backward",
            )  # fmt: skip

        handle = Handle(annotation, body, binder, make=make)
        run = _alone(handle, make) if inputs.owner is None else _of_owner(handle, inputs.owner, inputs.by_storage)
        run.__name__ = run.__qualname__ = name
        hand_back(run, handle)
        _all[next(_numbers)] = run
        return run


def _seen_first(graph: Graph, run: Callable[..., Any]) -> Callable[..., Any]:
    """Have the very first call watched: it runs under a mode of torch's own that checks custom operators."""
    if private.names_custom_operators(graph):
        return run

    def unmoded(*inputs: Any) -> Any:
        if not dispatch_mode_depth():
            return run(*inputs)
        with private.without_first_look():
            return run(*inputs)

    return unmoded


def _alone(handle: Handle, make: Callable[[], Captured]) -> Callable[..., Any]:
    handle.single = single = adopted(make())
    straight = single.straight

    def run(*inputs: Any) -> Any:
        result = straight(*inputs)
        return dispatch.call(single, inputs, {}) if result is MISS else result

    return run


def _of_owner(handle: Handle, position: int, by_storage: bool) -> Callable[..., Any]:
    of, straight = handle.of, handle.straight()

    def run(*inputs: Any) -> Any:
        owner = inputs[position].untyped_storage() if by_storage else inputs[position]
        result = straight(owner, inputs)
        return dispatch.call(of(owner), inputs, {}) if result is MISS else result

    return run


def _name_of(graph: Graph, code: types.CodeType | None) -> str:
    """The compiled function's name; that of the module's class where torch's own forward is compiled."""
    if code is None or not source_location.is_users(code.co_filename):
        return private.outermost_module(graph) or (code.co_qualname if code is not None else "graph")
    return _RESUMED.sub(r"\1:\2", code.co_qualname)


def _placeholders(graph: Graph) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _on_memory_of(graph: Graph, nodes: Sequence[torch.fx.Node]) -> list[str]:
    """Names of these nodes, and of nodes that are views of them."""
    values = {node: private.value_of(node) for node in graph.graph.nodes}
    storages = {node: one.untyped_storage() for node, one in values.items() if isinstance(one, torch.Tensor)}
    wanted = {id(storages[node]) for node in nodes if node in storages}
    return [node.name for node, storage in storages.items() if id(storage) in wanted]


def _body(graph: Graph) -> Callable[..., Any]:
    """The graph's generated code as a function that refers to nothing but the constants that it names."""
    file, lines = private.lines_of(graph)
    constants = torch.nn.Module()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            name = node.target.partition(".")[0]
            setattr(constants, name, getattr(graph, name))
    for part in constants.modules():
        # some versions of torch generate the code when it is first read
        _ = part.code if isinstance(part, Graph) else None
    forward = type(graph).forward

    def body(*inputs: Any) -> Any:
        return forward(constants, *inputs)

    source_location.note_generated(
        file, {line: (place.file, place.line, place.function) for line, place in lines.items()}
    )
    weakref.finalize(body, source_location.forget_generated, file).atexit = False
    return body
