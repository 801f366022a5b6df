"""A recording that is given up while a call is on its way into it, or between a forward and its backward pass: the call
ends as in eager code, and raises nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, config, recordings
from capture.api.decorator import captured_state
from capture.native import native
from capture.runtime import phases, record
from capture.runtime.captured import Captured
from capture.tree import thread_trees
from capture.tree.node import Node

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs take memory of the pool, though they are small."""
    monkeypatch.setattr(record, "MOST_OWNED", 0)
    thread_trees.forget_trees()
    with config.patch(cache=False, drop_slow=False):
        yield


def plain(x: Tensor) -> Tensor:
    y = torch.tanh(x) * 1.5
    for _ in range(6):
        y = torch.cat([y, y])[:4] + 1
    return y


def with_a_break(x: Tensor) -> Tensor:
    y = plain(x)
    return y - 1 if y.sum() > 0 else y.sin()


def state_of(function: Any) -> Captured:
    captured = captured_state(function)
    assert captured is not None
    return captured


def nodes_of(function: Any) -> list[Node]:
    return [node for entry in state_of(function).entries() for node in entry.nodes]


def is_given_up(node: Node) -> bool:
    return node.recording is None and node.tree is None


@pytest.mark.parametrize("body", [plain, with_a_break])
def test_the_collector_drops_what_is_about_to_run(body: Callable[[Tensor], Tensor]) -> None:
    """An instance that dies in a cycle takes its recordings with it, also those that other threads asked for."""
    function, x = capture(body), torch.full((4, 4), 0.1)
    expected, dropped = body(x), []

    def drops(leaves: Sequence[Any]) -> int:
        """A check on the way into the recording: it gives the recording up, and says (0) that its state holds."""
        state_of(function).release()
        dropped.append(native.is_on_the_way())
        return 0

    with torch.no_grad():
        for _ in range(3):
            for _ in range(6):
                assert torch.equal(function(x), expected)
            (node,) = nodes_of(function)
            node.check = drops
            assert torch.equal(function(x), expected)
    assert dropped == [True] * 3
    assert recordings(function).replays > 8


def test_a_thread_starts_over_while_another_one_has_recordings() -> None:
    """What is found out about all calls of a key ends the recordings of all threads. One of another thread may be
    running, and ends at that thread's next call."""
    function, x = capture(plain), torch.ones(4, 4)
    with torch.no_grad():
        expected = plain(x)
        for _ in range(4):
            function(x)
        (mine,) = nodes_of(function)
        recording = mine.recording

        def start_over() -> None:
            captured = state_of(function)
            for entry in captured.entries():
                assert entry.backend is not None
                phases.forget(captured, entry, thread_trees.tree_for(entry.backend, 0))

        thread = threading.Thread(target=start_over)
        thread.start()
        thread.join()
        assert mine.recording is recording is not None
        recording.replay([x])
        for _ in range(4):
            assert torch.equal(function(x), expected)
        assert mine.recording is None
        assert len(nodes_of(function)) == 1


def test_dropped_between_forward_and_backward() -> None:
    torch.manual_seed(0)
    eager, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model.load_state_dict(eager.state_dict())
    function = capture(model)
    for turn in range(12):
        for net, called in ((eager, eager), (model, function)):
            net.zero_grad()
            loss = called(x).square().sum()
            if turn % 4 == 3 and net is model:
                state_of(function).release()
                if turn % 8 == 7:
                    gc.collect()
                    function(x * 2)  # takes the memory, if it may
            loss.backward()
            with torch.no_grad():
                for weight in net.parameters():
                    assert weight.grad is not None
                    weight.sub_(weight.grad, alpha=0.1)
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert recordings(function).replays


def test_stopped_while_a_recording_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording is given up as a whole, and the interrupt comes out then."""
    function, x = capture(plain), torch.ones(4, 4)
    with torch.no_grad():
        expected = plain(x)
        for _ in range(4):
            function(x)
        (node,) = nodes_of(function)
        assert node.recording is not None
        release, stops = type(node.recording).release, [True]

        def stopped(self: Any) -> None:
            release(self)
            if stops:
                stops.pop()
                raise KeyboardInterrupt

        monkeypatch.setattr(type(node.recording), "release", stopped)
        with pytest.raises(KeyboardInterrupt):
            state_of(function).release()
        assert is_given_up(node)
        for _ in range(4):
            assert torch.equal(function(x), expected)
