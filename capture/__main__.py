"""The command line: ``python -m capture rules``, ``rule CG101``, ``plan FILE``, ``env``. Only ``env`` needs torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from capture.core.plan import PlanError, loads
from capture.core.version import VERSION
from capture.reporting.text import format_plan, format_rule, format_table
from capture.rules import all_rules, rule_by_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 for a file that cannot be read, 2 for wrong arguments."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "rules":
        rows = [(rule.code, rule.name, str(rule.severity), rule.summary) for rule in all_rules()]
        print(format_table(rows))
        return 0
    if arguments.command == "rule":
        return _rule(arguments.code)
    if arguments.command == "env":
        return _env()
    return _plan(arguments.file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m capture", description="What capture decides, and why.")
    parser.add_argument("--version", action="version", version=f"torch-capture {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rules", help="all rules, one a line")
    commands.add_parser("rule", help="the page of one rule").add_argument("code", help="for example CG101")
    commands.add_parser("plan", help="a saved plan, to be read").add_argument("file", type=Path)
    commands.add_parser("env", help="versions and what is read of torch on this machine, for bug reports")
    return parser


def _rule(code: str) -> int:
    try:
        print(format_rule(rule_by_code(code)), end="")
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _env() -> int:
    from capture.api.environment import environment_text  # loads torch, which the other commands do without

    print(environment_text(), end="")
    return 0


def _plan(file: Path) -> int:
    try:
        plan = loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, PlanError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"{file}: {reason}", file=sys.stderr)
        return 1
    print(format_plan(plan), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
