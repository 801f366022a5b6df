"""A server with all that goes wrong in one, for seconds, and for two minutes: see ``benchmarks.server``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def served(tmp_path: Path, seconds: float, threads: int, sizes: int) -> dict[str, Any]:
    """The measurements of a server on the CPU, in a process of its own, whose main thread takes signals."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.server", "--seconds", str(seconds), "--threads", str(threads)]
    command += ["--sizes", str(sizes), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds * 4 + 120, check=False)
    assert out.exists(), done.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_no_answer_is_wrong(tmp_path: Path) -> None:
    found = served(tmp_path, 6, 3, 20)
    assert found["requests"] >= 8  # on a busy machine few are answered
    assert (found["wrong"], found["unexpected"]) == ([], [])


@pytest.mark.slow
def test_nothing_grows(tmp_path: Path) -> None:
    """With sizes that soon have all been met: memory, objects and latency stay, and most calls are replayed."""
    found = served(tmp_path, 120, 3, 3)
    assert (found["wrong"], found["unexpected"]) == ([], [])
    assert found["resident"][9] < found["resident"][5] * 1.05  # on a slow machine all sizes have been met by then
    assert found["objects"][9] < found["objects"][5] * 1.15  # keys that come for the first time late, on a slow one
    assert found["p99_last_ms"] < found["p99_second_ms"] * 3  # other work on the machine doubles it
    assert found["hot_replayed"] > 0.9, found["misses"]
