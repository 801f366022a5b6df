"""The places of ``pyproject.toml`` that name Pythons, processors and addresses agree with each other."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from typing import Any

import pytest

from tests.support.installing import ROOT

SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, WHEELS = SETTINGS["project"], SETTINGS["tool"]["cibuildwheel"]
# 3.14 as (3, 14), from the classifiers, which package indexes show.
PYTHONS = sorted(
    (int(major), int(minor))
    for classifier in PROJECT["classifiers"]
    for major, minor in re.findall(r"^Programming Language :: Python :: (\d)\.(\d+)$", classifier)
)


def is_built(identifier: str) -> bool:
    """Whether a wheel is built for this version, as ``cibuildwheel`` reads its lists of patterns."""
    expanded = [part for pattern in WHEELS["skip"] for part in pattern.split()]
    wanted = any(fnmatch.fnmatch(identifier, pattern) for pattern in WHEELS["build"])
    return wanted and not any(fnmatch.fnmatch(identifier, pattern) for pattern in expanded)


def test_the_classifiers_have_no_gap_and_begin_where_pip_installs() -> None:
    assert [minor for _, minor in PYTHONS] == list(range(PYTHONS[0][1], PYTHONS[-1][1] + 1))
    oldest = ".".join(map(str, PYTHONS[0]))
    assert PROJECT["requires-python"] == f">={oldest}"
    assert SETTINGS["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_a_wheel_is_built_for_each_python_and_processor(processor: str) -> None:
    """What ``cibuildwheel --print-build-identifiers`` prints with these settings (docs/development.md)."""
    assert processor in WHEELS["linux"]["archs"]
    assert re.fullmatch(r"manylinux_2_\d+", WHEELS["linux"][f"manylinux-{processor}-image"])
    for major, minor in PYTHONS:
        assert is_built(f"cp{major}{minor}-manylinux_{processor}")
        assert not is_built(f"cp{major}{minor}-musllinux_{processor}")
        assert not is_built(f"cp{major}{minor}t-manylinux_{processor}")
    assert not is_built(f"cp310-manylinux_{processor}")
    assert not is_built(f"cp3{PYTHONS[-1][1] + 1}-manylinux_{processor}")


def test_what_runs_on_a_built_wheel_is_there() -> None:
    (script,) = re.findall(r"\{project\}/(\S+)", WHEELS["test-command"])
    assert (ROOT / script).is_file()


def test_no_address_is_made_up() -> None:
    """No placeholder for a project address: it would lead users and bug reports nowhere, or to a stranger."""
    for address in PROJECT.get("urls", {}).values():
        assert address.startswith("https://")
        assert not re.search(r"example\.|localhost|TODO|your[-_]", address, re.IGNORECASE), address
