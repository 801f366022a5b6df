"""What the first calls of a small function run in Python: counted, as times depend on the machine."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import sys
import types
import typing

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from capture.guards import names_used
from capture.torch_private import operator_watch
from tests.support.decorated import fresh as fresh
from tests.support.device import DEVICE


def functions_run(call: typing.Callable[[], object]) -> int:
    """How many Python functions a call runs. One that torch runs around each of its own, for a default device, is left
    out."""
    ran = 0

    def note(frame: types.FrameType, event: str, _: object) -> None:
        nonlocal ran
        ran += event == "call" and frame.f_globals.get("__name__") != "torch.utils._device"

    gc.disable()  # callbacks of the collector would count
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return ran


def small(x: Tensor) -> Tensor:
    return torch.relu(x) * 2 + 1


def small_too(x: Tensor) -> Tensor:
    return torch.relu(x) * 3 + 1


def another(x: Tensor) -> Tensor:
    return torch.relu(x) * 4 + 1


def test_the_first_call_of_a_small_function_runs_little_python() -> None:
    x = torch.randn(4)
    for once in (capture(small_too), capture(another)):  # some is done once in a process, some for the second function
        for _ in range(3):
            once(x)
    function = capture(small)
    counts = [functions_run(lambda: function(x)) for _ in range(3)]
    assert recordings(function).replays == 1
    most = 2300 if DEVICE.type == "cpu" else 2700  # 3,500 while code around the body and all names of torch were read
    assert counts[0] <= most, counts
    assert counts[1] <= 2700, counts  # 3,130 while handlers of signals were made enumerations


def many(count: int) -> typing.Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        for _ in range(count):
            x = torch.relu(x * 2 - 0.5)
        return x

    return body


def test_an_operator_costs_little_in_the_first_calls() -> None:
    x, counts = torch.randn(4), []
    for count in (8, 8, 24):  # proofs of the first ones hold for the others
        function = capture(many(count))
        counts.append([functions_run(functools.partial(function, x)) for _ in range(2)])
    watched, recorded = [(more - less) / 48 for more, less in zip(counts[2], counts[1], strict=True)]
    most = 150 if DEVICE.type == "cpu" else 60
    # 35 and 42 while each looked whether there are arrays, and of which kind all are; torch runs 7 around a mode
    assert watched <= (28 if operator_watch.has_key else 35), watched
    assert recorded <= most, recorded  # on the CPU 222 while all of a step was found anew for each form that is tried


def test_a_module_in_another_costs_little_in_the_first_call() -> None:
    x, counts = torch.randn(4), []
    for count in (4, 4, 24):
        net = nn.Sequential(*[nn.ReLU() for _ in range(count)])
        counts.append(functions_run(functools.partial(capture(net), x)))
    each = (counts[2] - counts[1]) / 20
    assert each <= 190, each  # 238 while each of its empty tables of hooks was gone into like any object


def test_a_step_of_adam_is_proven_without_looking_for_many_numbers() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    @torch.enable_grad()
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    x = torch.randn(3, 4)
    for _ in range(3):
        step(x)  # what torch imports then
    function = capture(step)
    counts = [functions_run(lambda: function(x)) for _ in range(3)]
    assert max(counts) <= 150_000, counts  # 1,860,000 while each formula was computed from its begin for all numbers


@pytest.mark.parametrize("module", [dis, inspect, typing, nn.Module])
def test_names_are_read_from_code_as_dis_reads_them(module: object) -> None:
    """The code of one instruction is taken apart by hand, as ``dis`` takes ten times as long."""
    codes = [function.__code__ for function in vars(module).values() if isinstance(function, types.FunctionType)]
    codes += [constant for code in codes for constant in code.co_consts if isinstance(constant, types.CodeType)]
    assert len(codes) > 10
    for code in codes:
        sets, kept = set[str](), set[str]()
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME"):
                sets.add(instruction.argval)
            elif instruction.opcode in dis.hasname:
                kept.add(instruction.argval)
        assert names_used.uses_of(code).names >= set(code.co_names) - (sets - kept)
        assert names_used._looked_up(code) == set(code.co_names) - (sets - kept), code.co_qualname
