"""While a region is recorded its parameters are exchanged for tensors of its own (lent); nobody else may see that."""

from __future__ import annotations

import _thread
import contextlib
import gc
import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import BorrowedOutputError, capture, mark_step_begin, recordings
from capture.autograd import leaf_swap
from capture.autograd.leaf_swap import lent
from capture.runtime import training_region
from capture.torch_private import threads
from capture.torch_private.capabilities import NO_TASK
from tests.support.device import DEVICE, TAKES_KEPT_NODES, know_nothing_of_writes, refuses_kept_nodes
from tests.support.regions import Block, bits, both, captured_twins, inputs, twins
from tests.support.regions import fresh as fresh


def test_every_loss_is_kept() -> None:
    """Kept losses keep autograd's node of each parameter alive, and with it the stream of its first use."""
    mine, theirs = captured_twins(Block)
    kept: list[Tensor] = []

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        loss: Tensor = model.m[0](inputs(number)).square().mean()
        kept.append(loss)
        loss.backward()
        return loss

    both(step, mine, theirs, 10)
    assert recordings(mine.m[0]).replays >= 10  # of forward and backward passes


def test_a_graph_of_the_users_ends_at_the_same_weights() -> None:
    mine, theirs = captured_twins(Block)
    eager = {id(twin): twin.m[0].a(inputs(99)).square().sum() for twin in (mine, theirs)}

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        loss: Tensor = model.m[0](inputs(number)).square().mean()
        loss.backward()
        eager[id(model)].backward(retain_graph=True)
        return loss

    both(step, mine, theirs)
    assert recordings(mine.m[0]).replays >= 6


def test_parameters_are_themselves_again() -> None:
    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.flag = nn.Linear(6, 6), [False]
            self.seen: list[bool] = []

        @override
        def forward(self, x: Tensor) -> Tensor:
            if self.flag[0]:
                raise KeyError("inside")
            y: Tensor = self.l(x)
            return y

    module = Raising().to(DEVICE)
    before = dict(module.named_parameters())
    capture(module)
    for number in range(5):
        module(inputs(number)).sum().backward()
        assert list(module.named_parameters()) == list(before.items())
        assert all(now is before[name] for name, now in module.named_parameters())
    module.flag[0] = True
    with pytest.raises(KeyError, match="inside"):
        module(inputs(1, 3, 6))
    assert all(now is before[name] for name, now in module.named_parameters())


def test_weights_in_containers_closures_and_tuples() -> None:
    def make() -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]:
        generator = torch.Generator().manual_seed(3)
        weights = [nn.Parameter(torch.randn(6, 6, generator=generator, device="cpu").to(DEVICE)) for _ in range(4)]
        table, fixed, closed = {"a": weights[0], "b": [weights[1]]}, (weights[2],), weights[3]
        return lambda x: torch.tanh(x @ table["a"] @ table["b"][0] @ fixed[0] @ closed), weights  # type: ignore[index, operator]

    (mine, my_weights), (theirs, their_weights) = make(), make()
    captured = capture(mine)
    for number in range(6):
        for function, weights in ((captured, my_weights), (theirs, their_weights)):
            for weight in weights:
                weight.grad = None
            function(inputs(number)).sum().backward()
        for my_weight, their_weight in zip(my_weights, their_weights, strict=True):
            assert bits(my_weight.grad) == bits(their_weight.grad)
    assert recordings(captured).replays >= 4


def test_memory_of_a_replaced_weight_is_free() -> None:
    mine, _ = captured_twins(Block)
    for number in range(4):
        mine.m[0](inputs(number)).sum().backward()
    weight = mine.m[0].a.weight
    storage = weakref.ref(weight.untyped_storage())
    weight.data = weight.data.clone()
    for number in range(3):
        mine.m[0](inputs(number)).sum().backward()
    gc.collect()
    assert storage() is None


def test_a_backward_pass_inside_leaves_its_gradients_at_the_parameters() -> None:
    module, twin = twins(lambda: nn.Linear(6, 6))
    weight, bias = module.weight, module.bias
    graph = module(inputs(0)).sum()  # of the eager calls before
    bias.grad = kept = torch.ones_like(bias)
    node, versions = node_of(weight), (weight._version, bias._version)
    with lent([weight, bias]) as lent_tensors:
        assert (module.weight is weight, type(weight)) == (True, nn.Parameter)
        assert node_of(weight) is not node
        assert [tensor for _, tensor in lent_tensors.values()] == [weight, bias]
        module(inputs(1)).sum().backward()
        with torch.no_grad():
            weight.add_(1)
    assert node_of(weight) is node
    assert bias.grad is kept
    assert (weight._version, bias._version) == (versions[0] + 1, versions[1])
    twin(inputs(1)).sum().backward()
    assert bits(weight.grad) == bits(twin.weight.grad)
    assert bits(weight) == bits(twin.weight + 1)
    assert bits(kept) == bits(twin.bias.grad + 1)
    del graph


def test_a_leaf_is_whole_again_after_an_error() -> None:
    module = nn.Linear(6, 6).to(DEVICE)
    weight, graph = module.weight, module(inputs(0)).sum()
    node = node_of(weight)
    with pytest.raises(KeyError), lent([weight]):
        raise KeyError
    assert node_of(weight) is node
    graph.backward()
    assert weight.grad is not None


def node_of(leaf: Tensor) -> Any:
    """The node by which autograd adds to the leaf's gradient."""
    edge = leaf.view_as(leaf).grad_fn
    assert edge is not None
    return edge.next_functions[0][0]


@refuses_kept_nodes
def test_a_whole_step_where_nodes_are_kept_and_hooked() -> None:
    """Nodes as ``DistributedDataParallel`` keeps them: made on the default stream, always alive, and with hooks, so
    that they cannot be exchanged."""
    ended, given = [], []
    for captures in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(DEVICE)
        nodes = [node_of(parameter) for parameter in model.parameters()]
        handles = [node.register_prehook(lambda grads: tuple(grad * 2 for grad in grads)) for node in nodes]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = capture(step) if captures else step
        losses = []
        for number in range(12):
            mark_step_begin()
            losses.append(run(inputs(number)).clone())
        given.append([*losses, *[parameter.detach() for parameter in model.parameters()]])
        ended.append(run)
        del handles
    assert [bits(tensor) for tensor in given[1]] == [bits(tensor) for tensor in given[0]]
    counted = recordings(ended[1])
    assert counted.replays >= 8 if TAKES_KEPT_NODES else counted.eager_calls, counted.findings
    assert TAKES_KEPT_NODES or any("CG904" in finding.code for finding in counted.findings)


@contextlib.contextmanager
def another_thread() -> Iterator[None]:
    """Have a second thread that only waits. The library cannot know that it does nothing else."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have regions treat the device as one with streams, to which nodes of leaves belong, in a process that compiled
    nothing."""
    monkeypatch.setattr(leaf_swap, "captures_kernels", lambda device: True)
    monkeypatch.setattr(training_region, "graphs_compiled", lambda: 0)


def test_arguments_are_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that come as arguments are not exchanged, so that such a body is recorded beside other threads."""
    on_a_device(monkeypatch)
    f, w = capture(lambda x, w: torch.tanh(x @ w)), inputs(3, 6, 6).requires_grad_()
    with another_thread():
        for number in range(8):
            x = inputs(number, 6, 6)
            grads = torch.autograd.grad(f(x, w).sum(), w)
            assert bits(grads[0]) == bits(torch.autograd.grad(torch.tanh(x @ w).sum(), w)[0])
    assert recordings(f).eager_calls == 0
    assert recordings(f).replays >= 8


class Monitor(threading.Thread):
    """A thread that wakes up at times, as the one of a progress bar."""

    __module__ = "tqdm._monitor"

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()

    @override
    def run(self) -> None:
        self.over.wait()


def test_threads_that_run_no_code_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    here, before, enumerate_all = threading.current_thread(), {*threading.enumerate()}, threading.enumerate
    monkeypatch.setattr(threading, "enumerate", lambda: [here, *({*enumerate_all()} - before)])
    assert not threads.others_may_run()
    queue, monitor = multiprocessing.get_context("fork").Queue(), Monitor()
    queue.put(1)  # starts the queue's own thread
    monitor.start()
    assert len(threading.enumerate()) == 3
    assert not threads.others_may_run()
    monkeypatch.setattr(Monitor, "__module__", "tensorboard.summary.writer.event_file_writer")
    assert not threads.others_may_run()
    with another_thread():
        assert threads.others_may_run()
    monitor.over.set()
    monitor.join()
    queue.get()
    queue.close()
    queue.join_thread()


def test_threads_of_c_count_while_they_run_python() -> None:
    """A thread that C code started counts as another thread as long as it runs Python, as autograd's does in a hook."""
    idle, running, go_on = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        threading.current_thread()
        running.set()
        go_on.wait()
        idle.set()

    _thread.start_new_thread(run, ())
    running.wait()
    assert threads.others_may_run()
    go_on.set()
    idle.wait()
    until = time.monotonic() + 20
    while threads.others_may_run() and time.monotonic() < until:
        time.sleep(0.001)
    assert not threads.others_may_run()


def test_looking_at_threads_keeps_nothing_of_what_runs() -> None:
    """Asking for other threads' frames must leave no cycle: a frame that held itself would keep the tensors of all its
    callers until the next collection."""

    def look() -> weakref.ref[Tensor]:
        local = torch.ones(3)
        with another_thread():
            assert threads.others_may_run()
        return weakref.ref(local)

    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


def test_a_thread_of_autograds_own_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a checkpointed block runs again in autograd's thread, while the thread that asked for gradients waits:
    the waiting one does not count."""
    asker, enumerate_all, before = threading.current_thread(), threading.enumerate, {*threading.enumerate()}
    monkeypatch.setattr(threading, "enumerate", lambda: [asker, *({*enumerate_all()} - before)])
    answers: list[bool] = []
    over = threading.Semaphore(0)

    def look() -> None:
        answers.append(threads.others_may_run())
        over.release()

    for task in (NO_TASK, 1):
        monkeypatch.setattr(threads, "graph_task", lambda task=task: task)
        _thread.start_new_thread(look, ())
        over.acquire()
    with another_thread():
        _thread.start_new_thread(look, ())
        over.acquire()
    assert answers == [True, False, True]


class Recurrent(nn.Module):
    """``nn.LSTM`` keeps its weights in a list and looks at them through weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.lstm(x)[0]
        return hidden


def test_a_recurrent_region() -> None:
    mine, theirs = captured_twins(Recurrent)
    kept: list[Tensor] = []

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        loss: Tensor = model.m[0](inputs(number, 2, 5, 6)).square().mean()
        kept.append(loss)
        loss.backward()
        return loss

    both(step, mine, theirs)
    assert recordings(mine.m[0]).replays >= 6


def test_a_recurrent_step() -> None:
    """oneDNN's backward operator for LSTM gets an undefined tensor, which Python code cannot pass."""
    mine, theirs = twins(Recurrent)

    def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    eager, captured = step_of(theirs), capture(step_of(mine))
    for number in range(8):
        x = inputs(number, 2, 5, 6)
        assert bits(captured(x)) == bits(eager(x))
    assert [bits(p) for p in mine.parameters()] == [bits(p) for p in theirs.parameters()]
    assert recordings(captured).replays >= 4


def test_borrowed_outputs_turn_stale_beside_one_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    know_nothing_of_writes(monkeypatch)
    preserved, borrowed = capture(lambda x: x * 2), capture(lambda x: x + 1, outputs="borrow")
    views = []
    with torch.no_grad():
        for number in range(4):
            mark_step_begin()
            views.append(preserved(inputs(number))[1:])
            kept = borrowed(inputs(number))
            mark_step_begin()
            again = preserved(inputs(number))
            if recordings(borrowed).recordings:
                with pytest.raises(BorrowedOutputError):
                    kept.add(1)
            del again
    for number, view in enumerate(views):
        assert bits(view) == bits((inputs(number) * 2)[1:])


def test_a_gradient_is_free_once_nobody_needs_it() -> None:
    mine, _ = captured_twins(Block)
    kept = []
    for number in range(4):
        kept.append(mine.m[0](inputs(number)).square().mean())
        kept[-1].backward()
    gradients = [weakref.ref(p.grad.untyped_storage()) for p in mine.parameters()]
    mine.zero_grad()
    gc.collect()
    assert [reference() for reference in gradients] == [None] * len(gradients)


def test_a_default_device_changes_nothing() -> None:
    """A default device is a function mode, under which torch finds attributes of tensors by name; lending works
    there."""
    mine, theirs = captured_twins(Block)
    kept: list[Tensor] = []

    def step(model: Any, number: int) -> Tensor:
        loss: Tensor = model.m[0](inputs(number)).square().mean()
        kept.append(loss)
        loss.backward()
        return loss

    with torch.device(DEVICE):
        both(step, mine, theirs, 10)
    assert recordings(mine.m[0]).recordings == 2
    assert recordings(mine.m[0]).replays >= 10


@torch.no_grad()
def test_an_output_that_is_kept_for_ever_does_not_make_the_path_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    know_nothing_of_writes(monkeypatch)
    first, second, third = (capture(lambda x, k=k: torch.sin(x * k)) for k in (2, 3, 4))
    kept = [first(inputs(0)) for _ in range(3)]
    views = [output[0] for output in kept]
    for number in range(12):
        mark_step_begin()
        x = inputs(number)
        y = third(second(x))
        assert bits(y) == bits(torch.sin(torch.sin(x * 3) * 4))
        z = second(y)
        assert bits(z) == bits(torch.sin(y * 3))
    assert all(bits(output) == bits(torch.sin(inputs(0) * 2)) for output in kept)
    assert [bits(tensor) for tensor in views] == [bits(tensor[0]) for tensor in kept]
    assert recordings(second).recordings <= 5  # one of them below the outputs that are kept
    assert recordings(second).replays >= 16


@pytest.mark.one_in(2)
@torch.no_grad()
@pytest.mark.parametrize("knows", [True, False])
def test_a_held_output_that_only_garbage_holds(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output in a cycle is pinned, and a later collection frees it."""
    if not knows:
        know_nothing_of_writes(monkeypatch)
    first, second = capture(lambda x: x * 2), capture(lambda x: x + 1)
    for number in range(6):
        x = inputs(number)
        mark_step_begin()
        y = first(x)
        z = second(y)
        assert bits(z) == bits(x * 2 + 1)
        box: list[Any] = [y, y[0]]
        box.append(box)
        del y, z, box
        if number % 2:
            gc.collect()
    gc.collect()
    assert recordings(first).replays >= 3
