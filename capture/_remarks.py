"""Remarks: findings of one captured function, said once each, or raised where the annotation asks for it."""

from __future__ import annotations

import warnings
from typing import Any

from capture import _report, _where
from capture._annotate import Annotation
from capture._errors import CaptureWarning, UncapturableError
from capture._events import Log
from capture._facts import Facts
from capture._findings import SETTLING, Finding, Severity
from capture._plan import CapturePlan


class Remarks:
    """Annotation, log and findings: all that is needed to speak to the user about a function."""

    def __init__(self, annotation: Annotation) -> None:
        self.annotation = annotation
        self.log = Log(annotation.function)
        self.findings: dict[tuple[str, str | None], Finding] = {}

    def bare_facts(self, **facts: Any) -> Facts:
        """Facts that need no watched run."""
        return Facts(function=self.annotation.function, defined_at=self.annotation.defined_at, runs=0, **facts)

    def note_findings(self, plan: CapturePlan) -> None:
        """Keep a plan's findings for ``recordings`` and ``report``."""
        for finding in plan.findings:
            self.findings.setdefault((finding.code, finding.path), finding)

    def report(self, plan: CapturePlan) -> None:
        """Warn about what keeps a call eager, once for each code and path; raise where the annotation asks for it.

        What only a first call may have done is left out where there are other reasons: a second one was not watched.
        """
        findings = plan.findings_at_least(Severity.EAGER)
        lasting = [finding for finding in findings if finding.code not in SETTLING] or findings
        new = [finding for finding in lasting if (finding.code, finding.path) not in self.findings]
        self.note_findings(plan)
        raising = self.annotation.fallback == "error" or any(f.severity is Severity.ERROR for f in findings)
        if findings and raising:
            text = "\n".join(_report.format_finding(one, function=self.annotation.function) for one in findings)
            raise UncapturableError(text, findings)
        for finding in new:
            text = _report.format_finding(finding, function=self.annotation.function, now="runs eagerly")
            self.log.add("fallback", finding.code + " " + finding.what)
            warnings.warn(text, CaptureWarning, stacklevel=_where.stack_level())
