"""Numbers that are others in each call: one recording for all where they reach nothing but operators."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, config, recordings, release, reset
from capture.runtime.noted_math import noting_math
from capture.runtime.noted_numbers import Noted, Noting
from tests.support.bucketed import assert_same
from tests.support.device import DEVICE, EXECUTES, LIFTS
from tests.support.python_calls import python_calls

ON_THE_CPU = DEVICE.type == "cpu"
MANY = [0.1, 0.12, 0.3, 0.07, 3.7, -0.2, 1e-30, 1e30, 0.999, 2.5, -1.5, 7.0, 0.1, 0.3, 1e-3]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


def run_beside(f: Callable[..., Any], body: Callable[..., Any], numbers: Sequence[Any], dtype: Any = None) -> None:
    for number in numbers:
        x = torch.randn(4, 3, dtype=dtype)
        assert_same(f(x, number), body(x, number))


def one_for_each() -> AbstractContextManager[Any]:
    """Where numbers are not lifted each one needs a recording of its own, and a finding says that these are in vain."""
    return contextlib.nullcontext() if LIFTS else pytest.warns(CaptureWarning, match="CG901|CG906")


def is_lifted(f: Any) -> bool:
    """Whether one recording serves all values."""
    return any("one recording serves" in event.detail for event in recordings(f).events)


def reasons(f: Any) -> list[str]:
    """The texts of the events that are about numbers."""
    return [event.detail for event in recordings(f).events if "number" in event.detail]


BODIES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "mul": lambda x, s: torch.relu(x) * s,
    "reflected": lambda x, s: s * torch.relu(x) + s,
    "sub": lambda x, s: (s - x) - s,
    "div": lambda x, s: torch.relu(x) / s,
    "alpha": lambda x, s: x.add(torch.relu(x), alpha=s),
    "in place": lambda x, s: torch.relu(x).mul_(s).add_(x, alpha=s),
    "lerp": lambda x, s: torch.lerp(torch.relu(x), x, s),
    "pow": lambda x, s: x.abs().add(1) ** s,
    "clamp": lambda x, s: torch.relu(x).clamp(max=s),
    "addcmul": lambda x, s: x.addcmul(torch.relu(x), x, value=s),
    "leaky": lambda x, s: torch.nn.functional.leaky_relu(x + 1, s),
    "compare": lambda x, s: (x + 1 > s) * 2,
    "elu": lambda x, s: torch.nn.functional.elu(x + 1, s),
    "full": lambda x, s: torch.relu(x) + torch.full_like(x, s) + torch.full((3,), s),
    "filled": lambda x, s: torch.empty_like(x).fill_(s) + x,
    "masked": lambda x, s: x.masked_fill(x > 0.5, s),
    "where": lambda x, s: torch.where(x > 0.5, x, s),
    "lists": lambda x, s: torch._foreach_mul([x, x + 1], s)[0] - s,
    "addmm": lambda x, s: torch.addmm(x, x @ x.t(), x, beta=s),
    "scalar": lambda x, s: torch.relu(x) * torch.scalar_tensor(s),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_reach_operators_as_they_are(name: str, dtype: torch.dtype) -> None:
    body = BODIES[name]
    f = capture(lambda x, s: body(x, s), max_recordings=20)
    run_beside(f, body, MANY, dtype)
    lifts = LIFTS and (ON_THE_CPU or name != "scalar")  # which fills a tensor on the host
    assert is_lifted(f) == lifts, reasons(f)
    if lifts:
        assert recordings(f).replays > len(MANY) - 4
        assert recordings(f).recordings <= 4  # whole exponents have kernels of their own
        assert recordings(f).eager_calls == 0


@pytest.mark.parametrize("rest", [
    lambda x, v: v // 5.0, lambda x, v: v - v % 5.0, lambda x, v: x.clamp(max=-(v // 4.0)), lambda x, v: x * (v // 9.0),
], ids=["a quotient", "a remainder", "a keyword", "a factor"])  # fmt: skip
def test_what_follows_from_a_number_and_is_the_same_for_some_values(rest: Callable[[Tensor, float], Any]) -> None:
    """It is equal in both recordings, and another one later: it is no constant."""

    def body(x: Tensor, v: float) -> Tensor:
        found: Tensor = x * v + rest(x, v)
        return found

    f = capture(body)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        run_beside(f, body, [1.1, 1.3, 1.7, 1.9, 2.3, 2.9, 3.1, 6.1, 7.2, 9.9, 11.5, 13.3, 17.7, 18.8, 1.1, 27.5])


def test_values_with_kernels_of_their_own_stay_in_the_key() -> None:
    def body(x: Tensor, s: float) -> Tensor:
        return (x.abs() + 1) ** s * s

    f = capture(body, max_recordings=30)
    special = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, math.nan, math.inf, -math.inf, 3.0, -2.0]
    for number in [0.3, 0.7, *special, 0.9, *special, 0.11, *special]:
        x = torch.randn(4, 3)
        assert_same(f(x, number), body(x, number))
    if LIFTS:
        assert recordings(f).recordings == len(special) + 2


def as_text(x: Tensor, s: float) -> Tensor:
    return torch.relu(x) * s + len(f"{s:.3f}")


def floor(x: Tensor, s: float) -> Tensor:
    return torch.relu(x) * s + math.floor(s)


def steps(x: Tensor, s: float) -> Tensor:
    return x.sum() * s + torch.arange(0.0, 1.0, s).sum()


def coefficient(x: Tensor, s: float) -> Tensor:
    return torch.relu(x) * s + x * round(1 - s)


def constant(x: Tensor, s: float) -> Tensor:
    return torch.relu(x) * torch.tensor(s)


def kinds(x: Tensor, s: float) -> Tensor:
    return torch.relu(x) * s if type(s) is float else x - s


def looks_up(x: Tensor, s: float) -> Tensor:
    return torch.relu(x) * s + {0.1: 1, 0.2: 1}.get(s, 5)


def given_back(x: Tensor, s: float) -> tuple[Tensor, float]:
    return torch.relu(x) * s, s


@pytest.mark.one_in(3)
@pytest.mark.parametrize("body", [as_text, floor, steps, coefficient, constant, kinds, looks_up])
def test_python_code_that_reads_a_number_keeps_it_in_the_key(body: Callable[[Tensor, float], Any]) -> None:
    f = capture(body, max_recordings=20)
    run_beside(f, body, [0.1, 0.2, 0.1, 0.2, 0.6, 0.9, 0.3, 0.6, 0.9, 0.1])
    assert not is_lifted(f)
    assert recordings(f).recordings >= 4


def test_a_number_that_is_given_back() -> None:
    f = capture(given_back)
    run_beside(f, given_back, [0.1, 0.2, 0.1, 0.2, 0.6, 0.9, 0.3, 0.6, 0.9, 0.1])
    assert is_lifted(f) or not (LIFTS and EXECUTES)  # a captured run tells no formula of what it gives back


def test_a_number_notes_what_reads_it_and_no_operator() -> None:
    reads: list[Callable[[float], Any]] = [
        lambda s: s < 1, lambda s: s <= 1, lambda s: abs(-s) > 2, lambda s: s * 1j, lambda s: (s - 4) ** 0.5,
        lambda s: s == 0.3, bool, float, int, round, str, repr, hash, divmod_,
        lambda s: f"{s}", lambda s: s.hex(), lambda s: s.is_integer(), lambda s: s.real if s else 0, math.floor,
        math.ceil, lambda s: s in (1, 2), lambda s: max(s, 1), lambda s: sorted([s, 0.1]), lambda s: s * True,
    ]  # fmt: skip
    for read in reads:
        noting = Noting()
        read(noting.begin([0.3])[0])
        assert noting.is_read
    x = torch.randn(3)
    given: list[Callable[[float], Any]] = [
        lambda s: x * s, lambda s: s * x, lambda s: s - x, lambda s: s / x, lambda s: x**s, lambda s: s**x,
        lambda s: x < s, lambda s: s < x, lambda s: x.add(x, alpha=s), lambda s: torch.full((2,), s),
    ]  # fmt: skip
    for give in given:
        noting = Noting()
        give(noting.begin([0.3])[0])
        assert not noting.is_read


COMPUTED: list[Callable[..., Any]] = [
    lambda s, k: -s, lambda s, k: 1 - s, lambda s, k: s - 1, lambda s, k: 2 * s * 0.5, lambda s, k: abs(-s) + s,
    lambda s, k: s * k, lambda s, k: k * s, lambda s, k: k + 0.5, lambda s, k: k / 3, lambda s, k: 3 - k,
    lambda s, k: s**k, lambda s, k: 1 - s**k, lambda s, k: 2 * k - 7, lambda s, k: -k * s, lambda s, k: s // 0.1,
    lambda s, k: sum([s, s, 1]), lambda s, k: (-s, s)[0],
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("computed", COMPUTED)
def test_what_is_computed_from_numbers_is_a_formula(computed: Callable[..., Any]) -> None:
    noting = Noting()
    noted = noting_math(noting, lambda: computed(*noting.begin([0.3, 5])))
    assert isinstance(noted, Noted)
    assert not noting.is_read
    for numbers in ([0.3, 5], [-0.7, 3], [1e-3, -8], [1.0, 2]):
        expected, again = computed(*numbers), noted.formula.value(numbers)
        assert type(again) is type(expected)
        assert repr(again) == repr(expected)


def halves(count: int) -> Callable[[Tensor, float], Tensor]:
    def body(x: Tensor, s: float) -> Tensor:
        for _ in range(count):
            s = s * 0.7 + s * 0.2
        return x * s

    return body


@pytest.mark.parametrize("count", [12, 80])  # the longest chain of formulas that one run may have has 240 of them
def test_formulas_that_share_their_parts_are_computed_once(count: int) -> None:
    body = halves(count)
    f = capture(lambda x, s: body(x, s))
    run_beside(f, body, [*MANY, 0.77, -1.25])
    assert is_lifted(f) == LIFTS
    x = torch.randn(4)
    for value in (0.31, 0.32, 0.34, 0.35):
        f(x, value)
    assert len(python_calls(lambda: f(x, 0.33))) < 40 * count  # each step doubled them


def divmod_(s: float) -> Any:
    return divmod(s, 2)


ARITHMETIC: dict[str, Callable[[Tensor, float], Tensor]] = {
    "rest": lambda x, s: torch.relu(x) * s + x * (1 - s),
    "negative": lambda x, s: x.add(torch.relu(x), alpha=-s),
    "decay": lambda x, s: torch.relu(x).mul_(1 - s * 0.01).add_(x, alpha=-s),
    "several": lambda x, s: x * (s * 3.1) - torch.relu(x) * (s / 7) + (0.2 + s) ** 0.7,
    "twice the same": lambda x, s: x * (s * 1.0) + torch.relu(x) * s,
    "almost the same": lambda x, s: x * (s + 1e-17) + torch.relu(x) * s,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_that_python_computes_from_one(name: str, dtype: torch.dtype) -> None:
    body = ARITHMETIC[name]
    f = capture(lambda x, s: body(x, s), max_recordings=20)
    run_beside(f, body, [*MANY, 1e-18, 0.25, 1.0, 2.0, 0.77, -1.0, 100.0], dtype)
    is_sure = ON_THE_CPU or name != "almost the same"  # kernels may not tell such numbers apart
    assert is_lifted(f) == LIFTS or not is_sure, reasons(f)
    if LIFTS and is_sure:
        assert recordings(f).replays > len(MANY) - 6
        assert recordings(f).recordings <= 5


WHOLE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "add": lambda x, k: torch.relu(x) + k,
    "full": lambda x, k: torch.full((3,), k) + torch.full_like(x, k),
    "compare": lambda x, k: torch.arange(3) > k,
    "share": lambda x, k: x * (1 / (2 * k + 3)) - torch.relu(x) / k,
    "clamp": lambda x, k: (x * 50).clamp(max=k),
    "masked": lambda x, k: (x * 5).to(torch.int64).masked_fill(x > 0, k),
    "shift": lambda x, k: (x * 5).to(torch.int64) * k - (k - 3),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers(name: str) -> None:
    body = WHOLE[name]
    f = capture(lambda x, k: body(x, k), max_recordings=30)
    run_beside(f, body, [5, 6, 7, 9, 11, 1 << 20, 13, 0, 1, -1, 2, -7, True, 5.0, 6.0, 7.5, 17, 5])
    assert is_lifted(f) == LIFTS
    if LIFTS:
        assert recordings(f).replays >= 6


def test_whole_numbers_that_may_be_equal_for_others_are_read() -> None:
    reads: list[Callable[[Any, Any], Any]] = [
        lambda k, n: k % 2, lambda k, n: k // 2, lambda k, n: abs(k), lambda k, n: k * k, lambda k, n: k - n,
        lambda k, n: k**2, lambda k, n: 2**k, lambda k, n: k & 1, lambda k, n: k << 1, lambda k, n: ~k,
    ]  # fmt: skip
    for read in reads:
        noting = Noting()
        read(*noting.begin([5, 6]))
        assert noting.is_read


class Listed:
    values = (0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.4, 0.5)


def looped(x: Tensor, k: int) -> Tensor:
    for _ in range(k):
        x = x * 1.01
    return x + k


LENGTHS: list[Callable[[Tensor, int], Any]] = [
    looped,
    lambda x, k: x * Listed.values[k] + k,
    lambda x, k: x * len(Listed.values[:k]) + k,
    lambda x, k: x * len("a" * k) + k,
    lambda x, k: x.reshape(-1)[k] + k,
    lambda x, k: x.reshape(-1)[:k] + k,
    lambda x, k: x.reshape(-1).narrow(0, k, 2) + k,
    lambda x, k: torch.zeros(k) + k,
    lambda x, k: torch.arange(k) + k,
    lambda x, k: torch.cat([x] * k) + k,
    lambda x, k: x.sum(abs(5 - k) // 3) + k,
    lambda x, k: x.sum((k * k) % 3 // 2) + k,
    lambda x, k: x.reshape(-1)[k - 3] + k,
    lambda x, k: x.roll(k) + k,
    lambda x, k: x ** (k - 3) + k,
    lambda x, k: x + (k if k > 7 else 3),
]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("body", LENGTHS)
def test_lengths_and_indices_are_no_numbers(body: Callable[[Tensor, int], Any]) -> None:
    f = capture(lambda x, k: body(x, k), max_recordings=20)
    run_beside(f, body, [3, 4, 5, 6, 7, 8, 9, 5, 9])
    assert not is_lifted(f)


def test_a_learning_rate_that_decays() -> None:
    eager, ours = [nn.Linear(3, 2, bias=False) for _ in range(2)]
    ours.load_state_dict(eager.state_dict())

    def step(net: nn.Module, gradient: Tensor, lr: float, decay: float = 0.3) -> None:
        for parameter in net.parameters():
            parameter.mul_(decay).sub_(gradient * lr)

    f = capture(step)
    with one_for_each():
        for number in range(20):
            gradient, lr = torch.randn(2, 3), 0.1 * 0.9**number
            f(ours, gradient, lr)
            step(eager, gradient, lr)
            assert torch.equal(ours.weight, eager.weight)
    assert recordings(f).replays > 16 or not LIFTS


def test_several_numbers() -> None:
    def body(x: Tensor, a: float, b: float, *, c: float = 0.25) -> Tensor:
        return torch.relu(x) * a + x * b - c

    f = capture(body)
    first = [(0.1, 0.1, 0.2), (0.3, 0.3, 0.2), (0.3, 0.4, 0.2), (0.5, 0.6, 0.2), (0.7, 0.8, 0.9), (0.4, 0.1, 0.3)]
    with one_for_each():
        for a, b, c in [*first, (0.11, 0.12, 0.13), (0.21, 0.22, 0.23), (0.3, 0.3, 0.3), (0.4, 0.1, 0.6)]:
            x = torch.randn(4, 3)
            assert_same(f(x, a, b, c=c), body(x, a, b, c=c))
            assert_same(f(x, a, b=b), body(x, a, b=b))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.options = {"twice": False}

    def scaled(self, x: Tensor, s: float) -> Tensor:
        return x * s * 2 if self.options["twice"] else x * s

    @override
    def forward(self, x: Tensor, s: float) -> Tensor:
        return self.scaled(torch.relu(x * self.weight), s)


def test_state_that_moves_or_changes() -> None:
    eager, ours = Scaled(), Scaled()
    ours.load_state_dict(eager.state_dict())
    capture(ours)
    with one_for_each():
        for call in range(30):
            if call == 8:
                eager.weight, ours.weight = (nn.Parameter(torch.full((3,), 2.0)) for _ in range(2))
            if call == 14:
                eager.weight.data, ours.weight.data = torch.full((3,), 3.0), torch.full((3,), 3.0)
            if call == 20:
                eager.options["twice"] = ours.options["twice"] = True
            x, s = torch.randn(4, 3), 0.1 + 0.01 * call
            assert_same(ours(x, s), eager(x, s))
    assert recordings(ours.forward).replays > 20 or not LIFTS


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # each value is another key
def test_a_body_that_keeps_the_number() -> None:
    class Keeper(nn.Module):
        rate = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, float] = {}
            self.total = torch.zeros(3)

        @override
        def forward(self, x: Tensor, s: float) -> Tensor:
            self.seen["rate"] = s
            self.total = self.total + x.sum(0) * s
            return torch.relu(x) * s

    eager, ours = Keeper(), Keeper()
    f = capture(ours.forward)

    for call in range(12):
        x, s = torch.randn(4, 3), 0.1 + 0.01 * call
        assert_same(f(x, s), eager(x, s))
        assert ours.seen == eager.seen
        assert torch.equal(ours.total, eager.total)
    assert is_lifted(f) or not LIFTS  # what it keeps is the number, or follows from it


def test_kept_outputs_and_other_shapes_and_modes() -> None:
    def body(x: Tensor, s: float) -> Tensor:
        return torch.relu(x) * s

    f, kept = capture(body, max_recordings=20), []
    for call in range(40):
        n = (4, 4, 5)[call % 3]
        x, s = torch.randn(n, 3), 0.1 + 0.01 * call
        with torch.inference_mode(call % 5 == 0):
            kept.append((f(x, s), body(x, s)))
        y = f(x, 0.3)
        assert_same(y, body(x, 0.3))
    for ours, theirs in kept:
        assert_same(ours, theirs)


def test_gradients_verification_poison_release_and_reset() -> None:
    weight = torch.randn(3, requires_grad=True)

    def body(x: Tensor, s: float) -> Tensor:
        return torch.relu(x * weight) * s

    with one_for_each():
        for options in ({}, {"verify": "always"}, {"verify": "first"}):
            f = capture(body, **options)  # type: ignore[call-overload]
            run_beside(f, body, MANY[:6])
            with config.patch(poison=True):
                run_beside(f, body, MANY[:6])
            with torch.enable_grad():
                for number in MANY[:4]:
                    x = torch.randn(4, 3)
                    ours, theirs = (torch.autograd.grad(function(x, number).sum(), weight)[0] for function in (f, body))
                    assert torch.equal(ours, theirs)
            release(f)
            run_beside(f, body, MANY[:6])
            reset(f)
            run_beside(f, body, MANY[:6])


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # while one thread lifts a number, others may give up
def test_threads() -> None:
    def body(x: Tensor, s: float) -> Tensor:
        return torch.relu(x) * s + s

    f, failed = capture(body), []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
            with torch.no_grad():
                for call in range(60):
                    x = torch.randn(4, 3, generator=generator)
                    assert_same(f(x, 0.1 + 0.01 * call * seed), body(x, 0.1 + 0.01 * call * seed))
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_an_error_of_the_body_and_the_call_after_it() -> None:
    def body(x: Tensor, s: float) -> Tensor:
        if x.shape[0] == 5:
            raise ValueError("five")
        return torch.relu(x) * s

    f = capture(body)
    for call in range(12):
        x, s = torch.randn(5 if call in (1, 4) else 4, 3), 0.1 + 0.01 * call
        if x.shape[0] == 5:
            with pytest.raises(ValueError, match="five"):
                f(x, s)
        else:
            assert_same(f(x, s), body(x, s))


def test_an_operator_that_raises_and_a_body_that_catches_it() -> None:
    def body(x: Tensor, ids: Tensor, s: float, total: Tensor) -> Tensor:
        scaled = torch.relu(x) * s
        total.add_(1)
        try:
            rows = torch.nn.functional.embedding(ids, scaled)
        except IndexError:
            return (scaled + 1) * s
        return rows * s

    f = capture(body)
    ours, theirs = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")
    for call in range(16):
        x, s = torch.randn(4, 3, device="cpu"), 0.1 + 0.01 * call
        ids = torch.tensor([1, 9 if call in (6, 7, 12) else 2], device="cpu")
        assert_same(f(x, ids, s, ours), body(x, ids, s, theirs))
        assert torch.equal(ours, theirs)
    assert is_lifted(f)
