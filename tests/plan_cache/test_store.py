"""The plan cache: what a second process gets, what makes a plan stale, and what no file can do to a call."""

from __future__ import annotations

import builtins
import enum
import importlib.util
import json
import linecache
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from typing_extensions import override

from capture import _bind, _config, _store, capture, rules
from capture._decorate import captured_states
from capture._errors import CaptureWarning
from capture._plan import VERSION, CapturePlan, PlanError, dumps, loads
from capture._runtime import Captured
from tests.device import DEVICE

ROOT = Path(__file__).resolve().parents[1]
Body = Callable[..., torch.Tensor]
_alive: list[Body] = []  # a function takes its plans along


@pytest.fixture(autouse=True)
def directory(tmp_path: Path) -> Iterator[Path]:
    """The cache of one test."""
    path = tmp_path / "plans"
    with _config.patch(cache=True, cache_dir=path), torch.no_grad():
        yield path
    _store.forget_loaded()
    _alive.clear()


def plain(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).relu() - x


def reads_host(x: torch.Tensor) -> torch.Tensor:
    return x * 3 if x.sum().item() > 0 else x * 5


def described(x: torch.Tensor, other: object) -> torch.Tensor:
    return (x + 1) * 2 - x


def run(body: Body, *others: Any, num_calls: int = 3, **options: Any) -> Captured:
    """Decorate anew, which knows no more than a new process does, and call a few times with right results."""
    function = capture(body, **options)
    _alive.append(function)
    for count in range(num_calls):
        x = torch.arange(6.0).view(2, 3) - count
        assert torch.equal(function(x, *others), body(x, *others))
    (state,) = captured_states(function)
    return state


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def only_file(directory: Path) -> Path:
    (path,) = files(directory)
    return path


def plan_of(state: Captured) -> CapturePlan:
    plan = state.entries()[0].plan
    assert plan is not None
    return plan


def details(state: Captured, kind: str) -> list[str]:
    return [event.detail for event in state.log.events if event.kind == kind]


def assert_loaded(state: Captured) -> None:
    assert (state.log.counters.observations, state.log.counters.plans_loaded) == (0, 1)
    assert len(details(state, "plan-loaded")) == 1
    assert details(state, "plan-stale") == []


def assert_stale(state: Captured, word: str) -> None:
    """Named, looked at again, and the result was right (``run`` saw to that)."""
    (reason,) = details(state, "plan-stale")
    assert word in reason
    assert (state.log.counters.observations, state.log.counters.plans_loaded) == (1, 0)
    assert state.log.counters.plans_stale == 1


# ------------------------------------------------------------------------------------------------- another process

PROGRAM = """
import json, sys, warnings
import torch
from capture import capture
from capture._decorate import captured_states

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
    return x * 3 if x.sum().item() > 0 else x * 5

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
        "CAPTURE_CACHE_DIR": str(tmp_path / "plans"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": str(num_others + 1),
    }  # fmt: skip
    environment.pop("CAPTURE_CACHE", None)
    done = subprocess.run(
        [sys.executable, str(path), str(num_others)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return report


def test_a_second_process_runs_no_observation(tmp_path: Path, directory: Path) -> None:
    """Also for arguments compared by identity, a module's method, and a function that cannot be recorded."""
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
    assert (refused["observations"], refused["recordings"], refused["plans_loaded"]) == (0, 0, 1)
    assert refused["eager_calls"] == 4
    assert refused["findings"] == first["reads_host"]["findings"]
    assert "CG201" in refused["findings"]
    assert len(refused["warned"]) == 1
    assert "x.sum().item()" in refused["warned"][0]


WRITERS = """
import os, sys, time
from pathlib import Path
from attrs import evolve
from capture import _store
from capture._plan import loads

directory, source = Path(sys.argv[1]), Path(sys.argv[2])
base = loads(source.read_text())
plans = [evolve(base, num_ops=n, findings=base.findings * (1 + 40 * n)) for n in range(8)]
whole = {_store.dumps(plan) for plan in plans}
name = source.name
_store.save_plans(directory, plans[:1])
children = []
for plan in plans:
    child = os.fork()
    if child == 0:
        try:
            for _ in range(40):
                _store.save_plans(directory, [plan])
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


def test_eight_writers_never_leave_a_torn_file(tmp_path: Path, directory: Path) -> None:
    """A reader meanwhile sees whole files only, and no temporary file stays."""
    with pytest.warns(CaptureWarning):
        run(reads_host)
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, str(tmp_path / "many"), str(only_file(directory))],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------- stale plans


def module_with(tmp_path: Path, folder: str, text: str) -> Any:
    path = tmp_path / folder / "users_module.py"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("users_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_changed_rules_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run(plain)
    changed = (evolve(rules.RULES[0], revision=rules.RULES[0].revision + 1), *rules.RULES[1:])
    monkeypatch.setattr(rules, "all_rules", lambda: changed)
    assert_stale(run(plain), "rules differs")


def test_allocator_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run(plain)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert_stale(run(plain), "allocator differs")


def test_a_reason_whose_line_changed_is_looked_at_again(tmp_path: Path) -> None:
    """What no recording checks: the user mended deeper code, and the body itself is the same."""
    helper = "class Helper:\n    @staticmethod\n    def scale(x):\n        return {}\n"
    body = "def body(x):\n    return x * Helper.scale(x)\n"
    module = module_with(tmp_path, "users", helper.format("x.sum().item()") + body)
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
    assert_stale(state, "users_module.py:4 differs")
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
            _store._read(only_file(directory))


def test_a_directory_that_cannot_be_written_fails_no_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent is a file, which stops root too. Said once a process and directory, and in each function's events."""
    monkeypatch.setattr(_store, "_unwritable", set())
    (tmp_path / "file").write_text("in the way")
    with _config.patch(cache_dir=tmp_path / "file" / "plans"), caplog.at_level(logging.WARNING, logger="capture"):
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


# ----------------------------------------------------------------------------------------------------------- keys


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class ByValue:
    def __init__(self, value: object) -> None:
        self.value = value

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue) and self.value == other.value

    @override
    def __hash__(self) -> int:
        return hash(self.value)

    @override
    def __repr__(self) -> str:
        return f"ByValue({self.value!r})"


class Unshowable(ByValue):
    @override
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __hash__ = ByValue.__hash__


VALUE = ByValue(1)


def relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


DIFFERENT: list[tuple[object, object]] = [
    (1, True), (1, 1.0), (0.0, -0.0), (None, "None"), ("1", 1), (b"a", "a"), ((1, 2), [1, 2]), ((1, 2), (12,)),
    ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), (Colour.RED, Colour.BLUE), (float, int), (torch.float32, torch.float64),
    ("torch.float32", torch.float32), (slice(1), slice(2)), (ByValue(1), ByValue(2)), (relu, gelu),
    (("a", "b"), ("a, b",)), (torch.Size([2]), (2,)), (torch.nn.ReLU(), torch.nn.Tanh()),
    (torch.nn.ReLU().eval(), torch.nn.ReLU()), (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)),
    (torch.ones(2), torch.ones(3)), (torch.ones(2), torch.ones(2, dtype=torch.float64)), (range(2), range(3)),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=lambda value: repr(value).split(" at 0x")[0][:20])
def test_different_arguments_have_different_files(directory: Path, one: object, other: object) -> None:
    run(described, one, num_calls=2)
    run(described, other, num_calls=2)
    assert len(files(directory)) == 2
    assert_loaded(run(described, one, num_calls=2))
    assert_loaded(run(described, other, num_calls=2))


def test_the_name_is_that_of_before_the_first_run(directory: Path) -> None:
    """The body may change what the key's objects look like; the next process starts from before that."""

    class Changing(torch.nn.Linear):
        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.requires_grad_(False)
            return x @ self.weight

    def body(x: torch.Tensor, net: torch.nn.Module) -> torch.Tensor:
        result: torch.Tensor = net(x) + 1
        return result

    with torch.no_grad():
        run(body, Changing(3, 3))
        assert_loaded(run(body, Changing(3, 3)))
    only_file(directory)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()),
        lambda: object.__new__(type("Opaque", (), {})),
        lambda: ByValue(object()),
        lambda: torch.Generator(DEVICE),
    ],
)
def test_objects_of_one_kind_share_a_file(directory: Path, make: Callable[[], object]) -> None:
    """Neither addresses nor the numbers that stand for objects enter the name."""
    one, other = make(), make()
    run(described, one)
    assert_loaded(run(described, other))
    only_file(directory)


def test_a_mended_helper_is_looked_at_again(tmp_path: Path) -> None:
    """A function that the body names, or gets, counts by name and code: what was refused may be recorded now."""
    text = "def helper(x):\n    return {}\ndef body(x):\n    return x * helper(x)\n"
    with pytest.warns(CaptureWarning):
        run(module_with(tmp_path, "first", text.format("x.sum().item()")).body)
    state = run(module_with(tmp_path, "mended", text.format("x.sum()")).body)
    assert state.log.counters.observations == 1
    assert state.log.counters.recordings >= 1


def test_no_address_enters_the_text() -> None:
    values = (
        relu,
        torch.nn.ReLU(),
        ByValue(object()),
        [relu],
        Colour.RED,
        type,
        torch.relu,
        ByValue.__eq__.__get__(VALUE),
    )
    leaves: list[Any] = []
    key = (_bind.key_of(tuple(values), leaves), {"x": object()}, values)
    for raw in (False, True):
        text = _store._text(key, raw=raw)
        assert "0x" not in text
        assert "relu" in text


def test_an_object_without_text_fails_no_call() -> None:
    value = Unshowable(1)
    state = run(described, value)
    assert state.log.counters.recordings >= 1


def test_order_of_a_mapping_is_part_of_the_key(directory: Path) -> None:
    """A body may go through a dict in its order; a set has none."""
    run(described, {"a": 1, "b": 2.0})
    assert run(described, {"b": 2.0, "a": 1}).log.counters.observations == 1
    assert_loaded(run(described, {"b": 2.0, "a": 1}))
    text = _store._text(frozenset(["one", "two", "three", "four"]))
    assert text.index("four") < text.index("one") < text.index("three") < text.index("two")


def test_modes_are_in_the_name(directory: Path) -> None:
    """A plan made with gradients on is one of a forward pass; it must not be found with gradients off."""
    weight = torch.ones(3, requires_grad=True)

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * weight + 1

    with torch.enable_grad():
        run(body)
    assert run(body).log.counters.recordings >= 1
    assert len(files(directory)) == 2


def test_values_of_guards_are_in_the_name(directory: Path) -> None:
    current: list[object] = []
    guards = [lambda: current[0]]
    values = (3, 4, True, "3", 3.5, (3, 4), (3, 5))
    for value in values:
        current[:] = [value]
        run(plain, guards=guards)
    assert len(files(directory)) == len(values)


def test_the_current_gpu_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    texts = []
    for rank in range(2):
        monkeypatch.setattr(torch.cuda, "current_device", lambda rank=rank: rank)
        texts.append([_store._text(torch.device("cuda", index)) for index in (rank, 5)])
    assert texts[0] == texts[1] == ["device(cuda)", "device(cuda:5)"]


# --------------------------------------------------------------------------------------------- files and shipping


def test_equal_plans_are_equal_bytes(directory: Path) -> None:
    first = run(plain)
    text = only_file(directory).read_bytes()
    only_file(directory).unlink()
    run(plain)
    assert only_file(directory).read_bytes() == text == dumps(plan_of(first)).encode()
    assert b"0x" not in text
    assert all(type(value) is str for value in json.loads(text)["fingerprint"].values())


def test_the_cache_can_be_off(directory: Path) -> None:
    with _config.patch(cache=False):
        off = run(plain)
    assert files(directory) == []
    on = run(plain)
    assert plan_of(off).fingerprint == plan_of(on).fingerprint
    with _config.patch(cache=False):
        assert run(plain).log.counters.observations == 1


def test_shipped_plans_work_without_a_cache(tmp_path: Path) -> None:
    with _config.patch(cache=False):
        plans = [plan_of(run(plain)), plan_of(run(described, 1)), plan_of(run(described, 2))]
        bare = evolve(plans[0], fingerprint={})
        assert _store.save_plans(tmp_path / "ship", [*plans, bare]) == 3
        assert run(plain).log.counters.observations == 1
        report = _store.load_plans(tmp_path / "ship")
        assert sorted(report.used) == sorted(plan.function for plan in plans)
        assert report.stale == ()
        for state in (run(plain), run(described, 1), run(described, 2)):
            assert_loaded(state)
            assert state.log.counters.recordings >= 1
        assert_stale(run(plain, max_recordings=9), "annotation")
        _store.forget_loaded()
        assert run(plain).log.counters.observations == 1


def test_a_stale_shipped_plan_gives_way_to_the_cache(tmp_path: Path) -> None:
    plan = plan_of(run(plain))
    _store.save_plans(tmp_path / "ship", [evolve(plan, fingerprint={**plan.fingerprint, "source": "another"})])
    assert len(_store.load_plans(tmp_path / "ship").used) == 1
    state = run(plain)
    assert details(state, "plan-stale") == ["source differs"]
    assert (state.log.counters.observations, state.log.counters.plans_loaded) == (0, 1)


def test_what_cannot_be_shipped_is_named(tmp_path: Path) -> None:
    ship = tmp_path / "ship"
    plan = plan_of(run(plain))
    _store.save_plans(ship, [plan])
    path = only_file(ship)
    path.rename(ship / "renamed.json")
    (ship / "damaged.json").write_text("{")
    (ship / "old.json").write_text(dumps(evolve(plan, fingerprint={**plan.fingerprint, "torch": "1.0", "rules": "x"})))
    (ship / "partial.json").write_text(dumps(evolve(plan, fingerprint={})))
    (ship / "notes.txt").write_text("not a plan")
    report = _store.load_plans(ship)
    assert report.used == (plan.function,)
    reasons = dict(report.stale)
    assert sorted(reasons) == ["damaged.json", "old.json", "partial.json"]
    assert "not JSON" in reasons["damaged.json"]
    assert reasons["old.json"] == "rules, torch differ"
    assert reasons["partial.json"] == "no fingerprint"
    with pytest.raises(FileNotFoundError):
        _store.load_plans(tmp_path / "absent")
