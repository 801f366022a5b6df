"""torch-geometric: graphs that change from step to step, batches of them, and training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATv2Conv, GCNConv, GINConv, HeteroConv, SAGEConv, global_mean_pool
from torch_geometric.utils import scatter


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(4, 8), GCNConv(8, 3)

    def forward(self, data: Any) -> Any:
        x = F.dropout(F.relu(self.first(data.x, data.edge_index)), training=self.training)
        return F.log_softmax(self.second(x, data.edge_index), dim=1)


def _graph(nodes: int, edges: int) -> Data:
    return Data(
        x=torch.randn(nodes, 4), edge_index=torch.randint(0, nodes, (2, edges)), y=torch.randint(0, 3, (nodes,))
    )


def node_training(wrap: Any) -> Any:
    """The tutorial: one graph, masks, Adam."""
    model, data = Net(), _graph(12, 30)
    data.train_mask = torch.arange(12) < 8
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    forward = wrap(model)

    def step(_: int) -> Any:
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(forward(data)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            return loss.detach(), forward(data).argmax(dim=1)

    return step


def graph_batches(wrap: Any) -> Any:
    """Batches of graphs whose number of edges differs: another shape nearly every time."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = SAGEConv(4, 8), nn.Linear(8, 2)

        def forward(self, x: Any, edge_index: Any, batch: Any) -> Any:
            return self.head(global_mean_pool(self.conv(x, edge_index).relu(), batch))

    model = Classifier()
    forward, optimizer = wrap(model), torch.optim.Adam(model.parameters(), lr=0.01)

    def step(n: int) -> Any:
        batch = Batch.from_data_list([_graph(4 + n % 3, 6 + n % 5) for _ in range(2)])
        loss = forward(batch.x, batch.edge_index, batch.batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), list(model.parameters())

    return step


def loader_epochs(wrap: Any) -> Any:
    """A loader gives the same few batch shapes in every epoch."""
    graphs = [_graph(4, 8) for _ in range(8)]
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    conv, head = GINConv(net), nn.Linear(8, 2)
    params = [*conv.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(params, lr=0.01)

    @wrap
    def loss_of(data: Any) -> Any:
        pooled = global_mean_pool(conv(data.x, data.edge_index).relu(), data.batch, size=4)
        return head(pooled).square().mean()

    def step(_: int) -> Any:
        for data in DataLoader(graphs, batch_size=4, shuffle=True):
            optimizer.zero_grad()
            loss = loss_of(data)
            loss.backward()
            optimizer.step()
        return loss.detach(), params

    return step


def attention(wrap: Any) -> Any:
    model = GATv2Conv(4, 3, heads=2, edge_dim=2).eval()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(torch.randn(6, 4), torch.randint(0, 6, (2, 12)), torch.randn(12, 2))

    return step


def hetero(wrap: Any) -> Any:
    conv = HeteroConv({("a", "to", "b"): SAGEConv((4, 4), 8), ("b", "to", "a"): SAGEConv((4, 4), 8)})

    @wrap
    def forward(data: Any) -> Any:
        return conv(data.x_dict, data.edge_index_dict)

    def step(_: int) -> Any:
        data = HeteroData()
        data["a"].x, data["b"].x = torch.randn(3, 4), torch.randn(4, 4)
        data["a", "to", "b"].edge_index = torch.randint(0, 3, (2, 5))
        data["b", "to", "a"].edge_index = torch.randint(0, 3, (2, 5))
        with torch.no_grad():
            return forward(data)

    return step


def messages(wrap: Any) -> Any:
    """Message passing by hand with scatter."""
    edge_mlp, node_mlp = nn.Linear(8, 8), nn.Linear(12, 4)

    @wrap
    def layer(x: Any, edge_index: Any) -> Any:
        row, col = edge_index
        sent = torch.relu(edge_mlp(torch.cat([x[row], x[col]], -1)))
        return x + node_mlp(torch.cat([x, scatter(sent, col, dim=0, dim_size=x.shape[0], reduce="sum")], -1))

    def step(_: int) -> Any:
        with torch.no_grad():
            return layer(torch.randn(5, 4), torch.randint(0, 5, (2, 9)))

    return step


PROGRAMS = {
    "node_training": node_training,
    "graph_batches": graph_batches,
    "loader_epochs": loader_epochs,
    "attention": attention,
    "hetero": hetero,
    "messages": messages,
}
