"""What ``import capture`` and ``import torch_capture`` load, print and write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.processes import python_path, run_python

ROOT = Path(__file__).parents[2]


def python(code: str, environment: Mapping[str, str], *options: str, cwd: Path | None = None) -> str:
    """Run these lines in a new process; gives what it prints."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, check=False, timeout=300, cwd=cwd,
        env={**os.environ, "PYTHONPATH": python_path(), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_both_names_are_one_module() -> None:
    code = """
import torch_capture, torch_capture.testing, capture, capture.testing, pickle, sys
import torch_capture.core.plan as by_other_name, capture.core.plan
assert torch_capture is capture and torch_capture.__name__ == "capture" and torch_capture.__spec__.name == "capture"
assert torch_capture.testing is capture.testing and capture.testing.__spec__.name == "capture.testing"
assert by_other_name is capture.core.plan
from torch_capture import capture as decorator
from torch_capture.core.findings import Severity
assert decorator is capture.capture and pickle.loads(pickle.dumps(Severity.NOTE)) is Severity.NOTE
import importlib
try:
    importlib.import_module("torch_capture.nothing")
except ModuleNotFoundError as error:
    print(error.name)
"""
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("torch_capture.nothing\n", "")


@pytest.mark.slow
def test_the_other_name_may_come_first_and_runs_the_command_line() -> None:
    done = run_python("import torch_capture.core.plan, capture.core.plan; print(capture.core.plan.__name__)")
    assert (done.stdout, done.stderr) == ("capture.core.plan\n", "")
    done = subprocess.run(
        [sys.executable, "-m", "torch_capture", "rule", "CG101"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": python_path()}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CG101 ")


@pytest.mark.slow
def test_an_import_writes_nothing(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    places = {name: str(home) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "TMPDIR")}
    code = "import torch; import os; before = sorted(os.listdir(os.environ['HOME'])); import capture; capture.capture"
    code += "; print(sorted(os.listdir(os.environ['HOME'])) == before)"
    assert python(code, {"CAPTURE_CACHE": "1", **places}, "-B", cwd=here) == "True"
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_torchs_compiler_comes_before_the_first_run_that_is_watched() -> None:
    """Not with the decorator, as it takes longer than torch; nor in a body, where it raises at stand-ins."""
    code = """
import sys, torch, capture
@capture.capture
def body(x):
    import torch._dynamo
    weight = torch.nn.Parameter(x.clone())
    step = torch.optim.SGD([weight], 0.5)
    weight.square().sum().backward()
    step.step()
    return weight.detach()
print("torch._dynamo" in sys.modules)
print([body(torch.ones(2)).tolist() for _ in range(4)] == [[0.0, 0.0]] * 4, capture.recordings(body).replays > 0)
"""
    assert python(code, {"CAPTURE_DROP_SLOW": "0"}) == "False\nTrue True"


@pytest.mark.slow
def test_an_import_takes_little_beyond_torch(tmp_path: Path) -> None:
    """Processor time of the fastest of three processes, with compiled files as an installation has them.

    It is compared with torch's own import in the same process, as machines differ: that takes about one second where
    ``import capture`` may take a tenth. The rest is loaded when the decorator is first asked for.
    """
    code = (
        "import time; a = time.process_time(); import torch; b = time.process_time(); import capture; "
        "c = time.process_time(); capture.capture; d = time.process_time(); print((c - b) / (b - a), (d - b) / (b - a))"
    )
    kept = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    python(code, kept)
    ratios = [tuple(map(float, python(code, kept).split())) for _ in range(3)]
    package, decorator = (min(run[at] for run in ratios) for at in range(2))
    assert package < 0.1, package
    assert decorator < 0.3, decorator
