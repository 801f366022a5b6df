"""What ``torch.compile`` offers to backends without documenting it. Loaded by the backend alone: it loads the compiler.

Each name stands behind a probe; what its absence costs stands beside it. Source of each: torch 2.11 and 2.13, read in
the installed packages.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _python_dispatch

from capture.core.data import frozen
from capture.torch_private.capabilities import dispatch_mode_depth


def _found(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:  # pragma: no cover - every supported torch has them all
        return None


_aot_autograd = _found("torch._dynamo.backends.common", "aot_autograd")
_CompileContext = _found("torch._guards", "CompileContext")
_TracingContext = _found("torch._guards", "TracingContext")
_Translator = _found("torch._dynamo.symbolic_convert", "InstructionTranslator")

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]
"""A graph and its example inputs -> a function of a list of inputs, which it may empty."""
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')


def differentiate(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, inference: Compiler, forward: Compiler, backward: Compiler
) -> Callable[..., Any]:
    """Have AOTAutograd make the graphs of ``graph``, each compiled by one of these; writes to inputs stay in them.

    Without ``aot_autograd``: the documented function below it, which leaves out torch's own counters and logs.
    """
    parts: dict[str, Any] = {
        "fw_compiler": forward, "bw_compiler": backward, "inference_compiler": inference,
        "keep_inference_input_mutations": True,
    }  # fmt: skip
    if _aot_autograd is not None:
        differentiated: Callable[..., Any] = _aot_autograd(**parts)(graph, inputs)
        return differentiated
    differentiated = torch.compiler.disable(
        _found("functorch.compile", "aot_module_simplified")(graph, inputs, **parts)
    )
    return differentiated


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Say that the function takes one list of inputs."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def without_first_look() -> contextlib.AbstractContextManager[Any]:
    """Leave out the dispatch mode under which torch runs a compiled function for the first time, to see whether custom
    operators tell of their aliases. Any other mode stays, and so does this one without the two names."""
    current = getattr(_python_dispatch, "_get_current_dispatch_mode", lambda: None)()
    leave_out = getattr(_python_dispatch, "_disable_current_modes", None)
    if type(current).__name__ != "_AnalyzeCustomOpInputOutputMode" or leave_out is None or dispatch_mode_depth() != 1:
        return contextlib.nullcontext()
    left_out: contextlib.AbstractContextManager[Any] = leave_out()
    return left_out


def names_custom_operators(graph: torch.fx.GraphModule) -> bool:
    """Whether the graph calls operators that are not torch's own."""
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    spaces = {getattr(target, "namespace", "aten") for target in targets}
    return not spaces <= {"aten", "prims", "prim", "inductor", "higher_order"}


def static_inputs() -> tuple[int, ...]:
    """Positions of the inputs of the graph being compiled that keep their address: parameters, buffers, and what was
    marked as static for Dynamo. Without the tracing context: none, and all are copied."""
    context = _TracingContext.try_get() if _TracingContext is not None else None
    metadata = getattr(context, "fw_metadata", None)
    return tuple(getattr(metadata, "static_input_indices", None) or ())


def compile_id() -> str:
    """What torch's logs call this compilation (``0/1``); empty without the context."""
    found = _CompileContext.current_compile_id() if _CompileContext is not None else None
    return "" if found is None else str(found)


def compiled_code() -> types.CodeType | None:
    """Code of the user's function that Dynamo compiles now. Without it graphs are named after nothing."""
    if _Translator is None:
        return None
    try:
        code = _Translator.current_tx().f_code
    except AttributeError:
        return None
    return code if isinstance(code, types.CodeType) else None


def outermost_module(graph: torch.fx.GraphModule) -> str:
    """Class of the module that Dynamo's graph begins in, where the function compiled is torch's own; empty without."""
    for node in graph.graph.nodes:
        for _, kind in (node.meta.get("nn_module_stack") or {}).values():
            return kind.__qualname__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    return ""


def origin_of(placeholder: torch.fx.Node) -> int | None:
    """Position among Dynamo's inputs that a placeholder of AOTAutograd's forward graph is; None where it is another
    tensor, or the descriptions are missing: it then goes by AOTAutograd's name."""
    found = getattr(placeholder.meta.get("desc"), "idx", None)
    is_plain = type(placeholder.meta.get("desc")).__name__ == "PlainAOTInput"
    return found if is_plain and isinstance(found, int) else None


def value_of(node: torch.fx.Node) -> Any:
    """The fake tensor, or symbol, that tracing found; None if it was not kept."""
    return node.meta.get("val")


@frozen
class Line:
    """A line of the user's, as a node's stack trace names it."""

    file: str
    line: int
    function: str


_TORCH = os.path.dirname(torch.__file__) + os.sep


def lines_of(graph: torch.fx.GraphModule) -> tuple[str, dict[int, Line]]:
    """File name of a graph's generated code, and the user's line behind each of its lines.

    Without the map from lines to nodes: none, and messages name the generated code.
    """
    _ = graph.code  # some torches generate it at the first look
    code: types.CodeType = type(graph).forward.__code__
    sources: dict[int, int | None] = getattr(graph, "_lineno_map", None) or {}
    begin: int = getattr(graph, "_prologue_start", 0)
    nodes = list(graph.graph.nodes)
    lines = {}
    for line, index in sources.items():
        frames = _FRAME.findall((nodes[index].stack_trace or "") if index is not None and index < len(nodes) else "")
        users = [frame for frame in frames if not frame[0].startswith(_TORCH)]  # not a default device's mode
        if frames:
            file, number, function = (users or frames)[-1]
            lines[line + begin] = Line(file, int(number), function)
    return code.co_filename, lines
