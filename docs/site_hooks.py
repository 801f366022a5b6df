"""What MkDocs asks while it builds the site: the rule pages are made of the rules' docstrings, one page a rule.

The rules need no torch, so the site is built where torch is not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from capture.rules import RULES, Rule  # noqa: E402 - the line above has to be first

RANGES = {
    "1": "Inputs and addresses", "2": "Work on the host", "3": "Random numbers", "4": "Memory and outputs",
    "5": "Gradients", "6": "Shapes", "7": "Several processes", "8": "Environment", "9": "Limits and cost",
}  # fmt: skip
SEVERITIES = {
    "note": "A remark. The call is recorded.",
    "copy": "The call is recorded, and copies something in every replay.",
    "eager": "Calls run eagerly, and a warning says so once.",
    "error": "The call raises, because an option asks for that.",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the rules, and their list."""
    files.append(File.generated(config, "rules/index.md", content=index()))
    for rule in RULES:
        files.append(File.generated(config, f"rules/{rule.code}.md", content=page(rule)))
    return files


def page(rule: Rule) -> str:
    """One rule: its docstring, under its code and name."""
    return f"# {rule.code} {rule.name}\n\n*{SEVERITIES[str(rule.severity)]} Since {rule.since}.*\n\n{rule.doc}\n"


def index() -> str:
    """All rules, by what they are about."""
    parts = [
        "# Rules\n",
        "Each reason for which a call is not recorded, or costs more, has a rule. A warning names its code and page;",
        "`python -m capture rule CG201` prints the same page. The table has the severity that a finding usually has:\n",
        *[f"* **{severity}**: {meaning}" for severity, meaning in SEVERITIES.items()],
    ]
    for digit, title in RANGES.items():
        rules = [rule for rule in RULES if rule.code[2] == digit]
        rows = [f"| [{rule.code}]({rule.code}.md) | {rule.name} | {rule.severity} | {rule.summary} |" for rule in rules]
        parts += [f"\n## {title}\n", "| rule | name | severity | what it reports |", "|---|---|---|---|", *rows]
    return "\n".join(parts) + "\n"
