"""Notes in memory of the C library, so that a watched run does not see a side effect where a body notes something."""

from __future__ import annotations

import ctypes
from typing import Any

_SIZE = 1 << 20  # bytes of all notes, the zero at the end among them
_libc = ctypes.CDLL(None)
_libc.strcat.argtypes, _libc.strcat.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
_libc.calloc.argtypes, _libc.calloc.restype = [ctypes.c_size_t, ctypes.c_size_t], ctypes.c_void_p
_python = ctypes.pythonapi
_python.Py_IncRef.argtypes = [ctypes.py_object]
_python.Py_DecRef.argtypes = [ctypes.py_object]


class Notes:
    """Texts without a semicolon, in order."""

    def __init__(self) -> None:
        self._append, self._memory = _libc.strcat, _libc.calloc(1, _SIZE)

    def add(self, text: object) -> None:
        """Note a text."""
        self._append(self._memory, f"{text};".encode())

    def all(self) -> list[str]:
        """All texts so far."""
        return ctypes.string_at(self._memory).decode().split(";")[:-1]

    def clear(self) -> None:
        """Forget all texts."""
        ctypes.memset(self._memory, 0, 1)

    def keep(self, count: int) -> None:
        """Forget all but the first ones."""
        ctypes.memset(self._memory + sum(len(one) + 1 for one in self.all()[:count]), 0, 1)


class Hidden:
    """Objects that are kept alive by their reference count alone: no Python object refers to them."""

    def __init__(self) -> None:
        self._notes, self._hold = Notes(), _python.Py_IncRef

    def add(self, value: Any) -> None:
        """Keep one."""
        self._hold(value)
        self._notes.add(id(value))

    def all(self) -> list[Any]:
        """All that are kept."""
        return [ctypes.cast(int(one), ctypes.py_object).value for one in self._notes.all()]

    def clear(self) -> None:
        """Let all go."""
        for value in self.all():
            _python.Py_DecRef(value)
        self._notes.clear()
