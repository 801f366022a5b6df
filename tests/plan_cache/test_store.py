"""The plan cache: what a second process gets, what makes a plan stale, and what no file can do to a call."""

from __future__ import annotations

import builtins
import inspect
import json
import linecache
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from capture import capture, rules
from capture.core import config
from capture.core.errors import CaptureWarning
from capture.core.plan import VERSION, PlanError, dumps, loads
from capture.plan_cache import store
from tests.support.plans import (
    Body,
    assert_loaded,
    assert_stale,
    described,
    details,
    files,
    module_with,
    only_file,
    plain,
    plan_of,
    run,
)
from tests.support.plans import directory as directory
from tests.support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]


def reads_host(x: torch.Tensor) -> torch.Tensor:
    return x * 3 if float(np.from_dlpack(x.sum().cpu())) > 0 else x * 5


# ------------------------------------------------------------------------------------------------- another process

PROGRAM = """
import json, sys, warnings
import numpy as np, torch
from capture import capture
from capture.api.decorator import captured_states

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
    def forward(self, x):
        return self.inner(x) * 2

def double(x):
    return x * 2

def plain(x, scale, flags):
    return (x * scale + 1).relu() - x

def with_objects(x, net, function):
    return function(net(x)) + 1

def reads_host(x):
    return x * 3 if float(np.from_dlpack(x.sum().cpu())) > 0 else x * 5

for _ in range(int(sys.argv[1])):  # other objects, other numbers for them
    capture(with_objects)(torch.ones(2, 3), Net().requires_grad_(False), lambda x: x * 4)

method = capture(Net().requires_grad_(False))
cases = [
    (plain, (0.5, {"b": 1, "a": frozenset(["x", "y", "z"])})),
    (with_objects, (Net().requires_grad_(False), double)),
    (reads_host, ()),
    (method, ()),
]
report = {}
for body, others in cases:
    function = body if body is method else capture(body)
    for count in range(4):
        x = torch.randn(2, 3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = function(x, *others)
        if count == 0:
            warned = [str(one.message) for one in caught if "CG201" in str(one.message)]
        expected = body.inner(x) * 2 if body is method else body(x, *others)
        assert torch.equal(found, expected), body
        del found
    (state,) = captured_states(function)
    name = "method" if body is method else body.__name__
    codes = [one.code for one in state.findings.values()]
    report[name] = state.log.counters.items() | {"warned": warned, "findings": codes}
print(json.dumps(report))
"""


def run_program(tmp_path: Path, num_others: int) -> dict[str, dict[str, Any]]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    environment = os.environ | {
        "CAPTURE_CACHE_DIR": str(tmp_path / "plans"), "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": str(num_others + 1),
    }  # fmt: skip
    environment.pop("CAPTURE_CACHE", None)
    done = subprocess.run(
        [sys.executable, str(path), str(num_others)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return report


@pytest.mark.slow
def test_a_second_process_runs_no_observation(tmp_path: Path, directory: Path) -> None:
    """This holds for arguments compared by identity and for a module's method, too. What cannot be recorded is looked
    at once more."""
    first = run_program(tmp_path, 0)
    assert all(counters["observations"] >= 1 for counters in first.values())
    assert {name: counters["plans_loaded"] for name, counters in first.items()} == dict.fromkeys(first, 0)
    before = {path: path.read_bytes() for path in files(directory)}
    assert len(before) == 4
    second = run_program(tmp_path, 3)
    for name in ("plain", "with_objects", "method"):
        counters = second[name]
        assert (counters["observations"], counters["plans_loaded"], counters["plans_stale"]) == (0, 1, 0), name
    assert second["plain"]["recordings"] == 1
    assert second["plain"]["replays"] == 3
    assert {path: path.read_bytes() for path in before} == before

    refused = second["reads_host"]
    assert (refused["observations"], refused["recordings"], refused["plans_loaded"]) == (1, 0, 1)
    assert refused["eager_calls"] == 4
    assert refused["findings"] == first["reads_host"]["findings"]
    assert "CG201" in refused["findings"]
    assert len(refused["warned"]) == 1
    assert "float(np.from_dlpack(x.sum().cpu()))" in refused["warned"][0]


WRITERS = """
import os, sys, time
from pathlib import Path
from attrs import evolve
from capture.plan_cache import store
from capture.core.plan import loads

directory, source = Path(sys.argv[1]), Path(sys.argv[2])
base = loads(source.read_text())
plans = [evolve(base, num_ops=n, findings=base.findings * (1 + 40 * n)) for n in range(8)]
whole = {store.dumps(plan) for plan in plans}
name = source.name
store.save_plans(directory, plans[:1])
children = []
for plan in plans:
    child = os.fork()
    if child == 0:
        try:
            for _ in range(40):
                store.save_plans(directory, [plan])
        except BaseException:
            os._exit(1)
        os._exit(0)
    children.append(child)
reads, seen, failed = 0, set(), 0
while children:
    text = (directory / name).read_text()
    assert text in whole, "torn: " + repr(text[-80:])
    seen.add(text)
    reads += 1
    done, status = os.waitpid(-1, os.WNOHANG)
    if done:
        children.remove(done)
        failed += status != 0
assert not failed
assert reads >= 20 and len(seen) >= 2, (reads, len(seen))
assert os.listdir(directory) == [name], os.listdir(directory)
"""


@pytest.mark.slow
def test_eight_writers_never_leave_a_torn_file(tmp_path: Path, directory: Path) -> None:
    """A reader meanwhile sees whole files only, and no temporary file stays."""
    with pytest.warns(CaptureWarning):
        run(reads_host)
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, str(tmp_path / "many"), str(only_file(directory))],
        env=os.environ | {"PYTHONPATH": python_path()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_changed_body_is_named(tmp_path: Path) -> None:
    text = "def body(x):\n    return x * 2 + 1\n"
    run(module_with(tmp_path, "first", text).body)
    assert_loaded(run(module_with(tmp_path, "moved", "\n\n# further down\n" + text).body))
    assert_stale(run(module_with(tmp_path, "changed", text.replace("+ 1", "- 1")).body), "source differs")


def test_code_without_source_is_compared(tmp_path: Path) -> None:
    def made(text: str) -> Body:
        scope: dict[str, Any] = {"__name__": "made"}
        exec(text, scope)  # noqa: S102 - a function that has no source file
        return types.FunctionType(scope["f"].__code__, {"__name__": "made", "__builtins__": builtins}, "f")

    run(made("def f(x): return x * 2 + (1 if 'a' in {'a', 'b'} else 0)"))
    assert_loaded(run(made("def f(x): return x * 2 + (1 if 'a' in {'b', 'a'} else 0)")))
    assert_stale(run(made("def f(x): return x * 2 + (3 if 'a' in {'a', 'b'} else 0)")), "source")


def test_source_that_is_not_there_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """``inspect`` goes through all modules for it, which takes some ten watched runs."""
    looked, scope = list[object](), dict[str, Any]()
    getsource = inspect.getsource

    def look(code: types.CodeType) -> str:
        looked.append(code)
        return getsource(code)

    monkeypatch.setattr(inspect, "getsource", look)
    exec("def f(x): return x * 2 + 17", scope)  # noqa: S102 - a function that has no source file
    function = capture(scope["f"])
    for rows in range(1, 4):
        function(torch.ones(rows))
    assert len(looked) == 1


def test_lambdas_of_one_line_are_told_apart() -> None:
    one, other = (lambda x: x * 2 + 1), (lambda x: x * 2 - 1)
    run(one)
    assert_stale(run(other), "source")


def test_a_changed_option_is_named() -> None:
    run(plain)
    assert_stale(run(plain, max_recordings=7), "annotation differs")


@pytest.mark.parametrize("field", ["torch", "cuda", "device", "allocator", "capture", "schema"])
def test_a_file_made_elsewhere_names_the_field(directory: Path, field: str) -> None:
    run(plain)
    path = only_file(directory)
    before = path.read_text()
    plan = loads(before)
    assert plan.fingerprint[field]
    path.write_text(dumps(evolve(plan, fingerprint={**plan.fingerprint, field: "another"})))
    assert_stale(run(plain), f"{field} differs")
    assert only_file(directory).read_text() == before


def new_rule(*, decides: bool) -> rules.Rule:
    return evolve(rules.rule_by_code("CG101"), code="CG250", name="new", decides=decides, check=lambda _: iter(()))


DECIDES = next(each for each in rules.RULES if each.decides)
REMARKS = next(each for each in rules.RULES if not each.decides)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ((*rules.RULES, new_rule(decides=True)), "rules differs (CG250)"),
        ([evolve(each, revision=each.revision + (each is DECIDES)) for each in rules.RULES], f"({DECIDES.code})"),
        ([each for each in rules.RULES if each is not DECIDES], f"({DECIDES.code})"),
    ],
    ids=["new", "revised", "gone"],
)
def test_a_rule_that_may_decide_makes_plans_stale(
    monkeypatch: pytest.MonkeyPatch, now: Sequence[rules.Rule], said: str
) -> None:
    run(plain)
    monkeypatch.setattr(rules, "all_rules", lambda: now)
    assert_stale(run(plain), said)


@pytest.mark.parametrize(
    "now",
    [
        (*rules.RULES, new_rule(decides=False)),
        [evolve(each, revision=each.revision + (each is REMARKS)) for each in rules.RULES],
        [each for each in rules.RULES if each is not REMARKS],
    ],
    ids=["new", "revised", "gone"],
)
def test_a_rule_that_only_remarks_leaves_plans_alone(
    monkeypatch: pytest.MonkeyPatch, now: Sequence[rules.Rule]
) -> None:
    run(plain)
    monkeypatch.setattr(rules, "all_rules", lambda: now)
    assert_loaded(run(plain))


def test_allocator_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run(plain)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert_stale(run(plain), "allocator differs")


def test_a_reason_whose_line_changed_is_looked_at_again(tmp_path: Path) -> None:
    """A plan that says eager holds while the line that it names is the same. Here the user mended that line, which lies
    deeper than the body."""
    helper = "import numpy as np\n\nclass Helper:\n    @staticmethod\n    def scale(x):\n        return {}\n"
    body = "def body(x):\n    return x * Helper.scale(x)\n"
    module = module_with(tmp_path, "users", helper.format("float(np.from_dlpack(x.sum().cpu()))") + body)
    with pytest.warns(CaptureWarning):
        run(module.body)
    with pytest.warns(CaptureWarning):
        assert_loaded(run(module.body))
    path = Path(module.__file__)
    path.write_text(helper.format("x.sum()") + body, encoding="utf-8")
    os.utime(path, (1, 1))
    linecache.checkcache()
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    state = run(module.body)
    assert_stale(state, "users_module.py:6 differs")
    assert state.log.counters.recordings >= 1


# --------------------------------------------------------------------------------------------------- damaged files


def damage_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-200]), "not JSON"),
    "empty": (lambda path: path.write_bytes(b""), "not JSON"),
    "garbage": (lambda path: path.write_bytes(b"\xff\x00\xfe garbage"), "cannot be read"),
    "another JSON": (lambda path: path.write_text("[1, 2]"), "a JSON object is expected"),
    "foreign schema": (
        lambda path: path.write_text(path.read_text().replace(f'"version": {VERSION}', '"version": 99')),
        "99",
    ),
    "missing field": (lambda path: path.write_text(path.read_text().replace('"outputs"', '"outptus"')), "outp"),
    "directory": (damage_directory, "cannot be read"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_made_again(directory: Path, damage: str) -> None:
    run(plain)
    path = only_file(directory)
    good = path.read_bytes()
    DAMAGES[damage][0](path)
    state = run(plain)
    assert_stale(state, DAMAGES[damage][1])
    assert path.name in details(state, "plan-stale")[0]
    if damage != "directory":
        assert only_file(directory).read_bytes() == good
        assert_loaded(run(plain))
    else:
        assert any("not kept" in detail for detail in details(state, "plan"))
        assert files(directory) == [path]  # no temporary file stays


def test_no_cut_of_a_file_is_taken_for_a_plan(directory: Path) -> None:
    run(plain)
    text = only_file(directory).read_bytes().rstrip()
    for end in range(0, len(text), 7):
        only_file(directory).write_bytes(text[:end])
        with pytest.raises(PlanError):
            store._read(only_file(directory))


def test_a_directory_that_cannot_be_written_fails_no_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent is a file, which stops root too. It is logged once for a process and directory, and noted in each
    function's events."""
    monkeypatch.setattr(store, "_unwritable", set())
    (tmp_path / "file").write_text("in the way")
    with config.patch(cache_dir=tmp_path / "file" / "plans"), caplog.at_level(logging.WARNING, logger="capture"):
        first, second = run(plain), run(described, 1)
    for state in (first, second):
        (kept,) = details(state, "plan")
        assert "not kept" in kept
        assert state.log.counters.recordings >= 1
        assert plan_of(state).fingerprint["function"] == state.annotation.function
    assert len([record for record in caplog.records if "plans are not kept" in record.getMessage()]) == 1


def test_a_full_disk_leaves_no_temporary_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    state = run(plain)
    assert "No space left" in details(state, "plan")[0]
    assert files(directory) == []
