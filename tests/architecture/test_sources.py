"""What every file's syntax tree keeps to: who may name ``torch._``, comments, annotations, imports."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.garbage import no_collections

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "capture"
CHECKED_FOLDERS = ("capture", "tests", "examples", "benchmarks", "scripts")


# ---------------------------------------------------------------------------------------------- reading the sources


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def unit_of(path: Path) -> str:
    """The part that a file belongs to: ``capture/rules/cg101_x.py`` -> ``rules``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def parse(path: Path) -> ast.Module:
    with no_collections():
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports, also those inside functions and under ``TYPE_CHECKING``."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def imported_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names this statement may load: ``from a import b`` may load ``a`` and ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or ""
    return [module, *(f"{module}.{alias.name}" for alias in node.names)]


# ------------------------------------------------------------------------------------------------- the private names


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def torch_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> what of torch it is bound to, for every import in the file."""
    names: dict[str, str] = {}
    for node in imports(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr) -> list[str] | None:
    """``a.b.c`` -> ``["a", "b", "c"]``; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def private_torch_names(tree: ast.Module) -> list[tuple[ast.AST, str]]:
    """Places where a file names something private of torch: by import, by attribute, by ``getattr`` or a string."""
    places: list[tuple[ast.AST, str]] = []
    names = torch_names(tree)
    for statement in imports(tree):
        places.extend(
            (statement, module)
            for module in dict.fromkeys(imported_modules(statement))
            if module.split(".")[0] == "torch" and any(map(is_private, module.split(".")))
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            parts = dotted(node.value)
            if parts and parts[0] in names:
                places.append((node, ".".join([names[parts[0]], *parts[1:], node.attr])))
        elif isinstance(node, ast.Call):
            called = (dotted(node.func) or [""])[-1]
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if called in ("import_module", "__import__", "find_spec"):
                places.extend((node, text) for text in texts if re.match(r"torch(\.\w+)*\._", text))
            elif called in ("getattr", "hasattr", "setattr", "delattr") and node.args:
                parts = dotted(node.args[0])
                if parts and parts[0] in names:
                    places.extend((node, f"{'.'.join(parts)}.{text}") for text in texts if is_private(text))
    return places


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "import torch._dynamo as dynamo",
        "from torch import _C",
        "from torch._dynamo import reset",
        "from torch.utils import _pytree as pytree",
        "import torch\ntorch._foreach_copy_([], [])",
        "import torch\ntorch.cuda._sleep(1)",
        "import torch.nn as nn\nnn.modules._functions",
        "from torch import Tensor\nTensor._make_subclass",
        "import torch\ngetattr(torch, '_C')",
        "import torch\nhasattr(torch.cuda, '_sleep')",
        "import importlib\nimportlib.import_module('torch._inductor.config')",
        "def f():\n    if TYPE_CHECKING:\n        from torch.fx._compatibility import x",
    ],
)
def test_private_names_are_recognised(source: str) -> None:
    assert private_torch_names(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "import torch\ntorch.cuda.current_stream()",
        "import torch\nx = torch.ones(1)\nx._version",
        "from capture.torch_private import capabilities\ncapabilities.probe()",
        "text = 'torch._C is private'",
        "import numpy\nnumpy._core",
    ],
)
def test_public_names_are_not_mistaken(source: str) -> None:
    assert not private_torch_names(ast.parse(source))


def test_private_torch_names_live_in_their_files() -> None:
    found = [
        f"{place(path, node)} {name}"
        for path in sources("capture")
        if unit_of(path) != "torch_private"
        for node, name in private_torch_names(parse(path))
    ]
    assert not found, "only capture/torch_private/ may name what is private in torch:\n  " + "\n  ".join(found)


# ------------------------------------------------------------------------------------------------------------- comments


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
BLANKET = re.compile(r"type:\s*ignore(?!\[)|noqa(?!:)")


def hides(text: str) -> bool:
    return bool(UNFINISHED.search(text) or BLANKET.search(text))


def test_comments_promise_and_hide_nothing() -> None:
    """No unfinished work in comments (file an issue), no ``type: ignore`` or ``noqa`` without its code."""
    texts = {path: path.read_text(encoding="utf-8") for path in sources(*CHECKED_FOLDERS)}
    hiding = [
        f"{path.relative_to(ROOT)}:{line} {comment}"
        for path, text in texts.items()
        if hides(text)  # nowhere in the file: to find its comments takes long
        for line, comment in comments(text)
        if hides(comment)
    ]
    assert not hiding, "\n  ".join(["these comments hide something:", *hiding])


@pytest.mark.parametrize("comment", ["# type: ignore", "# noqa", "# type:ignore  # later", "x = 1  # TODO: finish"])
def test_hiding_comments_are_recognised(comment: str) -> None:
    assert hides(comment)
    assert hides(f"x = 1  {comment}\ny = 2\n")


@pytest.mark.parametrize("comment", ["# type: ignore[attr-defined]", "# noqa: S102 - names only", "# a todo list"])
def test_honest_comments_are_not_mistaken(comment: str) -> None:
    assert not hides(comment)


def has_code(tree: ast.Module) -> bool:
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in tree.body)


FUTURE = re.compile(r"^from __future__ import annotations$", re.MULTILINE)


def begins_with_future(text: str) -> bool:
    """Whether annotations of this file stay text, or it has no code: parsed as far as that line, else to the end."""
    line = FUTURE.search(text)
    tree = ast.Module([], [])
    with contextlib.suppress(SyntaxError):  # the line stands in a text that goes on
        tree = ast.parse(text[: line.end() if line is not None else 0])
    if not tree.body:
        tree = ast.parse(text)
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    return not has_code(tree) or any(alias.name == "annotations" for node in futures for alias in node.names)


def test_annotations_are_never_evaluated_early() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in sources(*CHECKED_FOLDERS)
        if not begins_with_future(path.read_text(encoding="utf-8"))
    ]
    assert not missing, f"`from __future__ import annotations` is missing in: {', '.join(missing)}"


LINE = "from __future__ import annotations\n"


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("", True),
        ("'''Words.'''\n", True),
        (LINE, True),
        (f"'''Words.'''\n\n{LINE}x = 1\n", True),
        ("from __future__ import division, annotations\nx = 1\n", True),
        ("x = 1\n", False),
        (f"'''\n{LINE}'''\nx = 1\n", False),
        (f"import os\nx = '''\n{LINE}'''\n", False),
    ],
)
def test_files_that_keep_their_annotations_as_text_are_told_from_others(text: str, begins: bool) -> None:
    assert begins_with_future(text) == begins


STAGES = (
    "core",
    "key",
    "state",
    "observe",
    "engines",
    "guards",
    "tree",
    "autograd",
    "plan_cache",
    "distributed",
    "runtime",
)


def test_a_call_imports_nothing_of_the_library() -> None:
    """No function on the way of a call imports: a signal may end the import in the middle, and another thread that
    waits for it goes on with half a module."""
    places = [
        place(path, node)
        for stage in STAGES
        for path in sources(f"capture/{stage}")
        for tree in [parse(path)]
        if any(node.col_offset for node in imports(tree))  # else none is in a function; each is looked through alone
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.Lambda)
        for node in imports(function)
        if any(name.partition(".")[0] == "capture" for name in imported_modules(node))
    ]
    assert places == []
