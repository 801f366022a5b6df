"""Annotation: the user's options, validated where they are written.

Stage: the decorator hands over raw options and the callable's parameter names; a frozen ``Annotation`` comes
out, or ``AnnotationError`` names the known choices. No torch.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args

from capture.core.buckets import Buckets, Dim, Fill, Rungs, Tolerance, buckets_of
from capture.core.data import frozen
from capture.core.errors import AnnotationError
from capture.core.facts import CodeLocation

Rng = Literal["graphsafe", "eager", "forbid"]
Outputs = Literal["preserve", "borrow", "clone"]
Inputs = Literal["auto", "copy", "bind"]
Fallback = Literal["eager", "error"]
Verify = Literal["off", "first", "always"]
Gradients = Literal["autograd", "accumulate"]
Schedule = Literal["recorded", "auto"]


class CaptureOptions(TypedDict, total=False):
    """Keyword options of ``capture``; see there for their meaning."""

    static: Sequence[str]
    rng: Rng
    max_recordings: int
    outputs: Outputs
    inputs: Inputs
    fallback: Fallback
    warmup: int
    verify: Verify
    gradients: Gradients
    schedule: Schedule
    guards: Sequence[Callable[[], object]]
    silence: Sequence[str]
    buckets: Mapping[str, Mapping[int, Rungs | Dim]]
    fill: Fill | Mapping[str, Fill]
    tolerance: Tolerance | Mapping[str, Tolerance]
    name: str


@frozen(kw_only=True)
class Annotation:
    """What the user declared about one function. Compared and hashed by value, guards by identity."""

    function: str
    """Name used in messages and reports: ``module.qualname``, or ``name=``."""
    defined_at: CodeLocation | None = None
    parameters: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    rng: Rng = "graphsafe"
    max_recordings: int = 5
    outputs: Outputs = "preserve"
    inputs: Inputs = "auto"
    fallback: Fallback = "eager"
    warmup: int = 1
    verify: Verify = "off"
    gradients: Gradients = "autograd"
    schedule: Schedule = "recorded"
    guards: tuple[Callable[[], object], ...] = ()
    silence: frozenset[str] = frozenset()
    buckets: Buckets | None = None


_CHOICES: dict[str, tuple[str, ...]] = {
    "rng": get_args(Rng),
    "outputs": get_args(Outputs),
    "inputs": get_args(Inputs),
    "fallback": get_args(Fallback),
    "verify": get_args(Verify),
    "gradients": get_args(Gradients),
    "schedule": get_args(Schedule),
}


_ELSEWHERE: dict[str, str] = {
    "mode": "capture compiles nothing: leave it out; for compiled kernels in a recording, capture(torch.compile(f))",
    "fullgraph": 'leave it out; to be told of calls that cannot be recorded, fallback="error"',
    "dynamic": "leave it out: each combination of sizes has a recording of its own; buckets= pads to a few",
    "backend": 'leave it out; graphs of the compiler in recordings are torch.compile(f, backend="capture")',
    "options": "give the options by name: capture(f, max_recordings=8)",
    "disable": "leave it out; CAPTURE_ENABLED=0 or config.patch(enabled=False) switch capture off",
    "num_warmup_iters": "the number of eager runs before a recording is warmup=",
    "sample_args": "leave it out: the first calls are the samples; warmup(f)(*args) records before them",
    "pool": "leave it out: all recordings of a thread share one pool",
    "stream": "leave it out: a recording is replayed on the stream that is current in the call",
}
"""Options of ``torch.compile``, ``make_graphed_callables`` and ``torch.cuda.graph``, and what to do here instead."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for a near miss, else an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def annotate(
    function: str,
    parameters: Sequence[str],
    options: dict[str, Any],  # Any: raw user input, checked below
    *,
    receiver: str | None = None,
    variadic: bool = False,
    defined_at: CodeLocation | None = None,
) -> Annotation:
    """Check ``options`` for a callable with these parameter names and freeze them. ``receiver``: how a method calls
    its instance, which is ``self`` in names of tensors, whatever that is.

    Raises ``AnnotationError`` for an unknown option, a value of the wrong type, an unknown choice, a number out
    of range, or a name in ``static=`` whose first part is no parameter.
    """
    names = tuple(CaptureOptions.__annotations__)
    for option in options:
        if option not in names:
            if option in _ELSEWHERE:
                raise AnnotationError(f"{option}= is no option of capture: {_ELSEWHERE[option]}")
            raise AnnotationError(
                f"unknown option {option!r} for capture{suggestion(option, names)}; known: {', '.join(names)}"
            )
    for option, choices in _CHOICES.items():
        value = options.get(option, choices[0])
        if value not in choices:
            hint = suggestion(value, choices) if isinstance(value, str) else ""
            raise AnnotationError(f"{option}={value!r} is not a choice{hint}; known: {', '.join(map(repr, choices))}")
    name = options.get("name", function)
    if not isinstance(name, str) or not name:
        raise AnnotationError(f"name= takes a non-empty string, got {name!r}")
    buckets = buckets_of(options, functools.partial(_check_root, parameters, receiver=receiver, variadic=variadic))
    most = 5 if buckets is None else 5 + buckets.num_rungs()
    return Annotation(
        function=name,
        defined_at=defined_at,
        parameters=tuple(parameters),
        static=_static_names(options.get("static", ()), parameters, receiver=receiver, variadic=variadic),
        rng=options.get("rng", "graphsafe"),
        max_recordings=_count("max_recordings", options.get("max_recordings", most), at_least=1),
        outputs=options.get("outputs", "preserve"),
        inputs=options.get("inputs", "auto"),
        fallback=options.get("fallback", "eager"),
        warmup=_count("warmup", options.get("warmup", 1), at_least=1),
        verify=options.get("verify", "off"),
        gradients=options.get("gradients", "autograd"),
        schedule=options.get("schedule", "recorded"),
        guards=_guards(options.get("guards", ())),
        silence=_silenced(options.get("silence", ())),
        buckets=buckets,
    )


def codes(place: str, words: Iterable[str]) -> frozenset[str]:
    """These words as codes of findings, in capitals. Raises ``AnnotationError`` for a word that is no code. ``place``:
    the setting, for the message."""
    made = set()
    for word in words:
        code = word.strip().upper()
        if not (code.startswith("CG") and code[2:].isdecimal() and len(code) == 5):
            raise AnnotationError(
                f"{place}: {word!r} is no code of a finding, as CG201 is; `capture rules` lists names and codes"
            )
        made.add(code)
    return frozenset(made)


def _silenced(value: object) -> frozenset[str]:
    if isinstance(value, str):
        raise AnnotationError(f"silence= takes a list of codes, got the string {value!r}; write silence=[{value!r}]")
    if not isinstance(value, Collection) or not all(isinstance(word, str) for word in value):
        raise AnnotationError(f"silence= takes a list of codes, got {value!r}")
    return codes("silence=", value)


def _count(option: str, value: object, *, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise AnnotationError(f"{option}= takes a whole number, got {value!r} ({type(value).__name__})")
    if value < at_least:
        raise AnnotationError(f"{option}={value} is below {at_least}")
    return value


def _static_names(
    value: object, parameters: Sequence[str], *, receiver: str | None, variadic: bool
) -> tuple[str, ...]:  # fmt: skip
    if isinstance(value, str):
        raise AnnotationError(f"static= takes a list of names, got the string {value!r}; write static=[{value!r}]")
    if not isinstance(value, Sequence):
        raise AnnotationError(f"static= takes a list of names, got {type(value).__name__}")
    names = []
    for name in value:
        if not isinstance(name, str) or not name:
            raise AnnotationError(f"static= takes names, got {name!r} ({type(name).__name__})")
        root = _check_root(parameters, "static", name, receiver=receiver, variadic=variadic)
        names.append(f"self{name[len(root) :]}" if root == receiver and root not in parameters else name)
    return tuple(names)


def _check_root(
    parameters: Sequence[str], option: str, name: str, *, receiver: str | None, variadic: bool
) -> str:  # fmt: skip
    """The parameter that a path begins with. Raises ``AnnotationError`` where there is none."""
    root = name.replace("[", ".").split(".")[0]
    receivers = ["self", receiver] if receiver and option == "static" else []
    roots = [*parameters, *dict.fromkeys(receivers)]
    if root not in roots and not variadic:
        raise AnnotationError(
            f"{option}={name!r} names no parameter{suggestion(root, roots)}; known: {', '.join(roots) or '(none)'}"
        )
    return root


def _guards(value: object) -> tuple[Callable[[], object], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(callable(g) for g in value):
        raise AnnotationError(f"guards= takes a list of callables of no argument, got {value!r}")
    return tuple(value)
