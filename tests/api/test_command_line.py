"""``python -m capture``: what it prints and how it ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from capture.__main__ import main
from capture.core.plan import dumps
from capture.reporting.text import format_plan, format_rule
from capture.rules import RULES
from capture.rules.compile_plan import compile_plan
from capture.torch_private import switches, tensor_reads
from tests.support.samples import decoder


def test_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["code", "name", "severity"]
    assert [line.split()[:3] for line in lines[1:]] == [[each.code, each.name, str(each.severity)] for each in RULES]


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
    assert main(["plan", str(file), "--all"]) == 0
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


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "required: COMMAND"),
        (["unknown"], "invalid choice: 'unknown'"),
        (["rule"], "required: CODE"),
        (["plan"], "required: FILE"),
        (["cache"], "required: {list,clear}"),
        (["cache", "empty"], "invalid choice: 'empty'"),
        (["report"], "required: RUN.json"),
        (["bench"], "required: SCRIPT"),
        (["env", "all"], "unrecognized arguments: all"),
    ],
)
def test_wrong_arguments(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Usage, one line with the error, and an example of the command."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    usage, message, example = shown.err.splitlines()
    assert usage.startswith("usage: capture")
    assert re.search(f"error: .*{re.escape(error)}", message)
    assert "..." not in message
    assert example.startswith("example: capture ")


@pytest.mark.parametrize("command", ["rules", "rule", "plan", "report", "bench", "cache", "env"])
def test_the_help_of_each_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"example: capture {command}" in capsys.readouterr().out


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    """Every property and switch that a call compares is there, with where it is read and its price."""
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert ["torch", torch.__version__] in lines
    names = [*[read.name for read in tensor_reads.PROPERTIES], *[read.name for read in switches.SWITCHES]]
    for name in names:
        assert any(line[: len(name.split())] == name.split() and line[-1] == "ns" for line in lines), name
    assert "tensors through torch's C ABI  yes" in " ".join(shown.split()).replace("ABI yes", "ABI  yes")


def test_env_of_a_build_for_a_device_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert main(["env"]) == 0
    versions = capsys.readouterr().out.partition("\n\n")[0]
    assert "device" not in versions
