"""Where a watch sees the operators of its thread: at a dispatch key below autograd, of which torch makes no use.

A dispatch mode stands at the same place, but composite operators ask whether one is on, and then call others than in
plain eager: the gradient of ``prod`` reads nothing on the host, ``svdvals`` computes vectors. Their bits are others. So
the watch is a fallback kernel for the key, which this module registers once; a thread comes to it only where the key is
switched on in the thread. What torch calls in its own threads for that thread (backward passes) has the key, too, and
finds the watch among what torch hands to those. Without one of these names a watch is a dispatch mode, and where the
key is above modes, as in torch 2.11.

Sources: ``c10/core/DispatchKey.h``, ``torch/library.py``, ``aten/src/ATen/ThreadLocalState.h``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.library
from torch.utils._python_dispatch import TorchDispatchMode  # no fallback: observation itself
from typing_extensions import override

from capture.core.data import frozen
from capture.core.interrupts import let_through
from capture.native import native
from capture.torch_private.monkeypatch import Replaced

_UNUSED = "Fake"
"""A key right below the one of dispatch modes and of subclasses that dispatch in Python: these come first, as in plain
eager, and what they call is seen."""
_NAME = "capture.operator_watch"
_num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_pop_mode: Any = getattr(torch._C, "_pop_torch_dispatch_stack", None)
_push_mode: Any = getattr(torch._C, "_push_on_torch_dispatch_stack", None)
_no_modes: Any = getattr(torch._C, "_DisableTorchDispatch", contextlib.nullcontext)
_MAKERS = ("_make_subclass", "_make_wrapper_subclass", "as_subclass")
_FAKES = {"FakeTensorMode": ("__torch_dispatch__", "from_tensor"), "FakeTensor": ("__torch_dispatch__",)}
"""What computes shapes alone. What it calls is no operator of a body, and torch cannot hand it to the key: it looks up
fallbacks in the tables of kernels where a mode is on, or a tensor has a class that dispatches."""


class _Local(threading.local):
    watch: OperatorWatch | None = None


_local = _Local()


@frozen(eq=False)
class _Names:
    """Torch's functions for keys of this thread, and the keys."""

    include: Callable[[Any, bool], object]
    exclude: Callable[[Any, bool], object]
    is_included: Callable[[Any], bool]
    is_excluded: Callable[[Any], bool]
    keep: Callable[[str, Any], object]
    is_kept: Callable[[str], bool]
    kept: Callable[[str], Any]
    key: Any
    python: Any
    """Switched off where torch hides operators from Python."""


def _found() -> _Names | None:
    c = torch._C
    try:
        key, python = c._dispatch_key_parse(_UNUSED), c.DispatchKey.Python
        if key.value > python.value:  # as in torch 2.11: modes and subclasses would come after the watch
            return None
        return _Names(
            c._dispatch_tls_set_dispatch_key_included, c._dispatch_tls_set_dispatch_key_excluded,
            c._dispatch_tls_is_dispatch_key_included, c._dispatch_tls_is_dispatch_key_excluded,
            c._stash_obj_in_tls, c._is_key_in_tls, c._get_obj_in_tls, key, python,
        )  # fmt: skip
    except (AttributeError, RuntimeError) as error:
        let_through(error)
        return None


def _see(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assert _names is not None
    watch = _local.watch
    if watch is None and _names.is_kept(_NAME):  # in a thread of torch's own
        watch = _names.kept(_NAME)
    if watch is None or _names.is_excluded(_names.python):
        return operator(*args, **kwargs)
    return watch.see(operator, (), args, kwargs)


_names = _found()
_hook: Any = None if _names is None else native.OperatorHook(_names.exclude, _names.key, _see)
_library: Any = None


def _probe() -> bool:
    """Register the kernel, and see whether it is called, for the operators below autograd alone."""
    global _library
    if _names is None or not hasattr(torch.library.Library, "fallback"):
        return False
    try:
        _library = torch.library.Library("_", "IMPL")
        _library.fallback(_hook, _UNUSED)
        return _Probe().seen() == ["aten.ones", "aten.mul"]
    except (RuntimeError, TypeError, AttributeError) as error:
        let_through(error)
        return False


class OperatorWatch(TorchDispatchMode):
    """In a ``with`` block, ``see`` gets each operator of this thread, below autograd. What it calls, no watch sees."""

    by_mode = False
    """Be a dispatch mode in blocks that begin from now on."""
    is_mode = False
    """Whether it was one in the last block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._around: list[tuple[State, bool]] = []
        """For each block, the state around it, and whether this is a mode in it."""

    @override
    def __enter__(self) -> Self:
        self.is_mode = is_mode = self.by_mode or not has_key
        self._around.append((state(), is_mode))
        if is_mode:
            super().__enter__()  # type: ignore[no-untyped-call]
        else:
            put_state((self, True, False))
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        before, is_mode = self._around.pop()
        if is_mode:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        put_state(before)

    def see(self, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator. The method below is for modes; at the key it is not called."""
        return op(*args, **kwargs)

    @override
    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.see(op, types, args, kwargs or {})

    def go_on_by_mode(self) -> None:
        """Be a mode for the rest of the present block."""
        before, is_mode = self._around[-1]
        if is_mode:
            return
        self.by_mode, self.is_mode, self._around[-1] = True, True, (before, True)
        put_state(before)
        above = (
            [_pop_mode(None) for _ in range(_num_modes())] if None not in (_pop_mode, _push_mode) else []
        )  # the body's own
        super().__enter__()  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            _push_mode(mode)


_uncompiled: Any = OperatorWatch.__torch_dispatch__
"""As torch has wrapped it: its compiler looks at nothing inside, but the compiler is imported."""


def _dispatched(self: OperatorWatch, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Nothing compiles before the compiler is imported, which takes a second: most of a first watched run."""
    if "torch._dynamo" in sys.modules:
        return _uncompiled(self, op, types, args, kwargs)
    return self.see(op, types, args, kwargs or {})


OperatorWatch.__torch_dispatch__ = _dispatched  # type: ignore[method-assign]


State = tuple[OperatorWatch | None, bool, bool]
"""The watch of a thread, and whether the key is switched on, and off whatever switched it on."""


def go_on_by_mode() -> None:
    """Have the watch of this thread, if there is one, go on as a mode. Torch's compiler ignores such a mode, but guards
    the key, so that nothing that was compiled without it would run under it."""
    if is_on() and _local.watch is not None:
        _local.watch.go_on_by_mode()


def state() -> State:
    """The state of this thread."""
    if _names is None:
        return None, False, False
    return _local.watch, _names.is_included(_names.key), _names.is_excluded(_names.key)


def put_state(now: State) -> None:
    """Give this thread a state. Doing that twice is the same."""
    if _names is None:
        return
    watch, is_included, is_excluded = now
    _local.watch = watch
    if watch is not None or _names.is_kept(_NAME):
        _names.keep(_NAME, watch)
    _names.exclude(_names.key, is_excluded)
    _names.include(_names.key, is_included)


class _Probe(OperatorWatch):
    def __init__(self) -> None:
        super().__init__()
        self._seen: list[str] = []

    @override
    def see(self, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._seen.append(str(getattr(op, "overloadpacket", op)))
        return op(*args, **kwargs)

    def seen(self) -> list[str]:
        """Operators of a body that runs two."""
        with self:
            torch.ones(1, device="cpu") * 2
        return self._seen


has_key = True
has_key = _probe()


is_on: Callable[[], bool]
"""Whether this thread is watched now, in a function of C."""
is_on = functools.partial(_names.is_included, _names.key) if has_key and _names is not None else bool


class hidden:
    """This thread is not watched in the block. An object that is left in the middle of that, as a signal came, ends it
    when it dies."""

    __slots__ = ("_before", "_thread")

    def __init__(self) -> None:
        self._before: State | None = None
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        if is_on():
            watch, _, is_excluded = self._before = state()
            put_state((watch, False, is_excluded))

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            before, self._before = self._before, None
            if _local.watch is before[0]:  # else the watched run ended before this object died
                put_state(before)

    def __del__(self) -> None:
        if self._thread == threading.get_ident():
            self.__exit__()


class unseen(hidden):
    """Operators in the block are seen by no watch and no dispatch mode. Without torch's name for that, modes see them,
    and a region that needs such operators goes eager as one that reads values."""

    __slots__ = ("_modes",)

    @override
    def __enter__(self) -> None:
        super().__enter__()
        self._modes = _no_modes()
        self._modes.__enter__()

    @override
    def __exit__(self, *error: object) -> None:
        self._modes.__exit__(*error)
        super().__exit__()

    @override
    def __del__(self) -> None:  # torch's own block ends with its object
        if self._thread == threading.get_ident():
            hidden.__exit__(self)


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


_call_hidden: Any = None if _names is None else native.OperatorHook(_names.exclude, _names.key, _call)


def _unless_seen(function: Any) -> Any:
    """The function, in which the watch of this thread sees no operators."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_on() or (_names is not None and _names.is_excluded(_names.key)):
            return function(*args, **kwargs)
        return _call_hidden(function, *args, **kwargs)

    return call


def _stand_in(original: Any) -> Any:
    """For an attribute as its class holds it."""
    if isinstance(original, (staticmethod, classmethod)):
        return type(original)(_unless_seen(original.__func__))
    is_static = isinstance(original, types.BuiltinFunctionType)
    return staticmethod(_unless_seen(original)) if is_static else _unless_seen(original)


def _replaced_dispatch(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """For higher-order operators: a watch gets them where torch looks for their kernel for the key."""
    assert _names is not None
    key = _names.key

    def seen(operator: Any, dispatch_key: Any, /, *args: Any, **kwargs: Any) -> Any:
        if dispatch_key == key:
            return _hook(operator, *args, **kwargs)
        return dispatch(operator, dispatch_key, *args, **kwargs)

    return seen


def _attributes() -> list[tuple[Any, str, Any]]:
    """Class, name and value of what is replaced."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    wanted: list[tuple[Any, str]] = [(torch.Tensor, name) for name in _MAKERS]
    wanted += [(getattr(fakes, kind, None), name) for kind, names in _FAKES.items() for name in names]
    wanted += [(getattr(torch._ops, "HigherOrderOperator", None), "dispatch")]
    found = [(holder, name, vars(holder).get(name) or getattr(holder, name, None)) for holder, name in wanted if holder]
    return [one for one in found if one[2] is not None]


_made: tuple[list[tuple[Any, str, Any]], list[tuple[Any, dict[str, Any]]]] = [], []


def helped() -> contextlib.AbstractContextManager[Any]:
    """In the block torch gets on with a watch at the key as with a mode. Higher-order operators look for their kernels
    in Python, where the key has none. What gives a tensor a class of its own hides operators from modes, as their
    results must not have been Python's before."""
    global _made
    if not has_key:
        return contextlib.nullcontext()
    attributes = _attributes()
    if [*map(id, itertools.chain(*attributes))] != [*map(id, itertools.chain(*_made[0]))]:
        makers = {"dispatch": _replaced_dispatch}
        tables = {id(holder): (holder, dict[str, Any]()) for holder, _, _ in attributes}
        for holder, name, value in attributes:
            tables[id(holder)][1][name] = makers.get(name, _stand_in)(value)
        _made = attributes, [*tables.values()]
    return Replaced(*_made[1])
