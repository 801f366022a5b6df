"""Tensor subclasses that hold other tensors (``DTensor`` is one) as arguments, parameters and results: recordings read
and write the tensors that they hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from typing_extensions import override

from capture import CaptureWarning, capture, mark_step_begin, recordings
from tests.support.device import AGAIN, DEVICE, EXECUTES, know_nothing_of_writes

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no process groups")


class Pair(torch.Tensor):
    """Values with their errors; every operator is applied to either in the same way. ``unit`` is no tensor."""

    value: Tensor
    error: Tensor
    unit: str

    @staticmethod
    def __new__(cls, value: Tensor, error: Tensor, unit: str) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)
        made.value, made.error, made.unit = value, error, unit
        return made

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["value", "error"], self.unit

    @staticmethod
    def __tensor_unflatten__(held: dict[str, Tensor], unit: str, size: Any, stride: Any) -> Pair:
        return Pair(held["value"], held["error"], unit)

    @classmethod
    @override
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        pairs = [arg for arg in args if isinstance(arg, Pair)]
        parts = [op(*[getattr(arg, name) if isinstance(arg, Pair) else arg for arg in args], **(kwargs or {}))
                 for name in ("value", "error")]  # fmt: skip
        return Pair(parts[0], parts[1], pairs[0].unit)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo" if DEVICE.type == "cpu" else "nccl", store=store, rank=0, world_size=1)
    yield init_device_mesh(DEVICE.type, (1,))
    dist.destroy_process_group()


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 6)), generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)


def pair(seed: int, unit: str = "m") -> Pair:
    return Pair(numbers(seed), numbers(seed + 1), unit)


def same(result: Any, expected: Any) -> None:
    assert type(result) is type(expected)
    if isinstance(result, Pair):
        assert result.unit == expected.unit
        same(result.value, expected.value)
        same(result.error, expected.error)
    elif isinstance(result, DTensor):
        assert (result.placements, result.device_mesh, result.shape) == (
            expected.placements,
            expected.device_mesh,
            expected.shape,
        )
        assert result.stride() == expected.stride()
        same(result.to_local(), expected.to_local())
    else:
        assert torch.equal(result, expected)


@torch.no_grad()
def test_of_a_users_own_kind() -> None:
    """The key has its ``unit``; results are of its class, and keep their values while later calls run."""

    def body(x: Any, scale: Tensor) -> dict[str, Any]:
        y = x * scale
        return {"pair": y + y, "plain": y.value.sum(), "given": x, "error": y.error}

    captured, held = capture(body), []
    for number in range(12):
        x, scale = pair(number, "m" if number % 2 else "s"), numbers(99, 6)
        result, expected = captured(x, scale), body(x, scale)
        assert result["given"] is x
        for name in ("pair", "plain", "error"):
            same(result[name], expected[name])
        held.append((result["pair"], expected["pair"]))
    for result, expected in held:
        same(result, expected)
    assert recordings(captured).recordings in (2 * (1 + AGAIN), 2 + 3 * AGAIN)  # a place is found in one go, or in two
    assert recordings(captured).eager_calls == 0


@torch.no_grad()
def test_written_in_place() -> None:
    @capture
    def add(x: Any, y: Any) -> Any:
        x.add_(y)
        return x

    for number in range(8):
        x, y = pair(number), pair(number + 50)
        value = x.value.clone()
        mark_step_begin()
        assert add(x, y) is x
        assert torch.equal(x.value, value + y.value)
    assert recordings(add).replays == 6


@torch.no_grad()
def test_placements_are_in_the_key(mesh: DeviceMesh) -> None:
    def body(x: Any) -> Any:
        return x * 2 + 1, (x * 3).redistribute(mesh, [Replicate()])

    captured = capture(body)
    placements: list[Any] = [Shard(0), Shard(1), Replicate(), Partial()]
    for number in range(16):
        x = DTensor.from_local(numbers(number), mesh, [placements[number % 4]])
        for result, expected in zip(captured(x), body(x), strict=True):
            same(result, expected)
        del result
    assert recordings(captured).recordings == 4
    assert recordings(captured).replays in (7, 8)  # torch reads its own source in the first such run of a process


def test_parameters_gradients_and_optimizers(mesh: DeviceMesh) -> None:
    """A whole step: gradients set and accumulated, momentum, clipping, and a parameter written between two steps."""

    def train(captures: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = distribute_module(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: DTensor) -> Tensor:
            optimizer.zero_grad()
            for part in (x, x * 2):
                model(part).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss: Tensor = model(x).square().mean().detach().full_tensor()
            return loss

        run, losses = (capture(step) if captures else step), []
        for number in range(14):
            mark_step_begin()
            losses.append(run(distribute_tensor(numbers(number), mesh, [Shard(0)])).clone())
            if number == 9:
                weight = model.get_parameter("0.weight")
                with torch.no_grad():
                    weight.mul_(0.5)
        if captures:
            # torch reads its own source once: the recording then differs from the run before, and its call is undone
            undone = 0 if EXECUTES else 1
            assert recordings(run).replays >= 9 - undone, recordings(run)
            assert recordings(run).eager_calls <= undone
        states = [state["momentum_buffer"] for state in optimizer.state.values()]
        kept: list[Any] = [*(p.detach() for p in model.parameters()), *(p.grad for p in model.parameters()), *states]
        return [*losses, *[kept_tensor.full_tensor() for kept_tensor in kept]]

    for result, expected in zip(train(True), train(False), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("knows", [True, False], ids=["as it is", "as with graphs"])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_true_whatever_happens_between_steps(
    mesh: DeviceMesh, knows: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows:
        know_nothing_of_writes(monkeypatch)

    def train(captures: bool) -> tuple[list[list[Any]], Any]:
        chance = random.Random(seed)
        torch.manual_seed(0)
        model = distribute_module(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        parameters: list[Any] = list(model.parameters())

        def step(x: DTensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            value: Tensor = loss.detach().full_tensor()
            return value

        run, seen, held = (capture(step) if captures else step), list[Any](), list[Any]()
        for number in range(20):
            mark_step_begin()
            seen.append(run(distribute_tensor(numbers(number), mesh, [Shard(0)])).tolist())
            parameter = parameters[chance.randrange(len(parameters))]
            action = chance.choice(["nothing", "nothing", "keep", "keep what it holds", "keep a view", "write", "drop"])
            if number > 5 and action == "keep":
                held.append(parameter.grad)
            elif number > 5 and action == "keep what it holds":
                held.append(parameter.grad._local_tensor)
            elif number > 5 and action == "keep a view":
                held.append(parameter.grad.to_local()[:1])
            elif number > 5 and action == "write":
                with torch.no_grad():
                    parameter.grad._local_tensor.mul_(2)
            elif number > 5 and action == "drop":
                parameter.grad = None
            tensors = [*held, *[p.grad for p in parameters if p.grad is not None], *[p.detach() for p in parameters]]
            seen.append([(x.to_local() if isinstance(x, DTensor) else x).tolist() for x in tensors])
            del tensors, parameter
        return seen, run

    (observed, run), (expected, _) = train(True), train(False)
    assert observed == expected
    assert recordings(run).replays >= 8, recordings(run)


def test_gradients_that_nobody_takes_stay_in_the_pool(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do for plain parameters; this is about distributed ones."""
    know_nothing_of_writes(monkeypatch)
    model = distribute_module(nn.Linear(6, 3).to(DEVICE), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: DTensor) -> Tensor:
        optimizer.zero_grad()
        loss: Any = model(x).square().mean()
        loss.backward()
        optimizer.step()
        value: Tensor = loss.detach().full_tensor()
        return value

    run = capture(step)
    for number in range(12):
        mark_step_begin()
        run(distribute_tensor(numbers(number), mesh, [Shard(0)]))
    assert recordings(run).recordings == 1
    assert recordings(run).kept_outputs == 0


def test_gradients_outside_keep_it_eager(mesh: DeviceMesh) -> None:
    """Autograd's graph belongs to the outer tensor; the tensors that it holds are not in it."""
    weight = numbers(0, 6, 6).requires_grad_()
    twin = weight.detach().clone().requires_grad_()

    def body(x: Any, weight: Any) -> Any:
        return x @ weight

    captured = capture(body)

    def train() -> None:
        for number in range(4):
            for function, own in ((captured, weight), (body, twin)):
                x = distribute_tensor(numbers(number), mesh, [Replicate()])
                function(x, DTensor.from_local(own, mesh, [Replicate()])).sum().to_local().backward()

    with pytest.warns(CaptureWarning, match=r"CG107.*DTensor that needs gradients"):
        train()
    assert weight.grad is not None
    assert twin.grad is not None
    assert torch.equal(weight.grad, twin.grad)
    assert recordings(captured).recordings == 0


def test_a_parameter_that_is_one_is_made_again_in_replays(mesh: DeviceMesh) -> None:
    """``nn.Parameter`` of such a tensor keeps its class, and only marks it as a parameter."""
    kept: Any = nn.Module()
    wanted: Any = nn.Module()

    def body(module: Any, x: Tensor) -> Tensor:
        module.p = nn.Parameter(DTensor.from_local(x * 2, mesh, [Replicate()], run_check=False))
        return x + 1

    captured = capture(lambda x: body(kept, x))
    for seed in range(6):
        mark_step_begin()
        captured(numbers(seed))
        body(wanted, numbers(seed))
        for module in (kept, wanted):
            (module.p * 3).sum().backward()
        same(kept.p, wanted.p)
        same(kept.p.grad, wanted.p.grad)
        assert isinstance(kept.p, nn.Parameter)
        assert [*kept._parameters] == ["p"]
    assert recordings(captured).replays >= 3


def test_one_with_a_graph_on_an_attribute_keeps_it(mesh: DeviceMesh) -> None:
    kept: Any = nn.Module()
    weight = distribute_tensor(numbers(0), mesh, [Replicate()]).requires_grad_()

    def body(x: Tensor) -> Tensor:
        kept.last = weight * 2
        return x + 1

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="CG107"):
        captured(numbers(1))
    for seed in range(4):
        captured(numbers(seed))
        weight.grad = None
        kept.last.sum().backward()
        assert weight.grad is not None
    assert recordings(captured).replays == 0
