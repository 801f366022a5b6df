"""From annotation and facts to the plan: run the rules, join their decisions.

Stage: after observation, before the runtime. In: ``Annotation``, ``Facts``. Out: ``CapturePlan``. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from capture.core.errors import CaptureBug
from capture.core.facts import Facts, PlaceholderInfo
from capture.core.findings import Decision, Finding, Policy, Severity
from capture.core.interrupts import is_interrupt
from capture.core.options import Annotation
from capture.core.plan import CapturePlan, PlannedPlaceholder, sequence_digest
from capture.rules import Rule, all_rules
from capture.rules.case import Case


def compile_plan(
    annotation: Annotation,
    facts: Facts,
    rules: Sequence[Rule] | None = None,
    fingerprint: Mapping[str, str] | None = None,
) -> CapturePlan:
    """The plan that ``rules`` (all that are installed, if None) make of the facts, in whatever order they come.

    Raises ``CaptureBug`` if a rule raises, decides although it is declared with ``decides=False``, decides on a field
    the plan does not have, or if no rule decided on a placeholder.
    """
    findings, decisions = _run(all_rules() if rules is None else rules, Case(annotation=annotation, facts=facts))
    joined = _join(decisions, [f"policy:{info.path}" for info in facts.placeholders])
    eager = any(finding.severity >= Severity.EAGER for finding in findings)
    eager = eager or any(decision.value is Policy.EAGER for decision in joined.values())
    return CapturePlan(
        function=annotation.function,
        outcome="eager" if eager else "record",
        placeholders=tuple(_planned(info, joined[f"policy:{info.path}"]) for info in facts.placeholders),
        outputs=facts.outputs,
        effects=facts.effects,
        rng=annotation.rng,
        num_ops=facts.num_ops,
        generators=tuple(sorted({draw.generator for draw in facts.draws})),
        collectives=tuple(sorted({collective.op for collective in facts.collectives})),
        sequence_digest=sequence_digest(facts.sequence),
        max_recordings=annotation.max_recordings,
        findings=tuple(sorted(dict.fromkeys(findings), key=_finding_order)),
        fingerprint=fingerprint or {},
    )


def _run(rules: Iterable[Rule], case: Case) -> tuple[list[Finding], list[Decision]]:
    findings: list[Finding] = []
    decisions: list[Decision] = []
    for rule in rules:
        try:
            remarks = list(rule.check(case))
        except Exception as error:
            if is_interrupt(error):
                raise
            raise CaptureBug(
                f"rule {rule.code} {rule.name} raised {type(error).__name__}: {error} (for {case.annotation.function})"
            ) from error
        for remark in remarks:
            if not rule.decides and (isinstance(remark, Decision) or remark.severity >= Severity.EAGER):
                # Plans made without this rule are still in use: they rely on its word that it changes nothing.
                raise CaptureBug(f"rule {rule.code} {rule.name} decides, but is declared with decides=False")
            if isinstance(remark, Finding):
                findings.append(remark)
            else:
                decisions.append(remark)
    return findings, decisions


def _join(decisions: Iterable[Decision], required: Iterable[str]) -> dict[str, Decision]:
    """The highest decision of each field; among equals the one with the smallest code, then reason."""
    joined: dict[str, Decision] = {}
    for decision in sorted(decisions, key=lambda each: (-each.value, each.code, each.reason)):
        joined.setdefault(decision.field, decision)
    fields = {*required, "outcome"}
    missing = [name for name in required if name not in joined]
    unknown = [name for name in joined if name not in fields]
    if missing or unknown:
        raise CaptureBug(f"no rule decided on {missing}" if missing else f"a rule decided on unknown fields {unknown}")
    return joined


def _planned(info: PlaceholderInfo, decision: Decision) -> PlannedPlaceholder:
    return PlannedPlaceholder(
        path=info.path,
        kind=info.kind,
        owner=info.owner,
        policy=decision.value,
        tensor=info.tensor,
        mutated=info.mutation is not None,
        alias_group=info.alias_group,
        reason_code=decision.code,
        reason=decision.reason,
        first_use=info.first_use,
        mutation=info.mutation.where if info.mutation else None,
    )


def _finding_order(finding: Finding) -> tuple[object, ...]:
    where = (finding.where.file, finding.where.line) if finding.where else ("", 0)
    return (-finding.severity, finding.code, finding.path or "", finding.what, where)
