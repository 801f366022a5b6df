"""``python -m benchmarks``: measure, print one table, and with ``--save`` write it to ``benchmarks/results/``."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory, overhead, replay
from benchmarks.timing import QUICK, Effort, Figure
from capture import config

HERE = Path(__file__).resolve().parent
GROUPS: dict[str, Callable[[Effort], Iterable[Figure]]] = {
    "replay": replay.measure,
    "overhead": overhead.measure,
    "memory": memory.measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ratios measured in one run.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--save", action="store_true", help="write a JSON file to benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="tiny repeats: shows that the code runs, measures nothing")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads; default 1, as the operators are small")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.groups if name not in GROUPS]
    if unknown:
        parser.error(f"unknown group {unknown[0]!r}; known: {', '.join(GROUPS)}")
    torch.set_num_threads(options.threads)
    machine = environment()
    print("  ".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    with config.patch(cache=False, verify="off", poison=False):
        figures = [
            figure for name in options.groups or GROUPS for figure in GROUPS[name](QUICK if options.quick else Effort())
        ]
    print(table(figures))
    if options.save:
        path = HERE / "results" / f"{file_name(machine)}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(as_json(machine, figures), indent=2) + "\n", encoding="utf-8")
        print(f"\nwritten to benchmarks/results/{path.name}")
    return int(any(figure.passed is False for figure in figures))


def environment() -> dict[str, str | int]:
    """The machine and versions that the numbers depend on; no names of hosts, users or folders."""
    return {
        "device": "cpu",
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def file_name(machine: dict[str, str | int]) -> str:
    """``cpu-<model>-<threads>-<torch>``, in small letters."""
    text = f"{machine['device']}-{machine['cpu']}-{machine['threads']}t-torch-{machine['torch']}"
    return re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\((r|tm)\)|\bcpu @.*?hz", "", text.lower())).strip("-")


def as_json(machine: dict[str, str | int], figures: Iterable[Figure]) -> dict[str, Any]:
    """Machine and figures as plain values."""
    return {
        **machine,
        "figures": [
            {
                "name": figure.name, "unit": figure.unit, "median": round(figure.median, 4),
                "min": round(figure.minimum, 4), "iqr": round(figure.iqr, 4), "rounds": len(figure.values),
                "bar": figure.bar, "pass": figure.passed, "detail": figure.detail,
            }
            for figure in figures
        ],
    }  # fmt: skip


def table(figures: Iterable[Figure]) -> str:
    """The figures as a table."""
    verdicts = {True: "pass", False: "MISSED", None: ""}
    rows = [("figure", "median", "min", "IQR", "bar", "", "unit", "fastest round")]
    for figure in figures:
        bar = "" if figure.bar is None else f"<= {figure.bar:.2f}"
        numbers = (f"{figure.median:.3f}", f"{figure.minimum:.3f}", f"{figure.iqr:.3f}")
        rows.append((figure.name, *numbers, bar, verdicts[figure.passed], figure.unit, figure.detail))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
