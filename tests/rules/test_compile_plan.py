"""Joining what rules say: whatever their order, one plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.core.errors import CaptureBug
from capture.core.facts import (
    CodeLocation,
    Draw,
    Effect,
    Escape,
    Facts,
    HostSync,
    HostWork,
    Mutation,
    OutputInfo,
    PlaceholderInfo,
)
from capture.core.findings import Decision, Finding, Policy, Severity
from capture.core.plan import dumps
from capture.rules import RULES, Rule
from capture.rules.case import Case
from capture.rules.compile_plan import compile_plan
from tests.support.samples import annotation, argument, case, decoder, limited, mutation, tensor

PATHS = ("x", "y", "kv.0.k", "self.w")
OPS = st.sampled_from(["aten.add.Tensor", "aten._local_scalar_dense.default", "tolist"])
DEVICES = st.sampled_from(["cpu", "cuda:0", "cuda:1"])
WHERES = st.none() | st.builds(CodeLocation, file=st.just("m.py"), line=st.integers(1, 9), function=st.just("f"))


def tuples(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(items, max_size=3).map(tuple)


@st.composite
def placeholders(draw: st.DrawFn) -> tuple[PlaceholderInfo, ...]:
    drawn = []
    for path in draw(st.lists(st.sampled_from(PATHS), unique=True)):
        is_argument = draw(st.booleans())
        owners = ["argument"] if is_argument else ["parameter", "closure", "constant", "unknown"]
        drawn.append(
            PlaceholderInfo(
                path=path,
                kind="argument" if is_argument else "implicit",
                owner=draw(st.sampled_from(owners)),
                tensor=tensor(4),
                static=not is_argument or draw(st.booleans()),
                alias_group=draw(st.none() | st.integers(0, 1)),
                mutation=draw(st.none() | st.builds(Mutation, evidence=st.just("schema"), op=OPS, where=WHERES)),
                replaced=not is_argument and draw(st.booleans()),
                first_use=draw(WHERES),
            )
        )
    return tuple(drawn)


FACTS = st.builds(
    Facts,
    function=st.just("f"),
    placeholders=placeholders(),
    outputs=tuples(
        st.builds(OutputInfo, path=st.sampled_from("012"), kind=st.sampled_from(["fresh", "input-view", "foreign"]))
    ),
    effects=tuples(
        st.builds(
            Effect,
            path=st.sampled_from(PATHS),
            kind=st.sampled_from(["tensor", "python"]),
            before=st.just("1"),
            after=st.just("2"),
        )
    ),
    host_syncs=tuples(st.builds(HostSync, op=OPS, where=WHERES, data_dependent_shape=st.booleans())),
    host_work=tuples(st.builds(HostWork, op=OPS, kind=st.sampled_from(["compute", "unsafe"]), where=WHERES)),
    draws=tuples(st.builds(Draw, generator=st.just("default"), device=DEVICES, op=OPS, where=WHERES)),
    escapes=tuples(st.builds(Escape, tensor=st.just(tensor(4)), op=OPS, where=WHERES)),
    devices=tuples(DEVICES),
    unmatched_static=tuples(st.sampled_from(PATHS)),
    num_ops=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(facts=FACTS, rules=st.permutations(RULES), rng=st.sampled_from(["graphsafe", "eager", "forbid"]))
def test_the_order_of_rules_does_not_matter(facts: Facts, rules: list[Rule], rng: str) -> None:
    declared = annotation(rng=rng)
    plan = compile_plan(declared, facts, rules)
    assert dumps(plan) == dumps(compile_plan(declared, facts, RULES))
    assert [(item.path, item.policy) for item in plan.placeholders] == [
        (item.path, highest(declared, facts, item.path)) for item in plan.placeholders
    ]
    severe = any(finding.severity >= Severity.EAGER for finding in plan.findings)
    assert (plan.outcome == "eager") == (severe or any(item.policy is Policy.EAGER for item in plan.placeholders))


def highest(declared: Any, facts: Facts, path: str) -> Policy:
    said = [each for rule in RULES for each in rule.check(Case(annotation=declared, facts=facts))]
    return max(each.value for each in said if isinstance(each, Decision) and each.field == f"policy:{path}")


def saying(code: str, say: Callable[[Rule], Iterator[Finding | Decision]], *, decides: bool = True) -> Rule:
    """A rule that says the same about every case."""
    made: list[Rule] = []
    made.append(evolve(RULES[0], code=code, name="test", decides=decides, check=lambda _: say(made[0])))
    return made[0]


def deciding(code: str, policy: Policy, field: str = "policy:x", reason: str = "because") -> Rule:
    return saying(code, lambda _: iter([Decision(field=field, value=policy, code=code, reason=reason)]))


def compiled(*rules: Rule, **facts: Any) -> Any:
    given_case = case(**({"placeholders": (argument("x"),)} | facts))
    return compile_plan(given_case.annotation, given_case.facts, rules)


def test_the_highest_decision_wins_with_its_reason() -> None:
    plan = compiled(deciding("CG8", Policy.COPY), deciding("CG9", Policy.COPY_BACK, reason="written"))
    item = plan.placeholders[0]
    assert (item.policy, item.reason_code, item.reason) == (Policy.COPY_BACK, "CG9", "written")


def test_ties_go_to_the_smallest_code() -> None:
    rules = [deciding("CG8", Policy.COPY), deciding("CG7", Policy.COPY), deciding("CG9", Policy.COPY)]
    assert compiled(*rules).placeholders[0].reason_code == "CG7"
    assert compiled(*rules[::-1]).placeholders[0].reason_code == "CG7"


def test_findings_are_sorted_and_said_once() -> None:
    def say(rule: Rule) -> Iterator[Finding]:
        for severity, path, what in (
            (Severity.NOTE, "b", "1"),
            (Severity.NOTE, "a", "2"),
            (Severity.EAGER, "z", "3"),
            (Severity.NOTE, None, "4"),
            (Severity.NOTE, "a", "1"),
            (Severity.NOTE, "b", "1"),
        ):
            yield rule.finding(what=what, why="", path=path, severity=severity)

    plan = compiled(saying("CG2", say), saying("CG1", say), deciding("CG3", Policy.COPY))
    notes = [(None, "4"), ("a", "1"), ("a", "2"), ("b", "1")]
    assert [(finding.code, finding.path, finding.what) for finding in plan.findings] == [
        ("CG1", "z", "3"),
        ("CG2", "z", "3"),
        *(("CG1", *note) for note in notes),
        *(("CG2", *note) for note in notes),
    ]


@pytest.mark.parametrize(
    ("severity", "outcome"),
    [(Severity.NOTE, "record"), (Severity.COPY, "record"), (Severity.EAGER, "eager"), (Severity.ERROR, "eager")],
)
def test_severe_findings_make_the_outcome_eager(severity: Severity, outcome: str) -> None:
    rule = saying("CG1", lambda rule: iter([rule.finding(what="w", why="y", severity=severity)]))
    assert compiled(rule, deciding("CG2", Policy.COPY)).outcome == outcome


def test_eager_decisions_make_the_outcome_eager() -> None:
    assert compiled(deciding("CG1", Policy.EAGER)).outcome == "eager"
    assert compiled(deciding("CG1", Policy.COPY), deciding("CG2", Policy.EAGER, "outcome")).outcome == "eager"


def test_a_rule_that_raises_is_named() -> None:
    def fail(_: Rule) -> Iterator[Finding]:
        yield from ()
        raise KeyError("lost")

    with pytest.raises(CaptureBug, match=r"rule CG777 test raised KeyError: 'lost' \(for Decoder\.step\)"):
        compiled(saying("CG777", fail))


@pytest.mark.parametrize("severity", list(Severity))
def test_a_rule_that_only_remarks_is_held_to_it(severity: Severity) -> None:
    """Plans made without such a rule stay in use, so it must not change what they do."""
    rule = saying("CG1", lambda rule: iter([rule.finding(what="w", why="y", severity=severity)]), decides=False)
    if severity >= Severity.EAGER:
        with pytest.raises(CaptureBug, match="rule CG1 test decides, but is declared with decides=False"):
            compiled(rule, deciding("CG2", Policy.COPY))
    else:
        assert compiled(rule, deciding("CG2", Policy.COPY)).outcome == "record"


def test_a_rule_that_only_remarks_decides_on_no_policy() -> None:
    rule = saying("CG1", lambda rule: iter([rule.decision("x", Policy.STATIC, "because")]), decides=False)
    with pytest.raises(CaptureBug, match="declared with decides=False"):
        compiled(rule)


def test_every_placeholder_is_decided() -> None:
    with pytest.raises(CaptureBug, match=r"no rule decided on \['policy:x'\]"):
        compiled()


def test_decisions_on_unknown_fields_are_a_bug() -> None:
    with pytest.raises(CaptureBug, match=r"unknown fields \['policy:y'\]"):
        compiled(deciding("CG1", Policy.COPY), deciding("CG2", Policy.COPY, "policy:y"))


def test_decoder() -> None:
    """The plan of an ordinary function, as a user would expect it."""
    given_case = decoder()
    plan = compile_plan(given_case.annotation, given_case.facts)
    assert plan.outcome == "record"
    assert {item.path: (item.policy, item.reason_code) for item in plan.placeholders} == {
        "ids": (Policy.COPY, "CG108"),
        "kv.0.k": (Policy.STATIC, "CG108"),
        "bias": (Policy.COPY_BACK, "CG102"),
        "self.embed.weight": (Policy.STATIC, "CG105"),
        "self.hidden": (Policy.STATIC, "CG105"),
    }
    assert [finding.code for finding in plan.findings] == ["CG102", "CG101", "CG105", "CG402", "CG403"]


def test_places_of_writes_reach_the_plan() -> None:
    plan = compiled(*RULES, placeholders=(argument("x", mutation=mutation(line=7)),))
    assert plan.placeholders[0].mutated
    assert plan.placeholders[0].mutation is not None
    assert plan.placeholders[0].mutation.line == 7


def test_a_reached_limit_is_eager() -> None:
    given_case = limited("error")
    plan = compile_plan(given_case.annotation, given_case.facts)
    assert plan.outcome == "eager"
    assert [finding.code for finding in plan.findings_at_least(Severity.ERROR)] == ["CG901"]
