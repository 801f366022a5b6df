"""Mutation and effects: what a body writes, to tensors or to Python state, happens once a call, as in eager."""

from __future__ import annotations

import collections
import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, _trees, capture, config, mark_step_begin, plans, recordings, warmup
from tests.device import DEVICE, MOVES_HELD, REBINDS, rng_state


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference, no plans on disk, no marks and no tree of another test; dead memory is NaN."""
    _trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False, poison=True):
        yield


def bits(value: Any) -> Any:
    """All that makes two results equal bit for bit."""
    if isinstance(value, (tuple, list)):
        return type(value), [bits(member) for member in value]
    if isinstance(value, dict):
        return [(key, bits(member)) for key, member in value.items()]
    if not isinstance(value, Tensor):
        return type(value), repr(value)
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return value.dtype, tuple(value.shape), value.stride(), flat.view(torch.uint8).tolist() if len(flat) else []


def x_of(seed: int = 0, *shape: int) -> Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator(DEVICE).manual_seed(seed))


Arguments = tuple[Any, ...]


def check(
    function: Callable[..., Any],
    make: Callable[[int], Arguments],
    *,
    times: int = 6,
    replays: int | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Calls on fresh arguments give eager's results, written arguments and version counters."""
    captured: Callable[..., Any] = capture(function, **options)
    for seed in range(times):
        mine, theirs = make(seed), make(seed)
        versions = [
            (one._version, other._version) for one, other in zip(mine, theirs, strict=True) if isinstance(one, Tensor)
        ]
        got, expected = captured(*mine), function(*theirs)
        assert bits(got) == bits(expected), seed
        assert [bits(one) for one in mine] == [bits(one) for one in theirs], seed
        tensors = [(one, other) for one, other in zip(mine, theirs, strict=True) if isinstance(one, Tensor)]
        for (one, other), (before, before_eager) in zip(tensors, versions, strict=True):
            assert (one._version > before) == (other._version > before_eager), seed
    if replays is not ANY:
        assert recordings(captured).replays == (times - 2 if replays is None else replays)
    return captured


ANY = -1
"""Static arguments are at another address in each call: how many of the calls are replays is the engine's affair."""


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
    assert recordings(captured).recordings == 1


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
    """Memory may be reached as an argument and through the closure; on some calls only."""
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
        for one in (net, twin):
            if seed == 5:
                one.b = one.a
            if seed == 9:
                one.b = x_of(7)
            if seed == 11:
                one.b = one.a[:]
        assert bits(captured(x_of(seed))) == bits(twin(x_of(seed))), seed


def test_a_managed_argument_is_written() -> None:
    """The output of one recording, written by the next, is the caller's own tensor."""
    first = capture(lambda x: torch.tanh(x) + 1)
    second = capture(lambda y: y.mul_(3).sum())
    for seed in range(8):
        y = first(x_of(seed))
        expected = torch.tanh(x_of(seed)) + 1
        assert bits(second(y)) == bits(expected.mul_(3).sum())
        assert bits(y) == bits(expected)
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


# ---------------------------------------------------------------------------------------------------------- effects


class Keeper(nn.Module):
    """``body`` decides what the forward leaves behind."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.linear = nn.Linear(4, 4)
        self.stored: Tensor
        self.register_buffer("stored", torch.zeros(3, 4))
        self.h = torch.zeros(3, 4)
        self.state: Any = (torch.zeros(3, 4), torch.zeros(3, 4))
        self.table: dict[str, Any] = {"y": torch.zeros(3, 4)}
        self.items: list[Any] = [torch.zeros(3, 4), torch.zeros(3, 4)]
        self.last: Any = None
        self.child = nn.Identity()

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)

    def kept(self) -> dict[str, Any]:
        names = ("stored", "h", "state", "table", "items", "last")
        return {**{name: bits(getattr(self, name)) for name in names}, "child": bits(getattr(self.child, "seen", None))}


def _last(self: Keeper, x: Tensor) -> Tensor:
    self.last = torch.tanh(x)
    result: Tensor = self.last * 2
    return result


def _hidden(self: Keeper, x: Tensor) -> Tensor:
    self.h = torch.tanh(self.linear(x) + self.h)
    return self.h + 1


def _tuple_state(self: Keeper, x: Tensor) -> Tensor:
    h, c = self.state
    c = torch.sigmoid(x) * c + torch.tanh(h + x)
    self.state = (torch.tanh(c), c)
    result: Tensor = self.state[0] * 2
    return result


def _dict_item(self: Keeper, x: Tensor) -> Tensor:
    self.table["y"] = torch.tanh(x) + self.table["y"]
    result: Tensor = self.table["y"] * 2
    return result


def _list_item(self: Keeper, x: Tensor) -> Tensor:
    self.items[1] = torch.tanh(x) + self.items[0]
    self.items[0] = self.items[1] * 2
    result: Tensor = self.items[0] + 1
    return result


def _buffer(self: Keeper, x: Tensor) -> Tensor:
    self.stored = torch.tanh(x) + self.stored
    return self.stored * 2


def _argument(self: Keeper, x: Tensor) -> Tensor:
    self.last = x
    return x * 2


def _view_of_argument(self: Keeper, x: Tensor) -> Tensor:
    self.last = x[1:]
    return x * 2


def _view_of_weight(self: Keeper, x: Tensor) -> Tensor:
    self.last = self.linear.weight[1:]
    return x @ self.linear.weight


def _structure(self: Keeper, x: Tensor) -> Tensor:
    self.last = {"a": [torch.tanh(x), 3], "b": (x, None)}
    return x * 2


def _on_child(self: Keeper, x: Tensor) -> Tensor:
    self.child.seen = torch.tanh(x)
    y: Tensor = self.child.seen * 2
    return y


def _shared_with_output(self: Keeper, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    self.last = y.t()
    self.h = y[1:]
    return y


def _twice(self: Keeper, x: Tensor) -> Tensor:
    self.h = self.h + x
    self.h = self.h * 2
    return self.h + 1


def _hidden_in_place(self: Keeper, x: Tensor) -> Tensor:
    self.h = self.h + x
    self.h.mul_(2)
    self.last = self.h
    return self.h + 1


BODIES = [
    _last, _hidden, _tuple_state, _dict_item, _list_item, _buffer, _argument, _view_of_argument, _view_of_weight,
    _structure, _on_child, _shared_with_output, _twice, _hidden_in_place,
]  # fmt: skip


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("body", BODIES)
def test_effects_hold_each_calls_value(body: Callable[[Any, Tensor], Tensor], marked: bool) -> None:
    net = Keeper(body)
    twin = copy.deepcopy(net)
    captured = capture(net)
    history: list[tuple[Any, Any]] = []
    for seed in range(10):
        if marked:
            mark_step_begin()
        assert bits(captured(x_of(seed))) == bits(twin(x_of(seed))), seed
        assert net.kept() == twin.kept(), seed
        history.append((net.h, twin.h))
    assert [bits(mine) for mine, _ in history] == [bits(theirs) for _, theirs in history]
    now = recordings(net.forward)
    assert not now.rebinds or body is not _view_of_weight, "a view that is replaced is no static tensor that moved"
    if MOVES_HELD or body is not _shared_with_output:
        assert now.replays >= 6
    else:  # the module holds views of the last output, so each recording lies under the one before
        assert now.replays + now.recordings == 9


@pytest.mark.parametrize("body", BODIES)
def test_effects_reset_by_the_caller(body: Callable[[Any, Tensor], Tensor]) -> None:
    """State that the caller replaces between calls is the state the next call reads."""
    net = Keeper(body)
    twin = copy.deepcopy(net)
    captured = capture(net)
    for seed in range(12):
        if seed % 4 == 3:
            for one in (net, twin):
                one.h = x_of(seed)
                one.state = (x_of(seed + 1), x_of(seed + 2))
                one.table["y"] = x_of(seed + 3)
                one.items[0] = x_of(seed + 4)
                one.stored = x_of(seed + 5)
        assert bits(captured(x_of(seed))) == bits(twin(x_of(seed))), seed
        assert net.kept() == twin.kept(), seed


@pytest.mark.parametrize("body", BODIES)
def test_warmup_leaves_no_effect(body: Callable[[Any, Tensor], Tensor]) -> None:
    net = Keeper(body)
    twin = copy.deepcopy(net)
    before = net.kept()
    captured = capture(net)
    warmup(net.forward)(x_of(1))
    assert net.kept() == before
    assert hasattr(net.child, "seen") == hasattr(twin.child, "seen")
    for seed in range(4):
        assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))
        assert net.kept() == twin.kept()
    now = recordings(net.forward)
    if MOVES_HELD or body is not _shared_with_output:
        assert now.replays == 4
    else:
        assert now.replays >= 1
        assert now.replays + now.recordings == 5


def test_an_effect_outlives_the_module() -> None:
    net = Keeper(_hidden)
    twin = copy.deepcopy(net)
    captured = capture(net)
    for seed in range(5):
        captured(x_of(seed))
        twin(x_of(seed))
    kept, expected = net.h, bits(twin.h)
    del net, captured
    other = capture(lambda x: torch.tanh(x) * 2 + 1)
    for seed in range(5):
        other(x_of(seed))
    assert bits(kept) == expected


def make_closure() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    h = torch.zeros(3, 4)

    def body(x: Tensor) -> Tensor:
        nonlocal h
        h = torch.tanh(x + h)
        return h * 2

    return body, lambda: h


def test_a_closure_cell_is_an_effect() -> None:
    (body, mine), (eager, theirs) = make_closure(), make_closure()
    captured = capture(body)
    for seed in range(8):
        assert bits(captured(x_of(seed))) == bits(eager(x_of(seed)))
        assert bits(mine()) == bits(theirs())
    assert recordings(captured).replays >= 4


HIDDEN = torch.zeros(3, 4)


def global_body(x: Tensor) -> Tensor:
    global HIDDEN
    HIDDEN = torch.tanh(x + HIDDEN)
    return HIDDEN * 2


def test_a_global_is_an_effect() -> None:
    global HIDDEN
    captured = capture(global_body)
    mine = theirs = HIDDEN = torch.zeros(3, 4)
    for seed in range(8):
        HIDDEN = mine
        got = captured(x_of(seed))
        mine, HIDDEN = HIDDEN, theirs
        assert bits(got) == bits(global_body(x_of(seed)))
        theirs = HIDDEN
        assert bits(mine) == bits(theirs)
    assert recordings(captured).replays >= 4


def test_an_item_of_an_argument_is_an_effect() -> None:
    def body(x: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["h"] = torch.tanh(x + state["h"])
        return state["h"] * 2

    captured = capture(body)
    mine, theirs = {"h": torch.zeros(3, 4)}, {"h": torch.zeros(3, 4)}
    for seed in range(8):
        if seed == 4:  # another dict altogether
            mine, theirs = {"h": x_of(77)}, {"h": x_of(77)}
        assert bits(captured(x_of(seed), mine)) == bits(body(x_of(seed), theirs))
        assert bits(mine) == bits(theirs)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("container", [list, collections.deque])
def test_a_container_that_grows_is_never_frozen(container: type[Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = container()

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(torch.tanh(x))
            result: Tensor = self.seen[-1] * 2
            return result

    net, twin = Net(), Net()
    captured = capture(net)
    for seed in range(6):
        assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))
    assert [bits(one) for one in net.seen] == [bits(one) for one in twin.seen]


def test_a_python_counter_runs_eagerly() -> None:
    class Net(nn.Module):
        calls = 0

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2 + 1

    net = Net()
    captured = capture(net)
    with pytest.warns(CaptureWarning, match="CG204[^`]*calls") as warned:
        got = [bits(captured(x_of(seed))) for seed in range(6)]
    assert got == [bits(x_of(seed) * 2 + 1) for seed in range(6)]
    assert net.calls == 6
    assert len(warned) == 1


def test_state_that_the_first_call_sets_up_does_not_keep_it_eager() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache: Tensor | None = None
            self.ready = False

        @override
        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                self.cache = torch.arange(12.0).view(3, 4)
                self.ready = True
            assert self.cache is not None
            return torch.tanh(x) + self.cache

    net, twin = Net(), Net()
    captured = capture(net)
    for seed in range(8):
        assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))
    assert recordings(net.forward).replays > 0


# --------------------------------------------------------------------------------------- returned inputs, and views


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "view": lambda x: x[1:],
    "transposed": lambda x: (x.t(), x + 1),
    "flat": lambda x: x.view(-1)[2:],
    "unbind": lambda x: x.unbind(),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1)),
    "detached": lambda x: x.detach(),
    "expanded": lambda x: x[:1].expand(5, 4),
    "other-dtype": lambda x: x.view(torch.int32),
    "written": lambda x: x.add_(1)[1:],
    "beside-fresh": lambda x: {"x": x, "part": [x[0], torch.tanh(x)]},
}


def first_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return first_tensor(next(iter(value.values())) if isinstance(value, dict) else value[0])


@pytest.mark.parametrize("static", [[], ["x"]], ids=["copied", "static"])
@pytest.mark.parametrize("name", ALIASES)
def test_returned_views_are_the_callers_memory(name: str, static: list[str]) -> None:
    function = ALIASES[name]
    captured = capture(lambda x: function(x), static=static)
    for seed in range(6):
        mine, theirs = x_of(seed), x_of(seed)
        got, expected = captured(mine), function(theirs)
        assert bits(got) == bits(expected)
        assert (first_tensor(got) is mine) == (first_tensor(expected) is theirs)
        mine.add_(1)
        theirs.add_(1)
        assert bits(got) == bits(expected)
        if name != "expanded":
            first_tensor(got).zero_()
            first_tensor(expected).zero_()
        assert bits(mine) == bits(theirs)


def test_a_returned_argument_of_another_offset() -> None:
    """The view is taken of this call's tensor, wherever it begins in its storage."""
    captured = capture(lambda x: (x[1:], x * 2))
    for offset in (0, 16, 4, 32, 8, 0):
        base = x_of(1, 64)
        mine = base[offset : offset + 12].view(3, 4)
        view, double = captured(mine)
        assert bits([view, double]) == bits([mine[1:], mine * 2])
        view.zero_()
        assert base[offset + 4 : offset + 12].eq(0).all()


def test_returned_weights_are_the_modules_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(x_of(1))

        @override
        @capture
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.weight, self.weight[1:], torch.tanh(x)

    net = Net()
    for seed in range(8):
        if seed == 5:
            net.weight = nn.Parameter(x_of(9))
        weight, part, _ = net(x_of(seed))
        assert weight is net.weight
        part.zero_()
        assert net.weight[1:].eq(0).all()
        net.weight.copy_(x_of(seed))


# -------------------------------------------------------------------------------------------------- version counters


def test_version_counters_tell_who_was_written() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.written: Tensor
            self.read: Tensor
            self.register_buffer("written", torch.zeros(4))
            self.register_buffer("read", torch.ones(4))

        @override
        @capture(static=["fixed"])
        def forward(self, x: Tensor, y: Tensor, fixed: Tensor) -> Tensor:
            x.add_(1)
            self.written.add_(y.sum(0))
            fixed.mul_(2)
            return x + y + self.written + self.read + fixed

    net, fixed = Net(), x_of(5)
    for seed in range(6):
        x, y = x_of(seed), x_of(seed + 1)
        tensors = [x, y, fixed, net.written, net.read]
        before = [one._version for one in tensors]
        net(x, y, fixed)
        assert [one._version > old for one, old in zip(tensors, before, strict=True)] == [
            True,
            False,
            True,
            True,
            False,
        ]


def test_version_counters_of_shared_arguments_rise() -> None:
    captured = capture(lambda a, b: a.add_(1) + b)
    for seed in range(6):
        base = x_of(seed, 8)
        before = base._version
        captured(base[:6], base[2:])
        assert base._version > before


def test_autograd_notices_a_replayed_write() -> None:
    """A tensor saved for backward and then written by a replay is an error, as in eager."""
    captured = capture(lambda buffer: buffer.add_(1).sum(), static=["buffer"])
    buffer = torch.ones(3)
    for _ in range(3):
        captured(buffer)
    with torch.enable_grad():
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * buffer).sum()
        with torch.no_grad():
            captured(buffer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("options", [{}, {"static": ["out"]}, {"inputs": "bind"}], ids=str)
def test_an_out_of_another_shape_gets_its_memory_eagerly(options: Any) -> None:
    """The operator gives the caller's tensor other memory, which must not be that of a recording."""

    def body(x: Tensor, out: Tensor) -> Tensor:
        torch.add(x, 1, out=out)
        return x * 2

    mine = capture(body, **options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about the shape, and CG202
        for number in range(6):
            x = torch.full((6, 4), float(number), device=DEVICE)
            ours, theirs = torch.zeros(2, 4, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
            assert torch.equal(mine(x, ours), body(x, theirs))
            assert torch.equal(ours, theirs)
        warmup(mine)(x, given := torch.zeros(2, 4, device=DEVICE))
        assert torch.equal(given, torch.zeros(2, 4, device=DEVICE))
    assert recordings(mine).recordings == 0
    assert any("out= of another shape" in one.what for one in recordings(mine).findings)


class Rebuilding:
    """Makes its list anew in every call, as wrappers do that look up their parts each time."""

    def __init__(self, count: int) -> None:
        self.source = [torch.full((4,), float(number + 1)) for number in range(count)]
        self.parts = list(self.source)
        self.named = {"first": [*self.source]}

    def run(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x * 2 + part
        x = x + self.named["first"][-1]
        self.parts = list(self.parts)
        self.named = {"first": [*self.named["first"]]}
        return x


def test_containers_that_the_body_makes_anew() -> None:
    """No reason to record again; other members, a longer list, and members that moved are."""
    mine, theirs = Rebuilding(2), Rebuilding(2)
    captured = capture(mine.run)

    def both(seed: int) -> None:
        mark_step_begin()
        x = torch.full((4,), float(seed))
        assert torch.equal(captured(x), theirs.run(x))

    for seed in range(6):
        both(seed)
    assert recordings(captured).recordings == 1
    assert recordings(captured).replays >= 3
    for change in (
        lambda one: one.parts.append(torch.full((4,), 9.0)),
        lambda one: setattr(one, "parts", [*one.parts, torch.full((4,), -3.0)]),
        lambda one: one.parts.reverse(),
        lambda one: one.parts.pop(),
        lambda one: one.named["first"].append(torch.full((4,), 8.0)),
        lambda one: one.named["first"].__setitem__(-1, torch.full((4,), 7.0)),
    ):
        change(mine)
        change(theirs)
        for seed in range(4):
            both(seed)


class Cache:
    """Sets itself up at its first use, as the caches of transformers do."""

    def __init__(self) -> None:
        self.ready = False

    def update(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            self.values = torch.zeros_like(x)
            self.width = x.shape[-1]
        self.values.add_(x)
        return self.values


def test_objects_that_come_and_go_and_set_themselves_up() -> None:
    """Each first call is eager, others replay, however many objects there were; those that are gone hold nothing."""

    def body(x: Tensor, cache: Cache) -> Tensor:
        return cache.update(x) * 2

    captured = capture(body, static=["cache"])
    gone: list[weakref.ref[Tensor]] = []
    for _ in range(8):
        mine, theirs = Cache(), Cache()
        before = recordings(captured).replays
        for seed in range(6):
            mark_step_begin()
            assert bits(captured(x_of(seed), mine)) == bits(body(x_of(seed), theirs))
        assert bits(mine.values) == bits(theirs.values)
        assert recordings(captured).replays >= before + 2
        gc.collect()
        assert all(one() is None for one in gone)
        gone.append(weakref.ref(mine.values))
    assert recordings(captured).eager_calls == 0


def transposed(x: Tensor) -> Tensor:
    x.t_()
    return x + 1


def unsqueezed_after_a_write(x: Tensor) -> Tensor:
    x.add_(1)
    x.unsqueeze_(0)
    return x.sum()


def seen_otherwise(x: Tensor) -> Tensor:
    x.as_strided_((2,), (1,), 1)
    return x * 2


def resized(x: Tensor) -> Tensor:
    x.resize_(2, 2)
    return x * 2


def on_other_memory(x: Tensor) -> Tensor:
    x.set_(torch.arange(4.0))  # type: ignore[call-overload]
    return x * 2


def with_other_data(x: Tensor) -> Tensor:
    x.data = torch.arange(5.0)
    return x * 2


def transposed_and_raising(x: Tensor) -> Tensor:
    x.t_()
    raise ValueError("on purpose")


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("skips", [False, True], ids=["watched first", "recorded straight away"])
@pytest.mark.parametrize(
    "body",
    [
        transposed, unsqueezed_after_a_write, seen_otherwise, resized, on_other_memory, with_other_data,
        transposed_and_raising,
    ],
)  # fmt: skip
def test_arguments_that_get_another_shape(body: Callable[[Tensor], Tensor], skips: bool) -> None:
    """The caller's tensor has it, too, also where the run that shows it had a copy."""

    def told(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        try:
            return bits(function(x)), bits(x)
        except ValueError as error:
            return str(error), bits(x)

    captured = capture(body)
    with config.patch(skip_warmup=skips):
        for seed in range(4):
            mark_step_begin()
            assert told(captured, x_of(seed, 2, 3)) == told(body, x_of(seed, 2, 3))
    assert recordings(captured).recordings == 0


class Holder:
    """Dicts below an object."""

    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}
        self.deep: dict[str, dict[str, Any]] = {"in": {}}
        self.count = 0


Given = dict[str, Any]


def adds_views_of_members(o: Holder, d: Given) -> Any:
    d["same"], d["view"] = d["x"], d["x"][0]
    return d["view"] + 1


def adds_a_number(o: Holder, d: Given) -> Any:
    d["n"] = 5
    return d["x"] * 2


def adds_containers(o: Holder, d: Given) -> Any:
    d["inner"], d["list"] = {"b": d["x"] * 2}, [d["x"] + 1, d["x"] * 3]
    return d


def takes_one_away(o: Holder, d: Given) -> Any:
    del d["w"]
    d["y"] = d["x"] * 3
    return d


def fills_once(o: Holder, d: Given) -> Any:
    if "k" not in o.cache:
        o.cache["k"] = d["x"] * 2
    return o.cache["k"] + d["x"]


def fills_deep(o: Holder, d: Given) -> Any:
    o.deep["in"]["z"] = d["x"] * 2
    return o.deep["in"]["z"] + 1


def names_by_count(o: Holder, d: Given) -> Any:
    o.count += 1
    o.cache[f"step {o.count}"] = d["x"] * o.count
    return sum(o.cache.values())


def names_no_string(o: Holder, d: Given) -> Any:
    o.cache[1] = d["x"] * 2
    return o.cache[1] + 1


def adds_and_replaces(o: Holder, d: Given) -> Any:
    d["y"] = d["x"] * 2
    d["v"] = d["y"] + 1
    d["x"] = d["v"] * 2
    d["w"].add_(1)
    d["written"] = d["w"]
    return d["x"], d


def keeps_the_dict(o: Holder, d: Given) -> Any:
    o.cache["last"] = d
    d["y"] = d["x"] * 2
    return d["y"]


def shape_of(value: Any, seen: dict[int, int]) -> Any:
    """Values, order of members, and which objects are the same."""
    if isinstance(value, Tensor):
        return seen.setdefault(id(value), len(seen)), value.tolist()
    if isinstance(value, dict):
        return seen.setdefault(id(value), len(seen)), [(key, shape_of(one, seen)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [shape_of(one, seen) for one in value]
    return shape_of(vars(value), seen) if isinstance(value, Holder) else value


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("again", [False, True], ids=["another dict each time", "one dict"])
@pytest.mark.parametrize(
    ("body", "replays"),
    [
        (adds_views_of_members, 5), (adds_a_number, 0), (adds_containers, 5), (takes_one_away, 0), (fills_once, 4),
        (fills_deep, 5), (names_by_count, 0), (names_no_string, 4), (adds_and_replaces, 5), (keeps_the_dict, 4),
    ],
)  # fmt: skip
def test_dicts_that_get_more_members(body: Callable[[Holder, Given], Any], replays: int, again: bool) -> None:
    """Members that a body adds are there after a replay, in eager's order, and hold what eager's hold."""
    mine, theirs = Holder(), Holder()
    captured = capture(lambda given: body(mine, given))
    held: list[Any] = []
    pair: list[Given] = []
    for seed in range(8):
        mark_step_begin()
        if not (again and pair):
            pair = [{"x": x_of(seed), "w": x_of(seed) + 1} for _ in range(2)]
        told = []
        for call, given in ((captured, pair[0]), (lambda given: body(theirs, given), pair[1])):
            try:
                told.append(call(given))
            except KeyError as error:
                told.append(str(error))
        held.append((told, pair))
        ours, eagers = (
            [(results[side], given[side]) for results, given in held] + [(mine, theirs)[side]] for side in (0, 1)
        )
        assert shape_of(ours, {}) == shape_of(eagers, {})
    assert recordings(captured).replays >= replays or again
