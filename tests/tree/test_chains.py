"""The promise's chains: calls that follow each other, keep old outputs, and meet replaced weights. Always eager's bits.

Every test runs twice (``tests.support.chains.fresh``): with the tape as it is, and with one that writes where it was
recorded, as graphs do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import BorrowedOutputError, capture, mark_step_begin, recordings, step
from tests.support.chains import bits, f_eager, x_of
from tests.support.chains import f as f
from tests.support.chains import fresh as fresh
from tests.support.rows import copies_in


def g_eager(x: Tensor) -> Tensor:
    return torch.sin(x * 2) - 0.5


def two_eager(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x)
    return y * 2, y + 1


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
        del y
    assert _copies_in(g) == 0
    assert _copies_in(f) == 1


def _copies_in(captured: Callable[..., Any]) -> int:
    """Inputs that the newest recording of a function copies."""
    from capture.api.decorator import captured_states

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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("outputs", ["preserve", "clone"])
def test_a_loop_carried_value_makes_one_recording(outputs: Any) -> None:
    f = capture(lambda h: f_eager(h), outputs=outputs)
    h = expected = x_of(1)
    for _ in range(1000):
        h = f(h)
        expected = f_eager(expected)
    assert bits(h) == bits(expected)
    assert recordings(f).recordings <= 2
    assert recordings(f).recordings + recordings(f).replays >= 999


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


@pytest.mark.one_in(2)
def test_a_loop_carried_value_with_marks_makes_one_recording(f: Callable[[Tensor], Tensor]) -> None:
    h = expected = x_of(1)
    for _ in range(1000):
        mark_step_begin()
        h = f(h)
        expected = f_eager(expected)
    assert bits(h) == bits(expected)
    assert recordings(f).recordings <= 2


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
    assert [bits(value) for value in kept] == wanted


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


@pytest.mark.one_in(3)
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


@pytest.mark.one_in(6)
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


@pytest.mark.one_in(9)
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
    assert [bits(view) for view in kept] == [bits(f_eager(x_of(seed))[1:]) for seed in range(20)]


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


@pytest.mark.one_in(4)
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
        for later in range(3):
            with step():
                f(x_of(later + 50))
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
    assert recordings(f).kept_outputs == 0


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
    assert [bits(output) for output in kept] == [bits(f_eager(x_of(seed))) for seed in range(10)]
    assert recordings(f).kept_outputs == 0
    assert recordings(f).recordings == 1
    assert len({output.data_ptr() for output in kept}) == 10


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
        first, second = captured(x_of(seed))
        assert first is second
        assert bits(first) == bits(torch.tanh(x_of(seed)))


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
    assert recordings(f).pool_bytes <= before + 64, "the first one stays where it is"
    assert [bits(output) for output in kept] == [bits(f_eager(x_of(seed))) for seed in range(50)]
