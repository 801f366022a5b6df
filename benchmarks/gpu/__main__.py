"""``python -m benchmarks.gpu NAME...``: run the scripts, print a table each, ``--save`` writes JSON files."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from attrs import evolve

from benchmarks.__main__ import table
from benchmarks.gpu.setting import RESULTS, Outcome, Script, Setting, environment, last_lines, save
from capture import config
from capture.reporting.tables import format_table

SCRIPTS = (
    "record", "call", "chain", "models", "decode", "coldstart", "rebind", "training", "trainmodels", "soak", "ranks",
    "generate", "scale", "compiled", "inductor", "aoti", "schedule",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a number is wrong, a bar is missed or a script fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Proofs on a GPU.")
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"of {', '.join(SCRIPTS)}, or all")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU: shows that it runs, no measurement")
    parser.add_argument("--device", help="default: cuda, with --tiny cpu")
    parser.add_argument("--save", action="store_true", help="write gpu_NAME.json")
    parser.add_argument("--results", type=Path, help="where to; default: benchmarks/results/")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of the soak; default 1,000,000")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes a side of coldstart; default 5")
    said = "of each of compiled, inductor, generate and aoti, which name what there was no time for"
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=said)
    options = parser.parse_args(arguments)
    names = SCRIPTS if options.names == ["all"] else tuple(options.names)
    unknown = [name for name in names if name not in SCRIPTS]
    if unknown:
        parser.error(f"unknown name {unknown[0]!r}; known: {', '.join(SCRIPTS)}, all")
    if options.tiny and options.save and options.results is None:
        parser.error("--tiny measures nothing: name another folder with --results to look at the file")
    setting = Setting(
        device=options.device or ("cpu" if options.tiny else "cuda"), tiny=options.tiny,
        steps=min(options.steps, 600) if options.tiny else options.steps,
        processes=1 if options.tiny else options.processes, limit=options.limit,
    )  # fmt: skip
    if not setting.on_gpu:
        torch.set_num_threads(1)
    machine = environment(setting)
    print("  ".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    folder = options.results or RESULTS
    passed = [_run(name, setting, machine, folder if options.save else None) for name in names]
    return int(not all(passed))


def _run(name: str, setting: Setting, machine: dict[str, str | int], folder: Path | None) -> bool:
    script: Script = importlib.import_module(f"benchmarks.gpu.{name}").measure
    begin = time.perf_counter()
    try:
        with config.patch(cache=False, verify="off", poison=False), torch.no_grad():
            outcome = script(setting)
    except Exception as error:  # noqa: BLE001 - the other scripts still run
        traceback.print_exc()
        outcome = Outcome(wrong=(f"{name} failed: {last_lines(error)}",))
    print(f"\n== {name}  ({time.perf_counter() - begin:.0f} s)")
    if setting.tiny:  # nothing was measured
        outcome = evolve(outcome, figures=tuple(evolve(figure, bar=None) for figure in outcome.figures))
    if outcome.rows:
        print(format_table(outcome.rows))
    if outcome.figures:
        print(table(outcome.figures))
    for line in outcome.wrong:
        print(f"*** WRONG *** {line}")
    if folder is not None:
        print(f"written to {save(name, machine, outcome, folder)}")
    sys.stdout.flush()
    return outcome.passed


if __name__ == "__main__":
    sys.exit(main())
