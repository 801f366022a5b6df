"""Science in one file each: graphs, equations, fits, filters, chains, and the habits of training loops."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.func import functional_call
from torch.nn import functional as F

from tests.world.parts import mlp, state_of


def message_passing(wrap: Any) -> Any:
    """Messages along edges of an index; accuracy is read after each step, and the best kept."""
    layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])
    optimizer, best = optim.Adam(layers.parameters(), lr=0.01, weight_decay=5e-4), {"acc": 0.0, "epoch": 0}
    x, edge_index, y = torch.randn(20, 8), torch.randint(0, 20, (2, 60)), torch.randint(0, 4, (20,))
    train_mask, test_mask = torch.rand(20) < 0.5, torch.rand(20) < 0.5

    def forward(x: Any) -> Any:
        row, col = edge_index
        deg = torch.zeros(20).index_add_(0, col, torch.ones(row.size(0)))
        norm = deg.clamp(min=1).pow(-0.5)
        norm = norm[row] * norm[col]
        for i, layer in enumerate(layers):
            h = layer(x)
            x = torch.zeros_like(h).index_add_(0, col, norm.unsqueeze(-1) * h[row])
            if i == 0:
                x = F.dropout(F.relu(x), p=0.5, training=layers.training)
        return F.log_softmax(x, dim=1)

    @wrap
    def train() -> Any:
        layers.train()
        optimizer.zero_grad()
        loss = F.nll_loss(forward(x)[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return float(loss)

    @wrap
    @torch.no_grad()
    def test() -> Any:
        layers.eval()
        pred = forward(x).argmax(dim=-1)
        return [int((pred[mask] == y[mask]).sum()) / int(mask.sum()) for mask in (train_mask, test_mask)]

    def step(n: int) -> Any:
        loss, (train_acc, test_acc) = train(), test()
        if test_acc > best["acc"]:
            best.update(acc=test_acc, epoch=n)
        return loss, train_acc, best, state_of(layers, optimizer)

    return step


def pinn(wrap: Any) -> Any:
    """Burgers' equation: derivatives by autograd in the loss, weights of its parts that change with the epoch."""
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = optim.Adam(net.parameters(), lr=1e-3)
    history: dict[str, list[float]] = {"pde": [], "data": []}

    def derivative(y: Any, x: Any) -> Any:
        return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]

    @wrap
    def train(x: Any, t: Any, x0: Any, u0: Any, weight: float) -> Any:
        x.requires_grad_(True)
        t.requires_grad_(True)
        u = net(torch.cat([x, t], 1))
        u_x, u_t = derivative(u, x), derivative(u, t)
        u_xx = derivative(u_x, x)
        pde = (u_t + u * u_x - 0.01 / math.pi * u_xx).pow(2).mean()
        data = F.mse_loss(net(x0), u0)
        loss = pde + weight * data
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history["pde"].append(pde.item())
        history["data"].append(data.item())
        return loss.item()

    def step(n: int) -> Any:
        loss = train(torch.rand(16, 1), torch.rand(16, 1), torch.rand(8, 2), torch.rand(8, 1), 1.0 + n * 0.01)
        return loss, history["pde"][-1], len(history["data"]), state_of(net, optimizer)

    return step


def neural_ode(wrap: Any) -> Any:
    """Runge-Kutta by hand through a small field; a running mean of the loss."""
    field = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = optim.RMSprop(field.parameters(), lr=1e-3)

    class Average:
        def __init__(self, momentum: float = 0.99) -> None:
            self.momentum, self.val, self.avg = momentum, None, 0.0

        def update(self, val: Any) -> None:
            self.avg = val if self.val is None else self.avg * self.momentum + val * (1 - self.momentum)
            self.val = val

    meter, times = Average(), torch.linspace(0.0, 1.0, 6)

    @wrap
    def train(y0: Any, true_y: Any) -> Any:
        y, states = y0, [y0]
        for i in range(len(times) - 1):
            h = times[i + 1] - times[i]
            k1 = field(y**3)
            k2 = field((y + h * k1 / 2) ** 3)
            k3 = field((y + h * k2 / 2) ** 3)
            k4 = field((y + h * k3) ** 3)
            y = y + h * (k1 + 2 * k2 + 2 * k3 + k4) / 6
            states.append(y)
        loss = torch.mean(torch.abs(torch.stack(states) - true_y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss.item())
        return loss.detach()

    def step(_: int) -> Any:
        return train(torch.randn(4, 2), torch.randn(6, 4, 2)), meter.avg, state_of(field, optimizer)

    return step


def adaptive_ode(wrap: Any) -> Any:
    """A step size that follows an error that is read: the step is captured, its size a Python number."""
    field = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    @wrap
    @torch.no_grad()
    def attempt(y: Any, h: float) -> Any:
        k1 = field(y)
        k2 = field(y + h * k1)
        low, high = y + h * k1, y + h / 2 * (k1 + k2)
        return high, (high - low).abs().max().item()

    def step(_: int) -> Any:
        t, y, h, tried = 0.0, torch.randn(1, 2), 0.1, 0
        while t < 0.5 and tried < 10:
            new, error = attempt(y, min(h, 0.5 - t))
            tried += 1
            if error < 1e-2:
                t, y = t + min(h, 0.5 - t), new
            h *= min(2.0, max(0.3, 0.9 * (1e-2 / (error + 1e-12)) ** 0.5))
        return y, t, tried

    return step


def lbfgs_fit(wrap: Any) -> Any:
    """torch's example of time series: LBFGS over a closure."""
    net, x = mlp(4, 8, 1), torch.randn(16, 4)
    y = x.sum(1, keepdim=True).sin()
    optimizer, losses = optim.LBFGS(net.parameters(), lr=0.1, max_iter=4), []

    @wrap
    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    def step(_: int) -> Any:
        losses.append(float(optimizer.step(closure)))
        return losses[-1], state_of(net)

    return step


def gaussian_process(wrap: Any) -> Any:
    """The marginal likelihood by hand, fitted, and the prediction at new points."""
    raw = {name: torch.zeros(1, requires_grad=True) for name in ("length", "scale", "noise")}
    optimizer, x = optim.Adam(list(raw.values()), lr=0.05), torch.linspace(0, 1, 12)[:, None]
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(12)

    def kernel(a: Any, b: Any) -> Any:
        d = torch.cdist(a / F.softplus(raw["length"]), b / F.softplus(raw["length"]))
        return F.softplus(raw["scale"]) * torch.exp(-0.5 * d**2)

    def factor() -> Any:
        return torch.linalg.cholesky(kernel(x, x) + (F.softplus(raw["noise"]) + 1e-4) * torch.eye(12))

    @wrap
    def fit() -> Any:
        chol = factor()
        alpha = torch.cholesky_solve(y[:, None], chol)[:, 0]
        loss = 0.5 * y @ alpha + chol.diagonal().log().sum() + 6 * math.log(2 * math.pi)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item(), F.softplus(raw["length"]).item()

    @wrap
    @torch.no_grad()
    def predict(new: Any) -> Any:
        chol, between = factor(), kernel(x, new)
        solved = torch.linalg.solve_triangular(chol, between, upper=False)
        mean = between.t() @ torch.cholesky_solve(y[:, None], chol)
        return mean.squeeze(-1).numpy(), (kernel(new, new).diagonal() - solved.pow(2).sum(0)).sqrt().numpy()

    def step(_: int) -> Any:
        return fit(), predict(torch.rand(5, 1)), [one.detach() for one in raw.values()]

    return step


def kalman(wrap: Any) -> Any:
    """A filter as a class that keeps its state; measurements come as arrays."""

    class Kalman:
        def __init__(self) -> None:
            self.F, self.H = torch.tensor([[1.0, 0.1], [0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
            self.Q, self.R = 0.01 * torch.eye(2), torch.tensor([[0.1]])
            self.x, self.P, self.n = torch.zeros(2, 1), torch.eye(2), 0

        @wrap
        def predict(self) -> Any:
            self.x = self.F @ self.x
            self.P = self.F @ self.P @ self.F.T + self.Q
            return self.x

        @wrap
        def update(self, z: Any) -> Any:
            y = torch.as_tensor(z, dtype=torch.float32).reshape(1, 1) - self.H @ self.x
            s = self.H @ self.P @ self.H.T + self.R
            k = torch.linalg.solve(s, self.H @ self.P).T
            self.x = self.x + k @ y
            self.P = (torch.eye(2) - k @ self.H) @ self.P
            self.n += 1
            return self.x.squeeze(1).numpy()

    tracker, rng = Kalman(), np.random.RandomState(3)

    def step(n: int) -> Any:
        tracker.predict()
        return tracker.update(np.array([math.sin(n / 10) + 0.1 * rng.randn()])), tracker.x, tracker.P, tracker.n

    return step


def hmc(wrap: Any) -> Any:
    """Hamiltonian Monte Carlo: gradients in the leap, a proposal that is taken by a draw."""
    data, accepted = torch.randn(30) + 1.5, {"n": 0}

    def log_prob(q: Any) -> Any:
        return -0.5 * ((data - q[0]) / q[1].exp()).pow(2).sum() - 30 * q[1] - 0.5 * (q * q).sum()

    @wrap
    def sample(q: Any, step_size: float) -> Any:
        p = torch.randn_like(q)
        before = log_prob(q) - 0.5 * (p * p).sum()
        new = q.clone().requires_grad_(True)
        grad = torch.autograd.grad(log_prob(new), new)[0]
        for _ in range(3):
            p = p + 0.5 * step_size * grad
            new = (new + step_size * p).detach().requires_grad_(True)
            grad = torch.autograd.grad(log_prob(new), new)[0]
            p = p + 0.5 * step_size * grad
        after = log_prob(new) - 0.5 * (p * p).sum()
        if torch.rand(()).log() < after - before:
            accepted["n"] += 1
            return new.detach()
        return q

    st = {"q": torch.zeros(2)}

    def step(_: int) -> Any:
        st["q"] = sample(st["q"], 0.12)
        return st["q"], accepted, torch.get_rng_state()

    return step


def metropolis(wrap: Any) -> Any:
    """Chains side by side: proposals are taken by a mask, the rate is kept."""
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(3)),
        torch.distributions.Independent(torch.distributions.Normal(torch.randn(3, 2) * 2, torch.ones(3, 2)), 1),
    )
    rates: list[float] = []

    @wrap
    @torch.no_grad()
    def chain(x: Any, scale: float) -> Any:
        for _ in range(3):
            proposal = x + scale * torch.randn_like(x)
            ratio = (mixture.log_prob(proposal) - mixture.log_prob(x)).exp().clamp(max=1)
            accept = torch.rand_like(ratio) < ratio
            x = torch.where(accept[:, None], proposal, x)
        rates.append(accept.float().mean().item())
        return x

    st = {"x": torch.zeros(8, 2), "scale": 1.0}

    def step(n: int) -> Any:
        st["x"] = chain(st["x"], st["scale"])
        if n % 25 == 24:
            st["scale"] *= 1.1 if np.mean(rates[-25:]) > 0.4 else 0.9
        return st["x"], rates[-1], st["scale"]

    return step


def maml(wrap: Any) -> Any:
    """Meta-learning of sines: inner steps on fast weights, gradients through them, accuracy read for each task."""
    model, inner_lr = mlp(1, 16, 1), 0.01
    meta = optim.Adam(model.parameters(), lr=1e-3)

    @wrap
    def train(xs: Any, ys: Any, xq: Any, yq: Any) -> Any:
        meta.zero_grad()
        total, log = 0, []
        for i in range(xs.size(0)):
            fast = dict(model.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(functional_call(model, fast, xs[i]), ys[i])
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: p - inner_lr * g for (name, p), g in zip(fast.items(), grads, strict=True)}
            outer = F.mse_loss(functional_call(model, fast, xq[i]), yq[i])
            log.append(outer.item())
            total = total + outer
        (total / xs.size(0)).backward()
        meta.step()
        return log

    def step(_: int) -> Any:
        xs, xq, phase = torch.rand(3, 5, 1) * 10 - 5, torch.rand(3, 5, 1) * 10 - 5, torch.rand(3, 1, 1)
        return train(xs, torch.sin(xs + phase), xq, torch.sin(xq + phase)), state_of(model, meta)

    return step


def accumulate_scaled(wrap: Any) -> Any:
    """Accumulation by a count in the step, a scaler that is on, half precision, clipping."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    scaler, every = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=20), 4

    @wrap
    def train(x: Any, y: Any, batch_idx: int) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y) / every
        scaler.scale(loss).backward()
        if (batch_idx + 1) % every == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return loss.item() * every

    def step(n: int) -> Any:
        return train(torch.randn(8, 8), torch.randint(0, 4, (8,)), n), scaler.get_scale(), state_of(model, optimizer)

    return step


def early_stopping(wrap: Any) -> Any:
    """A trainer: meters, a plateau schedule, the best weights kept, a stop that is asked after each epoch."""

    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
            self.optimizer = optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
            self.scheduler = optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=2)
            self.best, self.bad, self.best_state, self.global_step, self.losses = math.inf, 0, None, 0, []
            self.ema = None

        @wrap
        def train_step(self, x: Any, y: Any) -> Any:
            self.model.train()
            self.optimizer.zero_grad()
            loss = F.smooth_l1_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.global_step += 1
            self.losses.append(loss.item())
            self.ema = loss.item() if self.ema is None else 0.9 * self.ema + 0.1 * loss.item()
            return loss.item()

        @wrap
        @torch.no_grad()
        def evaluate(self, batches: Any) -> Any:
            self.model.eval()
            total, count = 0.0, 0
            for x, y in batches:
                total += F.mse_loss(self.model(x), y, reduction="sum").item()
                count += len(x)
            return total / count

        def epoch_ends(self, score: float) -> None:
            self.scheduler.step(score)
            if score < self.best - 1e-4:
                self.best, self.bad, self.best_state = score, 0, copy.deepcopy(self.model.state_dict())
            else:
                self.bad += 1
            if self.bad > 4:
                self.model.load_state_dict(self.best_state)
                self.bad = 0

    trainer, valid = Trainer(), [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(2)]

    def step(n: int) -> Any:
        x = torch.randn(8, 6)
        found = trainer.train_step(x, x.sum(1, keepdim=True))
        if n % 4 == 3:
            trainer.epoch_ends(trainer.evaluate(valid))
        return found, trainer.best, trainer.ema, trainer.global_step, state_of(trainer.model, trainer.optimizer)

    return step


PROGRAMS = {
    "message_passing": message_passing,
    "pinn": pinn,
    "neural_ode": neural_ode,
    "adaptive_ode": adaptive_ode,
    "lbfgs_fit": lbfgs_fit,
    "gaussian_process": gaussian_process,
    "kalman": kalman,
    "hmc": hmc,
    "metropolis": metropolis,
    "maml": maml,
    "accumulate_scaled": accumulate_scaled,
    "early_stopping": early_stopping,
}
