"""``capture.testing``: the asserts pass where they must and fail with the reason where they must."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import AnnotationError, CaptureWarning, capture, config, mark_step_begin, recordings
from capture.core import events
from capture.testing import assert_equal_to_eager, assert_no_eager, assert_only_replays, assert_replayed
from capture.tree import thread_trees
from tests.support.device import DEVICE
from tests.support.nets import Mlp
from tests.support.processes import run_python
from tests.support.unguarded import set_unguarded, unguarded

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    with config.patch(cache=False, verify="off"):
        yield


def body(x: Tensor) -> Tensor:
    return torch.relu(x) * 2 + 1


def reads_on_host(x: Tensor) -> Tensor:
    return x + float(np.from_dlpack(x.sum().cpu()))


# --------------------------------------------------------------------------------------------------------- replays


def test_a_function_that_replays_passes_and_gives_its_result() -> None:
    f, x = capture(body), torch.randn(3)
    assert torch.equal(assert_replayed(f, x), body(x))
    assert recordings(f).replays == 2


def test_a_module_and_keywords_pass() -> None:
    net = capture(Mlp())
    with torch.no_grad():
        assert assert_replayed(net, x=torch.randn(2, 8)).shape == (2, 4)


def test_a_training_step_passes() -> None:
    net = Mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    @capture
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_replayed(step, torch.randn(2, 8))


def test_what_cannot_be_recorded_fails_with_its_finding() -> None:
    f = capture(reads_on_host)
    with pytest.raises(AssertionError, match=r"(?s)none of 6 equal calls was a replay.*CG201.*reads_on_host.*eager:"):
        assert_replayed(f, torch.ones(3))


def test_an_option_that_raises_fails_with_its_finding() -> None:
    f = capture(reads_on_host, fallback="error")
    with pytest.raises(AssertionError, match=r"(?s)cannot be captured.*CG201"):
        assert_replayed(f, torch.ones(3))


def test_switched_off_is_said() -> None:
    f = capture(body)
    with config.patch(enabled=False), pytest.raises(AssertionError, match="switched off"):
        assert_replayed(f, torch.ones(3))


def test_the_functions_own_exceptions_come_out() -> None:
    @capture
    def f(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        assert_replayed(f, torch.ones(3))


def test_what_is_not_captured_is_named() -> None:
    with pytest.raises(AnnotationError, match="body is not a captured function"):
        assert_replayed(body, torch.ones(3))


def test_a_block_of_replays_passes() -> None:
    f, g = capture(body), capture(Mlp())
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(2):  # recordings belong to the order of the calls in a step, which the block repeats
            mark_step_begin()
            f(x), g(x)
        with assert_only_replays(f, g):
            for _ in range(3):
                mark_step_begin()
                f(x), g(x)


def call_in_block(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with assert_only_replays(f):
        for _ in range(3):
            f(x)


def test_a_block_with_another_shape_fails_and_tells_what_happened() -> None:
    f = capture(body)
    assert_replayed(f, torch.randn(3))
    with pytest.raises(AssertionError, match=r"(?s)body: 2 calls ran the body instead of a replay.*observe.*record:"):
        call_in_block(f, torch.randn(4))


def test_a_block_without_a_call_fails() -> None:
    f = capture(body)
    with pytest.raises(AssertionError, match="was not called"), assert_only_replays(f):
        pass


def test_the_blocks_own_exception_is_not_replaced() -> None:
    f = capture(body)
    with pytest.raises(KeyError), assert_only_replays(f):
        raise KeyError


def test_replays_that_are_verified_are_replays() -> None:
    f = capture(body, verify="always")
    assert_replayed(f, torch.randn(3))


# ----------------------------------------------------------------------------------------------------- became eager


def test_recording_is_no_failure() -> None:
    f = capture(body)
    with assert_no_eager():
        for _ in range(3):
            f(torch.randn(3))


def test_a_function_that_dies_in_the_block_is_told_of() -> None:
    def test() -> None:
        with pytest.warns(CaptureWarning, match="CG201"):
            capture(reads_on_host)(torch.ones(3))

    with (
        pytest.raises(AssertionError, match=r"(?s)reads_on_host became eager\nCG201 host-sync.*fix:"),
        assert_no_eager(),
    ):
        test()


def test_a_function_that_was_eager_before_is_told_of() -> None:
    f = capture(reads_on_host)
    with pytest.warns(CaptureWarning):
        f(torch.ones(3))
    with pytest.raises(AssertionError, match="CG201"), assert_no_eager():
        f(torch.ones(3))
    with pytest.raises(AssertionError, match="CG201"), assert_no_eager(f):
        f(torch.ones(5))  # another key for the same reason


def test_other_functions_may_be_eager() -> None:
    f, other = capture(body), capture(reads_on_host)
    with assert_no_eager(f):
        f(torch.ones(3))
        with pytest.warns(CaptureWarning):
            other(torch.ones(3))


def test_no_listener_is_left() -> None:
    with pytest.raises(KeyError), assert_no_eager():
        raise KeyError
    assert events._listeners == ()


# --------------------------------------------------------------------------------------------------- equal to eager


def test_equal_functions_pass() -> None:
    f = capture(body)
    assert assert_equal_to_eager(f, [(torch.randn(3),), {"x": torch.randn(4)}, ((torch.randn(3),), {})]) >= 3


def test_state_arguments_and_draws_are_put_back_and_compared() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.mean: Tensor
            self.last: Tensor | None = None

        @override
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            cache.add_(1)
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.last = torch.dropout(self.linear(x), 0.5, True)
            return self.last

    net, cache = Net(), torch.zeros(2)
    capture(net, static=["cache"])
    with torch.no_grad():
        assert assert_equal_to_eager(net, [(torch.randn(2, 4), cache), (torch.randn(2, 4), cache)]) > 0
    assert cache.tolist() == [6, 6], "the state is as after one pass"


def test_gradients_of_a_part_of_a_model_are_compared() -> None:
    net = Mlp()
    capture(net)
    x = torch.randn(2, 8, requires_grad=True)
    assert assert_equal_to_eager(net, [(x,)], rounds=5) > 0
    assert x.grad is not None
    assert net.first.weight.grad is not None


def test_a_training_step_is_compared_with_its_optimizer() -> None:
    net = Mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)

    @capture
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert assert_equal_to_eager(step, [(torch.randn(2, 8),), (torch.randn(2, 8),)], rounds=4) > 0
    assert len(optimizer.state) == 4


def test_a_loop_that_calls_captured_modules_is_compared() -> None:
    net = Mlp()
    capture(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    assert assert_equal_to_eager(step, [(torch.randn(2, 8),)], rounds=6) > 0


def test_a_module_that_holds_captured_ones_is_compared() -> None:
    net = nn.Sequential(capture(nn.Linear(4, 4)), nn.ReLU(), capture(nn.Linear(4, 4)))
    with torch.inference_mode():
        assert assert_equal_to_eager(net, [(torch.randn(2, 4),)]) > 0


def test_a_method_and_a_generator_are_compared() -> None:
    class Noise:
        def __init__(self) -> None:
            self.scale = torch.ones(3)

        @capture
        def add(self, x: Tensor, generator: torch.Generator) -> Tensor:
            self.scale = self.scale * 2
            return x + self.scale * torch.randn(3, generator=generator)

    noise, generator = Noise(), torch.Generator(DEVICE).manual_seed(3)
    assert assert_equal_to_eager(noise.add, [(torch.ones(3), generator)], rounds=5) > 0
    assert noise.scale.tolist() == [32, 32, 32]


def test_tensors_of_other_layouts_are_compared() -> None:
    @capture
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to_sparse(), torch.nested.nested_tensor([x, x])

    assert assert_equal_to_eager(f, [(torch.arange(3.0),)]) == 0


def test_exceptions_are_compared() -> None:
    @capture
    def f(x: Tensor) -> Tensor:
        if x.shape[0] > 3:
            raise ValueError("too long")
        return x + 1

    assert assert_equal_to_eager(f, [(torch.ones(3),), (torch.ones(4),)]) > 0


def test_the_first_difference_is_told() -> None:
    @capture
    def f(x: Tensor) -> Tensor:
        return x + hidden()

    def hidden() -> int:
        return next(numbers)

    numbers = iter(range(100))
    with pytest.raises(AssertionError) as info:
        assert_equal_to_eager(f, [(torch.zeros(2, 3),)])
    text = str(info.value)
    assert "call 1 of 3 (observation, eager call) differs from eager in result `output`" in text
    assert "6 of 6 elements differ, the first at (0, 0): 3.0, eager 0.0" in text
    assert "call: x=float32[2, 3]" in text
    assert "the function is not deterministic" in text


def test_a_replay_that_differs_is_told() -> None:
    @capture
    def f(x: Tensor) -> Tensor:
        return x * unguarded()

    def step(x: Tensor, scale: int) -> Tensor:
        set_unguarded(scale)
        return f(x)

    calls = [(torch.ones(2), scale) for scale in (3, 3, 3, 3, 4)]
    with pytest.raises(AssertionError) as info:
        assert_equal_to_eager(step, calls)
    text = str(info.value)
    assert "call 5 of 15 (replay) differs from eager in result `output`: 2 of 2 elements differ" in text
    assert "the first at (0,): 3.0, eager 4.0" in text
    assert "call: x=float32[2]" in text
    assert "deterministic" not in text


def test_a_wrong_case_is_a_type_error() -> None:
    f = capture(body)
    with pytest.raises(TypeError, match="write a tuple"):
        assert_equal_to_eager(f, [torch.ones(3)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="missing"):
        assert_equal_to_eager(f, [()])


# ---------------------------------------------------------------------------------------------------------- imports

PLUGIN_TEST = """
import numpy as np
import torch
from capture import capture

@capture
def good(x):
    return x + 1

@capture
def bad(x):
    return x + float(np.from_dlpack(x.sum().cpu()))

def test_good(capture_no_eager):
    good(torch.ones(2))

def test_bad(capture_no_eager):
    bad(torch.ones(2))

def test_bad_without():
    bad(torch.ones(2))
"""


@pytest.mark.slow
def test_the_fixture_fails_the_test_that_became_eager(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["capture.testing.plugin"]\n')
    (tmp_path / "test_them.py").write_text(PLUGIN_TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "AssertionError: test_them.bad became eager" in done.stdout, done.stdout
    assert "3 passed, 1 warning, 1 error" in done.stdout or "3 passed, 2 warnings, 1 error" in done.stdout
    # pytest's summary, which in CI gives the whole message, over several lines
    assert any(line.startswith("ERROR") and "test_bad" in line for line in done.stdout.splitlines())
    assert "CG201 host-sync" in done.stdout


def test_the_asserts_import_no_pytest() -> None:
    code = "import sys, capture.testing; sys.exit('pytest' in sys.modules or '_pytest' in sys.modules)"
    assert run_python(code).returncode == 0


def test_the_device_is_the_suites() -> None:
    f = capture(body)
    assert assert_replayed(f, torch.randn(3)).device == DEVICE
