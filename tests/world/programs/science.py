"""torchdiffeq, gpytorch, e3nn, torch-geometric, tensordict and x-transformers."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from e3nn import o3
from tensordict import TensorDict
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv
from torchdiffeq import odeint
from x_transformers import Decoder, TransformerWrapper


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.gain = nn.Linear(4, 4), 1.0

    def forward(self, _: Any, y: Any) -> Any:
        return torch.tanh(self.net(y)) * self.gain


def _switched(holder: Any, name: str, value: Any) -> Any:
    return lambda: setattr(holder, name, value)


def ode_rk4(wrap: Any) -> Any:
    field, times = _Field(), torch.linspace(0, 1, 5)
    solve = wrap(lambda y: odeint(field, y, times, method="rk4"))

    def step(_: int) -> Any:
        with torch.no_grad():
            return solve(torch.randn(3, 4))

    return step, [_switched(field, "gain", 0.5)]


def ode_field(wrap: Any) -> Any:
    field, times = _Field(), torch.linspace(0, 1, 5)
    field.net.forward = wrap(field.net.forward)  # type: ignore[method-assign]

    def step(_: int) -> Any:
        with torch.no_grad():
            return odeint(field, torch.randn(3, 4), times, method="dopri5")

    return step


class _GP(gpytorch.models.ExactGP):
    def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean, self.kernel = (
            gpytorch.means.ConstantMean(),
            gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()),
        )

    def forward(self, x: Any) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def gp_training(wrap: Any) -> Any:
    x, y = torch.linspace(0, 1, 12), torch.randn(12)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = _GP(x, y, likelihood).train()
    loss_of = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @wrap
    def train() -> Any:
        loss = -loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return lambda _: (train(), list(model.parameters()))


def e3nn_product(wrap: Any) -> Any:
    product = o3.FullyConnectedTensorProduct("2x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o")
    call = wrap(product)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(torch.randn(3, 5), torch.randn(3, 4))

    return step


def _graph(nodes: int = 5) -> Any:
    edges = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
    return Data(x=torch.randn(nodes, 4), edge_index=edges)


def gcn_data(wrap: Any) -> Any:
    first, second = GCNConv(4, 8), GCNConv(8, 2)

    @wrap
    def forward(data: Any) -> Any:
        return second(torch.relu(first(data.x, data.edge_index)), data.edge_index)

    def step(_: int) -> Any:
        with torch.no_grad():
            return forward(_graph())

    return step, [_switched(first, "add_self_loops", False)]


def gat(wrap: Any) -> Any:
    model = GATConv(4, 3, heads=2)
    call = wrap(model)

    def step(_: int) -> Any:
        data = _graph()
        with torch.no_grad():
            return call(data.x, data.edge_index)

    return step, [_switched(model, "concat", False)]


def data_result(wrap: Any) -> Any:
    forward = wrap(lambda data: Data(x=data.x * 2, edge_index=data.edge_index))

    def step(_: int) -> Any:
        found = forward(_graph())
        return found.x, found.edge_index, found.num_nodes

    return step


def tensordict_step(wrap: Any) -> Any:
    net = nn.Linear(4, 2)

    @wrap
    def forward(td: Any) -> Any:
        return TensorDict({"y": net(td["x"]), "z": td["nested", "z"] * 2}, batch_size=td.batch_size)

    def step(_: int) -> Any:
        with torch.no_grad():
            found = forward(TensorDict({"x": torch.randn(3, 4), "nested": {"z": torch.randn(3)}}, batch_size=[3]))
        return found["y"], found["z"]

    return step


def tensordict_params(wrap: Any) -> Any:
    net = nn.Linear(4, 2)
    params = TensorDict.from_module(net).detach().clone()

    @wrap
    def forward(x: Any) -> Any:
        with params.to_module(net):
            return net(x)

    def step(_: int) -> Any:
        with torch.no_grad():
            return forward(torch.randn(3, 4))

    return step, [lambda: params.apply_(lambda parameter: parameter.mul_(2))]


def x_decoder(wrap: Any) -> Any:
    model = TransformerWrapper(
        num_tokens=64, max_seq_len=16, attn_layers=Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True)
    ).eval()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(torch.randint(0, 64, (2, 8)))

    return step


PROGRAMS = {
    "ode_rk4": ode_rk4,
    "ode_field": ode_field,
    "gp_training": gp_training,
    "e3nn_product": e3nn_product,
    "gcn_data": gcn_data,
    "gat": gat,
    "data_result": data_result,
    "tensordict_step": tensordict_step,
    "tensordict_params": tensordict_params,
    "x_decoder": x_decoder,
}
