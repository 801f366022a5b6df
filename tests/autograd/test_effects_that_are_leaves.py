"""Leaf tensors that a body makes, and keeps in state or returns: a replay makes leaves of the same class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.support.device import DEVICE
from tests.support.regions import bits

Body = Callable[[Any, Tensor], Any]


class Holder:
    """An object of a plain class."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Holder()


def needing(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_()


def put(holder: Any, x: Tensor, *, value: Any) -> Tensor:
    holder.p = value
    return x + 1


def tagged(parameter: Any) -> Any:
    parameter.tag = 3
    return parameter


BODIES: dict[str, Body] = {
    "parameter of a module": lambda net, x: put(net, x, value=nn.Parameter(x * 2)),
    "parameter without gradients": lambda net, x: put(net, x, value=nn.Parameter(x * 2, requires_grad=False)),
    "parameter of an object": lambda net, x: put(net.kept, x, value=nn.Parameter(x * 2)),
    "plain leaf of a module": lambda net, x: put(net, x, value=needing(x * 2)),
    "plain leaf of an object": lambda net, x: put(net.kept, x, value=needing(x * 2)),
    "buffer": lambda net, x: put(net, x, value=nn.Buffer(x * 3, persistent=False)),
    "parameter on an argument": lambda net, x: put(net.kept, x, value=nn.Parameter(x)),
    "tagged": lambda net, x: put(net.kept, x, value=tagged(nn.Parameter(x * 2))),
    "several": lambda net, x: put(net.kept, x, value=[nn.Parameter(one) for one in (x * 2).chunk(2)]),
    "given": lambda net, x: (nn.Parameter(x * 2), needing(x * 3)),
    "given and kept": lambda net, x: (put(net, x, value=nn.Parameter(x * 2)), net.p),
    "detached and read": lambda net, x: put(net, x, value=nn.Parameter(x * 2)) + net.p.detach(),
}
EAGER: dict[str, Body] = {
    "with a gradient": lambda net, x: put(net.kept, x, value=with_gradient(nn.Parameter(x * 2))),
    "with a hook": lambda net, x: put(net.kept, x, value=hooked(nn.Parameter(x * 2))),
    "given with a gradient": lambda net, x: with_gradient(needing(x * 2)),
    "with an object on it": lambda net, x: put(net.kept, x, value=marked(nn.Parameter(x * 2))),
}


def with_gradient(leaf: Tensor) -> Tensor:
    (leaf * leaf).sum().backward()
    return leaf


def hooked(leaf: Tensor) -> Tensor:
    leaf.register_hook(lambda grad: grad * 2)
    return leaf


def marked(leaf: Any) -> Tensor:
    leaf.mark = Holder()
    return leaf  # type: ignore[no-any-return]


def tensors(value: Any) -> list[Tensor]:
    several = value if isinstance(value, (tuple, list)) else [value]
    return [one for one in several if isinstance(one, Tensor)]


def kept(net: Net, result: Any) -> list[Tensor]:
    return [*tensors(result), *tensors(getattr(net, "p", None)), *tensors(getattr(net.kept, "p", None))]


def told(net: Net, result: Any) -> list[Any]:
    """All that code can see of the tensors a call keeps, and the gradients that a backward pass from them leaves."""
    facts: list[Any] = [
        (bits(made), type(made), made.requires_grad, made.is_leaf, sorted(made.__dict__), bits(made.grad), made.dtype)
        for made in kept(net, result)
    ]
    facts += [sorted(net._parameters), sorted(net._buffers), sorted(net.state_dict())]
    leaves = [leaf for leaf in kept(net, result) if leaf.requires_grad]
    if leaves:
        sum((leaf * leaf).sum() for leaf in leaves).backward()  # type: ignore[union-attr]
        facts += [bits(leaf.grad) for leaf in leaves]
        with torch.no_grad():
            facts += [bits(leaf.add_(1)) for leaf in leaves]
    return facts


def compare(body: Body, calls: int = 8) -> Any:
    net, plain = Net(), Net()
    captured = capture(lambda x: body(net, x))
    held = []
    for call in range(calls):
        x, twin = (torch.full((4,), call + 1.0, device=DEVICE) for _ in range(2))
        result, expected = captured(x), body(plain, twin)
        assert told(net, result) == told(plain, expected), call
        held.append((kept(net, result)[-1], kept(plain, expected)[-1]))
        assert [bits(tensor) for tensor, _ in held] == [bits(twin) for _, twin in held], call
    return captured


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", BODIES)
def test_a_replay_makes_leaves_of_the_same_class(name: str) -> None:
    count = recordings(compare(BODIES[name]))

    assert count.replays >= 2, count
    assert count.eager_calls == 0, count


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", EAGER)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_what_a_leaf_carries_for_its_graphs_is_eager(name: str) -> None:
    assert recordings(compare(EAGER[name])).replays == 0


def test_a_leaf_that_is_kept_only_by_a_graph() -> None:
    """The caller's graph has saved the leaf, and no replay writes its memory before the backward pass."""
    body = capture(lambda x: nn.Parameter(x * 2))
    losses, expected = [], []
    for call in range(6):
        x = torch.full((4,), call + 1.0, device=DEVICE, requires_grad=True)
        losses.append((x, (body(x.detach()) * x).sum()))
        expected.append([2 * (call + 1.0)] * 4)

    for _, loss in losses:
        loss.backward()

    assert [x.grad.tolist() for x, _ in losses if x.grad is not None] == expected
    assert recordings(body).replays >= 3


def test_a_leaf_beside_one_that_has_a_graph_is_eager() -> None:
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    holder = Holder()

    def body(x: Tensor) -> Tensor:
        holder.p = nn.Parameter(x * 2)  # type: ignore[attr-defined]
        return x * weight

    captured = capture(body)
    with pytest.warns(match="CG501"):
        results = [captured(torch.full((4,), call + 1.0, device=DEVICE)).tolist() for call in range(4)]

    assert results == [[call + 1.0] * 4 for call in range(4)]
    assert recordings(captured).replays == 0
