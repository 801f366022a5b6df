"""Files: the directory of plans as a place that others may have touched.

In: a directory and a name. Out: the text of a file, or a reason why it is not used. A file counts only if it is a
regular one, not too large, and was written by this user: a reader never waits for a FIFO, never follows a link, and
never reads a device. All files together stay within a limit; those that were not read or written for longest go first.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from capture.core.interrupts import let_through

LARGEST = 8 << 20  # bytes of one file: some 10,000 inputs
_BLOCK = 4096  # bytes that even the smallest file takes on a disk
_SPARE = 0.9  # share of the limit that is left when some were deleted, so that the next write need not look again
_LOOK_AGAIN = 64  # writes after which other processes' files are counted again
_LEFT_OVER = 3600.0  # seconds until a temporary file is one of a process that was killed
_TOUCHED = 60.0  # seconds by which the time of a last use may be wrong
_NAME = re.compile(r".*-[0-9a-f]{16}\.json")
_TEMPORARY = re.compile(r"\..*-[0-9a-f]{16}\.json\.[0-9a-f]{12}\.tmp")

_sizes: dict[Path, tuple[int, int]] = {}
"""By directory: bytes in it as far as this process knows, and how often it wrote there since the last count."""


class UnusableFileError(Exception):
    """A file is there and must not be used; the message says why."""


def read(path: Path, *, shipped: bool = False) -> str | None:
    """The text of a file; None if there is none. Raises ``UnusableFileError``. ``shipped``: the user named this
    directory of plans that others made, so that owner and links are not checked.
    """
    try:
        _check(path.stat() if shipped else path.lstat(), shipped=shipped)
        opened = os.open(path, _READ if shipped else _READ | getattr(os, "O_NOFOLLOW", 0))
        with open(opened, "rb") as file:
            _check(os.fstat(opened), shipped=shipped)  # it may be another file by now
            data = file.read(LARGEST + 1)
            if not shipped:
                _touch(opened)
        if len(data) > LARGEST:
            raise UnusableFileError(f"larger than {LARGEST} bytes")
        return data.decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, MemoryError) as error:  # ValueError: not UTF-8, or no valid name of a file
        raise UnusableFileError(f"cannot be read ({error})") from None


_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def _check(status: os.stat_result, *, shipped: bool) -> None:
    """Raises ``UnusableFileError`` unless it is a regular file of this user."""
    if not stat.S_ISREG(status.st_mode):
        raise UnusableFileError("cannot be read (not a regular file)")
    if status.st_size > LARGEST:
        raise UnusableFileError(f"larger than {LARGEST} bytes")
    if not shipped and not _is_ours(status):
        raise UnusableFileError("cannot be trusted (others own it or may write to it)")


def _is_ours(found: os.stat_result) -> bool:
    """Whether only this user, or the administrator, can have written the file."""
    if not hasattr(os, "geteuid"):
        return True
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _touch(opened: int) -> None:
    """Note in the file's times that it was used."""
    try:
        if time.time() - os.fstat(opened).st_mtime > _TOUCHED:
            os.utime(opened)
    except OSError as error:  # a read-only file system
        let_through(error)


def write(directory: Path, name: str, text: str, limit: int | None) -> None:
    """Write to a temporary name, then rename: a reader sees the old file or the new one, whole. Raises ``OSError``, or
    ``ValueError`` for a name that no file system takes and for a text that is too long. ``limit``: bytes that all files
    together may take.
    """
    data = text.encode("utf-8")
    if len(data) > LARGEST:
        raise ValueError(f"{name} would be larger than {LARGEST} bytes")
    _make(directory)
    temporary = directory / f".{name}.{os.urandom(6).hex()}.tmp"
    try:
        with open(os.open(temporary, _WRITE, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, directory / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if limit is not None:
        _stay_within(directory, name, len(data), limit)


def _make(directory: Path) -> None:
    """Make a directory, and those above it, for this user alone, whatever the umask is."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue  # another process made it first
        folder.chmod(0o700)


def _stay_within(directory: Path, name: str, size: int, limit: int) -> None:
    """Delete what was not used for longest, once all files together take more than ``limit`` bytes."""
    known, writes = _sizes.get(directory, (0, _LOOK_AGAIN))
    known, writes = known + max(size, _BLOCK), writes + 1
    if known > limit or writes >= _LOOK_AGAIN:
        known, writes = _delete_oldest(directory, name, limit), 0
    _sizes[directory] = known, writes


def _delete_oldest(directory: Path, name: str, limit: int) -> int:
    """Delete files; gives the bytes that are left in the directory."""
    plans = sorted(_plans_in(directory))
    total = sum(size for _, size, _ in plans)
    wanted = total if total <= limit else int(limit * _SPARE)
    for _, size, path in plans:
        if total <= wanted:
            break
        if path.name == name:
            continue  # the file that was just written
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            let_through(error)
            continue
        total -= size
    return total


def _plans_in(directory: Path) -> Iterator[tuple[float, int, Path]]:
    """Last use, size and path of the files that this module wrote there, now or in another process. No other file is
    touched."""
    try:
        entries = list(os.scandir(directory))
    except OSError as error:
        let_through(error)
        return
    now = time.time()
    for entry in entries:
        temporary = _TEMPORARY.fullmatch(entry.name)
        if not temporary and not _NAME.fullmatch(entry.name):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError as error:
            let_through(error)
            continue  # deleted meanwhile
        if stat.S_ISREG(status.st_mode) and _is_ours(status) and (not temporary or now - status.st_mtime > _LEFT_OVER):
            yield (0.0 if temporary else status.st_mtime), max(status.st_size, _BLOCK), Path(entry.path)
