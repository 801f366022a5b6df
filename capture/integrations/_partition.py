"""Where a graph of ``torch.fx`` has to be cut, because no recording can hold a node, and why.

Read from the nodes alone; nothing runs. What is missed here, such as what a submodule does, is found when a piece is
watched, and the piece then runs eagerly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.node import map_arg

from capture.core.data import frozen
from capture.core.errors import AnnotationError
from capture.key import pytree
from capture.observe import higher_order
from capture.observe.operator_schema import OperatorTraits, shape_depends_on_data, tensors_in, tensors_out, traits
from capture.torch_private.devices import ACCELERATOR_METHODS

Graph = torch.fx.GraphModule
Node = torch.fx.Node
Never = Callable[[Node], str | None]

_OVERLOAD: type = type(torch.ops.aten.add.Tensor)
_SIZES = frozenset([
    "size", "stride", "storage_offset", "numel", "nelement", "dim", "ndimension", "element_size", "get_device",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "getattr", "__getitem__",
])  # fmt: skip
_READS = frozenset(["tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__len__", "data_ptr"])
_SHAPES = frozenset(["unique", "unique_consecutive", "masked_select"])
_TO_DEVICE = ACCELERATOR_METHODS | {"cpu"}
_COPIES = _TO_DEVICE | {"to", "_to_copy", "copy_", "type"}
_INDEXES = frozenset(["getitem", "setitem", "index", "index_put", "index_put_"])
_MASKS = frozenset([
    "gt", "ge", "lt", "le", "eq", "ne", "isnan", "isinf", "isfinite", "isclose", "isin", "logical_not", "logical_and",
    "logical_or", "logical_xor", "bool",
])  # fmt: skip
_OF_MASKS = frozenset(["and_", "or_", "xor", "invert", "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"])
_CONVERSIONS = (bool, int, float, complex)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_BUILTINS = (getattr, len, max, min, abs, sum, round, divmod, pow, tuple, list, slice, range)
_LASTING = frozenset(["_set_grad_enabled", "set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode"])
NO_WORK = "it has views and numbers alone: nothing to record"


@frozen
class GraphInfo:
    """What is known about the nodes of one graph before it runs."""

    module: Graph
    values: dict[Node, Any]
    """A tensor, fake or real, a number, or what else stands for the node's result."""
    device: str | None
    """The device of the graph; None where no node tells it."""

    @classmethod
    def at(cls, gm: Graph, example_inputs: Sequence[Any], device: str | None = None) -> GraphInfo:
        """Read a graph; ``device``: of the graph that it lies in."""
        values: dict[Node, Any] = {}
        example_leaves = iter(leaf for example in example_inputs for _, leaf in pytree.leaves(example))
        for node in gm.graph.nodes:
            value = next(example_leaves, None) if node.op == "placeholder" else None
            value = attribute(gm, node.target) if node.op == "get_attr" else value
            values[node] = next((node.meta[key] for key in ("val", "example_value") if key in node.meta), value)
        tensors = [tensor for value in values.values() for tensor in tensors_out(value)]
        devices = [_device(tensor.device) for tensor in (*tensors, *gm.parameters(), *gm.buffers())]
        accelerator = next((device for device in devices if device not in ("cpu", "meta")), None)
        return cls(gm, values, device or accelerator or next(iter(devices), None))

    def arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a node, as far as they are known."""
        return map_arg(node.args, self.values.get), map_arg(node.kwargs, self.values.get)

    def is_mask(self, node: Node) -> bool:
        """Whether the node's result is a tensor that chooses elements by its values (bool or uint8)."""
        value, name = self.values.get(node), _function_name(node)
        if isinstance(value, torch.Tensor):
            return value.dtype in (torch.bool, torch.uint8)
        return name in _MASKS or (name in _OF_MASKS and any(map(self.is_mask, node.all_input_nodes)))


@frozen
class Partition:
    """Consecutive nodes that belong together."""

    nodes: tuple[Node, ...]
    reasons: tuple[str, ...]
    """Why they are not recorded, each reason once; empty where they are."""

    @property
    def reason(self) -> str | None:
        """The reasons as one text."""
        return "; ".join(self.reasons) or None


def partitions(info: GraphInfo, never: Never | None) -> list[Partition]:
    """All nodes that call something, in order, cut where a recording has to end."""
    nodes = [node for node in info.module.graph.nodes if node.op.startswith("call_")]
    reasons = {node: _given_reason(never, node) or _reason(node, info) for node in nodes}
    cut = []
    for _, group in itertools.groupby(nodes, lambda node: reasons[node] is None):
        part = tuple(group)
        why = tuple(dict.fromkeys(reason for node in part if (reason := reasons[node])))
        cut.append(Partition(part, why or ((NO_WORK,) if all(_is_view(node, info) for node in part) else ())))
    parts: list[Partition] = []
    for recorded, several in itertools.groupby(cut, lambda part: not part.reasons):
        together = list(several)
        parts += together if recorded else [joined(together)]
    return parts


def joined(several: Sequence[Partition]) -> Partition:
    """Neighbouring partitions that are not recorded, as one."""
    reasons = dict.fromkeys(reason for part in several for reason in part.reasons if reason != NO_WORK)
    return Partition(tuple(node for part in several for node in part.nodes), tuple(reasons) or (NO_WORK,))


def _given_reason(never: Never | None, node: Node) -> str | None:
    reason: object = never(node) if never is not None else None
    if reason is None:
        return None
    if not isinstance(reason, str) or not reason:
        raise AnnotationError(f"never= gives a reason, which is a text, or None; got {reason!r} for {node.name}")
    return reason


def _reason(node: Node, info: GraphInfo) -> str | None:
    """Why this node cannot be recorded; None if no reason is known."""
    if node.op == "call_module":
        return _reason_inside(node, info)
    name, target = _function_name(node), node.target
    if name in _LASTING:
        return f"{name} changes a mode for what comes after"
    if getattr(target, "namespace", None) == "higher_order":
        opened = name == "invoke_subgraph" or name in higher_order.OPENED
        return None if opened else f"{name} is a higher-order operator, which runs whole"
    if target in _CONVERSIONS:
        is_number = all(isinstance(info.values.get(source), _NUMBERS) for source in node.all_input_nodes)
        return None if is_number else f"{name} reads tensor values on the host"
    if node.op == "call_function" and not _is_torchs(target):
        return f"{name} is a Python function, no operator"
    return _reason_of_values(name, node, info) or _reason_of_devices(name, node, info)


def _reason_inside(node: Node, info: GraphInfo) -> str | None:
    module = info.module.get_submodule(str(node.target))
    if not isinstance(module, Graph):
        return None
    inner = GraphInfo.at(module, map_arg(node.args, info.values.get), info.device)
    reasons = [_reason(one, inner) for one in module.graph.nodes if one.op.startswith("call_")]
    obstacle = next((reason for reason in reasons if reason), None)
    return None if obstacle is None else f"in {node.target}: {obstacle}"


def _function_name(node: Node) -> str:
    """``add`` for ``aten.add.Tensor``, ``torch.add``, ``operator.add`` and ``x.add``."""
    target = node.target
    if isinstance(target, (str, _OVERLOAD)):
        return target if isinstance(target, str) else traits(target).base
    return str(getattr(target, "__name__", type(target).__name__))


def _is_torchs(target: Any) -> bool:
    """Whether it is a function of torch's, or one of Python's operators on tensors."""
    if target in _BUILTINS or isinstance(target, _OVERLOAD):
        return True
    owner = getattr(target, "__self__", None) or getattr(target, "__objclass__", None)
    module = getattr(target, "__module__", None) or getattr(owner, "__module__", None) or type(target).__module__
    return str(module).partition(".")[0] in ("torch", "_operator", "operator", "math")


@functools.cache
def _overloads(name: str) -> tuple[OperatorTraits, ...]:
    """Traits of aten's operators of this name that give new results."""
    packet = getattr(torch.ops.aten, name, None) if name not in _SIZES else None
    found = packet.overloads() if packet is not None else ()
    return tuple(traits(getattr(packet, overload)) for overload in found if "out" not in overload)


def _candidates(node: Node) -> tuple[OperatorTraits, ...]:
    """The operator that a node calls, or all those it may call."""
    if isinstance(node.target, _OVERLOAD):
        return (traits(node.target),) if traits(node.target).base not in _SIZES else ()
    if hasattr(node.target, "overloads"):
        return tuple(traits(getattr(node.target, overload)) for overload in node.target.overloads())
    return () if getattr(node.target, "__module__", None) == "_operator" else _overloads(_function_name(node))


def _reason_of_values(name: str, node: Node, info: GraphInfo) -> str | None:
    arguments, operators = info.arguments(node), _candidates(node)
    shown = operators[0].name if isinstance(node.target, _OVERLOAD) and operators else name
    if name in _READS or (operators and all(operator.reads_host for operator in operators)):
        return f"{shown} reads tensor values on the host"
    if operators and all(operator.unsafe for operator in operators):
        return f"{shown} is tagged as unsafe for graphs"
    follows = operators and all(shape_depends_on_data(operator, *arguments) for operator in operators)
    if name in _INDEXES and any(info.is_mask(index) for index in _indices(node)):
        return f"the shape of what {shown} works on follows from the values of a mask"
    if follows or name in _SHAPES or (name == "where" and len(node.args) + len(node.kwargs) == 1):
        return f"the shape of {shown}'s result follows from values"
    return None


def _indices(node: Node) -> Iterator[Node]:
    rest: list[Node] = []
    map_arg((node.args[1:2], node.kwargs.get("indices")), rest.append)
    return iter(rest)


def _reason_of_devices(name: str, node: Node, info: GraphInfo) -> str | None:
    args, kwargs = info.arguments(node)
    tensors = [*tensors_in(args, kwargs), *tensors_out(info.values.get(node))]
    sources = {_device(tensor.device) for tensor in tensors} | set(_named_devices(name, node))
    if len(sources) > 1:
        verb = "copies between" if name in _COPIES else "works on several devices:"
        return f"{name} {verb} {', '.join(sorted(sources))}"
    if info.device is not None and sources - {info.device}:
        verb = "copies to" if name in _COPIES else "works on"
        return f"{name} {verb} {sources.pop()}, beside {info.device}"
    return None


def _named_devices(name: str, node: Node) -> Iterator[str]:
    if name in _TO_DEVICE and node.op == "call_method":
        yield _device(torch.device(name))
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, torch.device):
            yield _device(value)
        elif isinstance(value, str) and (name == "to" or value is node.kwargs.get("device")):
            yield _device(torch.device(value))


def _device(device: torch.device) -> str:
    return device.type if device.type in ("cpu", "meta") else f"{device.type}:{device.index or 0}"


def _is_view(node: Node, info: GraphInfo) -> bool:
    """Whether the node runs nothing on a device, as far as that is known without running it."""
    name, operators = _function_name(node), _candidates(node)
    if node.op == "call_module":
        return not node.users  # such as the checks of an exported module
    if isinstance(info.values.get(node), _NUMBERS):
        return True
    if name == "getitem":
        return not any(True for _ in _indices(node))
    return name in _SIZES or (
        bool(operators) and all(operator.view or operator.base.startswith("sym_") for operator in operators)
    )


def attribute(module: torch.nn.Module, path: object) -> Any:
    """What a ``get_attr`` or ``call_module`` node names."""
    return functools.reduce(getattr, str(path).split("."), module)
