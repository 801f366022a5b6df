"""Decorate: ``capture`` and the real function it hands back.

A real function, since ``nn.Module.forward`` must stay a ``types.MethodType`` and type checkers accept nothing else
as an override. Its state lives beside it: one ``Captured`` a function, or one an instance, held weakly.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import torch
from attrs import define, field
from torch.compiler import is_dynamo_compiling

from capture import _events, _packages, _profile, _trees, _where
from capture._annotate import Annotation, CaptureOptions, annotate
from capture._bind import Binder, make_binder, signature_of
from capture._errors import AnnotationError
from capture._fast import MISS, native, no_way
from capture._named import named_key
from capture._runtime import Captured

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)

_HANDLE = "__capture__"
_all: weakref.WeakSet[Captured] = weakref.WeakSet()


@overload
def capture(target: M, /, **options: Unpack[CaptureOptions]) -> M: ...
@overload
def capture(target: Callable[P, R], /, **options: Unpack[CaptureOptions]) -> Callable[P, R]: ...
@overload
def capture(**options: Unpack[CaptureOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def capture(target: Any = None, /, **options: Any) -> Any:
    """Record what a function does on its first calls and replay it afterwards.

    ``@capture``, ``@capture(static=["cache"])``, ``capture(fn, ...)``, or ``capture(module)``, which replaces the
    module's ``forward`` in place and returns the module. A function comes back as a function of the same type.

    Args:
        static: names or paths of arguments (``"cache"``, ``"cache.0.k"``, ``"self.table"``) whose tensors keep their
            address: they are read and written where they are, without a copy. Default: none.
        rng: ``"graphsafe"`` (default): draws advance with every replay and equal eager's; ``"eager"``: a function
            that draws runs eagerly; ``"forbid"``: drawing is an error.
        max_recordings: recordings of this function below one node of the tree, at least 1. Default 5: each costs a
            run of the body and keeps its graph; a function that asks for more usually has a key that never settles.
        outputs: ``"preserve"`` (default): an output that is still held when its step ends keeps its values;
            ``"borrow"``: it raises on use after its step; ``"clone"``: always a copy.
        inputs: how arguments that are not static reach the graph. ``"copy"``: one batched copy of all into buffers of
            the recording. ``"bind"``: no copy, the graph is pointed at the caller's tensors before it runs (1 to 2 us a
            kernel that uses one; 0 while they come back at the same address). ``"auto"`` (default): bound from 1 MiB
            on, as copying less is cheaper. What cannot be bound is copied.
        fallback: ``"eager"`` (default) where a recording is impossible, or ``"error"``.
        warmup: eager runs before recording, at least 1 (default); the first is watched.
        verify: ``"off"`` (default), ``"first"`` replay of every recording, or ``"always"``: run the body beside the
            replay and compare bit for bit.
        checks: ``"always"`` (default): every replay compares the Python state it relies on, parameter by parameter;
            ``"sampled"``: every 16th, and the next one after any module registered a parameter, buffer or submodule.
            For modules of many parameters that nobody moves by ``.data =`` or through ``__dict__``.
        gradients: how gradients of parameters reach their ``.grad`` where the result of the function needs gradients.
            ``"autograd"`` (default): by autograd, as eager's. ``"accumulate"``: the recorded backward pass makes them,
            or adds to them, itself, which saves most of a pass's host time. Then ``torch.autograd.grad`` and
            ``backward(inputs=...)`` do not reach parameters, and gradients from several functions may be added in
            another order. Hooks of parameters run, by a slower way; while a process group exists, autograd delivers.
        guards: callables of no argument; what they return is part of the key. For Python state that only deeper
            code reads.
        name: for callables without a source line.

    Raises:
        AnnotationError: an unknown option, choice or argument name, or something that cannot be captured.
    """
    if target is None:
        return functools.partial(_capture, options=options)
    return _capture(target, options)


Instances = dict[int, tuple[Callable[[], Any], Captured, Callable[..., Any]]]
"""By ``id`` of the receiver: a weak reference to it, its state, and what takes its calls straight."""


@define(eq=False)
class Handle:
    """What a decorated function knows about itself."""

    annotation: Annotation
    function: Callable[..., Any]
    binder: Binder
    single: Captured | None = None
    instances: Instances = field(factory=dict)
    make: Callable[[], Captured] | None = None
    """Makes the state of an instance that the function is not a method of."""

    def of(self, receiver: Any) -> Captured:
        """The state of one instance, made at its first call."""
        known = self.instances.get(id(receiver))
        if known is not None and known[0]() is receiver:
            return known[1]
        if self.make is None:
            captured = _new(self.annotation, self.function, self.binder, receiver)
        else:
            captured = adopted(self.make())
        address = id(receiver)

        def died(_: object) -> None:
            gone = self.instances.pop(address, None)
            if gone is not None:
                gone[1].retire()

        try:
            reference: Callable[[], Any] = weakref.ref(receiver, died)
        except TypeError:  # no weak references to this type: the state lives as long as the function
            reference = functools.partial(_same, receiver)
        self.instances[address] = (reference, captured, captured.straight)
        return captured

    def straight(self) -> Callable[..., Any]:
        """Takes an instance and a tuple of its positional arguments; ``MISS`` for other calls than one of its last."""
        return no_way if native is None else native.Methods(self.instances, MISS)

    def states(self) -> Iterator[Captured]:
        """All states made so far."""
        if self.single is not None:
            yield self.single
        for _, captured, _ in list(self.instances.values()):
            yield captured


def adopted(captured: Captured) -> Captured:
    """A state made elsewhere, known to ``report`` from now on."""
    _all.add(captured)
    return captured


def hand_back(wrapper: Callable[..., Any], handle: Handle) -> None:
    """Make a function that keeps its states in ``handle`` one that ``recordings`` and the others take."""
    setattr(wrapper, _HANDLE, handle)
    weakref.finalize(wrapper, _retire_all, handle).atexit = False


def _retire_all(handle: Handle) -> None:
    for captured in handle.states():
        captured.retire()


def _same(value: Any) -> Any:
    return value


def _new(annotation: Annotation, function: Callable[..., Any], binder: Binder, receiver: Any) -> Captured:
    captured = Captured(annotation, function, binder, named_key(function, binder.names, receiver), receiver)
    _all.add(captured)
    return captured


def _capture(target: Any, options: dict[str, Any]) -> Any:
    if isinstance(target, torch.nn.Module):
        return _capture_module(target, options)
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(_capture(target.__func__, options))
    if isinstance(target, type):
        raise AnnotationError(
            f"capture takes a function, a method or an instance, not the class {target.__qualname__}; decorate its "
            "forward (or __call__), or capture an instance"
        )
    if isinstance(target, property) or not callable(target):
        raise AnnotationError(f"capture takes a callable, got {type(target).__qualname__}")
    if _handle_of(target) is not None:
        raise AnnotationError(f"{_name_of(target)} is captured already")
    code_of = inspect.unwrap(target)
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_kind(code_of) for is_kind in kinds):
        raise AnnotationError(f"{_name_of(target)} is a generator or coroutine function; capture the work it calls")
    if isinstance(target, types.MethodType):
        return _function(target.__func__, options, receiver=target.__self__, keep=target)
    if isinstance(target, types.FunctionType):
        return _method(target, options) if _is_method(target) else _function(target, options)
    call = type(target).__call__
    if isinstance(call, types.FunctionType):
        return _function(call, options, receiver=target, keep=target)
    return _function(target, options, keep=target)


def _is_method(function: types.FunctionType) -> bool:
    """Defined in a class body with ``self`` (or ``cls``) first, or named as methods are, as far as its names tell."""
    owner, _, name = function.__qualname__.rpartition(".")
    if not owner or owner.endswith("<locals>") or not function.__code__.co_argcount:
        return False
    return function.__code__.co_varnames[0] in ("self", "cls") or name in ("forward", "__call__")


def _name_of(target: Any) -> str:
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    module = getattr(target, "__module__", None) or type(target).__module__
    return f"{module}.{name}"


def _annotated(function: Any, options: dict[str, Any], *, method: bool, name: str) -> Handle:
    binder = make_binder(signature_of(function, method=method))
    code = getattr(inspect.unwrap(function), "__code__", None)
    annotation = annotate(
        name, binder.names, options, has_self=method, variadic=binder.variadic,
        defined_at=_where.of_function(code) if code is not None else None,
    )  # fmt: skip
    return Handle(annotation, function, binder)


def _function(function: Any, options: dict[str, Any], *, receiver: Any = None, keep: Any = None) -> Any:
    """A function, or a callable object or bound method with one fixed receiver, which the result keeps alive."""
    target = function if keep is None else keep
    handle = _annotated(function, options, method=receiver is not None, name=_name_of(target))
    captured = handle.single = _new(handle.annotation, function, handle.binder, receiver)
    call, straight = captured.__call__, captured.straight

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return target(*args, **kwargs)
        result = MISS if kwargs else straight(*args)
        return call(*args, **kwargs) if result is MISS else result

    _dress(wrapper, target, handle)
    weakref.finalize(wrapper, captured.retire).atexit = False
    return wrapper


def _method(function: types.FunctionType, options: dict[str, Any]) -> Any:
    handle = _annotated(function, options, method=True, name=_name_of(function))
    of, straight = handle.of, handle.straight()

    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return function(self, *args, **kwargs)
        result = MISS if kwargs else straight(self, args)
        return of(self)(*args, **kwargs) if result is MISS else result

    _dress(wrapper, function, handle)
    return wrapper


def _capture_module(module: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    forward = module.forward
    if _handle_of(forward) is not None:
        raise AnnotationError(f"forward of this {type(module).__qualname__} is captured already")
    try:
        if isinstance(forward, types.MethodType) and forward.__self__ is module:
            wrapper = _method(forward.__func__, options)  # type: ignore[arg-type]
            module.forward = types.MethodType(wrapper, module)
            # the wrapper dies with the module, and so would what waits for the module's end
            weakref.finalize(wrapper, _retire, wrapper.__dict__[_HANDLE].instances).atexit = False
        else:
            module.forward = _capture(forward, options)
    except RuntimeError as error:
        raise AnnotationError(f"{type(module).__qualname__} does not let its forward be replaced: {error}") from None
    return module


def _retire(instances: Instances) -> None:
    for _, captured, _ in instances.values():
        captured.retire()


def _dress(wrapper: Any, target: Any, handle: Handle) -> None:
    functools.update_wrapper(wrapper, target)
    if not hasattr(target, "__name__"):
        wrapper.__name__ = wrapper.__qualname__ = handle.annotation.function.rpartition(".")[2]
        wrapper.__doc__ = type(target).__doc__
    setattr(wrapper, _HANDLE, handle)


def _handle_of(target: Any) -> Handle | None:
    function = target.__func__ if isinstance(target, types.MethodType) else target
    handle = getattr(function, "__dict__", {}).get(_HANDLE)
    return handle if isinstance(handle, Handle) else None


def captured_states(target: Any) -> list[Captured]:
    """States behind a decorated function, a bound method (its instance's alone) or a module.

    Raises ``AnnotationError`` for what was not decorated.
    """
    if isinstance(target, torch.nn.Module):
        target = target.forward
    handle = _handle_of(target)
    if handle is None:
        raise AnnotationError(f"{_name_of(target)} is not a captured function; decorate it with capture first")
    if isinstance(target, types.MethodType) and handle.single is None:
        return [handle.of(target.__self__)]
    return list(handle.states())


def captured_state(target: Any) -> Captured:
    """The one state behind a decorated function, a bound method or a module.

    Raises ``AnnotationError`` for what was not decorated, and for a method of a class, which has one an instance.
    """
    states = captured_states(target)
    target = target.forward if isinstance(target, torch.nn.Module) else target
    handle = _handle_of(target)
    if handle is None or (handle.single is None and not isinstance(target, types.MethodType)):
        raise AnnotationError(f"{_name_of(target)} is a method of a class; use it through an instance")
    return states[0]


def all_states() -> list[Captured]:
    """States of everything captured in this process and still alive."""
    return sorted(_all, key=lambda captured: captured.number)


def _forget_in_child() -> None:
    """A forked child keeps decorated functions but no recordings."""
    for captured in list(_all):
        captured.families.clear()
    _trees.forget_trees()


def _start_over(users: Sequence[Annotation]) -> None:
    """What these functions recorded holds constants that a package has no more; its next run must be an eager one."""
    for captured in list(_all):
        if any(captured.annotation is one for one in users):
            captured.retire()


_events.use_trace(_profile.TRACE)
_packages.when_updated(_start_over)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
