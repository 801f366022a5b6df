"""Streams and threads: calls from any stream, bodies with streams of their own, work beside a recording."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, mark_step_begin, recordings
from tests.gpu.support import DEVICE, counts, eager, healthy, may_fall_back, needs_cuda, rand, same, storage_of

pytestmark = needs_cuda

SIZE = 1024


def slow(x: Tensor, weight: Tensor, times: int = 40) -> Tensor:
    """Do some milliseconds of work on the current stream."""
    for _ in range(times):
        x = x @ weight
    return x


def mixer(size: int = SIZE) -> Tensor:
    """A matrix by which values keep their magnitude."""
    scale: float = (size / 12) ** 0.5
    return rand(size, size) / scale


def wait_all(streams: list[torch.cuda.Stream]) -> None:
    """Have the current stream wait for all of these."""
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


# ------------------------------------------------------------------------------------------------ the caller's streams


@pytest.mark.parametrize("held", [True, False], ids=["held", "dropped"])
@pytest.mark.parametrize("order", ["recorded on the default stream", "streams from the start"])
def test_calls_from_changing_streams(order: str, held: bool) -> None:
    """Calls on other streams that never wait for each other: each result is right on the stream of its call."""
    weight = mixer()

    @capture
    def f(x: Tensor) -> Tensor:
        return slow(x, weight) + x

    inputs = [rand(SIZE, SIZE, seed=i) for i in range(8)]
    expected = [eager(f, x) for x in inputs]
    if order.startswith("recorded"):
        for x in inputs[:3]:
            f(x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    sums, kept = [], []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 3]):
            y = f(x)
            sums.append(y * 2)
            if held:
                kept.append(y)
            del y
    wait_all(streams)
    torch.cuda.synchronize()
    same(sums, [result * 2 for result in expected])
    same(kept, expected if held else [])


def test_replay_beside_the_use_of_the_last_result() -> None:
    """A slow reader of one result on its stream, the next replay on another stream: the reader sees its own values."""
    weight = mixer()

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 3

    inputs = [rand(SIZE, SIZE, seed=i) for i in range(6)]
    expected = [slow(eager(f, x), weight) for x in inputs]
    for x in inputs[:3]:
        f(x)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    sums = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream((first, second)[i % 2]):
            sums.append(slow(f(x), weight))
    torch.cuda.synchronize()
    same(sums, expected)


def test_chain_over_two_streams() -> None:
    """``g(f(x))`` with ``f`` on one stream and ``g`` on another that waits for it, and back."""
    weight = mixer()

    @capture
    def f(x: Tensor) -> Tensor:
        return slow(x, weight, 10)

    @capture
    def g(x: Tensor) -> Tensor:
        return x - 1

    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for i in range(7):
        mark_step_begin()
        x = rand(SIZE, SIZE, seed=i)
        expected = eager(g, eager(g, eager(f, x)))
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            y = f(x)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            z = g(y)
        first.wait_stream(second)
        with torch.cuda.stream(first):
            w = g(z)
        torch.cuda.synchronize()
        same(w, expected)
        same(z, eager(g, y))


def test_written_state_over_streams() -> None:
    """A state tensor that the body updates, called from streams that wait for each other through events."""
    state, twin = torch.zeros(SIZE, device=DEVICE), torch.zeros(SIZE, device=DEVICE)

    @capture
    def f(x: Tensor, state: Tensor) -> Tensor:
        state.mul_(0.5).add_(x)
        return state * 2

    streams = [torch.cuda.Stream() for _ in range(3)]
    before = torch.cuda.current_stream()
    results, expected = [], []
    for i in range(9):
        x = rand(SIZE, seed=i)
        stream = streams[i % 3]
        stream.wait_stream(before)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append(f(x, state))
        before = stream
        expected.append(eager(f, x, twin))
        torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    same(results, expected)
    same(state, twin)


def test_row_165_call_from_a_side_stream() -> None:
    """Arguments computed slowly on the caller's stream, the result used on it: ordered in every phase."""
    weight = mixer()

    @capture
    def f(x: Tensor) -> Tensor:
        return slow(x, weight, 5)

    stream = torch.cuda.Stream()
    for i in range(6):
        start = rand(SIZE, SIZE, seed=i)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            x = slow(start, weight, 100)
            out = f(x) * 3
        stream.synchronize()
        same(out, eager(f, slow(start, weight, 100)) * 3)
    assert counts(f) == (1, 1, 4, 0)


# --------------------------------------------------------------------------------------------------- the body's streams


def test_row_166_side_stream_in_the_body() -> None:
    """A side stream forked from the current one and joined: recorded, its memory is right over many calls."""
    side = torch.cuda.Stream()
    weight = mixer(256)

    @capture
    def f(x: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = slow(x, weight, 5)
        z = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return y + z

    for i in range(8):
        x = rand(256, 256, seed=i)
        same(f(x), slow(x, weight, 5) + x * 2)
    assert counts(f) == (1, 1, 6, 0)


def test_side_stream_joined_through_events() -> None:
    """Fork and join by events, a stream made in the body, and allocations on both sides."""

    @capture
    def f(x: Tensor) -> Tensor:
        side = torch.cuda.Stream()
        begin, end = torch.cuda.Event(), torch.cuda.Event()
        begin.record()
        with torch.cuda.stream(side):
            side.wait_event(begin)
            y = (x + 1) * 2
            end.record()
        z = torch.tanh(x)
        end.wait()
        return y * z

    for i in range(6):
        x = rand(64, 64, seed=i)
        same(f(x), ((x + 1) * 2) * torch.tanh(x))


@may_fall_back
def test_record_stream_in_the_body() -> None:
    """``record_stream`` on a tensor of the body."""
    side = torch.cuda.Stream()

    @capture
    def f(x: Tensor) -> Tensor:
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = y * 2
            y.record_stream(side)
        del y
        w = torch.full_like(x, 5.0)
        torch.cuda.current_stream().wait_stream(side)
        return z + w

    for i in range(8):
        x = rand(64, 64, seed=i)
        same(f(x), (x + 1) * 2 + 5.0)
    healthy()


@may_fall_back
def test_unjoined_fork() -> None:
    """A side stream that the body forks and leaves for the caller to join."""
    side = torch.cuda.Stream()

    @capture
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        return x + 1, y

    for i in range(6):
        x = rand(64, 64, seed=i)
        z, y = f(x)
        torch.cuda.current_stream().wait_stream(side)
        same((z, y), (x + 1, x * 2))
        torch.cuda.synchronize()
    healthy()


@may_fall_back
@pytest.mark.parametrize("kind", ["side", "default", "event"])
def test_work_that_never_forked(kind: str) -> None:
    """Work on a stream that is not part of a capture happens at every call, whatever is recorded."""
    stream = torch.cuda.default_stream() if kind == "default" else torch.cuda.Stream()
    source, sink = torch.zeros(64, device=DEVICE), torch.zeros(64, device=DEVICE)

    @capture
    def f(x: Tensor) -> Tensor:
        y = x + 1
        with torch.cuda.stream(stream):
            sink.copy_(source * 3)
            if kind == "event":
                torch.cuda.Event().record()
        return y * 2

    for i in range(6):
        source.fill_(float(i))
        x = rand(64, seed=i)
        torch.cuda.synchronize()
        y = f(x)
        torch.cuda.synchronize()
        same(y, (x + 1) * 2)
        same(sink, torch.full((64,), i * 3.0, device=DEVICE))
    healthy()


@may_fall_back
@pytest.mark.parametrize("caller", ["default", "side"])
def test_default_stream_in_the_body(caller: str) -> None:
    """A body that enters the default stream, called on it and from another one."""
    stream = torch.cuda.default_stream() if caller == "default" else torch.cuda.Stream()

    @capture
    def f(x: Tensor) -> Tensor:
        with torch.cuda.stream(torch.cuda.default_stream()):
            y = x * 2
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        return y + 1

    for i in range(6):
        x = rand(64, seed=i)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            y = f(x)
        torch.cuda.synchronize()
        same(y, x * 2 + 1)
    healthy()


# -------------------------------------------------------------------------------------------------- beside other work


def test_record_stream_and_copies_to_the_host() -> None:
    """Results copied to pinned memory on a side stream, given up with ``record_stream`` while replays go on."""
    size = 16 << 20

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2

    inputs = [rand(1, seed=i).expand(size).contiguous() for i in range(3)]
    side = torch.cuda.Stream()
    targets = [torch.empty(size, pin_memory=True) for _ in range(4)]
    for x in inputs:
        f(x)
    torch.cuda.synchronize()
    for i, target in enumerate(targets):
        y = f(inputs[i % 3])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(y, non_blocking=True)
        y.record_stream(side)
        del y
    torch.cuda.synchronize()
    for i, target in enumerate(targets):
        same(target, (inputs[i % 3] * 2).cpu())


def layers(captured: bool) -> torch.nn.Sequential:
    """Three layers with the same weights each time."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]).to(DEVICE)
    if captured:
        for layer in net:
            capture(layer)
    return net


def ends(net: torch.nn.Module) -> list[Any]:
    """The nodes that add to the parameters' gradients, which this makes if there are none."""
    return [torch.autograd.graph.get_gradient_edge(p).node for p in net.parameters()]


def test_gradients_are_added_on_the_callers_stream() -> None:
    """Autograd adds to a gradient on the stream that was current when a graph first ended at the parameter: a recording
    must leave that as in eager."""
    net, here = layers(captured=True), torch.cuda.current_stream().cuda_stream
    streams: list[int] = []
    with torch.enable_grad():
        for i in range(6):
            loss = net(rand(8, 64, seed=i)).square().sum()
            hooks = [
                node.register_prehook(lambda _: streams.append(torch.cuda.current_stream().cuda_stream))
                for node in ends(net)
            ]
            loss.backward()
            for hook in hooks:
                hook.remove()
            net.zero_grad(set_to_none=False)
    assert counts(net[0])[2] >= 4
    assert streams == [here] * 36


@pytest.mark.parametrize("side", ["backward", "ends"])
def test_gradients_added_on_another_stream(side: str) -> None:
    """The caller keeps the nodes that add to the gradients, which belong to another stream that is busy."""
    stream, default = torch.cuda.Stream(), torch.cuda.default_stream()
    here, there = (stream, default) if side == "backward" else (default, stream)
    results = []
    for captured in (True, False):
        net = layers(captured)
        torch.cuda.synchronize()
        with torch.enable_grad():
            with torch.cuda.stream(there):
                kept = ends(net)
            for i in range(8):
                torch.cuda.synchronize()
                with torch.cuda.stream(here):
                    loss = net(rand(8, 64, seed=i)).square().sum()
                    with torch.cuda.stream(there):
                        torch.cuda._sleep(4_000_000)
                    loss.backward()
                torch.cuda.synchronize()
                with torch.no_grad():
                    for p in net.parameters():
                        assert p.grad is not None
                        p.sub_(0.001 * p.grad)
                        p.grad.mul_(0.5)
        results.append([p.detach() for p in net.parameters()])
        assert len(kept) == 6
        if captured:
            assert counts(net[0])[2] >= 6
    same(*results)


def test_row_059_one_stream_for_the_whole_pool() -> None:
    """Functions recorded from several streams of the caller share memory: their pool is no larger than on one."""

    def run(streams: list[Any]) -> int:
        functions = [capture(lambda x, n=n: (x + n) * 2 - x) for n in range(4)]
        for i in range(4):
            x = rand(1 << 20, seed=i)
            torch.cuda.synchronize()
            for n, function in enumerate(functions):
                with torch.cuda.stream(streams[n % len(streams)]):
                    y = function(x)
                    torch.cuda.current_stream().synchronize()
                    same(y, (x + n) * 2 - x)
                    del y
        return max(recordings(function).pool_bytes for function in functions)

    alone = run([torch.cuda.current_stream()])
    assert run([torch.cuda.Stream() for _ in range(4)]) <= alone * 2


def test_outputs_of_one_call_are_apart() -> None:
    """Results of a body with side streams share no memory."""
    side = torch.cuda.Stream()

    @capture
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        z = x * 3
        torch.cuda.current_stream().wait_stream(side)
        return y, z

    held = []
    for i in range(6):
        x = rand(256, seed=i)
        y, z = f(x)
        assert storage_of(y) != storage_of(z)
        held.append((x, y, z))
        for x, y, z in held:
            same((y, z), (x * 2, x * 3))


@pytest.mark.parametrize("first", ["default", "side"])
def test_gradients_accumulated_on_another_stream(first: str) -> None:
    """The forward pass runs on a stream of its own, and so does the backward pass: the caller waits for it."""
    side = torch.cuda.Stream()
    torch.manual_seed(0)
    linear = torch.nn.Linear(SIZE, SIZE).to(DEVICE)
    expected = copy.deepcopy(linear)
    capture(linear, gradients="accumulate")
    with torch.enable_grad():
        for step in range(8):
            x = rand(64, SIZE, seed=step)
            expected(x).square().sum().backward()
            on = side if step >= 3 or first == "side" else torch.cuda.current_stream()
            mark_step_begin()
            on.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(on):
                loss = linear(x).square().sum()
                torch.cuda._sleep(40_000_000)
            loss.backward()
            for p, q in zip(linear.parameters(), expected.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                same(p.grad + 0, q.grad)
                p.grad = q.grad = None
            torch.cuda.synchronize()
    healthy()
