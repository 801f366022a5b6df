"""The decorator: every form gives a real function that computes what the plain one does."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import io
import operator
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import (
    AnnotationError,
    CaptureWarning,
    _trees,
    capture,
    config,
    explain,
    plans,
    recordings,
    release,
    report,
    reset,
)
from capture._decorate import captured_states
from tests.device import DEVICE, use_device


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference, no plans on disk, no marks and no tree of another test."""
    _trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False):
        yield


def bits(tensor: Tensor) -> tuple[object, ...]:
    """All that makes two tensors equal bit for bit."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), flat.view(torch.uint8).tolist() if len(flat) else []


def check_replays(captured: Callable[..., Tensor], eager: Callable[..., Tensor], *, rest: tuple[Any, ...] = ()) -> None:
    """Five calls agree with eager; the body ran twice, the other three were replays of one recording."""
    for seed in range(5):
        x = torch.randn(3, 4, generator=torch.Generator(DEVICE).manual_seed(seed))
        assert bits(captured(x, *rest)) == bits(eager(x, *rest))
    seen = recordings(captured)
    assert (seen.observations, seen.recordings, seen.replays, seen.body_runs) == (1, 1, 3, 2)


# -------------------------------------------------------------------------------------------------------------- forms


def scaled(x: Tensor, scale: float = 2.0) -> Tensor:
    """Relu of x, scaled."""
    return torch.relu(x) * scale + 1


class Net(nn.Module):
    """Not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 2.0

    @override
    def forward(self, x: Tensor, shift: float = 0.5) -> Tensor:
        """Linear, relu, scale."""
        return torch.relu(self.linear(x)) * self.scale + shift


class CapturedNet(Net):
    """Its forward is captured, another method too."""

    @override
    @capture
    def forward(self, x: Tensor, shift: float = 0.5) -> Tensor:
        """Linear, relu, scale."""
        return torch.relu(self.linear(x)) * self.scale + shift

    @capture(max_recordings=2)
    def step(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Plain:
    """No module; its methods read an attribute."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def eager(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) + 1

    @capture
    def step(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) + 1

    def __call__(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) + 1


class Family:
    """Static methods and class methods, with the decorators in either order."""

    factor = 3.0

    @staticmethod
    @capture
    def static_inner(x: Tensor) -> Tensor:
        return torch.relu(x) * 2 + 1

    @capture
    @staticmethod
    def static_outer(x: Tensor) -> Tensor:
        return torch.relu(x) * 2 + 1

    @classmethod
    @capture
    def class_inner(cls, x: Tensor) -> Tensor:
        return torch.relu(x) * cls.factor + 1

    @capture
    @classmethod
    def class_outer(cls, x: Tensor) -> Tensor:
        return torch.relu(x) * cls.factor + 1


class Derived(Family):
    factor = 5.0


@pytest.mark.parametrize(
    "decorate",
    [
        capture,
        capture(),
        capture(max_recordings=2, rng="graphsafe"),
        lambda fn: capture(fn, static=["x"], name="named"),
        lambda fn: capture(fn, outputs="clone"),
    ],
    ids=["bare", "empty", "options", "call", "call-clone"],
)
def test_functions_in_every_form(decorate: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
    captured = decorate(lambda x, scale=2.0: torch.relu(x) * scale + 1)
    x = torch.randn(3, 4)
    for _ in range(4):
        x.add_(1)
        assert bits(captured(x)) == bits(scaled(x))
    assert isinstance(captured, types.FunctionType)
    assert recordings(captured).recordings == 1


def test_a_function_replays() -> None:
    check_replays(capture(scaled), scaled)


def test_a_lambda_replays() -> None:
    captured: Callable[[Tensor], Tensor] = capture(lambda x: torch.relu(x) * 2 + 1)
    check_replays(captured, scaled)


def test_forward_replays() -> None:
    net = CapturedNet()
    twin = Net()
    twin.load_state_dict(net.state_dict())
    check_replays(net, twin)
    assert recordings(net.forward).recordings == 1
    assert recordings(net.step).recordings == 0


def test_a_module_method_replays() -> None:
    net = CapturedNet()
    check_replays(net.step, lambda x: torch.tanh(net.linear(x)) * net.scale)


def test_a_method_of_a_plain_class_replays() -> None:
    plain = Plain(torch.randn(4, 4))
    check_replays(plain.step, plain.eager)


def test_a_bound_method_replays() -> None:
    plain = Plain(torch.randn(4, 4))
    check_replays(capture(plain.eager), plain.eager)


def test_a_bound_method_keeps_its_object() -> None:
    captured = capture(Plain(torch.eye(4)).eager)
    gc.collect()
    check_replays(captured, Plain(torch.eye(4)).eager)


def test_a_callable_object_replays() -> None:
    plain = Plain(torch.randn(4, 4))
    captured = capture(plain, name="plain")
    assert isinstance(captured, types.FunctionType)
    assert recordings(captured).function == "plain"
    check_replays(captured, plain)


def test_a_callable_object_is_kept_alive() -> None:
    captured = capture(Plain(torch.eye(4)), name="plain")
    gc.collect()
    check_replays(captured, Plain(torch.eye(4)))


def test_a_partial_replays() -> None:
    partial = functools.partial(scaled, scale=3.0)
    check_replays(capture(partial, name="partial"), partial)


def test_a_partial_without_a_name_replays() -> None:
    check_replays(capture(functools.partial(scaled, scale=3.0)), functools.partial(scaled, scale=3.0))


@pytest.mark.parametrize("builtin", [torch.relu, torch.sigmoid, operator.neg], ids=["relu", "sigmoid", "neg"])
def test_a_builtin_replays(builtin: Callable[[Tensor], Tensor]) -> None:
    check_replays(capture(builtin), builtin)


def test_a_builtin_takes_keywords() -> None:
    add = capture(torch.add)
    x, y = torch.randn(3), torch.randn(3)
    for alpha in (1, 2, 2, 2, 1):
        assert bits(add(x, y, alpha=alpha)) == bits(torch.add(x, y, alpha=alpha))


@pytest.mark.parametrize("name", ["static_inner", "static_outer"])
def test_static_methods_replay(name: str) -> None:
    check_replays(getattr(Family, name), scaled)
    x = torch.randn(3, 4)
    assert bits(getattr(Family(), name)(x)) == bits(scaled(x))
    reset(getattr(Family, name))


@pytest.mark.parametrize("name", ["class_inner", "class_outer"])
def test_class_methods_replay_per_class(name: str) -> None:
    check_replays(getattr(Family, name), lambda x: scaled(x, 3.0))
    check_replays(getattr(Derived, name), lambda x: scaled(x, 5.0))
    x = torch.randn(3, 4)
    assert bits(getattr(Derived(), name)(x)) == bits(scaled(x, 5.0))
    assert bits(getattr(Family(), name)(x)) == bits(scaled(x, 3.0))
    reset()


def test_a_module_instance_is_captured_in_place() -> None:
    net = Net()
    twin = copy.deepcopy(net)
    assert capture(net, max_recordings=3) is net
    assert type(net) is Net
    assert isinstance(net.forward, types.MethodType)
    assert net.forward.__self__ is net
    check_replays(net, twin)
    assert "forward" not in Net().__dict__


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
def test_torchs_own_modules_are_captured(make: Callable[[], nn.Module]) -> None:
    net = make()
    check_replays(capture(net), copy.deepcopy(net))


def test_a_receiver_of_another_name_is_seen() -> None:
    class Odd(nn.Module):
        def __init__(this) -> None:
            super().__init__()
            this.scale = 2.0

        @override
        @capture
        def forward(this, x: Tensor) -> Tensor:
            return torch.relu(x) * this.scale + 1

    net = Odd()
    x = torch.randn(3, 4)
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        net.scale = scale
        assert bits(net(x)) == bits(scaled(x, scale))


def test_a_receiver_of_another_name_is_no_argument() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        @override
        @capture
        def forward(this, x: Tensor) -> Tensor:
            return this.layer(x)  # type: ignore[no-any-return]

    nets = [Odd() for _ in range(9)]
    x = torch.randn(3, 4)
    for _ in range(4):
        for net in nets:
            assert bits(net(x)) == bits(net.layer(x))
    assert all(recordings(net).recordings == 1 for net in nets)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_grad_decorators_on_either_side(mode: Callable[[], Any]) -> None:
    """A body wrapped by torch's own decorators is still read for the names it mentions."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale = 2.0

        def plain(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x) * self.scale
            return y

        inner = capture(mode()(plain))
        outer = mode()(capture(plain))

    net = Both()
    x = torch.randn(3, 4)
    with torch.enable_grad():
        for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0, 2.0):
            net.scale = scale
            with mode():
                expected = net.linear(x) * scale
            for method in (net.inner, net.outer):
                got = method(x)
                assert bits(got) == bits(expected)
                assert got.requires_grad == expected.requires_grad
    assert recordings(net.inner).replays > 0


# ------------------------------------------------------------------------------------------------------ what is kept


def test_the_function_looks_like_the_plain_one() -> None:
    captured = capture(scaled)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(captured, name) == getattr(scaled, name)
    assert inspect.signature(captured) == inspect.signature(scaled)
    assert captured.__wrapped__ is scaled  # type: ignore[attr-defined]
    assert inspect.getsource(captured) == inspect.getsource(scaled)


def test_the_method_looks_like_the_plain_one() -> None:
    net = CapturedNet()
    assert isinstance(net.forward, types.MethodType)
    assert net.forward.__self__ is net
    assert inspect.signature(net.forward) == inspect.signature(Net().forward)
    assert inspect.signature(CapturedNet.forward) == inspect.signature(Net.forward)
    assert net.forward.__doc__ == Net.forward.__doc__
    assert isinstance(inspect.getattr_static(CapturedNet, "forward"), types.FunctionType)


def test_a_callable_object_without_a_name_gets_one() -> None:
    captured = capture(Plain(torch.eye(4)))
    assert "Plain" in recordings(captured).function
    assert captured.__name__


@pytest.mark.parametrize("arguments", [((), {}), ((1, 2, 3), {}), ((torch.ones(1),), {"skale": 1.0})])
def test_wrong_arguments_raise_the_functions_own_error(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    args, kwargs = arguments
    with pytest.raises(TypeError) as eager:
        scaled(*args, **kwargs)
    with pytest.raises(TypeError) as captured:
        capture(scaled)(*args, **kwargs)
    assert str(captured.value) == str(eager.value)


def test_hooks_and_call_work_around_a_captured_forward() -> None:
    net = CapturedNet()
    seen: list[tuple[object, ...]] = []
    net.register_forward_hook(lambda module, args, output: seen.append(bits(output)))
    x = torch.randn(3, 4)
    results = [bits(net(x)) for _ in range(4)]
    assert seen == results


# ------------------------------------------------------------------------------------------------------------- state


def test_state_is_per_instance() -> None:
    first, second = CapturedNet(), CapturedNet()
    x = torch.randn(3, 4)
    for _ in range(3):
        for net in (first, second):
            assert bits(net(x)) == bits(Net.forward(net, x))
    for net in (first, second):
        assert (recordings(net.forward).recordings, recordings(net.forward).replays) == (1, 1)


def test_an_instance_is_not_kept_alive() -> None:
    net = CapturedNet()
    for _ in range(3):
        net(torch.randn(3, 4))
    pool = captured_states(net.forward)[0]
    reference, state = weakref.ref(net), weakref.ref(pool)
    del net, pool
    gc.collect()
    assert reference() is None
    gc.collect()
    assert state() is None


def test_a_module_captured_as_an_instance_is_not_kept_alive() -> None:
    net = capture(Net())
    for _ in range(3):
        net(torch.randn(3, 4))
    reference = weakref.ref(net)
    del net
    gc.collect()
    assert reference() is None


def test_a_function_is_not_kept_alive() -> None:
    def make() -> tuple[Callable[[Tensor], Tensor], Tensor]:
        weight = torch.randn(4)
        return capture(lambda x: x * weight + 1), weight

    captured, kept = make()
    for _ in range(3):
        captured(torch.randn(3, 4))
    reference, tensor = weakref.ref(captured), weakref.ref(kept)
    del captured, kept
    gc.collect()
    assert reference() is None
    assert tensor() is None


def test_a_reused_id_gets_a_state_of_its_own() -> None:
    x = torch.randn(3, 4)
    used: set[int] = set()
    reused = False
    for scale in range(200):
        net = CapturedNet()
        net.scale = float(scale)
        reused = reused or id(net) in used
        used.add(id(net))
        for _ in range(3):
            assert bits(net(x)) == bits(Net.forward(net, x))
        del net
        if reused and scale > 10:
            break
    assert reused


def test_objects_without_weak_references_work() -> None:
    class Slots:
        __slots__ = ("scale",)

        def __init__(self, scale: float) -> None:
            self.scale = scale

        @capture
        def step(self, x: Tensor) -> Tensor:
            return torch.relu(x) * self.scale + 1

    x = torch.randn(3, 4)
    for scale in (2.0, 3.0):
        slots = Slots(scale)
        for _ in range(4):
            assert bits(slots.step(x)) == bits(scaled(x, scale))
        slots.scale = 7.0
        assert bits(slots.step(x)) == bits(scaled(x, 7.0))


def test_reset_and_release() -> None:
    net = CapturedNet()
    x = torch.randn(3, 4)
    for _ in range(3):
        net(x)
    release(net.forward)
    assert bits(net(x)) == bits(Net.forward(net, x))
    assert (recordings(net.forward).observations, recordings(net.forward).recordings) == (1, 2)
    reset(net.forward)
    assert recordings(net.forward).body_runs == 0
    assert plans(net.forward) == ()
    check_replays(net, lambda x: Net.forward(net, x))
    assert "CapturedNet.forward" in report()


def test_an_output_outlives_its_function() -> None:
    captured = capture(lambda x: torch.relu(x) * 2 + 1)
    x = torch.randn(3, 4)
    for _ in range(3):
        y = captured(x)
    expected = bits(scaled(x))
    del captured
    gc.collect()
    release()
    reset()
    gc.collect()
    assert bits(y) == expected


@pytest.mark.parametrize("call", [recordings, plans, reset, release])
def test_functions_that_are_not_captured_are_refused(call: Callable[[Any], object]) -> None:
    with pytest.raises(AnnotationError, match="not a captured function"):
        call(scaled)


def test_explain_takes_what_is_not_captured() -> None:
    assert explain(scaled)(torch.randn(3)).outcome == "record"
    assert explain(Net())(torch.randn(3, 4)).outcome == "record"
    assert explain(Net().forward)(torch.randn(3, 4)).outcome == "record"
    with pytest.raises(AnnotationError, match="instance"):
        explain(CapturedNet.forward)(CapturedNet(), torch.randn(3, 4))


# ----------------------------------------------------------------------------------------- copies, pickles, transforms


def test_deepcopy_of_a_module_with_a_captured_method() -> None:
    net = CapturedNet()
    x = torch.randn(3, 4)
    for _ in range(3):
        net(x)
    twin = copy.deepcopy(net)
    twin.linear.weight.mul_(3)
    for _ in range(4):
        assert bits(twin(x)) == bits(Net.forward(twin, x))
        assert bits(net(x)) == bits(Net.forward(net, x))
    assert recordings(twin.forward).recordings == 1
    assert captured_states(twin.forward) != captured_states(net.forward)


def test_deepcopy_of_a_captured_instance() -> None:
    net = capture(Net())
    x = torch.randn(3, 4)
    for _ in range(3):
        net(x)
    twin = copy.deepcopy(net)
    assert twin.forward.__self__ is twin  # type: ignore[attr-defined]
    twin.linear.weight.mul_(3)
    twin.scale = 5.0
    for _ in range(4):
        assert bits(twin(x)) == bits(Net.forward(twin, x))
        assert bits(net(x)) == bits(Net.forward(net, x))


def _through_pickle(value: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(value))  # noqa: S301 - our own bytes
    return loaded


def _through_torch_save(value: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("through", [_through_pickle, _through_torch_save])
@pytest.mark.parametrize("make", [CapturedNet, lambda: capture(Net()), lambda: nn.Sequential(CapturedNet())])
def test_pickles_of_captured_modules(through: Callable[[nn.Module], nn.Module], make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)  # other weights may give nothing but dead units
    net = make()
    x = torch.randn(3, 4)
    for _ in range(3):
        expected = bits(net(x))
    loaded = through(net)
    assert type(loaded) is type(net)
    for _ in range(4):
        assert bits(loaded(x)) == expected
    for parameter in loaded.parameters():
        parameter.mul_(2)
    changed = bits(loaded(x))
    assert changed != expected
    assert bits(net(x)) == expected
    assert changed == bits(loaded(x))


def test_a_captured_function_pickles_by_name() -> None:
    loaded = pickle.loads(pickle.dumps(module_level))  # noqa: S301 - our own bytes
    assert loaded is module_level


@capture
def module_level(x: Tensor) -> Tensor:
    return torch.relu(x) + 1


def test_state_dict_is_the_plain_ones() -> None:
    net = CapturedNet()
    net(torch.randn(3, 4))
    assert list(net.state_dict()) == list(Net().state_dict())
    assert not [name for name in net.__dict__ if "capture" in name]


@pytest.mark.parametrize("calls", [0, 1, 3], ids=["cold", "observed", "replaying"])
def test_functional_call(calls: int) -> None:
    net = CapturedNet()
    x = torch.randn(3, 4)
    for _ in range(calls):
        net(x)
    for factor in (2.0, 3.0, 4.0):
        swapped = {name: parameter * factor for name, parameter in net.named_parameters()}
        got = torch.func.functional_call(net, swapped, (x,))
        twin = Net()
        twin.load_state_dict(swapped)
        assert bits(got) == bits(twin(x))
        assert bits(net(x)) == bits(Net.forward(net, x))


@pytest.mark.parametrize("calls", [0, 3], ids=["cold", "replaying"])
def test_torch_compile_around_a_captured_function(calls: int) -> None:
    captured = capture(scaled)
    x = torch.randn(3, 4)
    for _ in range(calls):
        captured(x)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: captured(x) - 1, backend="eager", fullgraph=True)
    for _ in range(3):
        assert bits(compiled(x)) == bits(scaled(x) - 1)
    assert recordings(captured).body_runs == min(calls, 2)


def test_torch_compile_of_a_captured_module() -> None:
    net = CapturedNet()
    x = torch.randn(3, 4)
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    for _ in range(3):
        assert bits(compiled(x)) == bits(Net.forward(net, x))


@pytest.mark.parametrize("make", [CapturedNet, lambda: capture(Net())])
def test_torch_export_of_a_captured_module(make: Callable[[], Net]) -> None:
    net = make()
    x = torch.randn(3, 4)
    net(x)
    exported = torch.export.export(net, (x,))
    assert bits(exported.module()(x)) == bits(Net.forward(net, x))


def test_settings_are_patched_and_not_set() -> None:
    """As an attribute of the module a setting would be in force nowhere."""
    with pytest.raises(AnnotationError, match=r"config\.patch\(enabled=False\).*CAPTURE_ENABLED"):
        setattr(config, "enabled", False)  # noqa: B010 - no type checker lets it pass
    with pytest.raises(AnnotationError, match=r"unknown setting 'enable' .did you mean 'enabled'"):
        config.patch(enable=False).__enter__()  # type: ignore[call-arg]
    assert config.current().enabled


def test_torch_func_transforms_run_inline() -> None:
    captured = capture(lambda x: torch.relu(x) * 2 + 1)
    x = torch.randn(3, 4)
    for _ in range(3):
        captured(x)
    with pytest.warns(CaptureWarning, match="CG805"):
        assert bits(torch.func.vmap(captured)(x)) == bits(torch.func.vmap(scaled)(x))
    with torch.enable_grad():
        got = torch.func.grad(lambda x: captured(x).sum())(x)
        assert bits(got) == bits(torch.func.grad(lambda x: scaled(x).sum())(x))
    assert bits(captured(x)) == bits(scaled(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_differentiation_runs_inline(grad: bool) -> None:
    """A replay would give no tangents."""
    captured = capture(lambda x: torch.relu(x) * 2 + 1)
    x, tangent = torch.randn(3, 4), torch.randn(3, 4)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            captured(x)
        for warns in (True, False):
            caught = pytest.warns(CaptureWarning, match="CG805.*forward-mode") if warns else contextlib.nullcontext()
            with torch.autograd.forward_ad.dual_level(), caught:
                dual = torch.autograd.forward_ad.make_dual(x, tangent)
                theirs, ours = (torch.autograd.forward_ad.unpack_dual(call(dual)) for call in (scaled, captured))
            assert bits(ours.primal) == bits(theirs.primal)
            assert bits(ours.tangent) == bits(theirs.tangent)
        assert bits(captured(x)) == bits(scaled(x))
    assert recordings(captured).replays >= 2


def test_a_captured_function_inside_another_runs_inline() -> None:
    inner = capture(lambda x: torch.relu(x) * 2)
    outer = capture(lambda x: inner(x) + 1)
    check_replays(outer, scaled)
    assert recordings(inner).body_runs == 0


# ------------------------------------------------------------------------------------------------- forks and threads


def test_a_forked_child_computes_and_leaves_its_parent_alone() -> None:
    script = """
        import os, sys, torch
        from capture import capture, recordings
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        f = capture(lambda x: torch.relu(x) * 2 + 1)
        def eager(x): return torch.relu(x) * 2 + 1
        x = torch.randn(3, 4)
        for _ in range(3):
            kept = f(x)
        expected = kept.clone()
        child = os.fork()
        if child == 0:
            z = x * 7
            good = all(torch.equal(f(z), eager(z)) for _ in range(5)) and torch.equal(kept, expected)
            os._exit(0 if good else 3)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert torch.equal(kept, expected)
        for factor in range(4):
            assert torch.equal(f(x * factor), eager(x * factor))
        assert torch.equal(kept, expected)
        assert recordings(f).recordings == 1
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_torch_keeps_from_its_first_look_is_its_own() -> None:
    """Also where that look happens in a watched body: a custom operator imports dynamo, say."""
    script = """
        import torch
        from torch.overrides import get_default_nowrap_functions
        from capture import capture

        captured = capture(lambda x: x + len(get_default_nowrap_functions()) * 0)
        captured(torch.ones(3))
        assert torch.Tensor.grad.__get__ in get_default_nowrap_functions()
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_threads_get_right_results_at_once() -> None:
    captured = capture(lambda x: torch.tanh(torch.relu(x) * 2 + 1) @ x.t())
    net = CapturedNet()
    wrong: list[object] = []
    barrier = threading.Barrier(3)

    def work(number: int) -> None:
        try:
            use_device()
            with torch.no_grad(), config.patch(cache=False):
                barrier.wait()
                for index in range(60):
                    x = torch.full((3, 4), float(number * 100 + index) / 50)
                    y = captured(x)
                    z = net(x)
                    if bits(y) != bits(torch.tanh(torch.relu(x) * 2 + 1) @ x.t()):
                        wrong.append((number, index, "function"))
                    if bits(z) != bits(Net.forward(net, x)):
                        wrong.append((number, index, "module"))
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert recordings(captured).replays > 0


def test_reset_from_another_thread() -> None:
    captured = capture(lambda x: torch.relu(x) * 2 + 1)
    x = torch.randn(3, 4)
    for _ in range(3):
        y = captured(x)

    def forget() -> None:
        reset(captured)
        release()

    thread = threading.Thread(target=forget)
    thread.start()
    thread.join(30)
    expected = bits(scaled(x))
    assert bits(y) == expected
    for _ in range(4):
        assert bits(captured(x)) == expected


# -------------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statik": ["x"]}, "unknown option 'statik' for capture .did you mean 'static'"),
        ({"wurst": 1}, "unknown option 'wurst'.*known: static, rng"),
        ({"rng": "graphsave"}, "rng='graphsave' is not a choice .did you mean 'graphsafe'.*'eager', 'forbid'"),
        ({"outputs": "keep"}, "outputs='keep' is not a choice.*'preserve', 'borrow', 'clone'"),
        ({"outputs": 3}, "outputs=3 is not a choice"),
        ({"outputs": ["preserve"]}, "is not a choice"),
        ({"fallback": None}, "fallback=None is not a choice"),
        ({"verify": True}, "verify=True is not a choice; known: 'off', 'first', 'always'"),
        ({"max_recordings": 0}, "max_recordings=0 is below 1"),
        ({"max_recordings": -3}, "max_recordings=-3 is below 1"),
        ({"max_recordings": 2.0}, "max_recordings= takes a whole number, got 2.0 .float"),
        ({"max_recordings": True}, "max_recordings= takes a whole number"),
        ({"max_recordings": "5"}, "max_recordings= takes a whole number, got '5'"),
        ({"warmup": 0}, "warmup=0 is below 1"),
        ({"warmup": None}, "warmup= takes a whole number"),
        ({"static": "x"}, r"write static=\['x'\]"),
        ({"static": 3}, "static= takes a list of names, got int"),
        ({"static": [3]}, "static= takes names, got 3"),
        ({"static": [""]}, "static= takes names"),
        ({"static": {"x": 1}}, "static= takes a list of names, got dict"),
        ({"static": ["scal"]}, "static='scal' names no parameter .did you mean 'scale'.*known: x, scale"),
        ({"static": ["scal.0.k"]}, "did you mean 'scale'"),
        ({"static": ["self.w"]}, "static='self.w' names no parameter"),
        ({"guards": 3}, "guards= takes a list of callables"),
        ({"guards": [3]}, "guards= takes a list of callables"),
        ({"guards": lambda: 1}, "guards= takes a list of callables"),
        ({"name": ""}, "name= takes a non-empty string"),
        ({"name": 3}, "name= takes a non-empty string, got 3"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        capture(scaled, **options)
    with pytest.raises(AnnotationError, match=message):
        capture(**options)(scaled)


def test_annotation_errors_are_type_errors() -> None:
    assert issubclass(AnnotationError, TypeError)


def _generator(x: Tensor) -> Iterator[Tensor]:
    yield x


async def _coroutine(x: Tensor) -> Tensor:
    return x


async def _async_generator(x: Tensor) -> Any:
    yield x


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Net, "not the class Net; decorate its forward"),
        (dict, "not the class dict"),
        (3, "takes a callable, got int"),
        ("forward", "takes a callable, got str"),
        (property(scaled), "takes a callable, got property"),
        (_generator, "is a generator or coroutine function"),
        (_coroutine, "is a generator or coroutine function"),
        (_async_generator, "is a generator or coroutine function"),
        (functools.partial(_generator), "is a generator or coroutine function"),
        (module_level, "module_level is captured already"),
        (CapturedNet(), "captured already"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_captured_is_refused(target: Any, message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        capture(target)
    if not isinstance(target, nn.Module):
        with pytest.raises(AnnotationError, match=message):
            capture(max_recordings=2)(target)


def test_double_decoration_is_refused() -> None:
    with pytest.raises(AnnotationError, match="captured already"):
        capture(capture(scaled))
    with pytest.raises(AnnotationError, match="captured already"):
        capture(capture(Net()))
    with pytest.raises(AnnotationError, match="captured already"):
        capture(CapturedNet().step)


def test_static_names_may_lie_below_parameters() -> None:
    capture(scaled, static=["x", "scale.0.k", "x[0]"])
    capture(lambda *args, **kwargs: args[0] + 1, static=["anything"])


def test_disabled_runs_the_body() -> None:
    captured = capture(scaled)
    x = torch.randn(3)
    with config.patch(enabled=False):
        for _ in range(4):
            assert bits(captured(x)) == bits(scaled(x))
    assert recordings(captured).recordings == 0
