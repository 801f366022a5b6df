"""The plan: frozen decisions for one function and one key, and its form on disk.

Made by ``rules.compile_plan``, kept by ``plan_cache``, run by ``runtime``. JSON with sorted keys, the same bytes for
equal plans. No handles and no objects of the process that made it. No torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from types import GenericAlias
from typing import Any, Literal, get_args, get_origin

import attrs
from attrs import field
from cattrs import BaseValidationError, Converter, transform_error
from cattrs.gen import make_dict_structure_fn

from capture.core.data import frozen
from capture.core.errors import CaptureError
from capture.core.facts import CodeLocation, Effect, OutputInfo, Owner, PlaceholderKind, TensorInfo
from capture.core.findings import SETTLING, Finding, Policy, Severity
from capture.core.options import Rng

VERSION = 3
"""Goes up with every change of a field's name, type or meaning."""


class PlanError(CaptureError, ValueError):
    """A text is no plan of this version; the message names the first thing that is wrong."""


@frozen(kw_only=True)
class PlannedPlaceholder:
    """How one input of the recording is served, and why."""

    path: str
    kind: PlaceholderKind
    owner: Owner
    policy: Policy
    tensor: TensorInfo
    mutated: bool
    alias_group: int | None
    reason_code: str
    """The rule whose decision won."""
    reason: str
    first_use: CodeLocation | None = None
    mutation: CodeLocation | None = None
    """The first write, for logs."""


def _sorted_mapping(value: Mapping[str, str]) -> Mapping[str, str]:
    return dict(sorted(value.items()))


@frozen(kw_only=True)
class CapturePlan:
    """What the runtime does for one function and one key."""

    version: int = VERSION
    function: str
    outcome: Literal["record", "eager"]
    placeholders: tuple[PlannedPlaceholder, ...]
    outputs: tuple[OutputInfo, ...]
    effects: tuple[Effect, ...]
    rng: Rng
    num_ops: int
    sequence_digest: str
    """Of the operators in order; the recording run has to issue the same."""
    max_recordings: int
    findings: tuple[Finding, ...]
    """Most severe first."""
    generators: tuple[str, ...] = ()
    """What the body draws from, sorted: ``"default"``, or the path of a generator."""
    collectives: tuple[str, ...] = ()
    """Operators by which the body communicates with other ranks, sorted."""
    fingerprint: Mapping[str, str] = field(factory=dict, converter=_sorted_mapping)
    """What the plan depends on besides the facts, such as source and versions; compared by the store."""

    @property
    def may_settle(self) -> bool:
        """Whether all that keeps it from being recorded is state that a first call sets up; a second watched run may
        show none of it."""
        return all(finding.code in SETTLING for finding in self.findings_at_least(Severity.EAGER))

    def findings_at_least(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity >= severity)


def sequence_digest(sequence: Iterable[str]) -> str:
    """SHA-256, as 64 hex digits, of operator names in order."""
    return hashlib.sha256("\n".join(sequence).encode()).hexdigest()


def differing_fields(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[str, ...]:
    """Names, sorted, whose values differ or that only one of two fingerprints has."""
    return tuple(sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)))


def dumps(plan: CapturePlan) -> str:
    """The plan as JSON: sorted keys, two spaces, one newline at the end, ASCII."""
    return _indented(_CONVERTER.unstructure(plan), "\n") + "\n"


def _indented(value: Any, end: str) -> str:  # Any: what JSON holds
    """As ``json.dumps`` with ``indent=2`` and ``sort_keys``, which encodes in Python letter by letter: a plan is kept
    after each watched run. ``end``: a new line, with the indent of the value."""
    if not isinstance(value, (dict, list)) or not value:
        return _encoded(value)
    inner = f"{end}  "
    if isinstance(value, list):
        return f"[{inner}{f',{inner}'.join([_indented(member, inner) for member in value])}{end}]"
    nested = {key: _indented(value[key], inner) for key in value if isinstance(value[key], (dict, list))}
    if not nested:
        text = _encoder(inner)(value)
        return f"{{{inner}{text[1:-1]}{end}}}"
    members = [f"{_encoded(key)}: {nested.get(key) or _encoded(value[key])}" for key in sorted(value)]
    return f"{{{inner}{f',{inner}'.join(members)}{end}}}"


_encoded = json.JSONEncoder().encode


@functools.cache
def _encoder(inner: str) -> Callable[[Any], str]:
    return json.JSONEncoder(sort_keys=True, separators=(f",{inner}", ": ")).encode


def loads(text: str) -> CapturePlan:
    """The plan that ``dumps`` wrote. Raises ``PlanError`` for anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"no plan: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise PlanError(f"no plan: a JSON object is expected, found {type(data).__name__}")
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        found_version = f"schema version {version!r}" if "version" in data else "no schema version"
        raise PlanError(f"not a plan of this library: found {found_version}, expected {VERSION}")
    try:
        return _CONVERTER.structure(data, CapturePlan)
    except BaseValidationError as error:
        raise PlanError(f"damaged plan: {transform_error(error, format_exception=_reason)[0]}") from None


def _reason(error: BaseException, _: type | None) -> str:
    return f"missing field {error}" if isinstance(error, KeyError) else str(error)


Hook = Callable[[Any, Any], Any]  # Any: cattrs hands over what JSON held and the annotated type


def _of_type(expected: type, word: str, structure: Hook = lambda value, _: value) -> Hook:
    """cattrs would convert: ``int("1")``, a text as a tuple of letters. In a plan another type is damage."""

    def hook(value: Any, kind: Any) -> Any:
        if type(value) is not expected:
            raise TypeError(f"expected {word}, found {_shown(value)}")
        return structure(value, kind)

    return hook


_REMEMBERED = 4096  # parts of plans that are shared


def _remembered(structure: Hook) -> Hook:
    """Plans of one function have most of their inputs in common, such as all parameters: equal parts are made once and
    shared."""
    by_text: dict[str, Any] = {}

    def hook(value: Any, kind: Any) -> Any:
        text = repr(value)
        structured = by_text.get(text)
        if structured is None:
            structured = structure(value, kind)
            if len(by_text) >= _REMEMBERED:
                by_text.clear()
            by_text[text] = structured
        return structured

    return hook


def _generic(origin: object) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) is origin


def _list_of(kind: Any) -> Any:
    """``list[X]`` for ``tuple[X, ...]``: cattrs names the index of a damaged element."""
    return GenericAlias(list, get_args(kind)[:1])


def _one_of(choices: Mapping[str, Any]) -> Hook:
    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}, found {_shown(value)}")
        return choices[value]

    return hook


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _converter() -> Converter:
    converter = Converter()

    def attributes(kind: type) -> Hook:
        return _of_type(dict, "an object", make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True))

    def members_of(kind: Any) -> Hook:
        listed = _list_of(kind)
        members = converter.get_structure_hook(listed)
        return _of_type(list, "a list", lambda value, _: tuple(members(value, listed)))

    def remembered(kind: type) -> Hook:
        return _remembered(attributes(kind))

    for kind, word in ((int, "a whole number"), (str, "a text"), (bool, "true or false")):
        converter.register_structure_hook(kind, _of_type(kind, word))
    for members in (Severity, Policy):
        converter.register_unstructure_hook(members, lambda member: member.name.lower())
        converter.register_structure_hook(members, _one_of({member.name.lower(): member for member in members}))
    converter.register_structure_hook_factory(
        _generic(Literal), lambda kind: _one_of({choice: choice for choice in get_args(kind)})
    )
    converter.register_structure_hook_factory(_generic(tuple), members_of)
    converter.register_structure_hook_func(
        _generic(Mapping), _of_type(dict, "an object", lambda value, _: converter.structure(value, dict[str, str]))
    )
    converter.register_structure_hook_factory(attrs.has, attributes)
    converter.register_structure_hook_factory(lambda kind: kind is PlannedPlaceholder, remembered)
    return converter


_CONVERTER = _converter()
