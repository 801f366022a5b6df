"""``make demo``: four programs, eager and captured in turn: a table, a plot and a report.

Whole updates of SAC and of an LSTM policy, sampling of a normalizing flow, decoding with a small GPT. The numbers have
to be eager's bit for bit; the exit status is 1 if they are not, or if something was not replayed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from capture import Recordings, capture, config, recordings, report
from capture.engines.registry import backend_for
from examples import plot
from examples.workloads import WORKLOADS, Pair

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "build" / "demo.png"
REPORT = ROOT / "build" / "demo.html"


class Options(NamedTuple):
    """How many calls a round, and how many rounds; the first one warms up and is not counted."""

    seconds: float
    rounds: int


FULL, QUICK = Options(seconds=0.35, rounds=9), Options(seconds=0.02, rounds=2)


class Result(NamedTuple):
    """Medians over the rounds, in microseconds a call, and whether all numbers were the same."""

    title: str
    eager: float
    captured: float
    gain: float
    same: bool
    counts: Recordings
    function: object
    """The captured function, which is kept alive so that the report has it."""


def choose_device() -> torch.device:
    """CUDA if there is a GPU and an engine for it, else the CPU."""
    cuda = torch.cuda.is_available() and backend_for(torch.device("cuda")) is not None
    return torch.device("cuda" if cuda else "cpu")


def timed(pair: Pair, program: object, calls: int, seed: int) -> tuple[float, Tensor]:
    """Microseconds a call, and the last result. Draws start from the seed."""
    assert callable(program)
    torch.manual_seed(seed)
    begin = time.perf_counter()
    out = pair.run(program, calls).clone()
    out.sum().item()  # waits for the device
    return (time.perf_counter() - begin) / calls * 1e6, out


def measure(pair: Pair, options: Options) -> Result:
    """Time both in turn for some rounds, each with as many calls as eager makes in the time given."""
    captured = capture(pair.captured, static=pair.static)
    with torch.set_grad_enabled(pair.with_gradients):
        for seed in range(2):  # warm up: watched, recorded
            first = [timed(pair, program, 4, seed) for program in (pair.eager, captured)]
            same = torch.equal(first[0][1], first[1][1])
        calls = max(4, min(200, int(options.seconds * 1e6 / first[0][0])))
        rounds = []
        for seed in range(options.rounds):
            eager_us, expected = timed(pair, pair.eager, calls, seed)
            captured_us, out = timed(pair, captured, calls, seed)
            same &= torch.equal(expected, out)
            rounds.append((eager_us, captured_us))
        counts = recordings(captured)
        with config.patch(enabled=False):  # eager calls of the captured function, for the report to compare with
            timed(pair, captured, 4, 0)
    medians = [statistics.median(side) for side in zip(*rounds, strict=True)]
    return Result(pair.title, medians[0], medians[1], medians[0] / medians[1], same, counts, captured)


def table(results: list[Result]) -> str:
    """The results as a table with a row for each program."""
    lines = [f"{'program':<24}{'eager':>12}{'captured':>12}{'gain':>8}  same numbers  replays  eager calls"]
    for result in results:
        counts, same = result.counts, "yes" if result.same else "NO"
        times = f"{result.eager:>9.0f} us{result.captured:>9.0f} us{result.gain:>7.1f}x"
        lines.append(f"{result.title:<24}{times}  {same:<12}  {counts.replays:<7}  {counts.eager_calls}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, and write plot and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few calls: the numbers say nothing about speed")
    options = QUICK if parser.parse_args(arguments).quick else FULL
    torch.set_num_threads(1)  # operators this small gain nothing from more, and lose much where cores are busy
    torch.manual_seed(0)
    device = choose_device()
    pairs = [make(device) for make in WORKLOADS]
    print(f"eager and captured in turn on {device}, medians of {options.rounds} rounds\n", flush=True)
    results = [measure(pair, options) for pair in pairs]
    print(table(results))
    PICTURE.parent.mkdir(exist_ok=True)
    bars = {result.title: (result.eager, result.captured) for result in results}
    plot.bars(PICTURE, f"Time of one call on {device}, torch {torch.__version__.partition('+')[0]}", bars)
    report(html=REPORT)
    print(f"\nas a picture: {PICTURE.relative_to(ROOT)}; what became of each call: {REPORT.relative_to(ROOT)}")
    return 0 if all(result.same and result.counts.replays for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
