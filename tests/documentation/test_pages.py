"""Links of the README and of ``docs/`` lead somewhere, and the pictures are what their scripts draw."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from capture.core.config import ConfigPatch
from tests.support.pages import PAGES, ROOT

LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
VARIABLE = re.compile(r"\bCAPTURE_[A-Z_]*[A-Z]\b")
CHECKED = (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", CHECKED, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        if path.startswith("rules/"):  # made of the rules while the site is built, which checks these links
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{name_of(page)} links to nothing: {broken}"


def test_every_variable_that_is_named_exists() -> None:
    """Each ``CAPTURE_...`` that pages or the library's texts name is a setting."""
    existing = {f"CAPTURE_{name.upper()}" for name in ConfigPatch.__annotations__}
    existing |= {
        "CAPTURE_LOGS",
        "CAPTURE_NAME",
        "CAPTURE_TEST_DEVICE",
        "CAPTURE_TEST_ENGINE",
        "CAPTURE_TEST_DEFAULT",
        "CAPTURE_FAULTS",
        "CAPTURE_FUZZ_EXAMPLES",
    }
    texts = [*CHECKED, *(ROOT / "capture").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    named = {(name_of(text), name) for text in texts for name in VARIABLE.findall(text.read_text(encoding="utf-8"))}
    assert [where for where in sorted(named) if where[1] not in existing] == []


def drawn(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(script, ROOT / "docs" / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_of_speeds_is_what_its_script_draws() -> None:
    script = drawn("draw_speed")
    assert script.picture() == script.PICTURE.read_text(encoding="utf-8"), "run python docs/draw_speed.py"


def test_every_page_has_a_place_in_the_site() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [page.name for page in PAGES if page.parent == ROOT / "docs" and f": {page.name}\n" not in settings]
    assert not missing
