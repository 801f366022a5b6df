"""Effects: what a body stores in Python state has the values of the call that stored it."""

from __future__ import annotations

import collections
import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin, recordings, warmup
from tests.support.device import AGAIN
from tests.support.writes import bits, x_of
from tests.support.writes import fresh as fresh


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


@pytest.mark.one_in(9)
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
    assert now.replays >= 6


@pytest.mark.one_in(3)
@pytest.mark.parametrize("body", BODIES)
def test_effects_reset_by_the_caller(body: Callable[[Any, Tensor], Tensor]) -> None:
    """The next call reads state that the caller replaced since."""
    net = Keeper(body)
    twin = copy.deepcopy(net)
    captured = capture(net)
    for seed in range(12):
        if seed % 4 == 3:
            for module in (net, twin):
                module.h = x_of(seed)
                module.state = (x_of(seed + 1), x_of(seed + 2))
                module.table["y"] = x_of(seed + 3)
                module.items[0] = x_of(seed + 4)
                module.stored = x_of(seed + 5)
        assert bits(captured(x_of(seed))) == bits(twin(x_of(seed))), seed
        assert net.kept() == twin.kept(), seed


@pytest.mark.one_in(3)
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
    # the state is an output that is held
    again = 0 if body in (_argument, _view_of_argument, _view_of_weight) else AGAIN
    if body in (_last, _on_child):  # the warm-up came before what they read
        assert (now.replays, now.eager_calls) == (2 - again, 0)
    else:
        assert now.replays == 4 - again


def test_an_effect_outlives_the_module() -> None:
    net = Keeper(_hidden)
    twin = copy.deepcopy(net)
    captured = capture(net)
    for seed in range(5):
        captured(x_of(seed))
        twin(x_of(seed))
    kept, expected = net.h, bits(twin.h)
    del net, captured
    second = capture(lambda x: torch.tanh(x) * 2 + 1)
    for seed in range(5):
        second(x_of(seed))
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
        if seed == 4:  # another dict object
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
    assert [bits(tensor) for tensor in net.seen] == [bits(tensor) for tensor in twin.seen]


def test_a_python_counter_runs_eagerly() -> None:
    class Net(nn.Module):
        calls = 0

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2 + 1

    net = Net()
    captured = capture(net)
    got = [bits(captured(x_of(seed))) for seed in range(6)]
    assert got == [bits(x_of(seed) * 2 + 1) for seed in range(6)]
    assert net.calls == 6
    assert recordings(captured).replays >= 3


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


@pytest.mark.filterwarnings("ignore:CG204")  # the order of a set's members depends on addresses
@pytest.mark.parametrize(
    "write",
    [
        lambda kept, y: kept.appendleft(y), lambda kept, y: kept.rotate(1), lambda kept, y: kept.add(y),
        lambda kept, y: kept.discard(min(kept, key=id)),
    ],
    ids=["appendleft", "rotate", "add", "discard"],
)  # fmt: skip
def test_warmup_puts_members_back_that_have_no_places(write: Callable[[Any, Tensor], Any]) -> None:
    """Members of a deque or a set have no names by which they could be put back one by one."""
    is_deque = write.__code__.co_names[0] in ("appendleft", "rotate")
    kept: Any = (deque if is_deque else set)([x_of(2), x_of(3)])
    before = list(kept)

    @capture
    def body(x: Tensor) -> Tensor:
        y = x + 1
        write(kept, y)
        return y * 2

    warmup(body)(x_of(1))
    assert len(before) == len(kept)
    assert all(old is now for old, now in zip(before, kept, strict=True))
