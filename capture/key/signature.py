"""One call -> the values of all parameters, their dynamic leaves and the arguments' part of the key.

The C module binds, by a signature that is taken apart once: ``inspect.Signature.bind`` takes 5 us, this 0.1. The key
holds metadata, never values, of tensors and generators, and the value of everything else.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import itertools
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Container
from typing import Any

import torch
from attrs import evolve

from capture.core.data import frozen
from capture.core.interrupts import let_through
from capture.key import numpy_arrays, objects, pytree, tensor_meta
from capture.key.exact import bits_of, exact
from capture.key.packages import is_library, package_of
from capture.native import native
from capture.torch_private import capabilities
from capture.torch_private.distributed import progress_of, sharding_of
from capture.torch_private.subclasses import is_wrapper, unseen

Key = tuple[Any, ...]
Leaf = Any  # a torch.Tensor or a torch.Generator
KeyPart = Callable[[Any, "Leaves"], Any]


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@frozen(kw_only=True)
class Binder:
    """Made for one signature. ``values(*args, **kwargs)`` gives one value a parameter, in order."""

    names: tuple[str, ...]
    values: Callable[..., tuple[Any, ...]]
    call: Callable[[Callable[..., Any], tuple[Any, ...]], Any]
    """``call(fn, values)`` calls ``fn`` with bound values as a caller would."""
    variadic: bool
    positional: int
    """How many parameters, the first ones, may be given by position; -1 if more arguments may follow."""
    keywords: str | None = None
    """Name of the ``**kwargs`` parameter."""
    by_position: Callable[[tuple[Any, ...]], int | None] | None = None
    """Where the function sees in which form it is called: how many values bound ones were given by position; None
    where some were given by name."""
    places: tuple[Any, ...] = ()
    """Places in Python state whose values follow those of the parameters: see ``input_places``."""


_FORM = "form of the call"
"""Name of an additional last parameter, for functions that can tell in which form they are called."""


def sees_form(function: Any) -> bool:
    """Whether code of a decorator stands between the call and the parameters of ``signature_of``: it may see which
    arguments were given by position, by name, or not at all. A plain function sees its parameters alone."""
    is_plain = type(function) is types.FunctionType
    return not is_plain or hasattr(function, "__wrapped__") or hasattr(function, "__signature__")


def make_binder(signature: inspect.Signature, *, formed: bool = False) -> Binder:
    """The binder of a signature; of a method's without its receiver. Default values are shared, not copied.

    ``formed``: the form of a call is a value, too, and the function is called in it.
    """
    binder = _plain_binder(signature)
    if not formed:
        return binder
    forms = _Forms(signature, binder)
    return evolve(
        binder, names=(*binder.names, _FORM), values=forms.values, call=forms.call, by_position=forms.by_position
    )


class _Forms:
    """Binds calls together with their form: how many arguments were given by position, and which by name."""

    def __init__(self, signature: inspect.Signature, binder: Binder) -> None:
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        self._bound = binder.values
        self._placed = sum(kind in _BY_POSITION for kind in kinds)
        self._star = kinds.index(inspect.Parameter.VAR_POSITIONAL) if inspect.Parameter.VAR_POSITIONAL in kinds else -1
        self._stars = kinds.index(inspect.Parameter.VAR_KEYWORD) if inspect.Parameter.VAR_KEYWORD in kinds else -1
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._at = {name: at for at, name in enumerate(signature.parameters) if kinds[at] in named}
        self._nothing = (None,) * len(kinds)
        self._texts: dict[tuple[Any, ...], str] = {}
        self._parts: dict[str, tuple[int, tuple[str, ...]]] = {}

    def values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """One value a parameter, and the form: a text, so that it is compared as any plain value is. What the
        parameters do not take may still be what the code before them does: such a call is its own form."""
        try:
            bound = self._bound(*args, **kwargs)
        except TypeError:
            return (*self._nothing, (args, kwargs))
        form = (len(args), *kwargs)
        text = self._texts.get(form)
        if text is None:
            text = self._texts[form] = f"{len(args)} by position" + "".join(f", {name}=" for name in kwargs)
            self._parts[text] = len(args), tuple(kwargs)
        return (*bound, text)

    def call(self, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        """Call the function in the form of these values."""
        form = values[-1]
        if type(form) is tuple:
            return function(*form[0], **form[1])
        count, names = self._parts[form]
        args = values[: min(count, self._placed)]
        if count > self._placed:
            args = (*args, *values[self._star])
        at = self._at
        return function(
            *args, **{name: values[at[name]] if name in at else values[self._stars][name] for name in names}
        )

    def by_position(self, values: tuple[Any, ...]) -> int | None:
        """How many of the bound values were given by position; None where some were given by name."""
        count, names = self._parts.get(values[-1], (0, (_FORM,))) if type(values[-1]) is str else (0, (_FORM,))
        return None if names else count


def _plain_binder(signature: inspect.Signature) -> Binder:
    parameters = tuple(signature.parameters.values())
    kinds = {parameter.kind: parameter.name for parameter in parameters}
    names = tuple(signature.parameters)
    bound = native.Binder(
        names,
        tuple(parameter.kind for parameter in parameters),
        tuple(parameter.default for parameter in parameters),
        inspect.Parameter.empty,
    )
    variadic = inspect.Parameter.VAR_POSITIONAL in kinds
    return Binder(
        names=names,
        values=bound,
        call=bound.call,
        positional=-1 if variadic else sum(parameter.kind in _BY_POSITION for parameter in parameters),
        variadic=variadic or inspect.Parameter.VAR_KEYWORD in kinds,
        keywords=kinds.get(inspect.Parameter.VAR_KEYWORD),
    )


def signature_of(target: Any, *, method: bool) -> inspect.Signature:
    """The signature of a callable, without the receiver for a method; variadic where there is none to be had."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a builtin without a signature
        variadic = [("args", inspect.Parameter.VAR_POSITIONAL), ("kwargs", inspect.Parameter.VAR_KEYWORD)]
        return inspect.Signature([inspect.Parameter(name, kind) for name, kind in variadic])
    if not method:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class Unkeyable(Exception):
    """A value that neither compares by value nor can be watched by a weak reference."""


def tensor_key(tensor: torch.Tensor, leaves: Leaves) -> Any:
    """Metadata of a plain tensor: all that a recording has frozen except its address and values, and its form
    (``runtime.entry.Family``)."""
    try:
        shape, stride = tensor.shape, tensor.stride()
        if shape and shape[0] == 1:
            stride = tensor_meta.plain_strides(shape, stride)
        part = (
            tensor.dtype,
            shape,
            stride,
            tensor.device,
            tensor.requires_grad,
            tensor.is_inference(),
            tensor.data_ptr() == -1,  # raises where the tensor has no address
            "no memory" if capabilities.is_zero_tensor(tensor) else tensor.is_conj() or tensor.is_neg(),
        )
    except RuntimeError as error:  # a sparse or nested tensor has no strides or no address
        let_through(error)
        return _odd_tensor_key(tensor, leaves)
    leaves.append(tensor)
    own = tensor.__dict__  # what of it is read keeps the call eager
    return (*part, *sorted(own)) if own else part


def _parameter_key(tensor: torch.Tensor, leaves: Leaves) -> Any:
    """As ``tensor_key``, and the class, which code may ask for."""
    return (torch.nn.Parameter, tensor_key(tensor, leaves))


@unseen
def _odd_tensor_key(tensor: torch.Tensor, leaves: Leaves) -> Any:
    leaves.append(tensor)
    if tensor.layout is torch.strided and not tensor.is_nested:
        try:
            strides: object = tensor.stride()
        except RuntimeError as error:
            let_through(error)
            strides = None
    else:
        strides = None
    return (type(tensor), tensor.layout, tensor.dtype, tuple(tensor.shape) if not tensor.is_nested else (), strides,
            tensor.device, tensor.requires_grad)  # fmt: skip


def _wrapper_key(tensor: torch.Tensor, leaves: Leaves) -> Any:
    """The part for a tensor that holds other tensors: these, and everything else that it is made of, such as placements
    and the device mesh. If some of that cannot be hashed, the call has no key (``Unkeyable``)."""
    shell = pytree.Shell.of(tensor)
    own = (shell.kind, shell.context, tuple(shell.others.values()), shell.shape, shell.stride, tensor.requires_grad)
    hash(own)
    return (own, *[key_of(member, leaves) for member in shell.members])


def _generator_key(generator: torch.Generator, leaves: Leaves) -> Any:
    same = next((i for i, leaf in enumerate(leaves) if leaf is generator), len(leaves))
    leaves.append(generator)
    return ("generator", generator.device, same)


def _same(value: Any, leaves: Leaves) -> Any:
    return value


def _typed(value: Any, leaves: Leaves) -> Any:
    return (type(value), value)


def _float_key(value: float, leaves: Leaves) -> Any:
    return (float, bits_of(value))


def _complex_key(value: complex, leaves: Leaves) -> Any:
    return (complex, bits_of(value.real), bits_of(value.imag))


def _slice_key(value: slice, leaves: Leaves) -> Any:
    return (slice, key_of(value.start, leaves), key_of(value.stop, leaves), key_of(value.step, leaves))


def _sequence_key(value: Any, leaves: Leaves) -> Any:
    leaves.visit.enter()
    if leaves.left_out:
        part = (type(value), *[_member_key(value, ("item", at), member, leaves) for at, member in enumerate(value)])
    else:
        part = (type(value), *[key_of(member, leaves) for member in value])
    leaves.visit.depth -= 1
    return part


def _member_key(holder: Any, name: Any, member: Any, leaves: Leaves) -> Any:
    return "left out" if (id(holder), name) in leaves.left_out else key_of(member, leaves)


def _list_key(value: list[Any], leaves: Leaves) -> Any:
    return _again_or(_sequence_key(value, leaves), value, leaves)


def _dict_key(value: dict[Any, Any], leaves: Leaves) -> Any:
    return _again_or(_mapping_key(value, leaves), value, leaves)


def _again_or(part: Any, value: Any, leaves: Leaves) -> Any:
    """The part for a list or dict, which tells that the call has the very same one in another place: what the body
    changes in the one shows in the other."""
    if id(value) in leaves.changed:
        part = ("state", part)
    return part if leaves.visit.is_new(value) else ("again", leaves.visit.numbers[id(value)], part)


def _mapping_key(value: dict[Any, Any], leaves: Leaves) -> Any:
    leaves.visit.enter()
    part = (type(value), *[
        (
            name if type(name) is str else exact(name),
            _member_key(value, ("item", name), value[name], leaves) if leaves.left_out else key_of(value[name], leaves),
        )
        for name in value
    ])  # fmt: skip
    leaves.visit.depth -= 1
    return part


LeftOut = tuple[int, Any]
"""The ``id`` of a container, and the name of a member."""


class Leaves(list[Leaf]):
    """The leaves of one call, and the objects that were opened, which count once."""

    def __init__(self, *, opens: bool = True) -> None:
        super().__init__()
        self.visit = objects.Visit()
        self.opens = opens
        """Objects are opened; otherwise they are told apart by identity."""
        self.changed: Container[int] = ()
        """``id`` of containers and objects in Python state that the body changes: a call that is given one of them is
        another call than one that is given a like one."""
        self.left_out: Collection[LeftOut] = ()
        """Numbers in containers that are inputs of their own."""


def _object_key(value: Any, leaves: Leaves) -> Any:
    """The part for an object that is opened. One that was met before in this call is referred to by its number."""
    kind: Any = type(value)
    if not leaves.opens and not pytree.has_fields(kind):
        return _closed_key(value, leaves)
    if not leaves.visit.is_new(value):
        return ("again", leaves.visit.numbers[id(value)])
    kind = ("state", kind) if id(value) in leaves.changed else kind
    if not objects.is_plain(type(value)):
        return (kind, *[(suffix, key_of(member, leaves)) for suffix, member in pytree.children(value)])
    return (kind, *_class_defaults(value), *[
        ((name[0], exact(name[1])) if name[0] == "item" else name, _member_key(value, name, member, leaves))
        for name, member in objects.members(value)
    ])  # fmt: skip


def _class_defaults(value: Any) -> list[Any]:
    """Fields of a dataclass whose values are the class's defaults, not the object's own."""
    kind = type(value)
    names = [name for name in pytree.field_names(kind) or () if name in kind.__dict__]
    own = value.__dict__ if names and kind.__dictoffset__ else {}
    return [(name, key_of(kind.__dict__[name], Leaves())) for name in names if kind.__dictoffset__ and name not in own]


def _undecided_key(value: Any, leaves: Leaves) -> Any:
    """The part for an object of a plain class that was not opened so far."""
    if not (leaves.opens and objects.may_open_argument(value)):
        return _closed_key(value, leaves)
    _other_parts[type(value)] = _object_key
    return _object_key(value, leaves)


def _closed_key(value: Any, leaves: Leaves) -> Any:
    hashing: object = type(value).__hash__
    is_claimed = issubclass(type(hashing), types.FunctionType) and not is_library(package_of(type(value).__module__))
    if hashing is not None and hashing is not object.__hash__ and not is_claimed:
        return _typed(value, leaves)
    return _identity_key(value, leaves)  # ``__eq__`` of a user's class may ignore what a body reads


def _weak_key(value: Any, leaves: Leaves) -> Any:
    met = leaves.visit.numbers
    at = value()
    return (
        (weakref.ref, met[id(at)], "met")
        if id(at) in met
        else (weakref.ref, None if at is None else identity_token(at))
    )


def _registered_key(value: Any, leaves: Leaves) -> Any:
    leaves.visit.enter()
    part = _opened_key(value, leaves)
    leaves.visit.depth -= 1
    return part


def _opened_key(value: Any, leaves: Leaves) -> Any:
    if type(value) in objects.registered:
        flat, context = objects.registered[type(value)][0](value)
        return (type(value), context, *[key_of(member, leaves) for member in flat])
    members, spec = capabilities.open_registered(value)
    return (capabilities.registered_key(spec), *[key_of(member, leaves) for member in members])


def _content_key(value: Any, leaves: Leaves) -> Any:
    found = numpy_arrays.content(value)
    if found is None:
        raise Unkeyable(f"large {type(value).__name__}")
    return found


class Token(int):
    """A number for an object, that knows when the object is gone."""

    is_dead = False


class _Reference(weakref.ref[Any]):
    __slots__ = ("address", "kind", "token")
    __eq__, __hash__ = object.__eq__, object.__hash__  # not those of the object that it refers to
    address: int
    kind: weakref.ref[type]
    """The class, held weakly: a class made inside a function may refer to the object, which would then never die."""
    token: Token


_tokens: dict[int, tuple[weakref.ref[Any], Token]] = {}
_NOBODY: tuple[None] = (None,)
_died: list[_Reference] = []
"""References whose objects died since this list was emptied last."""
_next_token = itertools.count(1)
_deaths = 0
_held: OrderedDict[Any, int] = OrderedDict()
_MOST_HELD = 1024
_kept: dict[int, tuple[Any, Token]] = {}
_MOST_KEPT, _MOST_OF_A_CLASS = 64, 6
NEVER_WEAKLY = (torch.Stream, torch.Event)
"""A CUDA stream or event of torch 2.11 dies without clearing its weak references, which then give out freed memory."""


def identity_token(value: Any) -> int:
    """A number for an object that lives as long as the object and is never given to another one."""
    if issubclass(type(value), NEVER_WEAKLY):  # not ``isinstance``: what a weak proxy stands for may be gone
        return _token_of_held(value)
    if (alive := _kept.get(id(value))) is not None:  # so that the address is still its own
        return alive[1]
    kept = _tokens.get(id(value))
    if kept is not None and kept[0]() is value:
        return kept[1]
    deaths()
    token = Token(next(_next_token))
    try:
        # a callback in C: an exception of a signal handler inside a Python callback would be lost
        reference = _Reference(value, _died.append)
    except TypeError:
        if objects.is_plain(type(value)):
            return _token_of_kept(value)
        raise Unkeyable(f"{type(value).__name__} object") from None
    reference.address, reference.token, reference.kind = id(value), token, weakref.ref(type(value))
    kept = _tokens.setdefault(id(value), (reference, token))
    if kept[0] is not reference and kept[0]() is not value:
        kept = _tokens[id(value)] = (reference, token)
    return kept[1]  # another thread made one first


def deaths() -> int:
    """How many objects that have a token died so far."""
    global _deaths
    while _died:
        try:
            reference = _died[-1]
        except IndexError:  # another thread took it, as may happen at each step below
            break
        if _tokens.get(reference.address, _NOBODY)[0] is reference:
            _tokens.pop(reference.address, None)
        _module_lists.pop(reference.token, None)
        if not reference.token.is_dead:
            reference.token.is_dead, _deaths = True, _deaths + 1
            if (kind := reference.kind()) is not None:
                objects.died(kind)
        with contextlib.suppress(ValueError):  # another thread removed it
            _died.remove(reference)
    return _deaths


def names_the_dead(key: Any) -> bool:
    """Whether the key contains an object that is gone, so that no later call can have it."""
    if type(key) is tuple:
        return any(map(names_the_dead, key))
    return type(key) is Token and key.is_dead


def _token_of_held(value: Any) -> int:
    """As ``identity_token``, for objects that take no weak reference. They are kept alive instead, a limited number of
    them: one that was dropped gets another token later, which costs a recording. Streams that compare equal share
    one."""
    token = _held.pop(value, 0) or next(_next_token)
    _held[value] = token
    if len(_held) > _MOST_HELD:
        _held.popitem(last=False)
    return token


def _token_of_kept(value: Any) -> int:
    """As ``identity_token``, for objects of plain classes that take no weak reference (slots, ``SimpleNamespace``). A
    few are kept alive instead, each until it is seen that nobody else has it: then it counts as gone."""
    global _deaths
    of_one = object()
    kept = [*_kept.values(), (of_one, Token(0))]
    *counts, of_two = [sys.getrefcount(one) for one, _ in kept]  # this name has the last one besides
    for (one, token), count in zip(kept, counts, strict=False):
        if count < of_two and _kept.pop(id(one), None) is not None:
            token.is_dead, _deaths = True, _deaths + 1
            objects.died(type(one))
    if sum(type(one) is type(value) for one, _ in kept) >= _MOST_OF_A_CLASS:  # recordings of theirs keep them alive
        objects.died(type(value))
    if len(_kept) >= _MOST_KEPT:
        raise Unkeyable(f"{type(value).__name__} object")
    return _kept.setdefault(id(value), (value, Token(next(_next_token))))[1]


Switches = tuple[
    tuple[tuple[dict[str, Any], str], ...],
    tuple[tuple[weakref.ref[torch.nn.Module], str], ...],
    tuple[weakref.ref[Any], ...],
]
"""Where the training flags of modules are kept: dicts and weak references to modules, each with the name of the flag;
and weak references to the state that ``fully_shard`` keeps for a module."""
_module_lists: dict[int, dict[_Reference, Switches]] = {}
"""By token, with one entry each. It is removed when the module dies and not at the next call, as it holds
parameters."""


def forget_module_structure(module: torch.nn.Module) -> None:
    """Read the module's submodules again at the next key; called when a check of the structure failed."""
    _module_lists.pop(identity_token(module), None)


def module_key(module: torch.nn.Module, leaves: Leaves | None = None) -> Any:
    """Identity of a module and the training flags of all its submodules."""
    return (type(module), identity_token(module), *training_reader(module)())


_SWITCHES = ("require_backward_grad_sync",)
"""What ``DistributedDataParallel.no_sync()`` turns off around a call."""


def training_reader(module: torch.nn.Module) -> Callable[[], list[Any]]:
    """A function that reads the training flags of a module and all its submodules, ``_SWITCHES``, and what
    ``fully_shard`` is about to do with them."""
    owns, weak, sharded = switches_of(module)
    if sharded:
        return lambda: [*[own.get(name) for own, name in owns], *[getattr(ref(), name, None) for ref, name in weak],
                        *[progress_of(ref()) for ref in sharded]]  # fmt: skip
    if not weak:
        return lambda: [own.get(name) for own, name in owns]
    return lambda: [
        *[own.get(name) for own, name in owns],
        *[getattr(reference(), name, None) for reference, name in weak],
    ]


def switches_of(module: torch.nn.Module) -> Switches:
    """Where the flags of ``training_reader`` are kept: the ``__dict__`` of a module, which is read fastest, or a weak
    reference to the module where its ``__dict__`` would keep it alive or the flag is kept elsewhere."""
    token = identity_token(module)
    lists = _module_lists.get(token)
    if not lists:
        owns, weak = [], []
        leads_nowhere = dict[int, bool]()
        for submodule in reversed(list(module.modules())):  # children before their parents
            # a child without an entry is one of its own parents
            below = (leads_nowhere.get(id(child), False) for child in submodule.children())
            leads_nowhere[id(submodule)] = _names_no_module(submodule) and all(below)
        for submodule in module.modules():
            names = _names_of_switches(submodule)
            if "training" in submodule.__dict__ and leads_nowhere[id(submodule)]:
                owns += [(submodule.__dict__, name) for name in names]
            else:
                weak += [(weakref.ref(submodule), name) for name in names]
            if isinstance(submodule, torch.nn.modules.lazy.LazyModuleMixin):  # its first call is one of its own
                weak.append((weakref.ref(submodule), "__class__"))
        states = (sharding_of(submodule) for submodule in module.modules())
        sharded = {id(state): weakref.ref(state) for state in states if state is not None}
        lists = _module_lists[token] = {}
        # removed by a callback in C, as for tokens
        lists[_Reference(module, lists.pop)] = tuple(owns), tuple(weak), tuple(sharded.values())
    return next(iter(lists.values()))


def _names_of_switches(module: torch.nn.Module) -> tuple[str, ...]:
    return ("training", *[name for name in _SWITCHES if name in module.__dict__])


def weak_switches_of(module: torch.nn.Module) -> Switches:
    """As ``switches_of``, all by weak references: for a module that may die before what is made of this."""
    weak = [(weakref.ref(one), name) for one in module.modules() for name in _names_of_switches(one)]
    lazy = (one for one in module.modules() if isinstance(one, torch.nn.modules.lazy.LazyModuleMixin))
    weak += [(weakref.ref(one), "__class__") for one in lazy]
    return (), tuple(weak), switches_of(module)[2]


_NAMES_NONE = pytree.PLAIN_TYPES | {types.BuiltinFunctionType, type}


def _names_no_module(module: torch.nn.Module) -> bool:
    """Whether it leads to other modules by its submodules alone. A hook that is a bound method of a module would be
    another way."""
    for name, value in module.__dict__.items():
        kind = type(value)
        if kind in _NAMES_NONE or name in ("_parameters", "_buffers", "_modules"):
            continue
        is_empty = kind in (dict, OrderedDict, set) and not value
        if not is_empty and (kind not in (tuple, list) or any(type(member) not in _NAMES_NONE for member in value)):
            return False
    return True


def _identity_key(value: Any, leaves: Leaves) -> Any:
    return (type(value), identity_token(value))


def is_told_by_identity(value: Any) -> bool:
    """Whether the part of the key is the object's identity and its class, of a module with its switches besides."""
    part = _PARTS.get(type(value)) or _other_parts.get(type(value))
    if part is module_key:
        return True
    if part not in (_undecided_key, _closed_key, _identity_key):
        return False
    made = _identity_key(value, Leaves()) if part is _identity_key else _closed_key(value, Leaves())
    return type(made) is tuple and len(made) == 2 and type(made[1]) is Token


def _method_key(value: Any, leaves: Leaves) -> Any:
    return ("method", identity_token(value.__func__), identity_token(value.__self__))


_PARTS: dict[type, KeyPart] = {
    torch.Tensor: tensor_key,
    torch.nn.Parameter: _parameter_key,
    torch.nn.Buffer: tensor_key,
    torch.Generator: _generator_key,
    type(None): _same,
    str: _same,
    bytes: _same,
    int: _typed,
    bool: _typed,
    float: _float_key,
    complex: _complex_key,
    slice: _slice_key,
    tuple: _sequence_key,
    list: _list_key,
    torch.Size: _typed,
    dict: _dict_key,
    OrderedDict: _dict_key,
    defaultdict: _dict_key,
    types.MethodType: _method_key,
    weakref.ref: _weak_key,
    **dict.fromkeys(numpy_arrays.FROZEN, _content_key),
}
_other_parts: weakref.WeakKeyDictionary[type, KeyPart] = weakref.WeakKeyDictionary()
"""Of all other classes: a program may make some for as long as it runs."""


def _part_for(kind: type) -> KeyPart:
    if issubclass(kind, torch.Tensor):
        return _wrapper_key if is_wrapper(kind) else _odd_tensor_key
    if issubclass(kind, (enum.Enum, type)) or kind in pytree.PLAIN_TYPES:
        return _typed
    if numpy_arrays.is_array_type(kind):
        return _content_key
    if pytree.is_namedtuple(kind):
        return _sequence_key
    if issubclass(kind, torch.nn.Module):
        return module_key
    if pytree.is_registered(kind):
        return _registered_key
    if pytree.is_object(kind):
        return _object_key
    if objects.is_plain(kind):
        return _undecided_key
    return _identity_key if issubclass(kind, frozenset) else _closed_key


def register_container(kind: type, flatten: objects.Flatten, unflatten: objects.Unflatten) -> None:
    """Open objects of exactly this class with ``flatten`` and ``unflatten``: see ``capture.register_container``."""
    objects.register(kind, flatten, unflatten)
    _other_parts[kind] = _registered_key


def key_of(value: Any, leaves: Leaves) -> Any:
    """Hashable part of the key for one value; its tensors and generators are appended to ``leaves``."""
    kind = type(value)
    part = _PARTS.get(kind) or _other_parts.get(kind)
    if part is None:
        part = _other_parts[kind] = _part_for(kind)
    return part(value, leaves)
