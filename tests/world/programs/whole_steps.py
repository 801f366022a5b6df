"""Steps that get their model as an argument or count in Python: workers, adapters, teachers, planners, samplers."""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F
from typing_extensions import override

from tests.world.parts import mlp, state_of


class Velocity(nn.Module):
    """A field that depends on time and on a class."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.time, self.label = nn.Linear(16, 16), nn.Embedding(5, 16)
        self.inner, self.middle, self.out = nn.Linear(d, 16), nn.Linear(16, 16), nn.Linear(16, d)

    @override
    def forward(self, x: Any, t: Any, y: Any) -> Any:
        rates = torch.exp(-math.log(1000) * torch.arange(8) / 8)
        angles = t.float().reshape(-1, 1) * rates[None] * 1000
        h = F.silu(self.inner(x) + self.time(torch.cat([angles.sin(), angles.cos()], -1)) + self.label(y))
        return self.out(F.silu(self.middle(h)))


def rectified_flow(wrap: Any) -> Any:
    """Flow matching with a shadow of the weights that follows faster at first, and a guided sampler."""
    net = Velocity()
    ema = copy.deepcopy(net).requires_grad_(requires_grad=False)
    opt = optim.AdamW(net.parameters(), 1e-3, betas=(0.9, 0.99))
    st = {"updates": 0}

    @wrap
    def train_step(x1: Any, y: Any) -> Any:
        x0, t = torch.randn_like(x1), torch.sigmoid(torch.randn(len(x1)))
        y = torch.where(torch.rand(len(y)) < 0.1, torch.full_like(y, 4), y)
        xt = (1 - t[:, None]) * x0 + t[:, None] * x1
        loss = F.mse_loss(net(xt, t, y), x1 - x0)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        st["updates"] += 1
        decay = min(0.9, (1 + st["updates"]) / (10 + st["updates"]))
        with torch.no_grad():
            for e, p in zip(ema.parameters(), net.parameters(), strict=True):
                e.sub_((1.0 - decay) * (e - p))
        return loss.item(), norm.item()

    @wrap
    @torch.no_grad()
    def sample(y: Any, steps: int = 3, cfg: float = 2.0) -> Any:
        n, ts = len(y), torch.linspace(0, 1, steps + 1)
        x, null = torch.randn(n, 8), torch.full_like(y, 4)
        for i in range(steps):
            t0, t1 = ts[i], ts[i + 1]
            free, guided = ema(x, t0.expand(n), null), ema(x, t0.expand(n), y)
            x = x + (t1 - t0) * (free + cfg * (guided - free))
        return x

    def step(n: int) -> Any:
        out = train_step(torch.randn(6, 8), torch.randint(4, (6,)))
        return out, sample(torch.tensor([0, 1, 2])) if n % 2 else None, dict(st), state_of(net, ema)

    return step


def mean_teacher(wrap: Any) -> Any:
    """A teacher that is an average of the student: its decay and the weight of its loss follow from a count."""

    def make() -> Any:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    student, teacher = make(), make()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(requires_grad=False)
    opt = optim.SGD(student.parameters(), 0.05, momentum=0.9, nesterov=True)
    meters: Any = defaultdict(list)

    class Trainer:
        def __init__(self) -> None:
            self.global_step = 0
            self.train_step = wrap(self.train_step)

        def weight(self) -> float:
            phase = 1.0 - max(0.0, min(self.global_step, 30)) / 30
            return math.exp(-5.0 * phase * phase)

        @torch.no_grad()
        def update_teacher(self) -> None:
            alpha = min(1 - 1 / (self.global_step + 1), 0.95)
            for e, p in zip(teacher.parameters(), student.parameters(), strict=True):
                e.mul_(alpha).add_(p, alpha=1 - alpha)

        def train_step(self, x: Any, y: Any, more: Any) -> Any:
            ours, theirs = student(torch.cat([x, more])), teacher(torch.cat([x, more]) + 0.05)
            sup, cons = F.cross_entropy(ours[: len(x)], y), F.mse_loss(ours.softmax(1), theirs.softmax(1))
            opt.zero_grad()
            (sup + self.weight() * cons).backward()
            opt.step()
            self.global_step += 1
            self.update_teacher()
            meters["sup"].append(sup.item())
            return cons.detach()

    trainer = Trainer()

    def step(n: int) -> Any:
        cons = trainer.train_step(torch.randn(4, 6), torch.randint(3, (4,)), torch.randn(6, 6))
        return cons, trainer.global_step, meters["sup"][-2:], state_of(student, teacher)

    return step


def population(wrap: Any) -> Any:
    """Training of a population: one function for all workers, which take weights and rates of each other."""

    class Worker:
        def __init__(self, lr: float) -> None:
            self.model = mlp(3, 8, 1)
            self.opt = optim.SGD(self.model.parameters(), lr, momentum=0.9)
            self.score = 0.0

    workers = [Worker(lr) for lr in (0.1, 0.03, 0.01)]

    @wrap
    def train(worker: Worker, x: Any, y: Any) -> Any:
        loss = F.mse_loss(worker.model(x), y)
        worker.opt.zero_grad()
        loss.backward()
        worker.opt.step()
        return loss.detach()

    def step(n: int) -> Any:
        x = torch.randn(6, 3)
        for worker in workers:
            worker.score = -train(worker, x, x.sum(1, keepdim=True)).item()
        if n % 10 == 9:
            bad, *_, good = sorted(workers, key=lambda worker: worker.score)
            bad.model.load_state_dict(good.model.state_dict())
            for group in bad.opt.param_groups:
                group["lr"] = good.opt.param_groups[0]["lr"] * random.Random(n).choice([0.8, 1.2])
        return [worker.score for worker in workers], state_of(*[worker.model for worker in workers])

    return step


class Adapted(nn.Module):
    """A frozen layer with adapters by name."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.active = base.requires_grad_(requires_grad=False), "a"
        self.down = nn.ParameterDict({k: nn.Parameter(torch.randn(2, base.in_features) * 0.1) for k in "ab"})
        self.up = nn.ParameterDict({k: nn.Parameter(torch.zeros(base.out_features, 2)) for k in "ab"})

    @override
    def forward(self, x: Any) -> Any:
        y = self.base(x)
        return y + (x @ self.down[self.active].T @ self.up[self.active].T) * 2.0 if self.active else y


def adapters(wrap: Any) -> Any:
    """Adapters that are switched by name between calls; model and optimizer are arguments of the step."""
    net = nn.Sequential(Adapted(nn.Linear(6, 12)), nn.ReLU(), Adapted(nn.Linear(12, 3)))
    layers: Any = [net[0], net[2]]
    opts = {k: optim.SGD([p for one in layers for p in (one.down[k], one.up[k])], 0.1, momentum=0.9) for k in "ab"}

    @wrap
    def train_step(model: Any, opt: Any, x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    @wrap
    @torch.inference_mode()
    def predict(model: Any, x: Any) -> Any:
        return model(x).argmax(-1)

    def step(n: int) -> Any:
        x, y, out = torch.randn(5, 6), torch.randint(3, (5,)), []
        for name in ("a", "b", ""):
            for one in layers:
                one.active = name
            out += [train_step(net, opts[name], x, y)] if name else []
            out.append(predict(net, x))
        return out, state_of(net)

    return step


def planner(wrap: Any) -> Any:
    """A planner by the cross-entropy method on a model that is trained meanwhile; the plan before is its begin."""
    dyn = mlp(5, 16, 4)
    opt = optim.SGD(dyn.parameters(), 1e-2)

    class Planner:
        def __init__(self) -> None:
            self.mean = torch.zeros(4, 1)
            self.plan = wrap(self.plan)

        @torch.no_grad()
        def plan(self, s: Any, *, first: bool) -> Any:
            mean, std = torch.zeros(4, 1), torch.full((4, 1), 2.0)
            if not first:
                mean[:-1] = self.mean[1:]
            for _ in range(3):
                acts = (mean[:, None] + std[:, None] * torch.randn(4, 16, 1)).clamp(-1, 1)
                z, ret = s.expand(16, -1), torch.zeros(16)
                for t in range(4):
                    z = z + 0.1 * dyn(torch.cat([z, acts[t]], -1))
                    ret = ret - z.pow(2).sum(-1)
                elite = acts[:, ret.topk(4).indices]
                mean, std = elite.mean(1), elite.std(1).clamp(0.1, 2)
            self.mean = mean
            return mean[0].clamp(-1, 1)

    @wrap
    def fit(s: Any, a: Any, after: Any) -> Any:
        loss = F.mse_loss(s + 0.1 * dyn(torch.cat([s, a], -1)), after)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    mine, rng = Planner(), np.random.RandomState(3)

    def step(n: int) -> Any:
        s, log = rng.randn(4).astype(np.float32), []
        for t in range(3):
            a = mine.plan(torch.from_numpy(s), first=t == 0)
            after = (0.9 * s + 0.1 * a.numpy()[0]).astype(np.float32)
            log.append(fit(torch.from_numpy(s)[None], a[None], torch.from_numpy(after)[None]))
            s = after
        return s, log, mine.mean, state_of(dyn)

    return step


def growing_cells(wrap: Any) -> Any:
    """A cellular automaton that is trained from a pool, for another number of steps in every second call."""

    class Cells(nn.Module):
        def __init__(self, c: int = 6) -> None:
            super().__init__()
            sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
            same = torch.zeros(3, 3)
            same[1, 1] = 1
            self.register_buffer("kernels", torch.stack([same, sobel, sobel.T]).repeat(c, 1, 1)[:, None])
            self.inner, self.out, self.c = nn.Conv2d(3 * c, 12, 1), nn.Conv2d(12, c, 1, bias=False), c

        @override
        def forward(self, x: Any) -> Any:
            alive = F.max_pool2d(x[:, 3:4], 3, 1, 1) > 0.1
            y = self.out(F.relu(self.inner(F.conv2d(x, self.kernels, padding=1, groups=self.c))))
            x = x + y * (torch.rand_like(x[:, :1]) < 0.5)
            return x * (alive & (F.max_pool2d(x[:, 3:4], 3, 1, 1) > 0.1)).float()

    cells, seed = Cells(), torch.zeros(1, 6, 8, 8)
    opt = optim.SGD(cells.parameters(), 2e-2, momentum=0.9)
    seed[:, 3:, 4, 4] = 1
    pool, target, rng = seed.repeat(8, 1, 1, 1), torch.rand(1, 4, 8, 8), np.random.RandomState(1)

    @wrap
    def train_step(x: Any, steps: int) -> Any:
        for _ in range(steps):
            x = cells(x)
        loss = F.mse_loss(x[:, :4], target.expand(len(x), -1, -1, -1))
        opt.zero_grad()
        loss.backward()
        for p in cells.parameters():
            p.grad /= p.grad.norm() + 1e-8
        opt.step()
        return x.detach(), loss.item()

    def step(n: int) -> Any:
        at = rng.choice(8, 4, replace=False)
        x = pool[at].clone()
        x[:1] = seed
        x, loss = train_step(x, 3 + n % 2)
        pool[at] = x
        return loss, pool, state_of(cells)

    return step


PROGRAMS = {
    "rectified_flow": rectified_flow,
    "mean_teacher": mean_teacher,
    "population": population,
    "adapters": adapters,
    "planner": planner,
    "growing_cells": growing_cells,
}
