"""Warm-up of many cases: the largest goes first, nothing of the user's changes, a case that cannot be recorded does not
stop the others; and its progress bar."""

from __future__ import annotations

import copy
import io
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import (
    AnnotationError,
    CaptureWarning,
    UncapturableError,
    WarmedCase,
    WarmupReport,
    capture,
    config,
    mark_step_begin,
    recordings,
    report,
    warmup,
)
from capture.api.decorator import captured_states
from capture.runtime import record
from capture.tree import thread_trees
from tests.support.device import AGAIN, DEVICE, OWN_MEMORY, default_generator
from tests.support.unseen import Notes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference, no plans on disk, no marks and no tree of another test."""
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False):
        yield


def same(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit."""
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


def x_of(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator(DEVICE).manual_seed(seed))


def body(x: Tensor, scale: float = 2.0, *, shift: Tensor | None = None) -> Tensor:
    y = torch.relu(x) * scale + 1
    return y if shift is None else y + shift


def shapes(result: WarmupReport) -> list[str]:
    return [row.case for row in result.cases]


def status(result: WarmupReport) -> list[str]:
    return [row.status for row in result.cases]


# ------------------------------------------------------------------------------------------------------- what it does


def test_every_case_replays_afterwards_and_equals_eager() -> None:
    captured = capture(body, max_recordings=10)
    result = warmup(captured).cases([(x_of(rows),) for rows in (1, 2, 4, 8)])
    assert isinstance(result, WarmupReport)
    assert (result.recorded, result.known, result.skipped) == (4, 0, ())
    assert status(result) == ["recorded"] * 4
    for seed in range(3):
        for rows in (8, 1, 4, 2):
            assert same(captured(x_of(rows, seed)), body(x_of(rows, seed)))
    seen = recordings(captured)
    assert (seen.recordings, seen.replays, seen.eager_calls, seen.body_runs) == (4, 12, 0, 8)


FIRST = """
import sys, torch
from capture import capture, recordings, warmup
with getattr(torch, sys.argv[2])():
    f, x = capture(lambda x: (x + 1) * 2), torch.ones(3, device=sys.argv[1])
    warmup(f)(x)
    for _ in range(3):
        f(x)
print(recordings(f).recordings, recordings(f).replays)
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["enable_grad", "inference_mode"])
def test_the_first_thing_that_a_process_does(mode: str) -> None:
    """A warm-up before any other call: nothing has set torch's switches yet, or asked how torch lays out its nodes."""
    command = [sys.executable, "-W", "ignore", "-c", FIRST, str(DEVICE), mode]
    environment = {**os.environ, "CAPTURE_CACHE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "3"], done.stderr


def test_a_case_is_a_tuple_a_mapping_or_both() -> None:
    captured = capture(body, max_recordings=10)
    x, shift = x_of(3), x_of(1)
    result = warmup(captured).cases([(x, 3.0), {"x": x, "scale": 4.0}, ((x,), {"shift": shift}), ((), {"x": x})])
    assert result.recorded == 4
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, 3.0), {}), ((x, 4.0), {}), ((x,), {"shift": shift}), ((x,), {})
    ]  # fmt: skip
    for args, kwargs in calls:
        assert same(captured(*args, **kwargs), body(*args, **kwargs))
    assert (recordings(captured).recordings, recordings(captured).replays) == (4, 4)


def test_a_tuple_and_a_dict_alone_are_positional_and_keyword_arguments() -> None:
    def takes(pair: tuple[Tensor, Tensor], options: dict[str, Tensor]) -> Tensor:
        return torch.relu(pair[0] + pair[1]) * options["scale"]

    captured = capture(takes)
    pair, options = (x_of(2), x_of(2, 1)), {"scale": x_of(1)}
    with pytest.raises(TypeError, match=r"case 0 .*\(\(args\), \{\}\)"):
        warmup(captured).cases([(pair, options)])
    assert warmup(captured).cases([((pair, options), {})]).recorded == 1
    assert same(captured(pair, options), takes(pair, options))
    assert recordings(captured).replays == 1


def test_the_largest_comes_first_and_ties_keep_their_order() -> None:
    notes = Notes()
    note = notes.add

    def noting(x: Tensor, scale: float) -> Tensor:
        note((x.shape[0], scale))
        return x * scale

    captured = capture(noting, max_recordings=10)
    result = warmup(captured).cases([(x_of(2), 1.0), (x_of(8), 2.0), (x_of(2), 3.0), (x_of(4), 4.0)])
    assert list(dict.fromkeys(notes.all())) == ["(8, 2.0)", "(4, 4.0)", "(2, 1.0)", "(2, 3.0)"]
    assert [row.argument_bytes for row in result.cases] == [32, 128, 32, 64]
    assert [text.replace(f" {DEVICE}", "") for text in shapes(result)][:2] == [
        "x=float32[2, 4], scale=1.0",
        "x=float32[8, 4], scale=2.0",
    ]


def test_the_pool_is_grown_once_by_the_largest() -> None:
    captured = capture(body, max_recordings=10)
    result = warmup(captured).cases([(x_of(rows),) for rows in (16, 256, 64)])
    alone, kept = capture(body), recordings(captured)
    thread_trees.forget_trees()
    largest = warmup(alone).cases([(x_of(256),)])
    assert result.pool_bytes == largest.pool_bytes == kept.pool_bytes
    assert [row.pool_bytes for row in result.cases] == [0, result.pool_bytes, 0]
    assert result.graph_bytes == kept.graph_bytes


def test_the_report_says_what_it_took() -> None:
    captured = capture(body, max_recordings=10, name="small")
    result = warmup(captured).cases([(x_of(rows),) for rows in (1, 2)])
    assert all(row.ms > 0 for row in result.cases)
    assert result.seconds * 1e3 >= sum(row.ms for row in result.cases)
    lines = str(result).splitlines()
    assert re.match(
        r"small: 2 recorded, 0 known, 0 skipped; \d+\.\d s, pool \d+(\.\d)? ([KMG]i)?B, graphs \d+(\.\d)? ([KMG]i)?B",
        lines[0],
    )
    assert lines[0].endswith(", graphs 0 B") or recordings(captured).graph_bytes
    assert "float32[2, 4]" in lines[3]
    with pytest.raises(AttributeError):
        result.seconds = 0.0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        result.cases[0].ms = 0.0  # type: ignore[misc]


def test_what_is_there_already_is_known() -> None:
    captured = capture(body, max_recordings=2)
    cases = [(x_of(2),), (x_of(4),), (x_of(2, 1),)]
    assert status(warmup(captured).cases(cases)) == ["recorded", "recorded", "known"]
    again = warmup(captured).cases(iter(cases))
    assert (again.recorded, again.known, again.skipped) == (0, 3, ())
    assert recordings(captured).body_runs == 4


def test_what_is_known_does_not_end_the_step() -> None:
    first, second = capture(body), capture(torch.tanh)
    for _ in range(4):
        mark_step_begin()
        y = first(x_of(2))
        assert warmup(first).cases([(x_of(2),)]).known in (0, 1)
        z = second(y)
        assert same(z, torch.tanh(body(x_of(2))))
    mark_step_begin()
    y = first(x_of(2))
    path = list(thread_trees.trees_of(captured_states(first)[0])[0].path)
    assert warmup(first).cases([(x_of(2),)]).known == 1
    assert thread_trees.trees_of(captured_states(first)[0])[0].path == path
    assert len(path) == 1


def test_no_cases() -> None:
    result = warmup(capture(body, name="body")).cases([], progress=True)
    assert (result.cases, result.recorded, result.pool_bytes) == ((), 0, 0)
    assert str(result).startswith("body: 0 recorded")


def test_a_module_and_a_method_have_cases() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @override
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.linear(x))

        @capture
        def step(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x))

    net = Net()
    assert warmup(net.step).cases([(x_of(2),)]).recorded == 1
    assert same(net.step(x_of(2, 5)), torch.tanh(net.linear(x_of(2, 5))))
    capture(net)
    assert warmup(net).cases([{"x": x_of(2)}]).recorded == 1
    assert same(net(x_of(2, 5)), Net.forward(net, x_of(2, 5)))
    assert (recordings(net.step).replays, recordings(net.forward).replays) == (1, 1)
    with pytest.raises(AnnotationError, match="through an instance"):
        warmup(Net.step).cases([(net, x_of(2))])
    with pytest.raises(AnnotationError, match="through an instance"):
        warmup(Net.step)(net, x_of(2))
    with pytest.raises(AnnotationError, match="not a captured function"):
        warmup(body).cases([(x_of(2),)])


class Messy(nn.Module):
    """Writes an argument, a buffer, an attribute, a table, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.h = torch.zeros(4)
        self.table = {"a": torch.zeros(4)}

    @override
    def forward(self, x: Tensor, own: torch.Generator) -> Tensor:
        x.add_(1)
        self.h = self.norm(x).sum(0) + self.h
        self.table["a"].add_(x.sum(0))
        return self.h + torch.rand(4, generator=own) + torch.rand(4)


def everything(net: Messy, xs: list[Tensor], own: torch.Generator) -> list[Tensor]:
    values = [
        *net.state_dict().values(),
        net.h,
        net.table["a"],
        *xs,
        own.get_state(),
        default_generator.get_state(),
    ]
    return [value.clone() for value in values]


def test_no_trace_is_left() -> None:
    net, own, xs = Messy(), torch.Generator(DEVICE).manual_seed(7), [x_of(rows) for rows in (2, 8, 3)]
    twin, twin_own = copy.deepcopy(net), torch.Generator(DEVICE).manual_seed(7)
    capture(net)
    held, before = (net.h, net.table["a"]), everything(net, xs, own)
    result = warmup(net).cases([(x, own) for x in xs])
    assert result.recorded == 3
    assert all(map(same, everything(net, xs, own), before))
    assert (net.h is held[0], net.table["a"] is held[1]) == (True, True)
    for seed in range(4):
        for rows in (3, 2, 8):
            mine, theirs = x_of(rows, seed), x_of(rows, seed)
            torch.manual_seed(seed)
            got, after = net(mine, own).clone(), everything(net, [mine], own)
            torch.manual_seed(seed)
            assert same(got, twin(theirs, twin_own))
            assert all(map(same, after, everything(twin, [theirs], twin_own)))
    again = recordings(net).body_runs - 6
    assert again in ([0], [4, 5])[AGAIN]
    assert recordings(net).replays == 12 - again


def test_outputs_that_are_held_keep_their_values() -> None:
    captured = capture(body, max_recordings=10)
    for _ in range(3):
        kept = captured(x_of(6))
    expected = kept.clone()
    assert warmup(captured).cases([(x_of(rows),) for rows in (2, 12)]).recorded == 2
    for rows in (2, 12, 6):
        captured(x_of(rows, 3))
    assert same(kept, expected)


# ----------------------------------------------------------------------------------------------- what is not recorded


def test_cases_beyond_max_recordings_are_skipped_and_said_once() -> None:
    captured = capture(body, max_recordings=3)
    cases = [(x_of(rows),) for rows in (1, 2, 3, 4, 5)]
    with pytest.warns(CaptureWarning) as caught:
        result = warmup(captured).cases([*cases, (x_of(5), 9.0), (x_of(1), 9.0)])
    assert len(caught) == 1
    assert "CG901" in str(caught[0].message)
    assert "max_recordings=3" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert status(result) == ["skipped", "skipped", "skipped", "recorded", "recorded", "recorded", "skipped"]
    assert result.recorded == recordings(captured).recordings == 3
    assert {row.code for row in result.skipped} == {"CG901"}
    assert all("max_recordings=3" in row.reason for row in result.skipped)
    assert result.skipped == tuple(row for row in result.cases if row.status == "skipped")
    assert recordings(captured).body_runs == 6, "a case that is skipped does not run"
    assert len(captured_states(captured)[0].families) == 3, "a key that is skipped is forgotten"
    assert "CG901" in str(result)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(warmup(captured).cases(cases).skipped) == 3
    for rows in (1, 5, 2, 4):
        assert same(captured(x_of(rows, 1)), body(x_of(rows, 1)))
    assert (recordings(captured).replays, recordings(captured).eager_calls) == (2, 2)


def test_one_call_respects_max_recordings_too() -> None:
    captured = capture(body, max_recordings=2)
    for rows in (1, 2):
        warmup(captured)(x_of(rows))
    with pytest.warns(CaptureWarning, match="CG901"):
        warmup(captured)(x_of(3))
    assert recordings(captured).recordings == 2


def test_a_place_in_the_tree_has_its_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_OWNED", 0)  # else ``first`` gives copies, and ``second`` has no place below it
    first, second = capture(body, max_recordings=10), capture(torch.tanh, max_recordings=1)
    for _ in range(3):
        first(x_of(2))
        y = second(first(x_of(2)))
    assert recordings(second).recordings == 1 + AGAIN, "recorded below the first"
    assert warmup(second).cases([(x_of(2),)]).recorded == 1
    assert same(y, torch.tanh(body(x_of(2))))


def test_what_cannot_be_recorded_does_not_stop_the_others() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.shape[0] == 4:
            return x * float(np.from_dlpack(x.sum().cpu()))
        if x.shape[0] == 3:
            raise LookupError("no three")
        return torch.relu(x)

    captured = capture(picky)
    with pytest.warns(CaptureWarning) as caught:
        result = warmup(captured).cases([(x_of(rows),) for rows in (1, 2, 3, 4, 5)])
    assert status(result) == ["recorded", "recorded", "skipped", "skipped", "recorded"]
    raised, synced = result.skipped
    assert (raised.code, raised.reason) == (None, "LookupError: no three")
    assert synced.code == "CG201"
    assert len(caught) == 2, "the rule's message, and one for what raised"
    text = next(str(warning.message) for warning in caught if "LookupError" in str(warning.message))
    assert "1 of 5 cases" in text
    assert "LookupError: no three" in text
    assert "float32[3, 4]" in text
    for rows in (1, 2, 4, 5):
        assert same(captured(x_of(rows, 1)), picky(x_of(rows, 1)))
    with pytest.raises(LookupError):
        captured(x_of(3))


def test_with_fallback_error_the_others_are_recorded_and_it_is_said_once() -> None:
    def syncs(x: Tensor) -> Tensor:
        return x * float(np.from_dlpack(x.sum().cpu())) if x.shape[0] % 2 else torch.relu(x)

    captured = capture(syncs, fallback="error")
    with pytest.warns(CaptureWarning, match=r"3 of 5 cases.*CG201") as caught:
        result = warmup(captured).cases([(x_of(rows),) for rows in (1, 2, 3, 4, 5)])
    assert len(caught) == 1
    assert [row.code for row in result.cases] == ["CG201", None, "CG201", None, "CG201"]
    for _ in range(2):
        with pytest.raises(UncapturableError, match="CG201"):
            warmup(captured)(x_of(3))


def test_what_was_found_eager_before_is_skipped_with_its_reason() -> None:
    def syncs(x: Tensor) -> float:
        return float(np.from_dlpack(x.sum().cpu()))

    captured = capture(syncs)
    with pytest.warns(CaptureWarning, match="CG201"):
        captured(x_of(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (row,) = warmup(captured).cases([(x_of(1, 2),)]).skipped
    assert row.code == "CG201"
    assert ("a copy to the CPU reads" if OWN_MEMORY else "DLPack reads") in row.reason


def test_an_argument_without_a_key_is_skipped() -> None:
    endless: list[Any] = []
    endless.append(endless)

    def takes(x: Tensor, other: Any) -> Tensor:
        return x + 1

    captured = capture(takes)
    with pytest.warns(CaptureWarning, match="CG106") as caught:
        result = warmup(captured).cases([(x_of(1), endless), (x_of(1), 2)])
    assert len(caught) == 1
    assert status(result) == ["skipped", "recorded"]
    assert result.cases[0].code == "CG106"


def test_calls_that_need_gradients_get_their_forward_pass() -> None:
    captured = capture(body)
    with torch.enable_grad():
        (row,) = warmup(captured).cases([(x_of(2).requires_grad_(),)]).cases
    assert row.status == "recorded"


def test_calls_whose_backward_pass_cannot_be_recorded_apart_are_skipped() -> None:
    captured = capture(lambda x: x.view(-1))
    with torch.enable_grad(), pytest.warns(CaptureWarning, match="CG501"):
        (row,) = warmup(captured).cases([(x_of(2).requires_grad_(),)]).skipped
    assert row.code == "CG501"


def test_nothing_runs_while_disabled() -> None:
    captured = capture(body)
    with config.patch(enabled=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        result = warmup(captured).cases([(x_of(2),)])
        warmup(captured)(x_of(2))
    assert [row.reason for row in result.skipped] == ["captured functions are switched off (CAPTURE_ENABLED=0)"]
    assert recordings(captured).body_runs == 0


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ([x_of(1)], r"case 0 is a Tensor; write a tuple of positional arguments"),
        ([(x_of(1),), [x_of(1)]], r"case 1 is a list"),
        ([{3: x_of(1)}], r"case 0 has the key 3"),
        ([(x_of(1),), ()], r"case 1 does not fit body: missing .*'x'$"),
        ([{"y": x_of(1)}], r"case 0 does not fit body: .*'y'$"),
    ],
)
def test_mistakes_are_named_before_anything_runs(cases: list[Any], message: str) -> None:
    captured = capture(body, name="body")
    with pytest.raises(TypeError, match=message):
        warmup(captured).cases(cases)
    assert recordings(captured).body_runs == 0


def test_an_interrupt_is_no_skipped_case() -> None:
    def interrupted(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warmup(capture(interrupted)).cases([(x_of(1),)])


# ----------------------------------------------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    @override
    def isatty(self) -> bool:
        return True


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have imports of rich fail, as if it were not installed."""
    for name in ("rich", "rich.progress", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)


def written(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, progress: bool | None) -> str:
    monkeypatch.setattr(sys, "stderr", stderr)
    warmup(capture(body, name="small")).cases([(x_of(rows),) for rows in (1, 2, 3)], progress=progress)
    return stderr.getvalue()


LINE = r"warm-up of small: 3/3 cases, \d+\.\d s, \d+(\.\d)? ([KMG]i)?B"


def test_progress_with_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(monkeypatch, Terminal(), None)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "warm-up of small" in plain
    assert "3/3" in plain
    assert re.search(r"\d+\.\d s", plain)
    assert re.search(r"\d ([KMG]i)?B", plain)
    assert "━" in plain


@pytest.mark.usefixtures("without_rich")
def test_progress_without_rich_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(monkeypatch, Terminal(), None)
    assert text.count("\n") == 1
    assert re.fullmatch(LINE + r"\s*\n", text.split("\r")[-1])
    assert "\r" in text


@pytest.mark.usefixtures("without_rich")
def test_progress_into_a_file_is_one_line_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(LINE + r"\n", written(monkeypatch, io.StringIO(), True))


def test_rich_into_a_file_has_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(monkeypatch, io.StringIO(), True)
    assert "3/3" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(("stderr", "progress"), [(io.StringIO, None), (Terminal, False), (io.StringIO, False)])
def test_no_progress(monkeypatch: pytest.MonkeyPatch, stderr: Callable[[], io.StringIO], progress: bool | None) -> None:
    assert written(monkeypatch, stderr(), progress) == ""


def test_no_progress_without_a_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    captured = capture(body)
    assert warmup(captured).cases([(x_of(1),)]).recorded == 1
    assert warmup(captured).cases([(x_of(2),)], progress=True).recorded == 1


@pytest.mark.usefixtures("without_rich")
def test_the_line_ends_when_the_body_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)

    def interrupted(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warmup(capture(interrupted)).cases([(x_of(1),)])
    assert stderr.getvalue().endswith("\n")


def test_the_report_of_all_functions_counts_it() -> None:
    captured = capture(body, name="warmed")
    assert isinstance(warmup(captured).cases([(x_of(1),)]).cases[0], WarmedCase)
    assert any(line.split()[:5] == ["warmed", "0", "0", "%", "1"] for line in report().splitlines())
