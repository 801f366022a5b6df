"""The rules: the files of this folder that are called ``cg<nnn>_<name>.py``, and what installed packages add.

Stage: between facts and the plan. In: ``Case``. Out: findings and decisions. No torch.
A new rule is a new file and nothing else: no list names it (``scripts/add_rule.py`` makes one with its cases).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
import re
import warnings
from collections.abc import Iterable

from capture.core.errors import CaptureBug
from capture.core.interrupts import let_through
from capture.core.options import suggestion
from capture.rules._rule import Rule, rule

__all__ = ["RULES", "Rule", "all_rules", "changed_rules", "deciding_rules", "rule", "rule_by_code", "rules_in"]

_FILE = re.compile(r"cg\d{3}_\w+")


def rules_in(package: str, folders: Iterable[str]) -> tuple[Rule, ...]:
    """The rules in a package's folders, by code. ``CaptureBug`` names the file that holds none, or the code of another.

    A broken rule stops the import: a rule that is silently missing could let a call be recorded that must not be.
    """
    by_code: dict[str, tuple[Rule, str]] = {}
    for module in pkgutil.iter_modules(folders):
        if not _FILE.fullmatch(module.name):
            continue
        file = f"{module.name}.py"
        each = getattr(importlib.import_module(f"{package}.{module.name}"), "RULE", None)
        if not isinstance(each, Rule):
            raise CaptureBug(f"{file} has no RULE: it needs a check under @rule(...)")
        if each.code in by_code:
            raise CaptureBug(f"{file} takes the code {each.code}, which {by_code[each.code][1]} has")
        if each.code.lower() != module.name[:5]:
            raise CaptureBug(f"{file} holds {each.code}: a file is named for its rule")
        by_code[each.code] = (each, file)
    if not by_code:
        raise CaptureBug(f"no rule was found in {package}")
    return tuple(by_code[code][0] for code in sorted(by_code))


RULES: tuple[Rule, ...] = rules_in(__name__, __path__)
"""The built-in rules, by code."""

ENTRY_POINTS = "capture.rules"


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """The built-in rules and those of installed packages, by code.

    A package adds one by an entry point in the group ``capture.rules`` that names a ``Rule``. One that cannot be
    loaded, is no rule or takes a code already in use gets a ``RuntimeWarning`` and is left out. Loaded once a process.
    """
    rules = {each.code: each for each in RULES}
    for entry in _entries():
        try:
            extra = entry.load()
        except Exception as error:  # noqa: BLE001 - the code of others may raise anything
            let_through(error)
            _ignored(entry.name, f"{type(error).__name__}: {error}")
            continue
        if not isinstance(extra, Rule):
            _ignored(entry.name, f"{entry.value} is a {type(extra).__name__}, no Rule")
        elif extra.code in rules:
            _ignored(entry.name, f"{extra.code} is taken by {rules[extra.code].name}")
        else:
            rules[extra.code] = extra
    return tuple(sorted(rules.values(), key=lambda each: each.code))


def _entries() -> Iterable[importlib.metadata.EntryPoint]:
    """The entry points of the group. Most environments have none, which the texts tell in a third of the time that it
    takes to parse what all packages say of themselves; that was a tenth of a process's first captured call."""
    texts = (package.read_text("entry_points.txt") for package in importlib.metadata.distributions())
    return (
        importlib.metadata.entry_points(group=ENTRY_POINTS)
        if any(ENTRY_POINTS in (text or "") for text in texts)
        else ()
    )


def _ignored(name: str, reason: str) -> None:
    warnings.warn(f"rule {name!r} of group {ENTRY_POINTS!r} is ignored: {reason}", RuntimeWarning, stacklevel=3)


def rule_by_code(code: str) -> Rule:
    """The rule with this code, in any case of letters; ``LookupError`` names the nearest one."""
    rules = {each.code: each for each in all_rules()}
    named = rules.get(code.upper())
    if named is None:
        names = {each.name: each.code for each in rules.values()}
        hint = suggestion(code.upper(), rules) or suggestion(code.lower(), names)
        raise LookupError(f"there is no rule {code!r}{hint}; `capture rules` lists them")
    return named


def deciding_rules() -> str:
    """Code and revision of every rule that can change what a plan does: ``"CG102 2, CG103 2, ..."``.

    A plan keeps this text in its fingerprint, and applies only where it is the same. So a plan is made again when a
    rule that may decide came, went or decides otherwise now. One that came has to count: the plan keeps no facts that
    it could be asked about, and it might have made the call eager. Rules with ``decides=False`` are left out: they only
    remark, which ``compile_plan`` holds them to, so the plan would do the same with them.
    """
    return _text_of(tuple(all_rules()))


@functools.lru_cache(maxsize=1)
def _text_of(rules: tuple[Rule, ...]) -> str:
    return ", ".join(f"{each.code} {each.revision}" for each in rules if each.decides)


def changed_rules(before: str, now: str) -> list[str]:
    """Codes, sorted, in which two texts of ``deciding_rules`` differ."""
    changed = set(before.split(", ")) ^ set(now.split(", "))
    return sorted({each.split(" ")[0] for each in changed if each})
