"""Regions and training steps that random training programs are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tests.generated.comparison import tensors_of
from tests.generated.gradient_worlds import WIDTH, Part, World
from tests.generated.worlds import fresh
from tests.support.device import DEVICE

# -------------------------------------------------------------------------------------------------------------- regions
Build = Callable[[World], Part]
REGIONS: dict[str, Build] = {}
EAGER: set[str] = set()
"""Regions that can never be recorded."""


SEVERAL = frozenset({"two_outputs", "apart", "passing"})
"""Regions with several results that need gradients."""


def region(build: Build) -> Build:
    """Add to the regions of a program."""
    REGIONS[build.__name__] = build
    return build


def eager_region(build: Build) -> Build:
    """A region that cannot be cut off from the caller's graph, so that it runs eagerly."""
    EAGER.add(build.__name__)
    return region(build)


class Holder(nn.Module):
    """Parameters of functions that are no modules."""

    weight: Tensor
    bias: Tensor

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))


def matrix(seed: int) -> Tensor:
    """A matrix of values for a weight."""
    return fresh((WIDTH, WIDTH), seed=seed) * 0.7


class Block(nn.Module):
    """A module of a norm, a linear layer and an activation."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(drop)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.linear(self.norm(x)))
        return F.gelu(y)


def of_module(w: World, name: str, module: nn.Module, **more: Any) -> Part:
    """A part whose module is captured."""
    return Part(name, module, [w.capture(module)], **more)


@region
def block(w: World) -> Part:
    return of_module(w, "block", Block())


@region
def dropped(w: World) -> Part:
    return of_module(w, "dropped", Block(0.4))


@region
def residual(w: World) -> Part:
    class Residual(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.sigmoid(x) * super().forward(x)

    return of_module(w, "residual", Residual(0.2))


@region
def attention(w: World) -> Part:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, 3 * WIDTH)

        @override
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.a(x).chunk(3, -1)
            y: Tensor = x + torch.softmax(q @ k.t(), -1) @ v
            return y

    return of_module(w, "attention", Attention())


@region
def closure(w: World) -> Part:
    module = Holder(weight=matrix(1))
    weight = module.weight
    return Part("closure", module, [w.capture(lambda x: torch.tanh(x @ weight))])


@region
def looked_up(w: World) -> Part:
    """A function that reads the parameter anew from its module each time."""
    module = Holder(weight=matrix(2), bias=fresh((WIDTH,), seed=3))
    return Part("looked_up", module, [w.capture(lambda x: torch.relu(x @ module.weight + module.bias))])


@region
def two_outputs(w: World) -> Part:
    """A function with two outputs, of which either may stay unused; the second is computed from the first."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        @override
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            one = torch.sigmoid(self.a(x))
            return one, self.b(one * 2).tanh()

    return of_module(w, "two_outputs", Two())


@region
def apart(w: World) -> Part:
    """A function whose outputs share only the input; one is of integers, one has no gradient."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        @override
        def forward(self, x: Tensor) -> dict[str, Any]:
            one, two = torch.relu(self.a(x)), torch.sigmoid(self.b(x))
            return {"one": one, "more": [two, (one, "text", 3)], "best": two.argmax(-1), "mean": one.detach().mean()}

    return of_module(w, "apart", Apart())


@region
def tied(w: World) -> Part:
    """Two functions of one weight."""
    module = Holder(weight=matrix(4))
    there = w.capture(lambda x: torch.tanh(x @ module.weight))
    back = w.capture(lambda x: F.softplus(x @ module.weight.t()))
    return Part("tied", module, [there, back])


@region
def twice(w: World) -> Part:
    module = Holder(weight=matrix(5))
    return Part("twice", module, [w.capture(lambda x: torch.tanh(x @ module.weight) @ module.weight.t())], once=False)


@region
def frozen_bias(w: World) -> Part:
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    first.bias.requires_grad_(False)
    last.weight.requires_grad_(False)
    return of_module(w, "frozen_bias", nn.Sequential(first, nn.Tanh(), last))


@region
def embedded(w: World) -> Part:
    module = nn.Sequential(nn.Embedding(6, WIDTH), nn.Linear(WIDTH, WIDTH))
    return of_module(w, "embedded", module, ids=True)


@region
def normed(w: World) -> Part:
    return of_module(w, "normed", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)))


@region
def noisy(w: World) -> Part:
    module = Holder(weight=matrix(6))

    def body(x: Tensor) -> Tensor:
        y = x @ module.weight
        return y * torch.randn_like(y) + torch.rand(WIDTH)

    return Part("noisy", module, [w.capture(body)])


@region
def cast_inside(w: World) -> Part:
    class Cast(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                return super().forward(x).float()

    return of_module(w, "cast_inside", Cast())


@region
def custom(w: World) -> Part:
    class Cube(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        @override
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return 3 * x * x * grad

    module = Holder(weight=matrix(7))

    def body(x: Tensor) -> Tensor:
        y: Tensor = Cube.apply(x @ module.weight)  # type: ignore[no-untyped-call]
        return y * 0.1

    return Part("custom", module, [w.capture(body)])


@region
def written_inside(w: World) -> Part:
    module = Holder(weight=matrix(8))

    def body(x: Tensor) -> Tensor:
        y = x @ module.weight
        y[0] = y[1].detach() * 2
        return y.add_(1).mul_(x)

    return Part("written_inside", module, [w.capture(body)])


@region
def averaging(w: World) -> Part:
    """A module that keeps a running mean in a buffer and a detached result on an attribute."""

    class Averaging(nn.Module):
        mean: Tensor
        last: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(matrix(9))
            self.register_buffer("mean", torch.zeros(WIDTH))

        @override
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x @ self.weight)
            if self.training:
                self.mean.mul_(0.9).add_(y.detach().mean(0))
                self.last = y.detach() * 2
            return y - self.mean

    return of_module(w, "averaging", Averaging())


@region
def differentiated(w: World) -> Part:
    """A function whose result is a gradient, as forces are."""
    module = Holder(weight=matrix(10))

    def body(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x * 1 if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(torch.tanh(x @ module.weight).sum(), x, create_graph=True)
        return force

    return Part("differentiated", module, [w.capture(body)], once=False)


@region
def recomputed(w: World) -> Part:
    """A captured block under a checkpoint of the caller's."""
    module = Block(0.3)
    inner = w.capture(module)

    def around(x: Tensor) -> Any:
        return checkpoint(inner, x, use_reentrant=False)

    def reentrant(x: Tensor) -> Any:
        return checkpoint(inner, x, use_reentrant=True)

    return Part("recomputed", module, [around, reentrant])


@region
def recomputing(w: World) -> Part:
    """A function with a checkpoint inside."""
    module = Block(0.3)
    return Part("recomputing", module, [w.capture(lambda x: checkpoint(module, x, use_reentrant=False) * 2)])


@region
def branching(w: World) -> Part:
    """A function in which the host reads values, in a checkpoint and outside of one."""
    module = Block(0.3)

    def body(x: Tensor) -> Tensor:
        y: Tensor = module(x) if x.detach().sum() > 0 else checkpoint(module, x, use_reentrant=False) * 2
        if y.detach()[0, 0] > 0:
            y = y + 1
        return y * y

    return Part("branching", module, [w.capture(body)])


@eager_region
def passing(w: World) -> Part:
    """A region that gives its input back as well."""
    module = Block()
    return Part("passing", module, [w.capture(lambda x: (module(x), x))])


# ---------------------------------------------------------------------------------------------------------------- steps
StepBody = Callable[[Callable[[Tensor], Tensor], nn.Module, Any, Tensor], Any]
STEPS: dict[str, StepBody] = {}


def step_body(body: StepBody) -> StepBody:
    """Add to the steps of a program."""
    STEPS[body.__name__] = body
    return body


def loss_of(result: Any, form: int = 3) -> Tensor:
    """A number made of some of a result's tensors that have gradients (or of all, where none has)."""
    floating = [t for t in tensors_of(result) if t.is_floating_point()]
    chosen = [t for t in floating if t.requires_grad] or floating
    chosen = list({id(t): t for t in chosen}.values())
    if len(chosen) > 1 and form % 4 < 2:
        chosen = [chosen[form % 4]]
    kind = form // 4 % 4
    parts = []
    for t in chosen:
        if kind == 0:
            parts.append(t.square().mean())
        elif kind == 1:
            parts.append(t.sum())  # an expanded gradient
        elif kind == 2:
            parts.append((t.t() * fresh(tuple(t.t().shape), seed=3)).sum())  # a transposed one
        else:
            parts.append((t[1:] if t.dim() else t).sum() * 0.5)
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


@step_body
def plain(function: Any, module: nn.Module, optimizer: Any, x: Tensor) -> Any:
    optimizer.zero_grad()
    loss = loss_of(function(x))
    loss.backward()
    optimizer.step()
    return loss.detach()


@step_body
def zeroing(function: Any, module: nn.Module, optimizer: Any, x: Tensor) -> Any:
    optimizer.zero_grad(set_to_none=False)
    loss = loss_of(function(x))
    loss.backward()
    optimizer.step()
    return loss.detach()


@step_body
def zeroing_at_the_end(function: Any, module: nn.Module, optimizer: Any, x: Tensor) -> Any:
    loss = loss_of(function(x))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), loss.detach() * 2


@step_body
def never_zeroing(function: Any, module: nn.Module, optimizer: Any, x: Tensor) -> Any:
    loss_of(function(x)).backward()
    optimizer.step()


@step_body
def clipped(function: Any, module: nn.Module, optimizer: Any, x: Tensor) -> Any:
    optimizer.zero_grad()
    loss = loss_of(function(x))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.3)
    nn.utils.clip_grad_value_(module.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm


@step_body
def accumulating(function: Any, module: nn.Module, optimizer: Any, x: Tensor) -> Any:
    optimizer.zero_grad()
    total = torch.zeros(())
    for part in (x[:2], x[1:]):
        loss = loss_of(function(part)) / 2
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


@step_body
def by_hand(function: Any, module: nn.Module, optimizer: Any, x: Tensor) -> Any:
    """A step that uses ``autograd.grad`` and returns the gradients; ``.grad`` stays as it is."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    loss = loss_of(function(x))
    grads: Sequence[Tensor | None] = torch.autograd.grad(loss, parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                parameter.sub_(grad, alpha=0.05)
    return loss.detach(), [grad for grad in grads if grad is not None]


@step_body
def only_backward(function: Any, module: nn.Module, optimizer: Any, x: Tensor) -> Any:
    """Only the backward pass: gradients accumulate over calls, and the caller runs the optimizer."""
    loss = loss_of(function(x))
    loss.backward()
    return loss.detach()


@step_body
def only_update(function: Any, module: nn.Module, optimizer: Any, x: Tensor) -> Any:
    """Only the optimizer's step, with the gradients that the caller's backward passes left."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "momentum one by one": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False, maximize=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam amsgrad fused": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
if DEVICE.type == "cuda":
    OPTIMIZERS["adam capturable"] = lambda p: torch.optim.Adam(p, lr=0.01, capturable=True)
    OPTIMIZERS["adamw foreach"] = lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True, foreach=True)


def make_part(w: World, number: int, body: int, optimizer: int) -> Part:
    """A region with its optimizer and step."""
    part = REGIONS[REGION_NAMES[number % len(REGIONS)]](w)
    name, kind = STEP_NAMES[body % len(STEPS)], tuple(OPTIMIZERS)[optimizer % len(OPTIMIZERS)]
    function, module = part.functions[0], part.module
    part.optimizer = made = OPTIMIZERS[kind](list(module.parameters()))
    run = STEPS[name]
    part.step, part.said = w.capture(lambda x: run(function, module, made, x)), f"{name}, {kind}"
    return part


REGION_NAMES = tuple(REGIONS)
STEP_NAMES = tuple(STEPS)
