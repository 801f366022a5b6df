"""Mutation: what a body writes to its arguments and to modules happens once a call, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, plans, recordings, warmup
from tests.support.device import AGAIN, REBINDS, rng_state
from tests.support.writes import bits, x_of
from tests.support.writes import fresh as fresh

Arguments = tuple[Any, ...]


def check(
    function: Callable[..., Any],
    make: Callable[[int], Arguments],
    *,
    times: int = 6,
    replays: int | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Compare calls on fresh arguments with eager ones: results, written arguments and version counters."""
    captured: Callable[..., Any] = capture(function, **options)
    for seed in range(times):
        mine, theirs = make(seed), make(seed)
        versions = [
            (tensor._version, twin._version)
            for tensor, twin in zip(mine, theirs, strict=True)
            if isinstance(tensor, Tensor)
        ]
        got, expected = captured(*mine), function(*theirs)
        assert bits(got) == bits(expected), seed
        assert [bits(argument) for argument in mine] == [bits(argument) for argument in theirs], seed
        tensors = [(tensor, twin) for tensor, twin in zip(mine, theirs, strict=True) if isinstance(tensor, Tensor)]
        for (tensor, twin), (before, before_eager) in zip(tensors, versions, strict=True):
            assert (tensor._version > before) == (twin._version > before_eager), seed
        del got, expected  # tests/tree has callers that hold results
    if replays is not ANY:
        assert recordings(captured).replays == (times - 2 if replays is None else replays)
    return captured


ANY = -1
"""Any number of replays: static arguments are at another address in each call, which engines handle differently."""


# ------------------------------------------------------------------------------------------------- written arguments


def add_to_first(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x * 2 + y


def test_a_plain_argument_is_copied_back() -> None:
    captured = check(add_to_first, lambda seed: (x_of(seed), x_of(seed + 50)))
    (plan,) = plans(captured)
    assert [(one.path, str(one.policy)) for one in plan.placeholders] == [("x", "copy-back"), ("y", "copy")]


def test_a_static_argument_is_written_where_it_is() -> None:
    captured = capture(add_to_first, static=["x"])
    mine, theirs = x_of(1), x_of(1)
    address = mine.data_ptr()
    for seed in range(8):
        version = mine._version
        assert bits(captured(mine, x_of(seed))) == bits(add_to_first(theirs, x_of(seed)))
        assert bits(mine) == bits(theirs)
        assert mine._version > version
    assert mine.data_ptr() == address
    assert recordings(captured).recordings == 1


def test_a_written_argument_may_come_from_anywhere() -> None:
    layouts: list[Callable[[int], Tensor]] = [
        lambda seed: x_of(seed, 4, 3).t(),
        lambda seed: x_of(seed, 3, 8)[:, ::2],
        lambda seed: x_of(seed, 6, 4)[::2],
        lambda seed: x_of(seed, 13)[1:].view(3, 4),
    ]
    for layout in layouts:
        check(add_to_first, lambda seed, layout=layout: (layout(seed), x_of(seed + 50)))  # type: ignore[misc]


def test_the_rest_of_a_base_stays_as_it_was() -> None:
    captured = capture(add_to_first)
    for seed in range(6):
        mine, theirs = x_of(seed, 6, 8), x_of(seed, 6, 8)
        assert bits(captured(mine[::2, ::2], x_of(99))) == bits(add_to_first(theirs[::2, ::2], x_of(99)))
        assert bits(mine) == bits(theirs)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda x, y: x.add_(y),
    "copy_": lambda x, y: x.copy_(y),
    "setitem": lambda x, y: x.__setitem__(1, y[0]),
    "setitem-slice": lambda x, y: x.__setitem__((slice(None), slice(1, 3)), y[:, :2]),
    "view": lambda x, y: x[1:].mul_(2),
    "transposed": lambda x, y: x.t().add_(y.t()),
    "flat": lambda x, y: x.view(-1)[::3].zero_(),
    "unbind": lambda x, y: [part.add_(index) for index, part in enumerate(x.unbind())],
    "select-of-view": lambda x, y: x[1:][0].fill_(7),
    "out": lambda x, y: torch.add(y, 1, out=x),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([0, 2]), y[:2]),
    "index_copy_": lambda x, y: x.index_copy_(0, torch.tensor([2]), y[:1]),
    "scatter_": lambda x, y: x.scatter_(1, torch.zeros(3, 1, dtype=torch.long), 5.0),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, -1.0),
    "relu_": lambda x, y: torch.relu_(x),
    "foreach": lambda x, y: torch._foreach_add_([x], [y]),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "diagonal": lambda x, y: x.diagonal().add_(1),
    "uniform_": lambda x, y: x.uniform_(),
    "twice": lambda x, y: x.add_(y).mul_(2),
    "both": lambda x, y: (x.add_(y), y.mul_(x)),
    "swap": lambda x, y: (lambda old: (x.copy_(y), y.copy_(old)))(x.clone()),
    "data": lambda x, y: x.data.add_(y),
    "detach": lambda x, y: x.detach().add_(y),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("static", [[], ["x"], ["x", "y"]], ids=["copied", "x", "both"])
@pytest.mark.parametrize("name", WRITES)
def test_every_kind_of_write(name: str, static: list[str]) -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        WRITES[name](x, y)
        return x + y

    captured = capture(body, static=static)
    mine, theirs = (x_of(1), x_of(2)), (x_of(1), x_of(2))
    for seed in range(6):
        torch.manual_seed(seed)
        got = captured(*mine)
        state = rng_state()
        torch.manual_seed(seed)
        assert bits(got) == bits(body(*theirs))
        assert bits(list(mine)) == bits(list(theirs))
        assert bits(state) == bits(rng_state())
    assert recordings(captured).recordings == 1 + AGAIN


def test_a_written_number_of_one_element() -> None:
    def body(count: Tensor, x: Tensor) -> Tensor:
        count.add_(1)
        return x * count

    check(body, lambda seed: (torch.tensor(seed), x_of(seed)))
    check(
        body, lambda seed: (torch.tensor(float(seed)), x_of(seed)), replays=None if REBINDS else ANY, static=["count"]
    )


def test_a_write_to_a_view_made_by_the_caller_shows_in_its_base() -> None:
    captured = capture(add_to_first, static=["x"])
    mine, theirs = x_of(1, 6, 4), x_of(1, 6, 4)
    for seed in range(6):
        assert bits(captured(mine[2:5], x_of(seed))) == bits(add_to_first(theirs[2:5], x_of(seed)))
        assert bits(mine) == bits(theirs)


def test_arguments_that_share_memory() -> None:
    def make(seed: int) -> Arguments:
        base = x_of(seed, 8)
        return base[:6], base[2:]

    def body(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        b.mul_(2)
        return a + b

    check(body, make)
    check(body, make, replays=None if REBINDS else ANY, static=["a", "b"])


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("static", [[], ["a"], ["b"], ["a", "b"]])
@pytest.mark.parametrize("write", ["a", "b"])
def test_a_shared_base_is_written_through_either_name(static: list[str], write: str) -> None:
    def body(a: Tensor, b: Tensor) -> Tensor:
        (a if write == "a" else b).add_(1)
        return a.sum() + b.sum()

    captured = capture(body, static=static)
    mine, theirs = x_of(1, 8), x_of(1, 8)
    for _ in range(6):
        assert bits(captured(mine[:6], mine[2:])) == bits(body(theirs[:6], theirs[2:]))
        assert bits(mine) == bits(theirs)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_an_argument_that_is_a_weight() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(x_of(1))

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.weight.add_(1)
            return x * 2 + self.weight

    net = Net()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for seed in range(8):
        own = seed % 3 == 1
        got = captured(net.weight if own else x_of(seed))
        assert bits(got) == bits(twin(twin.weight if own else x_of(seed)))
        assert bits(net.weight.data) == bits(twin.weight.data)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_an_argument_that_overlaps_what_the_body_writes() -> None:
    """In every second call the argument overlaps a tensor of the closure that the body writes."""
    base, twin_base = x_of(0, 8), x_of(0, 8)

    def make(base: Tensor) -> Callable[[Tensor], Tensor]:
        part = base[:4]

        def body(x: Tensor) -> Tensor:
            part.add_(1)
            return x * 2

        return body

    captured, eager = capture(make(base)), make(twin_base)
    for seed in range(12):
        mine, theirs = (base[2:6], twin_base[2:6]) if seed % 2 else (x_of(seed, 4), x_of(seed, 4))
        assert bits(captured(mine)) == bits(eager(theirs)), seed
        assert bits(base) == bits(twin_base)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_two_places_begin_and_cease_to_share_memory() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = x_of(1), x_of(2)

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.a.add_(x)
            return self.b * 2 + self.a

    net, twin = Net(), Net()
    captured = capture(net)
    for seed in range(14):
        for module in (net, twin):
            if seed == 5:
                module.b = module.a
            if seed == 9:
                module.b = x_of(7)
            if seed == 11:
                module.b = module.a[:]
        assert bits(captured(x_of(seed))) == bits(twin(x_of(seed))), seed


def test_a_managed_argument_is_written() -> None:
    """One recording's output is written by the next: the caller's tensor shows the write."""
    first = capture(lambda x: torch.tanh(x) + 1)
    second = capture(lambda y: y.mul_(3).sum())
    for seed in range(8):
        y = first(x_of(seed))
        expected = torch.tanh(x_of(seed)) + 1
        assert bits(second(y)) == bits(expected.mul_(3).sum())
        assert bits(y) == bits(expected)
        del y
    assert recordings(second).recordings == 1


def test_a_view_of_a_managed_argument_is_written() -> None:
    first = capture(lambda x: torch.tanh(x) + 1)
    second = capture(lambda part, y: part.mul_(3) + y[1:])
    for seed in range(8):
        y = first(x_of(seed))
        expected = torch.tanh(x_of(seed)) + 1
        assert bits(second(y[1:], y)) == bits(expected[1:].mul_(3) + expected[1:])
        assert bits(y) == bits(expected)


def test_a_written_dict_of_caches() -> None:
    def body(x: Tensor, cache: dict[str, Tensor], position: Tensor) -> Tensor:
        cache["k"].index_copy_(0, position, x)
        cache["v"].index_copy_(0, position, x * 2)
        position.add_(1)
        return cache["k"].sum(0) + cache["v"].sum(0)

    for static in ([], ["cache"], ["cache", "position"]):
        captured = capture(body, static=static)
        mine, theirs = (
            ({"k": torch.zeros(8, 4), "v": torch.zeros(8, 4)}, torch.zeros(1, dtype=torch.long)) for _ in "ab"
        )
        for seed in range(8):
            assert bits(captured(x_of(seed, 1, 4), *mine)) == bits(body(x_of(seed, 1, 4), *theirs))
            assert bits(list(mine)) == bits(list(theirs))
        assert recordings(captured).recordings == 1


def test_warmup_writes_nothing() -> None:
    captured = capture(add_to_first)
    x, y = x_of(1), x_of(2)
    warmup(captured)(x, y)
    assert bits([x, y]) == bits([x_of(1), x_of(2)])
    theirs = x_of(1)
    assert bits(captured(x, y)) == bits(add_to_first(theirs, y))
    assert bits(x) == bits(theirs)
    assert recordings(captured).replays == 1


# ------------------------------------------------------------------------------------------ module state, implicitly


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.total: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(4))
        self.plain = torch.zeros(4)
        self.parts = [torch.zeros(4), torch.zeros(4)]

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.total.add_(x.sum(0))
        self.plain.copy_(x[0])
        self.parts[1].add_(self.plain)
        return x * self.count + self.parts[1] + self.total


def state_of(module: nn.Module) -> dict[str, Any]:
    plain = {name: value for name, value in vars(module).items() if isinstance(value, (Tensor, list, tuple))}
    return {
        **{name: bits(value) for name, value in module.state_dict().items()},
        **{k: bits(v) for k, v in plain.items()},
    }


def test_buffers_and_plain_tensors_are_written_once_a_call() -> None:
    net = Counter()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for seed in range(8):
        assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))
        assert state_of(net) == state_of(twin)
    assert int(net.count) == 8
    assert recordings(net.forward).recordings == 1


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:CG201:capture.CaptureWarning")  # momentum=None reads the counter
@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
@pytest.mark.parametrize("make", [nn.BatchNorm1d, nn.InstanceNorm1d, nn.SyncBatchNorm, nn.BatchNorm2d])
def test_norms_that_write_silently(make: Any, momentum: float | None) -> None:
    """Running statistics are written without a schema saying so, counters by an operator."""
    torch.manual_seed(0)
    if make is nn.InstanceNorm1d:
        net = nn.Sequential(make(4, momentum=momentum or 0.2, track_running_stats=True), nn.ReLU())
    else:
        net = nn.Sequential(make(4, momentum=momentum), nn.ReLU())
    if make is nn.SyncBatchNorm:
        net.eval()
    shape = (3, 4, 5, 5) if make is nn.BatchNorm2d else (3, 4, 5)
    twin = copy.deepcopy(net)
    captured = capture(net)
    for seed in range(8):
        if seed == 5 and make is not nn.SyncBatchNorm:
            net.eval()
            twin.eval()
        assert bits(captured(x_of(seed, *shape))) == bits(twin(x_of(seed, *shape)))
        assert state_of(net) == state_of(twin)
    assert recordings(net.forward).recordings > 0 or momentum is None


def test_the_counter_of_a_norm_counts_every_call() -> None:
    net = capture(nn.Sequential(nn.BatchNorm1d(4)))
    warmup(net.forward)(x_of(0))
    for seed in range(7):
        net(x_of(seed))
    assert int(net[0].num_batches_tracked) == 7  # type: ignore[arg-type]


def test_closure_and_global_tensors_are_written_once_a_call() -> None:
    table, twin_table = torch.zeros(4), torch.zeros(4)

    def body(x: Tensor, table: Tensor) -> Tensor:
        table.add_(x.sum(0))
        GLOBAL_TABLE.add_(1)
        return x + table + GLOBAL_TABLE

    captured = capture(lambda x: body(x, table))
    for seed in range(8):
        GLOBAL_TABLE.fill_(seed)
        got = captured(x_of(seed))
        after = bits(GLOBAL_TABLE)
        GLOBAL_TABLE.fill_(seed)
        assert bits(got) == bits(body(x_of(seed), twin_table))
        assert after == bits(GLOBAL_TABLE)
        assert bits(table) == bits(twin_table)


GLOBAL_TABLE = torch.zeros(4)
