"""What a run came to: as text, JSON and a page. No torch."""

from __future__ import annotations

import html.parser
import json
import re

import pytest
from typing_extensions import override

from capture.core.events import Event
from capture.core.sizes import bytes_text
from capture.reporting.html import html_page
from capture.reporting.run_data import (
    EventData,
    FindingData,
    FunctionData,
    RecordingData,
    RunData,
    RunError,
    dumps,
    grouped,
    loads,
    paths_text,
)
from capture.reporting.summary import format_run, percent
from capture.reporting.timeline import TimedReplay, chrome_trace

SYNC = FindingData(
    code="CG201", name="host-sync", severity="eager", what="`.item()` reads a value",
    why="a replay runs without Python", fix=("return the tensor  (no cost)", "another"),
    where="/m.py:3: x.item() </script>",
)  # fmt: skip


def function(name: str = "Block.forward", **changes: object) -> FunctionData:
    given = {
        "function": name, "defined_at": "/m.py:1", "instances": 1,
        "calls": {"replayed": 98, "recorded": 1, "watched": 1},
        "eager_ms": 1.24, "eager_timed": 5, "replay_ms": 0.1, "replays_timed": 3, "pool_bytes": 2048,
        "graph_bytes": 1024,
        "recordings": (RecordingData(number=1, parent=0, operators=7, graph_bytes=1024, guards=("a is 1",)),),
        "events": (EventData(kind="record", detail="7 operators", at=3.0, ms=2.0, nbytes=2048),), **changes,
    }  # fmt: skip
    return FunctionData(**given)  # type: ignore[arg-type]


def run_of(*functions: FunctionData) -> RunData:
    return RunData(made_with={"torch": "2.13.0"}, functions=functions)


def test_functions_that_share_a_pool_say_so() -> None:
    told = format_run(run_of(function("one"), function("other")))
    assert "memory: all recordings share one pool of 2.0 KiB, which is in each row" in told
    assert "share one pool" not in format_run(run_of(function("one")))
    assert "share one pool" not in format_run(run_of(function("one"), function("other", pool_bytes=1)))


def test_json_comes_back() -> None:
    run = run_of(function(), function("eager", findings=(SYNC,), calls={"eager": 4}))
    assert loads(dumps(run)) == run
    for text in ("", "{}", "[]", '{"schema": 1}', '{"schema": 2}', dumps(run).replace("eager_timed", "other")):
        with pytest.raises(RunError):
            loads(text)


def test_equal_instances_are_one() -> None:
    (one,) = grouped([function()] * 32)
    assert (one.instances, one.total, one.graph_bytes, one.pool_bytes) == (32, 3200, 32 * 1024, 2048)
    assert one.gain == pytest.approx(12.4)
    assert len(grouped([function(), function(findings=(SYNC,)), function("other")])) == 3


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([], ""),
        (["head"], "head"),
        ([f"blocks.{n}" for n in range(32)], "blocks.0-31"),
        (["a.3.net", "a.1.net", "a.2.net", "a.7.net", "head"], "a.1-3,7.net, head"),
        (["a.0.1", "a.0.2", "a.1.1"], "a.0.1-2, a.1.1"),
        (["a.0", "a.0"], "a.0"),
    ],
)
def test_paths_that_differ_in_a_number_are_one(paths: list[str], text: str) -> None:
    assert paths_text(paths) == text


def test_blocks_of_a_model_are_one_entry() -> None:
    blocks = [function(paths=(f"blocks.{n}",), counted={"rebinds": 1}) for n in range(3)]
    text = format_run(run_of(*blocks, function("alone")))
    assert "Block.forward (blocks.0-2), 3 instances" in text
    assert "  rebinds: 3" in text


def test_text() -> None:
    eager = function("f", findings=(SYNC, SYNC), calls={"eager": 7}, recordings=(), eager_ms=None)
    text = format_run(run_of(*[function()] * 2, eager))
    assert text.splitlines()[1].split() == [
        "Block.forward,", "2", "instances", "200", "98", "%", "12.4", "x", "2", "4.0", "KiB",
    ]  # fmt: skip
    assert "  196 replayed, 2 recorded, 2 watched" in text
    assert "  CG201 host-sync: `.item()` reads a value (2 times)" in text
    assert "  do first: return the tensor  (no cost)" in text
    assert format_run(run_of()) == "no captured function was called\n"


@pytest.mark.parametrize(
    ("replayed", "eager", "text"), [(1, 0, "100 %"), (99999, 1, "99.99 %"), (0, 0, "0 %"), (1, 2, "33 %")]
)
def test_a_share_is_not_rounded_up_to_all(replayed: int, eager: int, text: str) -> None:
    assert percent(function(calls={"replayed": replayed, "eager": eager})) == text


def test_sizes() -> None:
    sizes = (0, -5, 1023, 2048, 22 << 20, (1 << 20) - 1, 3 << 30, 5 << 40)
    texts = ["0 B", "-5 B", "1023 B", "2.0 KiB", "22 MiB", "1.0 MiB", "3.0 GiB", "5.0 TiB"]
    assert list(map(bytes_text, sizes)) == texts


class Parts(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.scripts: list[str] = []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append("")

    @override
    def handle_data(self, data: str) -> None:
        if self.scripts:
            self.scripts[-1] += data


def test_the_page_is_one_file_that_holds_the_data() -> None:
    page, parts = html_page(run_of(function(), function("f", findings=(SYNC,)))), Parts()
    parts.feed(page)
    assert parts.addresses == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page.replace(parts.scripts[0], ""))
    data = json.loads(parts.scripts[0])
    assert [shown["function"] for shown in data["functions"]] == ["Block.forward", "f"]
    assert data["functions"][1]["findings"][0]["where"] == SYNC.where
    assert data["rules"]["CG201"].startswith("CG201 host-sync")


def test_a_trace() -> None:
    events = [
        Event(kind="record", function="f", at=2.0, ms=500.0, detail="7 operators"),
        Event(kind="miss", function="g", at=1.75),
    ]
    replay = TimedReplay(function="f", at=2.5, ms=0.25)
    entries = json.loads(chrome_trace(events, [replay], process=7))["traceEvents"]
    assert [entry["args"]["name"] for entry in entries if entry["ph"] == "M"] == ["f", "g"]
    bar, replayed = (entry for entry in entries if entry["ph"] == "X")
    assert (replayed["name"], replayed["ts"], replayed["dur"]) == ("replay", 1e6, 250.0)
    assert (bar["name"], bar["ts"], bar["dur"], bar["pid"]) == ("record", 0.0, 500_000.0, 7)
    (mark,) = (entry for entry in entries if entry["ph"] == "i")
    assert (mark["name"], mark["ts"]) == ("miss", 250_000.0)
