"""Building the C module: from these sources, and with one clear line where there is nothing to build it with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("setuptools", "77")


def build(into: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(into), "--build-temp", str(into)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_it_builds_from_the_sources(tmp_path: Path) -> None:
    compiler = shutil.which(str(sysconfig.get_config_var("CC") or "cc").split()[0])
    if compiler is None or not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("nothing to build it with")
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("capture/native/_native*"))


def test_without_a_compiler_one_line_says_so(tmp_path: Path) -> None:
    done = build(tmp_path, CC=str(tmp_path / "no-such-compiler"))
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("torch-capture needs a C compiler (cc or gcc) and the headers of Python to build"), (
        done.stderr
    )
    assert "or a wheel" in last
