"""``inputs=``: arguments that the graph reads and writes where each call has them, on every engine."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import AnnotationError, CaptureWarning, capture, explain, mark_step_begin, plans, recordings
from tests.support.device import DEVICE, REBINDS
from tests.support.rows import fresh as fresh
from tests.support.rows import rand, same

LARGE = 1 << 18  # floats in 1 MiB
pytestmark = pytest.mark.skipif(not REBINDS, reason="nothing can be bound anew")


def policies(function: Any) -> dict[str, str]:
    return {
        placeholder.path: str(placeholder.policy)
        for placeholder in plans(function)[0].placeholders
        if placeholder.kind == "argument"
    }


def block(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x @ y) + x.sum(-1, keepdim=True)


def both(body: Callable[..., Any], mine: Any, *args: Tensor) -> None:
    """One call each, with copies of the same arguments; results and what was written are equal."""
    theirs = [torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype).copy_(arg) for arg in args]
    mark_step_begin()
    result, expected = mine(*args), body(*theirs)
    same(result, expected)
    same(list(args), theirs)


def poisoned(*tensors: Tensor) -> None:
    """Fill these with NaN, for whoever reads them later."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(float("nan"))


@pytest.mark.parametrize("inputs", ["auto", "bind", "copy"])
def test_fresh_tensors_in_every_call(inputs: Any) -> None:
    """A replay reads this call's tensors, never earlier ones, which are full of NaN by then."""
    mine, before = capture(block, inputs=inputs), []
    for number in range(12):
        x, y = rand(8, 8, seed=number), rand(8, 8, seed=number + 50)
        both(block, mine, x, y)
        before.append((x, y))
        poisoned(*before[-1])
        del before[:-3]  # some memory is used again, some is not
    assert recordings(mine).recordings == 1
    assert recordings(mine).replays >= 9
    assert policies(mine) == dict.fromkeys("xy", "bind" if inputs == "bind" else "copy")


def test_large_arguments_are_bound_by_default() -> None:
    def scaled(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    mine = capture(scaled)
    pairs = [(rand(LARGE, seed=number), rand(1, seed=number)) for number in range(8)]
    for pair in pairs:
        both(scaled, mine, *pair)
    assert policies(mine) == {"x": "bind", "y": "copy"}
    assert "1.0 MiB a call are not copied" in next(
        placeholder.reason for placeholder in plans(mine)[0].placeholders if placeholder.path == "x"
    )
    assert "bind" in str(explain(mine)(rand(LARGE), rand(1)))
    assert (recordings(mine).recordings, recordings(mine).rebinds) == (1, 1), "later moves are the engine's business"


def test_tensors_that_alternate() -> None:
    mine = capture(block, inputs="bind")
    pairs = [(rand(8, 8, seed=n), rand(8, 8, seed=n + 9)) for n in range(3)]
    for number in range(30):
        both(block, mine, *pairs[number % 3])
    assert recordings(mine).recordings == 1


def test_one_moves_after_the_other() -> None:
    """In a graph an argument that has not moved yet cannot be told from other memory: it is bound when it moves."""
    mine = capture(block, inputs="bind")
    x, y = rand(8, 8), rand(8, 8, seed=1)
    for number in range(12):
        x = rand(8, 8, seed=number) if number > 2 else x
        y = rand(8, 8, seed=-number) if number > 6 else y
        both(block, mine, x, y)
    assert recordings(mine).recordings == 1


def test_written_arguments_are_written_where_they_are() -> None:
    def update(cache: Tensor, x: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, x)
        cache[0].mul_(2)
        return cache.sum(0)

    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        mine = capture(update, inputs="bind")
        caches = [rand(6, 4, seed=n) for n in range(2)]
        for number in range(14):
            before = caches[number % 2]._version
            both(update, mine, caches[number % 2], rand(1, 4, seed=number), torch.tensor([number % 6], device=DEVICE))
            assert caches[number % 2]._version > before
    assert policies(mine)["cache"] == "bind"
    assert not [finding for finding in recordings(mine).findings if finding.code == "CG102"]


@pytest.mark.parametrize("offset", [1, 2, 16])
def test_addresses_that_are_aligned_otherwise(offset: int) -> None:
    """Kernels may rely on the alignment they were recorded with."""

    def doubled(x: Tensor, out: Tensor) -> Tensor:
        out.copy_(x * 2)
        return x.sum(0)

    mine = capture(doubled, inputs="bind", max_recordings=8)
    for number in range(16):
        at = offset if number % 3 == 2 else 0
        x, out = rand(16 * 8 + 64, seed=number)[at : at + 128].view(16, 8), rand(16 * 8 + 64)[at : at + 128].view(16, 8)
        both(doubled, mine, x, out)
    assert recordings(mine).replays >= 8


def test_strided_views_of_a_larger_tensor() -> None:
    def reduced(x: Tensor, y: Tensor) -> Tensor:
        return x.t() @ y + y[0]

    mine = capture(reduced, inputs="bind")
    for number in range(10):
        whole = rand(64, 64, seed=number)
        row = 16 * (number % 3)
        both(reduced, mine, whole[row : row + 16, :16], whole[row : row + 16, 32:48])


def test_expanded_overlapping_and_empty_arguments_are_copied_or_nothing() -> None:
    def total(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x.sum() + y.sum() + z.sum()

    mine = capture(total, inputs="bind")
    for number in range(8):
        x, y = rand(1, 4, seed=number).expand(5, 4), rand(12, seed=number).as_strided((5, 4), (2, 1))
        mark_step_begin()
        same(mine(x, y, rand(0, 3)), total(x, y, rand(0, 3)))
    assert recordings(mine).recordings == 1


def test_arguments_that_share_memory() -> None:
    def written(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    mine = capture(written, inputs="bind", max_recordings=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for number in range(16):
            mark_step_begin()
            mine_base, their_base = rand(40, seed=number), rand(40, seed=number)
            ours, theirs = [(base[:16], base[8:24] if number % 2 else base[24:]) for base in (mine_base, their_base)]
            same(mine(*ours), written(*theirs))
            same(mine_base, their_base)


def test_an_argument_that_is_a_weight_now_and_then() -> None:
    """The graph must not take one for the other when either moves."""
    torch.manual_seed(0)
    net = nn.Linear(8, 8, bias=False, device=DEVICE)

    def body(x: Tensor) -> Tensor:
        return x @ net.weight.t() + x

    mine = capture(body, inputs="bind", max_recordings=20)
    with torch.no_grad():
        for number in range(24):
            mark_step_begin()
            x = (net.weight.detach(), rand(8, 8, seed=number), net.weight.data[:], rand(8, 8))[number % 4]
            if number % 5 == 4:
                net.weight = nn.Parameter(rand(8, 8, seed=number))
            same(mine(x), body(x))


@pytest.mark.parametrize("options", [{"inputs": "bind"}, {"inputs": "copy"}, {"static": ["x"]}], ids=str)
def test_an_argument_that_is_state_at_first_and_parts_from_it(options: Any) -> None:
    """Recorded with one tensor as both: which of the two an operator reads has to be known afterwards."""

    class Net(nn.Module):
        state: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.ones(4, 4, device=DEVICE))

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.state = (self.state + x) * 0.5
            return self.state

    mine, theirs = capture(Net(), **options), Net()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", CaptureWarning)
        for number in range(6):
            h = g = rand(4, 4, seed=number)
            for _ in range(2 + number % 3):
                h, g = mine(h), theirs(g)
                same([h, mine.state], [g, theirs.state])
            del h
    assert recordings(mine).replays


def test_a_written_argument_that_is_state_now_and_then() -> None:
    holder = [rand(4, 4, seed=n) for n in range(3)]
    twin = [tensor.clone() for tensor in holder]
    tables = {"mine": holder, "theirs": twin}

    def write(x: Tensor, name: str) -> Tensor:
        x.mul_(2)
        return tables[name][0] + x

    mine = capture(write, static=["x"], max_recordings=20)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", CaptureWarning)
        for number in range(18):
            mark_step_begin()
            same(mine(holder[number % 3], "mine"), write(twin[number % 3], "theirs"))
            same(holder, twin)


def test_outputs_of_other_captured_functions() -> None:
    """Live outputs of the path are read where they are; kept ones of earlier steps lie wherever they were moved."""

    def first(x: Tensor) -> Tensor:
        return x * 2

    def second(x: Tensor) -> Tensor:
        return x.tanh() + 1

    captured_first, captured_second = capture(first, inputs="bind"), capture(second, inputs="bind")
    kept: list[Tensor] = []
    for number in range(16):
        mark_step_begin()
        x = kept[-1] if number % 4 == 3 else rand(4, 4, seed=number)
        middle = captured_first(x)
        same(captured_second(middle), second(first(x)))
        if number % 3 == 0:
            kept.append(middle)
    same(kept[0], first(rand(4, 4, seed=0)))


def test_nothing_of_the_caller_is_kept_alive() -> None:
    mine = capture(block, inputs="bind")
    for number in range(8):
        mine(rand(8, 8, seed=number), rand(8, 8))
    x = rand(8, 8)
    mark_step_begin()
    mine(x, rand(8, 8))
    mark_step_begin()
    memory = weakref.ref(x.untyped_storage())
    del x
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("inputs", ["bind", "copy"])
def test_training_by_region(inputs: Any) -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).to(DEVICE) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    capture(nets[0], inputs=inputs)
    with torch.enable_grad():
        for number in range(12):
            mark_step_begin()
            results = []
            for net in nets:
                x = rand(4, 6, seed=number).requires_grad_()
                y = net(x)
                (y * rand(4, 6, seed=number + 7)).sum().backward()
                results.append([y.detach(), x.grad, *[p.grad for p in net.parameters()]])
            same(*results)
            for net in nets:
                net.zero_grad()
    assert recordings(nets[0]).replays >= 16


class Table(nn.Module):
    """A buffer that is read, and written at its first place."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", rand(8, seed=3))

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.table[:1] += 1
        return x * 2 + self.table


@pytest.mark.one_in(4)
@pytest.mark.parametrize("inputs", ["bind", "copy"])
@pytest.mark.parametrize("what", ["argument", "state", "both"])
def test_a_storage_that_grows(what: str, inputs: Any) -> None:
    """``resize_`` of the storage moves it to a larger piece of memory; later the tensor itself gets a larger shape."""
    ours, theirs = Table(), Table()
    mine = capture(ours, inputs=inputs, max_recordings=12)
    x, twin = rand(8, seed=1), rand(8, seed=1)
    for call in range(9):
        if call % 3 == 2:
            grown = [x, twin] * (what != "state") + [ours.table, theirs.table] * (what != "argument")
            for tensor in grown:
                tensor.untyped_storage().resize_(64 << call)
        assert torch.equal(mine(x), theirs(twin)), call
        assert torch.equal(ours.table, theirs.table)
    for tensor in (x, twin, ours.table, theirs.table):
        tensor.resize_(32).fill_(2.0)
    for _ in range(4):
        assert torch.equal(mine(x), theirs(twin))
        assert torch.equal(ours.table, theirs.table)


def test_an_unknown_choice() -> None:
    with pytest.raises(AnnotationError, match=r"inputs='binds' is not a choice.*did you mean 'bind'"):
        capture(block, inputs="binds")  # type: ignore[call-overload]
