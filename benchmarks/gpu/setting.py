"""Shared by all scripts here: device and sizes, results, host and wall times, the saved file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import field, frozen

from benchmarks.__main__ import HERE, as_json
from benchmarks.timing import Figure, Side, undisturbed

T = TypeVar("T")
RESULTS = HERE / "results"


@frozen(kw_only=True)
class Setting:
    """``device``: of all tensors. ``steps``: of the soak. ``processes``: fresh ones for each side of the cold start.
    ``limit``: seconds for a script that can leave out the rest."""

    device: str = "cuda"
    tiny: bool = False
    steps: int = 1_000_000
    processes: int = 5
    limit: float | None = None

    def pick(self, full: T, tiny: T) -> T:
        """The size to use."""
        return tiny if self.tiny else full

    def seconds(self, full: float, tiny: float) -> float:
        """The seconds that a script may take: ``limit``, or its usual time."""
        return self.pick(full, tiny) if self.limit is None else self.limit

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on a GPU. On the CPU engine plain calls replace graphs that are captured by hand."""
        return self.device.startswith("cuda")

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.on_gpu:
            torch.cuda.synchronize()


@frozen(kw_only=True)
class Outcome:
    """The results of a script."""

    figures: tuple[Figure, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    """A table to print, with its header first."""
    details: dict[str, Any] = field(factory=dict)
    """Plain values for the file."""
    wrong: tuple[str, ...] = ()
    """Numbers that are not eager's, and parts that could not run. Any of these makes the run fail."""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong and no bar is missed."""
        return not self.wrong and all(figure.passed is not False for figure in self.figures)


def host_us(
    sides: Sequence[Side], setting: Setting, *, rounds: int = 7, calls: int = 2000, burst: int = 100
) -> list[tuple[float, ...]]:
    """Host microseconds to issue one call of every side, one tuple a round.

    Calls are issued in bursts with the device idle before each, so that the GPU never holds the host up.
    """
    for side in sides:
        for _ in range(3):
            side()
    rounds_us = []
    with undisturbed():
        for number in range(rounds):
            spent = [0.0] * len(sides)
            order = range(len(sides)) if number % 2 == 0 else range(len(sides) - 1, -1, -1)
            for _ in range(max(calls // burst, 1)):
                for index in order:
                    spent[index] += _burst_seconds(sides[index], burst, setting)
            rounds_us.append(tuple(seconds * 1e6 / (max(calls // burst, 1) * burst) for seconds in spent))
    return rounds_us


def _burst_seconds(side: Side, calls: int, setting: Setting) -> float:
    setting.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        side()
    return time.perf_counter() - begin


def wall_ms(side: Side, setting: Setting) -> float:
    """Milliseconds from an idle device to an idle device."""
    setting.synchronize()
    begin = time.perf_counter()
    side()
    setting.synchronize()
    return (time.perf_counter() - begin) * 1e3


def sides_of(rounds: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """From times of all sides for each round to times of all rounds for each side."""
    return list(zip(*rounds, strict=True))


def ratio(name: str, unit: str, above: Sequence[float], below: Sequence[float], bar: float | None) -> Figure:
    """Round by round, ``above / below``."""
    values = tuple(a / b for a, b in zip(above, below, strict=True))
    detail = f"medians {statistics.median(above):.3f} and {statistics.median(below):.3f}"
    return Figure(name=name, unit=unit, values=values, bar=bar, detail=detail)


def last_lines(error: BaseException, lines: int = 3) -> str:
    """The end of an error's text, on one line."""
    text = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return " | ".join(text[:1] + text[1:][-lines:])[:400]


def environment(setting: Setting) -> dict[str, str | int]:
    """The machine and versions that the numbers depend on; no names of hosts, users or folders."""
    name = torch.cuda.get_device_name() if setting.on_gpu else "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "none",
        "python": platform.python_version(),
        "commit": os.environ.get("COMMIT") or _output_of("git", "rev-parse", "--short=12", "HEAD") or "unknown",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _output_of(*command: str) -> str:
    """First line that a command prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.split("\n")), "").strip()


def save(name: str, machine: dict[str, str | int], outcome: Outcome, folder: Path) -> Path:
    """Write ``gpu_<name>.json``: machine, medians and spreads, tables."""
    content = {
        **as_json(machine, outcome.figures),
        "rows": [list(row) for row in outcome.rows],
        "details": outcome.details,
        "wrong": list(outcome.wrong),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu_{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


Script = Callable[[Setting], Outcome]


@contextmanager
def deterministic() -> Iterator[None]:
    """Use torch's deterministic kernels where it has them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
