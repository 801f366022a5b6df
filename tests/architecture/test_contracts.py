"""The contracts of ``pyproject.toml`` hold, and each fails when it is broken on purpose in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
STAGES = "Data goes from earlier stages to later ones"
CIRCLES = "No circle of modules"
PURE = "Decisions and reports need no torch"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "capture", tmp_path / "capture", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(folder: Path) -> tuple[int, str]:
    """Exit status and output of ``lint-imports``, as ``make test`` runs it, on the package in this folder."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": python_path(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def plant(file: Path, text: str) -> None:
    """Put lines behind the future import, which has to stay first."""
    first = "from __future__ import annotations\n"
    before, found, after = file.read_text(encoding="utf-8").partition(first)
    assert found, file
    file.write_text(f"{before}{first}{text}\n{after}", encoding="utf-8")


def test_all_contracts_are_kept(copy: Path) -> None:
    status, output = lint_imports(copy)
    assert status == 0, output
    for name in (STAGES, CIRCLES, PURE):
        assert f"{name} KEPT" in output


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("file", "text", "contract", "said"),
    [
        ("key/pytree.py", "from capture.runtime import entry", STAGES, "capture.key.pytree -> capture.runtime.entry"),
        (
            "state/source.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from capture.observe.run import capturing",
            STAGES,
            "capture.state.source -> capture.observe.run",
        ),
        (
            "engines/base.py",
            "def late():\n    import capture.tree.node",
            STAGES,
            "capture.engines.base -> capture.tree",
        ),
        ("state/source.py", "import capture.state.snapshot", CIRCLES, "capture.state"),
        ("core/facts.py", "import torch", PURE, "capture.core.facts -> torch"),
        ("rules/case.py", "from capture.key import pytree", STAGES, "capture.rules.case -> capture.key"),
    ],
    ids=["up", "up under TYPE_CHECKING", "up in a function", "circle", "torch in core", "rules that see tensors"],
)
def test_a_planted_import_breaks_its_contract(copy: Path, file: str, text: str, contract: str, said: str) -> None:
    plant(copy / "capture" / file, text)
    status, output = lint_imports(copy)
    assert status == 1, output
    assert f"{contract} BROKEN" in output
    assert said in output


def test_a_folder_without_a_place_breaks_the_order(copy: Path) -> None:
    (copy / "capture" / "misc").mkdir()
    (copy / "capture" / "misc" / "__init__.py").write_text("", encoding="utf-8")
    status, output = lint_imports(copy)
    assert status == 1, output
    assert "misc" in output
