"""The steps of a new user: install the wheel, follow the pages, make mistakes, report a bug.

Each step runs in a new environment, from an empty directory. Of the checkout it uses only text that a user would paste:
the README, the quick start, and what messages say.
"""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest
import torch
from typing_extensions import override

from tests.support.installing import ROOT, new_environment, run
from tests.support.pages import blocks, says

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of the new environment."""
    return new_environment(tmp_path_factory.mktemp("user"), wheel)


def paste(python: Path, here: Path, text: str) -> tuple[str, str]:
    """Run a program that a user pasted into a file; gives what it prints, and its warnings."""
    (here / "program.py").write_text(text, encoding="utf-8")
    cache = here / "cache"
    done = run(python, "program.py", cwd=here, CAPTURE_CACHE_DIR=str(cache), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_a_page_is_pasted(page: str, python: Path, tmp_path: Path) -> None:
    code = [block for block in blocks(ROOT / page) if block.is_run]
    printed, warned = paste(python, tmp_path, "\n".join(block.text for block in code))
    if not torch.cuda.is_available():
        told = "".join(block.printed or "" for block in code)
        assert says(re.sub(r"page\.md:\d+", "program.py:1", told), printed), printed
    assert "Traceback" not in warned
    (gain,) = (float(number) for number in re.findall(r"([\d.]+) times as fast", printed))
    assert gain > 1.0, printed
    (replays,) = (int(number) for number in re.findall(r"(\d+) replayed", printed))
    assert replays > 100


STEP = """
import numpy as np
import torch
from torch import nn
from capture import capture, recordings

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), fused=True)
weights = np.ones((4, 1), dtype=np.float32)
as_tensor = torch.from_numpy(weights)


@capture({options})
def step(x, y, weights):
    loss = ((model(x) - y).square() * {weights}).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {result}


for number in range(8):
    out = step(torch.randn(4, 8), torch.randn(4, 1), {argument})
print(recordings(step).replays, "replays")
"""
RIGHT = {"options": "", "weights": "weights", "result": "loss.detach()", "argument": "as_tensor"}


@pytest.mark.parametrize(
    ("mistake", "code", "line", "fix"),
    [
        ({"weights": "np.random.rand()"}, "CG202", "np.random.rand()", "draw before the call, and pass what was drawn"),
        (
            {"weights": "torch.from_numpy(np.tile(weights, (9999, 1)))[:4]", "argument": "weights"},
            "CG202", "torch.from_numpy(np.tile(weights, (9999, 1)))", "pass torch.from_numpy(array) as an argument",
        ),
    ],
)  # fmt: skip
def test_a_mistake_and_its_fix(
    mistake: dict[str, str], code: str, line: str, fix: str, python: Path, tmp_path: Path
) -> None:
    """The message names code, line and fix. With the fix calls are replayed, and there is no message."""
    printed, warned = paste(python, tmp_path, STEP.format(**{**RIGHT, **mistake}))
    assert printed.splitlines()[-1] == "0 replays", printed
    assert f"{code} " in warned, warned
    assert re.search(rf"where: .*{re.escape(line)}", warned), warned
    assert re.search(rf"(fix:|or) .*{re.escape(fix)}", warned), warned
    page = run(python.with_name("capture"), "rule", code, cwd=tmp_path)
    assert page.stdout.startswith(f"{code} ")
    printed, warned = paste(python, tmp_path, STEP.format(**RIGHT))
    assert (printed.splitlines()[-1], warned) == ("5 replays", ""), (printed, warned)


def test_an_option_of_torch_compile(python: Path, tmp_path: Path) -> None:
    """An option of ``torch.compile`` raises at the decorator, and the error says what to write instead."""
    (tmp_path / "program.py").write_text(STEP.format(**{**RIGHT, "options": "mode='reduce-overhead'"}), "utf-8")
    done = run(python, "program.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "capture.core.errors.AnnotationError: mode= is no option of capture: capture compiles nothing: leave it out"
    )


class Words(html.parser.HTMLParser):
    """The text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    @override
    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_and_what_a_bug_report_needs(python: Path, tmp_path: Path) -> None:
    program = STEP.format(**RIGHT) + "\nimport capture\nprint(capture.report(html='report.html', json='run.json'))\n"
    printed, _ = paste(python, tmp_path, program)
    assert "1 recorded" in printed
    page = Words()
    page.feed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "__main__.step" in page.text
    again = run(python.with_name("capture"), "report", "run.json", "--html", "again.html", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "__main__.step" in again.stdout
    assert (tmp_path / "again.html").stat().st_size == (tmp_path / "report.html").stat().st_size
    told = run(python.with_name("capture"), "env", cwd=tmp_path).stdout
    for row in (rf"torch +{re.escape(torch.__version__)}", r"fast path +yes", r"C module +version \d+", r"driver +\S"):
        assert re.search(row, told), told
