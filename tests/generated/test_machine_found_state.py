"""Bugs that the random programs of ``machine.py`` found, with state, modes and addresses."""

from __future__ import annotations

import ctypes
import itertools
import random
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, capture, recordings
from capture.engines.cpu.engine import CpuBackend
from tests.support.device import AGAIN, DEVICE, EXECUTES, REBINDS
from tests.support.found import CALLS, ones
from tests.support.found import _without_gradients as _without_gradients

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


def test_a_view_that_autograd_refuses_to_look_at_is_an_argument_like_any() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    view = weight[1]
    weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        assert view.is_leaf
    captured = capture(lambda x: x * 2 + 1)
    for _ in range(CALLS):
        assert torch.equal(captured(view), view * 2 + 1)


class Latest:
    """Keeps its argument, and hands out what it kept before beside another attribute."""

    def __init__(self) -> None:
        self.a, self.b = torch.ones(4), torch.zeros(4)

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store ``y``, and give ``b``, ``y`` and the old ``a``."""
        before, self.a = self.a, x
        return self.b, y, before


class CapturedLatest(Latest):
    """The same, captured."""

    step = capture(static=["y"])(Latest.step)


def test_one_tensor_in_two_places_that_no_operator_reads() -> None:
    """One tensor is in two places while it is recorded, and only handed on; later the places hold different tensors."""
    eager, ours = Latest(), CapturedLatest()
    for turn, count in enumerate((2, 4, 3, 2, 4, 3)):
        x, twin = ones(turn + 1), ones(turn + 1)
        for number in range(count):
            x, _, before = ours.step(x, ones(number))
            twin, _, expected = eager.step(twin, ones(number))
            assert torch.equal(x, twin), turn
            assert torch.equal(before, expected), turn
            assert torch.equal(ours.a, eager.a), turn


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", [{"static": ["x"]}, {"inputs": "bind"}, {}], ids=["static", "bound", "copied"])
@pytest.mark.parametrize("change", ["turned", "other memory", "other storage", "another shape"])
def test_an_earlier_argument_changes(change: str, options: dict[str, Any]) -> None:
    """After each call the argument object changes its shape or memory. The next argument is a new object at the old
    address: a replay must not look at the earlier one."""
    memory = torch.arange(16.0)
    changes: dict[str, Callable[[Tensor], object]] = {
        "turned": lambda x: x.t_(),
        "other memory": lambda x: setattr(x, "data", torch.zeros(4, 4)),
        "other storage": lambda x: x.set_(torch.zeros(4, 4).untyped_storage(), 0, (4, 4), (4, 1)),
        "another shape": lambda x: x.resize_(2, 2),
    }

    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin() + 1
        x.mul_(0.5)
        return y, x[1]

    captured = capture(body, **options)
    for number in range(CALLS):
        memory.copy_(torch.arange(16.0) + number)
        x, twin = memory.view(4, 4), (torch.arange(16.0) + number).view(4, 4)
        results, expected = captured(x), body(twin)
        assert all(map(torch.equal, results, expected))
        assert torch.equal(x, twin)
        changes[change](x)
    assert recordings(captured).replays == CALLS - 2 - AGAIN


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda t: t.reshape(-1),
    "reshape_as": lambda t: t.reshape_as(torch.ones(2, 8)),
    "view_as": lambda t: t.view_as(torch.ones(2, 8)),
    "ravel": lambda t: t.ravel(),
    "flatten": lambda t: t.flatten()[..., ::2],
    "unflatten": lambda t: t.unflatten(0, (2, 2)),
    "chunk": lambda t: t.chunk(2)[0],
    "tensor_split": lambda t: t.tensor_split(3)[1],
    "split": lambda t: t.split([1, 3], 1)[1],
    "hsplit": lambda t: t.hsplit(2)[1],
    "vsplit": lambda t: t.vsplit(2)[0],
    "unbind": lambda t: t.unbind(1)[2],
    "real": lambda t: t.real,
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "movedim": lambda t: t.movedim(0, 1),
    "narrow": lambda t: t.narrow(0, 1, 2),
    "T": lambda t: t.T,
    "mH": lambda t: t.mH,
    "adjoint": lambda t: t.adjoint(),
    "squeeze": lambda t: t[None].squeeze((0,)),
    "contiguous": lambda t: t.contiguous(),
    "to": lambda t: t.to(t.device, t.dtype),
    "type_as": lambda t: t.type_as(t),
    "atleast_3d": lambda t: torch.atleast_3d(t),
    "diagonal": lambda t: t.diag(1),
    "broadcast_to": lambda t: t[:1].broadcast_to((1, 4)),
    "index": lambda t: t[1:, None, ..., 2],
    "positive": lambda t: t.positive(),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("look", LOOKS)
def test_writes_through_views_count_for_the_base(look: str, mode: Callable[[], Any]) -> None:
    """In inference mode composite operators come to the watched run whole: their views must count as views there,
    too."""
    dtype = torch.complex64 if look == "real" else torch.float32
    held, twin = (torch.ones(4, 4, dtype=dtype) for _ in range(2))

    def body(held: Tensor, x: Tensor) -> Tensor:
        view = LOOKS[look](held)
        view.mul_(2)
        return x + view.sum().real

    captured = capture(lambda x: body(held, x))
    with mode():
        for number in range(CALLS):
            x = torch.full((4,), float(number))
            assert torch.equal(captured(x), body(twin, x))
            assert torch.equal(held, twin)
            assert held._version == twin._version


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_operators_made_of_others_on_conjugates(mode: Callable[[], Any]) -> None:
    z = torch.complex(torch.arange(16.0), torch.arange(16.0).flip(0)).view(4, 4)

    def body(x: Tensor) -> tuple[Tensor, ...]:
        y = x.conj()
        return (
            y.reshape(-1) * 2,
            torch.matmul(y, x[0].conj()),
            y.imag.reshape(2, 8) + 1,
            torch.einsum("ij,kj->ik", y, x),
        )

    captured = capture(body)
    with mode():
        for number in range(CALLS):
            results, expected = captured(z * number), body(z * number)
            assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("options", [{}, {"static": ["y"]}, {"inputs": "bind"}], ids=["plain", "static", "bind"])
def test_writes_to_an_argument_that_is_state_too_are_counted(options: dict[str, Any]) -> None:
    """An argument that state also holds is written: its version counter rises in each call, the recording one
    included."""

    class Box:
        last = torch.zeros(4, 4, device=DEVICE)

    box = Box()

    @capture(**options)
    def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        torch.mul(x, 2, out=y)
        box.last = x
        return y, x + 1

    for number in range(CALLS):
        x, y = torch.full((4, 4), float(number), device=DEVICE), box.last
        before = y._version
        result = body(x, y)
        assert y._version > before
        assert torch.equal(y, x * 2)
        assert result[0] is y
        assert box.last is x


def test_state_that_is_only_handed_on_may_move() -> None:
    """No kernel has the address of such a tensor, so a move needs no new recording. Where an engine reads arguments
    where they lie, it is an input after six calls, of one more recording."""

    class Swap:
        def __init__(self) -> None:
            self.a, self.b = torch.ones(4, 4, device=DEVICE), torch.zeros(4, 4, device=DEVICE)

        def step(self, x: Tensor) -> Tensor:
            self.a, self.b = self.b, self.a + x
            return self.a

    mine, theirs = Swap(), Swap()
    captured = capture(mine.step)
    for number in range(3 * CALLS):
        x = torch.full((4, 4), float(number), device=DEVICE)
        assert torch.equal(captured(x), theirs.step(x))
        assert torch.equal(mine.b, theirs.b)
        assert captured(x) is mine.a
        theirs.step(x)
    now = recordings(captured)
    assert now.eager_calls == 0
    assert now.recordings == 1 + AGAIN + (DEVICE.type == "cpu") or not REBINDS
    assert now.rebinds <= 5 or DEVICE.type != "cpu"


@pytest.mark.parametrize("options", [{"static": ["y", "unused"]}, {"inputs": "bind"}], ids=["static", "bind"])
def test_arguments_that_no_operator_gets_may_move(options: dict[str, Any]) -> None:
    @capture(**options)
    def body(x: Tensor, y: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2 + 1, y

    for number in range(2 * CALLS):
        x, y, unused = (torch.full((4, 4), float(number + k), device=DEVICE) for k in range(3))
        result = body(x, y, unused)
        assert torch.equal(result[0], x * 2 + 1)
        assert result[1] is y
    now = recordings(body)
    assert now.eager_calls == 0
    assert now.recordings == 1 + AGAIN or not REBINDS


def only_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU's recording runs count as not executed, as on CUDA."""
    record = CpuBackend.record
    monkeypatch.setattr(CpuBackend, "record", lambda *a, **k: attrs.evolve(record(*a, **k), executed=False))


_runs = itertools.count()


@torch.library.custom_op("capture_tests::moody", mutates_args=())
def moody(x: Tensor) -> Tensor:
    """An operator whose result is of single precision in its first run, and of double precision later."""
    return x.double() if next(_runs) else x + 1


@pytest.mark.parametrize("executes", [True, False] if EXECUTES else [False])
def test_results_of_another_kind_than_in_the_watched_run(executes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention operators give their seed on another device while capturing. A result that only a capture gives must
    not be handed out."""
    if executes != EXECUTES:
        only_capture(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "_runs", itertools.count())
    captured = capture(lambda x: moody(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for number in range(CALLS):
            x = ones() * number
            assert torch.equal(captured(x), x.double() if number else x + 1)
    now = recordings(captured)
    if not EXECUTES:  # no replay runs the operator's Python, which counts its runs
        assert (now.recordings, now.replays) == (0, 0), str(now)
        assert any("_runs" in finding.what for finding in now.findings if finding.code == "CG202"), str(now)
        return
    assert (now.recordings, now.replays) == ((1, CALLS - 2) if executes else (0, 0))
    said = [finding.what for finding in now.findings if finding.code == "CG904"]
    assert executes or any(re.search(r"float64\[4\] \S+ while capturing", text) for text in said)


@torch.library.custom_op("capture_tests::at_address", mutates_args=())
def at_address(x: Tensor, address: int) -> Tensor:
    """The values at this address, if it is one of the host's memory."""
    found = torch.empty_like(x)
    if x.device.type == "cpu":
        ctypes.memmove(found.data_ptr(), address, found.nbytes)
    else:
        found.fill_(address % 1024)
    return found


@pytest.mark.parametrize("source", ["state", "argument"])
def test_an_address_given_as_a_number(source: str) -> None:
    """An operator that gets an address as a number is eager: nothing tells that another tensor lies there in the next
    call."""

    class Box:
        weight: Tensor

    box = Box()

    @capture(static=["y"])
    def body(x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = at_address(x, (box.weight if source == "state" else y).data_ptr() + 4 * x.numel())
        return result + x

    kept = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        for number in range(CALLS):
            x, y, box.weight = ones(), torch.arange(8.0) + number, torch.arange(8.0) - number
            kept.append((y, box.weight))
            read = box.weight if source == "state" else y
            expected = read[4:] if DEVICE.type == "cpu" else torch.full((4,), float((read.data_ptr() + 16) % 1024))
            assert torch.equal(body(x, y), expected + x)
    said = "CG202 host-work: `at_address` gets the address of a tensor"
    assert any(said in str(warning.message) for warning in caught)


def by_address(x: Tensor) -> Tensor:
    made = torch.zeros(x.shape, device="cpu")
    source = x.cpu()
    ctypes.memmove(made.data_ptr(), source.data_ptr(), made.nbytes)
    return made


UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "an address": by_address,
    "apply_": lambda x: x.cpu().clone().apply_(lambda value: value * 2),
    "map_": lambda x: x.cpu().clone().map_(x.cpu(), lambda a, b: a * b),
    "quantized": lambda x: torch.quantize_per_tensor(x.cpu(), 0.5, 0, torch.quint8).dequantize(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNSEEN)
def test_what_the_host_does_without_operators_is_done_in_every_call(name: str) -> None:
    captured = capture(UNSEEN[name])
    for number in range(CALLS):
        x = torch.arange(4.0) + number
        assert torch.equal(captured(x), UNSEEN[name](x))
    assert recordings(captured).replays == 0


def test_numbers_under_vmap() -> None:
    """Under vmap torch makes a tensor of each number, by an operator that has no tensor argument."""

    def body(x: Tensor) -> Tensor:
        found: Tensor = torch.vmap(lambda value: value * 2 + 1.5)(x)
        return found

    captured = capture(body)
    for number in range(CALLS):
        x = torch.arange(4.0) + number
        assert torch.equal(captured(x), body(x))


BESIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "before": lambda x: x.as_strided((3,), (1,), 0) + 1,
    "after": lambda x: x.as_strided((70,), (1,)) + 1,
    "storage": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (3,), (1,)) + 1,
    "all of it": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (16,), (1,)) + 1,
}


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("static", [False, True])
def test_memory_beside_an_argument(name: str, static: bool) -> None:
    """A body that reads memory of the argument's storage outside of the argument: a copy has none of that memory."""
    captured = capture(BESIDE[name], static=["x"] if static else [])
    for number, begin in enumerate((128, 128, 128, 64, 192, 64, 128)):
        x = (torch.arange(512.0) + number)[begin : begin + 64]
        assert torch.equal(captured(x), BESIDE[name](x))
    assert recordings(captured).replays == 0 or (static and name == "after")


@pytest.mark.parametrize("static", [False, True])
def test_a_view_inside_an_argument_is_recorded(static: bool) -> None:
    captured = capture(lambda x: x.as_strided((2, 2), (1, 1)) * 2, static=["x"] if static else [])
    for number, begin in enumerate((128, 128, 128, 64, 192, 64, 128)):
        x = (torch.arange(512.0) + number)[begin : begin + 64]
        assert torch.equal(captured(x), x.as_strided((2, 2), (1, 1)) * 2)
    assert recordings(captured).replays > 0


@pytest.mark.parametrize("same", [False, True], ids=["another storage each time", "two storages"])
@pytest.mark.parametrize("begins", [(128,) * 8, (128, 128, 128, 64, 192, 64, 128, 128)], ids=["there", "elsewhere"])
def test_state_that_moves_and_is_looked_at_by_numbers(same: bool, begins: tuple[int, ...]) -> None:
    class Window:
        view: Tensor

        def read(self) -> Tensor:
            return self.view.as_strided((2, 3), (3, 1), 131) * 2

    window = Window()
    captured = capture(Window.read)
    storages = [torch.arange(512.0), torch.arange(512.0)]
    for number, begin in enumerate(begins):
        whole = storages[number % 2].add_(1) if same else torch.arange(512.0) + number
        window.view = whole[begin : begin + 64]
        assert torch.equal(captured(window), window.read())


def _attribute(x: Tensor) -> Tensor:
    return x + x.tag  # type: ignore[attr-defined, no-any-return]


UNKEYED: dict[str, Callable[[Tensor], Tensor]] = {
    "storage_offset": lambda x: x + int(x.storage_offset()),
    "of a view": lambda x: x + int(x[1:].storage_offset()),
    "_version": lambda x: x + x._version,
    "_base": lambda x: x + (x._base is None),
    "_is_view": lambda x: x + x._is_view(),
    "is_shared": lambda x: x + x.is_shared(),
    "nbytes": lambda x: x + x.untyped_storage().nbytes(),
    "len": lambda x: x + len(x.untyped_storage()),
    "storage": lambda x: x + x.storage().size(),
    "attribute": _attribute,
}


def _unlike(number: int) -> Tensor:
    """A tensor whose key is the same for each number, while what ``UNKEYED`` asks of it changes."""
    if number < 3 or number % 2:
        x = (torch.arange(64.0 * (4 + number // 3)) + number)[64:128]
    else:
        x = torch.arange(64.0) + number
        x.add_(number).sub_(number)
        if x.device.type == "cpu":
            x.share_memory_()
    x.tag = 5 + number // 3  # type: ignore[attr-defined]
    return x


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning", "ignore:TypedStorage")
@pytest.mark.parametrize("name", UNKEYED)
@pytest.mark.parametrize("static", [False, True])
def test_what_a_tensor_tells_python_and_the_key_leaves_out(name: str, static: bool) -> None:
    captured = capture(UNKEYED[name], static=["x"] if static else [])
    for number in range(8):
        x = _unlike(number)
        assert torch.equal(captured(x), UNKEYED[name](x))
    assert "CG110" in {one.code for one in recordings(captured).findings}


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_how_often_state_was_written_is_no_part_of_the_key() -> None:
    """A cache of something made from a parameter reads the parameter's version counter, which is no part of the key."""

    class Cached:
        def __init__(self) -> None:
            self.weight = torch.ones(8)

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.weight + self.weight._version)

    cached = Cached()
    captured = capture(Cached.forward)
    for number in range(6):
        x = torch.arange(8.0) + number
        assert torch.equal(captured(cached, x), cached.forward(x))
        if number > 2:
            cached.weight.add_(1)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_attributes_that_a_later_call_has_are_there_while_recording() -> None:
    captured = capture(lambda x: x + getattr(x, "tag", 1))
    for number in range(4):
        x = torch.arange(8.0)
        if number:
            x.tag = 3  # type: ignore[attr-defined]
        assert torch.equal(captured(x), x + getattr(x, "tag", 1))


def test_a_run_that_counts_for_nothing_draws_no_host_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's and NumPy's draws of a run that does not count are drawn again by the eager run that takes its place."""
    if EXECUTES:
        only_capture(monkeypatch)

    def body(x: Tensor) -> Tensor:
        return x * random.random() + float(np.random.rand())

    captured = capture(body)
    results = []
    for function in (captured, body):
        random.seed(3)
        np.random.seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaptureWarning)
            results.append([function(ones()) for _ in range(CALLS)])
    assert all(map(torch.equal, *results))
