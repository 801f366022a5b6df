"""An sdist of the checkout, and a wheel of it: each built once."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.support.installing import ROOT, hook

_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.so", "__pycache__", ".*_cache", "*.egg-info", ".hypothesis"
)


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that ``CAPTURE_WHEEL`` names (``make wheel``), else one that is built of the sdist."""
    given = os.environ.get("CAPTURE_WHEEL")
    if given:
        return Path(given).resolve()
    out = tmp_path_factory.mktemp("wheel")
    done = hook("build_wheel", out, request.getfixturevalue("source"))
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("torch_capture-*.whl")
    return built
