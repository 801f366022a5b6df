"""Results made of tuples and lists are put together in C as the plan of the outputs says."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.native import native


class Pair(NamedTuple):
    first: Any
    second: Any


VALUES = ["a", "b", "c", "d"]
TREES = st.recursive(
    st.integers(0, len(VALUES) - 1),
    lambda parts: st.tuples(st.sampled_from([tuple, list]), st.lists(parts, max_size=4)),
    max_leaves=12,
)


def filler(tree: Any) -> Any:
    if isinstance(tree, int):
        return tree
    kind, parts = tree
    return native.OutputFiller(tuple(map(filler, parts)), None if kind is tuple else kind)


def filled(tree: Any) -> Any:
    return VALUES[tree] if isinstance(tree, int) else tree[0](map(filled, tree[1]))


@given(st.tuples(st.sampled_from([tuple, list]), st.lists(TREES, max_size=4)))
def test_containers_in_containers(tree: Any) -> None:
    made = filler(tree)
    assert made(VALUES) == made(tuple(VALUES)) == filled(tree)
    assert made(VALUES) is not made(VALUES) or made(VALUES) == ()


def test_a_class_of_its_own() -> None:
    made = native.OutputFiller((1, native.OutputFiller((0,))), Pair._make)(VALUES)
    assert type(made) is Pair
    assert made == ("b", ("a",))


@pytest.mark.parametrize("number", [-1, 4, 2**70])
def test_a_value_that_is_not_there(number: int) -> None:
    with pytest.raises((IndexError, OverflowError)):
        native.OutputFiller((0, number))(VALUES)


def test_what_a_part_raises_comes_out() -> None:
    def fails(values: Any) -> Any:
        raise ValueError(len(values))

    with pytest.raises(ValueError, match="4"):
        native.OutputFiller((0, fails))(VALUES)
    with pytest.raises(ValueError, match="2"):
        native.OutputFiller((0, 1), fails)(VALUES)
    with pytest.raises(TypeError):
        native.OutputFiller((0,))(1)
    with pytest.raises(TypeError):
        native.OutputFiller((0,))()
