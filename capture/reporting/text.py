"""Findings, plans and rules as text.

Messages, ``explain`` and the command line take their text from here. No torch; nothing is printed.
"""

from __future__ import annotations

from collections.abc import Sequence

from capture.core.facts import Break, OutputInfo
from capture.core.plan import CapturePlan
from capture.reporting.tables import Table
from capture.rules import Rule

_MOST_GUARDS = 20  # number of guards that are printed


def format_guards(guards: Sequence[str]) -> str:
    """The first guards of a recording, a line each, with a newline at the end; empty without any."""
    if not guards:
        return ""
    left = len(guards) - _MOST_GUARDS
    more = [f"  and {left} more: see `guards` of the explanation"] if left > 0 else []
    lines = [f"guards looked at before every replay: {len(guards)}", *[f"  {guard}" for guard in guards[:_MOST_GUARDS]]]
    return "\n".join([*lines, *more, ""])


_BETWEEN = {
    "value": "  value   {what} is read in every replay, which waits for it",
    "size": "  size    {what} tells how much follows in every replay, which waits for it",
    "island": "  island  {what}() in every replay",
}


def format_segments(plan: CapturePlan, breaks: Sequence[Break]) -> str:
    """Segments and what lies between them, a line each, with a newline at the end; empty for a single segment."""
    if not breaks or plan.outcome != "record":
        return ""
    last = plan.num_ops - sum(break_.operators for break_ in breaks)
    lines = [f"segments of a replay: {len(breaks) + 1}"]
    for between in breaks:
        took = "" if between.ms is None else f", {between.ms:.3f} ms here"
        where = "" if between.where is None else f"  ({between.where})"
        lines += [_segment(between.operators), _BETWEEN[between.kind].format(what=between.what) + took + where]
    return "\n".join([*lines, _segment(last), ""])


def _segment(operators: int) -> str:
    return f"  {operators} operator{'s' if operators != 1 else ''}"


def format_plan(plan: CapturePlan) -> str:
    """The whole plan for a reader: outcome, tables, findings; one newline at the end."""
    return "\n\n".join(table.text(indent=2 if table.rows else 0) for table in plan_tables(plan)) + "\n"


def plan_tables(plan: CapturePlan) -> list[Table]:
    """The outcome, then a table each of what there is, then the findings."""
    operators = "1 operator" if plan.num_ops == 1 else f"{plan.num_ops} operators"
    head = f"{plan.function}: {plan.outcome}  ({operators}, rng {plan.rng}, at most {plan.max_recordings} recordings)"
    inputs = [
        (item.path, str(item.tensor), str(item.policy), f"{item.reason_code}: {item.reason}")
        for item in plan.placeholders
    ]
    effects = [(effect.path, effect.kind, f"{effect.before} -> {effect.after}") for effect in plan.effects]
    parts: list[tuple[str, Sequence[tuple[str, ...]]]] = [
        ("inputs", inputs),
        ("outputs", [_output_row(output) for output in plan.outputs]),
        ("effects", effects),
        ("fingerprint", list(plan.fingerprint.items())),
    ]
    tables = [Table(title=head)]
    tables += [Table(title=title, rows=tuple(rows)) for title, rows in parts if rows]
    for finding in plan.findings:
        tables.append(Table(notes=(f"{finding.severity}: {finding.message(function=plan.function)}",)))
    return tables


def format_short_plan(plan: CapturePlan) -> str:
    """Outcome, what is not static, and findings that matter; ends with how to see the rest."""
    others = [placeholder for placeholder in plan.placeholders if str(placeholder.policy) != "static"]
    findings = [finding for finding in plan.findings if str(finding.severity) in ("eager", "error")]
    inputs = f"{len(plan.placeholders)} inputs of which {len(plan.placeholders) - len(others)} are static"
    lines = [
        f"{plan.function}: {plan.outcome}  ({plan.num_ops} operators, {inputs}, {len(plan.outputs)} outputs)",
        *[
            f"  {placeholder.path}  {placeholder.tensor}  {placeholder.policy}: {placeholder.reason}"
            for placeholder in others
        ],
        *[f"  {finding.code} {finding.name}: {finding.what}" for finding in findings],
        "all of it: --all",
    ]
    return "\n".join(lines) + "\n"


def _output_row(output: OutputInfo) -> tuple[str, str, str]:
    kind = f"{output.kind} of {output.source}" if output.source else output.kind
    return output.path or "(result)", str(output.tensor or output.value or ""), kind


def format_rule(rule: Rule) -> str:
    """The rule's page: its title, its usual severity, its documentation; one newline at the end."""
    return f"{rule.code} {rule.name}  ({rule.severity}, since {rule.since})\n\n{rule.doc}\n"
