"""The promise's chains: calls that follow each other, keep old outputs, and meet replaced weights. Always eager's bits.

Every test runs twice: with storages that can leave the pool with all their views, and without that (older torch).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import (
    BorrowedOutputError,
    CaptureWarning,
    _torch_private,
    _trees,
    capture,
    config,
    mark_step_begin,
    recordings,
    step,
)
from tests.device import DEVICE, MOVES_HELD, REBINDS
from tests.rows import copies_in, followed


@pytest.fixture(autouse=True, params=["swap", "no-swap"])
def fresh(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Inference, no plans on disk, no marks and no tree of another test; dead memory is NaN."""
    if request.param == "no-swap":
        lacking = attrs.evolve(_torch_private.CAPABILITIES, swap_data_ptr=False)
        monkeypatch.setattr(_torch_private, "CAPABILITIES", lacking)
    elif not MOVES_HELD:
        pytest.skip("this torch cannot swap storages")
    _trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False, poison=True):
        yield
    gc.collect()


def bits(value: Any) -> Any:
    """All that makes two results equal bit for bit."""
    if isinstance(value, (tuple, list)):
        return type(value), [bits(member) for member in value]
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return value.dtype, tuple(value.shape), value.stride(), flat.view(torch.uint8).tolist() if len(flat) else []


def x_of(seed: int = 0, *shape: int) -> Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator(DEVICE).manual_seed(seed))


def f_eager(x: Tensor) -> Tensor:
    return torch.tanh(x) * 1.5 + 0.25


def g_eager(x: Tensor) -> Tensor:
    return torch.sin(x * 2) - 0.5


def two_eager(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x)
    return y * 2, y + 1


@pytest.fixture
def f() -> Callable[[Tensor], Tensor]:
    return capture(lambda x: f_eager(x))


@pytest.fixture
def g() -> Callable[[Tensor], Tensor]:
    return capture(lambda x: g_eager(x))


# ------------------------------------------------------------------------------------------------------------ chains


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_g_of_f(f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor], marked: bool) -> None:
    for seed in range(8):
        if marked:
            mark_step_begin()
        assert bits(g(f(x_of(seed)))) == bits(g_eager(f_eager(x_of(seed))))
    assert recordings(f).recordings == recordings(g).recordings == 1
    assert recordings(f).replays == recordings(g).replays == 6


def test_g_of_f_reads_the_output_where_it_lies(f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]) -> None:
    for seed in range(4):
        y = f(x_of(seed))
        assert bits(g(y)) == bits(g_eager(f_eager(x_of(seed))))
        assert bits(y) == bits(f_eager(x_of(seed)))
    assert _copies_in(g) == 0
    assert _copies_in(f) == 1


def _copies_in(captured: Callable[..., Any]) -> int:
    """Inputs that the newest recording of a function copies."""
    from capture._decorate import captured_states

    (state,) = captured_states(captured)
    node = state.entries()[-1].nodes[-1]
    return copies_in(node)


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_f_of_f(f: Callable[[Tensor], Tensor], marked: bool) -> None:
    for seed in range(12):
        if marked:
            mark_step_begin()
        assert bits(f(f(x_of(seed)))) == bits(f_eager(f_eager(x_of(seed))))
    assert recordings(f).recordings <= 2
    assert recordings(f).replays >= 16


def test_f_of_f_with_the_inner_output_kept(f: Callable[[Tensor], Tensor]) -> None:
    kept: list[tuple[Tensor, Tensor]] = []
    for seed in range(8):
        y = f(x_of(seed))
        kept.append((y, f(y)))
    for seed, pair in enumerate(kept):
        y = f_eager(x_of(seed))
        assert bits(pair) == bits((y, f_eager(y)))


@pytest.mark.parametrize("outputs", ["preserve", "clone"])
def test_a_loop_carried_value_makes_one_recording(outputs: Any) -> None:
    f = capture(lambda h: f_eager(h), outputs=outputs)
    h = expected = x_of(1)
    for _ in range(1000):
        h = f(h)
        expected = f_eager(expected)
    assert bits(h) == bits(expected)
    assert recordings(f).recordings == 1
    assert recordings(f).replays == 998


def test_a_borrowed_loop_carried_value_raises_and_is_never_wrong() -> None:
    """The call that ends the step cannot read what the step lent; the function goes on working."""
    f = capture(lambda h: f_eager(h), outputs="borrow")

    def loop() -> None:
        h = expected = x_of(1)
        for _ in range(5):
            h, expected = f(h), f_eager(expected)
            assert bits(h) == bits(expected)

    with pytest.raises(BorrowedOutputError, match="borrowed-output-used"):
        loop()
    for seed in range(3):
        assert bits(f(x_of(seed))) == bits(f_eager(x_of(seed)))


def test_a_loop_carried_value_with_marks_makes_one_recording(f: Callable[[Tensor], Tensor]) -> None:
    h = expected = x_of(1)
    for _ in range(1000):
        mark_step_begin()
        h = f(h)
        expected = f_eager(expected)
    assert bits(h) == bits(expected)
    assert recordings(f).recordings == 1


def test_a_loop_carried_pair_makes_one_recording() -> None:
    def cell(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        c = torch.sigmoid(x) * c + torch.tanh(h)
        return torch.tanh(c), c

    captured = capture(cell)
    h, c = x_of(1), x_of(2)
    eh, ec = h, c
    for seed in range(100):
        h, c = captured(x_of(seed), h, c)
        eh, ec = cell(x_of(seed), eh, ec)
        assert bits((h, c)) == bits((eh, ec))
    assert recordings(captured).recordings <= 2


def test_every_value_of_a_loop_is_kept(f: Callable[[Tensor], Tensor]) -> None:
    h = expected = x_of(1)
    kept, wanted = [], []
    for _ in range(50):
        h, expected = f(h), f_eager(expected)
        kept.append(h)
        wanted.append(bits(expected))
    assert [bits(one) for one in kept] == wanted


def test_two_outputs_of_one_function_are_both_used(f: Callable[[Tensor], Tensor]) -> None:
    for seed in range(10):
        a, b = x_of(seed), x_of(seed + 100)
        y1 = f(a)
        y2 = f(b)
        assert bits(y1 - y2) == bits(f_eager(a) - f_eager(b))
        assert bits([y1, y2]) == bits([f_eager(a), f_eager(b)])


def test_two_outputs_of_one_call_are_both_used(f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]) -> None:
    two = capture(two_eager)
    for seed in range(8):
        left, right = two(x_of(seed))
        got = (f(left), g(right), f(right), left, right)
        e_left, e_right = two_eager(x_of(seed))
        assert bits(got) == bits((f_eager(e_left), g_eager(e_right), f_eager(e_right), e_left, e_right))


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight.copy_(x_of(index, 4, 4) / 2)
            self.linear.bias.copy_(x_of(index + 1000, 4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class CapturedLayer(Layer):
    @override
    @capture
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_32_layers_are_32_recordings_without_copies(marked: bool) -> None:
    layers = [CapturedLayer(index) for index in range(32)]
    for seed in range(5):
        if marked:
            mark_step_begin()
        y = expected = x_of(seed)
        for layer in layers:
            y, expected = layer(y), Layer.forward(layer, expected)
        assert bits(y) == bits(expected)
    assert [recordings(layer.forward).recordings for layer in layers] == [1] * 32
    assert [recordings(layer.forward).replays for layer in layers] == [3] * 32
    assert [_copies_in(layer.forward) for layer in layers] == [1] + [0] * 31


def test_one_layer_used_32_times_in_a_chain() -> None:
    layer = capture(Layer(1), max_recordings=3)
    for seed in range(5):
        mark_step_begin()
        y = expected = x_of(seed)
        for _ in range(32):
            y, expected = layer(y), Layer.forward(layer, expected)
            assert bits(y) == bits(expected)


@pytest.mark.parametrize("depth", [2, 5, 9])
def test_all_outputs_of_a_chain_are_kept(depth: int) -> None:
    layers = [CapturedLayer(index) for index in range(depth)]
    kept: list[tuple[Tensor, Any]] = []
    for seed in range(6):
        y = expected = x_of(seed)
        for layer in layers:
            y, expected = layer(y), Layer.forward(layer, expected)
            kept.append((y, bits(expected)))
    for index, (tensor, wanted) in enumerate(kept):
        assert bits(tensor) == wanted, index


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize(
    "view", [lambda y: y[1:], lambda y: y.t(), lambda y: y.view(-1)[::2], lambda y: y.unbind()[1], lambda y: y.detach()]
)
def test_a_view_is_kept_for_ten_steps(view: Callable[[Tensor], Tensor], marked: bool) -> None:
    f = capture(lambda x: f_eager(x), max_recordings=50)
    for start in range(3):
        if marked:
            mark_step_begin()
        kept = view(f(x_of(start)))
        for seed in range(10):
            if marked:
                mark_step_begin()
            assert bits(f(x_of(seed))) == bits(f_eager(x_of(seed)))
            assert bits(kept) == bits(view(f_eager(x_of(start))))


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_views_of_every_step_are_kept(f: Callable[[Tensor], Tensor]) -> None:
    kept = [f(x_of(seed))[1:] for seed in range(20)]
    assert [bits(one) for one in kept] == [bits(f_eager(x_of(seed))[1:]) for seed in range(20)]


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_a_tensor_and_its_view_stay_one_memory(f: Callable[[Tensor], Tensor]) -> None:
    """After its step a kept output and its views share memory as before."""
    for start in range(4):
        y = f(x_of(start))
        view = y[1:]
        for seed in range(3):
            f(x_of(seed))
        y.add_(1)
        assert bits(view) == bits(f_eager(x_of(start))[1:] + 1)
        assert view.data_ptr() == y[1:].data_ptr()


def test_functions_take_turns(f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]) -> None:
    order = "fgffgggfgfgfgffgg" * 3
    kept: list[tuple[Tensor, Any]] = []
    for seed, name in enumerate(order):
        captured, eager = (f, f_eager) if name == "f" else (g, g_eager)
        y = captured(x_of(seed))
        assert bits(y) == bits(eager(x_of(seed)))
        kept.append((y, bits(y)))
        if len(kept) > 4:
            del kept[seed % 4]
        for tensor, wanted in kept:
            assert bits(tensor) == wanted


def test_functions_take_turns_without_kept_outputs(
    f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]
) -> None:
    for seed in range(20):
        for captured, eager in ((f, f_eager), (g, g_eager)):
            assert bits(captured(x_of(seed))) == bits(eager(x_of(seed)))
    assert recordings(f).recordings == recordings(g).recordings == 1


def test_two_paths_share_a_start(f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]) -> None:
    """The same function after different ones is another node, and the pool holds the larger path, not the sum."""
    h = capture(lambda x: torch.exp(-x))
    for seed in range(12):
        with step():
            y = f(x_of(seed))
            z = g(y) if seed % 2 else h(y)
            got = h(z) if seed % 2 else g(z)
            e = f_eager(x_of(seed))
            expected = torch.exp(-g_eager(e)) if seed % 2 else g_eager(torch.exp(-e))
            assert bits(got) == bits(expected)
            assert bits(y) == bits(e)
            del y, z, got
    assert recordings(f).recordings == 1
    assert recordings(g).recordings == recordings(h).recordings == 2


def test_an_output_that_died_before_is_alive_now(f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]) -> None:
    """A recording made while an earlier output was dead may use its memory; it does not run while it is alive."""
    big = capture(lambda x: torch.cat([x] * 8) * 2 + 1)
    for seed in range(12):
        mark_step_begin()
        y = f(x_of(seed))
        z = g(y)
        wanted = bits(y)
        if seed % 3:
            del y
        got = big(z)
        expected = g_eager(f_eager(x_of(seed)))
        assert bits(got) == bits(torch.cat([expected] * 8) * 2 + 1)
        assert bits(z) == bits(expected)
        if not seed % 3:
            assert bits(y) == wanted


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_an_output_written_in_place_by_the_caller(
    f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor], keep: int
) -> None:
    kept: list[tuple[Tensor, Any]] = []
    for seed in range(12):
        y = f(x_of(seed))
        y.mul_(3)
        assert bits(g(y)) == bits(g_eager(f_eager(x_of(seed)) * 3))
        kept = [*kept, (y, bits(f_eager(x_of(seed)) * 3))][-keep:] if keep else []
        for tensor, wanted in kept:
            assert bits(tensor) == wanted


def test_an_output_given_back_beside_others(f: Callable[[Tensor], Tensor]) -> None:
    add = capture(lambda a, b: a * 2 + b)
    outside = x_of(77)
    for seed in range(12):
        y = f(x_of(seed))
        for args in ((y, y), (y, outside), (outside, y), (y[1:], y[:-1]), (y.t(), outside.t())):
            assert bits(add(*args)) == bits(args[0] * 2 + args[1])


# ------------------------------------------------------------------------------------------------------ steps, outputs


def test_outputs_of_another_step_are_preserved(f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]) -> None:
    for seed in range(6):
        with step():
            y = f(x_of(seed))
            z = g(y)
        for other in range(3):
            with step():
                f(x_of(other + 50))
        assert bits([y, z]) == bits([f_eager(x_of(seed)), g_eager(f_eager(x_of(seed)))])


@pytest.mark.parametrize("end", [mark_step_begin, None], ids=["marked", "unmarked"])
def test_a_borrowed_output_raises_after_its_step(end: Callable[[], None] | None) -> None:
    f = capture(lambda x: f_eager(x), outputs="borrow")
    for seed in range(3):
        mark_step_begin() if end else None
        kept = f(x_of(seed))
        assert bits(kept) == bits(f_eager(x_of(seed)))
    if end:
        end()
    assert bits(f(x_of(9))) == bits(f_eager(x_of(9)))
    for use in (
        lambda: kept + 1,
        lambda: torch.ones(3, 4) * kept,
        lambda: kept.sum(),
        lambda: kept[0],
        lambda: print(kept),
    ):
        with pytest.raises(BorrowedOutputError, match=r"test_chains\.py"):
            use()


def test_a_borrowed_output_is_the_pools_memory_within_its_step() -> None:
    f, g = capture(lambda x: f_eager(x), outputs="borrow"), capture(lambda x: g_eager(x), outputs="borrow")
    for seed in range(5):
        with step():
            y = f(x_of(seed))
            z = g(y)
            assert bits([y, z]) == bits([f_eager(x_of(seed)), g_eager(f_eager(x_of(seed)))])
    assert recordings(f).recordings == recordings(g).recordings == 1
    assert recordings(f).evacuations == 0


def test_a_view_of_a_borrowed_output_raises_or_keeps_its_values() -> None:
    """Nobody knows of the view, so it cannot be made to raise; what it shows is not another call's value."""
    f = capture(lambda x: f_eager(x), outputs="borrow")
    for start in range(4):
        mark_step_begin()
        view = f(x_of(start))[1:]
        for seed in range(4):
            mark_step_begin()
            f(x_of(seed + 50))
        try:
            got = bits(view)
        except BorrowedOutputError:
            continue
        assert got == bits(f_eager(x_of(start))[1:])


def test_a_cloned_output_is_the_callers_own() -> None:
    f = capture(lambda x: f_eager(x), outputs="clone")
    kept = [f(x_of(seed)) for seed in range(10)]
    assert [bits(one) for one in kept] == [bits(f_eager(x_of(seed))) for seed in range(10)]
    assert recordings(f).evacuations == 0
    assert recordings(f).recordings == 1
    assert len({one.data_ptr() for one in kept}) == 10


@pytest.mark.parametrize("outputs", ["preserve", "clone"])
def test_outputs_that_share_memory_share_it_still(outputs: Any) -> None:
    def shared(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.tanh(x)
        return y, y[1:], y.t()

    captured = capture(shared, outputs=outputs, max_recordings=20)
    kept = []
    for seed in range(6):
        y, part, turned = captured(x_of(seed))
        assert bits((y, part, turned)) == bits(shared(x_of(seed)))
        y.add_(1)
        assert bits(part) == bits((torch.tanh(x_of(seed)) + 1)[1:])
        assert turned.data_ptr() == y.data_ptr()
        kept.append((y, part, turned))
    for seed, (y, part, turned) in enumerate(kept):
        expected = torch.tanh(x_of(seed)) + 1
        assert bits([y, part, turned]) == bits([expected, expected[1:], expected.t()])
        y.add_(1)
        assert bits(part) == bits((expected + 1)[1:])


def test_the_same_tensor_returned_twice_is_one_object() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x)
        return y, y

    captured = capture(twice)
    for seed in range(5):
        one, other = captured(x_of(seed))
        assert one is other
        assert bits(one) == bits(torch.tanh(x_of(seed)))


def test_marks_do_not_disturb_one_another() -> None:
    f, g = capture(lambda x: f_eager(x)), capture(lambda x: g_eager(x))
    for seed in range(10):
        for _ in range(seed % 3):
            mark_step_begin()
        with step():
            y = f(x_of(seed))
            with step():
                z = g(y)
            assert bits([y, z]) == bits([f_eager(x_of(seed)), g_eager(f_eager(x_of(seed)))])


def test_kept_outputs_do_not_grow_the_pool(f: Callable[[Tensor], Tensor]) -> None:
    for seed in range(5):
        mark_step_begin()
        f(x_of(seed))
    before = recordings(f).pool_bytes
    kept = []
    for seed in range(50):
        mark_step_begin()
        kept.append(f(x_of(seed)))
    assert recordings(f).pool_bytes == before
    assert [bits(one) for one in kept] == [bits(f_eager(x_of(seed))) for seed in range(50)]


# ------------------------------------------------------------------------------------------------- replaced weights


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.table: Tensor
        self.register_buffer("table", x_of(seed + 2, 4))
        with torch.no_grad():
            self.linear.weight.copy_(x_of(seed, 4, 4))
            self.norm.running_mean.copy_(x_of(seed + 1, 4))  # type: ignore[union-attr]

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x))) * self.table


def _share(net: Net) -> None:
    net.linear.weight = nn.Parameter(x_of(31, 8, 4)[::2])


REPLACEMENTS: dict[str, Callable[[Net], object]] = {
    "setattr": lambda net: setattr(net.linear, "weight", nn.Parameter(x_of(30, 4, 4))),
    "setattr-same-values": lambda net: setattr(net.linear, "weight", nn.Parameter(net.linear.weight.clone())),
    "setattr-other-stride": lambda net: setattr(net.linear, "weight", nn.Parameter(x_of(30, 4, 4).t())),
    "setattr-no-grad": lambda net: setattr(net.linear, "weight", nn.Parameter(x_of(30, 4, 4), requires_grad=False)),
    "setattr-view": _share,
    "data": lambda net: setattr(net.linear.weight, "data", x_of(32, 4, 4)),
    "data-of-a-buffer": lambda net: setattr(net.table, "data", x_of(32, 4)),
    "load": lambda net: net.load_state_dict(Net(40).state_dict()),
    "load-assign": lambda net: net.load_state_dict(Net(41).state_dict(), assign=True),
    "to-float64-and-back": lambda net: net.to(torch.float64).to(torch.float32),
    "to-the-same": lambda net: net.to(DEVICE, torch.float32),
    "module": lambda net: setattr(net, "linear", nn.Linear(4, 4)),
    "buffer": lambda net: setattr(net, "table", x_of(33, 4)),
    "running-mean": lambda net: setattr(net.norm, "running_mean", x_of(34, 4)),
    "in-place": lambda net: net.linear.weight.mul_(2),
    "swapped-modules": lambda net: setattr(net, "norm", nn.BatchNorm1d(4).eval()),
    "resize": lambda net: net.linear.weight.data.copy_(x_of(35, 4, 4)),
    "vector_to_parameters": lambda net: nn.utils.vector_to_parameters(
        x_of(36, sum(p.numel() for p in net.parameters())), net.parameters()
    ),
}


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_a_weight_replaced_between_calls(replacement: str, marked: bool) -> None:
    net = Net().eval()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for round_ in range(3):
        for seed in range(3):
            if marked:
                mark_step_begin()
            assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))
        for one in (net, twin):
            torch.manual_seed(round_)
            REPLACEMENTS[replacement](one)
    for seed in range(3):
        assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))
    assert recordings(net.forward).replays > 0


def test_a_moved_weight_is_a_rebind_not_a_recording() -> None:
    net = Net().eval()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for round_ in range(20):
        for seed in range(3):
            assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))
        for one in (net, twin):
            one.linear.weight.data = x_of(round_, 4, 4)
    followed(net.forward, 19)
    assert recordings(net.forward).replays >= (58 if REBINDS else 20)


def test_to_another_dtype_and_back() -> None:
    net = Net().eval()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32):
        net.to(dtype)
        twin.to(dtype)
        for seed in range(3):
            assert bits(captured(x_of(seed).to(dtype))) == bits(twin(x_of(seed).to(dtype)))


def test_tied_weights_come_apart() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.first.weight = self.second.weight = nn.Parameter(x_of(1, 4, 4))

        @override
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(torch.tanh(self.first(x)))
            return y

    net = Tied()
    twin = copy.deepcopy(net)
    captured = capture(net)
    changes: list[Callable[[Tied], object]] = [
        lambda one: None,
        lambda one: one.first.weight.mul_(2),
        lambda one: setattr(one.second, "weight", nn.Parameter(x_of(2, 4, 4))),
        lambda one: one.first.weight.mul_(2),
        lambda one: setattr(one.second, "weight", one.first.weight),
        lambda one: one.first.weight.mul_(2),
    ]
    for change in changes:
        for one in (net, twin):
            change(one)
        for seed in range(4):
            assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))


@pytest.mark.filterwarnings("ignore:CG904")  # without swap, state that lies in the pool makes the call eager
def test_an_output_becomes_a_weight(f: Callable[[Tensor], Tensor]) -> None:
    net = Net().eval()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for seed in range(8):
        net.table = f(x_of(seed, 4))
        twin.table = f_eager(x_of(seed, 4))
        for other in range(3):
            assert bits(captured(x_of(other))) == bits(twin(x_of(other)))
        f(x_of(seed + 50, 4))
        assert bits(net.table) == bits(twin.table)


@pytest.mark.filterwarnings("ignore:CG904")  # without swap, state that lies in the pool makes the call eager
@pytest.mark.parametrize("rounds", [1, 3])
def test_an_output_becomes_the_data_of_a_weight(f: Callable[[Tensor], Tensor], rounds: int) -> None:
    """The pool hands out the same address again; what lies there is another tensor."""
    net = nn.Linear(4, 3, bias=False)
    captured = capture(net)
    for seed in range(8):
        net.weight.data = f(x_of(seed))
        for other in range(rounds):
            expected = nn.functional.linear(x_of(other), f_eager(x_of(seed)))
            assert bits(captured(x_of(other))) == bits(expected), (seed, other)
        f(x_of(seed + 1))
        assert bits(net.weight.data) == bits(f_eager(x_of(seed)))


def test_a_static_argument_is_an_output(f: Callable[[Tensor], Tensor]) -> None:
    captured = capture(lambda table: table.mul_(2).t() + 1, static=["table"])
    own = x_of(5)
    expected_own = x_of(5)
    for seed in range(16):
        table, expected = (f(x_of(seed)), f_eager(x_of(seed))) if seed % 3 else (own, expected_own)
        assert bits(captured(table)) == bits(expected.mul_(2).t() + 1)
        assert bits(table) == bits(expected)


@pytest.mark.filterwarnings("ignore:CG904")  # without swap, state that lies in the pool makes the call eager
@pytest.mark.filterwarnings("ignore:CG103")  # where the argument is the table, the call is eager and says so
def test_an_implicit_input_is_an_output(f: Callable[[Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.zeros(3, 4)

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.table.add_(x)
            return self.table.t() * 2

    net, twin = Net(), Net()
    captured = capture(net)
    for seed in range(16):
        if seed % 3 == 0:
            net.table, twin.table = f(x_of(seed)), f_eager(x_of(seed))
        x, expected = (net.table, twin.table) if seed % 5 == 4 else (x_of(seed + 1), x_of(seed + 1))
        assert bits(captured(x)) == bits(twin(expected)), seed
        assert bits(net.table) == bits(twin.table)


def test_backward_through_a_kept_output(f: Callable[[Tensor], Tensor]) -> None:
    """What autograd saved of an output stays what it was, however many calls come between."""
    weight = x_of(3).requires_grad_()
    losses = []
    for seed in range(8):
        y = f(x_of(seed))
        with torch.enable_grad():
            losses.append((weight * y).sum())
        del y
    for seed, loss in enumerate(losses):
        (gradient,) = torch.autograd.grad(loss, weight)
        assert bits(gradient) == bits(f_eager(x_of(seed)))


def test_a_static_argument_that_moves_is_bound_again() -> None:
    captured = capture(lambda x, table: x @ table, static=["table"])
    tables = [x_of(seed, 4, 4) for seed in range(6)]
    for seed in range(24):
        table = tables[seed // 4]
        table.add_(1)
        assert bits(captured(x_of(seed), table)) == bits(x_of(seed) @ table)
    followed(captured, 5)
    assert recordings(captured).replays >= (22 if REBINDS else 12)


def test_more_shapes_than_recordings_run_eagerly() -> None:
    captured = capture(lambda x: f_eager(x), max_recordings=2)
    with pytest.warns(CaptureWarning, match="CG901") as warned:
        got = [bits(captured(x_of(size, size, 4))) for size in (2, 3, 4, 5, 6) * 3]
    assert got == [bits(f_eager(x_of(size, size, 4))) for size in (2, 3, 4, 5, 6) * 3]
    assert len(warned) == 1


def test_a_function_may_die_while_another_one_records() -> None:
    """Garbage collection inside a recording drops a dead function's recordings only afterwards."""

    class Net(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) + 1

    doomed = [capture(Net())]
    for seed in range(3):
        doomed[0](x_of(seed))

    def body(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        if doomed and collecting:
            doomed.pop()
            gc.collect()
        return y * 2 + x

    collecting: list[bool] = []
    captured = capture(lambda x: body(x))
    captured(x_of(0))
    collecting.append(True)
    kept = []
    for seed in range(1, 6):
        kept.append((captured(x_of(seed)), torch.tanh(x_of(seed)) * 2 + x_of(seed)))
        for got, expected in kept:
            assert bits(got) == bits(expected)
    assert not doomed
