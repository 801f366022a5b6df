"""The key: one call one key however it is written, and no recording for a call that would compute something else."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import math
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, _ambient, _torch_private_modes, _trees, capture, config, recordings
from capture._decorate import captured_states
from capture._fast import MISS, native
from tests.device import DEVICE, REBINDS


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
    if not isinstance(value, Tensor):
        return type(value), repr(value)
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    raw = flat.view(torch.uint8).tolist() if len(flat) else []
    return value.dtype, tuple(value.shape), value.stride(), value.requires_grad, raw


def check_same(
    captured: Callable[..., Any], eager: Callable[..., Any], *args: Any, times: int = 4, **kwargs: Any
) -> None:
    """Several calls agree with eager."""
    for _ in range(times):
        assert bits(captured(*args, **kwargs)) == bits(eager(*args, **kwargs))


def x_of(seed: int = 0, *shape: int) -> Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator(DEVICE).manual_seed(seed))


# ------------------------------------------------------------------------------------------------- one call, one key


def spread(
    a: Tensor, /, b: Tensor, c: float = 2.0, *rest: Tensor, d: Tensor | None = None, e: int = 3, **more: Tensor
) -> Tensor:
    result = a * c + b * e
    for tensor in rest:
        result = result + tensor
    if d is not None:
        result = result - d
    for name in sorted(more):
        result = result * more[name]
    return result


A, B, C, D, E = (x_of(seed) for seed in (0, 1, 2, 3, 5))


@pytest.mark.parametrize(
    "calls",
    [
        [((A, B), {}), ((A,), {"b": B}), ((A, B, 2.0), {}), ((A, B), {"c": 2.0, "e": 3}), ((A,), {"d": None, "b": B})],
        [((A, B), {"d": C}), ((A,), {"d": C, "b": B, "c": 2.0})],
        [((A, B, 2.0, C, D), {}), ((A, B, 2.0, C, D), {"e": 3, "d": None})],
        [((A, B), {"p": C, "q": D}), ((A,), {"b": B, "p": C, "q": D})],
    ],
    ids=["defaults", "keyword-only", "variadic", "keywords"],
)
def test_one_call_in_many_words_is_one_key(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    captured = capture(spread)
    for _ in range(3):
        for args, kwargs in calls:
            assert bits(captured(*args, **kwargs)) == bits(spread(*args, **kwargs))
    assert (recordings(captured).observations, recordings(captured).recordings) == (1, 1)


def test_a_body_sees_the_order_of_keywords_and_dicts() -> None:
    def fold(x: Tensor, table: dict[str, Tensor], **more: Tensor) -> Tensor:
        for tensor in (*table.values(), *more.values()):
            x = x * 2 + tensor
        return x

    captured = capture(fold)
    for _ in range(4):
        for table in ({"a": A, "b": B}, {"b": B, "a": A}):
            assert bits(captured(E, table, p=C, q=D)) == bits(fold(E, table, p=C, q=D))
            assert bits(captured(E, table, q=D, p=C)) == bits(fold(E, table, q=D, p=C))


def test_other_arguments_are_other_keys() -> None:
    captured = capture(spread, max_recordings=20)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((A, B), {}),
        ((A, B, 3.0), {}),
        ((A, B, 2.0, C), {}),
        ((A, B), {"d": C}),
        ((A, B), {"e": 4}),
        ((A, B), {"p": C}),
        ((A, B), {"q": C}),
    ]
    for _ in range(3):
        for args, kwargs in calls:
            assert bits(captured(*args, **kwargs)) == bits(spread(*args, **kwargs))
    assert recordings(captured).observations == len(calls)


def test_a_method_called_through_its_class_is_the_same_call() -> None:
    class Net(nn.Module):
        @override
        @capture
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) + 1

    net, x = Net(), x_of()
    for _ in range(3):
        for call in (lambda: net(x), lambda: net.forward(x), lambda: net.forward(x=x), lambda: Net.forward(net, x)):
            assert bits(call()) == bits(torch.relu(x) + 1)
    assert recordings(net.forward).observations == 1


def test_mutable_defaults_are_shared_as_in_python() -> None:
    def count(x: Tensor, seen: list[Tensor] = [E]) -> Tensor:  # noqa: B006 - the default under test
        return x + seen[0]

    captured = capture(count)
    for _ in range(3):
        assert bits(captured(A)) == bits(A + x_of(5))
    count.__defaults__[0][0] = x_of(6)  # type: ignore[index]
    check_same(captured, lambda x: x + x_of(6), A)


# ------------------------------------------------------------------------------------------------------ plain values


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    ONE = 1


VALUES: list[Any] = [
    True, 1, 1.0, 1 + 0j, False, 0, 0.0, -0.0, None, "1", b"1", (1,), [1], (1.0,), (True,), [True], {"a": 1},
    {"a": 1.0}, {"b": 1}, Colour.RED, Colour.BLUE, Level.ONE, torch.float32, torch.float64, torch.device("cpu"),
    torch.Size([1]), range(1), slice(0, 1), slice(0, 2), ..., float("inf"), float("-inf"), float("nan"), math.pi,
    (), [], {}, ((),), 10**30, torch.relu, torch.tanh, int, complex(0.0, -0.0), complex(0.0, 0.0), frozenset([1]),
    collections.OrderedDict(a=1),
]  # fmt: skip


def test_values_are_told_apart_with_their_types() -> None:
    """``True``, ``1`` and ``1.0`` are equal in Python and different here, ``0.0`` and ``-0.0`` too."""
    seen: list[Any] = []

    @capture(max_recordings=100)
    def tell(x: Tensor, value: Any) -> tuple[Tensor, Any]:
        return torch.relu(x) + 1, value

    for _ in range(3):
        for value in VALUES:
            got = tell(A, value)
            assert bits(got[1]) == bits(value), value
            seen.append(value)
    assert recordings(tell).observations == len(VALUES)
    assert recordings(tell).recordings == len(VALUES)


def test_the_type_of_a_number_decides_the_dtype() -> None:
    def scale(x: Tensor, value: Any) -> Tensor:
        result: Tensor = x * value
        return result

    captured = capture(scale, max_recordings=20)
    whole = torch.arange(6)
    for _ in range(3):
        for value in (True, 1, 1.0, 2, 2.0, 1 + 0j):
            assert bits(captured(whole, value)) == bits(scale(whole, value))


def test_signed_zero_is_never_taken_for_zero() -> None:
    def divide(x: Tensor, zero: float) -> Tensor:
        return torch.ones_like(x) / torch.full_like(x, zero)

    captured = capture(divide)
    for zero in (0.0, 0.0, 0.0, -0.0, -0.0, -0.0, 0.0):
        assert bits(captured(A, zero)) == bits(divide(A, zero))


def test_nan_equals_itself_as_a_key() -> None:
    captured = capture(lambda x, value: x * value)
    for _ in range(5):
        check_same(captured, lambda x, value: x * value, A, float("nan"), times=1)
    assert recordings(captured).observations == 1


def test_numbers_of_a_subclass_are_values() -> None:
    class Metres(float):
        __slots__ = ()

    captured = capture(lambda x, value: x * value)
    for value in (Metres(2), Metres(2), Metres(2), Metres(3), Metres(3), 2.0, 2.0):
        check_same(captured, lambda x, value: x * value, A, value, times=1)


def test_an_argument_that_changes_in_place_is_a_new_value() -> None:
    captured = capture(lambda x, numbers, table: x * numbers[0] + table["shift"])
    numbers, table = [2.0, 1.0], {"shift": 1.0}
    for change in (None, "numbers", None, "table", None, None):
        if change == "numbers":
            numbers[0] = 5.0
        if change == "table":
            table["shift"] = 7.0
        assert bits(captured(A, numbers, table)) == bits(A * numbers[0] + table["shift"])


def test_a_callable_argument_is_known_by_identity() -> None:
    captured = capture(lambda x, act: act(x) + 1)
    for act in (torch.relu, torch.relu, torch.relu, torch.tanh, torch.tanh, torch.tanh, torch.relu):
        assert bits(captured(A, act)) == bits(act(A) + 1)


# -------------------------------------------------------------------------------------------------------- containers


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclasses.dataclass
class Cache:
    key: Tensor
    scale: float = 2.0
    more: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenCache:
    key: Tensor
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class SlottedCache:
    key: Tensor
    scale: float = 2.0


@attrs.define
class AttrsCache:
    key: Tensor
    scale: float = 2.0


@attrs.frozen
class FrozenAttrsCache:
    key: Tensor
    scale: float = 2.0


CACHES = [Cache, FrozenCache, SlottedCache, AttrsCache, FrozenAttrsCache]


def add_cache(x: Tensor, cache: Any) -> Tensor:
    result: Tensor = x * cache.scale + cache.key
    return result


@pytest.mark.parametrize("kind", CACHES)
def test_tensors_in_classes_with_fields_are_inputs(kind: type[Any]) -> None:
    """A plain dataclass is a leaf to torch's pytree; the tensors in it are found all the same."""
    captured = capture(add_cache)
    for seed in range(6):
        check_same(captured, add_cache, A, kind(x_of(seed)), times=1)
    assert (recordings(captured).observations, recordings(captured).recordings) == (1, 1)
    check_same(captured, add_cache, A, kind(x_of(1), scale=3.0))
    assert recordings(captured).observations == 2


@pytest.mark.parametrize("kind", CACHES)
def test_tensors_in_classes_with_fields_are_outputs(kind: type[Any]) -> None:
    def make(x: Tensor) -> Any:
        return kind(torch.relu(x) + 1, scale=4.0)

    captured = capture(make)
    for seed in range(5):
        got = captured(x_of(seed))
        assert type(got) is kind
        assert got.scale == 4.0
        assert bits(got.key) == bits(make(x_of(seed)).key)
    assert recordings(captured).recordings == 1


@pytest.mark.parametrize("kind", CACHES)
def test_static_names_reach_into_fields(kind: type[Any]) -> None:
    captured = capture(add_cache, static=["cache.key"])
    cache = kind(x_of(1))
    for _ in range(4):
        cache.key.add_(1)
        check_same(captured, add_cache, A, cache, times=1)
    assert recordings(captured).recordings == 1


NESTS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda a, b: [a, b],
    lambda a, b: (a, (b,)),
    lambda a, b: {"x": a, "y": [b, {"z": a * 2}]},
    lambda a, b: Pair(a, Pair(b, 3)),
    lambda a, b: Cache(a, 3.0, more=[b, {"k": FrozenCache(a * 2)}]),
    lambda a, b: collections.OrderedDict(p=a, q=b),
    lambda a, b: collections.defaultdict(list, p=[a, b]),
    lambda a, b: AttrsCache(a, scale=Pair(b, None)),  # type: ignore[arg-type]
    lambda a, b: {1: a, 2: b},
    lambda a, b: ([], {}, (), [a], b),
]


def total(nest: Any) -> Tensor:
    """Sum of all tensors in a nest; numbers count, too."""
    if isinstance(nest, Tensor):
        return nest
    if isinstance(nest, (int, float)):
        return torch.full((3, 4), float(nest))
    if nest is None:
        return torch.zeros(3, 4)
    if isinstance(nest, dict):
        members = list(nest.values())
    elif isinstance(nest, (list, tuple)):
        members = list(nest)
    elif dataclasses.is_dataclass(nest):
        members = [getattr(nest, field.name) for field in dataclasses.fields(nest)]
    else:
        members = [getattr(nest, field.name) for field in attrs.fields(type(nest))]
    result = torch.zeros(3, 4)
    for index, member in enumerate(members):
        result = result * 2 + total(member) * (index + 1)
    return result


@pytest.mark.parametrize("make", NESTS, ids=range(len(NESTS)))
def test_nested_containers_are_opened(make: Callable[[Tensor, Tensor], Any]) -> None:
    captured = capture(total)
    for seed in range(5):
        check_same(captured, total, make(x_of(seed), x_of(seed + 10)), times=1)
    assert (recordings(captured).observations, recordings(captured).recordings) == (1, 1)


@pytest.mark.parametrize("make", NESTS, ids=range(len(NESTS)))
def test_nested_containers_come_back(make: Callable[[Tensor, Tensor], Any]) -> None:
    def produce(x: Tensor) -> Any:
        return make(torch.relu(x), torch.tanh(x))

    captured = capture(produce)
    for seed in range(5):
        got, expected = captured(x_of(seed)), produce(x_of(seed))
        assert type(got) is type(expected)
        assert bits(total(got)) == bits(total(expected))
        if isinstance(got, dict):
            assert list(got) == list(expected)
    assert recordings(captured).recordings == 1


def test_an_output_container_is_new_on_every_call() -> None:
    captured = capture(lambda x: {"y": [torch.relu(x)]})
    got = [captured(A) for _ in range(5)]
    for one in got:
        one["y"].append(A)
        one["z"] = []
    again = captured(A)
    assert list(again) == ["y"]
    assert len(again["y"]) == 1


def test_the_caller_s_containers_stay_the_caller_s() -> None:
    def first(x: Tensor, cache: dict[str, list[Tensor]]) -> Any:
        return torch.relu(x), cache, cache["k"]

    captured = capture(first)
    for _ in range(5):
        cache = {"k": [x_of(3)]}
        _, same, inner = captured(A, cache)
        assert same["k"][0] is cache["k"][0]
        assert inner[0] is cache["k"][0]


class Opaque:
    """Holds a tensor and can neither be opened nor compared by value."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class HiddenInSlots:
    __slots__ = ("__weakref__", "inner")

    def __init__(self, weight: Tensor) -> None:
        self.inner = [weight]


@pytest.mark.parametrize("kind", [Opaque, HiddenInSlots, lambda t: types.SimpleNamespace(weight=t)])
def test_an_opaque_container_with_tensors_is_a_finding(kind: Callable[[Tensor], Any]) -> None:
    def use(x: Tensor, box: Any) -> Tensor:
        return x * (box.inner[0] if isinstance(box, HiddenInSlots) else box.weight)

    captured = capture(use)
    with pytest.warns(CaptureWarning, match="CG106"):
        check_same(captured, use, A, kind(x_of(1)), times=1)
    for seed in range(4):
        box = kind(x_of(seed))
        for _ in range(3):
            check_same(captured, use, A, box, times=1)
    assert recordings(captured).recordings == 0


def test_an_opaque_output_with_tensors_is_a_finding() -> None:
    captured = capture(lambda x: Opaque(torch.relu(x)))
    with pytest.warns(CaptureWarning, match="CG106"):
        assert bits(captured(A).weight) == bits(torch.relu(A))
    kept = [captured(x_of(seed)) for seed in range(4)]
    assert [bits(one.weight) for one in kept] == [bits(torch.relu(x_of(seed))) for seed in range(4)]


def test_an_opaque_argument_that_is_handed_back() -> None:
    """A cache that is passed in, written and returned, as models of ``transformers`` do: the caller's own object."""

    def step(x: Tensor, cache: Opaque) -> tuple[Tensor, Opaque]:
        cache.weight.add_(x)
        return cache.weight * 2, cache

    captured = capture(step, static=["cache"])
    cache, twin = Opaque(torch.zeros(3, 4)), Opaque(torch.zeros(3, 4))
    for seed in range(6):
        y, same_cache = captured(x_of(seed), cache)
        expected, _ = step(x_of(seed), twin)
        assert bits(y) == bits(expected)
        assert same_cache is cache
        assert bits(cache.weight) == bits(twin.weight)
    assert recordings(captured).replays == 4
    reference = weakref.ref(cache)
    del cache, same_cache
    gc.collect()
    assert reference() is None


def test_an_opaque_object_without_tensors_is_known_by_identity() -> None:
    class Settings:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    captured = capture(lambda x, settings: x * settings.scale + 1)
    for settings in (Settings(2.0), Settings(3.0)):
        check_same(captured, lambda x, settings: x * settings.scale + 1, A, settings)


def test_an_attribute_of_an_opaque_argument_that_changes() -> None:
    """The body's own code names ``settings.scale``; an old value is never used."""

    class Settings:
        scale = 2.0

    def use(x: Tensor, settings: Settings) -> Tensor:
        return x * settings.scale + 1

    captured, settings = capture(use), Settings()
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        settings.scale = scale
        check_same(captured, use, A, settings, times=1)


def test_a_module_argument_s_attribute_that_changes() -> None:
    class Net(nn.Module):
        scale = 2.0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

    def use(net: Net, x: Tensor) -> Tensor:
        result: Tensor = net.linear(x) * net.scale
        return result

    captured, net = capture(use), Net()
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        net.scale = scale
        check_same(captured, use, net, A, times=1)
    net.linear.weight.mul_(2)
    check_same(captured, use, net, A)
    net.linear = nn.Linear(4, 4)
    check_same(captured, use, net, A)


# ---------------------------------------------------------------------------------------------------- tensor metadata


def norm(x: Tensor, y: Tensor | None = None) -> Tensor:
    return torch.relu(x * 2) + (1 if y is None else y)


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


@pytest.mark.parametrize("name", [name for name in METADATA if name not in ("plain", "complex")])
def test_other_metadata_is_another_key(name: str) -> None:
    captured = capture(norm)
    check_same(captured, norm, METADATA["plain"]())
    check_same(captured, norm, METADATA[name]())
    check_same(captured, norm, METADATA["plain"]())
    expected = 1 if name == "offset" and METADATA[name]().data_ptr() % 16 == 0 else 2
    assert recordings(captured).observations == expected


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


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("first", _pairs())
@pytest.mark.parametrize("second", _pairs())
def test_the_alias_pattern_is_in_the_key(first: str, second: str) -> None:
    """A write through one argument shows through the other exactly where they share memory."""
    captured = capture(shifted)
    for name in (first, first, first, second, second, second, first, second):
        mine, theirs = _pairs()[name](), _pairs()[name]()
        assert bits(captured(*mine)) == bits(shifted(*theirs))
        assert [bits(one) for one in mine] == [bits(one) for one in theirs]


# ------------------------------------------------------------------------------------------------------ ambient modes


@contextlib.contextmanager
def _setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    old = get()
    put(value)
    try:
        yield
    finally:
        put(old)


def _set_mkldnn_precision(value: str) -> None:
    backend: Any = torch.backends.mkldnn
    backend.matmul.fp32_precision = value


FLAGS = (
    "cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation", "overrideable_sdp_enabled", "fa3_sdp_enabled", "mkldnn_deterministic",
)  # fmt: skip
PUT = {"overrideable_sdp_enabled": "_set_sdp_use_overrideable", "fa3_sdp_enabled": "_set_sdp_use_fa3"}


def _flag(name: str) -> contextlib.AbstractContextManager[Any]:
    """The other value of a switch that ``torch.backends`` sets."""

    def get() -> bool:
        value = getattr(torch._C, f"_get_{name}")()
        return bool(value[0] if isinstance(value, tuple) else value)

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
    "sdp-order": lambda: _setting(
        torch._C._get_sdp_priority_order,
        torch._C._set_sdp_priority_order,
        torch._C._get_sdp_priority_order()[::-1],
    ),
    **{name.replace("_", "-"): functools.partial(_flag, name) for name in FLAGS if hasattr(torch._C, f"_get_{name}")},
}


def modal(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x @ w, torch.ones(2) * 3, torch.arange(3.0) / 2


@pytest.mark.parametrize("asked", ["C", "Python"])
@pytest.mark.parametrize("name", [name for name in MODES if name != "none"])
def test_every_ambient_mode_is_in_the_key(name: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if asked == "Python":
        monkeypatch.setattr(_torch_private_modes, "readers", lambda device: None)
        monkeypatch.setattr(_ambient, "_local", _ambient._Local())
    captured = capture(modal)
    x, w = x_of(1), x_of(2, 4, 4)
    for mode in ("none", "none", "none", name, name, name, "none", name):
        with MODES[mode]():
            check_same(captured, modal, x, w, times=1)
    counts = recordings(captured).observations, recordings(captured).recordings
    elsewhere = ("mkldnn",) if DEVICE.type != "cpu" else ("cublas", "fa3")
    nothing_to_it = name.startswith(elsewhere)  # what changes nothing there may be overlooked
    assert counts == (2, 2) or (nothing_to_it and counts == (1, 1))


def test_a_mode_that_changes_nothing_costs_one_long_call() -> None:
    """The type that autocast would use, while it is off."""
    captured = capture(modal)
    x, w = x_of(1), x_of(2, 4, 4)
    for dtype in (torch.bfloat16, torch.float16):
        with _setting(
            lambda: torch.get_autocast_dtype(DEVICE.type), lambda one: torch.set_autocast_dtype(DEVICE.type, one), dtype
        ):
            for _ in range(4):
                check_same(captured, modal, x, w)
            state = captured_states(captured)[0]
            assert native is None or state.straight(x, w) is not MISS
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
    """Operators made of others cast inside of them, watched or not; only where autocast is on for their device."""
    torch.manual_seed(0)
    net = make()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for seed in range(5):
        args = [x_of(seed + index, *shape) for index, shape in enumerate(shapes)]
        with torch.autocast(kind, dtype=torch.bfloat16):
            assert result_of(captured, args) == result_of(twin, args), seed


def result_of(net: nn.Module, args: Sequence[Tensor]) -> Any:
    """Bits, or the error: an LSTM has no bfloat16 on a CPU without such instructions."""
    try:
        return bits(net(*args))
    except RuntimeError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_the_default_device_is_in_the_key() -> None:
    captured = capture(lambda x: torch.zeros(3) + 1)
    check_same(captured, lambda x: torch.zeros(3) + 1, A)
    with torch.device("meta"):
        for _ in range(3):
            assert captured(A).device.type == "meta"
    check_same(captured, lambda x: torch.zeros(3) + 1, A)


# ----------------------------------------------------------------------------------------- modules and named values


class Config:
    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.inner = types.SimpleNamespace(shift=0.5)


class Block(nn.Module):
    """Reads everything a body can name on itself."""

    bonus = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.act: nn.Module = nn.Tanh()
        self.scale = 2.0
        self.cfg = Config(3.0)
        self.names = ["a", "b"]
        self.flags = {"on": True}
        self.extra: Tensor | None = None
        self.call: Callable[[Tensor], Tensor] = torch.relu

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.linear(x)))
        x = self.drop(x) * self.scale * self.cfg.scale + self.bonus + self.cfg.inner.shift
        x = self.call(x) + len(self.names) + (1.0 if self.flags["on"] else 0.0)
        return x if self.extra is None else x + self.extra


def _rename_all(block: Block) -> None:
    block.names = ["a", "b", "c"]


CHANGES: dict[str, Callable[[Block], object]] = {
    "scale": lambda block: setattr(block, "scale", 5.0),
    "int-scale": lambda block: setattr(block, "scale", 2),
    "cfg.scale": lambda block: setattr(block.cfg, "scale", 7.0),
    "cfg": lambda block: setattr(block, "cfg", Config(11.0)),
    "cfg.inner.shift": lambda block: setattr(block.cfg.inner, "shift", 1.5),
    "class-attribute-shadowed": lambda block: setattr(block, "bonus", 4.0),
    "list-member": lambda block: block.names.append("c"),
    "list": _rename_all,
    "dict-member": lambda block: block.flags.update(on=False),
    "module": lambda block: setattr(block, "act", nn.ReLU()),
    "submodule": lambda block: setattr(block, "linear", nn.Linear(4, 4, bias=False)),
    "function": lambda block: setattr(block, "call", torch.sigmoid),
    "tensor-appears": lambda block: setattr(block, "extra", x_of(9, 4)),
    "train": lambda block: block.train(),
    "train-part": lambda block: block.norm.train(),
    "weight-in-place": lambda block: block.linear.weight.mul_(2),
    "weight-replaced": lambda block: setattr(block.linear, "weight", nn.Parameter(x_of(8, 4, 4))),
    "bias-removed": lambda block: setattr(block.linear, "bias", None),
    "buffer-replaced": lambda block: setattr(block.norm, "running_mean", x_of(7, 4)),
    "data": lambda block: setattr(block.linear.weight, "data", x_of(8, 4, 4)),
    "to-and-fro": lambda block: block.linear.double().float(),
    "forward-hook": lambda block: block.act.register_forward_hook(lambda module, args, output: output * 2),
    "forward-pre-hook": lambda block: block.linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "parametrization": lambda block: torch.nn.utils.parametrizations.weight_norm(block.linear),
    "requires_grad": lambda block: block.requires_grad_(False),
    "instance-forward": lambda block: setattr(block.act, "forward", lambda x: x * 3),
}


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_body_names_is_never_old(change: str) -> None:
    block = Block().eval()
    twin = copy.deepcopy(block)
    captured = capture(block)
    x = x_of(1)
    torch.manual_seed(0)
    for _ in range(3):
        assert bits(captured(x)) == bits(twin(x))
    torch.manual_seed(1)
    CHANGES[change](block)
    torch.manual_seed(1)
    CHANGES[change](twin)
    if change == "submodule":
        twin.linear.load_state_dict(block.linear.state_dict())
    for seed in range(4):
        torch.manual_seed(seed)
        got = captured(x)
        torch.manual_seed(seed)
        assert bits(got) == bits(twin(x)), seed


def test_a_changed_scale_goes_back_to_its_old_recording() -> None:
    block = capture(Block().eval())
    twin = copy.deepcopy(block)
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0, 3.0, 2.0):
        block.scale = twin.scale = scale
        assert bits(block(A)) == bits(Block.forward(twin, A))
    assert (recordings(block.forward).observations, recordings(block.forward).recordings) == (2, 2)


def test_a_class_attribute_changed_on_the_class() -> None:
    class Net(nn.Module):
        scale = 2.0

        @override
        @capture
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) * self.scale

    net = Net()
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0):
        Net.scale = scale
        check_same(net, lambda x: torch.relu(x) * Net.scale, A, times=1)


def test_an_attribute_that_appears_and_goes() -> None:
    class Net(nn.Module):
        scale: float

        @override
        @capture
        def forward(self, x: Tensor) -> Tensor:
            return x * (self.scale if hasattr(self, "scale") else 1.0) + 1

    net = Net()
    check_same(net, lambda x: x + 1, A)
    net.scale = 3.0
    check_same(net, lambda x: x * 3.0 + 1, A)
    del net.scale
    check_same(net, lambda x: x + 1, A)


SCALE = 2.0
OFFSETS = [1.0, 2.0]
SETTINGS = types.SimpleNamespace(scale=2.0)


@pytest.mark.parametrize("value", [3.0, 2, -2.0, float("nan")])
def test_a_global_that_changes(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(x: Tensor) -> Tensor:
        return torch.relu(x) * SCALE + 1

    captured = capture(use)
    check_same(captured, use, A)
    monkeypatch.setitem(globals(), "SCALE", value)
    check_same(captured, use, A)
    monkeypatch.undo()
    check_same(captured, use, A)


def test_members_of_a_global_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(x: Tensor) -> Tensor:
        result: Tensor = torch.relu(x) * OFFSETS[0] + OFFSETS[-1] + SETTINGS.scale
        return result

    captured = capture(use)
    check_same(captured, use, A)
    monkeypatch.setitem(globals(), "OFFSETS", [4.0, 5.0])
    check_same(captured, use, A)
    OFFSETS.append(9.0)
    check_same(captured, use, A)
    monkeypatch.setattr(SETTINGS, "scale", 8.0)
    check_same(captured, use, A)


def test_a_closure_cell_that_changes() -> None:
    scale, table = 2.0, {"shift": 1.0}

    def use(x: Tensor) -> Tensor:
        return torch.relu(x) * scale + table["shift"]

    captured = capture(use)
    check_same(captured, use, A)
    scale = 3.0
    check_same(captured, use, A)
    table["shift"] = 5.0
    check_same(captured, use, A)
    table = {"shift": 6.0}
    check_same(captured, use, A)


def test_a_value_named_in_a_nested_function_that_changes() -> None:
    scale = 2.0

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = 1.0

        @override
        @capture
        def forward(self, x: Tensor) -> Tensor:
            parts = [part * scale + self.shift for part in x.unbind()]
            return torch.stack([(lambda part: part + self.shift * scale)(part) for part in parts])

    net = Net()

    def expected(x: Tensor) -> Tensor:
        parts = [part * scale + net.shift for part in x.unbind()]
        return torch.stack([part + net.shift * scale for part in parts])

    check_same(net, expected, A)
    net.shift = 4.0
    check_same(net, expected, A)
    scale = 7.0
    check_same(net, expected, A)


def test_a_default_that_changes() -> None:
    def use(x: Tensor, scale: float = 2.0) -> Tensor:
        return torch.relu(x) * scale

    captured = capture(use)
    check_same(captured, use, A)
    use.__defaults__ = (3.0,)
    check_same(captured, use, A)


def test_a_tensor_in_a_closure_that_is_replaced() -> None:
    weight = x_of(1)

    def use(x: Tensor) -> Tensor:
        return torch.relu(x) * weight

    captured = capture(use)
    check_same(captured, use, A)
    weight = x_of(2)
    check_same(captured, use, A)
    weight.mul_(3)
    check_same(captured, use, A)
    weight = x_of(2).double()
    check_same(captured, use, A)
    assert recordings(captured).rebinds == (1 if REBINDS else 0)


# ------------------------------------------------------------------------------------------------- guards and floats


def test_guards_see_what_nothing_else_can() -> None:
    hidden = types.SimpleNamespace(factors=list(range(100)))

    def deep(x: Tensor) -> Tensor:
        result: Tensor = x * hidden.factors[50]
        return result

    captured = capture(lambda x: deep(x) + 1, guards=[lambda: hidden.factors[50], lambda: "constant"])
    for factor in (2, 2, 2, 3, 3, 3, 2):
        hidden.factors[50] = factor
        check_same(captured, lambda x: deep(x) + 1, A, times=1)
    assert recordings(captured).recordings == 2


def test_guards_tell_types_apart() -> None:
    state: list[Any] = [1]
    whole = torch.arange(4)

    read = state.__getitem__

    def deep(x: Tensor) -> Tensor:
        return x * read(0)  # type: ignore[no-any-return]

    captured = capture(lambda x: deep(x) + 1, guards=[lambda: state[0]])
    for value in (1, 1, 1, 1.0, 1.0, 1.0, True, True, True, 0.0, 0.0, 0.0, -0.0, -0.0, -0.0):
        state[0] = value
        check_same(captured, lambda x: deep(x) + 1, whole, times=1)


def test_a_guard_that_raises_says_so() -> None:
    def broken() -> int:
        raise LookupError("no such setting")

    with pytest.raises(LookupError, match="no such setting"):
        capture(norm, guards=[broken])(A)


def test_floats_that_change_on_every_call_are_a_finding() -> None:
    def use(x: Tensor, rate: float) -> Tensor:
        return torch.relu(x) * rate

    captured = capture(use, max_recordings=3)
    with pytest.warns(CaptureWarning) as warned:
        got = [bits(captured(A, 1.0 / (step // 3 + 1))) for step in range(150)]
    assert got == [bits(use(A, 1.0 / (step // 3 + 1))) for step in range(150)]
    assert len(warned) == 1
    message = str(warned[0].message)
    assert "CG901" in message
    assert "rate" in message
    assert recordings(captured).recordings <= 3
    assert recordings(captured).observations <= 10


def test_an_attribute_that_changes_on_every_call_is_a_finding() -> None:
    class Net(nn.Module):
        temperature = 1.0

        @override
        @capture(max_recordings=3)
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x / self.temperature, -1)

    net = Net()

    def run(step: int) -> Any:
        net.temperature = 1.0 + step // 3
        return bits(net(A))

    with pytest.warns(CaptureWarning) as warned:
        got = [run(step) for step in range(90)]
    assert got == [bits(torch.softmax(A / (1.0 + step // 3), -1)) for step in range(90)]
    assert len(warned) == 1
    assert "temperature" in str(warned[0].message)
    assert recordings(net.forward).recordings <= 3


def test_keys_that_never_come_back_do_not_pile_up() -> None:
    captured = capture(lambda x, step: x * step, max_recordings=2)
    with pytest.warns(CaptureWarning, match="CG901"):
        got = [bits(captured(A, step // 2)) for step in range(60)]
    assert got == [bits(A * (step // 2)) for step in range(60)]
    assert recordings(captured).observations <= 5


def test_old_and_new_precision_settings_may_be_mixed() -> None:
    """Their common getters raise then."""
    captured = capture(lambda x, w: x @ w)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    matmul = torch.backends.cuda.matmul
    with _setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"):
        try:
            for precision in ("tf32", "ieee"):
                matmul.fp32_precision = precision
                for _ in range(3):
                    assert torch.equal(captured(x, w), x @ w)
        finally:
            matmul.fp32_precision = "none"


def test_streams_and_events_are_never_referenced_weakly() -> None:
    """Those of a device die without clearing such references (torch 2.11): what is asked later is freed memory."""
    stream, event = torch.Stream(device="cpu"), torch.Event()
    named = capture(lambda x: x + (1 if repr(stream) else 0))
    given = capture(lambda x, mark: x + (1 if repr(mark) else 0))
    for _ in range(4):
        assert bits(named(A)) == bits(A + 1)
        assert bits(given(A, event)) == bits(given(A, stream)) == bits(A + 1)
    assert (weakref.getweakrefcount(stream), weakref.getweakrefcount(event)) == (0, 0)
    assert recordings(named).recordings == 1
    assert recordings(given).recordings == 2


class Doubling(nn.Module):
    """Names itself: by a bound method among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.act = self.twice

    def twice(self, x: Tensor) -> Tensor:
        return x * 2

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.lin(x))
        return y


class Above(nn.Module):
    """Two levels below it a module has a hook that leads back here, as ``fully_shard`` makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])
        self.layers[0].register_forward_hook(self.after)

    def after(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output * 2

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y


def parametrized() -> nn.Module:
    """Has a class of its own, whose properties lead to it."""

    class Twice(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    module = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(module, "weight", Twice())
    return nn.Sequential(module)


@pytest.mark.parametrize("keeps_plans", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        parametrized,
        Doubling,
        lambda: nn.Sequential(Doubling()),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))),
        Above,
    ],
    ids=["a class of its own", "a bound method", "below", "a graph module", "a hook far below"],
)
def test_modules_that_name_themselves_die(make: Callable[[], nn.Module], keeps_plans: bool, tmp_path: Path) -> None:
    def use() -> weakref.ref[nn.Module]:
        module = make()
        captured = capture(lambda x: module(x))
        x = x_of()
        for training in (True, False, True, False):
            module.train(training)
            assert bits(captured(x)) == bits(module(x))
        assert recordings(captured).observations == 2
        return weakref.ref(module)

    with config.patch(cache=keeps_plans, cache_dir=tmp_path):
        alive = use()
    gc.collect()
    gc.collect()
    assert alive() is None
