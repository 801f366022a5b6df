"""In the runtime one module decides what a call does, ``dispatch``; the others return what they found."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from capture.runtime.dispatch import _STAGES
from capture.runtime.entry import Phase

PACKAGE = Path(__file__).resolve().parents[2] / "capture"
RUNTIME = sorted((PACKAGE / "runtime").glob("*.py"))


def lines_with(pattern: str, paths: list[Path]) -> list[str]:
    """File and line of every match."""
    return [
        f"{path.name}: {line.strip()}"
        for path in paths
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(pattern, line)
    ]


def function_around(path: Path, text: str) -> list[str]:
    """Names of the functions whose source has this text."""
    source = path.read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if text in (ast.get_source_segment(source, function) or "")]


def test_one_place_writes_a_phase() -> None:
    assert len(lines_with(r"\.phase\b[^=]*[^=!<>]=[^=]", sorted(PACKAGE.rglob("*.py")))) == 1
    assert lines_with(r"\.advance\(", sorted(PACKAGE.rglob("*.py"))) == ["phases.py: entry.advance(phase)"]


def test_one_place_runs_a_bound_call_eagerly() -> None:
    callers = {line.partition(":")[0] for line in lines_with(r"\.run_plainly\(", RUNTIME)}
    assert callers == {"eager_call.py"}
    assert function_around(PACKAGE / "runtime" / "eager_call.py", ".run_plainly(") == ["run_eagerly"]


def test_no_stage_knows_dispatch() -> None:
    stages = [path for path in RUNTIME if path.name != "dispatch.py"]
    assert not lines_with(r"import.*\bdispatch\b|runtime\.dispatch", stages)


def test_every_phase_has_a_stage() -> None:
    phases = set(Phase.__args__)  # type: ignore[attr-defined] # of a Literal
    assert set(_STAGES) == phases


@pytest.mark.parametrize("phase", ["cold", "warm", "ready", "eager"])
def test_the_first_words_name_every_phase(phase: str) -> None:
    text = (PACKAGE / "runtime" / "dispatch.py").read_text(encoding="utf-8").partition('"""\n\nfrom')[0]
    assert re.search(rf"^    {phase} ", text, re.MULTILINE)
