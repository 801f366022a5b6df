"""torch's compiler is imported before the first watched run; what that raises is the body's business."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from capture import capture
from capture.torch_private import monkeypatch as compiler
from tests.support.decorated import fresh as fresh


@pytest.mark.parametrize("error", [ImportError, RuntimeError, AttributeError, SystemError])
def test_an_import_that_fails_ends_no_call(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    original, asked = importlib.import_module, list[str]()

    def import_module(name: str, package: str | None = None) -> Any:
        if name == "torch._dynamo":
            asked.append(name)
            raise error("stopped in the middle")
        return original(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    compiler.import_compiler.cache_clear()
    try:
        captured, x = capture(lambda x: torch.relu(x) * 2), torch.ones(3)
        for _ in range(4):
            assert captured(x).tolist() == [2.0, 2.0, 2.0]
    finally:
        compiler.import_compiler.cache_clear()
    assert asked == ["torch._dynamo"]
