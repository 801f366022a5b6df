"""What a dispatched operator does beyond its result, read from schema, tags and a few known names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from capture.core.data import frozen
from capture.core.interrupts import let_through
from capture.key.pytree import PLAIN_TYPES, TENSOR_TYPES
from capture.key.tensor_meta import is_dense
from capture.observe.collectives import NAMESPACES, communicates, writes_first
from capture.torch_private.devices import AUTOCAST_TYPES
from capture.torch_private.operators import composite, fast_operator

TENSORS = frozenset(TENSOR_TYPES)
Operator = Any  # torch._ops.OpOverload, which has no public name

# Write their running statistics without saying so in the schema or bumping a version counter (torch 2.13, read
# from the schemas). Positions of running_mean and running_var, and of the flag that makes them written.
_NORM_FAMILY = {
    "aten::native_batch_norm": (3, 4, 5),
    "aten::cudnn_batch_norm": (3, 4, 5),
    "aten::miopen_batch_norm": (3, 4, 5),
    "aten::batch_norm": (3, 4, 5),
    "aten::_batch_norm_impl_index": (3, 4, 5),
    "aten::batch_norm_update_stats": (1, 2, None),
    "aten::instance_norm": (3, 4, 5),
}
# Return Python values that follow from metadata alone.
_METADATA = {"is_same_size", "is_nonzero_static", "_has_compatible_shallow_copy_type", "is_contiguous", "dim", "numel"}
_HOST_CHECKS = {"_linalg_check_errors", "_assert_scalar", "_local_scalar_dense", "equal"}
_BOOLEAN_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# Kernels that call operators which autocast would cast; all others are below autocast when a mode sees them.
# Found by comparing torch.nn's modules under a mode with plain eager (torch 2.13).
_CASTING_INSIDE: dict[str, tuple[str, ...]] = {
    "_trilinear": ("cpu",),  # on CUDA autocast knows bilinear itself
    "_transformer_encoder_layer_fwd": AUTOCAST_TYPES,
    "_native_multi_head_attention": AUTOCAST_TYPES,
    "run_package": AUTOCAST_TYPES,
}
CALLS_OTHERS = frozenset({"_trilinear"})
"""Those of them that compute nothing themselves: the operators that they call are recorded in their place. A replay
runs in the caller's autocast, which may be another than the body's."""
_TRUSTED = frozenset({"aten", "prims", "prim", *NAMESPACES})
RUNS_PACKAGE = "capture::run_package"
"""Runs code that nothing tells of, so it runs again even where it makes nothing."""
_DRAW_NAMES = {"bernoulli", "multinomial", "normal", "rand", "randn", "randint", "randperm", "rrelu_with_noise"}

DETACHING = frozenset(["detach", "alias", "detach_"])
"""Views of the whole that autograd does not follow."""


@frozen(kw_only=True)
class OperatorTraits:
    """Facts about an operator that hold for every call of it."""

    name: str
    """``aten.add.Tensor``."""
    base: str
    """``add``."""
    namespace: str
    writes: tuple[int | str, ...]
    """Positions, or names of keyword-only arguments, that the schema says are written."""
    norm: tuple[int, int, int | None] | None
    draws: bool
    reads_host: bool
    data_dependent_shape: bool
    unsafe: bool
    casts_inside: tuple[str, ...]
    """Device types for which autocast acts on what the kernel calls."""
    metadata: Literal["no", "view", "storage"]
    """It changes its argument's sizes and strides, or its storage."""
    resizes: bool
    """Gives a storage other memory."""
    indexes: bool
    """Its result depends on values if an index is a mask."""
    collective: bool
    """Ranks of a process group exchange something, so it runs as often as eager runs it."""
    unseen: bool
    """It has no effect on tensors: ranges of a profiler, and wrappers of a collective's result."""
    reaches: bool
    """It reaches memory by offsets in a storage, outside of its argument's own elements."""
    foreign: bool
    """It belongs to another library than torch."""
    opaque: bool
    """Has to run again even where it makes nothing: what it does is not known. Operators of other libraries write
    arguments that their schemas do not name, as ``fsdp::all_gather_copy_in`` does (torch 2.13)."""
    lifts: bool
    """``torch.tensor(...)``: gives a constant."""
    view: bool
    """Makes a view, which runs nothing on a device."""
    composite: Callable[..., Any] | None
    """Runs the operators that it is made of; None if it is not made of others."""
    reads_form: bool
    """Its results may follow from the form of a tensor (``runtime.entry.Family``)."""
    plain: bool
    """Its arguments alone decide what it does: no host reads, no copies to or from the CPU."""


Known = tuple[OperatorTraits, Callable[..., Any], Operator]
_known: dict[int, Known] = {}
"""By ``id``, as hashing an operator takes longer than all the rest; they are kept, so that ids stay unique."""
readers: dict[int, tuple[str, Callable[..., Any], bool]] = {}
"""Operators that only read tensors: name, function that runs it, whether it makes a view."""


plain: dict[int, OperatorTraits] = {}
"""Operators that make new tensors of tensors. If all tensors are on one device, nothing else has to be noted."""
_LOOKED_AT = frozenset({"_efficientzerotensor", "wait_tensor", "_to_copy", "copy"})


def looked_up(op: Operator) -> Known:
    """Traits of an overload, the function that runs it, and the overload itself; computed once."""
    entry = _known.get(id(op))
    if entry is None:
        op_traits, run = _traits_of(op), fast_operator(op)
        special = (
            op_traits.writes
            or op_traits.norm
            or op_traits.draws
            or op_traits.unseen
            or op_traits.indexes
            or op_traits.lifts
            or op_traits.casts_inside
        )
        if op_traits.plain and not special and op_traits.composite is None:
            readers[id(op)] = op_traits.name, run, op_traits.view
            if not (
                op_traits.foreign
                or op_traits.reaches
                or op_traits.opaque
                or op_traits.collective
                or op_traits.base in _LOOKED_AT
            ):
                plain[id(op)] = op_traits
        entry = _known[id(op)] = op_traits, run, op
    return entry


CONVERSIONS = frozenset(["_to_copy", "convert_element_type", "clone"])
"""They give the same elements, of another type."""


def is_alike_everywhere(op: OperatorTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """A view, or a conversion that gives the same bits in the same order on the host and on a device: so what the host
    makes of a tensor from outside can be made of that tensor's copy on the device."""
    if op.view:
        return True
    if op.base not in CONVERSIONS or not args or not isinstance(source := args[0], torch.Tensor):
        return False
    target = kwargs.get("dtype") or (args[1] if op.base == "convert_element_type" else None) or source.dtype
    plain = source.layout is torch.strided and not (source.is_conj() or source.is_neg())
    in_order = kwargs.get("memory_format") in (None, torch.preserve_format)
    return plain and in_order and keeps_bits(source.dtype, target) and is_dense(source.shape, source.stride())


def keeps_bits(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a conversion gives the same bits on the CPU and the device. Of floats to integers it does not where they
    do not fit."""
    plain = not (source.is_complex or target.is_complex)
    return source == target or (plain and (target.is_floating_point or not source.is_floating_point))


def traits(op: Operator) -> OperatorTraits:
    """Traits of an overload."""
    return looked_up(op)[0]


def _traits_of(op: Operator) -> OperatorTraits:
    schema = op._schema
    full = schema.name
    namespace, _, base = full.partition("::")
    writes: list[int | str] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else index)
    if not writes and writes_first(namespace, base):
        writes.append(0)
    tags = op.tags
    kinds = [str(result.type) for result in schema.returns]  # numbers beside tensors, as in attention, are sizes
    python_result = bool(kinds) and all(kind in ("number", "bool", "int", "float", "Scalar") for kind in kinds)
    python_result = python_result and any("Tensor" in str(argument.type) for argument in schema.arguments)
    metadata = base in _METADATA or base.startswith("sym_")
    dynamic = torch.Tag.dynamic_output_shape in tags and base not in _BOOLEAN_INDEXING
    reads_host = not metadata and (
        python_result or base in _HOST_CHECKS or (torch.Tag.data_dependent_output in tags and not dynamic)
    )
    changes = _metadata_change(base, tags)
    unsafe = torch.Tag.cudagraph_unsafe in tags if hasattr(torch.Tag, "cudagraph_unsafe") else False
    lists = base.startswith(("_foreach", "_fused")) and bool(writes)
    view = bool(schema.returns) and not writes and all(argument.alias_info is not None for argument in schema.returns)
    foreign = namespace not in _TRUSTED
    special = full in _NORM_FAMILY or base in _CASTING_INSIDE or base.startswith("lift") or lists
    return OperatorTraits(
        name=str(op),
        base=base,
        namespace=namespace,
        writes=tuple(writes),
        norm=_NORM_FAMILY.get(full),
        draws=torch.Tag.nondeterministic_seeded in tags or base.rstrip("_") in _DRAW_NAMES,
        reads_host=reads_host,
        data_dependent_shape=dynamic,
        metadata=changes,
        resizes=changes == "storage" and base != "set_",
        casts_inside=_CASTING_INSIDE.get(base, ()),
        unsafe=unsafe,
        view=view,
        indexes=base in _BOOLEAN_INDEXING,
        collective=communicates(namespace, base),
        unseen=namespace == "profiler" or base == "_wrap_tensor_autograd",
        reaches=base in _REACHING,
        foreign=foreign,
        opaque=full == RUNS_PACKAGE or (foreign and not view and not writes),
        lifts=base.startswith("lift"),
        composite=composite(op),
        reads_form=not (view and base not in _REACHING) and not _is_elementwise(op),
        plain=not (reads_host or dynamic or unsafe or special or changes != "no" or namespace in NAMESPACES),
    )


def _metadata_change(base: str, tags: Any) -> Literal["no", "view", "storage"]:
    if base in ("resize_", "resize_as_", "set_", "set_data", "_resize_output_"):
        return "storage"
    return "view" if torch.Tag.inplace_view in tags else "no"


def _is_elementwise(op: Operator) -> bool:
    """Whether each element follows from the elements in its place. With ``memory_format`` strides are taken over, as
    ``clone`` does."""
    named = (argument.name == "memory_format" for argument in op._schema.arguments)
    return torch.Tag.pointwise in op.tags and not any(named)


_NUMBERS = frozenset(
    {"number", "float", "Optional[number]", "Optional[float]", "List[number]", "Tensor", "Optional[Tensor]"}
)
"""Kinds of arguments, as a schema has them. A number may stand where a tensor does, as in ``x * 0.1``."""


@functools.lru_cache(maxsize=1024)
def number_arguments(op: Operator) -> frozenset[int | str]:
    """Arguments, by position and by name, that are numbers and nothing else: values of a result follow from them, and
    neither its shape, nor what memory it has. Sizes, dimensions and indices are integers in a schema; of a range, which
    has no tensor and no size among its arguments, the numbers are its size."""
    arguments = op._schema.arguments
    kinds = [str(argument.type) for argument in arguments]
    sized = any("Tensor" in kind or argument.name == "size" for kind, argument in zip(kinds, arguments, strict=True))
    has_fixed_sizes = op.namespace == "aten" and torch.Tag.dynamic_output_shape not in op.tags
    if not has_fixed_sizes or not (sized or op._schema.name == "aten::scalar_tensor"):
        return frozenset()
    positions = [at for at, kind in enumerate(kinds) if kind in _NUMBERS]
    return frozenset([*positions, *(arguments[at].name for at in positions)])


_REACHING = ("as_strided", "as_strided_", "as_strided_copy", "set_")


def with_tensor(args: tuple[Any, ...]) -> tuple[Operator, tuple[Any, ...]]:
    """``set_`` to a storage as ``set_`` to a tensor's: whose memory it is can then be told, as of every argument."""
    target, storage, *rest = args
    source = torch.empty(0, dtype=target.dtype, device=target.device).set_(storage)
    geometry = rest or [0, source.shape, source.stride()]
    return torch.ops.aten.set_.source_Tensor_storage_offset, (target, source, *geometry)


def is_tensor(value: object) -> bool:
    """Whether it is a tensor. The check by type comes first, as it is four times as fast for a parameter, or for no
    tensor."""
    kind = type(value)
    return kind in TENSORS or (kind not in PLAIN_TYPES and isinstance(value, torch.Tensor))


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors among an operator's arguments, lists of tensors opened."""
    found: list[torch.Tensor] = []
    for argument in (*args, *kwargs.values()) if kwargs else args:
        kind = type(argument)
        if kind in TENSORS:  # the check by type comes first, as in ``is_tensor``
            found.append(argument)
        elif kind in PLAIN_TYPES:
            continue
        elif isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            for member in argument:
                if is_tensor(member):
                    found.append(member)
                elif type(member) is list:  # of collectives
                    found += tensors_in((member,), {})
    return found


def plain_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """The tensors among an operator's arguments, where these are some, strided ones with real numbers on one device,
    and no device is named; else None."""
    if kwargs and ("device" in kwargs or not PLAIN_TYPES.issuperset(map(type, kwargs.values()))):
        return None
    tensors: list[torch.Tensor] = []
    for argument in args:
        kind = type(argument)
        if kind in TENSORS:
            tensors.append(argument)
        elif kind is list:
            tensors += tensors_in((argument,), {}) if argument and type(argument[0]) is not int else ()
        elif kind not in PLAIN_TYPES:
            return None
    if not tensors:
        return None
    device = tensors[0].device
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_complex() or tensor.device != device:
            return None
    return tensors


def numbers_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
    """Whole numbers among an operator's arguments, lists of numbers opened."""
    for argument in (*args, *kwargs.values()):
        yield from (
            one for one in (argument if isinstance(argument, (list, tuple)) else [argument]) if type(one) is int
        )


def on_one_device(devices: set[torch.device], kwargs: dict[str, Any]) -> bool:
    """Whether all tensors that an operator gets, on these ``devices``, and makes are on devices of one type."""
    target = kwargs.get("device")
    if target is None and len(devices) < 2:
        return True
    kinds = {device.type for device in devices}
    if target is not None:
        kinds.add(torch.device(target).type)
    return len(kinds) < 2


def tensors_out(result: Any) -> list[torch.Tensor]:
    """Tensors among an operator's results."""
    if type(result) is torch.Tensor or isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for member in result for tensor in tensors_out(member)]
    return []


def written(op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Tensors this call writes; the flag tells that only the list of norms says so."""
    for position in op.writes:
        value = (
            kwargs.get(position) if isinstance(position, str) else (args[position] if position < len(args) else None)
        )
        for tensor in tensors_in((value,), {}):
            yield tensor, False
    if op.norm is not None:
        mean, var, flag = op.norm
        if flag is None or (flag < len(args) and args[flag]):
            yield from ((args[index], True) for index in (mean, var) if isinstance(args[index], torch.Tensor))


def given_outs(op: OperatorTraits, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What is given as ``out=``: kernels give it the shape of the result, and other memory where that is larger."""
    return tensors_in(tuple([kwargs.get(name) for name in op.writes if isinstance(name, str)]), {}) if kwargs else []


def shape_depends_on_data(op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call's result size, or its control flow on the host, follows from tensor values."""
    if not (op.indexes or op.data_dependent_shape):
        return False
    if op.base in _BOOLEAN_INDEXING:
        indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
        return any(is_mask(index) for index in indices) and not _fills(op, args, kwargs)
    if op.base == "repeat_interleave":
        return op.data_dependent_shape and kwargs.get("output_size") is None
    return op.data_dependent_shape


def breaks(op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host has to wait for values in this call, so that no graph can hold it."""
    return op.reads_host or ((op.indexes or op.data_dependent_shape) and shape_depends_on_data(op, args, kwargs))


def read_text(result: Any) -> str:
    """What the host learns from a result: a number itself, of tensors their kinds and sizes. Equal texts mean equal
    types and bits, but for what kind of NaN it is."""
    made = () if isinstance(result, (bool, int, float)) else tensors_out(result)
    return repr([(str(one.dtype), tuple(one.shape)) for one in made]) if made else repr(result)


def is_mask(index: object) -> bool:
    """Whether it is an index in brackets that chooses elements by its values."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _fills(op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``x[mask] = number`` only fills, and counts nothing: torch hands it on to ``masked_fill_`` if the mask is
    the only index and lies on the tensor's device (aten/src/ATen/native/TensorAdvancedIndexing.cpp, 2.11)."""
    given = dict(zip(("self", "indices", "values", "accumulate"), args, strict=False)) | kwargs
    if op.base not in ("index_put", "index_put_", "_index_put_impl_") or given.get("accumulate"):
        return False
    value, chosen = given["values"], [index for index in given["indices"] if index is not None]
    is_number = value.numel() == 1 and value.device.type == "cpu"
    return is_number and len(chosen) == 1 and chosen[0].device == given["self"].device


def lacks_tensor(op: Operator, args: Sequence[Any]) -> bool:
    """Whether a tensor that is not optional is None: autograd passes undefined tensors to backward operators, below its
    own checks, where nobody else may."""
    kinds = set(map(type, args))
    return type(None) in kinds and any(
        value is None and str(argument.type) == "Tensor"
        for argument, value in zip(op._schema.arguments, args, strict=False)
    )


def raises_on_shapes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that raised does so for these shapes and types always, whatever the values."""
    on_meta: dict[int, torch.Tensor] = {}

    def bare(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return on_meta.setdefault(id(value), torch.empty_like(value, device="meta"))
        if isinstance(value, (list, tuple)):
            return type(value)(map(bare, value))
        return torch.device("meta") if isinstance(value, torch.device) else value

    try:
        function(*map(bare, args), **{name: bare(value) for name, value in kwargs.items()})
    except NotImplementedError:  # it has no form without values
        return False
    except Exception as error:  # noqa: BLE001 - whatever it raises
        let_through(error)
        return True
    return False
