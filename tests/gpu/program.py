"""A program that runs under one allocator setting, as ``python -m tests.gpu.program``: prints OK if all values are
eager's."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from capture import CaptureWarning, capture, config, mark_step_begin, recordings, report
from tests.gpu.support import DEVICE, ON_CUDA, rand, same

STEPS = 100

Functions = dict[str, Callable[..., Any]]
Step = Callable[[int], list[Tensor]]


def f(x: Tensor) -> Tensor:
    """The first function of the chain."""
    return torch.tanh(x) * 2


def g(x: Tensor) -> tuple[Tensor, Tensor]:
    """The second function of the chain, with two results."""
    return x + 1, x.sum(0)


def h(x: Tensor) -> Tensor:
    """A branch that draws."""
    return functional.dropout(x, 0.5)


def update(x: Tensor, state: Tensor) -> Tensor:
    """Writes a state in place."""
    state.mul_(0.5).add_(x)
    return state * 2


def steps(call: Functions, net: nn.Module) -> Step:
    """One step of the program."""
    state = torch.zeros(8, 16, device=DEVICE)

    def step(i: int) -> list[Tensor]:
        mark_step_begin()
        x = rand(8 if i % 4 else 5, 16, seed=i)
        y = call["f"](x)
        z, total = call["g"](y)
        results = [y[1:], z, total]
        if i % 3 == 0:
            results.append(call["h"](z))
        if i % 5 == 0:
            results.append(call["f"](z))
        results.append(net(y))
        if x.shape[0] == 8:
            results.append(call["update"](x, state))
            results.append(state.clone())
        return results

    return step


def run(step: Step) -> list[Tensor]:
    """Run all steps; most results are dropped, some are held to the end, some for a few steps."""
    torch.manual_seed(5)
    held: list[Tensor] = []
    lately: list[list[Tensor]] = []
    for i in range(STEPS):
        results = step(i)
        held.extend(result.clone() for result in results)
        if i % 10 == 7:
            held.append(results[0])
        lately.append(results[:2])
        del lately[:-3], results
    return held


def plain_functions() -> Functions:
    """The functions as they were defined, not captured."""
    return {"f": f, "g": g, "h": h, "update": update}


def captured_run(net: nn.Module) -> tuple[list[Tensor], int]:
    """Run with captured functions, which die at the end; their results do not."""
    functions = {name: capture(one) for name, one in plain_functions().items()}
    results = run(steps(functions, capture(net)))
    return results, sum(recordings(one).replays for one in functions.values())


def main() -> None:
    """Compare, delete everything, allocate a lot, compare again."""
    if len(sys.argv) > 1:
        assert torch.cuda.get_allocator_backend() == sys.argv[1]
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)).to(DEVICE)
    with torch.no_grad(), config.patch(cache=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        theirs = run(steps(plain_functions(), copy.deepcopy(net)))
        ours, replays = captured_run(net)
        same(ours, theirs)
        print(report())
        del net
        gc.collect()
        if ON_CUDA:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        noise = [torch.full((1 << n,), float("nan"), device=DEVICE) for n in range(4, 22) for _ in range(6)]
        same(ours, theirs)
        del noise
    print(f"OK {replays}")


if __name__ == "__main__":
    main()
