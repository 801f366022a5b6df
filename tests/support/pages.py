"""Code blocks of the README and of ``docs/``: what they are, and what they print when they run.

A page's Python blocks share one namespace and run in order. A block of text right after one is what it prints. A
comment in the line before a block, which readers of the page do not see, may say how it runs:

``<!-- not run: why -->``          nobody can run it here ``<!-- needs cuda -->``            runs where there is a GPU
``<!-- needs peft, transformers -->``  runs where these modules are, as in ``make test-world`` ``<!-- raises SomeError
-->``      ends with that error, whose message counts as printed

Names that a page uses and does not define (``model``, ``loader``) are made by ``tests/documentation/setup/<page>.py``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from capture import CaptureWarning

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "tests" / "documentation" / "setup"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_DIRECTIVE = re.compile(r"<!-- (not run: .+|needs [\w, ]+|raises \w+) -->")


@frozen(kw_only=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    line: int
    """Number of its first line in the page, from 1 on."""
    directive: str = ""
    printed: str | None = None
    """What the page says that it prints."""

    @property
    def is_code(self) -> bool:
        """Whether the block is Python that can be run somewhere."""
        return self.language == "python" and not self.directive.startswith("not run")

    @property
    def is_run(self) -> bool:
        """Whether it runs on this machine."""
        needed = self.directive.removeprefix("needs ").split(", ") if self.directive.startswith("needs ") else []
        there = (torch.cuda.is_available() if one == "cuda" else _is_installed(one) for one in needed)
        return self.is_code and all(there)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def blocks(page: Path) -> list[Block]:
    """All fenced blocks, a block of text with the Python block right before it that prints it."""
    read: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    at, last_end = 0, -1
    while at < len(lines):
        if not lines[at].startswith("```"):
            at += 1
            continue
        end = next(number for number in range(at + 1, len(lines)) if lines[number].startswith("```"))
        text = "\n".join(lines[at + 1 : end]) + "\n"
        language = lines[at].removeprefix("```").strip()
        said = _DIRECTIVE.fullmatch(lines[at - 1].strip()) if at else None
        between = [line for line in lines[last_end + 1 : at] if line.strip()]
        follows = bool(read) and read[-1].is_code and len(between) <= 1 and said is None
        if language == "text" and follows:
            before = read.pop()
            read.append(
                Block(language="python", text=before.text, line=before.line, directive=before.directive, printed=text)
            )
        else:
            read.append(Block(language=language, text=text, line=at + 2, directive=said[1] if said else ""))
        at, last_end = end + 1, end
    return read


def run(page: Path) -> Iterator[tuple[Block, str]]:
    """Run a page, block by block: each with what it printed, warnings and an expected error included."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    name = "_".join((*page.parent.relative_to(ROOT).parts[1:], page.stem))
    before = SETUP / f"{name.replace('-', '_').lower()}.py"
    if before.exists():
        exec(compile(before.read_text(encoding="utf-8"), str(before), "exec"), scope)  # noqa: S102 - a file of this folder
    for block in blocks(page):
        if block.is_run:
            yield block, _printed(block, page, scope)


def _printed(block: Block, page: Path, scope: dict[str, Any]) -> str:
    tree = ast.increment_lineno(ast.parse(block.text), block.line - 1)  # messages then name the line of the page
    code = compile(tree, str(page), "exec")
    out = io.StringIO()

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if issubclass(category, CaptureWarning) or not block.directive.startswith("needs "):
            print(message, file=out)  # blocks that need other libraries show none of their warnings

    error = block.directive.removeprefix("raises ") if block.directive.startswith("raises ") else ""
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        try:
            before = set(scope)
            exec(code, scope)  # noqa: S102 - a block of our own pages
            for name in scope.keys() - before:
                if name.startswith("test_"):  # a page's example of a test runs as a test
                    scope[name]()
        except Exception as raised:
            if type(raised).__name__ != error:
                raise
            print(f"{error}: {raised}")
        else:
            assert not error, f"{page.name}:{block.line} did not raise {error}"
    return out.getvalue()


def comparable(text: str) -> list[str]:
    """Lines, without what differs between machines: numbers with a decimal point, paths, the width of columns."""
    text = re.sub(r"\([^()\s]*?([\w.-]+):\d+\)", "(file)", text)
    text = re.sub(r"\d+\.\d+", "#", text)
    # Under tests calls are not timed (``CAPTURE_DROP_SLOW``), as a busy machine would drop recordings; a user's are.
    text = re.sub(r", \d+ measured", "", text)
    text = re.sub(r"\d{2,}(?= replay(?:s|ed)\b)|\d+(?= timed\b|\s+%)", "##", text)
    return [re.sub(r"\s+", " ", line).strip() for line in text.strip().splitlines()]


def says(page: str, printed: str) -> bool:
    """Whether a page shows what was printed. ``...`` stands for anything, on a line of its own for any lines."""
    pattern = ""
    for line in comparable(page):
        pattern += "(?:.*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in comparable(printed))) is not None
