"""Static types: mypy, run as a user would, accepts what must pass and refuses what must fail."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent / "typing"
ROOT = Path(__file__).resolve().parents[2]
EXPECTED = re.compile(r"# E: ([\w-]+)$")
REPORTED = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+): error: (?P<text>.*?)(?:  \[(?P<code>[\w-]+)\])?$")

Source = tuple[str, int]


def reported() -> dict[Source, list[tuple[str, str]]]:
    """Code and text of every error mypy gives in ``tests/api/typing``, by file and line; one run for all."""
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--explicit-package-bases",
            "--cache-dir", str(Path(tempfile.gettempdir()) / "capture-typing-tests"), "--show-error-codes",
            "--hide-error-context", "--no-pretty", *map(str, sorted(FOLDER.glob("*.py"))),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors: dict[Source, list[tuple[str, str]]] = {}
    for line in done.stdout.splitlines():
        match = REPORTED.match(line)
        if match:
            place = (Path(match["file"]).name, int(match["line"]))
            errors.setdefault(place, []).append((match["code"] or "", match["text"]))
    return errors


def expected_errors() -> dict[Source, str]:
    """Every line with ``# E:`` and its code."""
    return {
        (path.name, number): match[1]
        for path in sorted(FOLDER.glob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := EXPECTED.search(line))
    }


def test_what_must_fail_fails_and_all_else_passes() -> None:
    """One test: each process that runs a part of several would run mypy, which takes as long as a hundred others."""
    expected, found = expected_errors(), reported()
    assert not {place: errors for place, errors in found.items() if place not in expected}
    missed = {place: found.get(place) for place, code in expected.items() if code not in dict(found.get(place, []))}
    assert not missed


def test_there_is_something_to_check() -> None:
    assert len(expected_errors()) > 30
    assert "assert_type" in (FOLDER / "pass_decorate.py").read_text(encoding="utf-8")


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "capture" / "py.typed").exists()
