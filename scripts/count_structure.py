"""Count what the structure of ``capture/`` promises, as a table for ``docs/development.md``.

Each count has a limit; the exit status is 1 if one is over it. ``tests/architecture/test_counts.py`` holds them.
Imports are counted by the files' syntax trees, those under ``TYPE_CHECKING`` and inside functions too.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEVICE_FOLDERS = ("engines", "distributed", "torch_private")
"""What differs between devices belongs here; everywhere else an engine is asked."""
RUNS_TEXT = ("exec", "eval", "compile", "ast.parse", "builtins.exec", "builtins.eval")
MAX_FUNCTION_LINES = 60  # without the docstring
MAX_TEST_FILE_LINES = 600


class Tree:
    """The package below ``root``, each file parsed and walked through once."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        files = sorted((root / "capture").rglob("*.py"))
        trees = {path.relative_to(root): ast.parse(path.read_text(encoding="utf-8")) for path in files}
        self.files = {path: list(ast.walk(tree)) for path, tree in trees.items()}

    def walk(self, *, without: tuple[str, ...] = ()) -> Iterator[tuple[Path, ast.AST]]:
        """Every node with its file; except in the named folders."""
        return ((path, node) for path, nodes in self.files.items() if path.parts[1] not in without for node in nodes)


def place(path: Path, node: ast.AST) -> str:
    return f"{path}:{getattr(node, 'lineno', 1)}"


# -------------------------------------------------------------------------------------------------------------- imports


def module_of(path: Path) -> str:
    """``capture/core/__init__.py`` -> ``capture.core``."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: Tree) -> dict[str, set[str]]:
    """The modules of the package that each of them imports."""
    modules = {module_of(path) for path in tree.files}
    imported: dict[str, set[str]] = {name: set() for name in modules}
    for path, node in tree.walk():
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            below = [f"{node.module}.{name}" for name in names] if node.module else []
            names = [name if name in modules else str(node.module) for name in below]
        imported[module_of(path)].update(name for name in names if name in modules)
    return imported


def circles(tree: Tree) -> list[str]:
    """Circles of imports: one line for each set of modules that reach themselves."""
    below = imports(tree)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        open_ = list(below[start])
        while open_:
            name = open_.pop()
            if name not in seen:
                seen.add(name)
                open_.extend(below[name])
        return seen

    reach = {name: reached(name) for name in below}
    own = {name: frozenset({member for member in reach[name] if name in reach[member]}) for name in below}
    return sorted(" <-> ".join(sorted(group)) for group in set(own.values()) if group)


def layers(root: Path) -> dict[str, int]:
    """A folder's place in the order of ``pyproject.toml``, from 0, the lowest."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    stages = next(one for one in settings["tool"]["importlinter"]["contracts"] if one["id"] == "stages")
    return {name: place for place, name in enumerate(reversed(stages["layers"]))}


def imports_up(tree: Tree) -> list[str]:
    """Imports of a later stage by an earlier one."""
    order = layers(tree.root)
    upward = []
    for name, below in imports(tree).items():
        for imported in below:
            ends = [module.split(".")[1] for module in (name, imported) if "." in module]
            if len(ends) == 2 and order[ends[0]] < order[ends[1]]:
                upward.append(f"{name} -> {imported}")
    return sorted(upward)


def modules_at_the_top(tree: Tree) -> list[str]:
    return [str(path) for path in tree.files if len(path.parts) == 2]


# ---------------------------------------------------------------------------------------------------- words of the code


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as text; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _says_cuda(node: ast.expr) -> bool:
    """Whether this is a string with the word ``cuda``, or a tuple, list or set with one."""
    members = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    texts = [one.value for one in members if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return any(re.search(r"\bcuda\b", text) for text in texts)


def _asks_a_device(node: ast.AST) -> bool:
    """Whether this is a comparison, ``in``, ``startswith`` or ``case`` with the word ``cuda``, or ``x.is_cuda``."""
    if isinstance(node, ast.Compare):
        return any(map(_says_cuda, [node.left, *node.comparators]))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("startswith", "endswith") and any(map(_says_cuda, node.args))
    if isinstance(node, ast.MatchValue):
        return _says_cuda(node.value)
    return isinstance(node, ast.Attribute) and node.attr == "is_cuda"


def _conditions(node: ast.AST) -> list[ast.expr]:
    """The expressions below ``node`` that conditions are made of."""
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    return node.ifs if isinstance(node, ast.comprehension) else []


def device_tests(tree: Tree) -> list[str]:
    """Places outside of ``DEVICE_FOLDERS`` that take another way on a CUDA device."""
    places = set()
    for path, node in tree.walk(without=DEVICE_FOLDERS):
        by_condition = any(
            dotted(part).startswith("torch.cuda.")
            for condition in _conditions(node)
            for part in ast.walk(condition)
            if isinstance(part, ast.Attribute)
        )
        if by_condition or _asks_a_device(node):
            places.add(place(path, node))
    return sorted(places)


def text_that_runs(tree: Tree) -> list[str]:
    """Calls that run or parse text as Python. Names are compared whole, so ``re.compile`` does not count."""
    return sorted(
        f"{place(path, node)} {dotted(node.func)}"
        for path, node in tree.walk()
        if isinstance(node, ast.Call) and dotted(node.func) in RUNS_TEXT
    )


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def long_functions(tree: Tree) -> list[str]:
    return sorted(
        f"{place(path, node)} {node.name} ({function_lines(node)} lines)"
        for path, node in tree.walk()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function_lines(node) > MAX_FUNCTION_LINES
    )


def long_test_files(tree: Tree) -> list[str]:
    sizes = {path: path.read_text(encoding="utf-8").count("\n") for path in (tree.root / "tests").rglob("*.py")}
    over = ((path.relative_to(tree.root), size) for path, size in sizes.items() if size > MAX_TEST_FILE_LINES)
    return sorted(f"{path} ({size} lines)" for path, size in over)


COUNTS: dict[str, tuple[Callable[[Tree], list[str]], int]] = {
    "modules at the top of `capture/`": (modules_at_the_top, 4),
    "circles of modules": (circles, 0),
    "imports up": (imports_up, 0),
    "device tests outside `engines/`, `distributed/`, `torch_private/`": (device_tests, 0),
    "`exec`, `eval`, `ast.parse` in the library": (text_that_runs, 0),
    f"functions over {MAX_FUNCTION_LINES} lines": (long_functions, 0),
    f"test files over {MAX_TEST_FILE_LINES} lines": (long_test_files, 0),
}
"""What is counted, and how many there may be."""


def main() -> int:
    tree = Tree()
    over = []
    print("| counted | found | at most |\n|---|---|---|")
    for name, (count, limit) in COUNTS.items():
        places = count(tree)
        print(f"| {name} | {len(places)} | {limit} |")
        over += [f"{name}: {place}" for place in places] if len(places) > limit else []
    print("\n".join(over), file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
