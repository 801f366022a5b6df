"""The command line, ``capture`` or ``python -m capture``. Only ``env`` and ``bench`` load torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from typing_extensions import override

from capture.core import config
from capture.core.plan import PlanError, loads
from capture.core.sizes import bytes_text
from capture.core.version import VERSION
from capture.reporting.html import html_page
from capture.reporting.run_data import RunData, RunError
from capture.reporting.run_data import loads as loads_run
from capture.reporting.summary import run_tables
from capture.reporting.tables import Table, rich_group
from capture.reporting.text import format_rule, format_short_plan, plan_tables
from capture.rules import all_rules, rule_by_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 for what cannot be read or run, 2 for wrong arguments."""
    arguments = _parser().parse_args(argv)
    done: int = arguments.run(arguments)
    return done


class _Parser(argparse.ArgumentParser):
    """Shows an example of the command in its help, and below an error in its arguments."""

    @override
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n{self.epilog}\n")


def _parser() -> argparse.ArgumentParser:
    description = "Look at rules, plans and reports of torch-capture, and measure programs."
    parser = _Parser(prog="capture", description=description, epilog="example: capture bench train.py --steps 200")
    parser.add_argument("--version", action="version", version=f"torch-capture {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("rules", help="all rules, one a line", epilog="example: capture rules").set_defaults(run=_rules)
    rule = commands.add_parser("rule", help="the page of one rule", epilog="example: capture rule CG201")
    rule.add_argument("code", metavar="CODE", help="a code or a name, as CG101 or host-sync")
    rule.set_defaults(run=_rule)
    plan = commands.add_parser("plan", help="show a saved plan", epilog="example: capture plan step.json --all")
    plan.add_argument("file", type=Path, metavar="FILE")
    plan.add_argument("--all", action="store_true", help="all inputs, outputs, effects and findings")
    plan.set_defaults(run=_plan)
    report = commands.add_parser(
        "report",
        help="show a report that capture.report(json=...) wrote",
        epilog="example: capture report run.json --html report.html",
    )
    report.add_argument("file", type=Path, metavar="RUN.json")
    report.add_argument("--html", type=Path, metavar="FILE", help="write it as an HTML page, too")
    report.set_defaults(run=_report)
    bench = commands.add_parser(
        "bench",
        help="run a program eagerly and captured, and print the gain",
        epilog="example: capture bench train.py --steps 200",
    )
    bench.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file that uses capture")
    rest = bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments")
    rest.required = False  # Python 3.11 would name it among what is missing
    bench.set_defaults(run=_bench)
    cache = commands.add_parser("cache", help="plans kept on disk", epilog="example: capture cache list")
    cache.add_argument("action", choices=["list", "clear"], metavar="{list,clear}")
    cache.set_defaults(run=_cache)
    environment = commands.add_parser(
        "env",
        help="versions, driver, settings and torch's private names, for bug reports",
        epilog="example: capture env > environment.txt",
    )
    environment.set_defaults(run=_env)
    return parser


def _rules(_: argparse.Namespace) -> int:
    rows = tuple((rule.code, rule.name, str(rule.severity), rule.summary) for rule in all_rules())
    _show([Table(head=("code", "name", "severity", "what it reports"), rows=rows)])
    return 0


def _rule(arguments: argparse.Namespace) -> int:
    codes = {rule.name: rule.code for rule in all_rules()}
    try:
        print(format_rule(rule_by_code(codes.get(arguments.code.lower(), arguments.code))), end="")
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _env(_: argparse.Namespace) -> int:
    from capture.api.environment import environment_text  # loads torch, which most commands do without

    print(environment_text(), end="")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    text = _text(arguments.file)
    if text is None:
        return 1
    try:
        plan = loads(text)
    except PlanError as error:
        return _fail(f"{arguments.file}: {error}")
    if arguments.all:
        _show(plan_tables(plan), indent=2)
    else:
        print(format_short_plan(plan), end="")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    text = _text(arguments.file)
    if text is None:
        return 1
    try:
        run = loads_run(text)
    except RunError as error:
        return _fail(f"{arguments.file}: {error}")
    _show(run_tables(run))
    return _write_page(run, arguments.html)


def _write_page(run: RunData, file: Path | None) -> int:
    if file is not None:
        try:
            file.write_text(html_page(run), encoding="utf-8")
        except OSError as error:
            return _fail(f"{file}: {error.strerror}")
        print(f"\npage: {file}")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    if not arguments.script.is_file():
        return _fail(f"{arguments.script}: no such file")
    from capture.api.bench import compare

    try:
        comparison = compare(arguments.script, arguments.arguments)
    except RuntimeError as error:
        return _fail(str(error))
    gain = comparison.eager_seconds / comparison.captured_seconds
    eager, captured = comparison.eager_seconds, comparison.captured_seconds
    print(f"{arguments.script}: {eager:.2f} s eagerly, {captured:.2f} s captured, {gain:.2f} x")
    print("imports, watched runs and recordings are in both; the table has what single calls gain\n")
    _show(run_tables(comparison.run))
    return 0


def _plans(count: int) -> str:
    return "1 plan" if count == 1 else f"{count} plans"


def _cache(arguments: argparse.Namespace) -> int:
    folder = config.current().cache_dir
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    total = sum(file.stat().st_size for file in files)
    if arguments.action == "list":
        for file in files:
            print(f"{bytes_text(file.stat().st_size):>10}  {file.name}")
        print(f"{_plans(len(files))}, {bytes_text(total)}, in {folder}")
        return 0
    try:
        for file in files:
            file.unlink(missing_ok=True)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}")
    print(f"{_plans(len(files))}, {bytes_text(total)}, deleted from {folder}")
    return 0


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _fail(f"{file}: {error.strerror if isinstance(error, OSError) else error}")
        return None


def _show(tables: Sequence[Table], *, indent: int = 0) -> None:
    """By ``rich`` where it is installed and somebody looks at a terminal, else as plain text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console

            Console(soft_wrap=False).print(rich_group(tables))
            return
        except ImportError:
            pass
    print("\n\n".join(table.text(indent=indent if table.title else 0) for table in tables))


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
