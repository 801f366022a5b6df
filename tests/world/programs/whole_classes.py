"""Classifiers of images in one file each: mixup and dropped paths, averaged weights and a checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F

from tests.world.parts import mlp, state_of


class DropPath(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Any) -> Any:
        if not self.training or self.p == 0:
            return x
        keep = 1 - self.p
        return x.div(keep) * torch.floor(keep + torch.rand((x.shape[0], 1, 1)))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.zeros(1, 1, 16))
        self.pos, self.head = nn.Parameter(torch.randn(1, 5, 16) * 0.02), nn.Linear(16, 5)
        self.attn = nn.ModuleList([nn.MultiheadAttention(16, 2, 0.1, batch_first=True) for _ in range(2)])
        self.mlps, self.drops = (
            nn.ModuleList([mlp(16, 32, 16) for _ in range(2)]),
            nn.ModuleList([DropPath(0.0), DropPath(0.2)]),
        )

    def forward(self, x: Any) -> Any:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for attn, ff, drop in zip(self.attn, self.mlps, self.drops, strict=True):
            x = x + drop(attn(x, x, x, need_weights=False)[0])
            x = x + drop(ff(x))
        return self.head(x[:, 0])


def vit_mixup(wrap: Any) -> Any:
    """Mixup with a factor of NumPy's, dropped paths, a schedule outside and a meter of the accuracy."""
    model = ViT()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    meter = {"loss": 0.0, "correct": 0, "total": 0}

    @wrap
    def train(inputs: Any, targets: Any, lam: float) -> Any:
        index = torch.randperm(inputs.size(0))
        mixed = lam * inputs + (1 - lam) * inputs[index, :]
        targets_a, targets_b = targets, targets[index]
        outputs = model(mixed)
        loss = lam * F.cross_entropy(outputs, targets_a) + (1 - lam) * F.cross_entropy(outputs, targets_b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _, predicted = torch.max(outputs.data, 1)
        meter["loss"] += loss.item()
        meter["total"] += targets.size(0)
        meter["correct"] += (
            lam * predicted.eq(targets_a.data).cpu().sum().float()
            + (1 - lam) * predicted.eq(targets_b.data).cpu().sum().float()
        ).item()
        return loss

    def step(n: int) -> Any:
        lam = np.random.RandomState(n).beta(1.0, 1.0)
        loss = train(torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)), lam)
        scheduler.step()
        return loss.detach(), meter, state_of(model, optimizer)

    return step


def averaged_weights(wrap: Any) -> Any:
    """A convolutional net: one cycle, averaged weights from some step on, a checkpoint that is loaded back."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Dropout(0.1), nn.Linear(8, 5))  # fmt: skip
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=210)
    swa, saved = optim.swa_utils.AveragedModel(model), {}

    @wrap
    def train(x: Any, y: Any) -> Any:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        return loss.item()

    @wrap
    @torch.no_grad()
    def validate(x: Any, y: Any) -> Any:
        model.eval()
        return (model(x).argmax(1) == y).float().mean().item()

    def step(n: int) -> Any:
        losses = train(torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,)))
        scheduler.step()
        if n > 50 and n % 5 == 0:
            swa.update_parameters(model)
        accuracy = validate(torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,)))
        if n == 80:
            saved["model"] = copy.deepcopy(model.state_dict())
        if n == 120:
            model.load_state_dict(saved["model"])
        return losses, accuracy, state_of(model, swa, optimizer)

    return step


PROGRAMS = {
    "vit_mixup": vit_mixup,
    "averaged_weights": averaged_weights,
}
