"""``torch.compile(backend="capture")``: generators, operators of graphs, optimizers, threads."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, explain, mark_step_begin, plans, recordings
from capture.integrations.compile import _Compiled, backend
from capture.torch_private import compiler_backend
from tests.support.compiled import MODELS, STEPS, Drops, compiled, counts, made, only, replayed, train, twins
from tests.support.compiled import compiler as compiler
from tests.support.device import DEVICE, EXECUTES, without_default_device
from tests.support.nets import Mlp
from tests.support.rows import fresh as fresh
from tests.support.rows import rand, same, warned


def test_a_generator_that_is_an_input() -> None:
    """A generator as a graph's input, as AOTAutograd passes it to ``graphsafe_run_with_rng_state``."""
    graph = torch.fx.Graph()
    given, generator = graph.placeholder("x"), graph.placeholder("fwd_rng_state_0")
    drawn = graph.call_function(torch.ops.aten.bernoulli.default, (given,), {"generator": generator})
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (drawn, 2)),))
    module = torch.fx.GraphModule({}, graph)
    run = _Compiled("drawn", {}, {}, None).inference(module, [])
    ours, theirs = torch.Generator(DEVICE).manual_seed(3), torch.Generator(DEVICE).manual_seed(3)
    for seed in range(STEPS):
        x = rand(6, seed=seed) + 0.5
        same(run([x, ours]), (torch.bernoulli(x, generator=theirs) * 2,))
        same(ours.get_state(), theirs.get_state())
    replayed("inference")


@pytest.mark.skipif(not EXECUTES, reason="a stand-in for what torch has on CUDA alone")
def test_a_generator_lent_to_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that gets a generator: the CPU engine cannot record it and says so; a CUDA graph reads the
    generator."""
    operator = torch.ops.higher_order.graphsafe_run_with_rng_state
    default = torch.default_generator

    def kernel(op: Any, *args: Any, rng_state: torch.Generator) -> Any:
        saved = default.get_state()
        default.set_state(rng_state.get_state())
        result = op(*args)
        rng_state.set_state(default.get_state())
        default.set_state(saved)
        return result

    for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.BackendSelect):
        monkeypatch.setitem(operator.py_kernels, key, kernel)
    monkeypatch.setattr(operator, "_dispatch_cache", {})

    @capture
    def f(x: Tensor, generator: torch.Generator) -> Any:
        return operator(torch.ops.aten.bernoulli.default, x, rng_state=generator) * 2

    ours, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    before = default.get_state()
    with warned("CG904"):
        for seed in range(STEPS):
            x = rand(6, seed=seed) + 0.5
            same(f(x, ours), torch.bernoulli(x, generator=theirs) * 2)
            same(ours.get_state(), theirs.get_state())
    same(default.get_state(), before)
    assert recordings(f).recordings == 0
    assert explain(f)(rand(6) + 0.5, ours).facts.draws


@pytest.mark.skipif(not EXECUTES, reason="on CUDA the partitioner keeps generators instead of states")
def test_dropout_under_a_checkpoint_runs_eagerly() -> None:
    """The CPU's generator is set back for the recomputation, which a replay would not do."""

    class Checkpointed(Drops):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    net, twin = twins(Checkpointed)
    left = []
    for module, by in ((net, backend), (twin, "aot_eager")):
        torch.compiler.reset()
        torch.manual_seed(7)
        run = torch.compile(module, backend=by)
        if by is not backend:
            left.append(train(run, module, MODELS["mlp"][1]))
            continue
        with warned("CG403", most=2):
            left.append(train(run, module, MODELS["mlp"][1]))
    same(*left)


def test_a_custom_operator_that_writes() -> None:
    """The graph has it as ``auto_functionalized``; the operator inside is found."""

    @torch.library.custom_op("capture_tests::double_", mutates_args={"x"})
    def double_(x: Tensor) -> None:
        x.mul_(2)

    def f(x: Tensor) -> Tensor:
        y = x + 1
        double_(y)
        return y.sin()

    run = compiled(f, fullgraph=True)
    for seed in range(STEPS + 1):
        same(run(rand(4, seed=seed)), f(rand(4, seed=seed)))
    assert only().eager_calls == 0
    assert only().replays >= STEPS - 2


@pytest.mark.skipif(not EXECUTES, reason="which branch is taken is read on the host")
def test_a_branch_in_the_graph_runs_eagerly() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))  # type: ignore[no-any-return]

    run = compiled(f)
    with warned("CG202", most=2):
        for seed in range(STEPS):
            x = rand(3, seed=seed)
            same(run(x), x.sin() if x.sum() > 0 else x.cos())
    assert only("inference").recordings == 0


def test_a_region_that_is_compiled_once() -> None:
    """The graph has it as ``invoke_subgraph``; the operators inside are found."""

    @torch.compiler.nested_compile_region
    def twice(x: Tensor) -> Tensor:
        return x.sin() * 2

    run = compiled(lambda x: twice(twice(x)))
    for seed in range(STEPS):
        x = rand(4, seed=seed)
        same(run(x), (x.sin() * 2).sin() * 2)
    replayed("inference")


def test_a_compiled_optimizer() -> None:
    """Parameters and state of a compiled optimizer are static inputs that are written in place. Dynamo takes the
    ``foreach`` implementation, which may round differently from eager's: it is compared with ``aot_eager``."""
    net, twin = twins(Mlp)
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (net, twin))
    step, plain_step = compiled(lambda: ours.step()), torch.compile(lambda: theirs.step(), backend="aot_eager")
    for seed in range(STEPS + 1):
        for module, optimizer, run in ((net, ours, step), (twin, theirs, plain_step)):
            optimizer.zero_grad()
            module(rand(4, 8, seed=seed)).square().mean().backward()
            run()
        same([*net.parameters()], [*twin.parameters()])
    assert made()
    assert all(now.eager_calls == 0 and now.kept_outputs == 0 for now in map(recordings, made()))
    assert sum(now.replays for now in map(recordings, made())) >= STEPS - 2


def test_retained_graphs_and_accumulated_gradients() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    for step in range(STEPS):
        for run, module in ((f, net), (twin, twin)):
            module.zero_grad()
            for index in range(2):
                loss = run(rand(4, 8, seed=2 * step + index)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
        same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert only("backward").eager_calls == 0


def test_gradients_of_gradients_are_refused_as_by_aot_eager() -> None:
    net, _ = twins(Mlp)
    x = rand(4, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(net)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_autocast() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    for seed in range(STEPS):
        x = rand(4, 8, seed=seed)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            ours, theirs = f(x), twin(x)
        same(ours, theirs)
        (ours.float().sum() + 0).backward()
        (theirs.float().sum() + 0).backward()
        same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
        del ours
    replayed("forward")


def test_threads_share_a_graph() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)
    wrong: list[int] = []

    def work(thread: int, steps: int) -> None:
        for step in range(steps):
            x = rand(4, 8, seed=100 * thread + step)
            ours = torch.autograd.grad(f(x).square().mean(), list(net.parameters()))
            theirs = torch.autograd.grad(twin(x).square().mean(), list(twin.parameters()))
            if not all(map(torch.equal, ours, theirs)):
                wrong.append(thread)

    with without_default_device():  # the compiler guards on the default device, of which each thread has its own
        work(9, 1)
        threads = [threading.Thread(target=work, args=(number, STEPS + 3)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert only("forward").replays > 0


def test_a_tensor_marked_as_static() -> None:
    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache[1] = x
        return cache.sum(0)

    ours, theirs = torch.zeros(3, 4), torch.zeros(3, 4)
    torch._dynamo.mark_static_address(ours)
    run = compiled(f)
    for seed in range(STEPS):
        same(run(rand(4, seed=seed), ours), f(rand(4, seed=seed), theirs))
        same(ours, theirs)
    policies = {placeholder.path: placeholder.policy.name for placeholder in plans(made()[0])[0].placeholders}
    assert policies == {"l_x_": "COPY", "l_cache_": "STATIC"}


def test_without_aot_autograds_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch's private wrapper the stated fallback is taken."""
    for name in ("_aot_autograd", "_CompileContext", "_TracingContext", "_Translator"):
        monkeypatch.setattr(compiler_backend, name, None)
    net, twin = twins(Mlp)
    inputs = MODELS["mlp"][1]
    same(train(compiled(net), net, inputs), train(twin, twin, inputs))
    assert {now[1:] for now in counts().values()} == {(STEPS - 2, 0)}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(DEVICE)


@pytest.mark.parametrize("compiled_before", [True, False])
def test_training_through_compiled_code(compiled_before: bool) -> None:
    """The compiled backward pass writes into tensors that it saved, so torch allows no second pass through them."""
    net, x = _net(), torch.randn(4, 8, device=DEVICE)
    compiled: Any = torch.compile(net, backend="aot_eager")
    if compiled_before:
        compiled(x).sum().backward()
    body: Any = lambda x: compiled(x).square()  # noqa: E731
    captured: Any = capture(body)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        for number in range(8):
            mark_step_begin()
            given = x * number
            net.zero_grad()
            captured(given).sum().backward()
            grads = [p.grad for p in net.parameters()]
            net.zero_grad()
            net(given).square().sum().backward()
            for grad, parameter in zip(grads, net.parameters(), strict=True):
                assert grad is not None
                assert parameter.grad is not None
                assert torch.equal(grad, parameter.grad)
        assert recordings(captured).replays >= 6
        loss = captured(x).sum()
        with pytest.raises(RuntimeError, match="donated"):
            loss.backward(retain_graph=True)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_function_is_compiled_once(autocast: bool) -> None:
    """A watched run changes nothing that Dynamo guards on, except for autocast's cache where that is in use."""
    count = [0]

    def counting(graph: Any, inputs: Any) -> Any:
        count[0] += 1
        return graph

    def twice(x: Tensor) -> Tensor:
        return x.sin() * 2

    compiled: Any = torch.compile(twice, backend=counting)
    x = torch.randn(4, device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE.type, enabled=autocast):
        expected = compiled(x)
        body: Any = lambda x: compiled(x)  # noqa: E731
        captured: Any = capture(body)
        for _ in range(5):
            assert torch.equal(captured(x), expected)
    assert count[0] <= 1 + autocast
    assert recordings(captured).replays >= 2
