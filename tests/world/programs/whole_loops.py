"""Loops of training as tutorials write them: meters, logs in a dict, early stops, scalers and inner loops."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional as F

from tests.world.parts import mlp, state_of


def maml(wrap: Any) -> Any:
    """MAML of second order: dicts of fast weights, and a loss over tasks."""
    net = mlp(1, 12, 1)
    meta = optim.SGD(net.parameters(), 1e-2)

    def adapt(params: Any, x: Any, y: Any, steps: Any = 2, lr: Any = 0.1) -> Any:
        for _ in range(steps):
            loss = F.mse_loss(torch.func.functional_call(net, params, x), y)
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            params = {k: p - lr * g for (k, p), g in zip(params.items(), grads, strict=True)}
        return params

    @wrap
    def meta_step(tasks: Any) -> Any:
        meta.zero_grad()
        total = 0.0
        for xs, ys, xq, yq in tasks:
            fast = adapt(dict(net.named_parameters()), xs, ys)
            loss = F.mse_loss(torch.func.functional_call(net, fast, xq), yq)
            (loss / len(tasks)).backward()
            total += loss.item()
        meta.step()
        return total / len(tasks)

    def step(n: Any) -> Any:
        tasks = []
        for _ in range(2):
            a, p = torch.rand(()) * 5, torch.rand(()) * 3
            x = torch.rand(8, 1) * 10 - 5
            y = a * torch.sin(x + p)
            tasks.append((x[:4], y[:4], x[4:], y[4:]))
        return meta_step(tasks), state_of(net)

    return step


def plateau_early_stop(wrap: Any) -> Any:
    """A trainer with an early stop: both of its methods that are captured log in one dict."""

    class Trainer:
        def __init__(self) -> None:
            self.model = mlp(4, 12, 1)
            self.opt = optim.SGD(self.model.parameters(), 0.1)
            self.sched = optim.lr_scheduler.ReduceLROnPlateau(self.opt, patience=3, factor=0.5)
            self.best, self.bad, self.stopped, self.history = float("inf"), 0, False, defaultdict(list)
            self.train_batch, self.evaluate = wrap(self.train_batch), wrap(self.evaluate)

        def train_batch(self, x: Any, y: Any) -> None:
            self.model.train()
            self.opt.zero_grad()
            loss = F.l1_loss(self.model(x), y)
            if not torch.isfinite(loss):
                raise RuntimeError("loss is not finite")
            loss.backward()
            self.opt.step()
            self.history["train"].append(loss.item())

        @torch.inference_mode()
        def evaluate(self, x: Any, y: Any) -> Any:
            self.model.eval()
            loss = F.l1_loss(self.model(x), y).item()
            self.history["val"].append(loss)
            if loss < self.best - 1e-4:
                self.best, self.bad = loss, 0
            else:
                self.bad += 1
            return self.bad >= 8

    t = Trainer()
    data = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(3)]

    def step(n: Any) -> Any:
        for x, y in data[:2]:
            t.train_batch(x, y)
        stop = t.evaluate(*data[2])
        t.sched.step(t.history["val"][-1])
        if stop:
            t.bad = 0
        return stop, t.best, t.bad, t.history["train"][-2:], len(t.history["val"]), state_of(t.model, t.opt)

    return step


def scaler_cpu(wrap: Any) -> Any:
    """A scaler of gradients with autocast and clipping: steps are left out where a gradient is infinite."""
    net = mlp(6, 16, 2)
    opt = optim.SGD(net.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)

    @wrap
    def train(x: Any, y: Any) -> Any:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        return loss.detach(), norm

    def step(n: Any) -> Any:
        x = torch.randn(8, 6)
        if n % 23 == 22:
            x[0, 0] = float("inf")
        loss, norm = train(x, torch.randn(8, 2))
        return loss.item(), norm.item(), scaler.get_scale(), state_of(net)

    return step


def permuted_minibatches(wrap: Any) -> Any:
    """All data in memory, batches by slices of a permutation, averages in meters that each epoch resets."""
    X, Y = torch.randn(40, 5), torch.randint(3, (40,))
    net = mlp(5, 16, 3)
    opt = optim.SGD(net.parameters(), 0.1)

    class AverageMeter:
        def __init__(self) -> None:
            self.reset()

        def reset(self) -> None:
            self.val = self.avg = self.sum = self.count = 0

        def update(self, val: Any, n: Any = 1) -> None:
            self.val = val
            self.sum += val * n
            self.count += n
            self.avg = self.sum / self.count

    losses, top = AverageMeter(), AverageMeter()

    @wrap
    def train(indices: Any) -> None:
        xb, yb = X[indices], Y[indices]
        out = net(xb)
        loss = F.cross_entropy(out, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.update(loss.item(), xb.size(0))
        top.update((out.argmax(1) == yb).float().mean().item(), xb.size(0))

    def step(n: Any) -> Any:
        losses.reset()
        top.reset()
        perm = torch.randperm(40)
        for i in range(0, 40, 12):
            train(perm[i : i + 12])
        return losses, top, state_of(net)

    return step


def lion_lookahead(wrap: Any) -> Any:
    """Lion written by hand, in a Lookahead that counts to five."""

    class Lion(optim.Optimizer):
        def __init__(self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.99), weight_decay: Any = 0.01) -> None:
            super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    p.data.mul_(1 - group["lr"] * group["weight_decay"])
                    state = self.state[p]
                    if len(state) == 0:
                        state["exp_avg"] = torch.zeros_like(p)
                    m, (b1, b2) = state["exp_avg"], group["betas"]
                    p.add_((m * b1 + p.grad * (1 - b1)).sign_(), alpha=-group["lr"])
                    m.mul_(b2).add_(p.grad, alpha=1 - b2)

    class Lookahead:
        def __init__(self, opt: Any, k: Any = 5, alpha: Any = 0.5) -> None:
            self.opt, self.k, self.alpha, self.counter = opt, k, alpha, 0
            self.slow = [[p.clone().detach() for p in g["params"]] for g in opt.param_groups]

        def step(self) -> None:
            self.opt.step()
            self.counter += 1
            if self.counter >= self.k:
                self.counter = 0
                with torch.no_grad():
                    for g, slow in zip(self.opt.param_groups, self.slow, strict=True):
                        for p, q in zip(g["params"], slow, strict=True):
                            q.add_(p.data - q, alpha=self.alpha)
                            p.copy_(q)

    net = mlp(6, 16, 3)
    opt = Lookahead(Lion(net.parameters()))

    @wrap
    def train(x: Any, y: Any) -> Any:
        net.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    def step(n: Any) -> Any:
        return train(torch.randn(8, 6), torch.randint(3, (8,))), opt.counter, opt.slow, state_of(net)

    return step


PROGRAMS = {
    "maml": maml,
    "plateau_early_stop": plateau_early_stop,
    "scaler_cpu": scaler_cpu,
    "permuted_minibatches": permuted_minibatches,
    "lion_lookahead": lion_lookahead,
}
