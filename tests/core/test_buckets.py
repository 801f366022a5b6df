"""Ladders: what may be written, which rung holds a size, and which rungs pad least."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from capture.core.buckets import Buckets, Dim, Symbol, ladder
from capture.core.errors import AnnotationError
from capture.core.options import annotate


def buckets(**options: Any) -> Buckets:
    found = annotate("f", ("x", "mask", "cache"), options).buckets
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": 3}, r"buckets= takes a dict such as \{'x': \{0: \(1, 2, 4\)\}\}, got 3"),
        ({"buckets": {}}, "buckets= takes a dict"),
        ({"buckets": {"y": {0: (1,)}}}, "buckets='y' names no parameter.*known: x, mask, cache"),
        ({"buckets": {"mas.k": {0: (1,)}}}, "did you mean 'mask'"),
        ({"buckets": {3: {0: (1,)}}}, "buckets= has names of arguments as keys, got 3"),
        ({"buckets": {"x": (1, 2)}}, r"buckets\['x'\] takes a dict from dimensions to sizes"),
        ({"buckets": {"x": {}}}, r"buckets\['x'\] takes a dict"),
        ({"buckets": {"x": {"0": (1,)}}}, "numbers of dimensions as keys, got '0'"),
        ({"buckets": {"x": {True: (1,)}}}, "numbers of dimensions as keys, got True"),
        ({"buckets": {"x": {0: "pow3"}}}, r"buckets\['x'\]\[0\] takes sizes or 'pow2', got 'pow3'"),
        ({"buckets": {"x": {0: ()}}}, r"takes sizes such as \(1, 2, 4\), or 'pow2', got \(\)"),
        ({"buckets": {"x": {0: 4}}}, "takes sizes such as"),
        ({"buckets": {"x": {0: (0, 1)}}}, "takes whole numbers from 1 on, got 0"),
        ({"buckets": {"x": {0: (1, 2.0)}}}, "takes whole numbers from 1 on, got 2.0"),
        ({"buckets": {"x": {0: (1, True)}}}, "takes whole numbers from 1 on, got True"),
        ({"buckets": {"x": {0: (4, 2)}}}, r"takes sizes that ascend, got \(4, 2\)"),
        ({"buckets": {"x": {0: (2, 2)}}}, "takes sizes that ascend"),
        ({"buckets": {"x": {0: (2,)}}, "outputs": "borrow"}, "buckets= cannot go with outputs='borrow'"),
        ({"buckets": {"x": {0: (2,)}}, "fill": "zero"}, "fill takes a number, 'repeat', or a function .* got 'zero'"),
        ({"buckets": {"x": {0: (2,)}}, "fill": {"mask": 0}}, r"fill\['mask'\] names nothing in buckets=; known: x"),
        ({"buckets": {"x": {0: (2,)}}, "fill": {"x": None}}, r"fill\['x'\] takes a number"),
        ({"buckets": {"x": {0: (2,)}}, "tolerance": -1}, "tolerance= takes a number from 0 on, or .rtol, atol."),
        ({"buckets": {"x": {0: (2,)}}, "tolerance": (1, 2, 3)}, "tolerance= takes a number"),
        ({"buckets": {"x": {0: (2,)}}, "tolerance": {3: 1}}, "paths such as 'output' as keys, got 3"),
        ({"fill": 0}, "fill= says how buckets are padded: it needs buckets="),
        ({"tolerance": 0}, "tolerance= says how buckets are padded"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        annotate("f", ("x", "mask", "cache"), options)


@pytest.mark.parametrize("rungs", [(), (3, 1), "pow", 3])
def test_a_dim_is_checked_where_it_is_written(rungs: Any) -> None:
    with pytest.raises(AnnotationError, match=r"Dim\(\) takes sizes"):
        Dim(rungs)


def test_dims_are_one_symbol_and_others_are_their_own() -> None:
    batch = Dim((1, 2, 4), name="batch")
    compiled = buckets(buckets={"x": {0: batch, 1: (8, 16)}, "mask": {0: batch, -1: (8, 16)}}, fill={"mask": 1})
    assert [symbol.name for symbol in compiled.symbols] == ["batch", "x.1", "mask.-1"]
    assert [(argument.path, argument.dims, argument.fill) for argument in compiled.arguments] == [
        ("x", ((0, 0), (1, 1)), 0),
        ("mask", ((0, 0), (-1, 2)), 1),
    ]
    assert compiled.num_rungs() == 12


def test_recordings_are_allowed_for_the_ladders() -> None:
    assert annotate("f", ("x",), {}).max_recordings == 5
    assert annotate("f", ("x",), {"buckets": {"x": {0: (1, 2, 4)}}}).max_recordings == 8
    assert annotate("f", ("x",), {"buckets": {"x": {0: "pow2", 1: "pow2"}}}).max_recordings == 69
    assert annotate("f", ("x",), {"buckets": {"x": {0: (1, 2)}}, "max_recordings": 2}).max_recordings == 2


def test_the_rung_of_a_size() -> None:
    some, powers = Symbol("n", (2, 3, 8)), Symbol("n", None)
    assert [some.padded(size) for size in range(10)] == [None, 2, 2, 3, 8, 8, 8, 8, 8, None]
    assert [powers.padded(size) for size in (0, 1, 2, 3, 4, 5, 9, 64, 65)] == [None, 1, 2, 4, 4, 8, 16, 64, 128]
    assert some.up_to(1) == (2, 3, 8)
    assert powers.up_to(5) == (1, 2, 4, 8)
    assert powers.up_to(1) == (1,)


def test_the_nearest_tolerance_counts() -> None:
    found = buckets(buckets={"x": {0: (2,)}}, tolerance={"output": 1e-3, "output.1": (0, 0.5), "cache": 1})
    paths = ("output", "output.0", "output.1.k", "output_", "cache.0", "x")
    assert [found.tolerance(path) for path in paths] == [
        (1e-3, 1e-3), (1e-3, 1e-3), (0, 0.5), (0, 0), (1, 1), (0, 0),
    ]  # fmt: skip
    assert buckets(buckets={"x": {0: (2,)}}, tolerance=1e-5).tolerance("anything") == (1e-5, 1e-5)


def padding(sizes: dict[int, int], rungs: tuple[int, ...]) -> int:
    return sum(count * (next(one for one in rungs if one >= size) - size) for size, count in sizes.items())


def test_a_ladder_pads_least_of_all() -> None:
    rng = random.Random(0)
    for _ in range(40):
        sizes = {size: rng.randint(1, 9) for size in rng.sample(range(1, 20), rng.randint(1, 7))}
        rungs = rng.randint(1, 5)
        best = ladder(sizes, rungs=rungs)
        assert best[-1] == max(sizes)
        assert list(best) == sorted(set(best))
        assert len(best) <= rungs
        every = (
            (*smaller, max(sizes))
            for count in range(min(rungs, len(sizes)))
            for smaller in itertools.combinations(sorted(sizes)[:-1], count)
        )
        assert padding(sizes, best) == min(padding(sizes, possible) for possible in every)


@pytest.mark.parametrize(("sizes", "rungs"), [({}, 3), ({0: 2}, 3), ({3: 1}, 0), ({3: 0}, 2)])
def test_no_ladder(sizes: dict[int, int], rungs: int) -> None:
    with pytest.raises(ValueError, match="a ladder is made of sizes from 1 on"):
        ladder(sizes, rungs=rungs)
