"""The architecture, held by the syntax trees of the files: who may import whom, who may say ``torch._``, sizes."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "capture"
CHECKED_FOLDERS = ("capture", "tests", "examples", "benchmarks")

# Stages in the order of the flow: a module imports from its own stage and from earlier ones, never from later ones.
# A package (``rules``, ``backends``) is one unit. ``__init__`` is ``capture`` itself.
STAGES: tuple[frozenset[str], ...] = tuple(
    frozenset(stage.split())
    for stage in (
        "_errors _facts _annotate _findings rules _plan _compile _compare _report",
        "_arrays _config _events _fast _progress _lock _replaced",
        (
            "_torch_private _torch_private_aoti _torch_private_backward _torch_private_compile _torch_private_cuda "
            "_torch_private_distributed _torch_private_donated _torch_private_dynamo _torch_private_flags "
            "_torch_private_layout _torch_private_modes _torch_private_nodes _torch_private_operators "
            "_torch_private_subclass"
        ),
        (
            "_profile _containers _bind _ambient _named _places _state _changes _skeleton _restore _call _where "
            "_collectives _operators _native_facts"
        ),
        "_attribute_reads _host_reads _host_random _constants _syncs _generators _tensors _unkeyed",
        "_notes _higher_order _packages _dropped _observe _watched _gradients _untold _describe _leaves",
        "_follow _optimizers",
        "backends",
        "_store _key_text",
        (
            "_copies _deposit _outputs _plan_outputs _liveness _step _modules _node _moving _tree _trees "
            "_module_checks _checks _seeds _program _groups"
        ),
        (
            "_remarks _entry _parked _inputs _ranks _autograd _shortcut _difference _planning _results _instead "
            "_record _verify _rebind _runtime _warm _cases"
        ),
        "_decorate _api",
        "__init__ __main__ testing integrations",
    )
)
STAGE_OF = {unit: index for index, stage in enumerate(STAGES) for unit in stage}

# These open on a laptop without torch.
PURE = frozenset(["_annotate", "_errors", "_facts", "_findings", "_plan", "_compile", "_compare", "_report", "rules"])

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # without the docstring: words for the reader are not what makes a function long


# ---------------------------------------------------------------------------------------------- reading the sources


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def unit_of(path: Path) -> str:
    """``capture/_plan.py`` -> ``_plan``; ``capture/rules/cg101_x.py`` -> ``rules``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def is_type_checking(test: ast.expr) -> bool:
    name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
    return name == "TYPE_CHECKING"


def imports(tree: ast.AST, *, typing_only: bool = True) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports, also those inside functions; without the ``TYPE_CHECKING`` blocks if not ``typing_only``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and is_type_checking(node.test) and not typing_only:
            for other in node.orelse:
                yield from imports(ast.Module([other], []), typing_only=False)
        else:
            yield from imports(node, typing_only=typing_only)


def imported_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names this statement may load: ``from a import b`` may load ``a`` and ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or ""
    return [module, *(f"{module}.{alias.name}" for alias in node.names)]


def imported_units(node: ast.Import | ast.ImportFrom, units: frozenset[str]) -> set[str]:
    """The units of ``capture`` that this statement names."""
    found: set[str] = set()
    if isinstance(node, ast.ImportFrom) and node.module == "capture":
        return {alias.name if alias.name in units else "__init__" for alias in node.names}
    for name in imported_modules(node):
        parts = name.split(".")
        if parts[0] == "capture":
            found.add(parts[1] if len(parts) > 1 else "__init__")
    return found


def unit_files() -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in sources("capture"):
        files.setdefault(unit_of(path), []).append(path)
    return files


def import_graph() -> dict[str, dict[str, str]]:
    """unit -> imported unit -> first place, ``TYPE_CHECKING`` blocks left out."""
    files = unit_files()
    units = frozenset(files)
    graph: dict[str, dict[str, str]] = {unit: {} for unit in files}
    for unit, paths in files.items():
        for path in paths:
            for node in imports(parse(path), typing_only=False):
                for other in imported_units(node, units) - {unit}:
                    graph[unit].setdefault(other, place(path, node))
    return graph


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
    found: list[tuple[ast.AST, str]] = []
    names = torch_names(tree)
    for statement in imports(tree):
        found.extend(
            (statement, module)
            for module in dict.fromkeys(imported_modules(statement))
            if module.split(".")[0] == "torch" and any(map(is_private, module.split(".")))
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            parts = dotted(node.value)
            if parts and parts[0] in names:
                found.append((node, ".".join([names[parts[0]], *parts[1:], node.attr])))
        elif isinstance(node, ast.Call):
            called = (dotted(node.func) or [""])[-1]
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if called in ("import_module", "__import__", "find_spec"):
                found.extend((node, text) for text in texts if re.match(r"torch(\.\w+)*\._", text))
            elif called in ("getattr", "hasattr", "setattr", "delattr") and node.args:
                parts = dotted(node.args[0])
                if parts and parts[0] in names:
                    found.extend((node, f"{'.'.join(parts)}.{text}") for text in texts if is_private(text))
    return found


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
        "from capture import _torch_private\n_torch_private.probe()",
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
        if not unit_of(path).startswith("_torch_private")
        for node, name in private_torch_names(parse(path))
    ]
    assert not found, "only capture/_torch_private*.py may name what is private in torch:\n  " + "\n  ".join(found)


# ---------------------------------------------------------------------------------------------------- who imports whom


def test_every_module_has_its_stage() -> None:
    unplaced = sorted(set(unit_files()) - set(STAGE_OF))
    assert not unplaced, (
        f"new in capture/: {', '.join(unplaced)}. Place each in STAGES of tests/test_layout.py, at the earliest stage "
        "that holds all it imports, and in PURE if it works without torch."
    )


def test_pure_modules_never_import_torch() -> None:
    """Not at the top, not in a function, not under ``TYPE_CHECKING``, and not through another module."""
    files = unit_files()
    found = [
        f"{place(path, node)} imports torch"
        for unit in sorted(PURE & set(files))
        for path in files[unit]
        for node in imports(parse(path))
        if any(name.split(".")[0] == "torch" for name in imported_modules(node))
    ]
    graph = import_graph()
    for unit in sorted(PURE & set(graph)):
        chains = [[unit]]
        seen = {unit}
        while chains:
            chain = chains.pop()
            for other, where in graph.get(chain[-1], {}).items():
                if other not in PURE:
                    found.append(f"{where}: {' -> '.join([*chain, other])}, which may import torch")
                elif other not in seen:
                    seen.add(other)
                    chains.append([*chain, other])
    assert not found, "these stages must work without torch:\n  " + "\n  ".join(dict.fromkeys(found))


def test_imports_go_one_way() -> None:
    found = [
        f"{where}: {unit} (stage {STAGE_OF[unit]}) imports {other} (stage {STAGE_OF[other]})"
        for unit, others in import_graph().items()
        for other, where in others.items()
        if unit in STAGE_OF and other in STAGE_OF and STAGE_OF[other] > STAGE_OF[unit]
    ]
    assert not found, "a stage imports from earlier stages only:\n  " + "\n  ".join(found)


def test_modules_of_one_stage_form_no_cycle() -> None:
    graph = import_graph()
    done: set[str] = set()

    def visit(unit: str, chain: tuple[str, ...]) -> None:
        if unit in chain:
            pytest.fail("import cycle: " + " -> ".join([*chain[chain.index(unit) :], unit]))
        if unit not in done:
            for other in graph.get(unit, {}):
                visit(other, (*chain, unit))
            done.add(unit)

    for unit in graph:
        visit(unit, ())


def test_typing_only_imports_are_told_apart() -> None:
    tree = ast.parse("if TYPE_CHECKING:\n    import a\nelse:\n    import b\ntry:\n    import c\nfinally:\n    pass")
    assert [imported_modules(node) for node in imports(tree)] == [["a"], ["b"], ["c"]]
    assert [imported_modules(node) for node in imports(tree, typing_only=False)] == [["b"], ["c"]]


def test_imports_name_the_unit() -> None:
    units = frozenset({"_plan", "rules"})
    names = {
        "from capture import _plan": {"_plan"},
        "from capture import capture": {"__init__"},
        "from capture._plan import CapturePlan": {"_plan"},
        "from capture.rules import RULES": {"rules"},
        "import capture.rules.cg101_x": {"rules"},
        "import capture": {"__init__"},
        "import captured": set[str](),
    }
    for source, expected in names.items():
        node = ast.parse(source).body[0]
        assert isinstance(node, ast.Import | ast.ImportFrom)
        assert imported_units(node, units) == expected, source


# ---------------------------------------------------------------------------------------------------------------- sizes


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_files_and_functions_stay_short() -> None:
    rows: list[tuple[int, int, str]] = []
    for path in sources("capture"):
        tree = parse(path)
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        longest = max(functions, key=function_lines, default=None)
        name = f" ({longest.name}, line {longest.lineno})" if longest else ""
        lines = len(path.read_text(encoding="utf-8").splitlines())
        rows.append((lines, function_lines(longest) if longest else 0, f"{path.relative_to(ROOT)}{name}"))
    table = "\n".join(f"{lines:>6} {longest:>8}  {name}" for lines, longest, name in sorted(rows, reverse=True))
    over = [row for row in rows if row[0] > MAX_FILE_LINES or row[1] > MAX_FUNCTION_LINES]
    assert not over, (
        f"over {MAX_FILE_LINES} lines a file or {MAX_FUNCTION_LINES} a function: "
        f"{', '.join(name for _, _, name in over)}\n lines  longest\n{table}"
    )


# ------------------------------------------------------------------------------------------------------------- comments


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
BLANKET = re.compile(r"type:\s*ignore(?!\[)|noqa(?!:)")


def test_comments_promise_and_hide_nothing() -> None:
    """No unfinished work in comments (file an issue), no ``type: ignore`` or ``noqa`` without its code."""
    found = [
        f"{path.relative_to(ROOT)}:{line} {comment}"
        for path in sources(*CHECKED_FOLDERS)
        for line, comment in comments(path.read_text(encoding="utf-8"))
        if UNFINISHED.search(comment) or BLANKET.search(comment)
    ]
    assert not found, "\n  ".join(["these comments hide something:", *found])


@pytest.mark.parametrize("comment", ["# type: ignore", "# noqa", "# type:ignore  # later", "x = 1  # TODO: finish"])
def test_hiding_comments_are_recognised(comment: str) -> None:
    assert UNFINISHED.search(comment) or BLANKET.search(comment)


@pytest.mark.parametrize("comment", ["# type: ignore[attr-defined]", "# noqa: S102 - names only", "# a todo list"])
def test_honest_comments_are_not_mistaken(comment: str) -> None:
    assert not UNFINISHED.search(comment)
    assert not BLANKET.search(comment)


def has_code(tree: ast.Module) -> bool:
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in tree.body)


def test_annotations_are_never_evaluated_early() -> None:
    missing = []
    for path in sources(*CHECKED_FOLDERS):
        tree = parse(path)
        futures = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
        if has_code(tree) and not any(alias.name == "annotations" for node in futures for alias in node.names):
            missing.append(str(path.relative_to(ROOT)))
    assert not missing, f"`from __future__ import annotations` is missing in: {', '.join(missing)}"
