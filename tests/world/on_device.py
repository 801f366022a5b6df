"""Put the programs on an accelerator, although none of them names a device: as somebody would write them for one.

Tensors that a program makes get ``device=...``, arrays are moved there and back, and what is built once is built under
``torch.device``. A default device for the steps would do, too, but by a mode that every function of torch goes through:
eager code would look slower than it is.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

from typing_extensions import override

_MAKERS = {
    "arange", "as_tensor", "empty", "eye", "full", "hann_window", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
_ON_THE_HOST = {"from_numpy", "Tensor", "FloatTensor"}
_PROGRAMS = "tests.world.programs.", "tests.world.parts"


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
        elif of_torch and function.attr in _ON_THE_HOST and node.args:
            return ast.Call(ast.Attribute(node, "to", ast.Load()), [self.device], [])
        elif function.attr == "numpy" and not node.args:
            function.value = ast.Call(ast.Attribute(function.value, "cpu", ast.Load()), [], [])
        return node


class _Loader(SourceFileLoader):
    """Compiles the code anew, as cached code names no device."""

    device = ""

    @override
    def get_code(self, fullname: str) -> types.CodeType:
        moved = _Moved(self.device).visit(ast.parse(self.get_data(self.path)))
        code: types.CodeType = compile(ast.fix_missing_locations(moved), self.path, "exec")
        return code


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """The modules of programs, and what they share."""
        if not name.startswith(_PROGRAMS):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


def move_programs_to(device: str) -> None:
    """Have the steps of all programs that are imported from now on make their tensors on ``device``."""
    _Loader.device = device
    sys.meta_path.insert(0, _Finder)
