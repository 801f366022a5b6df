"""``docs/how-it-works.md`` is true: its files exist, its functions are called in its order, its picture is up to date.

The names are read from the page: who renames such a function changes the page, and nothing here.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from capture import config
from capture.tree import thread_trees

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "capture"
PAGE = ROOT / "docs" / "how-it-works.md"
TEXT = PAGE.read_text(encoding="utf-8")
PICTURE = ROOT / "docs" / "images" / "how-it-works.svg"
CALLS = (1, 2, 3)
SUBJECTS = ("score", "net")


def named(call: int, subject: str) -> list[str]:
    """The functions that the page names for a call, in its order."""
    section = re.search(rf"^## Call {call}:.*?(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
    assert section is not None
    part = re.search(rf"^### `{subject}`\n.*?(?=^##|\Z)", section[0], re.MULTILINE | re.DOTALL)
    assert part is not None
    return re.findall(r"^\| `([\w.]+)` \|", part[0], re.MULTILINE)


def calls_of(run: Callable[[], object]) -> list[str]:
    """Python functions of the library that ``run`` calls, in order, as the page writes them."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}/"):
            module = Path(code.co_filename).relative_to(PACKAGE).with_suffix("").parts
            names.append(".".join((*module, code.co_qualname)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return names


@pytest.fixture(scope="module")
def traces() -> dict[str, list[list[str]]]:
    """The calls of five equal calls each, on the CPU, whatever the suite's device is."""
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {"__name__": "how_it_works"}
    exec(compile(blocks[0], str(PAGE), "exec"), scope)  # noqa: S102 - the page's own example
    thread_trees.forget_trees()
    scope["net"].to("cpu")
    inputs = {"score": torch.ones(3, device="cpu"), "net": torch.ones(2, 4, device="cpu")}
    with config.patch(cache=False, verify="off", poison=False, enabled=True), torch.no_grad():
        calls = {}
        for subject in SUBJECTS:
            function, x = scope[subject], inputs[subject]
            calls[subject] = [calls_of(lambda: function(x)) for _ in range(5)]  # noqa: B023 - called at once
    return calls


@pytest.mark.one_in(3)
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("call", CALLS)
def test_functions_are_called_in_this_order(call: int, subject: str, traces: dict[str, list[list[str]]]) -> None:
    names, trace = named(call, subject), traces[subject][call - 1]
    assert len(names) > 2
    position = 0
    for name in names:
        assert name in trace, f"call {call} of {subject} does not call {name}"
        assert name in trace[position:], f"call {call} of {subject} calls {name} before those that the page names first"
        position = trace.index(name, position)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_later_calls_run_nothing_of_ours_in_python(subject: str, traces: dict[str, list[list[str]]]) -> None:
    assert [name.rpartition(".")[0] for name in traces[subject][4]] in (
        ["api.decorator._function.<locals>"], ["api.decorator._method.<locals>"],
    )  # fmt: skip


def test_files_exist() -> None:
    words = re.findall(r"`((?:capture|tests|docs|engines)/[\w./]*)`", TEXT)
    missing = [word for word in words if not (ROOT / word).exists() and not (PACKAGE / word).exists()]
    assert len(words) > 5
    assert not missing


def draw() -> Any:
    spec = importlib.util.spec_from_file_location("draw_how_it_works", ROOT / "docs" / "draw_how_it_works.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_what_its_script_draws() -> None:
    assert draw().picture() == PICTURE.read_text(encoding="utf-8"), "run python docs/draw_how_it_works.py"
    assert f"({PICTURE.relative_to(PAGE.parent)})" in TEXT


def test_the_pictures_folders_exist() -> None:
    script = draw()
    steps = [*script.WAY_IN[1:], *(step for _, _, boxes in script.CALLS for step in boxes)]
    assert [folder for folder, _ in steps if not (ROOT / folder).is_dir()] == []
