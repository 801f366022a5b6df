"""``python -m capture bench SCRIPT``: one program run eagerly and captured, each in a process of its own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from capture.api.report import collect
from capture.core.data import frozen
from capture.reporting.run_data import RunData, dumps, grouped, loads

_CHILD = "import sys; from capture.api.bench import child; child(*sys.argv[1:3], sys.argv[3:])"


@frozen(kw_only=True)
class Comparison:
    """The times of one program, run eagerly and captured, in seconds."""

    eager_seconds: float
    captured_seconds: float
    run: RunData
    """The data of the captured run, with the times of eager calls from the other run."""


def compare(script: Path, arguments: Sequence[str]) -> Comparison:
    """Run the program both ways. Its output goes to standard error. Raises ``RuntimeError`` where a run ends with an
    error."""
    eager_seconds, eager = _run(script, arguments, enabled=False)
    captured_seconds, captured = _run(script, arguments, enabled=True)
    eager_functions = {(function.function, function.defined_at): function for function in grouped(eager.functions)}
    functions = []
    for function in grouped(captured.functions):
        twin = eager_functions.get((function.function, function.defined_at))
        if twin is not None and twin.eager_ms is not None:
            function = attrs.evolve(function, eager_ms=twin.eager_ms, eager_timed=twin.eager_timed)
        functions.append(function)
    run = attrs.evolve(captured, functions=tuple(functions))
    return Comparison(eager_seconds=eager_seconds, captured_seconds=captured_seconds, run=run)


def _run(script: Path, arguments: Sequence[str], *, enabled: bool) -> tuple[float, RunData]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        environment = {**os.environ, "CAPTURE_ENABLED": str(int(enabled))}
        command = [sys.executable, "-c", _CHILD, str(out), str(script), *arguments]
        done = subprocess.run(command, env=environment, stdout=sys.stderr.fileno(), check=False)
        if done.returncode != 0 or not out.exists():
            raise RuntimeError(f"{script} ended with status {done.returncode} {'captured' if enabled else 'eagerly'}")
        seconds, _, text = out.read_text(encoding="utf-8").partition("\n")
        return float(seconds), loads(text)


def child(out: str, script: str, arguments: Sequence[str]) -> None:
    """In the process that ``compare`` starts: run the script as ``python SCRIPT`` does, and write the seconds and the
    data."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    begin = time.perf_counter()
    try:
        kept = runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        kept = {}
    seconds = time.perf_counter() - begin
    Path(out).write_text(f"{seconds}\n{dumps(collect())}", encoding="utf-8")
    del kept  # keeps the script's captured functions alive until here
