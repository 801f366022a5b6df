"""Host reads: each is found with the user's line, and what reads no value is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import (
    CaptureWarning,
    capture,
    config,
    explain,
    recordings,
    report,
)
from tests.support.device import DEVICE, EXECUTES, rng_state
from tests.support.observed import bits, codes, line_of, reads_item, x_of
from tests.support.observed import fresh as fresh


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


OF_THE_HOST = [reads_tolist, reads_format]
"""Compared where tensors lie in the host's memory."""
NOT_COMPARED = [reads_item] + ([] if DEVICE.type == "cpu" else OF_THE_HOST)
COMPARED = ([] if DEVICE.type != "cpu" else OF_THE_HOST) + [
    reads_bool, reads_float, reads_int_index, reads_equal, reads_allclose, reads_any, reads_contains, reads_assert,
    reads_max_of_python, reads_range,
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("reader", NOT_COMPARED + COMPARED)
def test_a_host_read_is_found_with_its_line(
    reader: Callable[[Tensor], Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    explanation = explain(reader)(x_of(1))
    assert explanation.outcome == ("record" if reader in COMPARED else "eager")
    number, text = line_of(reader, "here")
    (finding,) = (finding for finding in explanation.findings if finding.code == "CG201")
    assert finding.where is not None
    assert (finding.where.file, finding.where.line, finding.where.code) == (reader.__code__.co_filename, number, text)
    assert finding.where.function == reader.__qualname__
    assert text in str(explanation)
    capsys.readouterr()


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("default::capture.CaptureWarning")
@pytest.mark.parametrize("reader", COMPARED)
def test_a_read_that_is_compared_is_recorded(reader: Callable[[Tensor], Tensor]) -> None:
    captured = capture(reader)
    for seed in (1, 1, 1, 1):
        assert bits(captured(x_of(seed))) == bits(reader(x_of(seed)))
    replays = 2 if EXECUTES else 1  # where a capture executes nothing, a second run has to read the same first
    again = int(EXECUTES and reader is reads_float)  # with its value as a number that other calls may have otherwise
    assert (recordings(captured).recordings, recordings(captured).replays) == (1 + again, replays - again)
    assert "CG201" in [finding.code for finding in recordings(captured).findings]


@pytest.mark.parametrize("reader", NOT_COMPARED)
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


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("default::capture.CaptureWarning")
@pytest.mark.parametrize("maker", SHAPES)
def test_a_shape_that_depends_on_data_is_found_with_its_line(maker: Callable[[Tensor], Tensor]) -> None:
    explanation = explain(maker)(x_of(1))
    number, text = line_of(maker, "here")
    findings = [finding for finding in explanation.findings if finding.code == "CG601"]
    assert [(finding.where.line, finding.where.code) for finding in findings if finding.where] == [(number, text)]
    captured = capture(maker)
    for seed in (1, 1, 1, 2, 2, 2, 1):
        assert bits(captured(x_of(seed))) == bits(maker(x_of(seed)))
    assert recordings(captured).recordings >= 1
    assert recordings(captured).replays >= 2


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


@pytest.mark.one_in(3)
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
    """Under a dispatch mode that does nothing about it, torch leaves conjugates inside such operators unresolved, and
    their numbers are others."""

    def body(x: Tensor) -> Any:
        y = torch.complex(x, x * x)
        return torch.linalg.pinv(y) if name == "pinv" else torch.linalg.lstsq(y, y.conj() + 1, driver="gels").residuals

    captured = capture(body)
    with mode():
        for seed in range(4):
            x = x_of(seed, 4, 3)
            torch.testing.assert_close(captured(x), body(x))  # eager's own bits are not always the same in lstsq


@pytest.mark.one_in(9)
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
    assert recordings(captured).replays > 0 or waits


def test_a_host_read_deep_in_a_module_names_the_users_line() -> None:
    class Inner(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return x * float(np.from_dlpack(x.sum().cpu()))  # here

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
        a = float(np.from_dlpack(x.sum().cpu()))
        b = float(np.from_dlpack(x.mean().cpu()))
        return x * a * b

    captured = capture(body)
    with pytest.warns(CaptureWarning) as warned:
        captured(x_of(1))
    text = "".join(str(warning.message) for warning in warned)
    assert "a = float(np.from_dlpack(x.sum().cpu()))" in text
    assert "b = float(np.from_dlpack(x.mean().cpu()))" in text
