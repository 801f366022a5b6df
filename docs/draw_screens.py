"""Take ``images/report.png`` and ``images/start.png``: ``python docs/draw_screens.py``, after ``make docs``.

Needs Chromium (Debian's package ``chromium``, or what ``CHROMIUM`` names). The report is that of a small program with
what reports show: a training step, blocks of a model, a branch, and a function that runs eagerly.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from capture import CaptureWarning, capture, config, report  # noqa: E402 - the line above has to be first
from capture.reporting.html import html_page  # noqa: E402
from capture.reporting.run_data import dumps, loads  # noqa: E402

IMAGES = ROOT / "docs" / "images"
START = ROOT / "build" / "site" / "index.html"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000")


class Block(nn.Module):
    """A block of a small model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    @capture(name="Block.forward")
    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        change: Tensor = self.down(torch.sigmoid(hidden) * torch.tanh(hidden))
        return x + change


class Model(nn.Module):
    """Blocks, each captured by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    @override
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def run_programs() -> list[object]:
    """Call what the report is about; gives what has to stay alive until it is written."""
    torch.manual_seed(0)
    model, net = Model(), nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), fused=True)

    @capture(name="train_step")
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    layers = nn.Sequential(*[module for _ in range(12) for module in (nn.Linear(8, 8), nn.Tanh())])

    @capture(name="route")
    def route(x: Tensor) -> Tensor:
        y = layers(x)
        return y + 1 if y.sum() > 0 else layers[:8](y)

    @capture(name="summary")
    def summary(x: Tensor) -> float:
        return float(np.from_dlpack(x.square()).sum())

    x, y = torch.randn(16, 8), torch.randn(16, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for _ in range(200):
            train_step(x, y)
            summary(x)
        with torch.no_grad():
            for number in range(60):
                model(torch.randn(4, 32))
                route(torch.randn(2, 8) * (1 + number % 3))
        with config.patch(enabled=False), torch.no_grad():
            model(torch.randn(4, 32))
            with torch.enable_grad():
                for _ in range(5):
                    train_step(x, y)
    return [model, train_step, route, summary]


def take(page: Path, picture: Path, size: str) -> None:
    """A screenshot of a page."""
    with tempfile.TemporaryDirectory() as profile:
        command = [os.environ.get("CHROMIUM", "chromium"), *FLAGS, f"--user-data-dir={profile}"]
        subprocess.run(
            [*command, f"--window-size={size}", f"--screenshot={picture}", page.as_uri()],
            check=True, capture_output=True, timeout=180,
        )  # fmt: skip


if __name__ == "__main__":
    with config.patch(drop_slow=False):  # what is slower is a matter of how busy this machine is
        alive = run_programs()
    with tempfile.TemporaryDirectory() as folder:
        data = dumps(report().data).replace(f"{ROOT}/", "/home/you/project/")
        (Path(folder) / "report.html").write_text(html_page(loads(data)), encoding="utf-8")
        take(Path(folder) / "report.html", IMAGES / "report.png", "1120,1500")
    del alive
    take(START, IMAGES / "start.png", "1280,900")
