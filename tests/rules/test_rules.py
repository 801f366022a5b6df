"""The rules as a set: found by scanning the folder, each with its page, joined by those of installed packages."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import capture.rules as rules_package
from capture.core.errors import CaptureBug
from capture.core.findings import Severity
from capture.rules import RULES, Rule, all_rules, changed_rules, deciding_rules, rule, rule_by_code, rules_in
from capture.rules._rule import HEADINGS

FOLDER = Path(rules_package.__file__).parent
BY_CODE = {each.code: each for each in RULES}


def test_rules_are_the_files_on_disk() -> None:
    files = {path.stem for path in FOLDER.glob("cg*.py")}
    assert files == {f"{each.code}_{each.name}".lower().replace("-", "_") for each in RULES}
    codes = [each.code for each in RULES]
    assert codes == sorted(set(codes))
    assert len({each.name for each in RULES}) == len(RULES)


@pytest.mark.parametrize("each", RULES, ids=lambda each: each.code)
def test_rule_page(each: Rule) -> None:
    """All headings, a summary of one line, and examples that compile."""
    assert tuple(each.headings) == HEADINGS
    assert each.summary.endswith(".")
    for heading in ("Example", "Instead"):
        blocks = re.findall(r"```python\n(.*?)```", each.headings[heading], flags=re.DOTALL)
        assert blocks, heading
        for block in blocks:
            compile(block, f"{each.code} {heading}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_rule_files_are_short() -> None:
    sizes = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.glob("cg*.py")}
    assert {name: size for name, size in sizes.items() if not 30 <= size <= 110} == {}


def make_rule(doc: str | None, code: str = "XX100") -> Rule:
    source = textwrap.dedent("""
        def check(case):
            yield from ()
    """)
    namespace: dict[str, Any] = {"__doc__": doc}
    exec(source, namespace)  # noqa: S102 - the docstring of a module that need not exist
    return rule(code, "extra", severity=Severity.NOTE, revision=3)(namespace["check"])


PAGE = "Summary.\n\n" + "\n\n".join(f"## {heading}\ntext" for heading in HEADINGS)


@pytest.mark.parametrize(
    "doc", [None, "Summary.", PAGE.replace("## Known gaps\ntext", ""), PAGE.replace("## Instead\ntext", "## Instead")]
)
def test_missing_heading_fails_at_import(doc: str | None) -> None:
    with pytest.raises(TypeError, match="XX100 needs text under each of: What it does"):
        make_rule(doc)


def test_rule_by_code() -> None:
    assert rule_by_code("cg101") is RULES[0]
    with pytest.raises(LookupError, match=r"no rule 'CG111' \(did you mean 'CG1"):
        rule_by_code("CG111")


class FakeEntry:
    value = "package:RULE"

    def __init__(self, name: str, loaded: object) -> None:
        self.name = name
        self.loaded = loaded

    def load(self) -> object:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def install(folder: Path, entry_points: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with these entry points, as pip leaves it."""
    (folder / "more_rules-1.0.dist-info").mkdir()
    (folder / "more_rules-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: more-rules\nVersion: 1.0\n"
    )
    (folder / "more_rules-1.0.dist-info" / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()


@pytest.fixture
def _fresh_rules() -> Iterator[None]:
    all_rules.cache_clear()
    yield
    all_rules.cache_clear()


@pytest.mark.usefixtures("_fresh_rules")
def test_extra_rules_come_through_the_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good one joins in its place and changes the revision; broken ones warn and are left out."""
    extra = make_rule(PAGE, "CG250")
    entries = [
        FakeEntry("good", extra),
        FakeEntry("broken", ImportError("no module")),
        FakeEntry("no-rule", 3),
        FakeEntry("taken", make_rule(PAGE, "CG101")),
    ]
    before = deciding_rules()
    all_rules.cache_clear()
    install(tmp_path, "[capture.rules]\ngood = module:rule\n", monkeypatch)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries if group == "capture.rules" else [])
    with pytest.warns(RuntimeWarning, match="is ignored") as warned:
        rules = all_rules()
    assert [rule.code for rule in rules] == sorted([*BY_CODE, "CG250"])
    assert [str(warning.message).split(" of ")[0] for warning in warned] == [
        "rule 'broken'",
        "rule 'no-rule'",
        "rule 'taken'",
    ]
    assert rule_by_code("CG250") is extra
    assert changed_rules(before, deciding_rules()) == ["CG250"]


@pytest.mark.usefixtures("_fresh_rules")
def test_the_rule_of_an_installed_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "[capture.rules]\nfound = rules_of_another:RULE\n", monkeypatch)
    (tmp_path / "rules_of_another.py").write_text("from capture.rules import RULES\nRULE = RULES[0]\n")
    with pytest.warns(RuntimeWarning, match=f"'found' .*: {RULES[0].code} is taken"):
        all_rules()


@pytest.mark.usefixtures("_fresh_rules")
def test_metadata_is_not_parsed_where_no_package_adds_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call would wait longer for that than for anything else."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: pytest.fail("parsed"))
    assert all_rules() == RULES


def test_only_rules_that_may_decide_count_for_plans() -> None:
    text = deciding_rules()
    assert "CG102 2" in text.split(", ")
    assert "CG101" not in text  # only remarks
    assert changed_rules(text, text) == []
    assert changed_rules(text, text.replace("CG102 2", "CG102 3")) == ["CG102"]
    assert changed_rules("", text) == [each.code for each in RULES if each.decides]


# ------------------------------------------------------------------------------------------------------ the folder


def folder_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> tuple[Rule, ...]:
    """The rules of a package with these files; ``{PAGE}`` stands for a page of documentation."""
    package = tmp_path / f"rules_of_{tmp_path.name}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, text in files.items():
        (package / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    before = set(sys.modules)
    try:
        return rules_in(package.name, [str(package)])
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(package.name):
                del sys.modules[name]


def rule_file(code: str) -> str:
    return f"""{PAGE!r}
from capture.core.findings import Severity
from capture.rules import rule


@rule({code!r}, "extra", severity=Severity.NOTE)
def RULE(case):
    yield from ()
"""


def test_rules_are_found_in_the_order_of_their_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are called otherwise are no rules."""
    files = {
        "cg950_b.py": rule_file("CG950"),
        "cg110_a.py": rule_file("CG110"),
        "helper.py": "1 / 0",
        "cg9_x.py": "1 / 0",
    }
    assert [rule.code for rule in folder_of(tmp_path, monkeypatch, files)] == ["CG110", "CG950"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"cg950_a.py": "RULE = 3\n"}, "cg950_a.py has no RULE"),
        ({"cg950_a.py": ""}, "cg950_a.py has no RULE"),
        (
            {"cg950_a.py": rule_file("CG950"), "cg950_b.py": rule_file("CG950")},
            "cg950_b.py takes the code CG950, which",
        ),
        ({"cg950_a.py": rule_file("CG951")}, "cg950_a.py holds CG951"),
        ({"helper.py": ""}, "no rule was found"),
    ],
    ids=["another type", "none", "twice", "another code", "no file"],
)
def test_a_broken_rule_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], said: str
) -> None:
    with pytest.raises(CaptureBug, match=re.escape(said)):
        folder_of(tmp_path, monkeypatch, files)
