"""Steps that a replay on the CPU leaves out: copies of arguments that nobody writes, memory for an operator that makes
its own, tensors made of numbers. Results are eager's bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture import capture, explain, recordings
from capture.api.decorator import captured_states
from capture.engines.cpu.tape import Tape
from capture.key.tensor_meta import same_bits
from tests.support.device import without_default_device

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    os.environ.get("CAPTURE_TEST_ENGINE") == "graphs",
    reason="counts what a tape does that writes where its callers are",
)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(*shape, device=CPU) * 4
    return made.to(dtype)


def tape_of(function: Callable[..., Any]) -> Tape:
    (state,) = captured_states(function)
    (node,) = [node for entry in state.entries() for node in entry.nodes]
    assert isinstance(node.recording, Tape)
    return node.recording


def check(body: Callable[..., Any], make: Callable[[], tuple[Any, ...]], calls: int = 6) -> Any:
    """Results and arguments after each call are eager's; all results are kept. Gives what it captured."""
    captured, kept = capture(body), []
    for call in range(calls):
        torch.manual_seed(call)
        arguments = make()
        torch.manual_seed(call)
        plain_arguments = make()
        torch.manual_seed(call)
        expected = body(*plain_arguments)
        torch.manual_seed(call)
        kept.append((captured(*arguments), expected))
        for argument, plain_argument in zip(arguments, plain_arguments, strict=True):
            if isinstance(argument, torch.Tensor):
                assert same_bits(argument, plain_argument)
                assert bool(argument._version) == bool(plain_argument._version)
    for result, expected in kept:
        pairs = [(result, expected)] if isinstance(expected, torch.Tensor) else zip(result, expected, strict=True)
        for tensor, plain_tensor in pairs:
            assert same_bits(tensor, plain_tensor)
            assert tensor.stride() == plain_tensor.stride()
            assert tensor.untyped_storage().nbytes() == plain_tensor.untyped_storage().nbytes()
    (state,) = captured_states(captured)
    assert state.log.counters.replays == calls - 2
    return captured


def write_first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * y


@pytest.mark.parametrize(
    ("body", "copies"),
    [
        (lambda x, y: x + y, 0),
        (lambda x, y: torch.relu(x).mul_(y), 0),
        (lambda x, y: x[1:] + y[:-1], 2),  # a view of another argument would be made in each call
        (lambda x, y: x + y[:1], 1),
        (write_first, 1),
        (lambda x, y: (x, x + y), 0),
        (lambda x, y: torch.add(x, y, alpha=2), 0),
    ],
)
def test_arguments_that_are_read_whole_are_not_copied(body: Callable[..., Any], copies: int) -> None:
    captured = check(body, lambda: (numbers(8), numbers(8)))
    assert len(tape_of(captured).copies_in) == copies


def test_an_argument_that_lies_elsewhere_than_a_vector_of_the_machine() -> None:
    check(lambda x: (x * 3 + 1).sum(0), lambda: (numbers(40)[3:36],))


def test_an_output_of_another_recording_that_was_kept() -> None:
    first, second = capture(lambda x: torch.relu(x) * 2), capture(lambda x: torch.tanh(x) + x)
    kept: list[torch.Tensor] = []
    for _ in range(8):
        x = numbers(8)
        kept.append(first(x))
        for one in kept[-3:]:
            assert same_bits(second(one), torch.tanh(one) + one)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("body", "given"),
    [
        (lambda x: x + 1, 1),
        (lambda x: torch.relu(x + 1), 1),
        (lambda x: (x + 1, x * 2), 2),
        (lambda x: torch.topk(x, 3), 2),
        (lambda x: torch.topk(x, 3)[0], 1),
        (lambda x: (x + 1).mul_(2), 0),  # seen by a write after the operator that made it
        (lambda x: (lambda y: (y, y[:2]))(x + 1), 0),
        (lambda x: (lambda y: (y, y * 2))(x + 1), 2),
        (lambda x: torch.zeros(8, device="cpu").copy_(x), 0),
        (lambda x: torch.multinomial(x.softmax(0), 2), 1),
        (lambda x: torch.nn.functional.dropout(x, 0.5) + 0, 1),
    ],
)
@without_default_device()
def test_what_an_operator_makes_is_the_output(body: Callable[..., Any], given: int) -> None:
    captured = check(body, lambda: (numbers(8),))
    assert sum(root.is_given for root in tape_of(captured).roots) == given


KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("number", [2, 3, 0.1, -0.0, float("inf"), 2**53 + 1])
def test_numbers_among_tensors(kind: torch.dtype, number: float) -> None:
    if not kind.is_floating_point and abs(number) > 255:
        pytest.skip("torch refuses it, or wraps it around")
    check(lambda x: (x * number, x + number, number - x, x / 7, x > number), lambda: (numbers(33, dtype=kind),), 4)


def test_numbers_beside_tensors_of_several_types_stay_numbers() -> None:
    mixed = check(lambda x, y: (x * 2 + y, y * 2), lambda: (numbers(8), numbers(8, dtype=torch.float64)))
    assert [sorted(step.numbers) for step in tape_of(mixed).steps if step.name == "aten.mul.Tensor"] == [[1], [1]]
    promoted = check(lambda x: torch.ones(8, dtype=torch.int64, device="cpu") * 0.5 + x, lambda: (numbers(8),))
    assert not any(step.numbers for step in tape_of(promoted).steps)


def foreach(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([x, y], 0.9)
    torch._foreach_add_([x], [y], alpha=-0.1)
    return x * y


IN_PLACE: list[tuple[Callable[..., Any], int]] = [
    (lambda x, y: x.add_(y).mul_(0.3).sub_(2).div_(7), 4),
    (lambda x, y: x.lerp_(y, 0.25).addcmul_(x, y, value=0.5), 2),
    (lambda x, y: x.zero_().copy_(y).clamp_(-1, 1), 3),
    (lambda x, y: x.index_add_(0, torch.tensor([1, 3], device="cpu"), y[:2]), 1),
    (lambda x, y: x.masked_fill_(y > 0.5, 3.0), 1),
    (lambda x, y: x.add_(x), 1),
    (lambda x, y: x[1:].add_(y[1:]), 0),  # not where a copy would lie
    (lambda x, y: x[:4].copy_(x[4:]), 0),  # reads memory that it writes a part of
    (lambda x, y: torch.relu_(x) + x.uniform_(), 1),  # draws are no one's to repeat
    (foreach, 2),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("body", "methods"), IN_PLACE)
def test_operators_in_place(body: Callable[..., Any], methods: int) -> None:
    captured = check(body, lambda: (numbers(8), numbers(8)))
    steps = [step for step in tape_of(captured).steps if step.form == "call"]
    assert sum("pybind" not in repr(step.function) for step in steps) == methods


def test_an_error_in_the_middle_finds_what_was_made() -> None:
    @capture
    def body(x: torch.Tensor, at: torch.Tensor) -> Any:
        first = x * 2
        try:
            return first, x[at] + 1
        except IndexError:
            return first, torch.zeros(2, device="cpu")

    good, bad = torch.tensor([0, 1], device=CPU), torch.tensor([0, 99], device=CPU)
    for call in range(8):
        x = numbers(8)
        first, second = body(x, bad if call in (4, 6) else good)
        assert same_bits(first, x * 2)
        assert same_bits(second, torch.zeros(2, device=CPU) if call in (4, 6) else x[good] + 1)


def test_what_explain_tells_is_as_before() -> None:
    captured = capture(lambda x: torch.relu(x) * 2 + 1)
    x = numbers(8)
    for _ in range(4):
        captured(x)
    assert explain(captured)(x).plan is not None


@pytest.mark.parametrize("position", [0, 1])
def test_a_form_is_not_tried_on_memory_that_the_caller_freed(position: int) -> None:
    """The third call finds that the second's result is held, and tries operators on the arguments of the second."""

    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + y

    captured = capture(body)
    for number in range(6):
        given = [torch.full((512, 512), float(number + k), device="cpu") for k in range(2)]
        expected = body(*given)
        result = captured(*given)
        assert same_bits(result, expected)
        given[position].untyped_storage().resize_(0)
    assert recordings(captured).replays >= 3
