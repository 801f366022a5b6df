"""Models and habits that tutorials and papers' repositories have, in torch alone."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)


def _fit(wrap: Any, model: Any, data: Any, loss_of: Any = None) -> Any:
    """The forward pass is captured, the rest is the usual loop."""
    forward, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.05)

    def step(_: int) -> Any:
        x, y = data()
        loss = (loss_of or F.mse_loss)(forward(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), list(model.parameters())

    return step


def _pair() -> Any:
    return torch.randn(4, 8), torch.randn(4, 8)


class Blocks(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(_mlp() for _ in range(3)), run

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + self.run(block, x)
        return x


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))


def checkpoint_blocks(wrap: Any) -> Any:
    return _fit(wrap, Blocks(functools.partial(checkpoint, use_reentrant=False)), _pair)


def checkpoint_reentrant(wrap: Any) -> Any:
    data = lambda: (torch.randn(4, 8, requires_grad=True), torch.randn(4, 8))  # noqa: E731
    return _fit(wrap, Blocks(functools.partial(checkpoint, use_reentrant=True)), data)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_selective(wrap: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return _fit(wrap, Blocks(functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)), _pair)


def _whole(wrap: Any, model: Any, data: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    @wrap
    def train(x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return lambda _: (train(*data()), list(model.parameters()))


def checkpoint_whole_step(wrap: Any) -> Any:
    return _whole(wrap, Blocks(functools.partial(checkpoint, use_reentrant=False)), _pair)


def checkpoint_whole_selective(wrap: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return _whole(wrap, Blocks(functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)), _pair)


def checkpoint_of_captured(wrap: Any) -> Any:
    """A model with each block captured, whose loop checkpoints them."""
    model = Blocks(functools.partial(checkpoint, use_reentrant=False))
    for block in model.blocks:
        block.forward = wrap(block.forward)  # type: ignore[method-assign]
    return _fit(lambda one: one, model, _pair)


def checkpoint_sequence(wrap: Any) -> Any:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    @wrap
    def loss_of(x: Any, y: Any) -> Any:
        return F.mse_loss(checkpoint_sequential(model, 2, x, use_reentrant=False), y)

    def step(_: int) -> Any:
        loss = loss_of(*_pair())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), list(model.parameters())

    return step


def lstm_packed(wrap: Any) -> Any:
    lstm, head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 2)

    @wrap
    def classify(packed: Any) -> Any:
        _, (hidden, _) = lstm(packed)
        return head(hidden[-1])

    def step(n: int) -> Any:
        lengths = [[5, 3, 2], [5, 5, 1]][n % 2]
        with torch.no_grad():
            return classify(rnn.pack_padded_sequence(torch.randn(3, 5, 8), torch.tensor(lengths), batch_first=True))

    return step


def gru_training(wrap: Any) -> Any:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(8, 16, num_layers=2, batch_first=True, dropout=0.1), nn.Linear(16, 8)

        def forward(self, x: Any) -> Any:
            return self.head(self.gru(x)[0])

    return _fit(wrap, Tagger(), lambda: (torch.randn(2, 5, 8), torch.randn(2, 5, 8)))


def lstm_state(wrap: Any) -> Any:
    """Truncated backpropagation through time: the state of one call goes to the next."""
    lstm, head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 8)
    params = [*lstm.parameters(), *head.parameters()]
    optimizer, kept = torch.optim.SGD(params, lr=0.05), [None]

    @wrap
    def forward(x: Any, state: Any) -> Any:
        y, state = lstm(x, state)
        return head(y), state

    def step(n: int) -> Any:
        y, state = forward(torch.randn(2, 4, 8), kept[0] if n % 16 else None)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept[0] = tuple(one.detach() for one in state)  # type: ignore[call-overload]
        return loss.detach(), params

    return step


class MoE(nn.Module):
    """A mixture of experts as mixtral-like repositories write it: a loop over experts, each on the tokens that chose
    it."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, experts), nn.ModuleList(_mlp() for _ in range(experts))

    def forward(self, x: Any) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out[token] += weights[token, slot, None] * expert(x[token])
        return out


def moe_loop(wrap: Any) -> Any:
    model = MoE().eval()
    forward = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return forward(torch.randn(6, 8))

    return step


def moe_dense(wrap: Any) -> Any:
    class Dense(MoE):
        def forward(self, x: Any) -> Any:
            weights = self.gate(x).softmax(-1)
            return sum(weights[:, number, None] * expert(x) for number, expert in enumerate(self.experts))

    return _fit(wrap, Dense(), _pair)


def batchnorm(wrap: Any) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    step = _fit(wrap, model, lambda: (torch.randn(4, 3, 8, 8), torch.randn(4, 8)))
    return lambda n: (step(n), list(model.buffers())), [lambda: model.eval(), lambda: model.train()]


def normed_weights(wrap: Any) -> Any:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 16)), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(16, 16)),
        nn.ReLU(), parametrizations.orthogonal(nn.Linear(16, 8)),
    )  # fmt: skip
    return _fit(wrap, model, _pair)


def old_weight_norm(wrap: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(
            nn.utils.weight_norm(nn.Linear(8, 16)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(16, 8))
        )
    return _fit(wrap, model, _pair)


def tied(wrap: Any) -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Any) -> Any:
            return self.head(self.embed(ids)).flatten(0, 1)

    data = lambda: (torch.randint(0, 16, (2, 5)), torch.randint(0, 16, (10,)))  # noqa: E731
    return _fit(wrap, Tied(), data, F.cross_entropy)


def quantized(wrap: Any) -> Any:
    class Int8(nn.Module):
        def __init__(self, linear: Any) -> None:
            super().__init__()
            scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
            self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
            self.register_buffer("scale", scale.squeeze(1))

        def forward(self, x: Any) -> Any:
            return F.linear(x, self.weight.to(x.dtype)) * self.scale

    model = nn.Sequential(Int8(nn.Linear(8, 16)), nn.ReLU(), Int8(nn.Linear(16, 4))).eval()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(torch.randn(2, 8))

    return step


def spectral(wrap: Any) -> Any:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 5, dtype=torch.cfloat) * 0.1)

        def forward(self, x: Any) -> Any:
            y = torch.fft.rfft(x)
            return torch.fft.irfft(torch.einsum("bix,iox->box", y, self.weight), n=x.shape[-1])

    return _fit(wrap, Fourier(), lambda: (torch.randn(2, 4, 8), torch.randn(2, 4, 8)))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, scale: float) -> Any:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1), None


def custom_function(wrap: Any) -> Any:
    class Quantizing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), 16.0

        def forward(self, x: Any) -> Any:
            return F.linear(Straight.apply(x, self.scale), Straight.apply(self.linear.weight, self.scale))

    model = Quantizing()
    return _fit(wrap, model, _pair), [lambda: setattr(model, "scale", 4.0)]


def hooked(wrap: Any) -> Any:
    """Activations and gradients are gathered by hooks, as probing and pruning tools do."""
    model, seen = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), dict[str, Any]()
    model[0].register_forward_hook(lambda _m, _i, out: seen.__setitem__("out", out.detach()))
    model[2].register_full_backward_hook(lambda _m, _gi, go: seen.__setitem__("grad", go[0]))
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    step = _fit(wrap, model, _pair)
    return lambda n: (step(n), dict(seen))


def pre_hooked(wrap: Any) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    handle = model[1].register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
    return _fit(wrap, model, _pair), [handle.remove]


def post_accumulate(wrap: Any) -> Any:
    """An optimizer for each parameter that steps in the backward pass."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def hook(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    forward = wrap(model)

    def step(_: int) -> Any:
        x, y = _pair()
        loss = F.mse_loss(forward(x), y)
        loss.backward()
        return loss.detach(), list(model.parameters())

    return step


PROGRAMS = {
    "checkpoint_blocks": checkpoint_blocks,
    "checkpoint_reentrant": checkpoint_reentrant,
    "checkpoint_selective": checkpoint_selective,
    "checkpoint_whole_step": checkpoint_whole_step,
    "checkpoint_whole_selective": checkpoint_whole_selective,
    "checkpoint_of_captured": checkpoint_of_captured,
    "checkpoint_sequence": checkpoint_sequence,
    "lstm_packed": lstm_packed,
    "gru_training": gru_training,
    "lstm_state": lstm_state,
    "moe_loop": moe_loop,
    "moe_dense": moe_dense,
    "batchnorm": batchnorm,
    "normed_weights": normed_weights,
    "old_weight_norm": old_weight_norm,
    "tied": tied,
    "quantized": quantized,
    "spectral": spectral,
    "custom_function": custom_function,
    "hooked": hooked,
    "pre_hooked": pre_hooked,
    "post_accumulate": post_accumulate,
}
