"""The examples, the demo and the benchmarks run and print what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageColor

from benchmarks import __main__ as command
from benchmarks import memory, overhead, replay
from benchmarks.timing import QUICK, Figure, alternate
from capture import config
from examples import plot
from examples.workloads import WORKLOADS
from tests.support.processes import python_path, run_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

EXPECTED = {
    "01_function.py": (
        "equal to eager: True",
        "calls: 10, runs of the body: 2",
        "__main__.score: 10 calls: 8 replayed, 1 recorded, 1 watched; 1 recording",
        "another scale: True",
        "another weight: True - rebinds: 1",
    ),
    "02_method.py": (
        "equal to eager: True",
        "count: 8 - count of the copy: 0",
        "__main__.RunningMean.forward: 8 calls: 6 replayed, 1 recorded, 1 watched; 1 recording",
        "the copy: __main__.RunningMean.forward: 0 calls; 0 recordings",
    ),
    "03_loop_with_marks.py": (
        "equal to eager: True",
        "__main__.body: 40 calls: 36 replayed, 2 recorded, 1 watched, 1 warm-up; 2 recordings",
        "__main__.head: 20 calls: 17 replayed, 2 recorded, 1 watched; 2 recordings",
    ),
    "04_plan_cache.py": (
        "first process: observations 1, recordings 1, replays 1",
        "plans on disk: 1",
        "second process: observations 0, recordings 1, replays 2",
    ),
    "05_explain.py": (
        "before: eager ['CG201']",
        "after:  record []",
        "same numbers either way: True",
        "eager calls: 4 against 0",
    ),
    "06_train_a_block.py": (
        "same losses as eager: True",
        "__main__.Block.forward: 59 calls: 54 replayed, 2 recorded, 3 watched; 2 recordings",
    ),
    "07_micro_batches.py": (
        "same losses as eager: True",
        "__main__.Learner.gradients: 80 calls: 78 replayed, 1 recorded, 1 watched; 1 recording",
        "__main__.Learner.update: 20 calls: 17 replayed, 1 recorded, 2 watched; 1 recording",
    ),
    "09_buckets.py": (
        "recorded before the first request: 4",
        "as eager: True",
        "replays: 6 - eager calls: 0",
    ),
    "10_actor_critic.py": (
        "same losses as eager: True",
        "same weights as eager: True",
        "examples.workloads.SoftActorCritic.update: 20 calls: 17 replayed, 1 recorded, 2 watched; 1 recording",
    ),
    "11_flow_sampling.py": (
        "same samples as eager: True",
        "all different: True",
        "8 replays",
    ),
    "12_values_on_the_host.py": (
        "equal to eager: True",
        "noted: ['CG201']",
        "replays: 38 - eager calls: 0",
    ),
    "13_serving_engine.py": (
        "recorded before the first request: 6",
        "the same tokens as eager: True",
        "batch sizes: 31 - recordings: 6",
        "later on, most steps replay: True",
    ),
    "14_islands.py": (
        "equal to eager: True - noted alike: True",
        "replays: 18 - eager calls: 0",
        "segments of a replay: 2",
    ),
}


IN_TWO_PROCESSES = {
    "08_several_processes.py": (
        "ddp: same losses as eager in 2 processes",
        "fsdp: same losses as eager in 2 processes",
        "tensor: same losses as eager in 2 processes",
        "both: same losses as eager in 2 processes",
    ),
}


def run(file: str, *arguments: str, torchrun: bool = True) -> list[str]:
    """Lines that an example prints, in a process of its own, without the user's plan cache."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "CAPTURE_CACHE": "0"}
    if torchrun and file in IN_TWO_PROCESSES:
        starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [sys.executable, *starter, str(EXAMPLES / file), *arguments],
            env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    else:
        done = run_python(EXAMPLES / file, *arguments, env=environment)

    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stdout + done.stderr

    return done.stdout.splitlines()


def test_every_numbered_example_is_checked_here() -> None:
    assert sorted([*EXPECTED, *IN_TWO_PROCESSES]) == sorted(path.name for path in EXAMPLES.glob("[0-9]*.py"))


@pytest.mark.one_in(24)
@pytest.mark.parametrize("file", sorted(EXPECTED))
def test_an_example_prints_what_it_promises(file: str) -> None:
    printed = run(file)

    assert [line for line in EXPECTED[file] if line not in printed] == [], "\n".join(printed)


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(IN_TWO_PROCESSES))
def test_an_example_of_two_processes(file: str) -> None:
    printed = run(file)

    assert [line for line in IN_TWO_PROCESSES[file] if line not in printed] == [], "\n".join(printed)
    counted = [line for line in printed if line.endswith("; 1 recording") and " eager" not in line]
    assert len(counted) == len(IN_TWO_PROCESSES[file]), "\n".join(printed)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("file", sorted(EXPECTED))
def test_an_example_says_what_it_gained_and_why(file: str) -> None:
    text = (EXAMPLES / file).read_text(encoding="utf-8")
    assert "gained: " in text or "print(gain(" in text
    assert "why: " in text


def test_an_example_of_two_processes_explains_itself() -> None:
    assert any("torchrun --nproc-per-node 2" in line for line in run("08_several_processes.py", torchrun=False))


@pytest.mark.slow
def test_the_demo_shows_a_table_a_picture_and_a_report() -> None:
    printed = run("demo.py", "--quick")
    rows = [line.split("  ") for line in printed[3 : 3 + len(WORKLOADS)]]
    assert len(rows) == len(WORKLOADS)
    for row in rows:
        cells = [cell.strip() for cell in row if cell.strip()]
        assert cells[-3] == "yes", row  # the same numbers
        assert int(cells[-2]) > 0, row  # replays
        assert cells[-1] == "0", row  # eager calls
    page = (ROOT / "build" / "demo.html").read_text(encoding="utf-8")
    assert page.count('"eager_ms": null') == 0, "no gain is shown"
    with Image.open(ROOT / "build" / "demo.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 16) or []}
    assert {ImageColor.getrgb(colour) for colour in plot.COLOURS.values()} <= colours  # both bars are seen


def measured(group: str) -> Iterable[Figure]:
    match group:
        case "replay":
            return replay.measure(QUICK)
        case "overhead":
            return overhead.measure(QUICK, many=20)
        case _:
            return memory.measure(QUICK)


@pytest.fixture
def no_plan_cache() -> Iterator[None]:
    with config.patch(cache=False):
        yield


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("no_plan_cache")
@pytest.mark.parametrize("group", sorted(command.GROUPS))
def test_a_benchmark_group_runs(group: str) -> None:
    """Nothing is said about speed here: the repeats are too few."""
    figures = list(measured(group))

    assert figures
    assert all(figure.bar is not None and figure.minimum <= figure.median for figure in figures)
    assert all(figure.name in command.table(figures) for figure in figures)
    assert json.loads(json.dumps(command.as_json(command.environment(), figures)))["figures"][0]["unit"]


def test_a_figure_is_the_median_of_its_rounds() -> None:
    figure = Figure(name="x", unit="us", values=(4.0, 1.0, 2.0, 3.0, 100.0), bar=3.0)

    assert (figure.median, figure.minimum, figure.iqr, figure.passed) == (3.0, 1.0, 2.0, True)


def test_sides_are_timed_in_every_round() -> None:
    calls = [0, 0]

    def side(number: int) -> None:
        calls[number] += 1

    rounds = alternate([lambda: side(0), lambda: side(1)], QUICK)

    assert [len(times) for times in rounds] == [2] * QUICK.rounds
    assert all(time > 0 for times in rounds for time in times)
    assert min(calls) > QUICK.rounds


def test_results_are_named_after_the_machine_and_not_its_owner() -> None:
    machine = {**command.environment(), "cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "threads": 1, "torch": "2.13.0+cpu"}

    assert command.file_name(machine) == "cpu-intel-xeon-1t-torch-2.13.0-cpu"
