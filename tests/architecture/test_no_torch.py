"""Rules, plans and reports can be read where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from capture.core.plan import dumps
from capture.rules.compile_plan import compile_plan
from tests.support.samples import decoder

PACKAGE = Path(__file__).parents[2] / "capture"

# In a process of its own: ``None`` makes every import of torch fail, and the stub package keeps the public
# ``capture/__init__.py``, which needs torch, from being run.
SCRIPT = """
import importlib, sys, types
sys.modules["torch"] = None
stub = types.ModuleType("capture")
stub.__path__ = [sys.argv[1]]
sys.modules["capture"] = stub
for name in ("core.plan", "rules.compile_plan", "reporting.text", "rules", "__main__"):
    importlib.import_module(f"capture.{name}")
sys.exit(sys.modules["capture.__main__"].main(sys.argv[2:]))
"""


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(PACKAGE), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_command_line_works_without_torch() -> None:
    rules = run("rule", "CG101")
    assert (rules.returncode, rules.stderr) == (0, "")
    assert rules.stdout.startswith("CG101 static-address-moved")


def test_a_saved_plan_opens_without_torch(tmp_path: Path) -> None:
    given = decoder()
    file = tmp_path / "plan.json"
    file.write_text(dumps(compile_plan(given.annotation, given.facts)), encoding="utf-8")
    opened = run("plan", str(file))
    assert (opened.returncode, opened.stderr) == (0, "")
    assert "Decoder.step: record" in opened.stdout
