"""Run programs of other libraries beside eager, each in a process of its own, and write down how they do.

``python -m tests.world.run [NAME ...]`` with the interpreter that has the libraries. A program is built twice from the
same seed, once with its step captured, and both take the same steps: equal bit for bit, in what they give and in what
they raise. Then a switch of the library is thrown in both, and they go on. ``replayed`` is the share of calls that were
replayed after the first ten steps and before the first switch.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import importlib
import json
import os
import pkgutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

STEPS, AFTER_SWITCH = 200, 8
FIRST = 10  # steps that do not count, in which a function is watched and recorded
PATIENCE = 60  # seconds of a processor for the first round; a program that needs more takes fewer steps
SECONDS = 600  # of one program
Program = Callable[[Callable[[Any], Any]], Any]


def programs() -> dict[str, Program]:
    """All programs, by ``library.name``. Imports what they need."""
    from tests.world import programs as package

    return {
        f"{module.name}.{name}": program
        for module in pkgutil.iter_modules(package.__path__)
        for name, program in importlib.import_module(f"tests.world.programs.{module.name}").PROGRAMS.items()
    }


def names() -> list[str]:
    """The names of all programs, found without importing a library."""
    found = []
    for path in sorted((Path(__file__).parent / "programs").glob("[a-z]*.py")):
        table = path.read_text().rpartition("PROGRAMS = {")[2]
        own = [line.split('"')[1] for line in table.splitlines() if line.startswith('    "')]
        found += [f"{path.stem}.{name}" for name in own]
    return found


def bits(value: Any) -> Any:
    """All that makes two results equal bit for bit."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        plain = value.detach().to("cpu").resolve_conj().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return str(value.dtype), tuple(value.shape), value.requires_grad, raw
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.strides, value.tobytes()
    if isinstance(value, dict):
        return {key: bits(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(member) for member in value]
    if hasattr(value, "__dict__") and not callable(value):
        return type(value).__name__, {key: bits(member) for key, member in vars(value).items()}
    return repr(value)


def _build(program: Program, wrap: Callable[[Any], Any]) -> tuple[Callable[[int], Any], list[Callable[[], Any]]]:
    import torch

    torch.manual_seed(0)
    made = program(wrap)
    return made if isinstance(made, tuple) else (made, [])


def _clock() -> float:
    """Seconds of this process's processor; of the wall where kernels run, once they are done."""
    import torch

    if not torch.cuda.is_initialized():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _take(step: Callable[[int], Any], number: int) -> tuple[Any, float]:
    import torch

    torch.manual_seed(number)
    begin = _clock()
    try:
        result = step(number)
    except Exception as error:  # noqa: BLE001 - what both raise is equal, too
        return ("raised", type(error).__name__, str(error)[:300]), _clock() - begin
    seconds = _clock() - begin
    return bits(result), seconds


def _program(name: str, device: str) -> Program:
    import torch

    from tests.world import on_device

    torch.set_num_threads(1)
    library, _, own = name.partition(".")
    if device != "cpu":
        on_device.move_programs_to(device)
    program: Program = importlib.import_module(f"tests.world.programs.{library}").PROGRAMS[own]
    if device == "cpu":
        return program

    def there(wrap: Callable[[Any], Any]) -> Any:
        with torch.device(device):
            return program(wrap)

    return there


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time has the accelerator: several would wait for each other's time slices."""
    with (Path(tempfile.gettempdir()) / "capture-world.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_one(name: str, device: str = "cpu", *, timed: bool = False) -> dict[str, Any]:
    """Run one program in this process. Where kernels run, eager itself may give other bits each time: values count only
    if a second eager twin gives what the first gives; else ``unsteady`` is the step where it did not. ``timed``: one
    process at a time takes fewer steps, without that twin."""
    from capture import CaptureWarning, capture

    program = _program(name, device)
    made: list[Any] = []

    def captured(target: Any) -> Any:
        made.append(capture(target))
        return made[-1]

    result: dict[str, Any] = {"program": name, "equal": True, "differs": []}

    def compare(number: int, round_number: int) -> tuple[float, float]:
        (expected, theirs), (got, ours) = _take(eager, number), _take(mine, number)
        if again is not None and not result.get("unsteady") and _take(again, number)[0] != expected:
            result["unsteady"] = number
        if got != expected and "unsteady" not in result:
            result["equal"] = False
            what = str(got)[:300] if isinstance(got, tuple) and got[:1] == ("raised",) else "other values"
            result["differs"].append(f"round {round_number}, step {number}: {what}")
        if isinstance(expected, tuple) and expected[:1] == ("raised",):
            result["raises"] = str(expected)
        return ours, theirs

    with _alone() if timed else contextlib.nullcontext(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CaptureWarning)
        (eager, switches), (mine, mine_too) = _build(program, lambda target: target), _build(program, captured)
        again, more = (None, []) if device == "cpu" or timed else _build(program, lambda target: target)
        times, before, begin = [], (0, 0), time.process_time()
        for number in range(STEPS // 4 if timed else STEPS):
            if number == FIRST:
                before = _counted(made)
            times.append(compare(number, 0))
            if time.process_time() - begin > PATIENCE and number >= 2 * FIRST:
                break
        after = _counted(made)
        for round_number, switched in enumerate(zip(switches, mine_too, more or switches, strict=True), 1):
            for switch in switched[: 2 if again is None else 3]:
                switch()
            for at in range(AFTER_SWITCH):
                compare(STEPS + round_number * AFTER_SWITCH + at, round_number)
    replays, bodies = after[0] - before[0], after[1] - before[1]
    ours, theirs = (statistics.median(column) for column in zip(*times[len(times) // 2 :], strict=True))
    if "unsteady" in result:  # it may have been before, unseen
        result["equal"], result["differs"] = True, []
    result["steps"], result["differs"] = len(times), result["differs"][:3]
    result["replayed"] = round(replays / max(replays + bodies, 1), 3)
    result["time"] = [round(ours / theirs, 2), round((ours - theirs) * 1e6)]
    findings = {
        str(warning.message).partition("\n")[0] for warning in told if "Capture" in type(warning.message).__name__
    }
    result["findings"] = sorted(findings)
    return result


def run_compiled(name: str, device: str) -> dict[str, Any]:
    """The time of a step that ``torch.compile(mode="reduce-overhead")`` compiled, beside eager's."""
    import torch

    program = _program(name, device)
    (eager, _), (mine, _) = (
        _build(program, lambda target: target),
        _build(program, lambda target: torch.compile(target, mode="reduce-overhead")),
    )
    for number in range(2 * FIRST):  # it compiles, and captures
        _take(mine, number)
    with _alone():
        times = [(_take(mine, number)[1], _take(eager, number)[1]) for number in range(2 * FIRST, STEPS // 4)]
    ours, theirs = (statistics.median(column) for column in zip(*times[FIRST:], strict=True))
    return {"program": name, "equal": True, "differs": [], "time": [round(ours / theirs, 2), round(ours * 1e6)]}


def _counted(made: list[Any]) -> tuple[int, int]:
    """Replays, and runs of bodies, of all functions that were captured."""
    from capture.api.decorator import captured_states

    counts = [state.log.counters for one in made for state in captured_states(one)]
    return sum(one.replays for one in counts), sum(one.body_runs for one in counts)


def _in_process(name: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.world.run", "--one", name, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CAPTURE_CACHE": "0", "HF_HUB_OFFLINE": "1"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"program": name, "equal": False, "differs": [f"took more than {SECONDS} s"]}
    last = ended.stdout.strip().rpartition("\n")[2]
    if ended.returncode or not last.startswith("{"):
        return {"program": name, "equal": False, "differs": [f"exit {ended.returncode}: {ended.stderr[-600:]}"]}
    outcome: dict[str, Any] = json.loads(last)
    return outcome


def _show(outcome: dict[str, Any]) -> None:
    state = "equal" if outcome["equal"] else "DIFFERS"
    replayed = f"replayed {outcome.get('replayed', 0):5} time {outcome.get('time')}"
    print(f"{outcome['program']:44} {state:8} {replayed}", flush=True)
    raised = [f"both raise {outcome['raises']}"] if "raises" in outcome else []
    for line in (*outcome["differs"], *raised, *outcome.get("findings", ())):
        print(f"    {line}", flush=True)


def main() -> int:
    """Exit status 1 where a program differs from eager."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all programs without one")
    parser.add_argument("--one", help="run this program here, and print what is found")
    parser.add_argument("--results", type=Path, help="where to write the list")
    parser.add_argument("--jobs", type=int, default=1, help="how many programs run at a time; more disturb the times")
    parser.add_argument("--device", default="cpu", help="where the programs make their tensors")
    parser.add_argument("--timed", action="store_true", help="a few steps, one program at a time has the device")
    parser.add_argument("--compiled", action="store_true", help="time torch.compile's reduce-overhead instead")
    given = parser.parse_args()
    if given.one:
        compiled = given.compiled
        done = (
            run_compiled(given.one, given.device) if compiled else run_one(given.one, given.device, timed=given.timed)
        )
        print(json.dumps(done))
        return 0
    options = ["--device", given.device, *[f"--{name}" for name in ("timed", "compiled") if getattr(given, name)]]
    chosen = [name for name in names() if not given.names or any(part in name for part in given.names)]
    results = []
    with ThreadPool(given.jobs) as pool:
        for outcome in pool.imap(lambda name: _in_process(name, *options), chosen):
            results.append(outcome)
            _show(outcome)
    if given.results:
        # times are of one machine; those of an accelerator are what the list is for
        left_out = {"time"} if given.device == "cpu" else set()
        kept = [{name: done[name] for name in done if name not in left_out} for done in results]
        versions = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "programs": kept}
        given.results.write_text(json.dumps(versions, indent=1) + "\n")
    return int(not all(done["equal"] for done in results))


if __name__ == "__main__":
    sys.exit(main())
