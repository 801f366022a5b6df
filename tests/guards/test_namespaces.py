"""Namespaces of modules that code reads as dicts."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from capture import capture, recordings
from tests.support.device import DEVICE

SOURCE = """
scale, other = 2.0, 3.0

def by_name(x, name):
    return x * globals()[name]

def by_get(x, name):
    return x * globals().get(name)

def whole(x, name):
    space = globals()
    return x * space[name]
"""


def _module() -> Any:
    made: Any = types.ModuleType("namespaces_of_a_test")
    exec(compile(SOURCE, made.__name__, "exec"), vars(made))  # noqa: S102 - the source above
    sys.modules[made.__name__] = made
    return made


@pytest.mark.parametrize("name", ["by_name", "by_get", "whole"])
def test_globals_by_names_that_are_computed(name: str) -> None:
    module = _module()
    body, x = capture(getattr(module, name)), torch.ones(3, device=DEVICE)
    with torch.no_grad():
        for value in (2.0, 5.0):
            module.scale = value
            for _ in range(5):
                assert body(x, "scale")[0].item() == value
    assert recordings(body).replays


def test_a_namespace_that_generated_code_holds_is_read_by_names() -> None:
    """Dynamo's generated guards hold such a namespace, through which a module's loader, and by that all of a pytest
    session, can be reached."""
    module = _module()
    module.__loader__ = {number: [number] for number in range(60_000)}
    space: dict[str, Any] = {"held": vars(module)}
    exec("def look(x):\n    return x * held['scale']", space)  # noqa: S102 - as above
    body, x = capture(lambda x: space["look"](x) + 1), torch.ones(3, device=DEVICE)
    with torch.no_grad():
        for value in (2.0, 5.0):
            module.scale = value
            for _ in range(5):
                assert body(x)[0].item() == value + 1
    assert recordings(body).replays >= 6
