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


class LitLogged(Lit):
    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.loss_of(*batch)
        self.log("loss", loss)
        return loss

    def loss_of(self, x: Any, y: Any) -> Any:
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)]


def _fitted(wrap: Any, model: Any, name: str, **more: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    setattr(model, name, wrap(getattr(model, name)))

    def step(_: int) -> Any:
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, **more,
        )  # fmt: skip
        trainer.fit(model, _data())
        return list(model.parameters())

    return step


def lightning_training_step(wrap: Any) -> Any:
    return _fitted(wrap, LitLogged(), "training_step", gradient_clip_val=1.0)


def lightning_loss(wrap: Any) -> Any:
    return _fitted(wrap, LitLogged(), "loss_of", accumulate_grad_batches=2)


class LitManual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()


def lightning_manual(wrap: Any) -> Any:
    return _fitted(wrap, LitManual(), "forward")


def accelerate_whole(wrap: Any) -> Any:
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 50))

    @wrap
    def loss_of(x: Any, y: Any) -> Any:
        return nn.functional.mse_loss(model(x), y)

    def step(_: int) -> Any:
        loss = loss_of(torch.randn(4, 8), torch.randn(4, 1))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach(), list(net.parameters())

    return step


def accelerate_captured_step(wrap: Any) -> Any:
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))

    @wrap
    def train(x: Any, y: Any) -> Any:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return lambda _: (train(torch.randn(4, 8), torch.randn(4, 1)), list(net.parameters()))


PROGRAMS = {
    "lightning_fit": lightning_fit,
    "lightning_step": lightning_step,
    "accelerate_step": accelerate_step,
    "lightning_training_step": lightning_training_step,
    "lightning_loss": lightning_loss,
    "lightning_manual": lightning_manual,
    "accelerate_whole": accelerate_whole,
    "accelerate_captured_step": accelerate_captured_step,
}
