"""``import torch_capture`` gives the module ``capture``, under the name that the distribution has.

An old package on the index has the import name ``capture``, too. Where both are installed, one hides the other; this
name is ours alone. It is the same module, with the same objects: ``torch_capture.testing is capture.testing``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from capture import *  # noqa: F403 - what type checkers see here is what is there


class _SameModule(Loader):
    """Gives a module that is there under its own name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just put that of the other name there

    def get_code(self, _name: str) -> CodeType | None:
        """For ``python -m torch_capture``."""
        spec = importlib.util.find_spec(self._name)
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(self._name)


class _Finder(MetaPathFinder):
    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        _, found, rest = fullname.partition("torch_capture.")
        own = f"capture.{rest}"
        if not found or not fullname.startswith("torch_capture.") or importlib.util.find_spec(own) is None:
            return None
        return ModuleSpec(fullname, _SameModule(own))


if not any(type(one).__name__ == "_Finder" and type(one).__module__ == __name__ for one in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
sys.modules[__name__] = importlib.import_module("capture")
