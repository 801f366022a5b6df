"""Adding a rule, tried in a copy of the tree: two files by hand, and its tests run without any list being changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
BLANK = re.compile(r"<<.*?>>")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the files that the tests of the rules need; none of them needs torch."""
    for folder in ("capture", "scripts", "tests/rules", "tests/support", "tests/golden"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def add_rule(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/add_rule.py", *arguments]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)


def run_tests(copy: Path, code: str, *, golden: bool = False) -> tuple[int, str]:
    """Exit status and output of the tests that are about this rule."""
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-q", "-k", code]
    environment = os.environ | {"PYTHONPATH": python_path(copy), "CAPTURE_UPDATE_GOLDEN": "1" if golden else "0"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Hypothesis and others take longer to import than these tests
    files = ["tests/rules/test_cases.py", "tests/rules/test_rules.py"]
    done = subprocess.run(command + files, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def files_of(copy: Path) -> dict[str, str]:
    found = (path for path in copy.rglob("*") if path.suffix in (".py", ".txt", ".toml", ".md"))
    return {str(path.relative_to(copy)): path.read_text(encoding="utf-8") for path in found}


@pytest.mark.parametrize("severity", ["note", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_rule_takes_two_files_by_hand(copy: Path, severity: str) -> None:
    before = files_of(copy)
    done = add_rule(copy, "ragged-batch", "--code", "CG950", "--severity", severity)
    assert done.returncode == 0, done.stderr
    status, output = run_tests(copy, "CG950", golden=True)
    assert status == 1, "the blanks that only a person can fill in pass for a rule"
    assert "test_no_blank_is_left[CG950]" in output

    by_hand = ["capture/rules/cg950_ragged_batch.py", "tests/rules/cases/cg950_ragged_batch.py"]
    for name in by_hand:
        path = copy / name
        path.write_text(BLANK.sub("batches are ragged", path.read_text()).replace("ragged\n\n", "ragged.\n\n"))
    status, output = run_tests(copy, "CG950", golden=True)
    assert status == 0, output
    status, output = run_tests(copy, "CG950")
    assert status == 0, output
    changed = {name for name, text in files_of(copy).items() if before.get(name) != text}
    assert changed == {*by_hand, "tests/golden/rules/CG950.txt"}
    assert ("decides=False" in (copy / by_hand[0]).read_text()) == (severity == "note")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("Ragged", "CG950", "is no name"),
        ("ragged-batch", "CG95", "is no code"),
        ("ragged-batch", "CG201", "cg201_host_sync.py has that code"),
        ("host-sync", "CG950", "cg201_host_sync.py has that name"),
    ],
)
def test_what_cannot_be_a_rule_is_refused(copy: Path, name: str, code: str, said: str) -> None:
    before = files_of(copy)
    done = add_rule(copy, name, "--code", code, "--severity", "eager")
    assert done.returncode == 2
    assert said in done.stderr
    assert files_of(copy) == before
