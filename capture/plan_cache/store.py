"""Plans on disk, and plans loaded from a directory that a user names.

Stage: before the first watched run of a key. In: annotation, function, key. Out: a plan whose fingerprint is that of
here and now, or None. A file is named for function and key alone, so that one made under another body, rule set or
torch is found and the field that differs can be said. A file that cannot be used is named in an event, no more.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import linecache
import os
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve

from capture.core import config
from capture.core.data import frozen
from capture.core.events import Log, logger
from capture.core.findings import Severity
from capture.core.interrupts import let_through, suppress
from capture.core.options import Annotation
from capture.core.plan import VERSION, CapturePlan, PlanError, differing_fields, dumps, loads
from capture.core.version import VERSION as VERSION_OF_CAPTURE
from capture.key import signature
from capture.key.modes import Ambient
from capture.key.pytree import PLAIN_TYPES
from capture.key.signature import Key
from capture.plan_cache import files, locations
from capture.rules import changed_rules, deciding_rules
from capture.torch_private import devices

_loaded: dict[str, CapturePlan] = {}  # by file name
_looked_at: OrderedDict[str, None] = OrderedDict()
"""Names of plans that say eager and that a run in this process confirmed, the last used at the end."""
_MOST_LOOKED_AT = 4096
_unwritable: set[Path] = set()  # directories that a warning was given for
_DEVICE = re.compile(r"\bdevice\(([a-z]+)")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|0x[0-9a-fA-F]{8,}")


@frozen(kw_only=True)
class LoadReport:
    """What ``load_plans`` found."""

    used: tuple[str, ...]  # names of functions, one a plan, in the order of the files
    stale: tuple[tuple[str, str], ...]  # file and reason of what was left out


def default_dir() -> Path:
    """Where plans are kept: ``CAPTURE_CACHE_DIR``, or what ``config.patch(cache_dir=...)`` says here."""
    return config.current().cache_dir


def load(annotation: Annotation, function: Callable[..., Any], key: Key, log: Log) -> CapturePlan | None:
    """The plan for this function and key that still holds: one the user loaded, else the file in the cache."""
    name = _file_name(annotation.function, _digest_of_key(key)[0])  # even if unused: see ``_digest_of_key``
    plan = _loaded.get(name)
    if plan is None or not _holds(plan, annotation, function, key, log):
        plan = _cached(name, log)
        if plan is None or not _holds(plan, annotation, function, key, log):
            return None
    log.add("plan-loaded", name)
    return locations.local(plan, _file_of(function))


def is_looked_at(plan: CapturePlan) -> bool:
    """Whether a run in this process confirmed this plan's reasons to be eager. The fingerprint does not cover
    everything that they depend on: code far below the function, another library's version, the machine."""
    return _file_name(plan.function, plan.fingerprint.get("key", "")) in _looked_at


def _note_look(plan: CapturePlan) -> None:
    name = _file_name(plan.function, plan.fingerprint["key"])
    _looked_at.pop(name, None)
    if plan.outcome == "eager":
        _looked_at[name] = None
        if len(_looked_at) > _MOST_LOOKED_AT:
            _looked_at.popitem(last=False)


def _file_of(function: Any) -> str | None:  # Any: a callable
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return getattr(code, "co_filename", None)


def _cached(name: str, log: Log) -> CapturePlan | None:
    try:
        return _read(default_dir() / name) if config.current().cache else None
    except PlanError as error:
        log.counters.plans_stale += 1
        log.add("plan-stale", f"{name}: {error}")
        return None


def save(annotation: Annotation, function: Callable[..., Any], key: Key, plan: CapturePlan, log: Log) -> CapturePlan:
    """Keep a plan on disk, if the cache is on. The plan comes back with its fingerprint."""
    plan = evolve(plan, fingerprint=fingerprint(annotation, function, key))
    _digests.pop(key, None)
    _note_look(plan)
    if not config.current().cache:
        return plan
    directory = default_dir()
    try:
        log.add("plan", f"{plan.outcome}, kept as {_write(directory, plan, config.current().cache_limit)}")
    except (OSError, ValueError) as error:  # ValueError: too large, or a directory's name that no file system takes
        let_through(error)
        log.add("plan", f"{plan.outcome}, not kept: {error}")
        if directory not in _unwritable:
            _unwritable.add(directory)
            logger.warning("plans are not kept: %s", error)
    return plan


def save_plans(directory: str | os.PathLike[str], plans: Iterable[CapturePlan]) -> int:
    """Write plans to a directory, to be shipped; gives the number of files. Raises ``OSError`` if that is impossible.

    A plan that was never saved for a key (it has no fingerprint) is left out; of two for one key the last stays.
    """
    return len({_write(Path(directory), plan) for plan in plans if "key" in plan.fingerprint})


def load_plans(directory: str | os.PathLike[str]) -> LoadReport:
    """Use the plans in a directory like those of the cache, before it and also while it is off.

    Left out and named: what is no plan, and plans made under another torch, CUDA, allocator or rule set. The source
    and the annotation are compared at the call. Raises ``OSError`` if the directory cannot be read.
    """
    used: list[str] = []
    stale: list[tuple[str, str]] = []
    here = _of_process()
    for path in sorted(path for path in Path(directory).iterdir() if path.suffix == ".json"):
        try:
            plan = _read(path, shipped=True)
        except PlanError as error:
            stale.append((path.name, str(error)))
            continue
        made_under = dict(plan.fingerprint) if plan is not None else {}
        reason = _differ(made_under, made_under | here) if "key" in made_under else "no fingerprint"
        if plan is None or reason:
            stale.append((path.name, reason))
        else:
            _loaded[_file_name(plan.function, made_under["key"])] = plan
            used.append(plan.function)
    return LoadReport(used=tuple(used), stale=tuple(stale))


def forget_loaded() -> None:
    """Undo all ``load_plans`` so far; functions that run with such a plan go on with it."""
    _loaded.clear()


def _read(path: Path, *, shipped: bool = False) -> CapturePlan | None:
    """The plan in a file, None if there is no file. Raises ``PlanError`` for whatever else is there."""
    try:
        text = files.read(path, shipped=shipped)
    except files.UnusableFileError as error:
        raise PlanError(str(error)) from None
    try:
        return None if text is None else loads(text)
    except MemoryError:
        raise PlanError("no plan: not enough memory to read it") from None


def _write(directory: Path, plan: CapturePlan, limit: int | None = None) -> str:
    """The name of the plan's file."""
    name = _file_name(plan.function, plan.fingerprint["key"])
    files.write(directory, name, dumps(locations.portable(plan)), limit)
    return name


def _file_name(function: str, key: str) -> str:
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", function).strip("-.")[-80:]
    return f"{slug or 'plan'}-{digest(f'{function} {key}')[:16]}.json"


def _holds(plan: CapturePlan, annotation: Annotation, function: Callable[..., Any], key: Key, log: Log) -> bool:
    reason = _differ(plan.fingerprint, fingerprint(annotation, function, key)) or _outdated_line(
        locations.local(plan, _file_of(function))
    )
    if reason:
        log.counters.plans_stale += 1
        log.add("plan-stale", reason)
    return not reason


def _differ(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The names of what differs between two fingerprints; empty if nothing does."""
    fields = differing_fields(before, now)
    if not fields:
        return ""
    text = f"{', '.join(fields)} {'differs' if len(fields) == 1 else 'differ'}"
    codes = changed_rules(before.get("rules", ""), now.get("rules", "")) if "rules" in fields else []
    return f"{text} ({', '.join(codes[:3])}{', ...' if len(codes) > 3 else ''})" if codes else text


def _outdated_line(plan: CapturePlan) -> str:
    """Reasons not to record may lie in deeper code, which no recording checks: their lines must still be there."""
    for finding in plan.findings_at_least(Severity.EAGER):
        where = finding.where
        now = linecache.getline(where.file, where.line).strip() if where and where.code else ""
        if where and now and now != where.code:
            return f"{where.file}:{where.line} differs, the place of {finding.code}"
    return ""


def fingerprint(annotation: Annotation, function: Callable[..., Any], key: Key) -> dict[str, str]:
    """All that a plan depends on besides the facts; the same in every process that runs the same program."""
    digest, accelerator = _digest_of_key(key)
    options = asdict(annotation, recurse=False) | {"guards": [_name(guard) for guard in annotation.guards]}
    del options["function"], options["defined_at"]  # an edit further up moves the place
    del options["silence"]  # it decides nothing
    del options["buckets"]  # a padded call is recorded like any other
    return _of_process() | {
        "annotation": json.dumps(options, sort_keys=True),
        "device": devices.model_of(accelerator),
        "function": annotation.function,
        "key": digest,
        "source": _source(function),
    }


def _of_process() -> dict[str, str]:
    allocator = (os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return {
        "allocator": " ".join(text for text in allocator if text) or "default",
        "capture": VERSION_OF_CAPTURE,
        "cuda": torch.version.cuda or "none",
        "rules": deciding_rules(),
        "schema": str(VERSION),
        "torch": str(torch.__version__),
    }


def _source(function: Any) -> str:  # Any: a callable
    """Hash of the source, or of the code where there is none. Lambdas of one line share it, so theirs is of both. So is
    that of code without a file, as ``exec`` makes it: from Python 3.13 on it seems to have the source of ``python -c``.
    """
    text, is_shared = "", True
    try:
        function = inspect.unwrap(function)
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        text = _text_of(code, code.co_filename) if code is not None else _name(function)
        is_shared = code is not None and (code.co_name == "<lambda>" or code.co_filename.startswith("<"))
    except Exception as error:  # noqa: BLE001 - no file, another file by now, no end of wrappers: of many kinds
        let_through(error)
        text = ""
    return digest(text + _code_text(function) if is_shared or not text else text)


@functools.lru_cache(maxsize=256)
def _text_of(code: types.CodeType, file: str) -> str:
    """Source as it was when it was first asked for, empty where there is none. ``file``: code compares equal to that
    of another file.

    ``inspect`` looks through all modules of the process for the one that a file belongs to, which takes as long as many
    watched runs; that is needed only where the file cannot be read by its name."""
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if code.co_name == "<module>" or not 0 < code.co_firstlineno <= len(lines):
        with suppress(OSError):  # code that ``exec`` made: to find none takes as long, and is kept, too
            return inspect.getsource(code)
        return ""
    return "".join(inspect.getblock(lines[code.co_firstlineno - 1 :]))


def _code_text(function: Any) -> str:  # Any: a function or its code
    code = getattr(function, "__code__", function)
    if not inspect.iscode(code):
        return _name(function)
    constants = [_code_text(constant) if inspect.iscode(constant) else _text(constant) for constant in code.co_consts]
    return f"({code.co_code.hex()} {' '.join(code.co_names)} {' '.join(constants)})"


def digest(text: str) -> str:
    """SHA-256 as 64 hex digits."""
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


_DIGESTS = 16  # keys that were looked up last
_digests: OrderedDict[Key, tuple[str, str | None]] = OrderedDict()
"""From ``load`` to ``save``: a key keeps the classes in it alive, and the modules that have one for themselves."""


def _digest_of_key(key: Key) -> tuple[str, str | None]:
    """Hash of the key's text, and the type of the accelerator in it, if any. Kept from ``load`` to ``save``, between
    which the body's first run may give a module its parameters."""
    kept = _digests.get(key)
    if kept is None:
        kept = _digests[key] = _new_digest(key)
        while len(_digests) > _DIGESTS:
            _digests.popitem(last=False)
    _digests.move_to_end(key)
    return kept


def _new_digest(key: Key) -> tuple[str, str | None]:
    try:
        text = _text(key, raw=False)
    except Exception as error:  # noqa: BLE001 - a ``repr`` or a module of others may raise anything
        let_through(error)
        text = os.urandom(32).hex()  # so that no file is found
    accelerators = [one for one in _DEVICE.findall(text) if one not in ("cpu", "meta")]
    return digest(text), accelerators[0] if accelerators else None


def _text(value: Any, *, raw: bool = True) -> str:  # Any: a part of a key
    """Text by value, without addresses or process-local numbers; if not ``raw``, of what ``key.signature`` made."""
    kind = type(value)
    if kind is torch.device:  # without the GPU's number: each rank has another one, and one file serves all
        return f"device({value.type if devices.is_current(value) else value})"
    if kind is Ambient:
        return _text(value.values)
    if issubclass(kind, type):
        return _name(value)
    if issubclass(kind, tuple):
        stand_in = None if raw else _stand_in(value)
        return stand_in or f"({', '.join([_text(member, raw=raw) for member in value])})"
    if issubclass(kind, Set):
        return f"{_name(kind)}{{{', '.join(sorted(map(_text, value)))}}}"
    if kind in PLAIN_TYPES:
        return repr(value)
    by_identity = issubclass(kind, torch.Tensor) or getattr(kind, "__hash__", None) is object.__hash__
    text = "" if by_identity else repr(value)
    return f"<{_name(value)} {'' if _ADDRESS.search(text) else text}>"


def _stand_in(part: tuple[Any, ...]) -> str | None:
    """The text of a part that has a process-local number, or a ``repr`` by torch's pytree; else None."""
    match part:
        case (type() as kind, second, *rest) if type(second) in (int, signature.Token) and kind not in (int, tuple):
            return f"<{_identity_text(second, kind)} {rest}>"  # ``rest``: training flags
        case (type() as kind, str() as context, int() as size):
            return f"<{_name(kind)} {_ADDRESS.sub('', context)!r} {size}>"
        case ("method", int() as function, int() as receiver):
            return f"<method {_identity_text(function)} {_identity_text(receiver)}>"
    return None


def _identity_text(token: int, kind: type = object) -> str:
    """A text for an object that is compared by identity: its type, and more for functions and modules."""
    identified = next((reference() for reference, number in list(signature._tokens.values()) if number == token), None)
    if identified is None or all(one is not kind for one in type(identified).__mro__):
        return _name(kind)  # the object is gone, or the number is an ``id``
    if issubclass(type(identified), torch.nn.Module):
        members = [f"{path}: {_name(type(member))}" for path, member in identified.named_modules()]
        return " ".join(
            members + [f"{path}: {parameter.requires_grad}" for path, parameter in identified.named_parameters()]
        )
    return _name(identified) + (
        _code_text(getattr(identified, "__wrapped__", identified)) if type(identified) is types.FunctionType else ""
    )


_NAMED = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType)


def _name(value: object) -> str:
    """``module.qualname`` of a type or function, or of the type of anything else."""
    named = value if issubclass(type(value), _NAMED) else type(value)
    return f"{getattr(named, '__module__', None)}.{getattr(named, '__qualname__', None)}"
