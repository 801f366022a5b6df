"""Process-wide settings: environment variables, overridden by ``config.patch`` for a block of code.

Precedence: an active ``patch`` > the environment at import > the defaults below. A decorator's own options are
never overridden, except ``verify`` where the environment asks for a stricter one.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

import platformdirs
from attrs import evolve, frozen
from typing_extensions import override

from capture.core.errors import AnnotationError
from capture.core.options import Verify, suggestion


@frozen(kw_only=True)
class Config:
    """All settings. ``CAPTURE_<NAME>`` in the environment sets the field of that name."""

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
    """What pools and recorded graphs of all threads may take on one device at the end of every call: bytes, or up to 1
    a share of its memory. A recording that would exceed it, as far as a watched run tells, is not made (CG907); one
    that turns out larger goes. During a call the excess is at most what that one recording takes."""
    max_recordings: int = 4096
    """Recordings of all functions in one thread and on one device."""
    silence: frozenset[str] = frozenset()
    """Codes of findings that no warning is given for (``CAPTURE_SILENCE=CG201,CG906``). Reports still have them."""
    refuse: frozenset[str] = frozenset()
    """Codes of findings that raise ``UncapturableError``, as in a test of a model's own (``CAPTURE_REFUSE=CG201``)."""
    skip_warmup: bool = False
    """Record on the first call, without a watched run before it (the recording itself is watched)."""


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
    silence: frozenset[str]
    refuse: frozenset[str]
    skip_warmup: bool


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name)
    return default if text is None else text.strip().lower() not in ("", "0", "false", "no", "off")


def _bytes(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise AnnotationError(f"{name}={text!r} is no number of bytes")
    return int(text)


def _codes(name: str) -> frozenset[str]:
    words = frozenset(word.strip().upper() for word in os.environ.get(name, "").split(",") if word.strip())
    for word in sorted(words):
        if not (word.startswith("CG") and word[2:].isdecimal() and len(word) == 5):
            raise AnnotationError(f"{name}: {word!r} is no code of a finding, as CG201 is")
    return words


def _directory() -> Path:
    path = Path(os.environ.get("CAPTURE_CACHE_DIR") or platformdirs.user_cache_dir("torch-capture"))
    try:
        return path.expanduser()
    except RuntimeError:  # nobody of that name has a home
        return path


def _number(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        found = default if text is None else float(text)
    except ValueError:
        found = -1.0
    if found < 0:
        raise AnnotationError(f"{name}={text!r} is not a number of 0 or more")
    return found


def _from_environment() -> Config:
    text = os.environ.get("CAPTURE_VERIFY", "off")
    verify: Verify | None = next((choice for choice in get_args(Verify) if choice == text), None)
    if verify is None:
        raise AnnotationError(f"CAPTURE_VERIFY={text!r} is not a choice; known: 'off', 'first', 'always'")
    return Config(
        enabled=_flag("CAPTURE_ENABLED", True),
        cache=_flag("CAPTURE_CACHE", True),
        cache_dir=_directory(),
        cache_limit=_bytes("CAPTURE_CACHE_LIMIT", Config().cache_limit),
        poison=_flag("CAPTURE_POISON", False),
        verify=verify,
        strict=_flag("CAPTURE_STRICT", False),
        memory_limit=_number("CAPTURE_MEMORY_LIMIT", 0.9),
        max_recordings=int(_number("CAPTURE_MAX_RECORDINGS", 4096)),
        silence=_codes("CAPTURE_SILENCE"),
        refuse=_codes("CAPTURE_REFUSE"),
        skip_warmup=_flag("CAPTURE_SKIP_WARMUP", False),
    )


_current: ContextVar[Config] = ContextVar("capture_config", default=_from_environment())


current = _current.get
"""The settings in force here."""


@contextmanager
def patch(**settings: Unpack[ConfigPatch]) -> Iterator[Config]:
    """Override settings for a block, in this thread or task only.

    Raises ``AnnotationError`` for a name that is no setting.
    """
    known = tuple(ConfigPatch.__annotations__)
    for name in settings:
        if name not in known:
            raise AnnotationError(f"unknown setting {name!r}{suggestion(name, known)}; known: {', '.join(known)}")
    before = _current.get()
    now = evolve(before, **settings)
    with using(before if now == before else now) as settings_now:  # the straight way compares objects
        yield settings_now


put, put_back = _current.set, _current.reset
"""Settings to be in force in this thread or task from now on; the first gives what the second takes."""


@contextmanager
def using(settings: Config) -> Iterator[Config]:
    """Exactly these settings for a block, in this thread or task only."""
    token = put(settings)
    try:
        yield settings
    finally:
        put_back(token)


class _Settings(types.ModuleType):
    """What is set here would be in force nowhere."""

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
