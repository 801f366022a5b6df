"""A forked child never touches its parent's recordings on the device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu.support import needs_cuda

pytestmark = needs_cuda

PROGRAM = """
import gc, os, sys, threading, torch
from torch import nn
from capture import capture, config, recordings

how, device = sys.argv[1], torch.device("cuda")

def body(x):
    return torch.tanh(x) * 2 + 1

f = capture(body, name="f")
model = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device))
ready, over = threading.Event(), threading.Event()

def record():
    with torch.no_grad():
        for _ in range(4):
            kept.append(f(torch.ones(5, device=device)))
            model(torch.ones(2, 4, device=device)) if not ready.is_set() else None

kept = []
record()
for _ in range(4):
    model(torch.ones(2, 4, device=device)).sum().backward()

def other():
    record()
    ready.set()
    over.wait(60)

thread = threading.Thread(target=other)
thread.start()
ready.wait(60)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        x = torch.ones(5)
        with torch.no_grad():
            right = all(torch.equal(f(x), body(x)) for _ in range(4)) and recordings(f).replays > 0
        try:
            f(torch.ones(5, device=device))
        except RuntimeError as error:
            right = right and "CUDA" in str(error)  # as the same program without the library
        del f, model, kept
        gc.collect()
        code = 0 if right else 2
    finally:
        if how == "_exit":
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
over.set()
thread.join()
with torch.no_grad():
    assert torch.equal(f(torch.ones(5, device=device)), body(torch.ones(5, device=device)))
print("fine")
"""


@pytest.mark.parametrize("how", ["_exit", "exit"])
def test_child_of_a_process_with_recordings(how: str) -> None:
    environment = {**os.environ, "CAPTURE_CACHE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"
    assert "CUDA warning" not in done.stderr, done.stderr
    assert "initialization error" not in done.stderr, done.stderr


GARBAGE = """
import gc, os, sys, torch
from torch import nn
from capture import capture

device = torch.device("cuda")

class Cycle:
    pass

def results(f, *made):
    with torch.no_grad():
        return [f(made[0](number)) for number in range(1, 9)]

def inference():
    f = capture(lambda x: torch.tanh(x) * 2)
    return f, results(f, lambda number: torch.ones(5, device=device) * number)

def of_the_host():
    f = capture(lambda x: x.to(device, non_blocking=True) * 2)
    return f, results(f, lambda number: torch.ones(1000) * number)

def segments():
    w = torch.ones(4, device=device)
    def step(x):
        w.mul_(0.9)
        return x * 2 if x.sum().item() > 0 else x - w
    f = capture(step)
    return f, results(f, lambda number: torch.ones(4, device=device) * number)

def draws():
    f = capture(lambda x: x + torch.rand_like(x), rng="graphsafe")
    return f, results(f, lambda number: torch.ones(4, device=device) * number)

def region():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    f, kept = capture(net), []
    for _ in range(6):
        kept.append(f(torch.ones(3, 4, device=device)))
        kept[-1].sum().backward()
    return f, net, kept

def whole_step():
    net = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    def step(x):
        optimizer.zero_grad()
        loss = net(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()
    f = capture(step)
    return f, [f(torch.ones(3, 4, device=device)) for _ in range(8)]

torch.ones(1, device=device)
gc.collect()
gc.disable()
cycle = Cycle()
cycle.me, cycle.held = cycle, globals()[sys.argv[1]]()
del cycle
pid = os.fork()
if pid == 0:
    gc.collect()
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert gc.collect()
print("fine")
"""


@pytest.mark.parametrize("kind", ["inference", "of_the_host", "segments", "draws", "region", "whole_step"])
def test_a_child_collects_what_its_parent_had_dropped(kind: str) -> None:
    """Captured functions in cycles that nobody reaches: their graphs and pools stay the parent's. (torch itself ends a
    child that collects a pinned tensor, an event, or a tensor that another stream used.)"""
    environment = {**os.environ, "CAPTURE_CACHE": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GARBAGE, kind], env=environment, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stderr[-2000:]
