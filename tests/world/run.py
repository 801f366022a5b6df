"""Run programs of other libraries beside eager, each in a process of its own, and write down how they do.

``python -m tests.world.run [NAME ...]`` with the interpreter that has the libraries. A program is built twice from the
same seed, once with its step captured, and both take the same steps: equal bit for bit, in what they give and in what
they raise. Then a switch of the library is thrown in both, and they go on.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, AFTER_SWITCH = 20, 8
SECONDS = 300  # of one program
Program = Callable[[Callable[[Any], Any]], Any]


def programs() -> dict[str, Program]:
    """All of them, by ``library.name``. Imports what they need."""
    from tests.world import programs as package

    return {
        f"{one.name}.{name}": program
        for one in pkgutil.iter_modules(package.__path__)
        for name, program in importlib.import_module(f"tests.world.programs.{one.name}").PROGRAMS.items()
    }


def names() -> list[str]:
    """The same without importing a library."""
    found = []
    for path in sorted((Path(__file__).parent / "programs").glob("[a-z]*.py")):
        table = path.read_text().rpartition("PROGRAMS = {")[2]
        own = [line.split('"')[1] for line in table.splitlines() if line.startswith('    "')]
        found += [f"{path.stem}.{name}" for name in own]
    return found


def bits(value: Any) -> Any:
    """All that makes two results equal bit for bit."""
    import torch

    if isinstance(value, torch.Tensor):
        plain = value.detach().to("cpu").resolve_conj().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return str(value.dtype), tuple(value.shape), value.requires_grad, raw
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(one) for one in value]
    if hasattr(value, "__dict__") and not callable(value):
        return type(value).__name__, {key: bits(one) for key, one in vars(value).items()}
    return repr(value)


def _build(program: Program, wrap: Callable[[Any], Any]) -> tuple[Callable[[int], Any], list[Callable[[], Any]]]:
    import torch

    torch.manual_seed(0)
    made = program(wrap)
    return made if isinstance(made, tuple) else (made, [])


def _take(step: Callable[[int], Any], number: int) -> tuple[Any, float]:
    import torch

    torch.manual_seed(number)
    begin = time.perf_counter()
    try:
        found = step(number)
    except Exception as error:  # noqa: BLE001 - what both raise is equal, too
        return ("raised", type(error).__name__, str(error)[:300]), time.perf_counter() - begin
    seconds = time.perf_counter() - begin
    return bits(found), seconds


def run_one(name: str) -> dict[str, Any]:
    """One program in this process."""
    import torch

    from capture import capture
    from capture.api.decorator import captured_states

    torch.set_num_threads(1)
    library, _, own = name.partition(".")
    program = importlib.import_module(f"tests.world.programs.{library}").PROGRAMS[own]
    made: list[Any] = []

    def captured(target: Any) -> Any:
        made.append(capture(target))
        return made[-1]

    result: dict[str, Any] = {"program": name, "equal": True, "differs": []}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        (eager, switches), (mine, mine_too) = _build(program, lambda target: target), _build(program, captured)
        number, times = 0, []
        for round_number, (one, other) in enumerate([(None, None), *zip(switches, mine_too, strict=True)]):
            if one is not None and other is not None:
                one()
                other()
            for _ in range(STEPS if one is None else AFTER_SWITCH):
                expected, theirs = _take(eager, number)
                got, ours = _take(mine, number)
                if got != expected:
                    result["equal"] = False
                    what = str(got)[:300] if isinstance(got, tuple) and got[:1] == ("raised",) else "other values"
                    result["differs"].append(f"round {round_number}, step {number}: {what}")
                if isinstance(expected, tuple) and expected[:1] == ("raised",):
                    result["raises"] = str(expected)
                if round_number == 0 and number >= STEPS // 2:
                    times.append((ours, theirs))
                number += 1
    states = [state for one in made for state in captured_states(one)]
    counts = [state.log.counters for state in states]
    replays, bodies = sum(one.replays for one in counts), sum(one.body_runs for one in counts)
    ours, theirs = (sorted(one)[len(one) // 4] for one in zip(*times, strict=True))  # others use the machine, too
    result["differs"] = result["differs"][:3]
    result["replayed"] = round(replays / max(replays + bodies, 1), 3)
    result["time"] = round(ours / theirs, 3)
    found = {str(one.message).partition("\n")[0] for one in told if "Capture" in type(one.message).__name__}
    result["findings"] = sorted(found)
    return result


def _in_process(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.world.run", "--one", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CAPTURE_CACHE": "0", "HF_HUB_OFFLINE": "1"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"program": name, "equal": False, "differs": [f"took more than {SECONDS} s"]}
    last = ended.stdout.strip().rpartition("\n")[2]
    if ended.returncode or not last.startswith("{"):
        return {"program": name, "equal": False, "differs": [f"exit {ended.returncode}: {ended.stderr[-600:]}"]}
    found: dict[str, Any] = json.loads(last)
    return found


def main() -> int:
    """Exit status 1 where a program differs from eager."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all programs without one")
    parser.add_argument("--one", help="run this program here, and print what is found")
    parser.add_argument("--results", type=Path, help="where to write the list")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_one(given.one)))
        return 0
    results = []
    for name in names():
        if given.names and not any(part in name for part in given.names):
            continue
        found = _in_process(name)
        results.append(found)
        state = "equal" if found["equal"] else "DIFFERS"
        print(f"{name:44} {state:8} replayed {found.get('replayed', 0):5} time {found.get('time', 0):6}", flush=True)
        raised = [f"both raise {found['raises']}"] if "raises" in found else []
        for line in (*found["differs"], *raised, *found.get("findings", ())):
            print(f"    {line}", flush=True)
    if given.results:
        versions = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "programs": results}
        given.results.write_text(json.dumps(versions, indent=1) + "\n")
    return int(not all(one["equal"] for one in results))


if __name__ == "__main__":
    sys.exit(main())
