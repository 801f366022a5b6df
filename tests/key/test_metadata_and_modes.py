"""Calls that differ in tensors' metadata, in which arguments share memory, or in torch's modes have different keys."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from typing_extensions import override

from capture import capture, recordings
from capture.api.decorator import captured_states
from capture.key import tensor_meta
from capture.native import MISS
from capture.runtime import inputs
from tests.support.device import DEVICE
from tests.support.keys import A, _setting, bits, check_same, norm, x_of
from tests.support.keys import fresh as fresh

METADATA: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: x_of(1),
    "float64": lambda: x_of(1).double(),
    "bfloat16": lambda: x_of(1).bfloat16(),
    "int64": lambda: x_of(1).mul(10).long(),
    "bool": lambda: x_of(1) > 0,
    "complex": lambda: x_of(1).to(torch.complex64).abs(),
    "shape": lambda: x_of(1, 4, 4),
    "flat": lambda: x_of(1, 12),
    "batched": lambda: x_of(1, 1, 3, 4),
    "empty": lambda: x_of(1, 0, 4),
    "scalar": lambda: torch.tensor(1.5),
    "transposed": lambda: x_of(1, 4, 3).t(),
    "strided": lambda: x_of(1, 3, 8)[:, ::2],
    "offset": lambda: x_of(1, 13)[1:].view(3, 4),
    "expanded": lambda: x_of(1, 1, 4).expand(3, 4),
    "unaligned": lambda: torch.cat([x_of(1, 1), x_of(1, 12)])[1:].view(3, 4),
}


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_every_kind_of_tensor_in_any_order() -> None:
    captured = capture(norm, max_recordings=50)
    for _ in range(4):
        for make in METADATA.values():
            check_same(captured, norm, make(), times=1)
    assert recordings(captured).replays > 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in METADATA if name not in ("plain", "complex")])
def test_other_metadata_is_another_key(name: str) -> None:
    captured = capture(norm)
    check_same(captured, norm, METADATA["plain"]())
    check_same(captured, norm, METADATA[name]())
    check_same(captured, norm, METADATA["plain"]())
    assert recordings(captured).observations == (1 if name in ("offset", "unaligned") else 2)  # see test_form.py


def test_addresses_and_values_are_not_in_the_key() -> None:
    captured = capture(norm)
    kept = [x_of(seed) for seed in range(10)]
    for x in kept:
        check_same(captured, norm, x, times=1)
    assert (recordings(captured).observations, recordings(captured).recordings) == (1, 1)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_the_device_is_in_the_key() -> None:
    captured = capture(lambda x: torch.zeros(3, device=x.device) + 1)
    assert captured(A).device == DEVICE
    meta = A.to("meta")
    for _ in range(3):
        assert captured(meta).device.type == "meta"
        assert captured(A).device == DEVICE


def test_requires_grad_is_in_the_key() -> None:
    weight = x_of(2).requires_grad_()
    captured = capture(lambda x: torch.relu(x) * 2)
    check_same(captured, lambda x: torch.relu(x) * 2, A)
    with torch.enable_grad():
        check_same(captured, lambda x: torch.relu(x) * 2, A)
        got = captured(weight)
        assert got.requires_grad
        got.sum().backward()
        assert weight.grad is not None
        check_same(captured, lambda x: torch.relu(x) * 2, weight)
    check_same(captured, lambda x: torch.relu(x) * 2, weight)


def test_inference_tensors_are_told_apart() -> None:
    with torch.inference_mode():
        inference = x_of(1)
    captured = capture(norm)
    for x in (A, inference, A, inference, A, inference, A, inference):
        got, expected = captured(x), norm(x)
        assert bits(got) == bits(expected)
        assert got.is_inference() == expected.is_inference()


def shifted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a.add_(1)
    return a * 2, b * 3


def _pairs() -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    def overlap(shift: int) -> tuple[Tensor, Tensor]:
        base = x_of(1, 16)
        return base[:8], base[shift : shift + 8]

    def same() -> tuple[Tensor, Tensor]:
        base = x_of(1, 8)
        return base, base

    return {
        "apart": lambda: (x_of(1, 8), x_of(2, 8)),
        "same": same,
        "view": lambda: (lambda base: (base, base[:]))(x_of(1, 8)),
        "overlap-4": lambda: overlap(4),
        "overlap-8": lambda: overlap(8),
        "reversed": lambda: overlap(4)[::-1],
    }


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("first", _pairs())
@pytest.mark.parametrize("second", _pairs())
def test_the_alias_pattern_is_in_the_key(first: str, second: str) -> None:
    """A write through one argument shows through the other exactly where they share memory."""
    captured = capture(shifted)
    for name in (first, first, first, second, second, second, first, second):
        mine, theirs = _pairs()[name](), _pairs()[name]()
        assert bits(captured(*mine)) == bits(shifted(*theirs))
        assert [bits(tensor) for tensor in mine] == [bits(tensor) for tensor in theirs]


def _laid(order: tuple[int, ...]) -> list[Tensor]:
    """Three groups of arguments, one after the other in memory in this order: two that overlap, the later one first;
    the same object twice and a view of its end; a part inside a whole and one that begins where that does."""
    room = torch.arange(3 * 64, dtype=torch.float32)
    a, b, c = (room[64 * order.index(number) :][:32] for number in range(3))
    twice = b[:8]
    return [c[4:8], a[4:12], twice, c[:16], a[:8], twice, c[:2], b[6:10]]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_pattern_of_shared_memory_does_not_tell_where_it_lies(order: tuple[int, ...]) -> None:
    leaves, twins = _laid(order), _laid((0, 1, 2))
    spans = [inputs.span_of(leaf) for leaf in leaves]
    assert inputs.alias_pattern(leaves, spans) == inputs.alias_pattern(twins, spans)
    groups = tensor_meta.alias_groups(leaves)
    assert groups == [0, 1, 2, 0, 1, 2, 0, 2]
    swapped = [leaves[1], leaves[0], *leaves[2:]]
    assert inputs.alias_pattern(swapped, [inputs.span_of(leaf) for leaf in swapped]) != inputs.alias_pattern(
        leaves, spans
    )


def test_one_recording_serves_all_places_of_a_pattern() -> None:
    def three(*leaves: Tensor) -> Tensor:
        leaves[1].mul_(2)
        return torch.cat([leaf.cumsum(0) for leaf in leaves])

    captured = capture(three)
    with torch.no_grad():
        for order in (*itertools.permutations(range(3)),) * 3:
            mine, theirs = _laid(order), _laid(order)
            assert bits(captured(*mine)) == bits(three(*theirs))
            assert [bits(tensor) for tensor in mine] == [bits(tensor) for tensor in theirs]
    counted = recordings(captured)
    assert counted.recordings == 1
    assert counted.replays >= 15


def _set_mkldnn_precision(value: str) -> None:
    backend: Any = torch.backends.mkldnn
    backend.matmul.fp32_precision = value


FLAGS = (
    "cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation", "overrideable_sdp_enabled", "fa3_sdp_enabled", "mkldnn_deterministic",
)  # fmt: skip
PUT = {"overrideable_sdp_enabled": "_set_sdp_use_overrideable", "fa3_sdp_enabled": "_set_sdp_use_fa3"}


def _flag(name: str) -> contextlib.AbstractContextManager[Any]:
    """Set a switch of ``torch.backends`` to its other value for a block."""

    def get() -> bool:
        value = getattr(torch._C, f"_get_{name}")()
        return bool(value[0] if isinstance(value, tuple) else value)

    if name.startswith("cublas_"):
        return _setting(get, functools.partial(setattr, torch.backends.cuda.matmul, name[len("cublas_") :]), not get())
    return _setting(get, getattr(torch._C, PUT.get(name, f"_set_{name}")), not get())


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast-bf16": lambda: torch.autocast(DEVICE.type, dtype=torch.bfloat16),
    "autocast-fp16": lambda: torch.autocast(DEVICE.type, dtype=torch.float16),
    "deterministic": lambda: _setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "warn-only": lambda: _setting(
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda on: torch.use_deterministic_algorithms(bool(on), warn_only=bool(on)),
        True,
    ),
    "default-dtype": lambda: _setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "threads": lambda: _setting(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "matmul-precision": lambda: _setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "mkldnn-precision": lambda: _setting(lambda: "none", _set_mkldnn_precision, "bf16"),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "math-sdp": lambda: _setting(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "math-sdp-reduction": lambda: _setting(
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
        True,
    ),
    "sdp-order": lambda: sdpa_kernel(list(SDPBackend.__members__.values())[:0:-1], set_priority=True),
    **{name.replace("_", "-"): functools.partial(_flag, name) for name in FLAGS if hasattr(torch._C, f"_get_{name}")},
}


def modal(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x @ w, torch.ones(2) * 3, torch.arange(3.0) / 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in MODES if name != "none"])
def test_every_ambient_mode_is_in_the_key(name: str) -> None:
    captured = capture(modal)
    x, w = x_of(1), x_of(2, 4, 4)
    for mode in ("none", "none", "none", name, name, name, "none", name):
        with MODES[mode]():
            check_same(captured, modal, x, w, times=1)
    counts = recordings(captured).observations, recordings(captured).recordings
    elsewhere = ("mkldnn",) if DEVICE.type != "cpu" else ("cublas", "fa3")
    nothing_to_it = name.startswith(elsewhere)  # a switch without effect on this device may be left out of the key
    assert counts == (2, 2) or (nothing_to_it and counts == (1, 1))


def test_a_mode_that_changes_nothing_costs_one_long_call() -> None:
    """The mode is the dtype that autocast would use; autocast is off."""
    captured = capture(modal)
    x, w = x_of(1), x_of(2, 4, 4)
    for dtype in (torch.bfloat16, torch.float16):
        with _setting(
            lambda: torch.get_autocast_dtype(DEVICE.type),
            lambda dtype: torch.set_autocast_dtype(DEVICE.type, dtype),
            dtype,
        ):
            for _ in range(4):
                check_same(captured, modal, x, w)
            state = captured_states(captured)[0]
            assert state.straight(x, w) is not MISS
    assert recordings(captured).observations == 1


def test_a_mode_switched_inside_a_block_is_seen() -> None:
    captured = capture(modal)
    x, w = x_of(1), x_of(2, 4, 4)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        check_same(captured, modal, x, w)
        with torch.autocast(DEVICE.type, enabled=False):
            check_same(captured, modal, x, w)
        with torch.autocast(DEVICE.type, dtype=torch.float16):
            check_same(captured, modal, x, w)
        check_same(captured, modal, x, w)


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # a device's LSTM waits for it and runs eagerly
@pytest.mark.parametrize("kind", sorted({"cpu", DEVICE.type}))
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda: nn.Bilinear(3, 4, 5), ((2, 3), (2, 4))),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), ((2, 3, 8),)),
        (lambda: nn.MultiheadAttention(8, 2, batch_first=True).eval(), ((2, 3, 8),) * 3),
        (lambda: nn.LSTM(4, 5, 2), ((3, 2, 4),)),
        (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.GELU()), ((2, 4, 8),)),
    ],
    ids=["bilinear", "encoder-layer", "attention", "lstm", "conv"],
)
def test_autocast_reaches_inside_operators(
    make: Callable[[], nn.Module], shapes: tuple[tuple[int, ...], ...], kind: str
) -> None:
    """Composite operators cast inside of them, watched or not, and only where autocast is on for their device."""
    torch.manual_seed(0)
    net = make()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for seed in range(5):
        args = [x_of(seed + index, *shape) for index, shape in enumerate(shapes)]
        with torch.autocast(kind, dtype=torch.bfloat16):
            assert result_of(captured, args) == result_of(twin, args), seed


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("name", ["bilinear", "encoder-layer", "attention"])
def test_operators_cast_as_the_body_has_autocast_and_not_as_its_caller(
    name: str, gradients: bool, around: bool
) -> None:  # fmt: skip
    torch.manual_seed(0)
    nets: dict[str, Callable[[], nn.Module]] = {
        "bilinear": lambda: nn.Bilinear(8, 8, 5),
        "encoder-layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True).eval(),
    }
    net = nets[name]().to(DEVICE)
    num = {"bilinear": 2, "encoder-layer": 1, "attention": 3}[name]

    def body(*args: Tensor) -> Any:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=not around):
            return net(*args)

    captured = capture(body)
    for seed in range(6):
        args = [x_of(seed + index, 2, 3, 8) for index in range(num)]
        with torch.set_grad_enabled(gradients), torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=around):
            assert bits(captured(*args)) == bits(body(*args)), seed
    assert recordings(captured).replays or name != "bilinear"


def result_of(net: nn.Module, args: Sequence[Tensor]) -> Any:
    """Bits, or the error: an LSTM has no bfloat16 on a CPU without such instructions."""
    try:
        return bits(net(*args))
    except RuntimeError as error:
        return str(error)


class Symmetric(nn.Module):
    """A parametrization that makes a weight symmetric."""

    @override
    def forward(self, weight: Tensor) -> Tensor:
        """The upper triangle, mirrored."""
        return weight.triu() + weight.triu(1).mT


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("apart", [False, True], ids=["function", "module"])
@pytest.mark.parametrize("kept", [lambda call: call % 2, lambda call: call > 5, lambda call: call < 3])
@torch.enable_grad()
def test_parametrized_weights_that_torch_keeps_go_on_as_part_of_the_callers_graph(
    kept: Callable[[int], bool], apart: bool
) -> None:
    """``parametrize.cached`` keeps the weights with their graphs, which the calls of one block share."""
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    parametrize.register_parametrization(net, "weight", Symmetric())
    twin = copy.deepcopy(net)
    forward = capture(net) if apart else capture(lambda x: net(x))
    for call in range(10):
        x, grads = x_of(call, 2, 3), []
        for function, owner in ((forward, net), (twin, twin)):
            with parametrize.cached() if kept(call) else contextlib.nullcontext():
                y = function(x) + function(x + 1)
            owner.zero_grad()
            y.sum().backward()
            grads.append([bits(y), *[bits(parameter.grad) for parameter in owner.parameters()]])
        assert grads[0] == grads[1], call


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_the_default_device_is_in_the_key() -> None:
    captured = capture(lambda x: torch.zeros(3) + 1)
    check_same(captured, lambda x: torch.zeros(3) + 1, A)
    with torch.device("meta"):
        for _ in range(3):
            assert captured(A).device.type == "meta"
    check_same(captured, lambda x: torch.zeros(3) + 1, A)


SETTERS: dict[str, tuple[Callable[[], None], Callable[[], None], Callable[[], object]]] = {
    "default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
        torch.get_default_dtype,
    ),
    "deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
        torch.are_deterministic_algorithms_enabled,
    ),
    "precision": (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
        torch.get_float32_matmul_precision,
    ),
}


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("name", SETTERS)
def test_a_mode_that_the_body_leaves_is_left_by_every_call(name: str) -> None:
    begin, end, read = SETTERS[name]

    def body(x: Tensor) -> Tensor:
        begin()
        return x + torch.ones(3)

    captured = capture(body)
    try:
        for call in range(4):
            results = [(bits(function(x_of(call, 3))), read(), end()) for function in (body, captured)]
            assert results[0] == results[1], call
    finally:
        end()


@torch.enable_grad()
@pytest.mark.parametrize("whole", [False, True], ids=["region", "step"])
def test_a_block_of_autocast_in_the_body_casts_a_weight_once(whole: bool) -> None:
    """Gradients of both uses are added in bfloat16."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    twin = copy.deepcopy(net)

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y: Tensor = net(x) * net(x + 1)
            return y.float().pow(2).sum()

    def step(net: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(net, x)
        loss.backward()
        return loss.detach()

    captured = capture(functools.partial(step if whole else loss_of, net))
    for call in range(6):
        x = x_of(call, 2, 4)
        net.zero_grad()
        twin.zero_grad()
        loss = captured(x)
        if not whole:
            loss.backward()
        assert bits(loss.detach()) == bits(step(twin, x)), call
        for parameter, twin_parameter in zip(net.parameters(), twin.parameters(), strict=True):
            assert bits(parameter.grad) == bits(twin_parameter.grad), call
    assert recordings(captured).replays
