"""A process ends as it would have without recordings, whatever is alive by then."""

from __future__ import annotations

import pytest

from tests.support.device import DEVICE
from tests.support.processes import run_python

PROGRAM = """
import sys, warnings
import torch
from torch import nn
from capture import capture, mark_step_begin, recordings
warnings.simplefilter("ignore")
device, kind = sys.argv[1:]
net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device)
from capture.integrations.compile import backend
run = torch.compile(net, backend=backend) if kind == "compiled" else capture(net)
held = []
for step in range(8):
    mark_step_begin()
    y = run(torch.ones(4, 8, device=device))
    loss = y.square().mean()
    if kind != "pending" or step < 6:
        loss.backward()
    gradients = [one.grad for one in net.parameters()]
    for one in net.parameters():
        one.grad = None
    held += [y, loss, y.detach()[1:], gradients]
print("done", y.shape)
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["compiled", "finished", "pending"])
def test_a_process_ends(kind: str) -> None:
    done = run_python(PROGRAM, str(DEVICE), kind)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("done")
    assert "Error" not in done.stderr, done.stderr[-2000:]
