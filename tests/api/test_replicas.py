"""Captured modules in ``DataParallel``: a replica runs on its own tensors, not on those of the original."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from capture import capture, recordings
from tests.support.decorated import CapturedNet, Net, bits
from tests.support.processes import run_python


def replicated(module: nn.Module) -> Any:
    """A replica as ``torch.nn.parallel.replicate`` makes it. Its parameters are the doubled ones, where a real replica
    has those of another device."""
    modules = list(module.modules())
    replicas = [part._replicate_for_data_parallel() for part in modules]
    for original, replica in zip(modules, replicas, strict=True):
        for name, child in original._modules.items():
            if child is not None:
                setattr(replica, name, replicas[modules.index(child)])
        for name, parameter in original._parameters.items():
            if parameter is not None:
                setattr(replica, name, parameter.detach() * 2)
    return replicas[0]


@pytest.mark.parametrize("captured", [lambda: capture(Net()), CapturedNet], ids=["instance", "class"])
def test_a_replica_runs_on_its_own_tensors(captured: type) -> None:
    torch.manual_seed(0)  # with some weights and inputs all results are 0.5
    model, x = captured(), torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(3):
            assert bits(model(x)) == bits(Net.forward(model, x))
        for _ in range(3):
            replica = replicated(model)
            assert bits(replica(x)) == bits(Net.forward(replica, x))
            assert bits(replica(x)) != bits(model(x))
    assert recordings(model).replays > 0


def test_data_parallel_on_one_device_replays() -> None:
    inner, outer = capture(Net()), capture(nn.DataParallel(Net()))
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(4):
            assert bits(nn.DataParallel(inner)(x)) == bits(Net.forward(inner, x))
            assert bits(outer(x)) == bits(Net.forward(outer.module, x))
    assert recordings(inner).replays > 0
    assert recordings(outer).replays > 0


def test_a_copy_can_be_replicated() -> None:
    x, model = torch.randn(3, 4), copy.deepcopy(capture(Net()))
    replica = replicated(model)
    assert bits(replica(x)) == bits(Net.forward(replica, x))


def test_a_file_of_a_captured_module_names_nothing_of_this_library() -> None:
    model = capture(Net())
    assert b"replicas" not in pickle.dumps(model)
    loaded, x = pickle.loads(pickle.dumps(model)), torch.randn(3, 4)  # noqa: S301 - what was just written
    assert bits(loaded(x)) == bits(Net.forward(model, x))


@pytest.mark.slow
def test_instances_that_are_alive_when_the_process_ends_are_left_in_peace() -> None:
    """Python has emptied the modules of this library by the time that the last instance dies."""
    code = """
import torch
from capture import capture
class Net(torch.nn.Module):
    @capture
    def forward(self, x):
        return torch.relu(x) + 1
net = Net()
for _ in range(4):
    net(torch.ones(3))
import builtins
builtins.kept = net
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
