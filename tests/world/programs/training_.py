"""Lightning and accelerate: their own loops around a small model."""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
from accelerate import Accelerator
from torch import nn


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _data() -> Any:
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    return torch.utils.data.DataLoader(data, batch_size=8)


def lightning_fit(wrap: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = Lit()
    model.net.forward = wrap(model.net.forward)

    def step(_: int) -> Any:
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, _data())
        return list(model.parameters())

    return step


def lightning_step(wrap: Any) -> Any:
    model = Lit()
    optimizer: Any = model.configure_optimizers()
    forward = wrap(model)

    def step(_: int) -> Any:
        loss = nn.functional.mse_loss(forward(torch.randn(4, 8)), torch.randn(4, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, list(model.parameters())

    return step, [lambda: model.freeze(), lambda: model.unfreeze()]


def accelerate_step(wrap: Any) -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    forward = wrap(model)

    def step(_: int) -> Any:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(forward(torch.randn(4, 8)), torch.randn(4, 1))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss, list(net.parameters())

    return step


PROGRAMS = {
    "lightning_fit": lightning_fit,
    "lightning_step": lightning_step,
    "accelerate_step": accelerate_step,
}
