"""Whole steps whose optimizer does in each step what no recording does again: as eager bit for bit, in losses, weights,
gradients and the optimizer's state, and replayed, with the optimizer's step between two segments."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from typing_extensions import override

from capture import CaptureWarning, capture, island, recordings
from tests.support.device import DEVICE
from tests.support.device import ISLANDS as REPLAYS

CALLS = 24
pytestmark = [] if REPLAYS else [pytest.mark.filterwarnings("ignore::capture.CaptureWarning")]


class CountsInPython(optim.Optimizer):
    """An optimizer that counts its steps in a Python attribute."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(0.9).add_(parameter.grad, alpha=0.1)
                    parameter.add_(mean, alpha=-group["lr"] / (1 - 0.9**self.count))


class CountsInState(optim.Optimizer):
    """An optimizer that counts steps in Python, in the state of each parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.add_(parameter.grad, alpha=-group["lr"] / state["step"])


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam": lambda p: optim.Adam(p, lr=1e-2),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "foreach": lambda p: optim.AdamW(p, foreach=True),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adagrad": optim.Adagrad,
    "Adamax": optim.Adamax,
    "Adafactor": optim.Adafactor,
    "ASGD": optim.ASGD,
    "Rprop": optim.Rprop,
    "CountsInPython": CountsInPython,
    "CountsInState": CountsInState,
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "two groups": lambda p: optim.Adam([{"params": [one], "lr": 1e-2 * at} for at, one in enumerate(p)]),
}


class Step:
    """A whole step on a model of its own."""

    def __init__(self, make: Callable[[Any], optim.Optimizer], *options: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).to(DEVICE)
        self.optimizer = make(self.model.parameters())
        self.options = options
        schedule = "schedule" in options or "scheduled inside" in options
        self.schedule = optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n)) if schedule else None
        stepping: Any = self.schedule
        model, optimizer, none = self.model, self.optimizer, "keeps gradients" not in options
        self.losses = losses = list[float]()
        log: Any = island(lambda loss: losses.append(loss.item()))

        def step(x: Tensor, y: Tensor) -> Any:
            if "trained inside" in options:
                model.train()
            if "zeroed first" in options:
                optimizer.zero_grad(set_to_none=none)
            loss = nn.functional.mse_loss(model(x), y)
            if "logged first" in options:
                log(loss.detach())
            loss.backward()
            if "logged" in options:
                log(loss.detach())
            if "clipped" in options:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
            if "closure" in options:
                optimizer.step(lambda: 0.0)
            else:
                optimizer.step()
            if "scheduled inside" in options:
                stepping.step()
            if "zeroed first" not in options:
                optimizer.zero_grad(set_to_none=none)
            if "told" in options:
                return {"loss": loss.item()}
            return loss.detach()

        self.function: Any = step

    def state(self) -> list[Any]:
        """Weights, gradients and the optimizer's state after a step."""
        parameters = list(self.model.parameters())
        grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        schedule = None if self.schedule is None else self.schedule.state_dict()
        flags = [module.training for module in self.model.modules()]
        return [
            *parameters,
            *grads,
            flags,
            schedule and (schedule["last_epoch"], schedule["_last_lr"]),
            self.optimizer.state_dict(),
            vars(self.optimizer).get("count"),
            self.losses,
        ]


def same(result: Any, expected: Any) -> bool:
    if isinstance(result, Tensor):
        return torch.equal(result, expected)
    if isinstance(result, dict):
        return result.keys() == expected.keys() and all(same(result[key], expected[key]) for key in result)
    if isinstance(result, (list, tuple)):
        return len(result) == len(expected) and all(map(same, result, expected))
    return bool(result == expected)


def batches(calls: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator("cpu").manual_seed(1)
    for _ in range(calls):
        x, y = (
            torch.randn(3, 4, generator=generator, device="cpu"),
            torch.randn(3, 1, generator=generator, device="cpu"),
        )
        yield x.to(DEVICE), y.to(DEVICE)


def trained(name: str, *options: str, calls: int = CALLS) -> Any:
    """The captured step, once it was compared with an eager one in each call."""
    eager, ours = Step(OPTIMIZERS[name], *options), Step(OPTIMIZERS[name], *options)
    function = capture(ours.function)
    for number, (x, y) in enumerate(batches(calls)):
        assert same(eager.function(x, y), function(x, y)), number
        assert same(eager.state(), ours.state()), number
        for step in (eager, ours):
            if step.schedule is not None and "scheduled inside" not in options:
                step.schedule.step()
            if "trained inside" in options:
                step.model.eval()
    return function


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_step_is_as_eager_and_replays(name: str) -> None:
    counters = recordings(trained(name))
    if REPLAYS:
        assert counters.replays >= CALLS - 7, str(counters)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("options", [
    ("zeroed first",), ("keeps gradients",), ("zeroed first", "keeps gradients"), ("clipped",), ("schedule",),
    ("clipped", "schedule", "zeroed first"), ("logged first", "logged"), ("logged", "told"), ("scheduled inside",),
    ("scheduled inside", "zeroed first", "told"), ("trained inside",), ("trained inside", "scheduled inside", "told"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["AdamW", "CountsInPython", "SGD"])
def test_other_steps_are_as_eager_and_replay(name: str, options: tuple[str, ...]) -> None:
    counters = recordings(trained(name, *options))
    if REPLAYS:
        assert counters.replays >= CALLS - 8, str(counters)


def test_steps_of_two_optimizers_are_as_eager_and_replay() -> None:
    def make() -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        nets = [nn.Linear(4, 4).to(DEVICE), nn.Linear(4, 1).to(DEVICE)]
        optimizers = [optim.Adam(nets[0].parameters()), optim.AdamW(nets[1].parameters())]

        def step(x: Tensor, y: Tensor) -> Tensor:
            for _ in range(2):
                loss = nn.functional.mse_loss(nets[1](nets[0](x)), y)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
            return loss.detach()

        return step, [*nets, *optimizers]

    (eager, theirs), (ours, held) = make(), make()
    function = capture(ours)
    for number, (x, y) in enumerate(batches(CALLS)):
        assert torch.equal(eager(x, y), function(x, y)), number
        assert same([holder.state_dict() for holder in theirs], [holder.state_dict() for holder in held]), number
    if REPLAYS:
        assert recordings(function).replays >= CALLS - 8, str(recordings(function))


def test_step_with_a_closure_is_as_eager() -> None:
    """Such a step is no island. Recordings that operators get numbers in hold it like other code."""
    takes_reads = REPLAYS and DEVICE.type == "cpu"
    with (
        contextlib.nullcontext()
        if takes_reads
        else pytest.warns(CaptureWarning, match="fused=True|capturable=True" if REPLAYS else "")
    ):
        function = trained("AdamW", "closure", calls=20)
    counters = recordings(function)
    assert counters.replays >= 8 if takes_reads else counters.replays == 0
    if REPLAYS:
        assert counters.observations + counters.recorded_calls <= 8, str(counters)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_error_of_a_step_leaves_what_eager_leaves(when: str) -> None:
    steps = [Step(OPTIMIZERS["AdamW"]) for _ in range(2)]
    functions = [steps[0].function, capture(steps[1].function)]
    due: list[int] = []

    def fails(*_: Any) -> None:
        if due:
            raise RuntimeError("no step")

    for step in steps:
        step.optimizer.register_step_pre_hook(fails) if when == "before" else step.optimizer.register_step_post_hook(
            fails
        )
    for number, (x, y) in enumerate(batches(CALLS)):
        due[:] = [1] if number in (12, 16) else []
        for function in functions:
            if due:
                with pytest.raises(RuntimeError, match="no step"):
                    function(x, y)
                for parameter in (p for step in steps for p in step.model.parameters() if function is functions[1]):
                    assert parameter.grad is not None
            else:
                function(x, y)
        assert same(steps[0].state(), steps[1].state()), number


def test_a_copy_of_the_optimizer_takes_its_own_steps() -> None:
    ours = Step(OPTIMIZERS["Adam"])
    function = capture(ours.function)
    for x, y in batches(8):
        function(x, y)
    assert "step" not in vars(ours.optimizer)
    assert copy.deepcopy(ours.optimizer).state_dict().keys() == ours.optimizer.state_dict().keys()


def test_settings_changed_between_steps_are_used() -> None:
    eager, ours = Step(OPTIMIZERS["Adam"]), Step(OPTIMIZERS["Adam"])
    function = capture(ours.function)
    for number, (x, y) in enumerate(batches(CALLS)):
        for step in (eager, ours):
            step.optimizer.param_groups[0]["betas"] = (0.9 - number / 100, 0.99)
            step.optimizer.param_groups[0]["weight_decay"] = number / 1000
        assert torch.equal(eager.function(x, y), function(x, y)), number
        assert same(eager.state(), ours.state()), number
    if REPLAYS:
        assert recordings(function).replays > CALLS // 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["AdamW fused", "SGD"])
@pytest.mark.parametrize("kind", ["one cycle", "cyclic"])
def test_a_schedule_of_the_momentum_too(name: str, kind: str) -> None:
    """Adam's momentum is in a tuple (``betas``), which the schedule replaces before each step."""

    def make(parameters: Any) -> optim.Optimizer:
        if name == "SGD":
            return optim.SGD(parameters, lr=0.01, momentum=0.9)
        return optim.AdamW(parameters, lr=0.01, fused=True)

    eager, ours = Step(make), Step(make)
    for step in (eager, ours):
        if kind == "one cycle":
            step.schedule = optim.lr_scheduler.OneCycleLR(step.optimizer, 0.1, total_steps=2 * CALLS)  # type: ignore[assignment]
        else:
            step.schedule = optim.lr_scheduler.CyclicLR(step.optimizer, 0.01, 0.1, step_size_up=CALLS)  # type: ignore[assignment]
    function = capture(ours.function)
    for number, (x, y) in enumerate(batches(CALLS)):
        assert torch.equal(eager.function(x, y), function(x, y)), number
        assert same(eager.state(), ours.state()), number
        for step in (eager, ours):
            assert step.schedule is not None
            step.schedule.step()
    if REPLAYS:
        assert recordings(function).replays >= CALLS - 8, str(recordings(function))
