"""From sources to an installed package: sdist, wheel, an empty environment, and what is said where that cannot be.

Nothing is downloaded: the new environment reads torch and the rest from the one that runs the tests.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.so", "__pycache__", ".*_cache", "*.egg-info", ".hypothesis"
)


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CAPTURE_STRICT")}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False, timeout=600,
        env={**own, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", **environment},
    )  # fmt: skip


def hook(name: str, out: Path, source: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What pip and build ask of setuptools."""
    code = f"import sys; from setuptools import build_meta; build_meta.{name}(sys.argv[1])"
    return run(sys.executable, "-c", code, out, cwd=source, **environment)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked sdist."""
    top = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, top / "checkout", ignore=_LEFT_OUT)
    done = hook("build_sdist", top, top / "checkout")
    assert done.returncode == 0, done.stderr
    (archive,) = top.glob("torch_capture-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(top, filter="data")
    return top / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    done = hook("build_wheel", out, source)
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("torch_capture-*.whl")
    return found


@pytest.mark.slow
def test_a_wheel_of_the_sdist_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    there = tmp_path / "environment"
    assert run(sys.executable, "-m", "venv", "--without-pip", there, cwd=tmp_path).returncode == 0
    python = there / "bin" / "python"
    installed = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    (packages,) = there.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")  # no .pth files of those
    smoke = run(python, ROOT / "tests" / "packaging" / "smoke.py", cwd=tmp_path, CAPTURE_CACHE="0")
    assert smoke.returncode == 0, smoke.stderr
    assert f"of {packages}/capture/__init__.py: 3 of 5 calls replayed" in smoke.stdout
    version = run(there / "bin" / "capture", "--version", cwd=tmp_path)
    assert version.stdout.startswith("torch-capture "), version.stderr


@pytest.mark.slow
def test_the_sdist_runs_its_tests(source: Path) -> None:
    built = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=source)
    assert built.returncode == 0, built.stderr
    tests = ("tests/core", "tests/rules", "tests/reporting", "tests/native/test_modes.py")
    done = run(sys.executable, "-m", "pytest", "-q", "-x", *tests, cwd=source, CAPTURE_CACHE="0")
    assert done.returncode == 0, done.stdout[-4000:]


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
    for minor in range(11, 15):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers


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
    done = run(sys.executable, "-c", loaded, cwd=ROOT, PYTHONPATH=str(ROOT))
    assert "ImportError: torch-capture does not support free-threaded builds of Python" in done.stderr
