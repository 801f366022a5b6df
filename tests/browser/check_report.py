"""The report's page in headless Chromium: it is drawn, its filters work, and nothing is wrong on its console.

``make test-browser`` runs this; the plain suite does without a browser, so the name is not that of a test file.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from capture import CaptureWarning, capture, config, report

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--enable-logging=stderr",
    "--log-level=0", "--virtual-time-budget=3000",
)  # fmt: skip


def browse(page: Path, folder: Path, *more: str, ask: str = "") -> tuple[str, str]:
    """The document after its scripts ran, and what came on its console."""
    browser = os.environ.get("CHROMIUM", "chromium")
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", *more, f"{page.as_uri()}{ask}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @capture(name="Block.forward")
    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) + torch.tanh(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    @capture(name="fast")
    def fast(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    @capture(name="reads </script><b>values")
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x + len(np.from_dlpack(x))

    x = torch.ones(4)
    with pytest.warns(CaptureWarning, match="CG201"):
        reads(x)
    for _ in range(39):
        reads(x)
    for _ in range(40):
        fast(x)
    with config.patch(enabled=False):
        fast(x)
    model = Model()
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(2, 4))
    made = tmp_path_factory.mktemp("page") / "report.html"
    report(html=made)
    return made


def titles(document: str) -> list[str]:
    return re.findall(r"<h2>(.*?)(?:</h2>|<span)", document)


def test_it_is_drawn_without_an_error(page: Path, tmp_path: Path) -> None:
    document, console = browse(page, tmp_path, "--dump-dom")
    assert console == ""
    assert titles(document) == [READS, "fast", "Block.forward"]  # what is eager comes first
    assert "38 replayed" in document
    assert "40 eager" in document
    assert "\u00d7 eager" in document
    assert document.count('class="finding eager"') == 1
    assert document.count("<svg") == 3 + 2  # events of each function; schedules of two recordings
    assert ">blocks.0-3</span>" in document
    assert "the longest path has 3 of 4 operators" in document  # linear, relu and tanh, add
    assert re.search(r'href="vscode://file/[^"]*check_report.py:\d+"', document)


READS = "reads &lt;/script&gt;&lt;b&gt;values"


def test_notes_are_shown_if_asked_for(page: Path, tmp_path: Path) -> None:
    without, with_notes = (browse(page, tmp_path, "--dump-dom", ask=ask)[0] for ask in ("", "#notes=1"))
    assert "finding note" not in without
    assert re.search(r">Not shown: \d+, which keep no call from being replayed", without)
    assert "finding note" in with_notes
    assert not re.search(r">Not shown: \d+, which keep no call from being replayed", with_notes)


@pytest.mark.parametrize(
    ("ask", "shown"),
    [
        ("#search=CG201", [READS]),
        ("#least=replayed", ["fast", "Block.forward"]),
        ("#search=blocks.0-3", ["Block.forward"]),
        ("#least=problem", [READS]),
        ("#search=nothing+like+it", []),
    ],
)
def test_filters(page: Path, tmp_path: Path, ask: str, shown: list[str]) -> None:
    document, console = browse(page, tmp_path, "--dump-dom", ask=ask)
    assert console == ""
    assert titles(document) == shown
    assert ('id="none" hidden' in document) == bool(shown)


def test_a_screenshot_has_colours(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(page, tmp_path, f"--screenshot={picture}", "--window-size=1100,1400")
    image = pytest.importorskip("PIL.Image").open(picture).convert("RGB")
    assert {(31, 157, 99), (217, 83, 79)} <= {colour for _, colour in image.getcolors(1 << 24)}  # replayed, eager
