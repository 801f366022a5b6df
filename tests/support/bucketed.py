"""Calls of many sizes, padded and eager, compared bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from capture.key import pytree
from capture.key.tensor_meta import same_bits


def leaves_of(value: Any) -> list[Any]:
    return [leaf for _, leaf in pytree.leaves(value)]


def assert_same(ours: Any, theirs: Any) -> None:
    """Structure, values, shapes, strides and dtypes are equal."""
    my_leaves, their_leaves = leaves_of(ours), leaves_of(theirs)
    assert type(ours) is type(theirs)
    assert len(my_leaves) == len(their_leaves)
    for a, b in zip(my_leaves, their_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
            assert same_bits(a, b)
        else:
            assert type(a) is type(b)
            assert a == b


def run_beside(
    captured: Callable[..., Any], eager: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, keep: bool = True
) -> None:  # fmt: skip
    """Each call gives and leaves in its arguments what eager does; outputs are kept, and still equal in the end.
    Without ``keep`` they die before the next call, so that each recording is made once."""
    kept = []
    for arguments in calls:
        theirs_in, ours_in = copy.deepcopy(arguments), arguments
        theirs, ours = eager(*theirs_in), captured(*ours_in)
        assert_same(ours, theirs)
        assert_same(list(ours_in), list(theirs_in))
        kept.append((ours, theirs))
        views = [
            [leaf._is_view() for leaf in leaves_of(kept_output) if isinstance(leaf, torch.Tensor)]
            for kept_output in kept[-1]
        ]
        assert views[0] == views[1]
        if not keep:
            kept.clear()
            del ours
    for ours, theirs in kept:
        assert_same(ours, theirs)
