"""Helpers for the behaviour tests ``test_rows_*``; a test's number is its row in the table of ``docs/rows.md``."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from capture import CaptureWarning, config, recordings, reset
from capture.engines.base import Block
from capture.engines.cpu.arena import Arena
from capture.engines.cpu.tape import Tape
from capture.engines.registry import backend_for
from capture.tree import step
from capture.tree.node import Node, walk
from capture.tree.outputs import OutputPlan
from capture.tree.thread_trees import forget_trees, tree_for
from capture.tree.tree import Tree
from tests.support.device import DEVICE, REBINDS
from tests.support.unseen import Notes

Value = TypeVar("Value")
_ran = Notes()
ran = _ran.add
"""Called by bodies to be counted."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """An empty tree in a thread that never marked a step; dead memory reads as NaN."""
    step.marks().begun = 0
    forget_trees()
    _ran.clear()
    with config.patch(poison=True, cache=False):
        yield
    reset()
    step.marks().begun = 0
    forget_trees()


def times(name: str) -> int:
    """How often bodies called ``ran(name)``."""
    return _ran.all().count(name)


def noted(values: Iterable[Value], used: list[Value]) -> Callable[[], Value]:
    """A function that gives the next value in each call and notes it in ``used``. It is a builtin method, which a
    watched run does not take for a side effect.

    The last noted value is the one behind the call's result: an undone run may have used one before.
    """
    told, given = itertools.tee(values)  # all in C, as Python code that runs would be guarded
    return map(operator.itemgetter(1), zip(map(used.append, told), given, strict=False)).__next__


def eager(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of the body itself. This run is not counted by ``times``."""
    count = len(_ran.all())
    result = function.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
    _ran.keep(count)
    return result


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values that follow from the seed; no draw from the default generator."""
    return torch.rand(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE) - 0.5


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values as bytes, in the order of the indices."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(actual: Any, expected: Any) -> None:
    """Check that structure, metadata and bits are equal."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(bits(actual), bits(expected)), f"{actual}\n!= {expected}"
    elif isinstance(expected, (tuple, list)):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for member, expected_member in zip(actual, expected, strict=True):
            same(member, expected_member)
    else:
        assert type(actual) is type(expected)
        assert actual == expected


@contextmanager
def warned(match: str, *, most: int = 1) -> Iterator[list[str]]:
    """One to ``most`` ``CaptureWarning`` within the block, ``match`` in the first; the list then has their texts."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        yield messages
    messages.extend(str(warning.message) for warning in caught)
    assert 1 <= len(messages) <= most, messages
    assert match in messages[0]


def counts(function: Any) -> tuple[int, int, int, int]:
    """Observations, recordings, replays, eager calls."""
    now = recordings(function)
    return now.observations, now.recordings, now.replays, now.eager_calls


def followed(function: Any, moves: int) -> None:
    """Check what ``moves`` calls with moved static tensors led to: rebinds, or where the engine has none, more
    recordings."""
    now = recordings(function)
    assert now.rebinds == moves if REBINDS else now.rebinds <= moves, now.events
    assert now.recordings == 1 if REBINDS else 2 <= now.recordings <= moves + 1, now.events


def tree() -> Tree:
    """This thread's tree on the engine of the suite's device."""
    backend = backend_for(torch.empty(0).device)
    assert backend is not None
    return tree_for(backend, 0)


def kids(node: Node) -> list[Node]:
    """Recordings right below one, oldest first."""
    return sorted((child for same_key in node.children.values() for child in same_key), key=lambda child: child.number)


def roots() -> list[Node]:
    """Recordings that start a path."""
    return kids(tree().root)


def descendants() -> list[int]:
    """Per root, the number of recordings below it."""
    return [sum(1 for _ in walk(root)) - 1 for root in roots()]


def total() -> int:
    """Recordings in the tree."""
    return len(roots()) + sum(descendants())


def taken() -> set[Block]:
    """Blocks that the pool will not give away now. An engine that takes none between recordings gives the blocks of
    live outputs, which the next recording takes first."""
    pool = tree().pool
    if isinstance(pool, Arena):
        return pool.live_blocks()
    assert pool.is_tidy()
    return {block for block, _ in tree().live_blocks()}


def copies_in(node: Node) -> int:
    """The number of inputs whose address may differ in each call: they are copied first, or a tape reads them in
    place."""
    if isinstance(node.recording, Tape):
        steps = node.recording.copies_in
        return sum(step.function == "copy_" for step in steps) + len(node.recording._direct)
    staging = node.recording._input_copies.staging  # type: ignore[union-attr] # a CUDA recording
    return int(len(staging.singles) + sum(len(group.members) for group in staging.groups))


def copies_back(node: Node) -> int:
    """The number of inputs that a recording copies back to the caller's tensors."""
    if isinstance(node.recording, Tape):
        return sum(step.function == "copy_" for step in node.recording.copies_out)
    staging = node.recording._input_copies.staging  # type: ignore[union-attr] # a CUDA recording
    return int(
        sum(single.back for single in staging.singles)
        + sum(len(group.members) for group in staging.groups if group.back)
    )


def results(node: Node) -> OutputPlan:
    """How a recording's outputs are built."""
    assert node.outputs is not None
    return node.outputs


def any_live(node: Node) -> bool:
    """Whether an output of the recording is still alive."""
    return any(held is not None and held() is not None for held in node.live)
