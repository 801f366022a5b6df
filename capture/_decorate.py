"""Decorate: ``capture`` and the real function it hands back."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import torch

from capture import _where
from capture._annotate import CaptureOptions, annotate
from capture._bind import make_binder
from capture._errors import AnnotationError
from capture._named import named_key
from capture._runtime import Captured

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)


@overload
def capture(target: M, /, **options: Unpack[CaptureOptions]) -> M: ...
@overload
def capture(target: Callable[P, R], /, **options: Unpack[CaptureOptions]) -> Callable[P, R]: ...
@overload
def capture(**options: Unpack[CaptureOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def capture(target: Any = None, /, **options: Any) -> Any:
    if target is None:
        return functools.partial(_capture, options=options)
    return _capture(target, options)


def _capture(target, options):
    if isinstance(target, type): raise AnnotationError("class")
    if isinstance(target, torch.nn.Module):
        fn = target.forward.__func__
        wrapper = _wrap(fn, options, method=True)
        target.forward = types.MethodType(wrapper, target)
        return target
    q = getattr(target, "__qualname__", "")
    sig = list(inspect.signature(target).parameters)
    method = isinstance(target, types.FunctionType) and "." in q and not q.rpartition(".")[0].endswith("<locals>") and sig[:1] == ["self"]
    return _wrap(target, options, method)

_states = weakref.WeakKeyDictionary()

def _wrap(fn, options, method):
    sig = inspect.signature(fn)
    if method:
        sig = sig.replace(parameters=list(sig.parameters.values())[1:])
    binder = make_binder(sig)
    ann = annotate(f"{fn.__module__}.{fn.__qualname__}", binder.names, options, has_self=method, variadic=binder.variadic, defined_at=_where.of_function(fn.__code__))
    if not method:
        state = Captured(ann, fn, binder, named_key(fn), None)
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            return state(*args, **kwargs)
        _states[wrapper] = lambda r=None: state
        return wrapper
    instances = {}
    def of(receiver):
        got = instances.get(id(receiver))
        if got is None:
            got = instances[id(receiver)] = Captured(ann, fn, binder, named_key(fn, receiver), receiver)
        return got
    @functools.wraps(fn)
    def wrapper(self, /, *args, **kwargs):
        return of(self)(*args, **kwargs)
    _states[wrapper] = of
    return wrapper

def state_of(f):
    if isinstance(f, torch.nn.Module): f = f.forward
    if isinstance(f, types.MethodType): return _states[f.__func__](f.__self__)
    return _states[f]()
