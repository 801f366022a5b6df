"""A report as one HTML file, which needs neither the network nor other files. Its filters are in the page."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from capture.reporting.run_data import KINDS, RunData, grouped, paths_text
from capture.reporting.text import format_rule
from capture.rules import rule_by_code

_PAGE = Path(__file__).with_name("page.html")


def html_page(run: RunData) -> str:
    """The whole file."""
    functions = grouped(run.functions)
    codes = sorted({finding.code for function in functions for finding in function.findings})
    data = {
        "kinds": KINDS,
        "made_with": dict(run.made_with),
        "functions": [{**attrs.asdict(function), "label": paths_text(function.paths)} for function in functions],
        "rules": {code: format_rule(rule_by_code(code)) for code in codes},
    }
    # In a script element, only what would end it or begin a comment has to be written otherwise.
    text = json.dumps(data).replace("<", "\\u003c")
    return _PAGE.read_text(encoding="utf-8").replace("@DATA@", text)
