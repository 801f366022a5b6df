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
