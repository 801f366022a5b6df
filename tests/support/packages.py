"""Packages of AOTInductor, which the process may not survive to load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

_LOAD = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1], run_single_threaded=True)"


def skip_where_torch_crashes(package: Path) -> None:
    """On some machines with a GPU torch 2.11 crashes as it loads a package, in a process without this library, too.
    A process of its own finds out, as a crash here would take the other tests of this one along."""
    if not torch.cuda.is_available():
        return
    outcome = package.with_suffix(".loads")
    if not outcome.exists():
        child = subprocess.run([sys.executable, "-c", _LOAD, str(package)], capture_output=True, check=False)
        outcome.write_text(str(child.returncode))
    if int(outcome.read_text()) < 0:
        pytest.skip("torch itself crashes here as it loads a package")
