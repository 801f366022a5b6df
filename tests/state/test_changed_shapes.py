"""Arguments that get another shape in a body, objects that come and go, dicts that get more members."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, mark_step_begin, recordings
from capture.api.decorator import captured_state
from tests.support.device import AGAIN
from tests.support.writes import Cache, bits, x_of
from tests.support.writes import fresh as fresh


def test_objects_that_come_and_go_and_set_themselves_up() -> None:
    """Each new object sets itself up in its first calls and is replayed then, however many came before; objects that
    are gone leave no tensor alive."""

    def body(x: Tensor, cache: Cache) -> Tensor:
        return cache.update(x) * 2

    captured = capture(body, static=["cache"])
    captured_state(captured).budget.most = math.inf  # the budget would end this: two replays for each object do not pay
    gone: list[weakref.ref[Tensor]] = []
    for _ in range(8):
        mine, theirs = Cache(), Cache()
        before = recordings(captured).replays
        for seed in range(6):
            mark_step_begin()
            assert bits(captured(x_of(seed), mine)) == bits(body(x_of(seed), theirs))
        assert bits(mine.values) == bits(theirs.values)
        assert recordings(captured).replays >= before + 2
        gc.collect()
        assert all(reference() is None for reference in gone)
        gone.append(weakref.ref(mine.values))
    assert recordings(captured).eager_calls == 0


def transposed(x: Tensor) -> Tensor:
    x.t_()
    return x + 1


def unsqueezed_after_a_write(x: Tensor) -> Tensor:
    x.add_(1)
    x.unsqueeze_(0)
    return x.sum()


def seen_otherwise(x: Tensor) -> Tensor:
    x.as_strided_((2,), (1,), 1)
    return x * 2


def resized(x: Tensor) -> Tensor:
    x.resize_(2, 2)
    return x * 2


def on_other_memory(x: Tensor) -> Tensor:
    x.set_(torch.arange(4.0))  # type: ignore[call-overload]
    return x * 2


def with_other_data(x: Tensor) -> Tensor:
    x.data = torch.arange(5.0)
    return x * 2


def transposed_and_raising(x: Tensor) -> Tensor:
    x.t_()
    raise ValueError("on purpose")


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("skips", [False, True], ids=["watched first", "recorded straight away"])
@pytest.mark.parametrize(
    "body",
    [
        transposed, unsqueezed_after_a_write, seen_otherwise, resized, on_other_memory, with_other_data,
        transposed_and_raising,
    ],
)  # fmt: skip
def test_arguments_that_get_another_shape(body: Callable[[Tensor], Tensor], skips: bool) -> None:
    """The caller's own tensor gets the new shape as in eager, also where the first run had a copy of it."""

    def told(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        try:
            return bits(function(x)), bits(x)
        except ValueError as error:
            return str(error), bits(x)

    captured = capture(body)
    with config.patch(skip_warmup=skips):
        for seed in range(4):
            mark_step_begin()
            assert told(captured, x_of(seed, 2, 3)) == told(body, x_of(seed, 2, 3))
    assert recordings(captured).recordings == 0


class Holder:
    """An object that holds dicts."""

    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}
        self.deep: dict[str, dict[str, Any]] = {"in": {}}
        self.count = 0


Given = dict[str, Any]


def adds_views_of_members(o: Holder, d: Given) -> Any:
    d["same"], d["view"] = d["x"], d["x"][0]
    return d["view"] + 1


def adds_a_number(o: Holder, d: Given) -> Any:
    d["n"] = 5
    return d["x"] * 2


def adds_containers(o: Holder, d: Given) -> Any:
    d["inner"], d["list"] = {"b": d["x"] * 2}, [d["x"] + 1, d["x"] * 3]
    return d


def takes_one_away(o: Holder, d: Given) -> Any:
    del d["w"]
    d["y"] = d["x"] * 3
    return d


def fills_once(o: Holder, d: Given) -> Any:
    if "k" not in o.cache:
        o.cache["k"] = d["x"] * 2
    return o.cache["k"] + d["x"]


def fills_deep(o: Holder, d: Given) -> Any:
    o.deep["in"]["z"] = d["x"] * 2
    return o.deep["in"]["z"] + 1


def names_by_count(o: Holder, d: Given) -> Any:
    o.count += 1
    o.cache[f"step {o.count}"] = d["x"] * o.count
    return sum(o.cache.values())


def names_no_string(o: Holder, d: Given) -> Any:
    o.cache[1] = d["x"] * 2
    return o.cache[1] + 1


def adds_and_replaces(o: Holder, d: Given) -> Any:
    d["y"] = d["x"] * 2
    d["v"] = d["y"] + 1
    d["x"] = d["v"] * 2
    d["w"].add_(1)
    d["written"] = d["w"]
    return d["x"], d


def keeps_the_dict(o: Holder, d: Given) -> Any:
    o.cache["last"] = d
    d["y"] = d["x"] * 2
    return d["y"]


def shape_of(value: Any, seen: dict[int, int]) -> Any:
    """Values, order of members, and which objects are the same."""
    if isinstance(value, Tensor):
        return seen.setdefault(id(value), len(seen)), value.tolist()
    if isinstance(value, dict):
        return seen.setdefault(id(value), len(seen)), [(key, shape_of(member, seen)) for key, member in value.items()]
    if isinstance(value, (list, tuple)):
        return [shape_of(member, seen) for member in value]
    return shape_of(vars(value), seen) if isinstance(value, Holder) else value


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("again", [False, True], ids=["another dict each time", "one dict"])
@pytest.mark.parametrize(
    ("body", "replays"),
    [
        (adds_views_of_members, 5), (adds_a_number, 0), (adds_containers, 5), (takes_one_away, 0), (fills_once, 4),
        (fills_deep, 5), (names_by_count, 0), (names_no_string, 4), (adds_and_replaces, 5), (keeps_the_dict, 4),
    ],
)  # fmt: skip
def test_dicts_that_get_more_members(body: Callable[[Holder, Given], Any], replays: int, again: bool) -> None:
    """Members that a body adds are there after a replay, in eager's order, and hold what eager's hold."""
    mine, theirs = Holder(), Holder()
    captured = capture(lambda given: body(mine, given))
    held: list[Any] = []
    pair: list[Given] = []
    for seed in range(8):
        mark_step_begin()
        if not (again and pair):
            pair = [{"x": x_of(seed), "w": x_of(seed) + 1} for _ in range(2)]
        told = []
        for call, given in ((captured, pair[0]), (lambda given: body(theirs, given), pair[1])):
            try:
                told.append(call(given))
            except KeyError as error:
                told.append(str(error))
        held.append((told, pair))
        ours, eagers = (
            [(results[side], given[side]) for results, given in held] + [(mine, theirs)[side]] for side in (0, 1)
        )
        assert shape_of(ours, {}) == shape_of(eagers, {})
    assert recordings(captured).replays >= replays - AGAIN or again
