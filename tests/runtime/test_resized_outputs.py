"""Outputs may be resized, set to other storages and freed, as eager results may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, mark_step_begin, recordings
from capture.runtime.record import MOST_OWNED
from capture.tree import thread_trees

CALLS = 6


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference on the CPU, whose outputs these are about, no plans on disk, no tree of another test."""
    thread_trees.forget_trees()
    with torch.no_grad(), torch.device("cpu"), config.patch(cache=False):
        yield


def grown(y: Tensor) -> Any:
    y.resize_(100)
    return y[:4].tolist()


def shrunk(y: Tensor) -> Any:
    return y.resize_(1).tolist()


def freed(y: Tensor) -> Any:
    y.untyped_storage().resize_(0)
    return y.untyped_storage().nbytes()


def given_back(y: Tensor) -> Any:
    """Memory is given back and taken again, as libraries do with sharded activations."""
    storage, nbytes = y.untyped_storage(), y.untyped_storage().nbytes()
    kept = y.clone()
    storage.resize_(0)
    storage.resize_(nbytes)
    return y.copy_(kept).tolist()


def set_elsewhere(y: Tensor) -> Any:
    return y.set_(torch.full((3,), 7.0).untyped_storage(), 0, (3,), (1,)).tolist()


def written_by_an_operator(y: Tensor) -> Any:
    return torch.arange(12.0, out=y.resize_(0)).tolist()


USES: tuple[Callable[[Tensor], Any], ...] = (
    grown, shrunk, freed, given_back, set_elsewhere, written_by_an_operator
)  # fmt: skip


class Remembers(nn.Module):
    """A result and an attribute lie in the same memory."""

    @override
    def forward(self, x: Tensor) -> Any:
        self.last = x * 2
        return {"last": self.last, "view": self.last[1:], "sum": x.sum()}


def reading(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("body", [doubled, reading], ids=lambda body: body.__name__)
def test_outputs_are_resized_as_eager_ones(body: Any, use: Callable[[Tensor], Any]) -> None:
    f, kept = capture(body), []
    for number in range(CALLS):
        x = torch.full((4,), number + 1.0)
        ours, eager = f(x), body(x)
        assert use(ours) == use(eager)
        kept.append((ours, eager))
    used = [(ours, eager) for ours, eager in kept if eager.untyped_storage().nbytes() >= eager.numel() * 4]
    assert all(ours.shape == eager.shape for ours, eager in kept)
    assert use is grown or all(torch.equal(*pair) for pair in used)
    assert recordings(f).replays >= CALLS - 3


def test_what_lies_on_one_memory_is_resized_together() -> None:
    ours, eager = Remembers(), Remembers()
    f = capture(ours)
    for number in range(CALLS):
        x = torch.full((4,), number + 1.0)
        result, expected = f(x), eager(x)
        for module, given in ((ours, result), (eager, expected)):
            assert module.last is given["last"]
            given["last"].untyped_storage().resize_(64)
            module.last[3] = 9
            assert given["view"].tolist() == [2 * x[0], 2 * x[0], 9]
            given["sum"].resize_(2, 2)
        assert ours.last.tolist() == eager.last.tolist()
    assert recordings(f).replays >= CALLS - 3
    assert recordings(f).kept_outputs == 0


@pytest.mark.parametrize("marked", [False, True])
def test_chains_are_read_in_the_pool_all_the_same(marked: bool) -> None:
    first, second = capture(doubled, name="first"), capture(lambda x: x + 1, name="second")
    for number in range(CALLS):
        if marked:
            mark_step_begin()
        x = torch.full((4,), number + 1.0)
        y = second(first(x))
        assert y.tolist() == (x * 2 + 1).tolist()
        y.resize_(100)
    (node,) = [
        node for tree in thread_trees.trees_here().values() for nodes in tree.root.children.values() for node in nodes
    ]
    ((child,),) = node.children.values()
    assert child.key[1] != (None,)
    assert node.outputs is not None
    assert not node.outputs.owned
    assert child.outputs is not None
    assert child.outputs.owned == {0}


def test_a_large_output_stays_in_the_pool() -> None:
    """Memory of that size comes from the system each time, which costs more than it saves. An output that is kept gets
    its own all the same."""
    f = capture(doubled)
    for _ in range(CALLS):
        assert not f(torch.ones(MOST_OWNED // 4 + 1)).untyped_storage().resizable() or recordings(f).replays == 0
    kept = [f(torch.ones(MOST_OWNED // 4 + 1)) for _ in range(CALLS)]
    assert kept[-1].resize_(1 << 20).shape == (1 << 20,)
    assert recordings(f).kept_outputs == 1
