"""``report``, ``trace``, ``set_logs``, and the commands that show what a run came to."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from typing_extensions import override

from capture import CaptureWarning, capture, config, explain, recordings, report, set_logs, trace, warmup
from capture.__main__ import main
from capture.core import events
from capture.reporting.run_data import loads
from capture.reporting.tables import Tabular
from tests.support.device import EXECUTES
from tests.support.processes import python_path
from tests.support.shown import printed_by_rich


def test_a_report_as_text_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captured = capture(lambda x: torch.relu(x) + 1, name="shown in a report")
    x = torch.ones(3)
    for _ in range(40):
        captured(x)
    with config.patch(enabled=False):
        captured(x)
    made = report(html=tmp_path / "r.html", json=tmp_path / "r.json")
    run = loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    (entry,) = (entry for entry in run.functions if entry.function == "shown in a report")
    assert dict(entry.calls) == recordings(captured).calls()
    assert (entry.total, entry.eager_timed, entry.replays_timed) == (41, 1, 1)
    assert entry.gain is not None
    assert entry.recordings[0].operators == 2
    assert entry.recordings[0].guards
    assert "shown in a report" in made
    assert "shown in a report" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert made._repr_html_().startswith("<iframe srcdoc=")
    assert main(["report", str(tmp_path / "r.json"), "--html", str(tmp_path / "again.html")]) == 0
    assert "shown in a report" in capsys.readouterr().out
    assert (tmp_path / "again.html").stat().st_size == (tmp_path / "r.html").stat().st_size


def test_a_branch_has_its_own_number_of_operators() -> None:
    """A function keeps one plan, that of the branch that was recorded last; operators are counted for each
    recording."""

    @capture(name="of two branches")
    def branching(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) + 1
        return y * 2 if y.sum() > 8 else (y * 3 - 1).tanh()

    small, large = torch.zeros(3), torch.ones(3) * 9
    for x in (small, small, small, large, large, large, small):
        branching(x)
    (entry,) = (entry for entry in report().data.functions if entry.function == "of two branches")
    told = {recording.operators for recording in entry.recordings}
    assert told == {size.num_ops for size in recordings(branching).sizes}
    assert len(told) == len(entry.recordings) == 2


def test_the_place_of_a_function_is_its_def() -> None:
    """The line of ``def``, not that of the first decorator, where ``co_firstlineno`` points."""

    @capture(
        name="below its decorators",
        max_recordings=3,
    )
    @torch.no_grad()
    def below(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    below(torch.ones(3))
    (entry,) = (entry for entry in report().data.functions if entry.function == "below its decorators")
    line = int(entry.defined_at.rpartition(":")[2])
    assert Path(__file__).read_text(encoding="utf-8").splitlines()[line - 1].lstrip().startswith("def below(")


def test_notebooks_and_rich_show_tables() -> None:
    captured = capture(lambda x: torch.relu(x) + 1, name="shown in a notebook", max_recordings=1)
    x = torch.ones(3)
    for _ in range(4):
        captured(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        warmed = warmup(captured).cases([(x,), (torch.ones(4),)], progress=False)
    counted, explained, told = recordings(captured), explain(captured)(x), report()
    parts: list[tuple[Tabular, tuple[str, ...]]] = [
        (counted, ("shown in a notebook: 4 calls: 2 replayed", "replayed", "while it runs")),
        (explained, ("inputs", "CG108", "guards looked at")),
        (warmed, ("1 skipped", "status", "CG901")),
    ]
    for shown, words in parts:
        html, lines = shown._repr_html_(), printed_by_rich(shown)
        assert "<table>" in html
        assert all(word in html and word in lines for word in words), (html, lines)
    assert "shown in a notebook" in printed_by_rich(told)
    assert repr(told) == str(told)


def test_the_command_line_prints_tables_by_rich_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        @override
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["rules"]) == 0
    assert "CG101" in terminal.getvalue()
    assert "\u2500" in terminal.getvalue()


def test_a_trace_has_the_recordings(tmp_path: Path) -> None:
    captured = capture(lambda x: x * 2, name="traced")
    for _ in range(20):
        captured(torch.ones(3))
    assert trace(tmp_path / "t.json") >= 3
    events = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    of_traced = [event for event in events if event.get("args", {}).get("function") == "traced"]
    assert {"observe", "record", "replay"} <= {event["name"] for event in of_traced}
    begins = {event["name"]: event["ts"] for event in of_traced}
    assert begins["observe"] < begins["record"] < begins["replay"]  # of one clock


@pytest.mark.parametrize("command", [["report", "no.json"], ["plan", "no.json"], ["bench", "no.py"]])
def test_a_file_that_is_not_there(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 1
    assert capsys.readouterr().err.lower().startswith(f"{command[1]}: no such file")


def test_a_file_that_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    assert main(["report", str(tmp_path / "x.json")]) == 1
    assert "no report of a run" in capsys.readouterr().err


def test_the_cache_is_listed_and_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f-1.json").write_text("x" * 2048, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("kept", encoding="utf-8")
    with config.patch(cache_dir=tmp_path):
        assert main(["cache", "list"]) == 0
        assert main(["cache", "clear"]) == 0
    shown = capsys.readouterr().out
    assert "   2.0 KiB  f-1.json\n1 plan, 2.0 KiB, in " in shown
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_rule_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", "host-sync"]) == 0
    assert capsys.readouterr().out.startswith("CG201 host-sync")


@pytest.mark.slow
def test_a_script_is_compared_with_itself_run_eagerly(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, torch\nfrom capture import capture\nassert sys.argv[1:] == ['--many', '50']\n"
        "f = capture(lambda x: torch.relu(x) + 1, name='of the script')\nx = torch.ones(3)\n"
        "for _ in range(50):\n    f(x)\nprint('said by the script')\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "capture", "bench", str(script), "--many", "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("said by the script") == 2
    assert " s eagerly, " in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("of the script  "))
    assert line.split()[3:7] == ["50", "96", "%", line.split()[6]]
    assert line.split()[7] == "x"
    script.write_text("raise SystemExit(3)", encoding="utf-8")
    done = subprocess.run(command[:5], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("ended with status 3 eagerly")


def test_logs_go_to_the_loggers_of_the_application(caplog: pytest.LogCaptureFixture) -> None:
    try:
        set_logs("recordings")
        captured = capture(lambda x: x * 3, name="logged")
        for _ in range(3):
            captured(torch.ones(3))
        said = ["record logged"] if EXECUTES else ["instantiate logged", "record logged"]
        assert [record.message.split(":")[0] for record in caplog.records if "logged" in record.message] == said
        with pytest.raises(ValueError, match="known: all, runtime"):
            set_logs("recording")
    finally:
        set_logs("")
    assert events.logger.handlers == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("handled", [False, True])
def test_no_line_comes_twice(handled: bool) -> None:
    code = "import logging\nfrom capture.core.events import Log, set_logs\nset_logs('recordings')\n"
    code += ("logging.basicConfig()\n" if handled else "") + "Log('f').add('record', 'once', ms=1.0)\n"
    environment = {"RANK": "3", "PATH": "", "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=300
    )
    (line,) = (line for line in done.stderr.splitlines() if "once" in line)
    assert line.endswith("record f: once (1.00 ms)")
    assert line.startswith("INFO:capture:" if handled else "[capture ")
    assert handled or " rank 3] " in line


def test_the_logger_is_the_standard_one() -> None:
    assert logging.getLogger("capture") is events.logger
