"""Observation: what one watched run shows, where it points to, and that ``explain`` and ``warmup`` leave no trace."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import (
    CaptureWarning,
    Explanation,
    Finding,
    Severity,
    _trees,
    capture,
    config,
    explain,
    plans,
    recordings,
    report,
    warmup,
)
from tests.device import DEVICE, EXECUTES, MOVES_HELD, default_generator, rng_state
from tests.rows import noted


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference, no plans on disk, no marks and no tree of another test."""
    _trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False):
        yield


def bits(value: Any) -> Any:
    """All that makes two results equal bit for bit."""
    if isinstance(value, (tuple, list)):
        return type(value), [bits(member) for member in value]
    if isinstance(value, dict):
        return [(key, bits(member)) for key, member in value.items()]
    if not isinstance(value, Tensor):
        return type(value), repr(value)
    if value.is_conj():
        return "conj", bits(value.conj())
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return value.dtype, tuple(value.shape), value.stride(), flat.view(torch.uint8).tolist() if len(flat) else []


def x_of(seed: int = 0, *shape: int) -> Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator(DEVICE).manual_seed(seed))


def codes(explanation: Explanation, least: Any = "note") -> list[str]:
    return [finding.code for finding in explanation.findings_at_least(least)]


def line_of(function: Callable[..., Any], text: str) -> tuple[int, str]:
    """Number and text of the line of a function's source that ends with the comment ``# text``."""
    lines, first = inspect.getsourcelines(function)
    for number, line in enumerate(lines, first):
        if line.rstrip().endswith(f"# {text}"):
            return number, line.strip()
    raise LookupError(text)


# --------------------------------------------------------------------------------------------------------- host reads


def reads_item(x: Tensor) -> Tensor:
    y = torch.relu(x)
    scale = y.sum().item()  # here
    return y * scale


def reads_bool(x: Tensor) -> Tensor:
    if x.sum() > 0:  # here
        return x * 2
    return x * 3


def reads_float(x: Tensor) -> Tensor:
    return x * float(x[0, 0])  # here


def reads_int_index(x: Tensor) -> Tensor:
    return x[int(x.argmax() % 3)] + 1  # here


def reads_tolist(x: Tensor) -> Tensor:
    values = x.tolist()  # here
    result: Tensor = x * values[0][0]
    return result


def reads_print(x: Tensor) -> Tensor:
    y = torch.relu(x)
    print(y)  # here
    return y + 1


def reads_format(x: Tensor) -> Tensor:
    name = f"{x.sum()}"  # here
    return x + len(name)


def reads_equal(x: Tensor) -> Tensor:
    return x + (1 if torch.equal(x, x * 1) else 2)  # here


def reads_allclose(x: Tensor) -> Tensor:
    return x + (1 if torch.allclose(x, x * 1) else 2)  # here


def reads_any(x: Tensor) -> Tensor:
    while (x > 1).any():  # here
        x = x / 2
    return x + 1


def reads_contains(x: Tensor) -> Tensor:
    return x + (1 if 5.0 in x else 2)  # here


def reads_assert(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()  # here
    return x + 1


def reads_max_of_python(x: Tensor) -> Tensor:
    return x * max(x[0, 0], x[0, 1])  # here


def reads_range(x: Tensor) -> Tensor:
    for _ in range(x.shape[0] * 0 + torch.tensor(3)):  # here
        x = x + 1
    return x


READERS = [
    reads_item, reads_bool, reads_float, reads_int_index, reads_tolist, reads_print, reads_format, reads_equal,
    reads_allclose, reads_any, reads_contains, reads_assert, reads_max_of_python, reads_range,
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_a_host_read_is_found_with_its_line(
    reader: Callable[[Tensor], Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    explanation = explain(reader)(x_of(1))
    assert explanation.outcome == "eager"
    number, text = line_of(reader, "here")
    (finding,) = (one for one in explanation.findings if one.code == "CG201")
    assert finding.where is not None
    assert (finding.where.file, finding.where.line, finding.where.code) == (__file__, number, text)
    assert finding.where.function == reader.__qualname__
    assert text in str(explanation)
    capsys.readouterr()


@pytest.mark.parametrize("reader", READERS)
def test_a_host_read_runs_eagerly_warned_once(
    reader: Callable[[Tensor], Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    captured = capture(reader)
    with pytest.warns(CaptureWarning, match="CG201") as warned:
        got = [bits(captured(x_of(seed))) for seed in range(5)]
    assert got == [bits(reader(x_of(seed))) for seed in range(5)]
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert recordings(captured).recordings == 0
    assert recordings(captured).eager_calls == 5
    assert "CG201" in [finding.code for finding in recordings(captured).findings]
    assert "CG201" in report()
    capsys.readouterr()


def makes_nonzero(x: Tensor) -> Tensor:
    return x.nonzero() + 1  # here


def makes_boolean_indexing(x: Tensor) -> Tensor:
    return x[x > 0] * 2  # here


def makes_masked_select(x: Tensor) -> Tensor:
    return x.masked_select(x > 0) * 2  # here


def makes_unique(x: Tensor) -> Tensor:
    result: Tensor = torch.unique((x > 0).long()) + 1  # here
    return result


def makes_boolean_assignment(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0] = x[x > 0]  # here
    return y


def makes_where(x: Tensor) -> Tensor:
    return torch.where(x > 0)[0] + 1  # here


def makes_repeat_interleave(x: Tensor) -> Tensor:
    return x.repeat_interleave(torch.tensor([1, 2, 3]), 0) + 1  # here


def makes_bincount(x: Tensor) -> Tensor:
    return torch.bincount((x[0] > 0).long()) + 1  # here


SHAPES = [
    makes_nonzero, makes_boolean_indexing, makes_masked_select, makes_unique, makes_boolean_assignment, makes_where,
    makes_repeat_interleave, makes_bincount,
]  # fmt: skip


@pytest.mark.parametrize("maker", SHAPES)
def test_a_shape_that_depends_on_data_is_found_with_its_line(maker: Callable[[Tensor], Tensor]) -> None:
    explanation = explain(maker)(x_of(1))
    number, text = line_of(maker, "here")
    findings = [one for one in explanation.findings if one.code == "CG601"]
    assert [(one.where.line, one.where.code) for one in findings if one.where] == [(number, text)]
    captured = capture(maker)
    with pytest.warns(CaptureWarning, match="CG601"):
        got = [bits(captured(x_of(seed))) for seed in range(5)]
    assert got == [bits(maker(x_of(seed))) for seed in range(5)]
    assert recordings(captured).recordings == 0


NEAR_MISSES: list[Callable[[Tensor], Any]] = [
    lambda x: x.shape[0] * x + x.numel() + x.dim() + len(x),
    lambda x: torch.where(x > 0, x, -x) + 1,
    lambda x: x.masked_fill(x > 0, 1.0) * 2,
    lambda x: x[torch.tensor([0, 2])] + 1,
    lambda x: x.index_select(0, torch.tensor([1])) + 1,
    lambda x: (x.is_contiguous(), x.stride(), x.dtype, x.device, x.sum() + 1),
    lambda x: torch.topk(x, 2).values + 1,
    lambda x: x.sort(dim=0).indices + 1,
    lambda x: torch.full((2,), 3.0) + x.sum(),
    lambda x: torch.tensor([1.0, 2.0]) + x.sum(),
    lambda x: f"{tuple(x.shape)}" and x + 1,
    lambda x: x.max(dim=1).values.clamp(min=0) + 1,
    lambda x: [part + 1 for part in x],
    lambda x: x.type(torch.float64).new_zeros(2) + 1,
]


@pytest.mark.parametrize("body", NEAR_MISSES, ids=range(len(NEAR_MISSES)))
def test_what_reads_no_value_is_recorded(body: Callable[[Tensor], Any]) -> None:
    explanation = explain(body)(x_of(1))
    assert codes(explanation, "eager") == []
    captured = capture(body)
    for seed in range(5):
        assert bits(captured(x_of(seed))) == bits(body(x_of(seed)))
    assert recordings(captured).recordings == 1


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "lazy conj": lambda x: torch.view_as_complex(x.view(3, 2, 2)).conj() + 0,
    "lazy conj returned": lambda x: torch.view_as_complex((x * 2).view(3, 2, 2)).conj(),
    "fft": lambda x: torch.fft.rfft(x),
    "svd": lambda x: torch.linalg.svd(x),
    "empty": lambda x: (x[:0] * 2, torch.cat([x[:0], x])),
    "no dimensions": lambda x: x.sum(),
    "split": lambda x: [part * 2 for part in x.split([1, 2])],
    "chunks of fresh memory": lambda x: (x * 2).chunk(3),
    "expanded": lambda x: (x.sum(0, keepdim=True) * 2).expand(3, 4),
    "topk": lambda x: torch.topk(x, 2),
    "cummax": lambda x: torch.cummax(x, 0),
    "median": lambda x: x.median(dim=1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "factories": lambda x: torch.arange(4) * x + torch.linspace(0, 1, 4) + torch.eye(3) @ x,
    "constant": lambda x: (torch.tensor([1.0, 2.0]), x * torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "written constant": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(x[0]),
    "uninitialised": lambda x: torch.empty_like(x).copy_(x) * 2,
    "index_put": lambda x: x.clone().index_put_((torch.tensor([0, 1]),), torch.tensor(5.0)),
    "scatter_add": lambda x: torch.zeros(4).scatter_add(0, torch.tensor([0, 1, 2, 3]), x[0]),
    "casts": lambda x: ((x * 10).to(torch.int64) // 3, x.half() * 2, (x > 0) & (x < 1), (x * 1).view(torch.int32) + 1),
    "bfloat16": lambda x: (x.bfloat16() @ x.bfloat16().t()).float(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 2),
    "randperm": lambda x: x[torch.randperm(3)],
    "normal_": lambda x: torch.empty(3, 4).normal_() + torch.rand_like(x) + torch.randn_like(x),
    "gumbel": lambda x: torch.nn.functional.gumbel_softmax(x),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "channels last": lambda x: x.view(1, 1, 3, 4).clone(memory_format=torch.channels_last),
    "permuted": lambda x: (x * 2).permute(1, 0),
    "nan": lambda x: torch.nn.functional.pad(x / 0 * 0, (1, 1), value=float("nan")),
    "out": lambda x: torch.add(x, 1, out=torch.empty(3, 4)),
    "unfold": lambda x: x.unfold(1, 2, 1) * 2,
    "aminmax": lambda x: torch.aminmax(x),
    "std_mean": lambda x: torch.std_mean(x, 0),
    "no tensor": lambda x: None,
    "nested none": lambda x: (None, [x + 1, None], {}),
    "text": lambda x: ("a", 3, x + 1),
    "views of fresh memory": lambda x: (lambda y: (y, y[0], y[1:], y.t()))(x * 2),
    "written through a view": lambda x: (lambda y: (y[0].add_(1), y)[1])(x * 2),
}


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # a solver may look at a status on the host
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["pinv", "lstsq"])
def test_complex_operators_that_call_others_give_eagers_numbers(name: str, mode: Callable[[], Any]) -> None:
    """Under any mode that does nothing about it, torch leaves conjugates inside them as they are: other numbers."""

    def body(x: Tensor) -> Any:
        y = torch.complex(x, x * x)
        return torch.linalg.pinv(y) if name == "pinv" else torch.linalg.lstsq(y, y.conj() + 1, driver="gels").residuals

    captured = capture(body)
    with mode():
        for seed in range(4):
            x = x_of(seed, 4, 3)
            torch.testing.assert_close(captured(x), body(x))  # eager's own bits are not always the same in lstsq


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_recorded_and_give_eagers_bits(name: str, mode: Callable[[], Any]) -> None:
    body = OPERATORS[name]
    captured = capture(body)
    kept = []
    waits = name == "svd" and not EXECUTES  # the solver of the device looks at a status on the host
    with mode(), config.patch(poison=True), pytest.warns(CaptureWarning) if waits else contextlib.nullcontext():
        for seed in range(6):
            torch.manual_seed(seed)
            got, state = captured(x_of(seed)), bits(rng_state())
            torch.manual_seed(seed)
            expected = body(x_of(seed))
            assert bits(got) == bits(expected)
            assert state == bits(rng_state())
            kept.append((got, bits(expected)))
        for got, wanted in kept:
            assert bits(got) == wanted
        if not MOVES_HELD:  # recordings may lie one under the other until nothing is held
            del got
            kept.clear()
            for seed in range(2):
                torch.manual_seed(seed)
                wanted = bits(captured(x_of(seed)))
                torch.manual_seed(seed)
                assert wanted == bits(body(x_of(seed)))
    assert recordings(captured).replays > 0 or waits


def test_a_host_read_deep_in_a_module_names_the_users_line() -> None:
    class Inner(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()  # here

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Inner(), nn.ReLU())

        @override
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y + 1

    (finding,) = explain(Outer())(x_of(1)).findings_at_least("eager")
    assert finding.where is not None
    assert finding.where.line == line_of(Inner.forward, "here")[0]
    assert finding.where.function.endswith("Inner.forward")


def test_several_reads_are_several_findings() -> None:
    def body(x: Tensor) -> Tensor:
        a = x.sum().item()
        b = x.mean().item()
        return x * a * b

    captured = capture(body)
    with pytest.warns(CaptureWarning) as warned:
        captured(x_of(1))
    text = "".join(str(one.message) for one in warned)
    assert "a = x.sum().item()" in text
    assert "b = x.mean().item()" in text


# ------------------------------------------------------------------------------------- escapes, state, drift, sequence


def test_a_tensor_that_escapes_to_a_list_is_a_finding() -> None:
    kept: list[Tensor] = []

    class Sink:
        def push(self, tensor: Tensor) -> None:
            kept.append(tensor)

    hidden = types.MappingProxyType({"sink": Sink()})

    def body(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        hidden["sink"].push(y)
        return y * 2 + 1

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="CG401|CG204"):
        got = [bits(captured(x_of(seed))) for seed in range(5)]
    assert got == [bits(torch.tanh(x_of(seed)) * 2 + 1) for seed in range(5)]
    assert [bits(one) for one in kept] == [bits(torch.tanh(x_of(seed))) for seed in range(5)]
    assert recordings(captured).replays == 0


def test_a_tensor_appended_to_a_closures_list_is_never_lost() -> None:
    kept: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        kept.append(torch.tanh(x))
        return kept[-1] + 1

    captured = capture(body)
    with pytest.warns(CaptureWarning) as warned:
        got = [bits(captured(x_of(seed))) for seed in range(5)]
    assert got == [bits(torch.tanh(x_of(seed)) + 1) for seed in range(5)]
    assert {code for code in ("CG204", "CG401") if any(code in str(one.message) for one in warned)}
    assert [bits(one) for one in kept] == [bits(torch.tanh(x_of(seed))) for seed in range(5)]


def test_a_cycle_is_no_escape() -> None:
    def body(x: Tensor) -> Tensor:
        cycle: list[Any] = [torch.tanh(x)]
        cycle.append(cycle)
        return cycle[0] + 1  # type: ignore[no-any-return]

    captured = capture(body)
    for seed in range(5):
        assert bits(captured(x_of(seed))) == bits(torch.tanh(x_of(seed)) + 1)
    assert recordings(captured).recordings == 1


@pytest.mark.parametrize("kind", ["attribute", "closure", "global", "item", "set"])
def test_python_state_that_changes_is_a_finding(kind: str) -> None:
    count = 0
    holder = types.SimpleNamespace(count=0)
    table = {"count": 0}
    seen: set[int] = set()
    scope = {"torch": torch, "COUNT": 0}
    exec("def body(x):\n    global COUNT\n    COUNT += 1\n    return x * 2 + 1", scope)  # noqa: S102 - fixed text

    def attribute(x: Tensor) -> Tensor:
        holder.count += 1
        return x * 2 + 1

    def closure(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * 2 + 1

    def item(x: Tensor) -> Tensor:
        table["count"] += 1
        return x * 2 + 1

    def members(x: Tensor) -> Tensor:
        seen.add(len(seen))
        return x * 2 + 1

    bodies: dict[str, Any] = {
        "attribute": attribute, "closure": closure, "global": scope["body"], "item": item, "set": members
    }  # fmt: skip
    captured = capture(bodies[kind])
    with pytest.warns(CaptureWarning, match="CG204") as warned:
        got = [bits(captured(x_of(seed))) for seed in range(6)]
    assert got == [bits(x_of(seed) * 2 + 1) for seed in range(6)]
    assert len(warned) == 1
    assert 6 in (holder.count, count, scope["COUNT"], table["count"], len(seen))


def test_a_python_number_that_drifts_is_a_finding() -> None:
    used: list[int] = []
    hidden = types.MappingProxyType({"next": noted(itertools.count(1), used)})

    def body(x: Tensor) -> Tensor:
        return torch.relu(x) * hidden["next"]()  # here

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="CG205"):
        got = [(captured(x_of(seed)), used[-1]) for seed in range(6)]
    for seed, (result, number) in enumerate(got):
        assert bits(result) == bits(torch.relu(x_of(seed)) * number)
    assert used == [1, 2, 3, 4, 5, 6] if EXECUTES else len(used) > 6
    (finding,) = (one for one in recordings(captured).findings if one.code == "CG205")
    assert finding.where is not None
    assert finding.where.line == line_of(body, "here")[0]


def test_python_random_numbers_that_drift_are_a_finding() -> None:
    states: list[Any] = []
    note = states.append

    def body(x: Tensor) -> Tensor:
        note(random.getstate())
        return torch.relu(x) * random.random()

    captured = capture(body)
    random.seed(1)
    with pytest.warns(CaptureWarning, match="CG205"):
        got = [(captured(x_of(seed)), states[-1], random.getstate()) for seed in range(6)]
    for seed, (result, before, after) in enumerate(got):
        random.setstate(before)
        assert bits(result) == bits(torch.relu(x_of(seed)) * random.random())
        assert random.getstate() == after
    assert len(states) == 6 if EXECUTES else len(states) > 6


def test_a_python_output_that_drifts_is_a_finding() -> None:
    used: list[int] = []
    hidden = types.MappingProxyType({"next": noted(itertools.count(1), used)})
    captured = capture(lambda x: (torch.relu(x) + 1, hidden["next"]()))
    with pytest.warns(CaptureWarning, match="CG205"):
        got = [(captured(x_of(seed))[1], used[-1]) for seed in range(6)]
    assert all(result == number for result, number in got)
    assert used == [1, 2, 3, 4, 5, 6] if EXECUTES else len(used) > 6


def test_another_operator_sequence_is_a_finding() -> None:
    used: list[bool] = []
    hidden = types.MappingProxyType({"turn": noted(itertools.cycle([True, False]), used)})

    def body(x: Tensor) -> Tensor:
        y = torch.relu(x) if hidden["turn"]() else torch.tanh(x)
        return y + 1

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="CG206"):
        got = [(captured(x_of(seed)), used[-1]) for seed in range(6)]
    for seed, (result, turn) in enumerate(got):
        assert bits(result) == bits((torch.relu(x_of(seed)) if turn else torch.tanh(x_of(seed))) + 1)
    assert len(used) == 6 if EXECUTES else len(used) > 6
    assert recordings(captured).replays == 0


def test_a_longer_operator_sequence_is_a_finding() -> None:
    used: list[int] = []
    hidden = types.MappingProxyType({"next": noted(itertools.count(1), used)})

    def body(x: Tensor) -> Tensor:
        for _ in range(hidden["next"]()):
            x = x + 1
        return x

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="CG206"):
        got = [(captured(x_of(seed)), used[-1]) for seed in range(6)]
    for seed, (result, number) in enumerate(got):
        expected = x_of(seed)
        for _ in range(number):
            expected = expected + 1
        assert bits(result) == bits(expected)
    assert used == [1, 2, 3, 4, 5, 6] if EXECUTES else len(used) > 6


def test_constants_on_a_default_device_without_an_index() -> None:
    def body(x: Tensor) -> Tensor:
        return x + torch.tensor([0.5]) + torch.as_tensor([1.0]) * torch.scalar_tensor(3.0)

    captured = capture(body)
    with torch.device(DEVICE.type):
        assert [bits(captured(x_of(seed))) for seed in range(4)] == [bits(body(x_of(seed))) for seed in range(4)]
    assert recordings(captured).replays >= 2


def test_constants_made_in_the_body_that_drift_are_a_finding() -> None:
    used: list[int] = []
    hidden = types.MappingProxyType({"next": noted(itertools.count(1), used)})
    captured = capture(lambda x: x + torch.tensor([float(hidden["next"]())]))
    with pytest.warns(CaptureWarning, match="CG205"):
        got = [(captured(x_of(seed)), used[-1]) for seed in range(6)]
    for seed, (result, number) in enumerate(got):
        assert bits(result) == bits(x_of(seed) + torch.tensor([float(number)]))
    assert used == [1, 2, 3, 4, 5, 6] if EXECUTES else len(used) > 6


# ------------------------------------------------------------------------------------------------------ other findings


def finding(explanation: Explanation, code: str) -> Finding:
    (found,) = (one for one in explanation.findings if one.code == code)
    return found


def test_gradients_are_recorded_apart() -> None:
    linear = nn.Linear(4, 4)
    captured = capture(lambda x: linear(x) * 2)

    def gradient(function: Callable[[Tensor], Tensor], seed: int) -> Any:
        linear.zero_grad()
        function(x_of(seed)).sum().backward()
        return bits(linear.weight.grad)

    with torch.enable_grad():
        got = [gradient(captured, seed) for seed in range(5)]
        assert got == [gradient(lambda x: linear(x) * 2, seed) for seed in range(5)]
    assert recordings(captured).recordings == 2
    for seed in range(4):
        assert bits(captured(x_of(seed))) == bits(linear(x_of(seed)) * 2)
    assert recordings(captured).recordings == 3


def test_gradients_through_a_view_of_an_input_run_eagerly_and_say_so() -> None:
    captured = capture(lambda x: x.view(-1))

    def gradient(seed: int) -> Any:
        x = x_of(seed).requires_grad_()
        captured(x).sum().backward()
        return x.grad

    with torch.enable_grad(), pytest.warns(CaptureWarning, match="CG501") as warned:
        assert all(gradient(seed) is not None for seed in range(3))
    assert len(warned) == 1


@pytest.mark.parametrize("make", [lambda: x_of(1, 4, 4).relu().to_sparse(), lambda: x_of(1, 4, 4).as_subclass(Marked)])
def test_odd_tensors_run_eagerly_and_say_so(make: Callable[[], Tensor]) -> None:
    captured = capture(lambda w, x: (w @ x) + 1)
    with pytest.warns(CaptureWarning, match="CG107"):
        got = [captured(make(), x_of(2, 4, 4)) for _ in range(4)]
    expected = (make() @ x_of(2, 4, 4)) + 1
    assert {type(one) for one in got} == {type(expected)}
    assert [bits(one.as_subclass(Tensor)) for one in got] == [bits(expected.as_subclass(Tensor))] * 4


def test_a_sparse_tensor_that_is_written_runs_eagerly() -> None:
    captured = capture(lambda x: (x.mul_(2), x.to_dense() + 1)[1])
    ours, expected = x_of(1, 4, 4).relu().to_sparse(), x_of(1, 4, 4).relu().to_sparse()
    with pytest.warns(CaptureWarning, match="CG107"):
        got = [captured(ours) for _ in range(3)]
    assert [bits(one) for one in got] == [bits(expected.mul_(2).to_dense() + 1) for _ in range(3)]


class Marked(Tensor):
    """A subclass without behaviour of its own."""


def test_notes_and_copies_of_a_recorded_call() -> None:
    table = x_of(9)

    def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(table)
        return x[1:], torch.relu(y) * torch.rand(()) + 1

    explanation = explain(capture(body, static=["y.zz"]))(x_of(1), x_of(2))
    assert explanation.outcome == "record"
    assert {"CG102", "CG104", "CG105", "CG301", "CG403"} <= set(codes(explanation))
    assert finding(explanation, "CG102").severity is Severity.COPY
    assert finding(explanation, "CG102").path == "x"
    assert finding(explanation, "CG104").path == "y.zz"
    assert finding(explanation, "CG105").path == "table"


def test_a_small_body_does_not_pay() -> None:
    assert "CG902" in codes(explain(lambda x: x + 1)(x_of(1)))
    assert "CG902" not in codes(explain(lambda x: (x + 1) * 2)(x_of(1)))


def test_a_captured_function_inside_another_is_a_note() -> None:
    inner = capture(lambda x: torch.relu(x) + 1)
    explanation = explain(lambda x: inner(x) * 2)(x_of(1))
    assert explanation.outcome == "record"
    assert "CG801" in codes(explanation)


def test_placeholders_have_the_users_names() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])

        @override
        def forward(self, x: Tensor, cache: dict[str, list[Tensor]], *rest: Tensor, **more: Tensor) -> Tensor:
            y: Tensor = self.layers[1](self.layers[0](x)) + cache["k"][1] + rest[0] + more["mask"]
            return y

    explanation = explain(Net().eval())(x_of(1), {"k": [x_of(2), x_of(3)]}, x_of(4), mask=x_of(5))
    paths = {one.path for one in explanation.plan.placeholders}
    arguments = {"x", "cache.k.0", "cache.k.1", "rest.0", "mask"}
    assert arguments <= paths
    assert {"self.layers[0].weight", "self.layers[0].bias", "self.layers[1].running_mean"} <= paths
    unused = next(one for one in explanation.facts.placeholders if one.path == "cache.k.0")
    assert not unused.used


# --------------------------------------------------------------------------------------- explain and warmup: no trace


class Messy(nn.Module):
    """Writes everything a body can write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.h = torch.zeros(3, 4)
        self.table: dict[str, Any] = {"a": torch.zeros(4)}
        self.items: list[Any] = [1, 2]
        self.count = 0
        self.generator = torch.Generator(DEVICE).manual_seed(3)

    @override
    def forward(self, x: Tensor, own: torch.Generator) -> Tensor:
        self.count += 1
        self.items.append(self.count)
        self.table["b"] = self.count
        self.fresh = torch.tanh(x)
        x.add_(1)
        self.h = self.drop(self.norm(x)) + self.h
        self.table["a"].add_(x.sum(0))
        noise = torch.rand(3, 4, generator=own) + torch.rand(3, 4, generator=self.generator) + torch.rand(3, 4)
        return self.h + noise


class Tidy(Messy):
    """The same without Python state, so that it is recorded."""

    @override
    def forward(self, x: Tensor, own: torch.Generator) -> Tensor:
        x.add_(1)
        self.h = self.drop(self.norm(x)) + self.h
        self.table["a"].add_(x.sum(0))
        noise = torch.rand(3, 4, generator=own) + torch.rand(3, 4, generator=self.generator) + torch.rand(3, 4)
        return self.h + noise


def everything(net: Messy, x: Tensor, own: torch.Generator) -> Any:
    generators = [bits(one.get_state()) for one in (own, net.generator, default_generator)]
    members = {name: bits(value) for name, value in vars(net).items() if isinstance(value, Tensor)}
    weights = [bits(value) for value in net.state_dict().values()]
    table = {name: bits(value) for name, value in net.table.items()}
    return generators, members, weights, table, bits(net.items), net.count, sorted(vars(net)), bits(x)


def test_explain_changes_nothing() -> None:
    net, x, own = Messy(), x_of(1), torch.Generator(DEVICE).manual_seed(7)
    held = (net.h, net.table, net.items, net.table["a"])
    before = everything(net, x, own)
    explanation = explain(net)(x, own)
    assert everything(net, x, own) == before
    assert all(one is other for one, other in zip(held, (net.h, net.table, net.items, net.table["a"]), strict=True))
    assert explanation.outcome == "eager"
    assert "CG204" in codes(explanation)


def test_explain_records_nothing() -> None:
    captured = capture(lambda x: torch.relu(x) + 1)
    explain(captured)(x_of(1))
    seen = recordings(captured)
    assert (seen.recordings, seen.replays, seen.observations) == (0, 0, 0)
    for seed in range(4):
        captured(x_of(seed))
    explain(captured)(x_of(1))
    assert recordings(captured).replays == 2


def test_explain_changes_nothing_when_the_body_raises() -> None:
    class Failing(Messy):
        @override
        def forward(self, x: Tensor, own: torch.Generator) -> Tensor:
            super().forward(x, own)
            raise LookupError("after everything")

    net, x, own = Failing(), x_of(1), torch.Generator(DEVICE).manual_seed(7)
    before = everything(net, x, own)
    with pytest.raises(LookupError, match="after everything"):
        explain(net)(x, own)
    assert everything(net, x, own) == before


def test_explain_prints_outcome_inputs_and_reasons() -> None:
    text = str(explain(Tidy())(x_of(1), torch.Generator(DEVICE)))
    assert "record" in text.splitlines()[0]
    for word in ("inputs", "outputs", "effects", "copy-back", "static", "self.norm.weight", "x", "CG102", "self.h"):
        assert word in text
    assert "eager" in str(explain(reads_item)(x_of(1))).splitlines()[0]


def test_warmup_changes_nothing_and_brings_to_replay() -> None:
    net, x, own = Tidy(), x_of(1), torch.Generator(DEVICE).manual_seed(7)
    twin, twin_own = copy.deepcopy(net), torch.Generator(DEVICE).manual_seed(7)
    twin.generator.set_state(net.generator.get_state())
    capture(net)
    torch.manual_seed(11)
    before = everything(net, x, own)
    warmup(net.forward)(x, own)
    assert everything(net, x, own) == before
    for seed in range(5):
        mine, theirs = x_of(seed), x_of(seed)
        torch.manual_seed(seed)
        got, after = bits(net(mine, own)), everything(net, mine, own)
        torch.manual_seed(seed)
        assert got == bits(twin(theirs, twin_own))
        assert after[:6] == everything(twin, theirs, twin_own)[:6]
        assert bits(mine) == bits(theirs)
    assert recordings(net.forward).replays == 5
    assert recordings(net.forward).body_runs == 2


def test_warmup_twice_records_once() -> None:
    captured = capture(lambda x: torch.relu(x) + 1)
    for _ in range(3):
        warmup(captured)(x_of(1))
    assert recordings(captured).recordings == 1
    assert recordings(captured).body_runs == 2


def test_warmup_of_a_call_that_cannot_be_recorded_says_so() -> None:
    captured = capture(reads_item)
    with pytest.warns(CaptureWarning, match="CG201"):
        warmup(captured)(x_of(1))
    assert bits(captured(x_of(1))) == bits(reads_item(x_of(1)))


def test_plans_name_the_function_and_the_outcome() -> None:
    captured = capture(lambda x: torch.relu(x) + 1, name="small")
    for _ in range(3):
        captured(x_of(1))
    (plan,) = plans(captured)
    assert (plan.function, plan.outcome, plan.num_ops) == ("small", "record", 2)


@pytest.mark.parametrize("rng_used", ["default", "own"])
def test_draws_advance_like_eagers(rng_used: str) -> None:
    def body(x: Tensor, generator: torch.Generator | None) -> Tensor:
        y = torch.rand(3, 4, generator=generator) + x
        return y + torch.randn(3, 4, generator=generator) + torch.randint(0, 5, (3, 4), generator=generator)

    captured = capture(body)
    for seed in range(6):
        mine = torch.Generator(DEVICE).manual_seed(seed) if rng_used == "own" else None
        theirs = torch.Generator(DEVICE).manual_seed(seed) if rng_used == "own" else None
        torch.manual_seed(seed)
        got = [bits(captured(x_of(seed), mine)) for _ in range(2)]
        after = bits((mine or default_generator).get_state())
        torch.manual_seed(seed)
        assert got == [bits(body(x_of(seed), theirs)) for _ in range(2)]
        assert after == bits((theirs or default_generator).get_state())
    assert recordings(captured).recordings == 1


@pytest.mark.parametrize(
    "body",
    [
        lambda x: torch.where(x > 0)[0],
        lambda x: x * x.sum().item(),
        lambda x: x.to(torch.float64) + x.reshape(-1)[0],
        lambda x: torch.nn.functional.dropout(torch.nn.functional.linear(x, x), 0.5),
    ],
    ids=["where", "item", "to", "linear"],
)
def test_inference_mode_shows_the_operators_that_others_are_made_of(body: Callable[[Tensor], Tensor]) -> None:
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        captured = capture(body, name=f"in {mode.__name__}")
        with mode():
            x = torch.randn(4, 4)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CaptureWarning)
                for _ in range(3):
                    captured(x)
        (plan,) = plans(captured)
        found.append((plan.sequence_digest, {one.code for one in plan.findings}))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_an_operator_whose_results_share_memory_against_its_schema() -> None:
    library = torch.library.Library("capture_observe", "DEF")
    library.define("twice_and_rest(Tensor x) -> (Tensor, Tensor)")

    def twice_and_rest(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[1:]

    library.impl("twice_and_rest", twice_and_rest, "CompositeExplicitAutograd")

    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        whole, rest = torch.ops.capture_observe.twice_and_rest(x)
        rest.add_(1)
        return whole, rest

    captured = capture(body)
    for number in range(5):
        x = torch.full((3,), float(number), device=DEVICE)
        found, expected = captured(x), body(x)
        assert [one.tolist() for one in found] == [one.tolist() for one in expected]
        found[1].zero_()
        assert not found[0][1:].any()
