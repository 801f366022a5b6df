"""Tensors in an object that the caller sets in Python state before each call are inputs of replays."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest
import torch
from attrs import frozen

from capture import CaptureWarning, capture, mark_step_begin, recordings
from tests.support.world_state import digest
from tests.support.writes import bits
from tests.support.writes import fresh as fresh

CALLS = 12
PRELUDE = """
import contextlib, contextvars, threading, types
from dataclasses import dataclass, field
import torch
from torch import nn

@dataclass
class Context:
    pos: object = None
    k: int = 1
    out: list = field(default_factory=list)

CTX = None
"""


@frozen
class Kind:
    """``setting``: has the next call's context, ``c``; ``body``: of the captured function, which gets ``x``;
    ``around``: the call; ``replays``: at least as many of twelve calls."""

    body: str
    setting: str = "global CTX\n    CTX = c"
    setup: str = ""
    make: str = "Context(torch.full((4,), float(i)), 2)"
    around: str = "return m(x)"
    replays: int = 4

    def text(self) -> str:
        """The program."""
        body, around = "\n    ".join(self.body.split("\n")), "\n    ".join(self.around.split("\n"))
        return f"""{PRELUDE}
{self.setup}
def m(x):
    {body}
def set_context(c):
    {self.setting}
def step(m, x, i):
    c = {self.make}
    set_context(c)
    {around}
"""


_READ = "return torch.relu(x) + CTX.pos * CTX.k"
KINDS: dict[str, Kind] = {
    "global": Kind(_READ),
    "read by a helper": Kind("return layer(x) * 2", setup="def layer(x): return x + get().pos\ndef get(): return CTX"),
    "set to nothing after": Kind(_READ, around="try: return m(x)\nfinally: set_context(None)"),
    "another kind at times": Kind(_READ, make="Context(torch.full((4,), float(i)), 2 + i % 2)"),
    "another shape at times": Kind(
        "return torch.relu(x) + CTX.pos.sum()", make="Context(torch.full((2 + i % 2,), float(i)))", replays=2,
    ),
    "dict": Kind("return x * CTX['k'] + CTX['pos']", make="{'pos': torch.full((4,), float(i)), 'k': 2}"),
    "namespace": Kind(_READ, make="types.SimpleNamespace(pos=torch.full((4,), float(i)), k=2)"),
    "plain values alone": Kind("return torch.relu(x) * CTX.k", make="Context(None, 2)"),
    "nested": Kind(
        "return x + CTX['a'].pos + CTX['b'].pos", make="dict.fromkeys('ab', Context(torch.full((4,), float(i))))",
    ),
    "attribute": Kind("return x + E.meta.pos", "E.meta = c", "E = types.SimpleNamespace(meta=None)"),
    "attribute of a class": Kind("return x + E.meta.pos", "E.meta = c", "class E: meta = None"),
    "attribute of a module": Kind("return E(x) + E.meta.pos", "E.meta = c", "E = nn.Identity(); E.meta = None"),
    "context variable": Kind("return x + V.get().pos", "V.set(c)", "V = contextvars.ContextVar('V')"),
    "thread-local": Kind("return x + T.ctx.pos", "T.ctx = c", "T = threading.local()"),
    "closure cell": Kind(
        "return inner(x)", "put(c)",
        "def make():\n    ctx = None\n    def put(c):\n        nonlocal ctx\n        ctx = c\n"
        "    return (lambda x: x + ctx.pos), put\ninner, put = make()",
    ),
    "item": Kind("return x + R['now'].pos", "R['now'] = c", "R = {'other': 3}"),
    "stack": Kind(
        "return x + S[-1].pos", "S.append(c)", "S = []", around="try: return m(x)\nfinally: S.pop()",
    ),
    "written": Kind(
        "CTX.pos.add_(1)\nCTX.k += 1\nCTX.out.append(x.sum())\nCTX.last = x * 2\nreturn x + CTX.pos",
        around="return m(x), CTX.pos, CTX.k, CTX.out, CTX.last",
    ),
    "handed back": Kind("return CTX.pos, x + CTX.pos", around="a, b = m(x)\nreturn a is CTX.pos, b"),
    "argument, too": Kind("return x + CTX.pos", make="Context(x)"),
    "raises at times": Kind(
        "if CTX.k == 0: raise ValueError('k')\nreturn x + CTX.pos",
        make="Context(torch.full((4,), float(i)), int(i != 8))",
        around="try: return m(x)\nexcept ValueError as error: return str(error)", replays=3,
    ),
    "two in turn": Kind(_READ, setup="BOTH = [Context(torch.full((4,), float(n))) for n in (1, 2)]",
                        make="BOTH[i // 3 % 2]"),
    "set by the body": Kind(
        "global CTX\nCTX = Context(x * 2)\nreturn layer(x)", "pass", "def layer(x): return x + CTX.pos", replays=0,
    ),
}  # fmt: skip


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a module among the imported ones: dataclasses ask for theirs."""

    def add(kind: Kind) -> Any:
        name = f"user_code_{len(sys.modules)}"
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(kind.text(), f"<{name}>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
        return module

    return add


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", KINDS)
def test_a_context_is_an_input(name: str, named: Any) -> None:
    kind = KINDS[name]
    eager, mine = named(kind), named(kind)
    captured = capture(mine.m)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for number in range(CALLS):
            x = torch.arange(4.0) - number
            expected = eager.step(eager.m, x.clone(), number)
            mark_step_begin()
            assert digest(mine.step(captured, x, number)) == digest(expected), (name, number)
    assert recordings(captured).replays >= kind.replays, recordings(captured)


def test_what_was_there_is_there_again(named: Any) -> None:
    module = named(KINDS["global"])
    captured = capture(module.m)
    for number in range(CALLS):
        module.step(captured, torch.arange(4.0), number)
        assert module.CTX.pos.tolist() == [float(number)] * 4
    with pytest.raises(TypeError):
        module.step(captured, None, 1)  # no tensor
    assert bits(module.CTX.pos) == bits(torch.ones(4))


def test_a_context_of_a_training_step(named: Any) -> None:
    text = Kind(
        "loss = (net(x) * CTX.pos).square().mean()\nloss.backward()\nopt.step()\nopt.zero_grad()\nreturn loss.detach()",
        setup="torch.manual_seed(0); net = nn.Linear(4, 4); opt = torch.optim.SGD(net.parameters(), lr=0.1)",
    )
    with torch.enable_grad():
        eager, mine = named(text), named(text)
        captured = capture(mine.m)
        for number in range(CALLS):
            x = torch.arange(8.0).view(2, 4) / 8
            assert bits(mine.step(captured, x, number)) == bits(eager.step(eager.m, x, number)), number
            assert bits(mine.net.weight.detach()) == bits(eager.net.weight.detach())
    assert recordings(captured).replays >= 4


@pytest.mark.parametrize("at_front", [False, True])
def test_a_window_of_what_calls_gave_holds_what_they_gave(at_front: bool) -> None:
    """The body replaces members of a list whose length stays the same: after a replay it holds each call's values."""
    window: list[tuple[torch.Tensor, torch.Tensor]] = []

    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x * 2) + 1
        window.insert(0 if at_front else len(window), (x, y))
        if len(window) > 3:
            window.pop(-1 if at_front else 0)
        return y

    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for number in range(22):
            x = torch.full((3,), float(number))
            body(x)
            given.append((x, torch.tanh(torch.full((3,), float(number)) * 2) + 1))
            latest = given[-3:][::-1] if at_front else given[-3:]
            for (kept, result), (mine, expected) in zip(window, latest, strict=True):
                assert kept is mine
                assert torch.equal(result, expected)
