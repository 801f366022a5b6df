"""The C module: the same calls with and without it, no reference lost or kept, errors come out."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import threading
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import (
    _fast,
    _torch_private,
    _torch_private_layout,
    _torch_private_modes,
    _trees,
    capture,
    config,
    mark_step_begin,
    recordings,
    release,
)
from capture._decorate import captured_states
from capture._fast import MISS, native
from capture._module_checks import has
from capture._named import Source, same_value
from capture._native_facts import ABSENT, APART, CELL, ITEM, ITEMS, SIZE, WEAK, named_fact
from capture._tensors import same_bits
from capture._torch_private_layout import counts_layout
from capture.backends.cuda.pool import CudaPool
from tests.device import DEVICE

ROOT = Path(__file__).resolve().parents[1]
needs_c = pytest.mark.skipif(native is None, reason="the C module was not built")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _trees.forget_trees()
    with config.patch(cache=False):
        yield


@pytest.fixture(params=["c", "c that asks torch", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Functions captured from here on go the straight way in C, or in Python."""
    if request.param == "python":
        monkeypatch.setattr("capture._shortcut.native", None)
    elif native is None:
        pytest.skip("the C module was not built")
    elif request.param != "c":
        monkeypatch.setattr("capture._shortcut.alike_layout", lambda: None)
    kind: str = request.param
    return kind


def scaled(x: Tensor, y: Tensor, factor: float = 2.0, *, shift: float = 1.0) -> Tensor:
    return x * factor + y + shift


def tensors(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(2, *(shape or (4,)), generator=generator, device="cpu").to(DEVICE)
    return made[0].clone(), made[1].clone()


def goes_straight(function: Callable[..., Any], *args: Any) -> bool:
    """The call is one that C takes by itself."""
    return captured_states(function)[0].straight(*args) is not MISS


def refused(function: Any, *args: Any) -> None:
    with pytest.raises(TypeError):
        function(*args)


CALLS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "positional": lambda f, x, y: f(x, y),
    "all positional": lambda f, x, y: f(x, y, 2.0),
    "another value": lambda f, x, y: f(x, y, 3.0),
    "keywords": lambda f, x, y: f(x, y=y),
    "keyword only": lambda f, x, y: f(x, y, shift=0.5),
    "other order": lambda f, x, y: f(y=x, x=y),
    "the same twice": lambda f, x, y: f(x, x),
    "overlapping": lambda f, x, y: f(x[:-1], x[1:]),
    "a view": lambda f, x, y: f(x[::2], y[::2]),
    "unaligned": lambda f, x, y: f(x[1:], y[1:]),
    "another dtype": lambda f, x, y: f(x.double(), y.double()),
    "another shape": lambda f, x, y: f(x[None], y[None]),
    "with gradients": lambda f, x, y: f(x.clone().requires_grad_(), y).detach(),
    "too many": lambda f, x, y: refused(f, x, y, 2.0, 1.0),
    "too few": lambda f, x, y: refused(f, x),
}


EQUAL: dict[str, Callable[[], Any]] = {
    "int": lambda: int("100000"),
    "float": lambda: float("0.7"),
    "nan": lambda: float("nan"),
    "zero": lambda: float("0"),
    "negative zero": lambda: float("-0"),
    "text": lambda: str(b"ab", "ascii"),
    "bytes": lambda: bytes([1, 2, 3]),
    "size": lambda: torch.zeros(2, 3).shape,
    "device": lambda: torch.device("cpu"),
    "true": lambda: True,
    "one": lambda: 1,
    "one point nought": lambda: float("1"),
    "none": lambda: None,
}
"""Each another object in every call, where there can be several."""


def _of_kind(x: Tensor, value: Any) -> Tensor:
    """Bits that tell apart all of these."""
    number = value if isinstance(value, (int, float)) else len(str(value))
    return torch.stack([x * number, torch.full_like(x, number), x + len(repr(value))])


def test_equal_values_go_straight_and_others_do_not(way: str) -> None:
    mine = capture(_of_kind, max_recordings=len(EQUAL))
    x = torch.randn(4, device=DEVICE)
    for _ in range(3):
        for name, make in EQUAL.items():
            for _ in range(3):
                assert same_bits(mine(x, make()), _of_kind(x, make())), name
            assert way == "python" or goes_straight(mine, x, make()), name
            others = [other() for key, other in EQUAL.items() if key != name]
            assert not any(same_value(make(), other) for other in others)
            assert same_value(make(), make())
    assert recordings(mine).recordings == len(EQUAL)


def test_names_with_equal_values_go_straight(way: str) -> None:
    own = Named()
    mine, x = capture(own.call), torch.randn(2, 4, device=DEVICE)
    with torch.no_grad():
        for _ in range(4):
            own.scale = float("2.5")
            assert torch.equal(mine(x), own.call(x))
        own.scale = float("2.5")
        assert way == "python" or goes_straight(mine, x)
    assert recordings(mine).recordings == 1


def test_every_kind_of_call_in_turn(way: str) -> None:
    mine = capture(scaled, max_recordings=40)
    for seed in range(6):
        x, y = tensors(seed, 6)
        for name, call in CALLS.items():
            mark_step_begin()
            actual, expected = call(mine, x, y), call(scaled, x, y)
            assert (actual is None) == (expected is None), name
            if expected is not None:
                assert torch.equal(actual, expected), (name, seed)


@needs_c
def test_what_goes_straight() -> None:
    mine = capture(scaled, max_recordings=8)
    x, y = tensors(0)
    for _ in range(4):
        mine(x, y)
    assert goes_straight(mine, *tensors(1))
    assert goes_straight(mine, *tensors(2), 2.0)
    assert not goes_straight(mine, *tensors(3), 3.0)
    assert not goes_straight(mine, *tensors(3, 5))
    assert not goes_straight(mine, *tensors(3), 2.0, 1.0), "keyword only"
    with torch.autocast("cpu"):
        assert not goes_straight(mine, *tensors(4))
    with config.patch(poison=True):
        assert not goes_straight(mine, *tensors(4))
    release(mine)
    assert not goes_straight(mine, *tensors(4))


@needs_c
def test_other_defaults() -> None:
    def body(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    mine = capture(body)
    x, _ = tensors(0)
    for _ in range(4):
        assert torch.equal(mine(x), x * 2)
    body.__defaults__ = (3.0,)
    for _ in range(4):
        assert torch.equal(mine(x), x * 3)


@needs_c
def test_switches_of_the_backends_are_looked_at() -> None:
    mine = capture(lambda x: x @ x)
    x = torch.randn(4, 4, device=DEVICE)
    for _ in range(4):
        mine(x)
    assert goes_straight(mine, x)
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(not before)
    try:
        assert not goes_straight(mine, x)
    finally:
        torch.backends.cuda.enable_flash_sdp(before)
    assert goes_straight(mine, x)
    backends: Any = torch.backends
    matmul = backends.cuda.matmul if DEVICE.type == "cuda" else backends.mkldnn.matmul
    old = matmul.fp32_precision
    matmul.fp32_precision = "ieee" if old == "tf32" else "tf32"
    try:
        assert not goes_straight(mine, x)
    finally:
        matmul.fp32_precision = old


class Stack(nn.Module):
    """Linear layers, whose weights a recording reads where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def _set(holder: Any, name: str, value: Any) -> None:
    setattr(holder, name, value)


STATE: dict[str, Callable[[Any], object]] = {
    "data": lambda net: _set(net.layers[1].weight, "data", torch.ones(4, 4, device=DEVICE)),
    "data of other strides": lambda net: _set(net.layers[1].weight, "data", net.layers[1].weight.detach().t()),
    "in place": lambda net: net.layers[2].weight.data.mul_(2),
    "parameter": lambda net: _set(net.layers[0], "bias", nn.Parameter(torch.ones(4, device=DEVICE))),
    "no bias": lambda net: _set(net.layers[0], "bias", None),
    "submodule": lambda net: _set(net, "layers", Stack().to(DEVICE).layers),
    "layer": lambda net: net.layers.__setitem__(3, nn.Linear(4, 4, device=DEVICE)),
    "hook": lambda net: net.layers[4].register_forward_hook(lambda *given: given[-1] + 1),
    "forward": lambda net: _set(net.layers[4], "forward", torch.sin),
    "eval": lambda net: net.eval(),
    "eval of one": lambda net: net.layers[2].eval(),
    "gradient off": lambda net: net.layers[2].weight.requires_grad_(False),
    "dtype": lambda net: net.to(torch.float64).to(torch.float32),
}


class Holder:
    """An object that is no module."""

    def __init__(self, net: Stack) -> None:
        self.net = net

    def call(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


NET: Any = None


def _through_a_global(x: Tensor) -> Tensor:
    y: Tensor = NET(x)
    return y


def _captured_net(net: Stack, through: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """A captured function that reaches the module, and the same eagerly."""
    match through:
        case "module":
            plain = Stack.forward.__get__(net)
            return capture(net, **options), plain
        case "closure":
            return capture(lambda x: net(x), **options), net
        case "global":
            return capture(_through_a_global, **options), net
    holder = Holder(net)
    return capture(holder.call, **options), net


@pytest.mark.parametrize("checks", ["always", "sampled"])
@pytest.mark.parametrize("change", STATE)
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("through", ["module", "closure", "global", "attribute"])
def test_state_that_changes(
    change: str, checks: Any, seen: bool, through: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the change every shape gives eager's values, whether C had a look at its state before or not."""
    del way
    net = Stack().to(DEVICE)
    monkeypatch.setitem(globals(), "NET", net)
    mine, plain = _captured_net(net, through, {"checks": checks, "max_recordings": 8})
    xs = [torch.randn(size, 4, device=DEVICE) for size in (1, 2)]
    with torch.no_grad():
        for x in xs:
            for _ in range(5 if seen else 2):
                assert torch.equal(mine(x), plain(x))
    STATE[change](net)
    if change == "data" and checks == "sampled":
        return  # what moves without a registration is seen at the next full comparison
    with torch.no_grad():
        for _ in range(20 if checks == "sampled" else 4):
            for x in xs:
                result, expected = mine(x), plain(x)
        assert torch.equal(result, expected)
        for x in xs:
            assert torch.equal(mine(x), plain(x)) or checks == "sampled"


class Named:
    """What a body names in each of the ways that there are."""

    def __init__(self) -> None:
        self.scale: Any = 2.0
        self.weight: Any = torch.full((4,), 3.0, device=DEVICE)
        self.net: Any = nn.Linear(4, 4, device=DEVICE)

    def call(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x * self.scale) + self.weight
        return y


def _named(kind: str) -> tuple[Callable[[Tensor], Tensor], Callable[[str, Any], None], Callable[[str], Any]]:
    """A function, and what sets and reads its three names."""
    own = Named()
    if kind == "attribute":
        return own.call, functools.partial(setattr, own), functools.partial(getattr, own)
    if kind == "chain":
        return (
            (lambda x: own.net(x * own.scale) + own.weight),
            functools.partial(setattr, own),
            functools.partial(getattr, own),
        )
    names = dict(own.__dict__)
    if kind == "global":
        scope: dict[str, Any] = {"__builtins__": __builtins__, "__name__": "named", **names}
        exec("def body(x): return net(x * scale) + weight", scope)  # noqa: S102 - the text above
        return scope["body"], scope.__setitem__, scope.__getitem__
    scale, weight, net = names["scale"], names["weight"], names["net"]

    def body(x: Tensor) -> Tensor:
        y: Tensor = net(x * scale) + weight
        return y

    cells = dict(zip(body.__code__.co_freevars, body.__closure__ or (), strict=True))
    return body, lambda name, value: _set(cells[name], "cell_contents", value), lambda name: cells[name].cell_contents


class Doubled(nn.Linear):
    """Another class for the same instance."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


RENAMED: dict[str, Callable[[Callable[[str, Any], None], Callable[[str], Any]], object]] = {
    "value": lambda put, get: put("scale", 5.0),
    "equal value": lambda put, get: put("scale", float("2")),
    "value of another type": lambda put, get: put("scale", 3),
    "tensor": lambda put, get: put("weight", torch.ones(4, device=DEVICE)),
    "tensor in place": lambda put, get: get("weight").add_(1),
    "a gradient": lambda put, get: get("weight").requires_grad_(),
    "a tensor for the value": lambda put, get: put("scale", torch.ones(4, device=DEVICE)),
    "module": lambda put, get: put("net", nn.Linear(4, 4, device=DEVICE)),
    "class of the module": lambda put, get: _set(get("net"), "__class__", Doubled),
    "training": lambda put, get: get("net").eval(),
    "a function for the module": lambda put, get: put("net", torch.sin),
    "hook": lambda put, get: get("net").register_forward_hook(lambda *given: given[-1] + 1),
}  # fmt: skip


@pytest.mark.parametrize("change", RENAMED)
@pytest.mark.parametrize("kind", ["closure", "global", "attribute", "chain"])
def test_a_name_that_changes(kind: str, change: str, way: str) -> None:
    body, put, get = _named(kind)
    before, x = get("net"), torch.randn(2, 4, device=DEVICE)
    mine = capture(body, max_recordings=8)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(mine(x), body(x))
        assert way == "python" or goes_straight(mine, x)
        RENAMED[change](put, get)
        for _ in range(5):
            assert torch.equal(mine(x), body(x))
        put("net", before)
        for _ in range(4):
            assert torch.equal(mine(x), body(x))


class Apart(nn.Module):
    """Its training flag is no entry of ``__dict__``."""

    training: Any = property(
        lambda self: self.__dict__["flags"]["training"],
        lambda self, value: self.__dict__.setdefault("flags", {}).update(training=value),
    )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x * 3


def test_a_training_flag_that_is_kept_elsewhere(way: str) -> None:
    del way
    net, inner = Apart(), Apart()
    plain, outer = Apart.forward.__get__(net), capture(nn.Sequential(inner))
    capture(net)
    x = torch.randn(4, device=DEVICE)
    for _ in range(3):
        for training in (True, False):
            net.train(training)
            inner.train(training)
            for _ in range(5):
                assert torch.equal(net(x), plain(x))
                assert torch.equal(outer(x), plain(x))


@needs_c
def test_where_torch_keeps_metadata_is_found_whatever_the_heap_holds() -> None:
    known = _torch_private_layout.layout()
    assert known is not None, "only slower without it, but every supported torch has it"
    kept = []
    for number in range(50):
        kept += [bytearray(size + number) for size in (40, 88, 184, 200, 400)]
        if number % 3:
            del kept[:: 1 + number % 4]
        _torch_private_layout.layout.cache_clear()
        assert _torch_private_layout.layout() == known


def some_tensor(choose: random.Random) -> Tensor:
    """Few shapes, so that many are alike; views, numbers of dimensions beyond those torch keeps in the object."""
    shape = choose.choice([(), (0,), (3,), (2, 3), (3, 2), (2, 0), (1, 2, 3), (1,) * 5, (1,) * 6, (1, 1, 1, 1, 1, 2)])
    dtype = choose.choice([torch.float32, torch.float32, torch.float64, torch.int32, torch.complex64, torch.bfloat16])
    with torch.inference_mode(choose.random() < 0.1):
        made = torch.zeros([size + choose.choice([0, 0, 1]) for size in shape], dtype=dtype, device=DEVICE)
        if made.dim() and choose.random() < 0.5:
            made = made.as_strided(shape, made.stride())
        if choose.random() < 0.3:
            made = made.mT if made.dim() > 1 else made.conj()
        if choose.random() < 0.2:
            made = torch._neg_view(made)
        if choose.random() < 0.2:
            made = made.detach()
    if made.dtype.is_floating_point and not made.is_inference() and choose.random() < 0.5:
        made = made.detach().requires_grad_()
        made = made if choose.random() < 0.5 else made.view_as(made)
    return nn.Parameter(made) if made.is_leaf and made.requires_grad and choose.random() < 0.3 else made


@needs_c
@pytest.mark.parametrize("seed", range(4))
def test_tensors_that_are_alike_are_so_for_torch(seed: int) -> None:
    known = _torch_private_layout.alike_layout()
    assert known is not None, "only slower without it, but every supported torch has it"
    choose, accepted = random.Random(seed), 0
    made = [some_tensor(choose) for _ in range(150)]
    for one in made:
        if one.dim() > _torch_private_layout.MOST_DIMS:
            continue
        alike, guard = native.Alike((one,), known), _torch_private.metadata_guard((one,))
        assert alike((one,)) == (one.data_ptr(),)
        for other in made:
            addresses = alike((other,))
            if addresses is not None:
                accepted += other is not one
                assert guard(other)
                assert addresses == (other.data_ptr(),)
    assert accepted > 5, "the bytes behind the sizes are as the heap had them"
    with pytest.raises(AttributeError):
        native.Alike((1,), known)
    with pytest.raises(AttributeError):
        native.Alike((made[0], None), known)
    assert native.Alike((made[0],), known)(()) is None


@needs_c
def test_dispatch_keys_of_the_thread_are_compared() -> None:
    """Below autograd, tensors that are alike are others for torch."""
    x, y = tensors(0)
    mine = capture(scaled)
    for _ in range(4):
        mine(x, y)
    assert goes_straight(mine, x, y)
    with torch._C._AutoDispatchBelowAutograd():
        assert not goes_straight(mine, x, y)
        assert torch.equal(mine(x, y), scaled(x, y))
    assert goes_straight(mine, x, y)


@needs_c
def test_another_thread_has_a_way_of_its_own() -> None:
    mine = capture(scaled)
    x, y = tensors(0)
    for _ in range(4):
        mine(x, y)
    found = []

    def work() -> None:
        found.append(goes_straight(mine, x, y))
        found.extend(torch.equal(mine(x, y), scaled(x, y)) for _ in range(5))
        found.append(goes_straight(mine, x, y))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False, *[True] * 5, True]
    assert goes_straight(mine, x, y)


def test_a_thread_that_works_for_others_uses_their_trees(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of autograd's does, which runs the backward passes of all threads."""
    mine = capture(scaled)
    x, y = tensors(0)
    for _ in range(4):
        mine(x, y)
    mine_alone = _trees.trees_here()
    theirs: dict[str, Any] = {}
    paths = {name: len(tree.path) for name, tree in mine_alone.items()}
    monkeypatch.setattr(_trees.in_use(), "trees", theirs)
    for _ in range(4):
        assert torch.equal(mine(x, y), scaled(x, y))
    assert theirs.keys() == mine_alone.keys(), "they recorded for themselves"
    assert paths == {name: len(tree.path) for name, tree in mine_alone.items()}


LONG, SHORT = 5000, 7


@pytest.mark.parametrize("sizes", [(SHORT, LONG, SHORT), (LONG, SHORT, SHORT)])
def test_short_arguments_beside_long_ones(way: str, sizes: tuple[int, ...]) -> None:
    """Nearer to each other than the longest is long, without sharing memory; then one that does."""
    mine = capture(lambda a, b, c: (a.sum() + b.sum(), c * 2))
    memory = torch.arange(3 * 16 + sum(sizes), dtype=torch.float32, device=DEVICE)
    begins = [16 * number + sum(sizes[:number]) // 16 * 16 for number in range(3)]
    apart = [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
    assert all(one.data_ptr() % 64 == 0 for one in apart)
    for _ in range(5):
        found, expected = mine(*apart), (apart[0].sum() + apart[1].sum(), apart[2] * 2)
        assert all(map(torch.equal, found, expected))
    assert way == "python" or goes_straight(mine, *apart)
    inside = [*apart[:2], apart[sizes.index(LONG)][16 : 16 + SHORT]]
    assert not goes_straight(mine, *inside)
    for _ in range(4):
        found, expected = mine(*inside), (inside[0].sum() + inside[1].sum(), inside[2] * 2)
        assert all(map(torch.equal, found, expected))


@needs_c
@pytest.mark.parametrize(
    "use",
    [
        lambda t: t, lambda t: t.view(-1), lambda t: t.detach(), lambda t: t.untyped_storage(), lambda t: [t][0],
        lambda t: torch.ones(4, requires_grad=True, device="cpu") * t,
    ],
)  # fmt: skip
def test_an_alias_is_handed_out_again_only_while_nobody_has_it(use: Callable[[Tensor], Any]) -> None:
    first = torch.zeros(4, device="cpu")
    storage = first.untyped_storage()
    watch = native.Held(_torch_private.count_holders, storage, storage._cdata, first, counts_layout())
    assert watch.settle() == 2  # the tensor and the storage's object
    assert watch() is None
    taken = watch.again()
    assert taken.data_ptr() == first.data_ptr()
    assert (watch(), watch.again()) == (storage, None)
    number, used = id(taken), use(taken)
    del taken
    assert (watch(), watch.again()) == (storage, None)
    del used
    assert watch() is None
    assert id(watch.again()) == number


@needs_c
def test_an_alias_that_was_changed_is_not_handed_out_again() -> None:
    first = torch.zeros(4, device="cpu")
    storage = first.untyped_storage()
    changes: list[Callable[[Tensor], Any]]
    changes = [lambda t: t.resize_(2), lambda t: t.requires_grad_(), lambda t: setattr(t, "data", torch.ones(2))]
    for change in changes:
        watch = native.Held(_torch_private.count_holders, storage, storage._cdata, first, counts_layout())
        watch.settle()
        change(watch.again())
        assert watch.again() is None
    with pytest.raises(TypeError):
        native.Held(_torch_private.count_holders, storage, storage._cdata, first)


LEAVES: list[Callable[[Tensor], Any]] = [
    lambda t: setattr(t, "note", 1), lambda t: t.add_(1), lambda t: t.requires_grad_(), lambda t: t.t_(),
    weakref.ref, lambda t: weakref.finalize(t, int), lambda t: setattr(t, "data", torch.ones(2, 3)),
    lambda t: t.resize_(1, 2), lambda t: setattr(t, "__class__", nn.Parameter),
]  # fmt: skip
"""What somebody leaves on a tensor, or makes of it, before it is dropped."""


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("several", [False, True])
def test_an_output_is_as_new_whatever_was_left_on_the_last_one(
    leave: Callable[[Tensor], Any], several: bool, way: str
) -> None:
    def body(x: Tensor) -> Any:
        return (x * 2, x + 1) if several else x * 2

    mine, x = capture(body), torch.randn(3, 2, device=DEVICE)
    for _ in range(4):
        mine(x)
    for _ in range(3):
        mark_step_begin()
        y = mine(x)[0] if several else mine(x)
        assert (type(y), y._version, y.requires_grad, y.__dict__) == (Tensor, 0, False, {})
        assert torch.equal(y, x * 2)
        assert y.stride() == (2, 1)
        left = leave(y)
        del y
        if isinstance(left, weakref.ref):
            mine(x)
            assert left() is None


def test_an_output_that_became_part_of_a_graph_lets_go_of_it(way: str) -> None:
    """A user's autograd function returns it: gradients are off in there."""
    mine, x = capture(lambda x: x * 2), torch.randn(3, 2, device=DEVICE, requires_grad=True)

    class Twice(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor) -> Tensor:
            result: Tensor = mine(x.detach())
            return result

        @staticmethod
        @override
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    for _ in range(5):
        y = Twice.apply(x * 1)  # type: ignore[no-untyped-call]
        node = weakref.ref(y.grad_fn)
        y.sum().backward()
        del y
        assert node() is None
    assert torch.equal(x.grad, torch.full_like(x, 10))  # type: ignore[arg-type]


def test_an_output_that_is_held_is_not_handed_out_again(way: str) -> None:
    mine, x = capture(lambda x: x * 2), torch.randn(3, 2, device=DEVICE)
    uses: list[Callable[[Tensor], Any]]
    uses = [lambda t: t, lambda t: t[1:], lambda t: t.detach(), lambda t: t.untyped_storage(), lambda t: [t]]
    for use in uses:
        for _ in range(4):
            mine(x)
        kept = use(mine(x))
        before = torch.tensor(list(kept)) if isinstance(kept, torch.UntypedStorage) else kept
        before = before.clone() if isinstance(before, Tensor) else before[0].clone()
        mark_step_begin()
        other = mine(x + 1)
        after = torch.tensor(list(kept)) if isinstance(kept, torch.UntypedStorage) else kept
        assert torch.equal(before, after if isinstance(after, Tensor) else after[0])
        assert torch.equal(other, (x + 1) * 2)
        del other, kept, after


@needs_c
def test_what_watches_a_storage_counts_all_that_use_it() -> None:
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    watch = native.Held(_torch_private.count_holders, storage, storage._cdata)
    alone = watch.settle()
    assert watch() is None
    view = tensor[1:]
    assert watch() is storage
    del view
    assert watch() is None
    other = tensor.untyped_storage()
    assert watch() is other
    del other
    assert (watch(), watch.settle()) == (None, alone)
    with pytest.raises(TypeError):
        watch(1)
    with pytest.raises(TypeError):
        native.Held(_torch_private.count_holders, storage)
    with pytest.raises(IndexError):
        native.hand_out((None,), [None], (0,), [None], (1,), None)
    assert native.hand_out((None,), [None], (0,), [None], (0,), None) == [0]


@needs_c
def test_no_reference_is_lost_or_kept() -> None:
    mine = capture(scaled)
    held = capture(lambda x: x * 3)
    x, y = tensors(0)
    for _ in range(4):
        mine(x, y), held(mine(x, y))
    watched = [x, y, MISS, mine, captured_states(mine)[0], captured_states(mine)[0].entries()[0].nodes[0]]
    gc.collect()
    before = [sys.getrefcount(one) for one in watched], len(gc.get_objects())
    for _ in range(2000):
        mark_step_begin()
        held(mine(x, y))
    mine(x, y, 5.0)
    del _
    gc.collect()
    after = [sys.getrefcount(one) for one in watched], len(gc.get_objects())
    assert all(b - a < 20 for a, b in zip(before[0], after[0], strict=True)), (before, after)
    assert after[1] - before[1] < 500


@needs_c
def test_an_exception_comes_out() -> None:
    mine = capture(scaled)
    x, y = tensors(0)
    for _ in range(4):
        mine(x, y)
    recording: Any = captured_states(mine)[0].entries()[0].nodes[0].recording

    def fails(_: Any) -> None:
        raise KeyboardInterrupt

    replay, recording.replay = recording.replay, fails
    with pytest.raises(KeyboardInterrupt):
        mine(x, y)
    recording.replay = replay
    for _ in range(3):
        assert torch.equal(mine(x, y), scaled(x, y))


@needs_c
def test_bad_arguments_of_the_module_itself() -> None:
    with pytest.raises(TypeError):
        native.Modes([])
    with pytest.raises(TypeError):
        native.Modes(((len,),))
    with pytest.raises(TypeError):
        native.Modes((), (1,))
    with pytest.raises(TypeError):
        native.Modes((), ((1, 2),))
    with pytest.raises(ValueError, match="no such reader"):
        native.Modes((), ((0, 0, 0, 0, 0, 0),))
    with pytest.raises(ValueError, match="no such reader"):
        native.read_mode((1, 9, 0, 0, 0, 0))
    with pytest.raises(ValueError, match="an attribute of one object"):
        native.Modes((("inside", (), 0),))
    with pytest.raises(TypeError):
        native.Ways(MISS).add(object())
    with pytest.raises(TypeError):
        native.Way()
    for wrong in (object(), object, type("Node", (), {}), type("Marks", (), {"begun": 0})):
        with pytest.raises(TypeError):
            native.tell(wrong)
    with pytest.raises(TypeError):
        native.Methods((), MISS)
    methods = native.Methods({}, MISS)
    assert methods(1, (2,)) is MISS
    for arguments, named in (((1,), {}), ((1, 2), {}), ((1, ()), {"x": 2})):
        with pytest.raises(TypeError):
            methods(*arguments, **named)
    with pytest.raises(TypeError):
        native.Methods({id(MISS): (MISS,)}, MISS)(MISS, ())
    with pytest.raises(TypeError):
        native.Launch(
            slow=len, pool=None, stream_of=len, device=len, index=0, executable=0, copies=object(), copy_in=None
        )
    assert native.use_driver("no such library") is False
    ways = native.Ways(MISS)
    assert ways() is MISS
    assert ways(1, x=2) is MISS


DRIVER = """
#include <stddef.h>
int launches, status;
void *executable, *stream;
int cuGraphLaunch(void *one, void *on) { launches++; executable = one; stream = on; return status; }
int cuCtxGetCurrent(void **context) { *context = 0; return 0; }
int cuGraphGetRootNodes(void) { return 0; }
int cuGraphAddMemcpyNode(void) { return 0; }
int cuGraphExecMemcpyNodeSetParams(void) { return 0; }
int cuGraphAddDependencies(void) { return 0; }
int cuGraphAddDependencies_v2(void) { return 0; }
int capturing, count;
int cuStreamGetCaptureInfo_v2(void *on, int *is, unsigned long *id, void **graph, void *const **after, size_t *number)
{ stream = on; *is = capturing; *id = 5; *graph = &launches; return status; }
int cuGraphGetNodes(void *graph, void **nodes, size_t *number) { *number = count; return graph != &launches || nodes; }
"""


@pytest.fixture
def counting_driver(tmp_path: Path) -> ctypes.CDLL:
    """A driver that only counts."""
    compiler = shutil.which(str(sysconfig.get_config_var("CC") or "cc").split()[0])
    assert compiler is not None, "the C module was built with it"
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert native.use_driver(str(library))
    return ctypes.CDLL(str(library))


@needs_c
@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver of this process is a real one")
def test_a_graph_is_launched_where_the_last_one_was(counting_driver: ctypes.CDLL) -> None:
    """What is not as usual is left to Python."""
    driver = counting_driver
    launches, status = ctypes.c_int.in_dll(driver, "launches"), ctypes.c_int.in_dll(driver, "status")
    pool, slow, here = CudaPool.__new__(CudaPool), [], {"device": 0, "stream": 7}
    pool._lane, pool.ran_on, pool.beside = None, 7, set()
    named = {"device": lambda: here["device"], "index": 0, "stream_of": lambda _: here["stream"]}
    given = {**named, "executable": 123, "copies": None, "copy_in": None}
    launch = native.Launch(slow=lambda leaves: slow.append(leaves), pool=pool, **given)
    launch([])
    assert (launches.value, slow) == (1, [])
    assert [ctypes.c_void_p.in_dll(driver, name).value for name in ("executable", "stream")] == [123, 7]
    for name, value in (("device", 1), ("stream", 8)):
        usual, here[name] = here[name], value
        launch([value])
        here[name] = usual
    pool.ran_on = None
    launch([None])
    pool.ran_on = 7
    pool.beside.add(object())  # type: ignore[arg-type]
    launch(["beside"])
    pool.beside.clear()
    assert (launches.value, slow) == (1, [[1], [8], [None], ["beside"]])
    status.value = 1
    launch(["failed"])
    status.value = 0
    assert (launches.value, slow[-1]) == (2, ["failed"])
    with pytest.raises(TypeError, match="CudaPool"):
        native.Launch(slow=len, pool=object(), **given)


@needs_c
@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver of this process is a real one")
def test_nodes_of_a_capture_are_counted(counting_driver: ctypes.CDLL) -> None:
    capturing, status, count = (ctypes.c_int.in_dll(counting_driver, name) for name in ("capturing", "status", "count"))
    counter = native.NodeCount(9)
    count.value = 4
    assert counter() == -1  # nothing is captured
    capturing.value = 1
    assert counter() == 4
    assert ctypes.c_void_p.in_dll(counting_driver, "stream").value == 9
    capturing.value = 2  # the capture failed: its graph is gone
    assert counter() == -1
    capturing.value, status.value = 1, 1
    assert counter() == -1
    with pytest.raises(TypeError):
        counter(1)


@needs_c
def test_modes_hold_while_functions_give_the_same() -> None:
    given: list[Any] = [1, "a", None]
    modes = native.Modes(tuple((given.__getitem__, (at,), value) for at, value in enumerate(given)))
    assert modes()
    given[1] = str(b"a", "ascii")  # an equal one
    assert modes()
    given[0] = True
    assert not modes()
    given[0] = 1
    given.pop()
    with pytest.raises(IndexError):
        modes()


@needs_c
def test_torch_is_read_in_c() -> None:
    """In the versions that the functions were looked at in; elsewhere Python is asked, which ``test_key`` does, too."""
    found = {kind: _torch_private_modes.readers(kind) for kind in ("cpu", "cuda")}
    assert all(found.values())
    assert _torch_private_modes.readers("xpu") is None
    modes = native.Modes((), found["cpu"])
    assert modes()
    with torch.inference_mode(not torch.is_inference_mode_enabled()):
        assert not modes()
    assert modes()


@pytest.mark.parametrize("broken", ["_GRADIENTS", "_AUTOCAST", "_READ_IN"])
def test_python_is_asked_where_torch_has_no_such_function(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value: Any = ((2, 9), (2, 10)) if broken == "_READ_IN" else "_ZN3c1013no_such_stateEv"
    monkeypatch.setattr(_torch_private_modes, broken, value)
    _torch_private_modes.readers.cache_clear()
    assert _torch_private_modes.readers("cpu") is None
    _torch_private_modes.readers.cache_clear()


@needs_c
@pytest.mark.parametrize("broken", [True, False])
def test_dispatch_keys_are_read_or_torch_is_asked(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken:
        monkeypatch.setattr(_torch_private_modes, "_KEYS", "_ZN3c104impl15no_such_variableE")
    _torch_private_modes._keys.cache_clear()
    assert len(_torch_private_modes.dispatch_keys("cpu")) == (0 if broken else 2)
    done: list[bool] = []

    def work() -> None:
        test_dispatch_keys_of_the_thread_are_compared()
        done.append(True)

    thread = threading.Thread(target=work)  # one that has read no modes before
    thread.start()
    thread.join()
    assert done
    monkeypatch.undo()
    _torch_private_modes._keys.cache_clear()


@needs_c
def test_a_thread_that_comes_after_another_one_is_not_taken_for_it() -> None:
    """The system gives the same number to threads that follow each other."""
    modes: list[Any] = []
    numbers = []

    def work() -> None:
        modes.append(native.Modes(()))
        numbers.append((threading.get_ident(), [one() for one in modes]))

    for _ in range(4):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [one for _, one in numbers] == [[*[False] * count, True] for count in range(4)]


@needs_c
def test_facts_about_names_keep_nothing_alive() -> None:
    net, own, receiver = nn.Linear(2, 2), nn.Module(), Holder(Stack())
    net_of = types.CellType(net)
    own.__dict__["net"] = receiver.__dict__["net"] = net
    sources = [
        Source(lambda: net_of.cell_contents, net_of),
        Source(lambda: own.__dict__["net"], own.__dict__, "net"),
        Source(lambda: receiver.net, weakref.ref(receiver), "net"),
        Source(lambda: net_of.cell_contents),
    ]
    facts = [native.Facts((named_fact(net, one, weakly=True),), None) for one in sources]
    assert [(one(), one()) for one in facts] == [(True, True)] * 4
    net.__class__ = Doubled
    assert [(one(), one()) for one in facts] == [(False, False)] * 4
    gone = weakref.ref(net)
    net_of.cell_contents = own.__dict__["net"] = receiver.__dict__["net"] = None
    del net
    assert gone() is None
    assert [one() for one in facts] == [False] * 4
    del net_of.cell_contents
    assert not facts[0]()
    tensor = torch.zeros(2)
    needs = native.Facts((named_fact(tensor, Source(lambda: tensor), weakly=True),), None)
    assert needs()
    tensor.requires_grad_()
    assert not needs()
    odd: list[Any] = [(CELL, 1, None, 1, 0), (ITEM + WEAK, {}, "a", 1, 0), (APART + 1, {}, "a", 1, 0)]
    for wrong in odd:
        with pytest.raises(ValueError, match="no such fact"):
            native.Facts((wrong,), None)


@needs_c
def test_facts_of_a_dict_are_looked_at_after_each_change() -> None:
    value, other = object(), object()
    kinds: list[dict[Any, Any]] = [{}, OrderedDict(), defaultdict(list)]
    for own in kinds:
        own |= {"a": value, "b": value}
        facts = native.Facts(
            ((ITEM, own, "a", value, 0), (ABSENT, own, "c", None, 0), (SIZE, own, None, None, 2)), None
        )
        changes: list[tuple[Callable[[], Any], bool]] = [
            (lambda own=own: own.update(a=other), False), (lambda own=own: own.update(a=value), True),  # type: ignore[misc]
            (lambda own=own: own.update(c=1), False), (lambda own=own: own.pop("b"), False),  # type: ignore[misc]
            (lambda own=own: own.update(b=2, c=3), False), (lambda own=own: own.pop("c"), True),  # type: ignore[misc]
            (own.clear, False), (lambda own=own: own.update(a=value, b=1), True), (own.popitem, False),  # type: ignore[misc]
        ]  # fmt: skip
        assert (facts(), facts()) == (True, True)
        for change, holds in changes:
            change()
            assert (facts(), facts()) == (holds, holds)


def test_items_of_a_dict_are_one_fact() -> None:
    """As ``has`` says in Python, after each change."""
    own: dict[str, Any] = {"a": 0.5, "b": "text", "c": None, "f": len}
    wanted = (("gone", "not there"), tuple(own.items()))
    facts = native.Facts(((ITEMS, own, *wanted, 0),), None)
    changes: list[dict[str, Any]] = [
        {"a": 0.25}, {"a": float("0.5")}, {"a": 0}, {"a": 0.5, "b": "te" + "xt"}, {"c": False}, {"c": None}, {"f": max},
        {"f": len, "more": 1}, {"gone": None},
    ]  # fmt: skip
    assert facts()
    for change in changes:
        own.update(change)
        assert (facts(), facts()) == (has(own, wanted),) * 2
    del own["gone"]
    assert facts()
    del own["b"]
    assert not facts()
    odds: list[tuple[Any, Any, Any]] = [(own, ["a"], ()), (own, (), ("ab",)), ([], (), ()), (own, (), [("a", 1)])]
    for odd in odds:
        with pytest.raises(ValueError, match="no such fact"):
            native.Facts(((ITEMS, *odd, 0),), None)


def test_many_recordings_and_many_shapes(way: str) -> None:
    mine = capture(lambda x: x + 1, max_recordings=64)
    xs = [torch.randn(size, device=DEVICE) for size in range(1, 50)]
    for _ in range(5):
        for x in xs:
            assert torch.equal(mine(x), x + 1)
    assert recordings(mine).recordings == len(xs)


def test_switched_off_by_the_environment() -> None:
    code = (
        "import torch; from capture import capture, _fast; f = capture(lambda x: x + 1); x = torch.ones(2)\n"
        "print(_fast.native, all(torch.equal(f(x), x + 1) for _ in range(6)))"
    )
    environment = {**os.environ, "CAPTURE_NATIVE": "0", "CAPTURE_CACHE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "True"]


@needs_c
def test_one_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _fast._load() is native
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    assert _fast._load() is None
    monkeypatch.delattr(native, "VERSION")
    assert _fast._load() is None


def test_it_was_built_here() -> None:
    """``pip install`` builds it where there are a C compiler and the headers of Python."""
    compiler = shutil.which(str(sysconfig.get_config_var("CC") or "cc").split()[0])
    if compiler is None or not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("nothing to build it with")
    assert _fast.native is not None or os.environ.get("CAPTURE_NATIVE") == "0"


def _sharing(x: Tensor) -> list[tuple[Tensor, ...]]:
    """Calls whose arguments share memory in several ways; ``x``: 6 x 4, float32."""
    y = x.clone()
    return [
        (x, x[1:3], x[2], y),
        (x, x[1:3], x[2], x),
        (x, x[1:3], x[3], y),
        (x, y[1:3], x[2], y),
        (x[:2], x[2:4], x[4], y),
        (x[:2], x[1:3], x[4], y[:0]),
        (x, x[1:3].clone(), x[2], y),
    ]


def test_arguments_that_share_memory_take_the_straight_way() -> None:
    """If they share it as they did; the same objects are the same objects."""

    def body(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        same = a is d
        return a.sum() * 2 + (b * c).sum() + d.sum(), (a if same else c) + 1

    captured = capture(body, max_recordings=20)
    for seed in range(8):
        for number, _ in enumerate(_sharing(torch.zeros(6, 4, device=DEVICE))):
            given = torch.randn(6, 4, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
            mine, theirs = _sharing(given.clone())[number], _sharing(given.clone())[number]
            found, expected = captured(*mine), body(*theirs)
            assert all(map(torch.equal, found, expected)), (seed, number)
    counts = recordings(captured)
    assert counts.replays >= 4 * 7
    assert captured_states(captured)[0].straight(*_sharing(given)[6]) is not MISS


def test_arguments_that_are_written_and_share_memory() -> None:
    def body(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a.mul_(2)
        b.add_(1)
        return (c * b).sum()

    captured = capture(body)
    for seed in range(10):
        mine = torch.randn(6, 4, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
        theirs, other = mine.clone(), torch.full((2, 4), float(seed), device=DEVICE)
        for rows in (slice(1, 3), slice(2, 4), slice(0, 2)) if seed > 4 else (slice(1, 3),):
            assert torch.equal(captured(mine, mine[rows], other), body(theirs, theirs[rows], other))
            assert torch.equal(mine, theirs)
        apart, same = torch.ones(2, 4, device=DEVICE), torch.ones(2, 4, device=DEVICE)
        assert torch.equal(captured(mine, apart, other), body(theirs, same, other))
        assert torch.equal(mine, theirs)
        assert torch.equal(apart, same)


@pytest.mark.parametrize("count", [65, 300, 600])
def test_many_arguments(count: int) -> None:
    """Side by side in memory, in any order, or one of them over another."""

    def body(*given: Tensor) -> Tensor:
        return torch.stack([one.sum() * number for number, one in enumerate(given)]).sum()

    captured = capture(body)
    chance = random.Random(0)
    whole = torch.randn(count + 1, 16, device=DEVICE)
    for number in range(12):
        rows = list(range(count))
        if number % 3 == 1:
            chance.shuffle(rows)
        given = [whole[row] for row in rows]
        if number % 3 == 2:
            given[7] = whole.flatten()[8:24]
        expected = body(*given)
        assert torch.equal(captured(*given), expected), number


@needs_c
def test_untouched_gradients_are_seen_to_be_touched() -> None:
    """Whoever gets hold of one shows, and who lets it go again does not."""
    where = counts_layout()
    assert where is not None, "else it is as slow as without"
    with torch.enable_grad():
        parameters = tuple(torch.ones(4, 4, device=DEVICE, requires_grad=True) for _ in range(3))
        for one in parameters:
            one.grad = torch.ones(4, 4, device=DEVICE).data
        known = native.Untouched(parameters, where)
        assert known(parameters)
        middle = parameters[1]
        assert middle.grad is not None
        middle.grad.mul_(2)
        assert known(parameters), "a write gives it to nobody"
        kept: Any
        for hold in (
            lambda: middle.grad, lambda: middle.grad[0], lambda: middle.grad.data,
            lambda: middle * middle.grad, lambda: [one.grad for one in parameters],
        ):  # fmt: skip
            kept = hold()
            assert not known(parameters)
            del kept
            assert known(parameters)
        assert not known(parameters[:2])
        assert not known((*parameters[:2], torch.ones(1)))
        assert not known((*parameters[:2], None))
        middle.grad = torch.ones(4, 4, device=DEVICE)
        assert not known(parameters)
    with pytest.raises(ValueError, match="no gradient"):
        native.Untouched((torch.ones(1),), where)
    with pytest.raises(TypeError):
        known(1)
