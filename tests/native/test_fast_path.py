"""Calls that repeat earlier ones: which the fast path in C takes, and what they give."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, mark_step_begin, recordings, release
from capture import native as _native
from capture.api.decorator import captured_state, captured_states
from capture.key.code_names import same_value
from capture.key.tensor_meta import same_bits
from capture.native import MISS, native
from capture.runtime.fast_path import Shortcuts
from capture.tree import thread_trees
from tests.support.device import AGAIN, DEVICE, EXECUTES, HAS_DEFAULT, use_device
from tests.support.fast_paths import Named, goes_straight, refused, scaled, tensors
from tests.support.fast_paths import fresh as fresh
from tests.support.fast_paths import way as way

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
"""Makers of values. Each gives another object in every call, where there can be several."""


def _of_kind(x: Tensor, value: Any) -> Tensor:
    """Bits that tell apart all of these."""
    number = value if isinstance(value, (int, float)) else len(str(value))
    return torch.stack([x * number, torch.full_like(x, number), x + len(repr(value))])


@pytest.mark.one_in(2)
def test_equal_values_go_straight_and_others_do_not(way: str) -> None:
    mine = capture(_of_kind, max_recordings=len(EQUAL))
    x = torch.randn(4, device=DEVICE)
    for _ in range(3):
        for name, make in EQUAL.items():
            for _ in range(3):
                assert same_bits(mine(x, make()), _of_kind(x, make())), name
            assert way == "general way" or goes_straight(mine, x, make()), name
            unequal = [make_other() for key, make_other in EQUAL.items() if key != name]
            assert not any(same_value(make(), value) for value in unequal)
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
        assert way == "general way" or goes_straight(mine, x)
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
    with torch.autocast(DEVICE.type):
        assert not goes_straight(mine, *tensors(4))
    with config.patch(poison=True):
        assert not goes_straight(mine, *tensors(4))
    release(mine)
    assert not goes_straight(mine, *tensors(4))


@pytest.mark.parametrize(  # two modes, one in the other, are not compared in C
    "device", [contextlib.nullcontext(), *([] if HAS_DEFAULT else [DEVICE])]
)
def test_a_call_by_name_goes_no_general_way(device: contextlib.AbstractContextManager[Any]) -> None:
    """Calls of large models name their arguments. All that is compared before them by position is compared in C, and
    nothing more is compared where a device is the default."""
    function = capture(lambda x, *, y, **more: torch.relu(x) * y + more["z"])
    x, y, z = torch.randn(4), torch.randn(4), torch.randn(4)
    ran: list[str] = []

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("capture."):
            ran.append(frame.f_code.co_name)

    before = sys.getprofile()
    with device:
        for _ in range(4):
            function(x, y=y, z=z)
        sys.setprofile(note)
        try:
            result = function(x, y=y, z=z)
        finally:
            sys.setprofile(before)
    assert torch.equal(result, torch.relu(x) * y + z)
    assert len(ran) <= 7 + 3 * AGAIN, ran  # an engine of graphs copies results in Python
    assert not {"here", "dispatch"} & {*ran}


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


def test_another_thread_has_a_way_of_its_own() -> None:
    mine = capture(scaled)
    x, y = tensors(0)
    for _ in range(4):
        mine(x, y)
    seen = []

    def work() -> None:
        use_device()
        seen.append(goes_straight(mine, x, y))
        seen.extend(torch.equal(mine(x, y), scaled(x, y)) for _ in range(5))
        seen.append(goes_straight(mine, x, y))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, *[True] * 5, True]
    assert goes_straight(mine, x, y)


def test_a_thread_that_works_for_others_uses_their_trees(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of autograd's, for example, runs the backward passes of all threads."""
    mine = capture(scaled)
    x, y = tensors(0)
    for _ in range(4):
        mine(x, y)
    mine_alone = thread_trees.trees_here()
    theirs: dict[str, Any] = {}
    paths = {name: len(tree.path) for name, tree in mine_alone.items()}
    monkeypatch.setattr(thread_trees.in_use(), "trees", theirs)
    for _ in range(4):
        assert torch.equal(mine(x, y), scaled(x, y))
    assert theirs.keys() == mine_alone.keys(), "they recorded for themselves"
    assert paths == {name: len(tree.path) for name, tree in mine_alone.items()}


LONG, SHORT = 5000, 7


@pytest.mark.parametrize("sizes", [(SHORT, LONG, SHORT), (LONG, SHORT, SHORT)])
def test_short_arguments_beside_long_ones(way: str, sizes: tuple[int, ...]) -> None:
    """They lie nearer to each other than the longest is long, without sharing memory; then one of them shares it."""
    mine = capture(lambda a, b, c: (a.sum() + b.sum(), c * 2))
    memory = torch.arange(3 * 16 + sum(sizes), dtype=torch.float32, device=DEVICE)
    begins = [16 * number + sum(sizes[:number]) // 16 * 16 for number in range(3)]
    apart = [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in apart)
    for _ in range(5):
        results, expected = mine(*apart), (apart[0].sum() + apart[1].sum(), apart[2] * 2)
        assert all(map(torch.equal, results, expected))
    assert way == "general way" or goes_straight(mine, *apart)
    inside = [*apart[:2], apart[sizes.index(LONG)][16 : 16 + SHORT]]
    assert not goes_straight(mine, *inside)
    for _ in range(4):
        results, expected = mine(*inside), (inside[0].sum() + inside[1].sum(), inside[2] * 2)
        assert all(map(torch.equal, results, expected))


def test_no_reference_is_lost_or_kept() -> None:
    mine = capture(scaled)
    held = capture(lambda x: x * 3)
    x, y = tensors(0)
    for _ in range(4):
        mine(x, y), held(mine(x, y))
    watched = [x, y, MISS, mine, captured_states(mine)[0], captured_states(mine)[0].entries()[0].nodes[0]]
    gc.collect()
    before = [sys.getrefcount(target) for target in watched], len(gc.get_objects())
    for _ in range(2000):
        mark_step_begin()
        held(mine(x, y))
    mine(x, y, 5.0)
    del _
    gc.collect()
    after = [sys.getrefcount(target) for target in watched], len(gc.get_objects())
    assert all(b - a < 20 for a, b in zip(before[0], after[0], strict=True)), (before, after)
    assert after[1] - before[1] < 500


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


def test_bad_arguments_of_the_module_itself() -> None:
    with pytest.raises(TypeError):
        native.Modes([])
    with pytest.raises(TypeError):
        native.Modes(((len,),))
    with pytest.raises(ValueError, match="an attribute of one object"):
        native.Modes((("inside", (), 0),))
    with pytest.raises(TypeError):
        native.FastPaths(MISS).add(object())
    with pytest.raises(TypeError):
        native.FastPath()
    for wrong in (object(), object, type("Node", (), {}), type("Marks", (), {"begun": 0})):
        with pytest.raises(TypeError):
            native.tell(wrong)
    with pytest.raises(TypeError):
        native.InstancePaths((), MISS)
    instances = native.InstancePaths({}, MISS)
    assert instances(1, (2,)) is MISS
    for arguments, named in (((1,), {}), ((1, 2), {}), ((1, ()), {"x": 2})):
        with pytest.raises(TypeError):
            instances(*arguments, **named)
    with pytest.raises(TypeError):
        native.InstancePaths({id(MISS): (MISS,)}, MISS)(MISS, ())
    with pytest.raises(TypeError):
        native.Launch(
            slow=len, pool=None, stream_of=len, device=len, index=0, executable=0, copies=object(), copy_in=None
        )
    assert native.use_driver("no such library") is False
    paths = native.FastPaths(MISS)
    assert paths() is MISS
    assert paths(1, x=2) is MISS
    assert paths.bound(()) is MISS
    with pytest.raises(TypeError):
        paths.bound([])


def test_a_path_that_is_removed_takes_no_call() -> None:
    mine = capture(lambda x: x + 1)
    x = torch.randn(3, device=DEVICE)
    for _ in range(4):
        mine(x)
    shortcuts = captured_state(mine).fast_paths
    assert isinstance(shortcuts, Shortcuts)
    ((entry, _, path),) = next(iter(shortcuts._by_shapes.values()))
    fresh_paths = [native.FastPaths(MISS) for _ in range(2)]
    for paths in fresh_paths:
        paths.add(path)
        assert torch.equal(paths(x), x + 1)
    fresh_paths[0].remove(path)
    fresh_paths[0].remove(path)
    assert fresh_paths[0](x) is MISS
    assert torch.equal(fresh_paths[1](x), x + 1)
    held = sys.getrefcount(path)
    shortcuts.forget(entry.number)
    assert sys.getrefcount(path) == held - 2  # neither Python nor C keeps it
    assert torch.equal(mine(x), x + 1)


@pytest.mark.one_in(2)
def test_many_recordings_and_many_shapes(way: str) -> None:
    mine = capture(lambda x: x + 1, max_recordings=64)
    xs = [torch.randn(size, device=DEVICE) for size in range(1, 50)]
    for _ in range(5):
        for x in xs:
            assert torch.equal(mine(x), x + 1)
    assert recordings(mine).recordings == len(xs)


def test_one_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _native._load() is native
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    with pytest.raises(ImportError, match="built from other sources: build it again with `pip install"):
        _native._load()
    monkeypatch.delattr(native, "VERSION")
    with pytest.raises(ImportError, match="built from other sources"):
        _native._load()
    monkeypatch.setitem(sys.modules, "capture.native._native", None)
    with pytest.raises(ImportError, match=r"install a wheel, or have a C compiler .* build it with `pip install"):
        _native._load()


def _sharing(x: Tensor) -> list[tuple[Tensor, ...]]:
    """Arguments of calls, which share memory in several ways. ``x``: 6 x 4, float32."""
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
    """They do where they share it as before, and where the same two arguments are one object."""

    def body(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        is_same = a is d
        return a.sum() * 2 + (b * c).sum() + d.sum(), (a if is_same else c) + 1

    captured = capture(body, max_recordings=20)
    for seed in range(8):
        for number, _ in enumerate(_sharing(torch.zeros(6, 4, device=DEVICE))):
            given = torch.randn(6, 4, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
            mine, theirs = _sharing(given.clone())[number], _sharing(given.clone())[number]
            results, expected = captured(*mine), body(*theirs)
            assert all(map(torch.equal, results, expected)), (seed, number)
    counts = recordings(captured)
    assert counts.replays >= 4 * 7
    if EXECUTES and not AGAIN:  # the caller held results; a graph's copies of several at once are made in Python
        assert captured_states(captured)[0].straight(*_sharing(given)[6]) is not MISS


def test_arguments_that_are_written_and_share_memory() -> None:
    def body(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a.mul_(2)
        b.add_(1)
        return (c * b).sum()

    captured = capture(body)
    for seed in range(10):
        mine = torch.randn(6, 4, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
        theirs, addend = mine.clone(), torch.full((2, 4), float(seed), device=DEVICE)
        for rows in (slice(1, 3), slice(2, 4), slice(0, 2)) if seed > 4 else (slice(1, 3),):
            assert torch.equal(captured(mine, mine[rows], addend), body(theirs, theirs[rows], addend))
            assert torch.equal(mine, theirs)
        apart, apart_twin = torch.ones(2, 4, device=DEVICE), torch.ones(2, 4, device=DEVICE)
        assert torch.equal(captured(mine, apart, addend), body(theirs, apart_twin, addend))
        assert torch.equal(mine, theirs)
        assert torch.equal(apart, apart_twin)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count", [65, 300, 600])
def test_many_arguments(count: int) -> None:
    """Side by side in memory, in any order, or one of them over another."""

    def body(*given: Tensor) -> Tensor:
        return torch.stack([tensor.sum() * number for number, tensor in enumerate(given)]).sum()

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


PATTERNS = ((0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0), (0, 1, 1))


@pytest.mark.parametrize("static", [(), ("z",)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_tensor_that_is_given_several_times_goes_straight(pattern: tuple[int, ...], static: tuple[str, ...]) -> None:
    """torch's own comparison of metadata fails where one tensor comes twice. Each object is compared, once."""

    def body(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x * 2 + y / 3 - z

    mine, kept = capture(body, static=static), torch.randn(4, device=DEVICE)
    with torch.no_grad():
        for _ in range(8):
            there = [torch.randn(4, device=DEVICE), kept if static else torch.randn(4, device=DEVICE)]
            given = [there[at] for at in pattern]
            assert torch.equal(mine(*given), body(*given))
        assert goes_straight(mine, *given)
        for other in (
            torch.randn(4, device=DEVICE),
            there[1].double(),
            there[1].clone(),
            torch.randn(4, 1, device=DEVICE),
        ):
            for place in range(3):
                given = [there[at] for at in pattern]
                given[place] = other
                assert torch.equal(mine(*given), body(*given))
            given = [(there[0], other)[at] for at in pattern]
            assert torch.equal(mine(*given), body(*given))


def test_gradients_of_a_sum_go_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd hands one gradient to both."""
    one, other = torch.nn.Linear(4, 4, device=DEVICE), torch.nn.Linear(4, 4, device=DEVICE)
    mine, added, number = capture(lambda x: (one(x).sin().sum(), other(x).cos().sum())), list[int](), 0
    add = Shortcuts.add

    def counted(*args: Any, **kwargs: Any) -> None:
        added.append(number)
        add(*args, **kwargs)

    monkeypatch.setattr(Shortcuts, "add", counted)
    for number in range(16):  # noqa: B007 - it is read by what counts
        first, second = mine(torch.ones(3, 4, device=DEVICE))
        (first + second).backward()
    assert added
    assert max(added) < 12
