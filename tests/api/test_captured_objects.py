"""State of captured functions and objects: copies, pickles, transforms, forks and threads."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import (
    AnnotationError,
    CaptureWarning,
    UncapturableError,
    capture,
    config,
    explain,
    plans,
    recordings,
    release,
    report,
    reset,
)
from capture.api.decorator import captured_states
from capture.rules.compile_plan import compile_plan
from capture.runtime import dispatch
from tests.support.decorated import CapturedNet, Net, bits, check_replays, module_level, scaled
from tests.support.decorated import fresh as fresh
from tests.support.device import use_device
from tests.support.processes import run_python

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
    """A setting that is assigned as an attribute of the module would have no effect anywhere."""
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


def test_what_is_around_a_call_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a transform of ``torch.func`` rules run and warn in the first call alone; ``fallback="error"`` and
    ``config.refuse`` raise in every call."""
    compiled: list[str | None] = []

    def counted(annotation: Any, facts: Any) -> Any:
        compiled.append(facts.around)
        return compile_plan(annotation, facts)

    monkeypatch.setattr(dispatch, "compile_plan", counted)
    captured, x = capture(scaled), torch.randn(3, 4)
    for _ in range(2):
        with pytest.warns(CaptureWarning, match="CG805"):
            torch.vmap(captured)(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                assert bits(torch.vmap(captured)(x)) == bits(torch.vmap(scaled)(x))
        assert [finding.code for finding in recordings(captured).findings] == ["CG805"]
        reset(captured)
    assert compiled == ["a transform of torch.func"] * 2
    strict = capture(scaled, fallback="error")
    for _ in range(3):
        with pytest.raises(UncapturableError, match="CG805"):
            torch.vmap(strict)(x)
    with pytest.warns(CaptureWarning, match="CG805"):
        torch.vmap(captured)(x)
    for _ in range(3):
        with config.patch(refuse=frozenset(["CG805"])), pytest.raises(UncapturableError, match="CG805"):
            torch.vmap(captured)(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own torch.jit.script
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


@pytest.mark.slow
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
    done = run_python(textwrap.dedent(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_torch_keeps_from_its_first_look_is_its_own() -> None:
    """torch computes the list of functions that modes do not see once, when it is first asked. What is asked first in a
    watched body, as importing dynamo does there, must be the same list."""
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
