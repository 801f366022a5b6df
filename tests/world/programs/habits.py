"""Batches of many types, games of two networks, and other habits of papers' repositories, in torch alone."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.world.programs.models_ import _fit, _mlp, _pair


@dataclasses.dataclass
class Batch:
    x: Any
    length: int
    extra: Any = None


def _batches(wrap: Any, make: Any) -> Any:
    layer = nn.Linear(8, 4)

    @wrap
    def forward(batch: Any) -> Any:
        y = layer(batch.x)
        return types.SimpleNamespace(logits=y, loss=y.mean(), length=batch.length)

    def step(_: int) -> Any:
        with torch.no_grad():
            found = forward(make())
        return found.logits, found.loss, found.length

    return step


def dataclass_batch(wrap: Any) -> Any:
    return _batches(wrap, lambda: Batch(torch.randn(2, 8), 2, {"mask": torch.ones(2)}))


def namespace_batch(wrap: Any) -> Any:
    return _batches(wrap, lambda: types.SimpleNamespace(x=torch.randn(2, 8), length=2, meta={"ids": [1, 2]}))


class UserBatch(collections.UserDict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def user_dict_batch(wrap: Any) -> Any:
    def make() -> Any:
        batch = UserBatch()
        batch["x"], batch["length"] = torch.randn(2, 8), 2
        return batch

    return _batches(wrap, make)


class Slotted:
    __slots__ = ("length", "x")

    def __init__(self, x: Any, length: int) -> None:
        self.x, self.length = x, length


def slotted_batch(wrap: Any) -> Any:
    return _batches(wrap, lambda: Slotted(torch.randn(2, 8), 2))


def defaultdict_batch(wrap: Any) -> Any:
    layer = nn.Linear(8, 4)

    @wrap
    def forward(batch: Any) -> Any:
        out: Any = collections.defaultdict(list)
        for name, ones in batch.items():
            for one in ones:
                out[name].append(layer(one))
        return out

    def step(_: int) -> Any:
        batch: Any = collections.defaultdict(list)
        batch["a"].append(torch.randn(2, 8))
        batch["b"] += [torch.randn(1, 8), torch.randn(3, 8)]
        with torch.no_grad():
            return forward(batch)

    return step


class Masked:
    """Not a Tensor: an object with a tensor protocol of its own."""

    def __init__(self, data: Any, mask: Any) -> None:
        self.data, self.mask = data, mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        mask = next(one.mask for one in args if isinstance(one, Masked))
        plain = [one.data if isinstance(one, Masked) else one for one in args]
        return Masked(func(*plain, **(kwargs or {})), mask)


def duck_tensor(wrap: Any) -> Any:
    weight = torch.randn(4, 8)

    @wrap
    def forward(x: Any) -> Any:
        return torch.tanh(F.linear(x, weight))

    def step(_: int) -> Any:
        found = forward(Masked(torch.randn(2, 8), torch.ones(2)))
        return found.data, found.mask

    return step


class Scaled(torch.Tensor):
    """A subclass that carries a unit and nothing else."""


def tensor_subclass(wrap: Any) -> Any:
    layer = nn.Linear(8, 4)
    forward = wrap(lambda x: layer(x) * 2)

    def step(_: int) -> Any:
        with torch.no_grad():
            found = forward(torch.randn(2, 8).as_subclass(Scaled))
        return type(found).__name__, found.as_subclass(torch.Tensor)

    return step


def gan(wrap: Any) -> Any:
    generator, critic = _mlp(), nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    g_opt, d_opt = torch.optim.Adam(generator.parameters(), lr=1e-3), torch.optim.Adam(critic.parameters(), lr=1e-3)
    make, judge = wrap(generator), wrap(critic)

    def step(_: int) -> Any:
        real, fake = torch.randn(4, 8), make(torch.randn(4, 8))
        d_loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
        g_loss = F.softplus(-judge(fake)).mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        return d_loss.detach(), g_loss.detach(), list(generator.parameters())

    return step


def gradient_penalty(wrap: Any) -> Any:
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

    @wrap
    def penalty(x: Any) -> Any:
        x = x.requires_grad_()
        (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).square().mean()

    def step(_: int) -> Any:
        loss = penalty(torch.randn(4, 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), list(critic.parameters())

    return step


def vae(wrap: Any) -> Any:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(3, 8)

        def forward(self, x: Any) -> Any:
            mu, logvar = self.encoder(x).chunk(2, -1)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            return self.decoder(z), mu, logvar

    model = Autoencoder()
    forward, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(_: int) -> Any:
        x = torch.randn(4, 8)
        again, mu, logvar = forward(x)
        loss = F.mse_loss(again, x) - 0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), list(model.parameters())

    return step


def multi_crop(wrap: Any) -> Any:
    """Student and teacher on several crops: a self-distilling vision model."""

    class Crops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.body = nn.Conv2d(3, 8, 4, 4), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.pos = nn.Parameter(torch.randn(1, 16, 8) * 0.02)

        def one(self, x: Any) -> Any:
            tokens = self.patch(x).flatten(2).transpose(1, 2)
            side = int(tokens.shape[1] ** 0.5)
            pos = F.interpolate(self.pos.reshape(1, 4, 4, 8).permute(0, 3, 1, 2), size=(side, side), mode="bilinear")
            return self.body(tokens + pos.flatten(2).transpose(1, 2)).mean(1)

        def forward(self, crops: Any) -> Any:
            return torch.cat([self.one(torch.stack(list(same))) for same in crops])

    student, teacher = Crops(), Crops().eval().requires_grad_(False)
    teacher.load_state_dict(student.state_dict())
    optimizer, center = torch.optim.AdamW(student.parameters(), lr=1e-3), torch.zeros(1, 8)
    forward, guide = wrap(student), wrap(teacher)

    def step(_: int) -> Any:
        large, small = [torch.randn(3, 16, 16) for _ in range(2)], [torch.randn(3, 8, 8) for _ in range(4)]
        with torch.no_grad():
            goal = ((guide([large]) - center) / 0.04).softmax(-1)
        scores = (forward([large, small]) / 0.1).log_softmax(-1)
        loss = -(goal.repeat(3, 1) * scores).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            center.mul_(0.9).add_(goal.mean(0), alpha=0.1)
            for kept, trained in zip(teacher.parameters(), student.parameters(), strict=True):
                kept.mul_(0.99).add_(trained, alpha=0.01)
        return loss.detach(), list(student.parameters())

    return step


def last_batch(wrap: Any) -> Any:
    """Batches of an epoch, the last one smaller, with train and eval in turn."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    forward, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.05)

    def step(n: int) -> Any:
        model.train()
        for size in (8, 8, 5):
            loss = F.cross_entropy(forward(torch.randn(size, 8)), torch.randint(0, 2, (size,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            return [forward(torch.randn(size, 8)) for size in (16, 3)], list(model.parameters())

    return step


def compiled_inside(wrap: Any) -> Any:
    model = _mlp().eval()
    inner = torch.compile(lambda x: model(x) * 2, backend="aot_eager")

    @wrap
    def forward(x: Any) -> Any:
        return inner(x) + 1

    def step(_: int) -> Any:
        with torch.no_grad():
            return forward(torch.randn(2, 8))

    return step


def compiled_outside(wrap: Any) -> Any:
    model = _mlp().eval()
    inner = wrap(model)
    outer = torch.compile(lambda x: inner(x) + 1, backend="eager")

    def step(_: int) -> Any:
        with torch.no_grad():
            return outer(torch.randn(2, 8))

    return step


def early_exit(wrap: Any) -> Any:
    """Layers until the head is sure."""
    layers, head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 2)

    @wrap
    def forward(x: Any) -> Any:
        for layer in layers:
            x = torch.tanh(layer(x))
            logits = head(x)
            if logits.softmax(-1).max() > 0.7:
                break
        return logits

    def step(_: int) -> Any:
        with torch.no_grad():
            return forward(torch.randn(1, 8))

    return step


def nan_checked(wrap: Any) -> Any:
    layer = nn.Linear(8, 8)

    @wrap
    def forward(x: Any) -> Any:
        y = layer(x)
        if torch.isnan(y).any():
            raise ValueError("not a number")
        return y.relu()

    def step(n: int) -> Any:
        x = torch.randn(2, 8)
        if n % 50 == 49:
            x[0, 0] = float("nan")
        with torch.no_grad():
            return forward(x)

    return step


def running_stats(wrap: Any) -> Any:
    """A normaliser that keeps counts in plain Python, as reinforcement learning does."""

    class Normalizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.mean = 0, torch.zeros(8)

        def forward(self, x: Any) -> Any:
            self.count += 1
            self.mean = self.mean + (x.mean(0) - self.mean) / self.count
            return x - self.mean

    model = Normalizer()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(torch.randn(4, 8)), model.mean, model.count

    return step


def stochastic_depth(wrap: Any) -> Any:
    class Drop(nn.Module):
        def forward(self, x: Any) -> Any:
            if not self.training:
                return x
            return x * torch.empty(x.shape[0], 1).bernoulli_(0.8) / 0.8

    model = nn.Sequential(nn.Linear(8, 8), Drop(), nn.Linear(8, 8))
    return _fit(wrap, model, _pair), [lambda: model.eval(), lambda: model.train()]


PROGRAMS = {
    "dataclass_batch": dataclass_batch,
    "namespace_batch": namespace_batch,
    "user_dict_batch": user_dict_batch,
    "slotted_batch": slotted_batch,
    "defaultdict_batch": defaultdict_batch,
    "duck_tensor": duck_tensor,
    "tensor_subclass": tensor_subclass,
    "gan": gan,
    "gradient_penalty": gradient_penalty,
    "vae": vae,
    "multi_crop": multi_crop,
    "last_batch": last_batch,
    "compiled_inside": compiled_inside,
    "compiled_outside": compiled_outside,
    "early_exit": early_exit,
    "nan_checked": nan_checked,
    "running_stats": running_stats,
    "stochastic_depth": stochastic_depth,
}
