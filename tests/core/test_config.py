"""Settings: where they come from, which one counts, and what is said of wrong ones. Needs no torch."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from capture import AnnotationError, config
from capture.core.config import Config, _from_environment, settings_file


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with settings, whose folder is the working directory; no settings in the environment."""
    for name in [name for name in os.environ if name.startswith("CAPTURE_")]:
        monkeypatch.delenv(name)
    inside = tmp_path / "src" / "model"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    return tmp_path


def write(project: Path, *lines: str) -> None:
    (project / "pyproject.toml").write_text("\n".join(["[tool.capture]", *lines]), encoding="utf-8")


def test_the_nearest_file_above_counts(project: Path) -> None:
    write(project, 'silence = ["CG201", "cg906"]', 'refuse = ["CG204"]', "memory_limit = 0.5", "max_recordings = 12",
          "cache = false", 'cache_dir = "plans"', 'verify = "first"')  # fmt: skip
    assert settings_file() == project / "pyproject.toml"
    assert _from_environment() == Config(
        silence=frozenset({"CG201", "CG906"}), refuse=frozenset({"CG204"}), memory_limit=0.5, max_recordings=12,
        cache=False, cache_dir=project / "plans", verify="first",
    )  # fmt: skip
    (project / "src" / "pyproject.toml").write_text("[project]", encoding="utf-8")
    assert _from_environment() == Config()


def test_the_block_of_the_docs_can_be_read(project: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environment.md").read_text(encoding="utf-8")
    (project / "pyproject.toml").write_text(page.split("```toml")[1].split("```")[0], encoding="utf-8")
    assert _from_environment() == Config(
        silence=frozenset({"CG204"}), refuse=frozenset({"CG201"}), memory_limit=0.5,
        cache_dir=project / "build" / "plans",
    )  # fmt: skip


def test_the_environment_goes_before_the_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, 'silence = ["CG201"]', "enabled = false", "cache_limit = 5")
    monkeypatch.setenv("CAPTURE_SILENCE", "CG906, CG907")
    monkeypatch.setenv("CAPTURE_ENABLED", "1")
    assert _from_environment() == Config(silence=frozenset({"CG906", "CG907"}), cache_limit=5)
    monkeypatch.setenv("CAPTURE_ENABLED", "")
    assert not _from_environment().enabled


def test_without_a_file(project: Path) -> None:
    assert _from_environment() == Config()
    for text in ("", "[tool.ruff]", "# tool.capture", "no table [", "\xff"):
        (project / "pyproject.toml").write_text(text, encoding="latin-1")
        assert _from_environment() == Config()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            'silnce = ["CG201"]',
            r"pyproject.toml: \[tool.capture\] silnce is no setting .did you mean 'silence'.*known: en",
        ),
        ('silence = ["host-sync"]', "silence: 'host-sync' is no code of a finding, as CG201 is"),
        ("silence = 201", "silence=201 is not a list of codes"),
        ("enabled = 1", "enabled=1 is not true or false"),
        ("memory_limit = true", "memory_limit=True is not a number of 0 or more"),
        ('memory_limit = "much"', "memory_limit='much' is not a number of 0 or more"),
        ("max_recordings = 1.5", "max_recordings=1.5 is not a whole number of 0 or more"),
        ('verify = "last"', "verify='last' is not a choice; known: 'off', 'first', 'always'"),
        ("cache_dir = 3", "cache_dir=3 is not a directory"),
        ("silence = [", "pyproject.toml: "),
    ],
)
def test_what_is_said_of_a_wrong_file(project: Path, line: str, message: str) -> None:
    write(project, line)
    with pytest.raises(AnnotationError, match=message):
        _from_environment()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("CACHE_LIMIT", "-1", "CAPTURE_CACHE_LIMIT='-1' is not a whole number"),
        ("MEMORY_LIMIT", "nan", "CAPTURE_MEMORY_LIMIT='nan' is not a number of 0 or more"),
        ("VERIFY", "yes", "CAPTURE_VERIFY='yes' is not a choice"),
        ("REFUSE", "CG20", "CAPTURE_REFUSE: 'CG20' is no code of a finding"),
    ],
)
def test_what_is_said_of_a_wrong_variable(
    name: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv(f"CAPTURE_{name}", text)
    with pytest.raises(AnnotationError, match=message):
        _from_environment()


def test_a_block_goes_before_all(project: Path) -> None:
    write(project, 'silence = ["CG201"]')
    with warnings.catch_warnings(), config.patch(silence=frozenset({"CG204"})):
        assert config.current().silence == {"CG204"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"silence": ["CG20"]}, "silence: 'CG20' is no code of a finding"),
        ({"refuse": ["host-sync"]}, "refuse: 'host-sync' is no code of a finding.*`capture rules` lists"),
        ({"silence": 201}, "silence=201 is not a list of codes"),
        ({"enabled": 1}, "enabled=1 is not true or false"),
        ({"memory_limit": -1}, "memory_limit=-1 is not a number of 0 or more"),
        ({"max_recordings": 1.5}, "max_recordings=1.5 is not a whole number"),
        ({"verify": "last"}, "verify='last' is not a choice"),
        ({"cache_dir": 3}, "cache_dir=3 is not a directory"),
    ],
)
def test_a_block_takes_what_a_file_takes(settings: dict[str, Any], message: str) -> None:
    before = config.current()
    with pytest.raises(AnnotationError, match=message), config.patch(**settings):
        pass
    assert config.current() is before


@pytest.mark.parametrize("codes", [["CG204", "CG201"], ("cg201", "CG204"), {"CG201", "CG204"}, "CG201, CG204"])
def test_codes_come_in_any_collection(codes: Any) -> None:
    with config.patch(silence=codes):
        assert config.current().silence == frozenset({"CG201", "CG204"})


def test_a_folder_of_plans_is_a_path_or_a_text(tmp_path: Path) -> None:
    for folder in (tmp_path, str(tmp_path)):
        with config.patch(cache_dir=folder):  # type: ignore[arg-type] # a text is no Path, and taken all the same
            assert config.current().cache_dir == tmp_path
