"""``python -m capture``: what it prints and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from capture.__main__ import main
from capture._compile import compile_plan
from capture._plan import dumps
from capture._report import format_plan, format_rule
from capture.rules import RULES
from tests.plan.samples import decoder


def test_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [[each.code, each.name, str(each.severity)] for each in RULES]


@pytest.mark.parametrize("code", ["CG101", "cg101"])
def test_rule(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", code]) == 0
    assert capsys.readouterr().out == format_rule(RULES[0])


def test_unknown_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", "CG1O1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("there is no rule 'CG1O1' (did you mean 'CG1")


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = decoder()
    plan = compile_plan(given.annotation, given.facts)
    file = tmp_path / "plan.json"
    file.write_text(dumps(plan), encoding="utf-8")
    assert main(["plan", str(file)]) == 0
    assert capsys.readouterr().out == format_plan(plan)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{", "not JSON"), (b"\xff\xfe", "utf-8"), (b'{"version": 9}', "version 9, expected 3"), (None, "No such file")],
)
def test_damaged_plan(content: bytes | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    if content is not None:
        file.write_bytes(content)
    assert main(["plan", str(file)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"{file}: ")
    assert reason in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["unknown"], ["rule"]])
def test_wrong_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "python -m capture" in capsys.readouterr().err
