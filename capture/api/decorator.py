"""``capture`` and the real function it hands back.

A real function, since ``nn.Module.forward`` must stay a ``types.MethodType`` and type checkers accept nothing else
as an override. Its state lives beside it: one ``Captured`` a function, or one an instance, held weakly.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar, Unpack, overload

import torch
from attrs import Factory, field
from torch.compiler import is_dynamo_compiling

from capture.core import config, events, forks
from capture.core.alive import Alive
from capture.core.data import define
from capture.core.errors import AnnotationError
from capture.core.interrupts import let_through
from capture.core.options import Annotation, CaptureOptions, annotate
from capture.key.code_names import NamedKey, named_key
from capture.key.signature import Binder, make_binder, sees_form, signature_of
from capture.native import MISS, native
from capture.observe import aoti_packages, source_location
from capture.observe.run import active_watch
from capture.rules.compile_plan import compile_plan
from capture.runtime import dispatch, fault_boundary
from capture.runtime.captured import Captured, weakly
from capture.runtime.fast_path import Shortcuts
from capture.runtime.lives import Lives, lives_of
from capture.torch_private.capabilities import is_profiling, profiler_flag, profiler_range
from capture.torch_private.replicas import replicate_uncaptured
from capture.tree import thread_trees

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)

_HANDLE = "__capture__"
_all: Alive[Captured] = Alive()


@overload
def capture(target: M, /, **options: Unpack[CaptureOptions]) -> M: ...
@overload
def capture(target: Callable[P, R], /, **options: Unpack[CaptureOptions]) -> Callable[P, R]: ...
@overload
def capture(**options: Unpack[CaptureOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def capture(*targets: Any, **options: Any) -> Any:
    """Record what a function does on its first calls and replay it afterwards.

    ``@capture``, ``@capture(static=["cache"])``, ``capture(fn, ...)``, or ``capture(module)``, which replaces the
    module's ``forward`` in place and returns the module. A function comes back as a function of the same type.

    Args:
        static: names or paths of arguments (``"cache"``, ``"cache.0.k"``, ``"self.table"``) whose tensors keep their
            address: they are read and written where they are, without a copy. A method's receiver is ``self`` here,
            whatever it is called. Default: none.
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
        gradients: how gradients of parameters reach their ``.grad`` where the result of the function needs gradients.
            ``"autograd"`` (default): by autograd, as eager's. ``"accumulate"``: the recorded backward pass makes them,
            or adds to them, itself, which saves most of a pass's host time. Then ``torch.autograd.grad`` and
            ``backward(inputs=...)`` do not reach parameters. Where others give the same parameters gradients in one
            pass, calls from then on go through autograd (CG503), as the order of the sums would not be eager's. Hooks
            of parameters run, by a slower way; while a process group exists, autograd delivers.
        schedule: the order between the kernels of a recording on a GPU. ``"recorded"`` (default): one after another, as
            they were captured. ``"auto"``: as their data asks for, where that is faster: what each operator reads and
            writes is noted while it is recorded, and after 20 replays (``schedule_after`` of the settings) some calls
            run by the one order and some by the other, and the faster one stays. The results are the same bits.
            Recordings take longer, and their pool gets larger by up to 64 MiB (``schedule_room``). On the CPU it does
            nothing.
        buckets: dimensions of tensor arguments that are padded up to a few sizes, which are recorded:
            ``{"ids": {0: (1, 2, 4, 8), 1: "pow2"}}``, by name or path of the argument; a ``Dim`` is one size that
            several dimensions share. Results are cut to what the body gives without padding. Before a size is padded,
            a padded replay is compared with the unpadded body, bit for bit; a size at which they differ keeps its own
            shape (CG602), and so does one above the ladder. Default: none.
        fill: what padding holds: a number (default 0), ``"repeat"`` (the last entry), or a function of a tensor, a
            dimension and a count that gives the entries to add; or a dict of those by argument.
        tolerance: how far a padded call may be from the body: ``(rtol, atol)`` as in ``torch.testing.assert_close``, or
            one number for both; or a dict by path of the result (``"output.0"``) or of what is written. Default 0.
        guards: callables of no argument; what they return is part of the key. For Python state that only deeper
            code reads.
        silence: codes of findings that no warning is given for, such as ``["CG204"]``. Reports still have them.
            Default: none. For all functions: ``silence`` of the settings (``CAPTURE_SILENCE``).
        name: for callables without a source line.

    Raises:
        AnnotationError: an unknown option, choice or argument name, or something that cannot be captured.
    """
    if len(targets) > 1:
        raise AnnotationError(
            f"capture takes one callable, got {len(targets)} arguments: leave the others out; the first calls are the "
            "samples, and warmup(f)(*args) records before them"
        )
    return _capture(targets[0], options) if targets else _Decorator(_capture, options=options)


class _Decorator(functools.partial[Any]):
    """What ``capture(**options)`` gives. As a context manager, which ``torch.cuda.graph`` is, it raises."""

    def __enter__(self) -> NoReturn:
        raise AnnotationError(
            "capture is a decorator and no block: put the lines of the block into a function, and write @capture above"
        )

    def __exit__(self, *_: object) -> None:
        """Python looks for this method before it calls ``__enter__``."""


def _always(_: object) -> bool:
    return True


def _never(_: object) -> bool:
    return False


Instances = dict[int, tuple[Callable[[], Any], Captured, Callable[..., Any]]]
"""By ``id`` of the receiver: a weak reference to it, its state, and the function that takes its calls on the fast
path."""


@define(eq=False)
class Handle:
    """One decorated function and its states: one ``Captured`` for all calls, or one an instance."""

    annotation: Annotation
    function: Callable[..., Any]
    binder: Binder
    lives: Lives = field(default=Factory(lambda self: lives_of(_code_of(self.function)), takes_self=True), init=False)
    single: Captured | None = None
    """The state of all calls that come without an instance."""
    instances: Instances = field(factory=dict)
    make: Callable[[], Captured] | None = None
    """Makes the state of an instance, where the function is not a method."""
    is_receiver: Callable[[Any], bool] = _always
    """Tells whether the first argument of a call is the instance."""
    make_single: Callable[[], Captured] | None = None
    """Makes ``single`` at the first such call, for a function of which only calls tell whether it is a method."""
    passed: int = 0
    """Calls that ran eagerly before ``single`` was made. They are added to its counters then."""
    others: Captured | None = None
    """One state for all instances that get none of their own: too many instances died before a recording of theirs was
    used (see ``Lives``), so these calls run eagerly."""
    successors: list[Handle] = field(factory=list)
    """Handles of functions that replaced this one in the class of a captured module or object (see ``_ClassNow``)."""

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the states when the function is collected; only the function holds this handle. Not a ``weakref``
        finalizer: that would keep the states alive, which keep the body alive. If the body in turn refers to the
        function, as through a trainer, neither would ever be collected."""
        if not ends() and hasattr(self, "successors"):  # False where ``__init__`` did not finish
            for captured in self._own_states():
                captured.end()

    def of(self, receiver: Any) -> Captured:
        """The state of one instance, made at its first call."""
        entry = self.instances.get(id(receiver))
        if entry is not None and entry[0]() is receiver:
            return entry[1]
        if self.make is None:
            captured = _new(self.annotation, self.function, self.binder, receiver)
        else:
            captured = adopted(self.make())
        address = id(receiver)

        def died(_: object, ends: Callable[[], bool] = sys.is_finalizing) -> None:
            if ends():  # the globals of this and all other modules may be gone
                return
            gone = self.instances.pop(address, None)
            if gone is not None:
                gone[1].end()

        try:
            reference: Callable[[], Any] = weakref.ref(receiver, died)
        except TypeError:  # no weak references to this type: the state lives as long as the function
            reference = functools.partial(_same, receiver)
        self.instances[address] = (reference, captured, captured.straight)
        return captured

    def call(self, receiver: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of an instance that the fast path did not take."""
        entry = self.instances.get(id(receiver))
        if entry is not None and entry[0]() is receiver:
            return dispatch.call(entry[1], args, kwargs)
        lives = self.lives
        if lives.gave_up and self.annotation.fallback != "error" and lives.passes():
            return dispatch.pass_by(self._others(), (receiver, *args), kwargs)
        return dispatch.call(self.of(receiver), args, kwargs)

    def _others(self) -> Captured:
        if self.others is None:
            made = Captured(self.annotation, self.function, self.binder, Shortcuts(), dispatch.call, keeps_plans=False)
            self.others = adopted(made)
        return self.others

    def alone(self) -> Captured:
        """``single``; it is made at the first use."""
        if self.single is None:
            assert self.make_single is not None
            self.single = self.make_single()
            counters = self.single.log.counters
            counters.body_runs += self.passed
            counters.eager_calls += self.passed
        return self.single

    def has_own(self, receiver: Any) -> bool:
        """Whether this instance has a state of its own. It has none where a plain function was captured first and put
        into a class afterwards."""
        is_fixed = self.single is not None and self.make_single is None
        return not is_fixed and self.is_receiver(receiver)

    def straight(self) -> Callable[..., Any]:
        """The fast path: a function of an instance and a tuple of positional arguments. It gives the result, or
        ``MISS`` where no fast path fits the call."""
        straight: Callable[..., Any] = native.InstancePaths(self.instances, MISS)
        return straight

    def states(self) -> Iterator[Captured]:
        """All states made so far."""
        yield from self._own_states()
        for one in self.successors:
            yield from one.states()

    def _own_states(self) -> Iterator[Captured]:
        if self.single is not None:
            yield self.single
        if self.others is not None:
            yield self.others
        for _, captured, _ in list(self.instances.values()):
            yield captured

    def states_of(self, receiver: Any) -> list[Captured]:
        """The states of one instance, those of ``successors`` included."""
        return [self.of(receiver)] + [
            successor.of(receiver) for successor in self.successors if id(receiver) in successor.instances
        ]


def adopted(captured: Captured) -> Captured:
    """Register a state that was made elsewhere, so that ``report`` and ``reset`` include it; gives it back."""
    _all.add(captured)
    return captured


def hand_back(wrapper: Callable[..., Any], handle: Handle) -> None:
    """Have ``recordings``, ``reset`` and the like accept this function: its states are in ``handle``."""
    setattr(wrapper, _HANDLE, handle)


def _same(value: Any) -> Any:
    return value


def _new(annotation: Annotation, function: Callable[..., Any], binder: Binder, receiver: Any) -> Captured:
    error = None
    try:
        named = named_key(function, binder.names, receiver, annotation.static)
    except Exception as found:
        let_through(found)
        if config.current().strict:
            raise
        named, error = NamedKey(), found
    captured = Captured(
        annotation, function, binder, Shortcuts(), dispatch.call, named, weakly(receiver),
        lives=lives_of(_code_of(function)),
    )  # fmt: skip
    if error is not None:
        fault_boundary.give_up(captured, error)
    _all.add(captured)
    return captured


def _capture(target: Any, options: dict[str, Any], *, method: bool | None = None) -> Any:
    """``method``: whether the function is a method; None: not known, its name and parameters tell."""
    if isinstance(target, torch.nn.Module):
        return _capture_module(target, options)
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(_capture(target.__func__, options, method=isinstance(target, classmethod)))
    if isinstance(target, type):
        raise AnnotationError(
            f"capture takes a function, a method or an instance, not the class {target.__qualname__}; decorate its "
            "forward (or __call__), or capture an instance"
        )
    if isinstance(target, property) or not callable(target):
        raise AnnotationError(f"capture takes a callable, got {type(target).__qualname__}{_instead(target)}")
    if _handle_of(target) is not None:
        raise AnnotationError(f"{_name_of(target)} is captured already: remove one of the two")
    if (kind := _suspended(target)) is not None:
        return _uncaptured(target, options, kind, method=method)
    if isinstance(target, types.MethodType):
        return _function(target.__func__, options, receiver=target.__self__, keep=target)
    if isinstance(target, types.FunctionType):
        made_by = _kind_of(target) if method is None else _method if method else _function
        return made_by(target, options)
    call = type(target).__call__
    if isinstance(call, types.FunctionType):
        return _function(call, options, receiver=target, keep=target, in_class="__call__")
    return _function(target, options, keep=target)


def _suspended(target: Any) -> str | None:
    """What a call gives instead of a result where the body runs later or in parts, as ``"a coroutine"``; None for an
    ordinary function."""
    code_of = inspect.unwrap(target)
    kinds = {
        "a coroutine": inspect.iscoroutinefunction,
        "a generator": inspect.isgeneratorfunction,
        "an asynchronous generator": inspect.isasyncgenfunction,
    }
    return next((name for name, is_kind in kinds.items() if is_kind(code_of)), None)


def _uncaptured(target: Any, options: dict[str, Any], kind: str, *, method: bool | None) -> Any:
    """The function itself, after a warning that says why it is not captured. It gets no wrapper: frameworks ask whether
    a function is a coroutine or a generator. ``recordings`` and the like still accept it if it takes attributes."""
    function = target.__func__ if isinstance(target, types.MethodType) else target
    is_method = bool(method) or isinstance(target, types.MethodType)
    if method is None and isinstance(target, types.FunctionType):
        is_method = _kind_of(target) is not _function
    handle = _annotated(function, options, method=is_method, name=_name_of(target))
    captured = Captured(handle.annotation, function, handle.binder, Shortcuts(), dispatch.call)
    captured.report(compile_plan(handle.annotation, captured.bare_facts(suspends=kind)))
    if isinstance(target, types.FunctionType):
        handle.single = adopted(captured)
        setattr(target, _HANDLE, handle)
    return target


def _code_of(function: Any) -> types.CodeType | None:
    """The code of the innermost function, below what ``functools.wraps`` put around it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _instead(target: object) -> str:
    """The end of a message: what to write instead of capturing this object; empty where no better way is known."""
    if isinstance(target, torch.Tensor):
        return ": give the function, not its result: capture(f)(x)"
    if target is None:
        return ": what gave it may return nothing; give the function or the module itself"
    if isinstance(target, property):
        return ": write @property above @capture, in this order"
    if isinstance(target, torch.optim.Optimizer):
        return ": capture the function with forward, backward() and step() in it"
    if type(target).__name__ == "CUDAGraph":
        return ": graphs are made for you; put what is recorded into a function, and capture that"
    if isinstance(target, (list, tuple, str)):
        return f": options have names: capture(static={[target] if isinstance(target, str) else list(target)!r})"
    return ""


def _kind_of(function: types.FunctionType) -> Callable[[types.FunctionType, dict[str, Any]], Any]:
    """Which wrapper a function gets: that of a function, of a method, or one that decides at the first call. The names
    of its parameters and the place where it is written tell."""
    owner, _, name = function.__qualname__.rpartition(".")
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not owner or owner.endswith("<locals>") or code is None or not code.co_argcount:
        return _function
    is_bare = code is function.__code__  # what wraps another function may take its receiver in ``*args``
    as_methods_are = code.co_varnames[0] in ("self", "cls") or name in ("forward", "__call__")
    return _method if is_bare and as_methods_are else _method_or_not


def _receivers_of(function: types.FunctionType) -> Callable[[Any], bool]:
    """Tells whether the first argument of a call is the receiver: an instance of the class in whose body the function
    was written, or the class itself where it is a class method. Its name, ``self`` elsewhere, tells nothing."""
    owner, _, name = function.__qualname__.rpartition(".")
    class_name = owner.rpartition(".")[2].lstrip("_")
    names, module = (name, f"_{class_name}{name}"), function.__module__

    def stored_in(kinds: tuple[type, ...]) -> Any:
        for kind in kinds:
            if kind.__qualname__ == owner and kind.__module__ == module:
                return next((kind.__dict__[name] for name in names if name in kind.__dict__), function)
        return None

    def is_receiver(first: Any) -> bool:
        stored = stored_in(type(first).__mro__)
        if stored is not None and not isinstance(stored, (staticmethod, classmethod)):
            return True
        return isinstance(first, type) and isinstance(stored_in(first.__mro__), classmethod)

    return is_receiver


def _name_of(target: Any) -> str:
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    module = getattr(target, "__module__", None) or type(target).__module__
    return f"{module}.{name}"


def _annotated(function: Any, options: dict[str, Any], *, method: bool, name: str) -> Handle:
    """The handle of a function. Its annotation is kept with its code object and used again: a function that is
    decorated anew in each call of another one has the same code each time."""
    is_plain = isinstance(function, types.FunctionType) and not (
        function.__dict__ or function.__defaults__ or function.__kwdefaults__ or options
    )
    lives = lives_of(function.__code__) if is_plain else Lives()
    form = (method, name, function.__code__.co_filename) if is_plain else None
    if form is None or lives.annotated is None or lives.annotated[0] != form:
        lives.annotated = form, *_annotation(function, options, method=method, name=name)
    _, annotation, binder = lives.annotated
    return Handle(annotation, function, binder)


def _annotation(function: Any, options: dict[str, Any], *, method: bool, name: str) -> tuple[Annotation, Binder]:
    signature = signature_of(function, method=method)
    binder = make_binder(signature, formed=sees_form(function))
    code = getattr(inspect.unwrap(function), "__code__", None)
    receiver = (code.co_varnames[0] if code is not None and code.co_argcount else "self") if method else None
    annotation = annotate(
        name, tuple(signature.parameters), options, receiver=receiver, variadic=binder.variadic,
        defined_at=source_location.of_function(code) if code is not None else None,
    )  # fmt: skip
    return annotation, binder


def _function(
    function: Any, options: dict[str, Any], *, receiver: Any = None, keep: Any = None, in_class: str | None = None
) -> Any:
    """A function, or a callable object or bound method with one fixed receiver, which the result keeps alive.
    ``in_class``: see ``_ClassNow``."""
    target = function if keep is None else keep
    handle = _annotated(function, options, method=receiver is not None, name=_name_of(target))
    if keep is None and handle.lives.gave_up and handle.annotation.fallback != "error":
        return _short_lived(function, handle)
    captured = handle.single = _new(handle.annotation, function, handle.binder, receiver)
    straight = captured.straight
    now = _ClassNow(in_class, function, handle, options) if in_class else None

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return target(*args, **kwargs)
        if now is not None and getattr(type(receiver), now.name, None) is not function:
            return now.of(receiver)(*args, **kwargs)
        result = MISS if kwargs else straight(*args)
        return dispatch.call(captured, args, kwargs) if result is MISS else result

    _dress(wrapper, target, handle)
    return wrapper


def _short_lived(function: Any, handle: Handle) -> Any:
    """The wrapper of a function whose code gave up, as earlier functions with this code died before a recording paid
    off. It makes no state until a call is looked at again."""
    annotation, binder, lives = handle.annotation, handle.binder, handle.lives

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        captured = handle.single
        if captured is None and active_watch() is None and config.current().enabled and lives.passes():
            handle.passed += 1
            return function(*args, **kwargs)
        captured = handle.alone() if captured is None else captured
        result = MISS if kwargs else captured.straight(*args)
        return dispatch.call(captured, args, kwargs) if result is MISS else result

    reference = weakref.ref(wrapper)  # weak: the wrapper has to die with its last user

    def make_single() -> Captured:
        captured = _new(annotation, function, binder, None)
        if (made := reference()) is not None:
            weakref.finalize(made, captured.end).atexit = False
        return captured

    handle.make_single, handle.is_receiver = make_single, _never
    _dress(wrapper, function, handle)
    return wrapper


def _method(function: types.FunctionType, options: dict[str, Any], *, in_class: str | None = None) -> Any:
    """``in_class``: see ``_ClassNow``."""
    handle = _annotated(function, options, method=True, name=_name_of(function))
    call, straight = handle.call, handle.straight()
    now = _ClassNow(in_class, function, handle, options) if in_class else None

    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return function(self, *args, **kwargs)
        if now is not None and getattr(type(self), now.name, None) is not function:
            return now.of(self)(*args, **kwargs)
        result = MISS if kwargs else straight(self, args)
        return call(self, args, kwargs) if result is MISS else result

    _dress(wrapper, function, handle)
    return wrapper


@define(eq=False)
class _ClassNow:
    """The function to call where the class of a captured module or callable object has another function by this name
    than when it was captured: the class was patched, or the object got another class. Eager code would call the new
    function, so it is captured in place of the old one."""

    name: str
    function: Callable[..., Any]
    handle: Handle
    options: dict[str, Any]
    made: dict[Any, Any] = field(factory=dict)

    def of(self, receiver: Any) -> Callable[..., Any]:
        """The bound method, as it would be without an attribute of the instance."""
        kind = type(receiver)
        stored = inspect.getattr_static(kind, self.name)  # each class of modules has one
        if not isinstance(stored, types.FunctionType):
            bound: Callable[..., Any] = stored.__get__(receiver, kind) if hasattr(type(stored), "__get__") else stored
            return bound
        if stored not in self.made:
            self.made[stored] = self._captured(stored)
        return types.MethodType(self.made[stored], receiver)

    def _captured(self, function: types.FunctionType) -> Any:
        if _handle_of(function) is not None or _suspended(function) is not None:
            return function
        try:
            wrapper = _method(function, self.options)
        except AnnotationError:  # options such as ``static=`` name what this one does not take
            return function
        successor = wrapper.__dict__[_HANDLE]
        self.handle.successors.append(successor)
        return wrapper


def _method_or_not(function: types.FunctionType, options: dict[str, Any]) -> Any:
    """The wrapper of a function written in a class body that may be a method or, with ``staticmethod`` around it, a
    plain function: its first call tells. Options that only a method can have, such as names below ``self``, tell at
    once."""
    try:
        as_function = _annotated(function, options, method=False, name=_name_of(function))
    except AnnotationError:
        return _method(function, options)
    handle = _annotated(function, options, method=True, name=_name_of(function))
    handle.is_receiver = is_receiver = _receivers_of(function)
    call, alone, straight, instances = handle.call, handle.alone, handle.straight(), handle.instances

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        if args and not kwargs:
            result = straight(args[0], args[1:]) if instances else MISS
            if result is MISS and handle.single is not None:
                result = handle.single.straight(*args)
            if result is not MISS:
                return result
        if args and is_receiver(args[0]):
            return call(args[0], args[1:], kwargs)
        return dispatch.call(alone(), args, kwargs)

    def make_single() -> Captured:
        return _new(as_function.annotation, function, as_function.binder, None)

    handle.make_single = make_single
    _dress(wrapper, function, handle)
    return wrapper


def _capture_module(module: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    forward = module.forward
    if _handle_of(forward) is not None:
        raise AnnotationError(f"forward of this {type(module).__qualname__} is captured already")
    try:
        if isinstance(forward, types.MethodType) and forward.__self__ is module:
            function: Any = forward.__func__
            in_class = "forward" if getattr(type(module), "forward", None) is function else None
            wrapper = _method(function, options, in_class=in_class)
            _set_forward(module, types.MethodType(wrapper, module))
            replicate_uncaptured(module)
        else:
            _set_forward(module, _capture(forward, options))
    except RuntimeError as error:
        raise AnnotationError(f"{type(module).__qualname__} does not let its forward be replaced: {error}") from None
    return module


def _set_forward(module: torch.nn.Module, forward: Any) -> None:
    """Not by what its class does when code sets attributes: one that counts them, or lets nobody set any after its
    making, means others. A ``ScriptModule`` refuses another forward for a reason."""
    if isinstance(module, torch.jit.ScriptModule):
        module.forward = forward
    else:
        torch.nn.Module.__setattr__(module, "forward", forward)


def _dress(wrapper: Any, target: Any, handle: Handle) -> None:
    functools.update_wrapper(wrapper, target)
    if not hasattr(target, "__name__"):
        wrapper.__name__ = wrapper.__qualname__ = handle.annotation.function.rpartition(".")[2]
        wrapper.__doc__ = type(target).__doc__
    setattr(wrapper, _HANDLE, handle)


def _handle_of(target: Any) -> Handle | None:
    while isinstance(target, functools.partial):
        target = target.func
    function = target.__func__ if isinstance(target, types.MethodType) else target
    handle = getattr(function, "__dict__", {}).get(_HANDLE)
    return handle if isinstance(handle, Handle) else None


def captured_states(target: Any) -> list[Captured]:
    """States behind a decorated function, a bound method (its instance's alone) or a module.

    Raises ``AnnotationError`` for what was not decorated.
    """
    if isinstance(target, torch.nn.Module):
        if _handle_of(target.forward) is None:
            if "_orig_mod" in target._modules:
                raise AnnotationError(
                    "this module is compiled, and a captured forward inside of it is compiled with the rest; to record "
                    "what the compiler made, capture a function that calls it: capture(lambda x: compiled(x))"
                )
            raise AnnotationError(
                f"forward of this {type(target).__qualname__} is not captured; capture(module) first: that holds for"
                " one instance, and is no part of a file that it is saved to"
            )
        target = target.forward
    handle = _handle_of(target)
    if handle is None:
        raise AnnotationError(f"{_name_of(target)} is not a captured function; decorate it with capture first")
    if isinstance(target, types.MethodType) and handle.has_own(target.__self__):
        return handle.states_of(target.__self__)
    if handle.make_single is not None and not handle.instances:
        return [handle.alone()]
    return list(handle.states())


def begin_anew(target: Any) -> None:
    """Forget what instances of it that died cost so far, so that new instances are looked at again."""
    handle = _handle_of(target.forward if isinstance(target, torch.nn.Module) else target)
    if handle is not None:
        handle.lives.start_anew()


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
    return sorted(_all.all(), key=lambda captured: captured.number)


def _forget_in_child() -> None:
    """A forked child keeps decorated functions but no recordings. What lies on devices is its parent's, and stays."""
    on_devices = thread_trees.have_own_memory()
    for captured in _all.all():
        if on_devices:
            forks.leave_to_parent(dict(captured.families))
        captured.families.clear()
        captured.lifted.clear()
        captured.fast_paths.clear()
    thread_trees.forget_trees()


def _start_over(users: Sequence[Annotation]) -> None:
    """Drop the recordings of these functions: they hold constants that a model package has replaced. The next run of
    the package must be eager."""
    for captured in _all.all():
        if any(captured.annotation is user for user in users):
            captured.retire()


events.use_profiler(events.Profiler(is_running=is_profiling, enter=profiler_range))
if (_flag := profiler_flag()) is not None:
    native.use_profiler(*_flag, profiler_range)
aoti_packages.when_updated(_start_over)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
