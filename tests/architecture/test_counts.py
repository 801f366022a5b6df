"""What ``scripts/count_structure.py`` counts stays within its limits, and each count finds a planted case."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import count_structure
from scripts.count_structure import COUNTS, ROOT, Tree
from tests.support.garbage import no_collections


@pytest.fixture(scope="module")
def tree() -> Tree:
    with no_collections():  # they would look at half the tree again and again while it grows
        return Tree()


@pytest.mark.parametrize("name", COUNTS)
def test_counts_stay_within_their_limits(tree: Tree, name: str) -> None:
    count, limit = COUNTS[name]
    found = count(tree)
    assert len(found) <= limit, "\n  ".join([f"{name}: at most {limit}", *found])


# --------------------------------------------------------------------------------------- the counts, on other packages


def package(tmp_path: Path, **files: str) -> Tree:
    """A tree of these files: ``key__a`` is ``capture/key/a.py``. Each folder gets an ``__init__.py``."""
    for name, text in files.items():
        path = tmp_path / "capture" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        (tmp_path / "capture" / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return Tree(tmp_path)


def test_circles_and_imports_up_are_seen(tmp_path: Path) -> None:
    typing_only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from capture.tree import b"
    found = package(
        tmp_path, key__a=typing_only, tree__b="def late():\n    import capture.key.a", tree__c="import torch"
    )
    assert count_structure.circles(found) == ["capture.key.a <-> capture.tree.b"]
    assert count_structure.imports_up(found) == ["capture.key.a -> capture.tree.b"]


def test_imports_down_are_no_circles(tmp_path: Path) -> None:
    found = package(tmp_path, key__a="import os", tree__b="from capture.key import a\nfrom capture.key.a import x")
    assert count_structure.circles(found) == []
    assert count_structure.imports_up(found) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((count_structure.device_tests, text) for text in (
            "f(x) if d.type == 'cuda' else g(x)",
            "y = 'cuda' != kind",
            "y = kind in ('cpu', 'cuda')",
            "y = str(d).startswith('cuda:')",
            "y = 'device(cuda' in text",
            "if torch.cuda.is_available():\n    pass",
            "y = a and torch.cuda.is_initialized()",
            "y = [a for a in b if torch.cuda.current_device() == a]",
            "y = not torch.cuda.is_available()",
            "while torch.cuda.is_initialized():\n    pass",
            "match kind:\n    case 'cuda':\n        pass",
            "y = x.is_cuda",
        )),
        *((count_structure.text_that_runs, text) for text in (
            "exec('1')", "x = eval('1')", "compile('1', '', 'exec')", "import ast\nast.parse('1')",
        )),
        (count_structure.long_functions, "def f():\n" + "    x = 1\n" * 60),
    ],
)  # fmt: skip
def test_a_count_sees(tmp_path: Path, count: Callable[[Tree], list[str]], text: str) -> None:
    found = count(package(tmp_path, key__a=text))
    assert len(found) == 1
    assert found[0].startswith("capture/key/a.py:")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((count_structure.device_tests, text) for text in (
            "torch.cuda.synchronize()",
            "stream = torch.cuda.current_stream()\nif stream is None:\n    pass",
            "y = {'cuda': 1}['cuda']",
            "y = kind == 'cpu'",
            "y = engine.is_device and x",
            "y = kind == 'barracuda'",
        )),
        *((count_structure.text_that_runs, text) for text in (
            "re.compile('1')", "torch.compile(f)", "model.eval()", "tape.compile()", "self.exec()",
        )),
        (count_structure.long_functions, "def f():\n    '''" + "words\n" * 80 + "'''\n" + "    x = 1\n" * 50),
    ],
)  # fmt: skip
def test_a_count_is_not_misled(tmp_path: Path, count: Callable[[Tree], list[str]], text: str) -> None:
    assert count(package(tmp_path, key__a=text)) == []


def test_engines_may_ask_for_a_device(tmp_path: Path) -> None:
    found = package(tmp_path, engines__a="y = kind == 'cuda'", runtime__b="y = kind == 'cuda'")
    assert count_structure.device_tests(found) == ["capture/runtime/b.py:1"]


def test_long_test_files_and_modules_at_the_top_are_seen(tmp_path: Path) -> None:
    found = package(tmp_path, one="", two="", three="", four="")
    for name, size in (("short", 600), ("long", 601)):
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "tests" / f"test_{name}.py").write_text("x = 1\n" * size)
    assert count_structure.long_test_files(found) == ["tests/test_long.py (601 lines)"]
    assert len(count_structure.modules_at_the_top(found)) == 5
