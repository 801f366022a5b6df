"""Every rule: it fires where it should, keeps quiet beside that, and its message is the one on file.

A rule's cases are in ``cases/``, in a file that is called like the rule's own.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import capture.rules as rules_package
from capture.core.findings import Decision, Finding
from capture.rules import RULES, Rule
from capture.rules.case import Case
from tests.support.samples import check_golden

RULE_FILES = Path(rules_package.__file__).parent
CASE_FILES = Path(__file__).parent / "cases"


def outcome(each: Rule, given: Case) -> list[Finding | Decision]:
    return list(each.check(given))


def cases(each: Rule, name: str) -> list[Case]:
    module = importlib.import_module(f"tests.rules.cases.{each.check.__module__.rpartition('.')[2]}")
    found: list[Case] = getattr(module, name)
    assert found, f"{module.__name__}.{name} is empty"
    return found


def rendered(said: Finding | Decision) -> str:
    if isinstance(said, Finding):
        return f"[{said.severity}] {said.message(function='Decoder.step')}"
    return f"{said.field} -> {said.value}  ({said.code}: {said.reason})"


def test_every_rule_has_cases() -> None:
    files = sorted(path.stem for path in CASE_FILES.glob("*.py"))
    assert [each.check.__module__.rpartition(".")[2] for each in RULES] == files


@pytest.mark.parametrize("each", RULES, ids=lambda each: each.code)
def test_a_rule_fires_with_the_message_on_file(each: Rule) -> None:
    blocks = []
    for given in cases(each, "FIRES"):
        said = outcome(each, given)
        assert said
        assert all(one.code == each.code for one in said)
        blocks.append("\n\n".join(map(rendered, said)))
    check_golden(f"rules/{each.code}.txt", "\n\n---\n\n".join(blocks) + "\n")


@pytest.mark.parametrize("each", RULES, ids=lambda each: each.code)
def test_no_blank_is_left(each: Rule) -> None:
    """``scripts/add_rule.py`` writes ``<<...>>`` for what only a person can say."""
    name = f"{each.check.__module__.rpartition('.')[2]}.py"
    for path in (RULE_FILES / name, CASE_FILES / name):
        assert re.findall(r"<<[^\n]*>>", path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize("each", RULES, ids=lambda each: each.code)
def test_near_misses_yield_nothing(each: Rule) -> None:
    for given in cases(each, "NEAR_MISSES"):
        assert outcome(each, given) == []


@pytest.mark.parametrize("each", RULES, ids=lambda each: each.code)
def test_messages_keep_to_the_style(each: Rule) -> None:
    """One clause, no full stop, no words that blame; each fix says what it costs."""
    for given in cases(each, "FIRES"):
        for said in outcome(each, given):
            if isinstance(said, Finding):
                assert not said.what.endswith(".")
                assert not said.why.endswith(".")
                assert not re.search(r"\b(illegal|invalid|please|simply)\b", f"{said.what} {said.why}".lower())
                assert all(fix.endswith(")") and "  (" in fix for fix in said.fix)
