"""Names of plan files, equal bytes for equal plans, and plans that are shipped."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from typing_extensions import override

from capture.core import config
from capture.core.errors import CaptureWarning
from capture.core.plan import dumps
from capture.key import signature
from capture.plan_cache import store
from capture.plan_cache.locations import portable
from tests.support.device import DEVICE
from tests.support.plans import (
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
    ("torch.float32", torch.float32), (slice(1), slice(2)), (relu, gelu),
    (("a", "b"), ("a, b",)), (torch.Size([2]), (2,)), (torch.nn.ReLU(), torch.nn.Tanh()),
    (torch.nn.ReLU().eval(), torch.nn.ReLU()), (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)),
    (torch.ones(2), torch.ones(3)), (torch.ones(2), torch.ones(2, dtype=torch.float64)), (range(2), range(3)),
]  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=lambda value: repr(value).split(" at 0x")[0][:20])
def test_different_arguments_have_different_files(directory: Path, one: object, other: object) -> None:
    run(described, one, num_calls=2)
    run(described, other, num_calls=2)
    assert len(files(directory)) == 2
    assert_loaded(run(described, one, num_calls=2))
    assert_loaded(run(described, other, num_calls=2))


def test_the_name_is_that_of_before_the_first_run(directory: Path) -> None:
    """The body may change what the key's objects look like; the next process starts from before that, with the plan of
    that key. What they look like afterwards is another key, with a plan of its own."""

    class Changing(torch.nn.Linear):
        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.requires_grad_(False)
            return x @ self.weight

    def body(x: torch.Tensor, net: torch.nn.Module) -> torch.Tensor:
        result: torch.Tensor = net(x) + 1
        return result

    with torch.no_grad():
        before = details(run(body, Changing(3, 3)), "plan")[0]
        names = [file.name for file in files(directory)]
        net = Changing(3, 3)
        state = run(body, net)
    assert state.log.counters.observations == 0
    assert state.log.counters.replays
    assert not net.weight.requires_grad
    assert len(names) == 2
    assert details(state, "plan-loaded")[0] == before.rpartition(" ")[2]
    assert set(details(state, "plan-loaded")) <= set(names)
    assert details(state, "plan-stale") == []
    assert [file.name for file in files(directory)] == names


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
    first, second = make(), make()
    run(described, first)
    assert_loaded(run(described, second))
    only_file(directory)


def test_a_mended_helper_is_looked_at_again(tmp_path: Path) -> None:
    """A function that the body names, or gets, counts by name and code: what was refused may be recorded now."""
    text = "import numpy as np\n\ndef helper(x):\n    return {}\ndef body(x):\n    return x * helper(x)\n"
    with pytest.warns(CaptureWarning):
        run(module_with(tmp_path, "first", text.format("float(np.from_dlpack(x.sum().cpu()))")).body)
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
    leaves = signature.Leaves()
    leaves.opens = False
    key = (signature.key_of(tuple(values), leaves), {"x": object()}, values)
    for raw in (False, True):
        text = store._text(key, raw=raw)
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
    text = store._text(frozenset(["one", "two", "three", "four"]))
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
        texts.append([store._text(torch.device("cuda", index)) for index in (rank, 5)])
    assert texts[0] == texts[1] == ["device(cuda)", "device(cuda:5)"]


# --------------------------------------------------------------------------------------------- files and shipping


def test_equal_plans_are_equal_bytes(directory: Path) -> None:
    first = run(plain)
    text = only_file(directory).read_bytes()
    only_file(directory).unlink()
    run(plain)
    assert only_file(directory).read_bytes() == text == dumps(portable(plan_of(first))).encode()
    assert b"0x" not in text
    assert all(type(value) is str for value in json.loads(text)["fingerprint"].values())


def test_the_cache_can_be_off(directory: Path) -> None:
    with config.patch(cache=False):
        off = run(plain)
    assert files(directory) == []
    on = run(plain)
    assert plan_of(off).fingerprint == plan_of(on).fingerprint
    with config.patch(cache=False):
        assert run(plain).log.counters.observations == 1


def test_shipped_plans_work_without_a_cache(tmp_path: Path) -> None:
    with config.patch(cache=False):
        plans = [plan_of(run(plain)), plan_of(run(described, 1)), plan_of(run(described, 2))]
        bare = evolve(plans[0], fingerprint={})
        assert store.save_plans(tmp_path / "ship", [*plans, bare]) == 3
        assert run(plain).log.counters.observations == 1
        report = store.load_plans(tmp_path / "ship")
        assert sorted(report.used) == sorted(plan.function for plan in plans)
        assert report.stale == ()
        for state in (run(plain), run(described, 1), run(described, 2)):
            assert_loaded(state)
            assert state.log.counters.recordings >= 1
        assert_stale(run(plain, max_recordings=9), "annotation")
        store.forget_loaded()
        assert run(plain).log.counters.observations == 1


def test_a_stale_shipped_plan_gives_way_to_the_cache(tmp_path: Path) -> None:
    plan = plan_of(run(plain))
    store.save_plans(tmp_path / "ship", [evolve(plan, fingerprint={**plan.fingerprint, "source": "another"})])
    assert len(store.load_plans(tmp_path / "ship").used) == 1
    state = run(plain)
    assert details(state, "plan-stale") == ["source differs"]
    assert (state.log.counters.observations, state.log.counters.plans_loaded) == (0, 1)


def test_what_cannot_be_shipped_is_named(tmp_path: Path) -> None:
    ship = tmp_path / "ship"
    plan = plan_of(run(plain))
    store.save_plans(ship, [plan])
    path = only_file(ship)
    path.rename(ship / "renamed.json")
    (ship / "damaged.json").write_text("{")
    (ship / "old.json").write_text(dumps(evolve(plan, fingerprint={**plan.fingerprint, "torch": "1.0", "rules": "x"})))
    (ship / "partial.json").write_text(dumps(evolve(plan, fingerprint={})))
    (ship / "notes.txt").write_text("not a plan")
    report = store.load_plans(ship)
    assert report.used == (plan.function,)
    reasons = dict(report.stale)
    assert sorted(reasons) == ["damaged.json", "old.json", "partial.json"]
    assert "not JSON" in reasons["damaged.json"]
    assert reasons["old.json"].startswith("rules, torch differ (CG102, ")
    assert reasons["partial.json"] == "no fingerprint"
    with pytest.raises(FileNotFoundError):
        store.load_plans(tmp_path / "absent")
