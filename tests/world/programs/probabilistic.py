"""zuko, torchsde, torchdiffeq and pyro: flows, equations and inference."""

from __future__ import annotations

from typing import Any

import pyro
import torch
import torchsde
import zuko
from pyro import distributions as dist
from pyro.infer import SVI, Trace_ELBO
from torch import nn
from torchdiffeq import odeint, odeint_adjoint


def spline_flow(wrap: Any) -> Any:
    flow = zuko.flows.NSF(features=2, context=3, transforms=2, hidden_features=(16, 16))
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
    loss_of = wrap(lambda x, c: -flow(c).log_prob(x).mean())

    def step(_: int) -> Any:
        loss = loss_of(torch.randn(8, 2), torch.randn(8, 3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), list(flow.parameters())

    return step


def flow_samples(wrap: Any) -> Any:
    flow = zuko.flows.MAF(features=3, context=2, transforms=2, hidden_features=(16,))
    draw = wrap(lambda c: flow(c).sample((4,)))

    def step(_: int) -> Any:
        with torch.no_grad():
            return draw(torch.randn(2))

    return step


class Coupling(nn.Module):
    def __init__(self, *, flip: bool) -> None:
        super().__init__()
        self.net, self.flip = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4)), flip

    def forward(self, x: Any) -> Any:
        a, b = x.chunk(2, -1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, -1)
        b = b * torch.tanh(s).exp() + t
        return torch.cat((b, a) if self.flip else (a, b), -1), torch.tanh(s).sum(-1)


def real_nvp(wrap: Any) -> Any:
    layers = nn.ModuleList(Coupling(flip=bool(k % 2)) for k in range(4))
    base = torch.distributions.MultivariateNormal(torch.zeros(4), torch.eye(4))
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)

    @wrap
    def log_prob(x: Any) -> Any:
        total = x.new_zeros(x.shape[0])
        for layer in layers:
            x, one = layer(x)
            total = total + one
        return base.log_prob(x) + total

    def step(_: int) -> Any:
        loss = -log_prob(torch.randn(8, 4)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), list(layers.parameters())

    return step


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))
        self.evaluations = 0

    def forward(self, _: Any, y: Any) -> Any:
        self.evaluations += 1
        return self.net(y)


def _ode(wrap: Any, field: Any, solve: Any) -> Any:
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-3)
    times = torch.linspace(0, 1, 4)
    run = wrap(solve)

    def step(_: int) -> Any:
        loss = run(torch.randn(4, 3), times)[-1].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), field.evaluations, list(field.parameters())

    return step


def ode_training(wrap: Any) -> Any:
    field = Field()
    return _ode(wrap, field, lambda y, times: odeint(field, y, times, method="rk4"))


def ode_adjoint(wrap: Any) -> Any:
    field = Field()
    return _ode(wrap, field, lambda y, times: odeint_adjoint(field, y, times, method="rk4"))


def ode_adaptive(wrap: Any) -> Any:
    field = Field()
    return _ode(wrap, field, lambda y, times: odeint(field, y, times, method="dopri5"))


def flow_of_an_ode(wrap: Any) -> Any:
    """A continuous normalizing flow: the field asks for its own divergence."""

    class CNF(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, _: Any, states: Any) -> Any:
            with torch.enable_grad():
                z = states[0].requires_grad_(True)
                dz = self.net(z)
                trace = sum(torch.autograd.grad(dz[:, i].sum(), z, create_graph=True)[0][:, i] for i in range(2))
            return dz, -trace.view(-1, 1)

    field = CNF()
    optimizer, times = torch.optim.Adam(field.parameters(), lr=1e-3), torch.tensor([1.0, 0.0])

    @wrap
    def solve(x: Any) -> Any:
        z, change = odeint(field, (x, torch.zeros(x.shape[0], 1)), times, method="rk4", options={"step_size": 0.25})
        return z[-1], change[-1]

    def step(_: int) -> Any:
        z, change = solve(torch.randn(4, 2))
        loss = (0.5 * z.square().sum(1) + change.view(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), list(field.parameters())

    return step


class SDE(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self) -> None:
        super().__init__()
        self.mu, self.sigma = nn.Linear(3, 3), nn.Linear(3, 3)

    def f(self, _: Any, y: Any) -> Any:
        return self.mu(y)

    def g(self, _: Any, y: Any) -> Any:
        return torch.sigmoid(self.sigma(y))


def sde(wrap: Any) -> Any:
    model, times = SDE(), torch.linspace(0, 1, 4)

    @wrap
    def solve(y: Any, increments: Any) -> Any:
        for dw in increments:
            y = y + model.f(0, y) * 0.1 + model.g(0, y) * dw
        return y

    def step(n: int) -> Any:
        with torch.no_grad():
            ours = solve(torch.randn(2, 3), torch.randn(5, 2, 3))
            noise = torchsde.BrownianInterval(0.0, 1.0, size=(2, 3), entropy=n, levy_area_approximation="space-time")
            return ours, torchsde.sdeint(model, torch.randn(2, 3), times, bm=noise, dt=0.25)

    return step


def sde_inside(wrap: Any) -> Any:
    model, times = SDE(), torch.linspace(0, 1, 4)
    model.f = wrap(model.f)  # type: ignore[method-assign]

    def step(n: int) -> Any:
        noise = torchsde.BrownianInterval(0.0, 1.0, size=(2, 3), entropy=n, levy_area_approximation="space-time")
        with torch.no_grad():
            return torchsde.sdeint(model, torch.randn(2, 3), times, bm=noise, dt=0.25)

    return step


def pyro_svi(wrap: Any) -> Any:
    """The decoder of a variational autoencoder is captured, pyro's handlers stay outside."""
    encoder, decoder = nn.Linear(8, 4), nn.Linear(2, 8)
    encode, decode = wrap(encoder), wrap(decoder)

    def model(x: Any) -> Any:
        pyro.module("decoder", decoder)
        with pyro.plate("data", x.shape[0]):
            z = pyro.sample("z", dist.Normal(torch.zeros(x.shape[0], 2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(decode(z), 1.0).to_event(1), obs=x)

    def guide(x: Any) -> Any:
        pyro.module("encoder", encoder)
        with pyro.plate("data", x.shape[0]):
            mu, log = encode(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(mu, log.exp()).to_event(1))

    state: list[Any] = []

    def step(_: int) -> Any:
        pyro.clear_param_store()
        if not state:
            state.append(pyro.optim.SGD({"lr": 1e-3}))
        loss = SVI(model, guide, state[0], loss=Trace_ELBO()).step(torch.randn(4, 8))
        return loss, list(decoder.parameters())

    return step


PROGRAMS = {
    "spline_flow": spline_flow,
    "flow_samples": flow_samples,
    "real_nvp": real_nvp,
    "ode_training": ode_training,
    "ode_adjoint": ode_adjoint,
    "ode_adaptive": ode_adaptive,
    "flow_of_an_ode": flow_of_an_ode,
    "sde": sde,
    "sde_inside": sde_inside,
    "pyro_svi": pyro_svi,
}
