"""Rows of ``docs/rows.md``: the decorator's reach, errors, plans on disk, the key."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from capture import CaptureWarning, capture, config, load_plans, mark_step_begin, recordings, reset, save_plans
from tests.support.device import AGAIN, DEVICE, EXECUTES, rng_state, set_rng_state
from tests.support.processes import python_path, run_python
from tests.support.rows import counts, descendants, eager, ran, rand, same, times, total, warned
from tests.support.rows import fresh as fresh

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------- nested decorators


@capture
def inner(x: Tensor) -> Tensor:
    ran("inner")
    return x * 2


@capture
def middle(x: Tensor) -> Tensor:
    return inner(x) + inner(x + 1)


@capture
def outer(x: Tensor) -> Tensor:
    return middle(x) - 1


def test_row_177_disabling_reaches_everything_inside() -> None:
    """``config.patch(enabled=False)`` around a call: nested functions and modules run eagerly, and only there."""
    net = capture(nn.Linear(4, 4).requires_grad_(False))

    @capture
    def net_and_function(x: Tensor) -> Tensor:
        y: Tensor = net(outer(x))
        return y

    with config.patch(enabled=False):
        for i in range(4):
            x = rand(4, seed=i)
            same(net_and_function(x), eager(net_and_function, x))
            same(net(x), nn.functional.linear(x, net.weight, net.bias))
    assert total() == 0
    assert counts(net_and_function) == counts(net) == counts(inner) == (0, 0, 0, 0)
    for i in range(4):
        x = rand(4, seed=i)
        with config.patch(enabled=False):
            expected = eager(net_and_function, x)
        same(net_and_function(x), expected)
    assert descendants() == [0]


def test_row_177_disabling_between_replays() -> None:
    """A call with recording switched off between replays changes nothing for the recording."""
    for i in range(6):
        x = rand(4, seed=i)
        with config.patch(enabled=i not in (3, 4)):
            same(inner(x), x * 2)
    assert counts(inner) == (1, 1, 2, 0)


def test_row_178_decorating_is_what_enables() -> None:
    """Only what is decorated is recorded, an undecorated caller around it is not; the global switch is above both."""

    def plain(x: Tensor) -> Tensor:
        ran("plain")
        return inner(x).relu()

    for i in range(4):
        x = rand(4, seed=i)
        same(plain(x), (x * 2).relu())
    assert (times("plain"), times("inner"), total()) == (4, 2, 1)
    decorated = capture(plain)
    for i in range(4):
        x = rand(4, seed=i)
        same(decorated(x), (x * 2).relu())
    assert total() == 2
    with config.patch(enabled=False):
        for function in (decorated, plain, inner):
            function(rand(4))
    assert total() == 2


def test_row_178_a_module_instance_is_enabled_alone() -> None:
    """``capture(module)`` records this instance's forward and no other one's of its class."""
    enabled, plain = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4).requires_grad_(False)
    capture(enabled)
    for i in range(3):
        x = rand(4, seed=i)
        for net in (enabled, plain):
            same(net(x), nn.functional.linear(x, net.weight, net.bias))
    assert total() == 1


def test_row_185_captured_in_captured_is_inlined() -> None:
    """A captured function called in the body of another is part of that recording; one recording in all."""
    for i in range(5):
        x = rand(4, seed=i)
        same(outer(x), x * 2 + (x + 1) * 2 - 1)
    assert descendants() == [0]
    assert counts(outer) == (1, 1, 3, 0)
    assert counts(inner)[1:3] == counts(middle)[1:3] == (0, 0)
    assert times("inner") == 4
    assert "CG801" in [finding.code for finding in recordings(outer).findings]


def test_row_185_inner_function_keeps_its_own_recordings() -> None:
    """The same function called at top level has a recording of its own, before and after."""
    for i in range(4):
        x = rand(4, seed=i)
        same(inner(x), x * 2)
        same(outer(x), x * 2 + (x + 1) * 2 - 1)
    assert descendants() == [0, 0]


def test_row_186_foreign_modes_run_inline() -> None:
    """Under somebody else's dispatch or function mode, or functorch: the body itself runs, nothing is replayed. Of a
    transform it is said, as it may be there to stay."""

    class Nothing(TorchFunctionMode):
        @override
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    @capture
    def f(x: Tensor) -> Tensor:
        ran("f")
        return x @ x

    for i in range(3):
        f(rand(4, 4, seed=i))
    assert times("f") == 2
    x = rand(4, 4, seed=9)
    with FlopCounterMode(display=False) as flops:
        counted = f(x)
    same(counted, x @ x)
    assert flops.get_total_flops() == 2 * 4**3
    with Nothing():
        same(f(x), x @ x)
    with pytest.warns(CaptureWarning, match="CG805"):
        same(torch.vmap(f)(x.expand(2, 4, 4)), torch.vmap(lambda matrix: matrix @ matrix)(x.expand(2, 4, 4)))
    assert times("f") == 5
    same(f(x), x @ x)
    assert (times("f"), total()) == (5, 1)


# --------------------------------------------------------------------------------------------------------- exceptions


class Oops(Exception):
    """Raised by bodies under test."""


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_row_181_exception_in_the_body(at: int) -> None:
    """An exception at any call comes out unchanged, its writes done as in eager; the next call works."""
    switch = {"raise": False}
    get = switch.get
    state = torch.zeros(4)

    def armed() -> bool:
        return bool(get("raise"))

    @capture(guards=[armed])
    def f(x: Tensor) -> Tensor:
        state.add_(1)
        x.mul_(2)
        y = x + state
        if armed():
            raise Oops("from the body")
        return y * 2

    for i in range(6):
        x = rand(4, seed=i)
        switch["raise"] = i == at
        if i == at:
            with pytest.raises(Oops, match="from the body") as caught:
                f(x)
            assert caught.value.__cause__ is None
            assert caught.traceback[-1].path == Path(__file__)
        else:
            same(f(x), (rand(4, seed=i) * 2 + (i + 1.0)) * 2)
        same((x, state), (rand(4, seed=i) * 2, torch.full((4,), i + 1.0)))
    assert total() == 1


def test_row_182_exception_while_recording() -> None:
    """A body that raises in the call that records: tree, pool, generator and neighbours stay usable."""
    now: list[str] = []
    said = now.__contains__

    @capture
    def neighbour(x: Tensor) -> Tensor:
        return x + 1

    @capture
    def f(x: Tensor) -> Tensor:
        ran("f")
        y = x * torch.rand(4)
        if said("raise"):
            raise Oops
        return y + 1

    for i in range(3):
        neighbour(rand(4, seed=i))
    torch.manual_seed(0)
    held, expected = [], []
    for i in range(5):
        mark_step_begin()
        before = rng_state()
        x = rand(4, seed=i)
        expected.append(x * torch.rand(4) + 1)
        after = rng_state()
        set_rng_state(before)
        if i == 1:
            now.append("raise")
            with pytest.raises(Oops):
                f(x)
            now.clear()
            held.append(expected[1])
        else:
            held.append(f(x))
        assert torch.equal(rng_state(), after)
        mark_step_begin()
        same(neighbour(x), x + 1)
        same(held, expected)
    assert recordings(f).recordings == 1 + AGAIN
    pools = (1 if EXECUTES else 2) + 2 * AGAIN  # the exception may keep a tensor of the first one
    assert 1 <= recordings(neighbour).recordings <= pools


def test_row_182_host_read_only_while_recording() -> None:
    """``.item()`` that only the call that records meets: the result stands, later calls are right."""
    now: list[str] = []
    said = now.__contains__

    @capture
    def f(x: Tensor) -> Tensor:
        y = x * 2
        if said("read"):
            return y + y.sum().item()
        return y - 1

    with warned("CG20", most=2):
        for i in range(6):
            x = rand(4, seed=i)
            now[:] = ["read"] if i == 1 else []
            y = f(x)
            same(y, x * 2 + (x * 2).sum().item() if i == 1 else x * 2 - 1)


# -------------------------------------------------------------------------------------------------------------- plans


PROGRAM = """
import json, sys
import numpy as np, torch
from capture import capture, load_plans, plans, recordings, save_plans
from capture.core.plan import dumps

@capture(static=["table"])
def f(x, table):
    table.add_(1)
    return torch.relu(x @ table), x[1:], None

@capture
def unfit(x):
    return x * float(np.from_dlpack(x.sum().cpu()))

mode, folder = sys.argv[1:]
loaded = load_plans(folder) if mode == "load" else None
x, table = torch.ones(4, 4), torch.eye(4)
results = [f(x, table)[0].tolist() for _ in range(3)]
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    unfit(x)
if mode == "save":
    save_plans(folder)
print(json.dumps({
    "plans": [dumps(plan) for function in (f, unfit) for plan in plans(function)],
    "observations": recordings(f).observations + recordings(unfit).observations,
    "recordings": recordings(f).recordings, "replays": recordings(f).replays, "bodies": recordings(f).body_runs,
    "results": results, "warnings": len(caught), "stale": loaded.stale if loaded else [],
    "used": loaded.used if loaded else [],
}))
"""


def run_program(tmp_path: Path, mode: str) -> dict[str, Any]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    environment = {"PYTHONPATH": python_path(), "CAPTURE_CACHE": "0", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = run_python(program, mode, str(tmp_path / "plans"), env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_row_183_plan_round_trip(tmp_path: Path) -> None:
    """Plans saved by one process give another one the same decisions, byte for byte. It watches one run alone: of the
    function that is said to be eager, whose reasons may be gone."""
    first = run_program(tmp_path, "save")
    second = run_program(tmp_path, "load")
    assert (first["observations"], first["recordings"], first["replays"]) == (2, 1, 1)
    assert (second["observations"], second["recordings"], second["replays"]) == (1, 1, 2)
    assert (len(second["used"]), second["stale"]) == (2, [])
    assert second["plans"] == first["plans"]
    assert second["results"] == first["results"]
    assert second["warnings"] == first["warnings"] == 1
    assert second["bodies"] == 1


@pytest.mark.parametrize("name", ["torch", "rules", "device", "source", "annotation"])
def test_row_184_plan_of_another_world_is_refused(tmp_path: Path, name: str) -> None:
    """A plan made under another torch, rule set, device, source or annotation is named and made again."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2 + 1

    f(rand(4))
    assert save_plans(tmp_path) >= 1
    (file,) = [path for path in tmp_path.iterdir() if "refused" in path.name]
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["fingerprint"][name]
    data["fingerprint"][name] = "another"
    file.write_text(json.dumps(data), encoding="utf-8")
    reset(f)
    report = load_plans(tmp_path)
    for i in range(3):
        same(f(rand(4, seed=i)), rand(4, seed=i) * 2 + 1)
    assert recordings(f).observations == 1
    said = [reason for _, reason in report.stale]
    said += [event.detail for event in recordings(f).events if event.kind == "plan-stale"]
    assert len(said) == 1
    assert name in said[0]


# ---------------------------------------------------------------------------------------------------------------- key


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "bfloat16": lambda: torch.autocast(DEVICE.type, dtype=torch.bfloat16),
    "float16": lambda: torch.autocast(DEVICE.type, dtype=torch.float16),
}


@pytest.mark.parametrize("mode", MODES)
def test_row_187_modes_are_part_of_the_key(mode: str) -> None:
    """Each ambient mode has its own recording; going back and forth gives eager's results and records once a mode."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x @ x + torch.is_grad_enabled()

    for i in range(8):
        x = rand(4, 4, seed=i)
        with MODES[mode]():
            y = f(x)
            same(y, eager(f, x))
            assert y.is_inference() is (mode == "inference")
            del y
        same(f(x), eager(f, x))
    assert recordings(f).recordings == 2
    assert counts(f)[3] == 0


def test_row_187_deterministic_and_default_dtype() -> None:
    """Deterministic algorithms and the default dtype are part of the key."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x + torch.ones(4) * torch.are_deterministic_algorithms_enabled()

    def check() -> None:
        for i in range(3):
            same(f(rand(4, seed=i)), eager(f, rand(4, seed=i)))

    check()
    torch.use_deterministic_algorithms(True)
    try:
        check()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    try:
        check()
    finally:
        torch.set_default_dtype(torch.float32)
    check()
    assert recordings(f).recordings == 3


def test_row_187_training_flags() -> None:
    """``train()`` and ``eval()`` of a module, and of a part of it, are part of the key."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5), nn.Tanh())).requires_grad_(False)
    capture(net)
    switches: list[Callable[[], object]] = [net.eval, net.train, net[1].eval, net.eval, net.train]
    for switch in switches:
        switch()
        for i in range(3):
            torch.manual_seed(i)
            actual = net(rand(2, 4, seed=i))
            torch.manual_seed(i)
            with config.patch(enabled=False):
                same(actual, net(rand(2, 4, seed=i)))
            del actual
    assert recordings(net).recordings == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:2],
        lambda x: x.t(),
        lambda x: x.to(torch.float64),
        lambda x: torch.empty_strided((4, 4), (8, 1)).copy_(x),
        lambda x: x.to(torch.int32),
        lambda x: x.reshape(1, 4, 4),
    ],
    ids=["shape", "transposed", "dtype", "stride", "int", "dim"],
)
def test_row_188_metadata_of_inputs_is_part_of_the_key(change: Callable[[Tensor], Tensor]) -> None:
    """Another shape, stride or dtype of a copied input is another recording; both stay usable."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2 + x.stride(-1)

    for i in range(4):
        x = rand(4, 4, seed=i)
        same(f(x), eager(f, x))
        same(f(change(x)), eager(f, change(x)))
    assert recordings(f).recordings == 2
    assert counts(f)[3] == 0


def test_row_188_requires_grad_is_part_of_the_key() -> None:
    """An input that requires grad is another key: its results carry gradients as in eager."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 3

    for i in range(3):
        same(f(rand(4, seed=i)), rand(4, seed=i) * 3)
    for i in range(4):
        x = rand(4, seed=i).requires_grad_()
        y = f(x)
        assert y.requires_grad
        y.sum().backward()
        same(x.grad, torch.full((4,), 3.0))
    same(f(rand(4)), rand(4) * 3)
    assert recordings(f).recordings == 4 + AGAIN, "the backward pass copies in what the loop holds"


class Pair(NamedTuple):
    a: Tensor
    b: Tensor | None


@dataclass
class Record:
    k: Tensor
    scale: float


def test_row_189_order_of_keywords_and_defaults_is_not_in_the_key() -> None:
    """Positional, keyword in any order, and defaulted arguments are one key for one call."""

    @capture
    def f(a: Tensor, b: Tensor, c: int = 2, *, d: Tensor | None = None, **more: Tensor) -> Tensor:
        ran("f")
        return a - b * c if d is None else a + d + more.get("e", 0)

    a, b, d = rand(4, seed=1), rand(4, seed=2), rand(4, seed=3)
    expected = a - b * 2
    for _ in range(2):
        same(f(a, b), expected)
        same(f(b=b, a=a), expected)
        same(f(a, b, 2), expected)
        same(f(a, c=2, b=b), expected)
        same(f(d=None, b=b, a=a), expected)
    assert (total(), times("f")) == (1, 2)
    for _ in range(3):
        same(f(a, b, d=d, e=b, g=a), a + d + b)
        same(f(b=b, e=b, a=a, g=a, d=d), a + d + b)
    assert (total(), times("f")) == (2, 4)


def test_row_189_order_that_the_body_sees_is_in_the_key() -> None:
    """The order of a dict, and so of the members of ``**kwargs``, shows in the body: each order its own result."""

    @capture
    def f(named: dict[str, Tensor], **more: Tensor) -> Tensor:
        return torch.cat([*named.values(), *more.values()])

    a, b = rand(4, seed=1), rand(4, seed=2)
    for _ in range(4):
        same(f({"a": a, "b": b}, p=a, q=b), torch.cat([a, b, a, b]))
        same(f({"b": b, "a": a}, p=a, q=b), torch.cat([b, a, a, b]))
        same(f({"a": a, "b": b}, q=b, p=a), torch.cat([a, b, b, a]))
    assert counts(f)[3] == 0


def test_row_189_structures_and_none_are_in_the_key() -> None:
    """Pytrees, namedtuples and dataclasses are opened; None in the place of a tensor is another key."""

    @capture
    def f(pair: Pair, records: list[Record], named: dict[str, Any]) -> Tensor:
        ran("f")
        total_: Tensor = (pair.a if pair.b is None else pair.a * pair.b) - named["x"]["y"][0]
        for one in records:
            total_ = total_ + one.k * one.scale
        return total_

    def arguments(seed: int, *, with_b: bool = True, scale: float = 2.0, size: int = 2) -> tuple[Any, ...]:
        tensors = [rand(4, seed=seed * 10 + i) for i in range(size + 3)]
        pair = Pair(tensors[0], tensors[1] if with_b else None)
        return pair, [Record(one, scale) for one in tensors[3:]], {"x": {"y": (tensors[2],)}}

    variants: list[dict[str, Any]] = [{}, {"with_b": False}, {"scale": 3.0}, {"size": 1}]
    for i in range(4):
        for variant in variants:
            given = arguments(i, **variant)
            same(f(*given), eager(f, *given))
    assert (total(), times("f")) == (4, 8)


def test_row_190_limit_reached_runs_eagerly() -> None:
    """At ``max_recordings`` the documented action is eager, with one warning; recorded shapes go on replaying."""

    @capture(max_recordings=1)
    def f(x: Tensor) -> Tensor:
        ran("f")
        return x * 2

    with warned("CG901"):
        for _ in range(4):
            for n in (1, 2, 3):
                mark_step_begin()
                x = rand(n, seed=n)
                same(f(x), x * 2)
    assert recordings(f).recordings == 1
    assert recordings(f).replays == 2
    assert times("f") == 2 + 8
    assert counts(f) == (3, 1, 2, 6)
