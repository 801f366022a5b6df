"""From sources to an installed package: sdist, wheel, an empty environment, and the message where building fails.

Nothing is downloaded: the new environment reads torch and the rest from the one that runs the tests.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.support.installing import ROOT, new_environment, run
from tests.support.processes import python_path


@pytest.mark.slow
def test_a_wheel_of_the_sdist_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path, wheel)
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    smoke = run(python, ROOT / "tests" / "packaging" / "smoke.py", cwd=tmp_path, CAPTURE_CACHE="0")
    assert smoke.returncode == 0, smoke.stderr
    assert f"of {packages}/capture/__init__.py: 3 of 5 calls replayed" in smoke.stdout
    version = run(python.with_name("capture"), "--version", cwd=tmp_path)
    assert version.stdout.startswith("torch-capture "), version.stderr


@pytest.mark.slow
def test_the_sdist_runs_its_tests(source: Path) -> None:
    built = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=source)
    assert built.returncode == 0, built.stderr
    tests = ("tests/core", "tests/rules", "tests/reporting", "tests/native/test_modes.py")
    done = run(sys.executable, "-m", "pytest", "-q", "-x", *tests, cwd=source, CAPTURE_CACHE="0")
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_pip_without_a_compiler_says_so_in_one_line(source: Path, tmp_path: Path) -> None:
    command = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        tmp_path / "into",
    )
    unbuilt = tmp_path / "unbuilt"  # another test may have built the module in its place
    shutil.copytree(source, unbuilt, ignore=shutil.ignore_patterns("build", "*.so", "*.egg-info"))
    done = run(*command, unbuilt, cwd=tmp_path, CC=str(tmp_path / "no-such-compiler"))
    assert done.returncode != 0
    said = done.stdout + done.stderr
    (line,) = (line.strip() for line in said.splitlines() if "torch-capture needs" in line)
    assert line.startswith("torch-capture needs a C compiler (cc or gcc) and the headers of Python to build")
    assert "or a wheel of torch-capture" in line
    assert "Traceback" not in said, said


@pytest.mark.slow
def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = message_from_string(opened.read(metadata).decode())
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"capture", "torch_capture"}
    assert any(name.startswith("capture/native/_native.") and name.endswith(".so") for name in names)
    assert not [name for name in names if name.endswith((".c", ".h"))]
    assert {"dev", "gpu", "progress", "report"} <= set(told.get_all("Provides-Extra", []))
    classifiers = told.get_all("Classifier", [])
    assert "Programming Language :: Python :: 3.11" in classifiers


@pytest.mark.slow
def test_the_module_in_the_wheel_needs_libc_alone(wheel: Path, tmp_path: Path) -> None:
    """So one wheel works with every torch, and ``auditwheel`` has nothing to copy into it."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".so"))
        module = opened.extract(name, tmp_path)
    read = subprocess.run(["readelf", "-d", "-V", module], capture_output=True, text=True, check=True)
    assert set(re.findall(r"\(NEEDED\).*\[(.*?)\]", read.stdout)) <= {
        "libc.so.6",
        "libdl.so.2",
        "libpthread.so.0",
        "ld-linux-x86-64.so.2",
    }
    newest = max(tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([\d.]+)", read.stdout))
    assert newest <= (2, 34), newest


def test_free_threaded_builds_are_refused() -> None:
    setup = (
        "import sysconfig; known = sysconfig.get_config_var; "
        "sysconfig.get_config_var = lambda name: 1 if name == 'Py_GIL_DISABLED' else known(name); "
        "import runpy, sys; sys.argv = ['setup.py', '--name']; runpy.run_path('setup.py')"
    )
    done = run(sys.executable, "-c", setup, cwd=ROOT)
    assert done.returncode != 0
    assert done.stderr.startswith("torch-capture does not support free-threaded builds of Python")
    loaded = "import sys; sys.abiflags += 't'; import capture.native"
    done = run(sys.executable, "-c", loaded, cwd=ROOT, PYTHONPATH=python_path())
    assert "ImportError: torch-capture does not support free-threaded builds of Python" in done.stderr
