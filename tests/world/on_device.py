"""Put the programs on an accelerator, although none of them names a device: as somebody would write them for one.

Tensors that a program makes get ``device=...``, arrays are moved there and back, and what is built once is built under
``torch.device``. A default device for the steps would do, too, but by a mode that every function of torch goes through:
eager code would look slower than it is.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from typing_extensions import override

_MAKERS = {
    "arange", "as_tensor", "empty", "eye", "full", "hann_window", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
_SHARED = "tests.world.parts"


class _Moved(ast.NodeTransformer):
    """Code with the device, in the lines where it was."""

    def __init__(self, device: str) -> None:
        self.device = ast.Constant(device)

    @override
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if not isinstance(function, ast.Attribute):
            return node
        of_torch = isinstance(function.value, ast.Name) and function.value.id == "torch"
        if of_torch and function.attr in _MAKERS and all(given.arg != "device" for given in node.keywords):
            node.keywords.append(ast.keyword("device", self.device))
        elif of_torch and function.attr == "from_numpy":
            return ast.Call(ast.Attribute(node, "to", ast.Load()), [self.device], [])
        elif function.attr == "numpy" and not node.args:
            function.value = ast.Call(ast.Attribute(function.value, "cpu", ast.Load()), [], [])
        return node


def load(name: str, device: str) -> Any:
    """A module of programs, whose steps make their tensors on ``device``."""
    if _SHARED not in sys.modules:
        _load(_SHARED, device)
    return _load(name, device)


def _load(name: str, device: str) -> types.ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    module = importlib.util.module_from_spec(spec)
    moved = ast.fix_missing_locations(_Moved(device).visit(ast.parse(Path(spec.origin).read_text())))
    sys.modules[name] = module
    exec(compile(moved, spec.origin, "exec"), vars(module))  # noqa: S102 - our own file
    return module
