"""Which functions in C leave something behind that a snapshot does not compare and a replay does not do again.

Everything that Python objects hold is compared before and after a run, however it was changed. What remains are files,
streams, other processes and threads, and objects of the standard library that do not show what they hold. C functions
of other packages count as pure: what they keep in memory of their own cannot be seen.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from capture.key.packages import is_library, package_of

_WRITING: dict[str, frozenset[str]] = {
    "builtins": frozenset({"print", "input", "breakpoint"}),
    "_io": frozenset({"open", "open_code"}),
    "posix": frozenset({"write", "writev", "pwrite", "remove", "unlink", "mkdir", "rmdir", "rename", "replace", "link",
                        "symlink", "truncate", "ftruncate", "kill", "system", "putenv", "unsetenv", "chdir", "utime"}),
    "_thread": frozenset({"start_new_thread", "start_new", "start_joinable_thread"}),
    "_posixsubprocess": frozenset({"fork_exec"}),
    "atexit": frozenset({"register", "unregister"}),
    "gc": frozenset({"enable", "disable", "set_threshold", "set_debug", "freeze", "unfreeze"}),
    "sys": frozenset({"setrecursionlimit", "setswitchinterval", "set_int_max_str_digits"}),
    "faulthandler": frozenset({"enable", "disable", "register", "unregister"}),
    "_signal": frozenset({"signal", "setitimer", "alarm", "raise_signal"}),
    "_socket": frozenset({"setdefaulttimeout"}),
}  # fmt: skip
"""Functions of modules that write where nothing is compared, settings of the process among them: a body that sets one
to what it was already would not show in a comparison, and has to set it again after somebody else changed it."""
_COMPARED = frozenset({
    "_abc", "_ast", "_collections", "_contextvars", "_ctypes", "_decimal", "_functools", "_hashlib", "_json",
    "_operator", "_random", "_sre", "_string", "_struct", "_thread", "_tokenize", "_weakref", "abc", "array",
    "ast", "builtins", "collections", "contextvars", "ctypes", "datetime", "decimal", "enum", "fractions",
    "functools", "hashlib", "inspect", "ipaddress", "itertools", "json", "math", "operator", "random", "re",
    "string", "struct", "symtable", "sys", "threading", "time", "tokenize", "traceback", "types", "typing",
    "unicodedata", "weakref", "zoneinfo",
})  # fmt: skip
"""Modules of the standard library whose objects are compared, never change, or only synchronize threads."""
_ASKING = frozenset({"isatty", "fileno", "readable", "writable", "seekable", "tell", "getvalue", "flush", "__enter__",
                     "__exit__", "empty", "qsize"})  # fmt: skip
"""Methods of other objects that change nothing."""


def is_foreign(function: Any) -> bool:
    """Whether a function in C belongs neither to Python nor to torch: what it keeps in memory of its own is not seen. A
    replay may leave out what such a function does, but nobody may call it for a try, with other values."""
    bound, module = function.__self__, function.__module__
    if not isinstance(module, str):
        module = _owner(bound if isinstance(bound, type) else type(bound), function.__name__).__module__
    return _is_foreign_package(module)


def is_called_in_foreign_code(kind: type) -> bool:
    """Whether calls of such objects run code in C as ``is_foreign`` has it, which no profile function is told of:
    functions of ``ctypes``, and those that Cython makes. Not asked of classes."""
    if issubclass(kind, type):
        return False
    owner = _owner(kind, "__call__")
    is_in_c = type(owner.__dict__.get("__call__")) is types.WrapperDescriptorType
    return is_in_c and (owner.__module__ == "_ctypes" or _is_foreign_package(owner.__module__))


def _is_foreign_package(module: str) -> bool:
    package = package_of(module)
    return package != "capture" and not is_library(package)


def _owner(kind: type, name: str) -> type:
    return next((base for base in kind.__mro__ if name in base.__dict__), kind)


def leaves(function: Any) -> str | None:
    """The function's name, for messages, if it leaves something behind; else None."""
    bound, name = function.__self__, function.__name__
    if bound is None or type(bound) is types.ModuleType:
        module = getattr(bound, "__name__", None) or function.__module__
        return f"{name}()" if name in _WRITING.get(module, ()) else None
    kind = bound if isinstance(bound, type) else type(bound)
    owner = _owner(kind, name)
    package = package_of(owner.__module__)
    if package not in sys.stdlib_module_names or package in _COMPARED or name in _ASKING:
        return None
    return f"{owner.__qualname__}.{name}()"
