"""Building the library and installing it, as a user would."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command without this checkout in its environment, and without an index of packages."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and name[:8] != "CAPTURE_"}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False, timeout=600,
        env={**own, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", **environment},
    )  # fmt: skip


def hook(name: str, out: Path, source: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call one of setuptools' build hooks, as pip and build do."""
    code = f"import sys; from setuptools import build_meta; build_meta.{name}(sys.argv[1])"
    return run(sys.executable, "-c", code, out, cwd=source, **environment)


def new_environment(folder: Path, wheel: Path) -> Path:
    """The Python of an environment with this wheel alone; torch and the rest come from the one that runs the tests."""
    there = folder / "environment"
    made = run(sys.executable, "-m", "venv", "--without-pip", there, cwd=folder)
    assert made.returncode == 0, made.stderr
    python = there / "bin" / "python"
    installed = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    (packages,) = there.glob("lib/python*/site-packages")
    # ``.pth`` files in these folders are not read
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    return python
