"""What single rules decide, and how severe a finding is, where the options or the owner of a tensor count."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from capture.core.facts import Draw
from capture.core.findings import Decision, Finding, Policy, Severity
from capture.rules import RULES, Rule
from capture.rules.case import Case
from tests.support.samples import annotation, argument, case, implicit, limited, mutation

BY_CODE = {each.code: each for each in RULES}


def policies(each: Rule, given: Case) -> dict[str, Policy]:
    return {said.field.removeprefix("policy:"): said.value for said in each.check(given) if isinstance(said, Decision)}


def severities(each: Rule, given: Case) -> list[Severity]:
    return [said.severity for said in each.check(given) if isinstance(said, Finding)]


def test_static_and_implicit_mutation_stays_in_place() -> None:
    given = case(placeholders=(argument("kv", static=True, mutation=mutation()), argument("x", mutation=mutation())))
    assert policies(BY_CODE["CG102"], given) == {"x": Policy.COPY_BACK}
    assert policies(BY_CODE["CG108"], given) == {"kv": Policy.STATIC, "x": Policy.COPY}


def test_aliasing_arguments_are_copied_back_together() -> None:
    group = (argument("a", alias_group=0), argument("b", alias_group=0, mutation=mutation()))
    assert policies(BY_CODE["CG103"], case(placeholders=group)) == {"a": Policy.COPY_BACK, "b": Policy.COPY_BACK}
    assert severities(BY_CODE["CG103"], case(placeholders=group)) == [Severity.COPY]


@pytest.mark.parametrize("beside", [argument("t", static=True, alias_group=0), implicit("self.t", alias_group=0)])
def test_argument_beside_a_fixed_tensor(beside: Any) -> None:
    """A write on either side makes the call eager; without one it is only worth a note."""
    one, other = argument("x", alias_group=0), beside
    assert severities(BY_CODE["CG103"], case(placeholders=(one, other))) == [Severity.NOTE]
    for pair in ((evolve(one, mutation=mutation()), other), (one, evolve(other, mutation=mutation()))):
        assert severities(BY_CODE["CG103"], case(placeholders=pair)) == [Severity.EAGER]


@pytest.mark.parametrize("owner", ["parameter", "buffer", "attribute", "constant", "closure", "global", "item"])
def test_owned_implicit_inputs_are_static(owner: str) -> None:
    given = case(placeholders=(implicit("t", owner),))
    noted = owner in ("closure", "global", "item")
    assert policies(BY_CODE["CG105"], given) == {"t": Policy.STATIC}
    assert severities(BY_CODE["CG105"], given) == ([Severity.NOTE] if noted else [])


def test_implicit_input_without_owner_is_eager() -> None:
    given = case(placeholders=(implicit("t", "unknown", replaced=True),))
    assert policies(BY_CODE["CG105"], given) == {"t": Policy.EAGER}
    assert severities(BY_CODE["CG105"], given) == [Severity.EAGER]


def test_replaced_implicit_input_is_bound_anew() -> None:
    """Where it lives changes on every call; nothing is copied, and a write to the old tensor stays in place."""
    replaced = implicit("self.h", "attribute", replaced=True)
    for given in (replaced, evolve(replaced, mutation=mutation())):
        assert policies(BY_CODE["CG105"], case(placeholders=(given,))) == {"self.h": Policy.STATIC}


def test_severity_follows_the_options() -> None:
    draws = (Draw(generator="default", device="cpu", op="aten.rand.default"),)
    by_rng = [severities(BY_CODE["CG301"], case(annotation(rng=rng), draws=draws)) for rng in ("graphsafe", "eager")]
    assert by_rng == [[Severity.NOTE], [Severity.EAGER]]
    assert severities(BY_CODE["CG301"], case(annotation(rng="forbid"), draws=draws)) == [Severity.ERROR]
    assert severities(BY_CODE["CG901"], limited("eager")) == [Severity.EAGER]
    assert severities(BY_CODE["CG901"], limited("error")) == [Severity.ERROR]
