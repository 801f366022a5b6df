"""Arrays that note whether code reads their values, for runs that are undone.

What gives a part of the same memory (``x[None]``, ``x.reshape(1, -1)``) and what follows from the key (``x.shape``) is
no read; all else is, but for a tensor on the memory, which operators tell of. Functions in C that take an array without
calling a method of it (``np.asarray``) would go unnoticed: code that names such is refused (``reads_unnoticed``).
"""

from __future__ import annotations

import functools
import types
from contextlib import AbstractContextManager
from typing import Any

from capture.core.data import define
from capture.key.array_inputs import numpy
from capture.key.packages import is_library, package_of
from capture.observe.probes.array_indices import array_indices
from capture.state.code_run import CodeRun

_OF_THE_KEY = frozenset({"shape", "dtype", "ndim", "size", "nbytes", "itemsize", "__class__", "__array_finalize__",
                         "__array_priority__", "__dict__", "noting", "__len__"})  # fmt: skip
_VIEWS = frozenset({"reshape", "ravel", "squeeze", "transpose", "swapaxes", "view", "__getitem__", "T", "flatten"})
"""They may give a view, or a copy of the values: which one it is shows in what they gave."""
_ONE_NUMBER = frozenset({"__index__", "__int__", "__float__", "__complex__", "__bool__"})
"""They raise for an array of more than one number, by its shape."""
_LEFT = frozenset({"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__setattr__",
                   "__delattr__", "__doc__", "__array_finalize__", "__class_getitem__", "__dir__"})  # fmt: skip


@define(eq=False)
class Noting:
    """What one run did."""

    is_read: bool = False


@functools.cache
def _kind() -> Any:
    plain = numpy().ndarray

    class Noted(plain):  # type: ignore[misc,valid-type]
        """See above. What is made of one has its ``noting``, too."""

        noting: Noting | None = None

        def __array_finalize__(self, source: Any) -> None:
            self.noting = getattr(source, "noting", None)

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
            return _plainly(getattr(ufunc, method), inputs, kwargs)

        def __array_function__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
            return _plainly(function, args, kwargs)

    for name in dir(plain):
        if name in _LEFT or name in _OF_THE_KEY or name in ("__array_ufunc__", "__array_function__"):
            continue
        original = getattr(plain, name)
        if callable(original):
            setattr(Noted, name, _method(name, original))
        elif type(original) is types.GetSetDescriptorType:
            setattr(Noted, name, _property(name, original))
    Noted.__hash__ = None  # type: ignore[assignment] # as those of arrays
    return Noted


def _plainly(function: Any, args: Any, kwargs: Any) -> Any:
    """The result for plain arrays, which nothing is noted of."""

    def plain(value: Any) -> Any:
        if is_noted(value):
            _note(value)
            return _plain(value)
        if type(value) in (tuple, list):
            return type(value)(map(plain, value))
        return {key: plain(one) for key, one in value.items()} if type(value) is dict else value

    return function(*plain(tuple(args)), **plain(dict(kwargs)))


def _plain(value: Any) -> Any:
    return numpy().ndarray.view(value, numpy().ndarray)


def _note(value: Any) -> None:
    if value.noting is not None:
        value.noting.is_read = True


def _result(name: str, value: Any, found: Any) -> Any:
    is_view = name in _VIEWS and is_noted(found) and numpy().may_share_memory(_plain(found), _plain(value))
    if not is_view:
        _note(value)
    return found


def _method(name: str, original: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name not in _VIEWS and name not in _ONE_NUMBER:
            _note(self)
        return _result(name, self, original(self, *args, **kwargs))

    return method


def _property(name: str, original: Any) -> Any:
    def read(self: Any) -> Any:
        return _result(name, self, original.__get__(self))

    def write(self: Any, value: Any) -> None:
        _note(self)
        original.__set__(self, value)

    return property(read, write)


def noted(array: Any, noting: Noting) -> Any:
    """The same memory, noted."""
    made = array.view(_kind())
    made.noting = noting
    return made


def as_indices() -> AbstractContextManager[None]:
    """In the block tensors take noted arrays as indices, of which nothing is noted: torch looks at nothing but what
    they are."""
    return array_indices(_plain_index)


def _plain_index(index: Any) -> Any:
    return _plain(index) if is_noted(index) and index.ndim and index.dtype.kind in _INDICES else index


_INDICES = frozenset("iub")


def is_noted(value: Any) -> bool:
    """It is one of these."""
    return isinstance(value, numpy().ndarray) and type(value) is _kind()


def holds_noted(value: Any, depth: int = 4) -> bool:
    """It is, or may hold, a noted array, or one that lies on its memory."""
    if isinstance(value, numpy().ndarray):
        while isinstance(value, numpy().ndarray):
            if is_noted(value):
                return True
            value = value.base
        return False
    if isinstance(value, dict):
        return depth == 0 or any(holds_noted(one, depth - 1) for one in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return depth == 0 or any(holds_noted(one, depth - 1) for one in value)
    return False


def reads_unnoticed(ran: CodeRun) -> bool:
    """Code of users that ran names something in C that may read an array without calling a method of it."""
    for code, scopes in ran.codes.items():
        names = (*code.co_names, *code.co_freevars)
        for scope in scopes:
            package = package_of(scope.get("__name__"))
            if package and is_library(package):
                continue
            values = [scope.get(name) for name in names]
            has_numpy = any(type(one) is types.ModuleType and package_of(one.__name__) == "numpy" for one in values)
            taken = _UNNOTICED | _OF_NUMPY if has_numpy else _UNNOTICED
            if not taken.isdisjoint(names) or any(map(_may_read, values)):
                return True
    return False


_UNNOTICED = frozenset({"memoryview", "bytes", "bytearray"})
_OF_NUMPY = frozenset({
    "array", "asarray", "asanyarray", "asarray_chkfinite", "ascontiguousarray", "asfortranarray", "asmatrix", "matrix",
    "frombuffer", "fromiter", "from_dlpack", "require", "nditer", "nested_iters", "flatiter", "iterable", "isfortran",
    "frompyfunc", "fromfunction", "vectorize", "bmat", "ctypeslib", "broadcast",
})  # fmt: skip
"""What of NumPy takes an array and calls no method of it. Classes of numbers are mostly named as dtypes; what they make
of an array is another one with another content."""


def _may_read(value: Any) -> bool:
    """A function in C of another package than torch and Python's own, or a module that is none of Python code."""
    if type(value) is types.ModuleType:
        package = package_of(value.__name__)
        known = package in ("torch", "numpy") or is_library(package)
        return not known and not str(getattr(value, "__file__", None)).endswith(".py")
    if package_of(getattr(value, "__module__", None)) == "numpy":
        return type(value) is not type(numpy().concatenate) and not isinstance(value, numpy().ufunc)
    is_in_c = type(value) in (types.BuiltinFunctionType, types.MethodDescriptorType)
    return is_in_c and package_of(value.__module__ or "") not in ("torch", "builtins", "math", "")
