"""Objects that note what is asked of them: a captured function asks them for what the eager one asks them for."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from capture import capture, recordings
from tests.guards.kinds import HEAD
from tests.support.device import DEVICE

CLASSES = """
log = []
class Fallback:
    def __init__(self, **kept): object.__setattr__(self, "kept", kept)
    def __getattr__(self, name):
        log.append(name)
        return self.kept[name]
class Every:
    def __init__(self, **kept): object.__getattribute__(self, "__dict__").update(kept)
    def __getattribute__(self, name):
        log.append(name)
        return object.__getattribute__(self, name)
class Asked:
    def __init__(self, v): self._v = v
    @property
    def v(self):
        log.append("v")
        return self._v
    @property
    def __class__(self):
        log.append("class")
        return Asked
    def __bool__(self):
        log.append("bool")
        return self._v > 2
    def __len__(self):
        log.append("len")
        return 2
    def __eq__(self, other):
        log.append("eq")
        return self._v == other._v
    __hash__ = object.__hash__
    def __copy__(self):
        log.append("copy")
        return Asked(self._v)
class Setting:
    def __setattr__(self, name, value):
        log.append(name)
        object.__setattr__(self, name, value)
class Table(dict):
    def __getitem__(self, key):
        log.append("getitem")
        return dict.__getitem__(self, key)
    def __setitem__(self, key, value):
        log.append("setitem")
        dict.__setitem__(self, key, value)
    def __iter__(self):
        log.append("iter")
        return dict.__iter__(self)
    def __len__(self):
        log.append("len")
        return dict.__len__(self)
class Meta(type):
    def __instancecheck__(cls, other):
        log.append("instance")
        return True
    def __subclasscheck__(cls, other):
        log.append("subclass")
        return True
class Made(metaclass=Meta):
    v = 2.0
class Layer(nn.Module):
    def __getattr__(self, name):
        log.append(name)
        return super().__getattr__(name)
    def forward(self, x):
        return x * self.weight
layer = Layer()
layer.weight = nn.Parameter(torch.ones(3))
"""
CASES = {
    "__getattr__": ("held = Fallback(v=2.0)", "held.v", "held.kept['v'] = 3.0"),
    "__getattribute__": ("held = Every(v=2.0)", "held.v", "held.v = 3.0"),
    "property": ("held = Asked(2.0)", "held.v", "held._v = 3.0"),
    "__bool__": ("held = Asked(2.0)", "1.0 if held else 2.0", "held._v = 3.0"),
    "__len__": ("held = Asked(2.0)", "len(held)", "Asked.__len__ = lambda self: 4"),
    "__eq__": ("held, other = Asked(2.0), Asked(2.0)", "1.0 if held in [other] else 2.0", "held._v = 3.0"),
    "__copy__": ("held = Asked(2.0)", "copy.copy(held)._v", "held._v = 3.0"),
    "__setattr__": ("held = Setting()\nheld.v = 2.0", "(setattr(held, 'w', 1.0), held.v)[1]", "held.v = 3.0"),
    "__getitem__": ("held = Table(v=2.0)", "held['v']", "held['v'] = 3.0"),
    "__setitem__": ("held = Table(v=2.0)", "(held.__setitem__('w', 1.0), dict.get(held, 'v'))[1]", "held['v'] = 3.0"),
    "a metaclass": ("held = Made()", "held.v if isinstance(1, Made) else 0.0", "Made.v = 3.0"),
    "a module": ("held = layer", "held(x).sum()", "held.weight.data.fill_(2.0)"),
}


def _world(setup: str, body: str) -> Any:
    made: Any = types.ModuleType("reads_that_users_see")
    sys.modules[made.__name__] = made
    exec(compile(f"{HEAD}{CLASSES}\n{setup}\n{body}", made.__name__, "exec"), vars(made))  # noqa: S102 - as above
    made.log.clear()
    return made


@pytest.mark.one_in(4)
@pytest.mark.parametrize("is_used", [True, False], ids=["used", "near"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_is_asked(name: str, is_used: bool) -> None:
    setup, expression, change = CASES[name]
    near = "box = Box(v=2.0, held=held)\nitems = [held]\ndef body(x):\n    items\n    return x * box.v\n"
    body = f"def body(x):\n    return x * ({expression})\n" if is_used else near
    worlds = [_world(setup, body) for _ in range(2)]
    captured, x = capture(worlds[1].body), torch.arange(1.0, 4.0, device=DEVICE)
    with torch.no_grad():
        for source in ("", change if is_used else "box.v = 3.0"):
            for world in worlds:
                exec(source, vars(world))  # noqa: S102 - as above
            for _ in range(5):
                assert torch.equal(captured(x), worlds[0].body(x))
                assert worlds[1].log == worlds[0].log
    assert recordings(captured).replays
