"""Fields, particles and flows: gradients of coordinates, lists of neighbours, layers that begin with their data."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn, optim

from tests.world.parts import mlp, state_of


def siren(wrap: Any) -> Any:
    """SIREN on an image, with the Laplacian: the model gives its coordinates back as leaves of a graph."""

    class Sine(nn.Module):
        def __init__(self, i: Any, o: Any, first: Any = False, w0: Any = 30.0) -> None:
            super().__init__()
            self.w0, self.linear = w0, nn.Linear(i, o)
            with torch.no_grad():
                b = 1 / i if first else math.sqrt(6 / i) / w0
                self.linear.weight.uniform_(-b, b)

        def forward(self, x: Any) -> Any:
            return torch.sin(self.w0 * self.linear(x))

    class Siren(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(Sine(2, 16, True), Sine(16, 16), nn.Linear(16, 1))

        def forward(self, coords: Any) -> Any:
            coords = coords.clone().detach().requires_grad_(True)
            return self.net(coords), coords

    def gradient(y: Any, x: Any, grad_outputs: Any = None) -> Any:
        if grad_outputs is None:
            grad_outputs = torch.ones_like(y)
        return torch.autograd.grad(y, [x], grad_outputs=grad_outputs, create_graph=True)[0]

    def laplace(y: Any, x: Any) -> Any:
        g = gradient(y, x)
        div = 0.0
        for i in range(g.shape[-1]):
            div += torch.autograd.grad(g[..., i], x, torch.ones_like(g[..., i]), create_graph=True)[0][..., i : i + 1]
        return div

    model = Siren()
    opt = optim.SGD(model.parameters(), 1e-4)
    coords = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4), indexing="ij"), -1).view(
        -1, 2
    )
    truth = torch.sin(3 * coords).sum(-1, keepdim=True)

    @wrap
    def train() -> Any:
        out, c = model(coords)
        lap = laplace(out, c)
        loss = ((out - truth) ** 2).mean() + 1e-4 * (lap**2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss, out.detach()

    def step(n: Any) -> Any:
        loss, out = train()
        return loss.item(), out.clone(), state_of(model)

    return step


def molecular(wrap: Any) -> Any:
    """Lennard-Jones forces by autograd, velocity Verlet, a list of pairs made again when an atom moved far."""
    n, box = 12, 5.0
    pos, vel = torch.rand(n, 3) * box, torch.randn(n, 3) * 0.05
    st = {"pos": pos, "vel": vel, "built": pos.clone(), "rebuilds": 0}

    def build(pos: Any) -> Any:
        d = pos[:, None] - pos[None]
        d = d - box * torch.round(d / box)
        r = d.norm(dim=-1)
        return torch.nonzero((r < 2.5) & (torch.ones(n, n).triu(1) > 0), as_tuple=False).t()

    st["pairs"] = build(pos)

    @wrap
    def energy_forces(pos: Any, pairs: Any) -> Any:
        pos = pos.detach().requires_grad_(True)
        d = pos[pairs[0]] - pos[pairs[1]]
        d = d - box * torch.round(d / box)
        r2 = d.pow(2).sum(-1) + 0.5
        inv6 = r2.pow(-3)
        e = (4 * (inv6 * inv6 - inv6)).sum()
        (f,) = torch.autograd.grad(-e, pos)
        return e.detach(), f

    @wrap
    def verlet(pos: Any, vel: Any, f: Any, dt: Any = 0.005) -> Any:
        vel = vel + 0.5 * dt * f
        return (pos + dt * vel) % box, vel

    @wrap
    def needs_rebuild(pos: Any, built: Any) -> Any:
        d = pos - built
        d = d - box * torch.round(d / box)
        return (d.norm(dim=-1).max() > 0.1).item()

    def step(_: Any) -> Any:
        e, f = energy_forces(st["pos"], st["pairs"])
        st["pos"], st["vel"] = verlet(st["pos"], st["vel"], f)
        if needs_rebuild(st["pos"], st["built"]):
            st["pairs"], st["built"], st["rebuilds"] = build(st["pos"]), st["pos"].clone(), st["rebuilds"] + 1
        return e, st

    return step


def glow_like(wrap: Any) -> Any:
    """Glow's layers: scales taken from the first batch, mixing by an LU decomposition, samples by the inverse."""

    class ActNorm(nn.Module):
        def __init__(self, d: Any) -> None:
            super().__init__()
            self.loc, self.scale = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.ones(d))
            self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

        def forward(self, x: Any) -> Any:
            if self.initialized.item() == 0:
                with torch.no_grad():
                    self.loc.data.copy_(-x.mean(0))
                    self.scale.data.copy_(1 / (x.std(0) + 1e-6))
                self.initialized.fill_(1)
            return self.scale * (x + self.loc), self.scale.abs().log().sum().expand(len(x))

        def inverse(self, z: Any) -> Any:
            return z / self.scale - self.loc

    class Coupling(nn.Module):
        def __init__(self, d: Any) -> None:
            super().__init__()
            self.net = mlp(d // 2, 16, d)

        def forward(self, x: Any) -> Any:
            a, b = x.chunk(2, 1)
            s, t = self.net(a).chunk(2, 1)
            s = torch.sigmoid(s + 2)
            return torch.cat([b * s + t, a], 1), s.log().sum(1)

        def inverse(self, z: Any) -> Any:
            b, a = z.chunk(2, 1)
            s, t = self.net(a).chunk(2, 1)
            return torch.cat([a, (b - t) / torch.sigmoid(s + 2)], 1)

    class Mix(nn.Module):
        def __init__(self, d: Any) -> None:
            super().__init__()
            P, L, U = torch.linalg.lu(torch.linalg.qr(torch.randn(d, d))[0])
            self.register_buffer("P", P)
            self.L, self.S, self.U = nn.Parameter(L), nn.Parameter(U.diagonal().clone()), nn.Parameter(U.triu(1))

        def weight(self) -> Any:
            d = len(self.S)
            return self.P @ (self.L.tril(-1) + torch.eye(d)) @ (self.U.triu(1) + torch.diag(self.S))

        def forward(self, x: Any) -> Any:
            return x @ self.weight(), self.S.abs().log().sum().expand(len(x))

        def inverse(self, z: Any) -> Any:
            return z @ torch.inverse(self.weight())

    flow = nn.ModuleList(m for _ in range(2) for m in (ActNorm(4), Mix(4), Coupling(4)))
    prior = torch.distributions.MultivariateNormal(torch.zeros(4), torch.eye(4))
    opt = optim.SGD(flow.parameters(), 1e-3)

    @wrap
    def train(x: Any) -> Any:
        logdet = torch.zeros(len(x))
        for layer in flow:
            x, ld = layer(x)
            logdet = logdet + ld
        loss = -(prior.log_prob(x) + logdet).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach().item()

    @wrap
    @torch.no_grad()
    def sample(k: Any) -> Any:
        z = prior.sample((k,))
        for layer in list(flow)[::-1]:
            z = layer.inverse(z)
        return z

    def step(n: Any) -> Any:
        return train(torch.randn(6, 4) * 2 + 1), sample(3), state_of(flow)

    return step


PROGRAMS = {
    "siren": siren,
    "molecular": molecular,
    "glow_like": glow_like,
}
