"""Texts for readers: one shape for findings, one page for a plan and for a rule."""

from __future__ import annotations

import pytest
from attrs import evolve

from capture.core.facts import CodeLocation
from capture.core.findings import Finding, Severity
from capture.reporting.tables import format_table
from capture.reporting.text import format_plan, format_rule
from capture.rules import RULES
from capture.rules.compile_plan import compile_plan
from tests.support.samples import case, check_golden, decoder

PLACE = CodeLocation(file="model.py", line=88, function="Decoder.step", code="y = x + k")
FINDING = Finding(
    code="CG101",
    name="static-address-moved",
    severity=Severity.NOTE,
    what="static argument 'kv.0.k' is at a new address",
    why="a recorded graph reads the address it was recorded with",
    fix=("first", "second", "third"),
    where=PLACE,
)


def test_the_whole_shape() -> None:
    assert FINDING.message(now="runs eagerly") == (
        "CG101 static-address-moved: static argument 'kv.0.k' is at a new address\n"
        "  where: Decoder.step (model.py:88): `y = x + k`\n"
        "  why:   a recorded graph reads the address it was recorded with\n"
        "  fix:   first\n"
        "         or second\n"
        "         or third\n"
        "  now:   runs eagerly\n"
        "  more:  python -m capture rule CG101  (docs: rules/CG101)"
    )


def test_absent_lines_are_left_out() -> None:
    assert evolve(FINDING, fix=(), where=None).message() == (
        "CG101 static-address-moved: static argument 'kv.0.k' is at a new address\n"
        "  why:   a recorded graph reads the address it was recorded with\n"
        "  more:  python -m capture rule CG101  (docs: rules/CG101)"
    )


@pytest.mark.parametrize(
    ("place", "function", "line"),
    [
        (None, "model.Decoder.step", "model.Decoder.step"),
        (evolve(PLACE, code=""), None, "Decoder.step (model.py:88)"),
        (evolve(PLACE, code=""), "model.Decoder.step", "Decoder.step (model.py:88)"),
        (evolve(PLACE, function="step"), "model.Decoder.step", "step (model.py:88): `y = x + k`"),
        (evolve(PLACE, function="attend"), "Decoder.step", "attend (model.py:88) in Decoder.step: `y = x + k`"),
        (evolve(PLACE, function="tep"), "Decoder.step", "tep (model.py:88) in Decoder.step: `y = x + k`"),
    ],
)
def test_where(place: CodeLocation | None, function: str | None, line: str) -> None:
    """The captured function is named where the place is in another one, or unknown."""
    assert f"\n  where: {line}\n" in evolve(FINDING, where=place).message(function=function)


def test_plan_page() -> None:
    given = decoder()
    plan = compile_plan(given.annotation, given.facts, RULES, {"torch": "2.13.0", "source": "b1f0"})
    check_golden("plan/decoder.txt", format_plan(plan))


def test_empty_plan_page() -> None:
    given = case(num_ops=2)
    assert format_plan(compile_plan(given.annotation, given.facts)) == (
        "Decoder.step: record  (2 operators, rng graphsafe, at most 5 recordings)\n"
    )


def test_table() -> None:
    assert format_table([("a", "bb", ""), ("ccc", "d", "e")], indent=1) == " a    bb\n ccc  d   e"
    assert format_table([]) == ""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_rule_page(rule: object) -> None:
    each = next(found for found in RULES if found is rule)
    text = format_rule(each)
    assert text.startswith(f"{each.code} {each.name}  ({each.severity}, since {each.since})\n\n{each.summary}\n")
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
