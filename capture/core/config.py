"""Process-wide settings: ``pyproject.toml``, environment variables, and ``config.patch`` for a block of code.

Precedence: an active ``patch``, then the environment, then the table ``[tool.capture]`` of ``pyproject.toml``, then the
defaults below. Environment and file are read once, at import. A decorator's own options are never overridden, except
``verify`` where a setting asks for a stricter one.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

import platformdirs
from attrs import evolve
from typing_extensions import override

from capture.core.data import frozen
from capture.core.errors import AnnotationError
from capture.core.interrupts import let_through
from capture.core.options import Verify, codes, suggestion


@frozen(kw_only=True)
class Config:
    """All settings. ``CAPTURE_<NAME>`` in the environment sets the field of that name, as does a key of that name in
    ``[tool.capture]`` of ``pyproject.toml``."""

    enabled: bool = True
    """False: every captured function runs eagerly (``CAPTURE_ENABLED=0``)."""
    cache: bool = True
    """Plans are kept on disk between processes (``CAPTURE_CACHE=0`` turns it off)."""
    cache_dir: Path = Path(platformdirs.user_cache_dir("torch-capture"))
    cache_limit: int = 64 << 20
    """Bytes that all plans on disk may take; those that were not used for longest are deleted first."""
    poison: bool = False
    """Dead pool memory is filled with NaN before every replay, so that a stale read shows."""
    verify: Verify = "off"
    """The least verification every function gets."""
    strict: bool = False
    """What goes wrong inside this library is raised (``CAPTURE_STRICT=1``), for its tests. Else the call is eager."""
    memory_limit: float = 0.9
    """What pools, recorded graphs and copies for undo of all threads may take on one device at the end of every call:
    bytes, or up to 1 a share of its memory. A recording that would exceed it, as far as a watched run tells, is not
    made (CG907); one that turns out larger goes. During a call the excess is at most what that one recording takes."""
    max_recordings: int = 4096
    """Recordings of all functions, in all threads together, on one device."""
    schedule_after: int = 20
    """Replays of a recording of ``schedule="auto"`` before another order of its kernels is tried
    (``CAPTURE_SCHEDULE_AFTER``): making it takes some 10 to 100 ms."""
    schedule_room: int = 64 << 20
    """Bytes by which the pool of such a recording may grow (``CAPTURE_SCHEDULE_ROOM``). Memory that is used twice makes
    independent kernels wait for each other; so up to this many bytes of the body's memory are used again later than
    they could be."""
    drop_slow: bool = True
    """A recording whose replays take longer than the body goes (CG902). To find out, a few calls run the body.
    ``CAPTURE_DROP_SLOW=0`` keeps it, as where tests run on a CPU what is to be replayed on a GPU."""
    silence: frozenset[str] = frozenset()
    """Codes of findings that no warning is given for (``CAPTURE_SILENCE=CG201,CG906``). Reports still have them."""
    refuse: frozenset[str] = frozenset()
    """Codes of findings that raise ``UncapturableError``, as in a test of a model's own (``CAPTURE_REFUSE=CG201``)."""
    skip_warmup: bool = False
    """Record on the first call, without a watched run before it (the recording itself is watched)."""

    def memory_of(self, device_bytes: int) -> float:
        """How many bytes ``memory_limit`` allows on a device that has ``device_bytes``."""
        return self.memory_limit * device_bytes if self.memory_limit <= 1 else self.memory_limit


class ConfigPatch(TypedDict, total=False):
    """Keyword arguments of ``config.patch``."""

    enabled: bool
    cache: bool
    cache_dir: Path
    cache_limit: int
    poison: bool
    verify: Verify
    strict: bool
    memory_limit: float
    max_recordings: int
    schedule_after: int
    schedule_room: int
    drop_slow: bool
    silence: Collection[str]
    refuse: Collection[str]
    skip_warmup: bool


def _flag(place: str, value: object) -> bool:
    if isinstance(value, str):
        return value.strip().lower() not in ("", "0", "false", "no", "off")
    if isinstance(value, bool):
        return value
    raise AnnotationError(f"{place}={value!r} is not true or false")


def _number(place: str, value: object) -> float:
    try:
        number = -1.0 if isinstance(value, bool) else float(value)  # type: ignore[arg-type] # what else raises TypeError
    except (TypeError, ValueError):
        number = -1.0
    if not number >= 0:
        raise AnnotationError(f"{place}={value!r} is not a number of 0 or more")
    return number


def _whole_number(place: str, value: object) -> int:
    if not str(value).strip().isdecimal():
        raise AnnotationError(f"{place}={value!r} is not a whole number of 0 or more")
    return int(str(value))


def _codes(place: str, value: object) -> frozenset[str]:
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, Collection) or not all(isinstance(word, str) for word in words):
        raise AnnotationError(f"{place}={value!r} is not a list of codes")
    return codes(place, [word for word in words if word.strip()])


def _choice(place: str, value: object) -> Verify:
    for choice in get_args(Verify):
        if value == choice:
            found: Verify = choice
            return found
    raise AnnotationError(f"{place}={value!r} is not a choice; known: {', '.join(map(repr, get_args(Verify)))}")


def _directory(place: str, value: object) -> Path:
    if not isinstance(value, (str, Path)):
        raise AnnotationError(f"{place}={value!r} is not a directory")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # the user has no home directory
        let_through(error)
        return Path(value)


_READERS: dict[str, Callable[[str, object], Any]] = {
    "enabled": _flag, "cache": _flag, "cache_dir": _directory, "cache_limit": _whole_number, "poison": _flag,
    "verify": _choice, "strict": _flag, "memory_limit": _number, "max_recordings": _whole_number, "silence": _codes,
    "refuse": _codes, "skip_warmup": _flag, "drop_slow": _flag, "schedule_after": _whole_number,
    "schedule_room": _whole_number,
}  # fmt: skip
"""How each setting is read from a text of the environment, ``pyproject.toml``, or ``patch``."""


def settings_file() -> Path | None:
    """The ``pyproject.toml`` of the current directory or the nearest one above it that has one; None without."""
    try:
        here = Path.cwd()
    except OSError as error:  # it was deleted
        let_through(error)
        return None
    return next((file for folder in (here, *here.parents) if (file := folder / "pyproject.toml").is_file()), None)


def _from_file(file: Path | None) -> dict[str, Any]:
    """The table ``[tool.capture]``. A file that does not mention it is not parsed.

    Raises ``AnnotationError`` for a table that cannot be read, and for a name that is no setting.
    """
    try:
        text = "" if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        let_through(error)
        return {}
    if file is None or "tool.capture" not in text:
        return {}
    import tomllib  # takes 3 ms, and few programs need it

    try:
        table = tomllib.loads(text).get("tool", {}).get("capture", {})
    except tomllib.TOMLDecodeError as error:
        raise AnnotationError(f"{file}: {error}") from None
    values = {}
    for name, value in table.items():
        place = f"{file}: [tool.capture] {name}"
        if name not in _READERS:
            raise AnnotationError(f"{place} is no setting{suggestion(name, _READERS)}; known: {', '.join(_READERS)}")
        values[name] = _READERS[name](place, value)
    if "cache_dir" in values:
        values["cache_dir"] = file.parent / values["cache_dir"]
    return values


def _from_environment() -> Config:
    """The environment's settings, those of the file for what it does not say, and the defaults for the rest."""
    values = _from_file(settings_file())
    for name, read in _READERS.items():
        variable = f"CAPTURE_{name.upper()}"
        text = os.environ.get(variable)
        if text is not None and (text.strip() or read is _flag):
            values[name] = read(variable, text)
    return Config(**values)


_current: ContextVar[Config] = ContextVar("capture_config", default=_from_environment())


current = _current.get
"""The settings in force here."""


@contextmanager
def patch(**settings: Unpack[ConfigPatch]) -> Iterator[Config]:
    """Override settings for a block, in this thread or task only.

    Raises ``AnnotationError`` for a name that is no setting, and for a value that it cannot have.
    """
    names = tuple(ConfigPatch.__annotations__)
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in names:
            raise AnnotationError(f"unknown setting {name!r}{suggestion(name, names)}; known: {', '.join(names)}")
        values[name] = _READERS[name](name, value)
    before = _current.get()
    now = evolve(before, **values)
    # the same object where nothing changes: the fast path compares settings by identity
    with using(before if now == before else now) as settings_now:
        yield settings_now


put, put_back = _current.set, _current.reset
"""``token = put(settings)`` puts settings in force in this thread or task, and ``put_back(token)`` ends that:
for objects that are context managers themselves."""


@contextmanager
def using(settings: Config) -> Iterator[Config]:
    """Exactly these settings for a block, in this thread or task only."""
    token = put(settings)
    try:
        yield settings
    finally:
        put_back(token)


class _Settings(types.ModuleType):
    """The class of this module. Assigning to a setting's name here would change nothing, so it raises."""

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in ConfigPatch.__annotations__:
            raise AnnotationError(
                f"capture.config.{name} cannot be set. Settings hold for a block, "
                f"`with capture.config.patch({name}={value!r}):`, or for a process, by CAPTURE_{name.upper()} in its "
                "environment"
            )
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Settings
