"""Recordings of the function are not used again.

## What it does
Reports a function whose watched runs and recordings did not lead to replays, and names what changes from call to call.

## Why it matters
Watching and recording take many times the time of the body. Where no recording is used again, the function is slower
than without the decorator. It runs eagerly from then on, and is looked at again more and more rarely.

## Example
```python
@capture
def step(x, scale):
    return torch.relu(x) * scale

for index in range(1000):
    step(x, 1.0 / (index + 1))
```

## Instead
```python
@capture
def step(x, scale):
    return torch.relu(x) * scale

for index in range(1000):
    step(x, torch.tensor(1.0 / (index + 1)))
```

## Fix safety
A number that comes as a tensor may round differently: an operator then computes in the tensor's type.

## Known gaps
What is named is compared over the last calls that were looked at; what varies more slowly is not named.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.facts import GivenUp
from capture.core.findings import Decision, Finding, Severity
from capture.rules._host_reads import describe
from capture.rules._rule import SETTING, accelerators, rule, tensor_setting
from capture.rules.case import Case

_NAMED = 3  # things that vary
_FIXES = {
    "number": "pass the number as a tensor: torch.tensor(...)  (one small copy a call)",
    "size": "pad the dimension that varies to a few sizes, with buckets=  (computes the padding)",
    "object": "make the object once and keep it, instead of a new one in every call  (no cost)",
    "function": "capture it once, before the loop, and call what capture gave  (no cost)",
    "schedule": "call the schedule's step() after the captured function  (no cost)",
    "state": "write into one tensor, x.copy_(...) or x[at] = ..., where it is a new one in each call  (one copy)",
}
_ALWAYS = "capture a part of the function that does not depend on it  (no cost)"


@rule("CG906", "nothing-repeats", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    effort = case.facts.given_up
    if effort is None:
        return
    varied, fixes, where = _varied(effort), _fixes(effort), effort.where
    read = next((each for each in effort.reads if not each.data_dependent_shape), None)
    if read is not None:
        words = describe(read, on_accelerator=bool(accelerators(case.facts.devices)))
        varied, fixes, where = f": {words.who} reads other values on the host", words.fix, read.where
    yield RULE.finding(
        what=f"{_efforts(effort)}{varied}",
        why="calls that differ need a recording each, and none was used again",
        fix=fixes,
        where=where,
        severity=Severity.ERROR if case.annotation.fallback == "error" else Severity.EAGER,
    )


def _fixes(effort: GivenUp) -> tuple[str, ...]:
    shown = effort.variations[:_NAMED]
    settings = [match.groups() for each in shown if (match := SETTING.fullmatch(each.what.strip("'")))]
    about = {each.about for each in shown if not SETTING.fullmatch(each.what.strip("'"))}
    if any("param_groups[" in each.what for each in shown):  # the body itself gives an optimizer another setting
        about = {*about - {"state"}, "schedule"}
    known = [fix for kind, fix in _FIXES.items() if kind in about]
    return (*[tensor_setting(*setting) for setting in settings], *known, *(() if "function" in about else (_ALWAYS,)))


def _efforts(effort: GivenUp) -> str:
    counts = (
        (effort.observations, "watched run"), (effort.recordings, "recording"), (effort.drops, "dropped recording")
    )  # fmt: skip
    parts = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
    if not parts:  # replays came since, and what was recorded after them went with its objects
        return "recordings are made, and not used again"
    time = f"{effort.ms:.0f} ms" if effort.ms >= 1 else "less than 1 ms"
    return f"{' and '.join(filter(None, [', '.join(parts[:-1]), parts[-1]]))} ({time}) led to no replay"


def _varied(effort: GivenUp) -> str:
    if not effort.variations:
        return ""
    more = len(effort.variations) - _NAMED
    return f": {'; '.join(map(str, effort.variations[:_NAMED]))}{f'; and {more} more' if more > 0 else ''}"
