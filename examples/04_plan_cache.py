"""The plan cache: a second process finds the plan on disk and records at once, without a watched run before it.

On by default, in the user's cache directory; here in a temporary one. `python -m capture plan FILE` prints a plan.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from capture import capture, config, recordings


@capture
def normalize(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def three_calls(process: str, directory: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad(), config.patch(cache=True, cache_dir=directory):
        last = [normalize(torch.randn(4, 16)) for _ in range(3)][-1]
    done = recordings(normalize)
    print(f"{process}: observations {done.observations}, recordings {done.recordings}, replays {done.replays}")
    print(f"  plans loaded {done.plans_loaded}, first number {last[0, 0]:.6f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:  # the second process: this file again
        three_calls("second process", Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            three_calls("first process", Path(directory))
            print("plans on disk:", sum(len(files) for _, _, files in os.walk(directory)), flush=True)
            subprocess.run([sys.executable, __file__, directory], check=True)
            print("gained: the second process made no watched run; why: the plan of the first one was on disk")
